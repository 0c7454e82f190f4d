"""Who races on the engine's page, who is held against AR there, and with how much effort."""

from __future__ import annotations

from dataclasses import dataclass

from marsbench.presets import Preset
from marsbench.racing.grid import Entry


@dataclass(frozen=True)
class Effort:
    """How much to race."""

    batch_sizes: tuple[int, ...]
    repeats: int
    prompts: int  # from all benchmarks alike; at least three batches

    def prompts_at(self, batch_size: int) -> int:
        """Prompts to race at a batch size."""
        return max(self.prompts, 3 * batch_size)


def effort_at(scale: Preset) -> Effort:
    """As much as decides the page's numbers; little at the scale of the tests."""
    if scale.scale == "micro":
        return Effort(batch_sizes=(1, 4), repeats=2, prompts=12)
    return Effort(batch_sizes=(1, 4, 8, 16, 32), repeats=7, prompts=48)


def _verified(layout: str, window: int, threshold: float | None = None) -> Entry:
    options = {"layout": layout, "block_size": window}
    name = f"mars-verified, {layout}, window {window}" + (f", tau = {threshold:g}" if threshold is not None else "")
    return Entry(name, "mars", "mars-verified", options, threshold)


RACE = (
    Entry("hf-generate", "mars", "hf-generate", {}),
    Entry("ar", "mars", "ar", {}),
    Entry("mars", "mars", "mars", {"block_size": 4}, 0.95),
    *[_verified("groups", window) for window in (2, 3, 4)],
    _verified("groups", 4, 0.3),
    _verified("linear", 2),
    *[_verified("linear", window, 0.5) for window in (3, 4, 5)],
    Entry("speculative", "mars", "speculative", {"draft_length": 4}, draft="draft_ar_sft"),
    Entry("prompt-lookup", "mars", "prompt-lookup", {"draft_length": 4}),
)
EXACT = (
    Entry("mars", "mars", "mars", {"block_size": 4}, 0.95),  # not lossless: what the verified ones are held against
    _verified("groups", 4),
    _verified("groups", 8),
    _verified("linear", 4, 0.5),
    Entry("speculative", "mars", "speculative", {"draft_length": 4}, draft="draft_ar_sft"),
    Entry(
        "speculative-mars-draft", "mars", "speculative", {"draft_length": 4, "draft_method": "mars"}, None, "draft_mars"
    ),
    Entry("medusa-chain", "medusa", "medusa", {"tree_width": 1}),
    Entry("medusa-tree", "medusa", "medusa", {"tree_width": 3}),
    Entry("jacobi", "mars", "jacobi", {"block_size": 4}),
    Entry("prompt-lookup", "mars", "prompt-lookup", {"draft_length": 4}),
    Entry("mars-speculative", "mars", "mars-speculative", {"draft_method": "mars"}, 0.95, "draft_mars"),
)
