"""Whose steps are profiled for the engine's page, and who is held against AR there on every prompt."""

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
PROFILED = (AR, MARS, _verified("groups", 4), _verified("linear", 4, 0.5))
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


def profiled_grid(scale: Preset) -> Grid:
    """Where the time of a step goes, at two batch sizes; who is how fast is the sweep's to say."""
    sizes, prompts = ((1, 4), 12) if scale.in_seconds else ((1, 16), 48)
    return Grid(PROFILED, sizes, prompts=prompts, repeats=2, positions=0, profiled=True)


def exactness_grid(scale: Preset) -> Grid:
    """Every question, decoded once."""
    every = (scale.questions or 400) * len(scale.benchmarks)
    return Grid((AR, *EXACT), (_BATCH,), prompts=every, repeats=0, positions=0)
