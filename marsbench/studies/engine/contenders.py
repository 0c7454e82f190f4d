"""Who races on the engine's page, and who is held against AR there on every prompt."""

from __future__ import annotations

from marsbench.presets import Preset
from marsbench.racing.grid import Contender, Grid

_BATCH = 32  # prompts decoded at once where only tokens count


def _verified(layout: str, window: int, threshold: float | None = None) -> Contender:
    options = {"layout": layout, "block_size": window}
    name = f"mars-verified, {layout}, window {window}" + (f", tau = {threshold:g}" if threshold is not None else "")
    return Contender(name, "mars", "mars-verified", options, threshold)


AR = Contender("ar", "mars", "ar", {})
MARS = Contender("mars", "mars", "mars", {"block_size": 4}, 0.95)
SPECULATIVE = Contender("speculative", "mars", "speculative", {"draft_length": 4}, draft="draft_ar_sft")
PROMPT_LOOKUP = Contender("prompt-lookup", "mars", "prompt-lookup", {"draft_length": 4})
RACE = (
    Contender("hf-generate", "mars", "hf-generate", {}),
    AR,
    MARS,
    *[_verified("groups", window) for window in (2, 3, 4)],
    _verified("groups", 4, 0.3),
    _verified("linear", 2),
    *[_verified("linear", window, 0.5) for window in (3, 4, 5)],
    SPECULATIVE,
    PROMPT_LOOKUP,
)
EXACT = (
    MARS,  # not lossless: what the verified ones are held against
    _verified("groups", 4),
    _verified("groups", 8),
    _verified("linear", 4, 0.5),
    SPECULATIVE,
    Contender(
        "speculative-mars-draft", "mars", "speculative", {"draft_length": 4, "draft_method": "mars"}, None, "draft_mars"
    ),
    Contender("medusa-chain", "medusa", "medusa", {"tree_width": 1}),
    Contender("medusa-tree", "medusa", "medusa", {"tree_width": 3}),
    Contender("jacobi", "mars", "jacobi", {"block_size": 4}),
    PROMPT_LOOKUP,
    Contender("mars-speculative", "mars", "mars-speculative", {"draft_method": "mars"}, 0.95, "draft_mars"),
)


def race_grid(scale: Preset) -> Grid:
    """As much as decides the page's numbers, three batches of the largest size; little where few questions are."""
    if scale.in_seconds:
        return Grid(RACE, (1, 4), prompts=12, repeats=2, positions=0, profiled=True)
    return Grid(RACE, (1, 4, 8, 16, 32), prompts=96, repeats=7, positions=0, profiled=True)


def exactness_grid(scale: Preset) -> Grid:
    """Every question, decoded once."""
    every = (scale.questions or 400) * len(scale.benchmarks)
    return Grid((AR, *EXACT), (_BATCH,), prompts=every, repeats=0, positions=0)
