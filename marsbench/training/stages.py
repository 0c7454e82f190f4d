"""The training stages: what each starts from, what it learns, and the recipe that determines its checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from marsbench.errors import UserError, unknown_name
from marsbench.presets import Budget, Preset

Objective = Literal["ar", "mars", "block_diffusion", "medusa"]


@dataclass(frozen=True)
class Stage:
    """One step of the training path."""

    summary: str
    parent: str | None  # the stage it continues from; None = random weights
    objective: Objective
    plain_text: bool = False  # learns from the world's plain text instead of conversations
    passes: int = 1  # times over the data
    ar_weight: float = 1.0  # weight of the AR term in the MARS loss
    draft: bool = False  # trains the scale's small model, the draft of speculative decoding


STAGES: dict[str, Stage] = {
    "base": Stage("next-token prediction on plain text, from random weights", None, "ar", plain_text=True),
    "ar_sft": Stage("AR fine-tuning on conversations", "base", "ar"),
    "ar_sft_2x": Stage("AR fine-tuning, twice as long (the compute-matched control)", "base", "ar", passes=2),
    "block_diffusion": Stage("block diffusion, continued from AR SFT", "ar_sft", "block_diffusion"),
    "mars_no_sft": Stage("MARS without the AR term (clean ablation), from AR SFT", "ar_sft", "mars", ar_weight=0.0),
    "mars": Stage("MARS, continued from AR SFT", "ar_sft", "mars"),
    "medusa": Stage("Medusa heads on the frozen AR SFT model", "ar_sft", "medusa"),
    "draft_base": Stage("`base` of the small draft model", None, "ar", plain_text=True, draft=True),
    "draft_ar_sft": Stage("AR fine-tuning of the draft model", "draft_base", "ar", draft=True),
    "draft_mars": Stage("MARS, continued from the draft's AR SFT", "draft_ar_sft", "mars", draft=True),
}
BLOCK_SIZES = (4, 8, 16)
BLOCKWISE: tuple[Objective, ...] = ("mars", "block_diffusion")  # objectives that show the model masks, block by block


def stage(name: str) -> Stage:
    """A stage by name, or a `UserError` that names the stages there are."""
    if name not in STAGES:
        raise unknown_name("stage", name, list(STAGES))
    return STAGES[name]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a checkpoint; its hash is the checkpoint's key."""

    scale: str
    stage: str
    block_size: int | None  # None for stages without blocks
    seed: int
    objective: Objective
    plain_text: bool
    passes: int
    ar_weight: float
    budget: Budget
    model: dict[str, Any]
    vocabulary_size: int
    parent: str | None  # key of the parent's recipe
    source: str  # hash of the code that makes the data and the loss
    torch: str
    transformers: str

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """A folder name that tells a reader what it holds."""
        blocks = f"-b{self.block_size}" if self.block_size else ""
        return f"{self.stage}{blocks}-{self.key}"

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.budget.steps * self.passes


def recipe(scale: Preset, stage_name: str, *, block_size: int = 4, seed: int = 0) -> Recipe:
    """The recipe of a stage at a scale; `block_size` is dropped where the objective has no blocks."""
    chosen = stage(stage_name)
    if block_size < 2:
        raise UserError(f"block size {block_size} is too small to train", fix=f"choose one of {BLOCK_SIZES}")
    has_blocks = chosen.objective in BLOCKWISE
    return Recipe(
        scale=scale.scale,
        stage=stage_name,
        block_size=block_size if has_blocks else None,
        seed=seed,
        objective=chosen.objective,
        plain_text=chosen.plain_text,
        passes=chosen.passes,
        ar_weight=chosen.ar_weight,
        budget=scale.pretraining if chosen.plain_text else scale.finetuning,
        model=scale.draft_model if chosen.draft else scale.model,
        vocabulary_size=scale.vocabulary_size,
        parent=recipe(scale, chosen.parent, seed=seed).key if chosen.parent else None,
        source=_source_hash(chosen.objective),
        torch=metadata.version("torch"),
        transformers=metadata.version("transformers"),
    )


def lineage(stage_name: str) -> list[str]:
    """The stages to train for a stage, parents first, itself last."""
    parent = stage(stage_name).parent
    return [*(lineage(parent) if parent else []), stage_name]


@cache
def _source_hash(objective: Objective) -> str:
    """Hash of the files that decide what is learned: the world, and the training code that the objective runs."""
    package = Path(__file__).resolve().parent.parent
    names = ["data", "objectives", "tokenizer", "trainer", "visibility", *(["medusa"] if objective == "medusa" else [])]
    files = sorted([*(package / "world").glob("*.py"), *(package / "training" / f"{name}.py" for name in names)])
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
