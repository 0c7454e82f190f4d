"""The sections of every report on trained checkpoints: what training took, and how the page was made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from marsbench.evaluation.statistics import median_ratio
from marsbench.paper import published
from marsbench.reports.cells import latest_cells, latest_stages, latest_step_cost
from marsbench.reports.markdown import bracketed, duration, one_line, table
from marsbench.sweeps.plans import TablePlan
from marsbench.sweeps.rows import EvaluationRow, Row, StepCostRow, TrainingRow

AR_OBJECTIVE, MARS_OBJECTIVE = "ar", "mars"  # keys of StepCostRow.seconds


def training_section(rows: Sequence[Row], plan: TablePlan) -> str:
    """What each stage of the plan took, and what a MARS step costs."""
    trained = latest_stages(rows)
    head = ["stage", "block size", "steps", "tokens", "wall time", "final loss", "parameters"]
    lines = [_training_line(stage, trained.get(stage)) for stage in plan.stages]
    reasons = [
        f"- {stage}: {trained[stage].status}: {one_line(trained[stage].reason)}"
        for stage in plan.stages
        if stage in trained and trained[stage].status != "done"
    ]
    parts = ["## Training", table(head, lines), "\n".join(reasons), _step_cost(latest_step_cost(rows))]
    return "\n\n".join(part for part in parts if part)


def _training_line(stage: str, row: TrainingRow | None) -> list[str]:
    if row is None or row.status != "done":
        return [stage, "", "not run" if row is None else row.status, "", "", "", ""]
    return [
        stage,
        "" if row.block_size is None else str(row.block_size),
        f"{row.steps:,}",
        f"{row.tokens:,}",
        duration(row.seconds),
        f"{row.loss:.3f}" if isfinite(row.loss) else "diverged",
        f"{row.parameters:,}",
    ]


def _step_cost(row: StepCostRow | None) -> str:
    """What a MARS step costs, in AR steps, beside what the paper's training hours come to."""
    hours = {(item.method, item.scale): item.value for item in published("A", metric="train_h200_hours")}
    ratios = sorted(hours["mars", scale] / hours["ar_sft", scale] for scale in ("0.5b", "7b"))
    paper = f"Published: {ratios[0]:.1f} and {ratios[1]:.1f} times, from the GPU hours of whole runs."
    if row is None:
        return f"Cost of a MARS step: not run. {paper}"
    if row.status != "done":
        return f"Cost of a MARS step: {row.status}: {one_line(row.reason)}. {paper}"
    cost = median_ratio(row.seconds[MARS_OBJECTIVE], row.seconds[AR_OBJECTIVE])
    return (
        f"A MARS step costs {cost.value:.2f} {bracketed(cost.interval, 2)} times an AR step: the median of "
        f"{cost.n} paired ratios on the same batches, with a bootstrap 95 % interval. {paper}"
    )


def how_section(rows: Sequence[Row], plan: TablePlan, scale: str) -> str:
    """Command, code, machine and time behind the rows that the report shows."""
    shown: list[EvaluationRow | TrainingRow | StepCostRow] = [
        *latest_cells(rows).values(),
        *latest_stages(rows).values(),
        *[cost for cost in [latest_step_cost(rows)] if cost],
    ]
    suffix = "" if scale == "tiny" else f" -- --scale {scale}"
    command = f"`nox -s reproduce-table{plan.number}{suffix}`"
    facts = facts_section(shown, command, {"tokens per answer at most": _token_limits(rows)})
    return "\n\n".join([facts, "Wall time by stage:", _wall_time(rows, plan)])


def facts_section(rows: Sequence[Row], command: str, more: Mapping[str, str] | None = None) -> str:
    """Command, code and machine behind rows; facts that are empty are left out."""
    facts = {
        "command": command,
        **{name: _distinct(rows, reader) for name, reader in _FACTS.items()},
        "measured": _dates(rows),
        **(more or {}),
    }
    lines = [[name, value] for name, value in facts.items() if value]
    return "\n\n".join(["## How this was made", table(["", ""], lines, text=(0, 1))])


def _distinct(rows: Iterable[Row], reader: Callable[[Mapping[str, Any]], str]) -> str:
    """What the rows' provenance says, each different answer once."""
    return "; ".join(sorted({text for row in rows if (text := reader(row.provenance))}))


def _text(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda provenance: str(provenance[name]) if provenance.get(name) is not None else ""


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = str(provenance.get("commit") or "")[:12]
    return f"{commit} with uncommitted changes" if commit and provenance.get("dirty") else commit


def _versions(provenance: Mapping[str, Any]) -> str:
    versions = dict(provenance.get("versions") or {})
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _hardware(provenance: Mapping[str, Any]) -> str:
    hardware = dict(provenance.get("hardware") or {})
    cores, memory = hardware.get("cores"), hardware.get("memory_gib")
    parts = [
        hardware.get("cpu"),
        f"{cores} cores" if cores else "",
        f"{memory:.0f} GiB memory" if memory else "",
        hardware.get("gpu") or ("no GPU" if "gpu" in hardware else ""),
    ]
    return ", ".join(str(part) for part in parts if part)


_FACTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "commit": _commit,
    "seed": _text("seed"),
    "hardware": _hardware,
    "threads": _text("threads"),
    "waiting threads": _text("wait_policy"),
    "platform": _text("platform"),
    "Python": _text("python"),
    "versions": _versions,
}


def _dates(rows: Iterable[Row]) -> str:
    dates = sorted(str(row.provenance["started"]) for row in rows if row.provenance.get("started"))
    return " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""


def _token_limits(rows: Iterable[Row]) -> str:
    """One number where all benchmarks have the same limit, else each benchmark's own."""
    done = [row for row in latest_cells(rows).values() if row.status == "done"]
    limits = sorted({(row.max_new_tokens, row.benchmark) for row in done})
    if len({limit for limit, _ in limits}) == 1:
        return str(limits[0][0])
    return ", ".join(f"{benchmark} {limit}" for limit, benchmark in limits)


def _wall_time(rows: Sequence[Row], plan: TablePlan) -> str:
    """Seconds of training and of evaluation per stage, and their sums."""
    trained, cells = latest_stages(rows), latest_cells(rows)
    spent = {
        stage: (
            trained[stage].seconds if stage in trained else 0.0,
            sum(row.seconds for row in cells.values() if row.stage == stage),
        )
        for stage in plan.stages
    }
    spent["total"] = (
        sum(train for train, _ in spent.values()),
        sum(evaluate for _, evaluate in spent.values()),
    )
    lines = [
        [stage, duration(train), duration(evaluate), duration(train + evaluate)]
        for stage, (train, evaluate) in spent.items()
    ]
    return table(["stage", "training", "evaluation", "together"], lines)
