"""The paper's numbers beside a plan's lines; whoever prints one says that it is published."""

from __future__ import annotations

from statistics import mean

from marsbench.paper import Published, published
from marsbench.reports.cells import columns
from marsbench.reports.markdown import table
from marsbench.sweeps.plans import AS_RELEASED, Arm, TablePlan

PUBLISHED_SCALES = {"0.5b": "Qwen2.5 0.5B", "7b": "Qwen2.5 7B"}
_ONE_TOKEN = 1.0  # the paper's threshold for exactly one token per forward pass


def published_section(plan: TablePlan) -> str:
    """The paper's table: accuracy, and tokens per forward pass where it has them."""
    lead = (
        f"**Published** by the authors (arXiv 2604.07023, {plan.name}), accuracy in %; nothing in this table was "
        "measured here."
    )
    parts = ["## The paper's numbers", lead, _table(plan, "accuracy", 1)]
    if published(plan.number, metric="tokens_per_forward"):
        parts += ["**Published** too: tokens per forward pass.", _table(plan, "tokens_per_forward", 2)]
    return "\n\n".join(parts)


def _table(plan: TablePlan, metric: str, digits: int) -> str:
    heads = {**columns(plan), "average": "Average"}
    lines = []
    for scale, model in PUBLISHED_SCALES.items():
        for arm in plan.arms:
            found = published_values(plan, arm, scale, metric)
            if found:
                numbers = [f"{found[name]:.{digits}f}" if name in found else "" for name in heads]
                lines.append([model, paper_label(arm.label), *numbers])
    return table(["model", "", *heads.values()], lines, text=(0, 1))


def paper_label(label: str) -> str:
    """What the paper calls a line of ours."""
    return label.replace(AS_RELEASED, "")


def published_values(plan: TablePlan, arm: Arm, scale: str, metric: str) -> dict[str, float]:
    """Benchmark, or "average", -> what the paper's table says of a line."""
    if arm.published is None or plan.figure:
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
