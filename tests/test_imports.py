"""What is imported before it is needed: `marsbench list` and `plan` answer at once only if the registries are light."""

from __future__ import annotations

import subprocess
import sys

from scipy import stats

from marsbench.statistics.intervals import LEVEL, QUANTILE

HEAVY = ("torch", "transformers", "datasets", "lm_eval", "scipy", "matplotlib", "pandas")
LIGHT = (
    "marsbench.decoding.acceptance",
    "marsbench.decoding.generation",
    "marsbench.evaluation.benchmarks",
    "marsbench.evaluation.local_data",
    "marsbench.hub",
    "marsbench.methods",
    "marsbench.paper",
    "marsbench.presets",
    "marsbench.statistics.curves",
    "marsbench.statistics.intervals",
    "marsbench.training.stages",
    "marsbench.world",
)


def test_registries_are_read_without_what_is_heavy() -> None:
    """Guards against a `list` that waits seconds for PyTorch, scipy or datasets, which it has no use for."""
    program = f"import sys, {', '.join(LIGHT)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_normal_quantile_is_scipys() -> None:
    """Guards against a digit of the written-out quantile that would move every committed interval."""
    assert float(stats.norm.ppf((1 + LEVEL) / 2)) == QUANTILE
