"""The section of a page that holds the paper's own numbers, labelled so."""

from __future__ import annotations

from marsbench.findings.cells import columns
from marsbench.findings.published import PUBLISHED_SCALES, paper_label, published_values
from marsbench.paper import published
from marsbench.rendering.markdown import paragraphs, table
from marsbench.running.plans import TablePlan


def published_section(plan: TablePlan) -> str:
    """The paper's table: accuracy, and tokens per forward pass where it has them; nothing for a page of our own."""
    if plan.own:
        return ""
    lead = (
        f"**Published** by the authors (arXiv 2604.07023, {plan.name}), accuracy in %; nothing in this table was "
        "measured here."
    )
    parts = ["## The paper's numbers", lead, _table(plan, "accuracy", 1)]
    if published(plan.number, metric="tokens_per_forward"):
        parts += ["**Published** too: tokens per forward pass.", _table(plan, "tokens_per_forward", 2)]
    return paragraphs(*parts)


def _table(plan: TablePlan, metric: str, digits: int) -> str:
    heads = {**columns(plan), "average": "Average"}
    lines = []
    for scale, model in PUBLISHED_SCALES.items():
        for arm in (*plan.arms, *plan.elsewhere):
            found = published_values(plan, arm, scale, metric)
            if found:
                numbers = [f"{found[name]:.{digits}f}" if name in found else "" for name in heads]
                lines.append([model, paper_label(arm.label), *numbers])
    return table(["model", "", *heads.values()], lines, text=(0, 1))
