"""Who races on the page of compiled steps, on which checkpoints, with how much effort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from marsbench.presets import Preset
from marsbench.racing.grid import Entry
from marsbench.studies.engine.contenders import Effort

_EAGER = (
    Entry("ar", "mars", "ar", {}),
    Entry("mars", "mars", "mars", {"block_size": 4}, 0.95),
    Entry("mars-verified, linear", "mars", "mars-verified", {"layout": "linear", "block_size": 4}, 0.5),
    Entry("mars-verified, groups", "mars", "mars-verified", {"layout": "groups", "block_size": 4}),
)
METHODS = tuple(entry.name for entry in _EAGER)
REFERENCE = "hf-generate"
RACE = (
    Entry(REFERENCE, "mars", REFERENCE, {}),
    *_EAGER,
    *[replace(entry, name=f"{entry.name}, compiled", compiled=True) for entry in _EAGER],
)


@dataclass(frozen=True)
class RandomModel:
    """A Llama of random weights: what its steps cost depends on its shape alone."""

    name: str
    config: dict[str, Any]
    max_new_tokens: int
    positions: int  # of the widest step that is timed
    compiled_at: tuple[int, ...]  # batch sizes


# The weights do not fit into a CPU's caches: a step over one token takes the time to read them.
MEMORY_BOUND = RandomModel(
    "random weights in the shape of SmolLM2-135M",
    {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    max_new_tokens=32,
    positions=16,
    compiled_at=(1, 4),
)  # fmt: skip
_SMALL = RandomModel(
    "random weights, two layers",
    {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
    max_new_tokens=4,
    positions=1,
    compiled_at=(),
)  # fmt: skip


def effort_at(scale: Preset) -> Effort:
    """As much as decides the page's numbers; little at the scale of the tests."""
    if scale.scale == "micro":
        return Effort(batch_sizes=(1,), repeats=2, prompts=6)
    return Effort(batch_sizes=(1, 4, 8, 16), repeats=7, prompts=48)


def random_model_at(scale: Preset) -> RandomModel:
    """The model of random weights that the page times."""
    return _SMALL if scale.scale == "micro" else MEMORY_BOUND


def backend_at(scale: Preset) -> str:
    """What compiles: at the scale of the tests, steps are traced and run as they were traced, without a compiler."""
    return "eager" if scale.scale == "micro" else "inductor"
