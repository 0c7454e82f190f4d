"""The paper's numbers of a plan's lines; whoever prints one says that it is published."""

from __future__ import annotations

from statistics import mean

from marsbench.findings.cells import columns
from marsbench.paper import Published, published
from marsbench.running.plans import AS_RELEASED, Arm, TablePlan

PUBLISHED_SCALES = {"0.5b": "Qwen2.5 0.5B", "7b": "Qwen2.5 7B"}
_ONE_TOKEN = 1.0  # the paper's threshold for exactly one token per forward pass


def paper_label(label: str) -> str:
    """What the paper calls a line of ours."""
    return label.replace(AS_RELEASED, "")


def published_values(plan: TablePlan, arm: Arm, scale: str, metric: str) -> dict[str, float]:
    """Benchmark, or "average", -> what the paper's table says of a line."""
    if arm.published is None or plan.figure or plan.own:
        return {}
    rows = published(plan.number, scale=scale, method=arm.published, metric=metric)
    return {str(row.benchmark): row.value for row in rows if _is_of(row, arm)}


def published_average(plan: TablePlan, arm: str, scale: str, metric: str) -> float | None:
    """The paper's own average of a line, or the mean of its numbers where its table has no average."""
    line = next(line for line in plan.arms if line.name == arm)
    found = published_values(plan, line, scale, metric)
    if "average" in found:
        return found["average"]
    return mean(found[name] for name in columns(plan)) if found.keys() >= columns(plan).keys() else None


def _is_of(row: Published, arm: Arm) -> bool:
    """Whether a published number is of a line's block size and threshold, as far as it states them."""
    threshold = arm.options.get("threshold", _ONE_TOKEN)
    return row.block_size in (None, arm.block_size) and row.threshold in (None, threshold)
