"""The scales a table can be reproduced at: model shape, data, budgets and limits, one YAML file each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from marsbench.errors import unknown_name


@dataclass(frozen=True)
class Budget:
    """How long and how hard a stage trains."""

    steps: int
    batch_size: int  # sequences per step
    learning_rate: float  # peak; linear warm-up, then cosine to zero


@dataclass(frozen=True)
class Preset:
    """Everything that a scale fixes."""

    scale: str
    summary: str
    model: dict[str, Any]  # Qwen2Config keywords
    draft_model: dict[str, Any]  # the same for the draft model, about a quarter of the parameters
    vocabulary_size: int  # upper bound for the world's tokenizer
    pretraining: Budget  # the base stage
    finetuning: Budget  # every other stage; `ar_sft_2x` takes twice the steps
    benchmarks: tuple[str, ...]
    questions: int | None  # per benchmark; None = all there are
    max_new_tokens: int
    batch_size: int  # rows decoded at once
    memory_gib: float  # free memory that a full reproduction needs, GiB
    disk_gib: float  # free disk that it needs, GiB


def scales() -> list[str]:
    """The names of all presets."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


@cache
def preset(scale: str) -> Preset:
    """The preset of a scale, or a `UserError` that names the scales there are."""
    if scale not in scales():
        raise unknown_name("scale", scale, scales())
    values = yaml.safe_load(resources.files(__package__).joinpath(f"{scale}.yaml").read_text(encoding="utf-8"))
    return Preset(
        scale=scale,
        pretraining=Budget(**values.pop("pretraining")),
        finetuning=Budget(**values.pop("finetuning")),
        benchmarks=tuple(values.pop("benchmarks")),
        **values,
    )
