"""Who stands on the page of compiled steps: of the sweep, and on random weights that memory bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from marsbench.presets import Preset
from marsbench.racing.grid import COMPILED_AR, Contender, Grid, called, read_grid, shipped_grid

EAGER = (
    Contender("ar", "mars", "ar", {}),
    Contender("mars, tau = 0.95", "mars", "mars", {"block_size": 4}, 0.95),
    Contender("mars-verified, linear, window = 4", "mars", "mars-verified", {"layout": "linear", "block_size": 4}, 0.5),
    Contender("mars-verified, groups, window = 4", "mars", "mars-verified", {"layout": "groups", "block_size": 4}),
)
COMPILED = tuple(replace(one, name=called(one.name, True), compiled=True) for one in EAGER)
REFERENCE = "hf-generate"
# Llamas of random weights by their names: what a step costs depends on the shape alone. The weights of the first do not
# fit into a CPU's caches: a step over one token takes the time to read them. The other is for the scale of the tests.
MEMORY_BOUND, _SMALL = "random weights in the shape of SmolLM2-135M", "random weights, two layers"
RANDOM: dict[str, dict[str, Any]] = {
    MEMORY_BOUND: {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    _SMALL: {
        "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def trained_grid(scale: Preset) -> Grid:
    """Contenders of the scale's own sweep, whose rows they share; at a scale for tests few, and no compiler there."""
    contenders = (Contender(REFERENCE, "mars", REFERENCE, {}), *EAGER, *COMPILED)
    if scale.in_seconds:
        return Grid(contenders, (1,), prompts=6, repeats=2, positions=0, backend="eager")
    swept, names = read_grid(shipped_grid(scale.scale)), {one.name for one in contenders}
    return replace(swept, contenders=tuple(one for one in swept.contenders if one.name in names), positions=0)


def random_grid(scale: Preset) -> Grid:
    """`ar`, eager and compiled, against `generate` on random weights, and what an eager step costs by its shape."""
    small = scale.in_seconds
    stage = _SMALL if small else MEMORY_BOUND
    ar = Contender("ar", stage, "ar", {})
    contenders = (Contender(REFERENCE, stage, REFERENCE, {}), ar, replace(ar, name=COMPILED_AR, compiled=True))
    few = Grid(contenders, (1,), prompts=2, repeats=2, max_new_tokens=4, positions=1, backend="eager")
    many = Grid(contenders, (1, 4, 8, 16), prompts=16, repeats=7, max_new_tokens=32, positions=16)
    return replace(few if small else many, benchmarks=(scale.benchmarks[-1],))
