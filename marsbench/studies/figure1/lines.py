"""The lines of Figure 1: one checkpoint, one token per forward pass and several."""

from __future__ import annotations

from marsbench.running.plans import Arm, TablePlan

PLAN = TablePlan(
    "1",
    "One answer, and which forward pass settled each of its tokens",
    (
        Arm("ar", "one token per forward pass", "mars", "ar"),
        Arm("mars", "MARS (B = 4, tau = .95)", "mars", "mars", {"block_size": 4, "threshold": 0.95}),
    ),
    benchmarks=("gsm8k",),
    questions=1,
    figure=True,
)
