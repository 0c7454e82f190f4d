"""Finding the measurement that belongs in a place of a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, TrainingRow
from marsbench.running.plans import TablePlan, TrainedStage
from marsbench.statistics.intervals import Estimate, mean_of_benchmarks
from marsbench.world import modelled_on

# The six benchmarks in the paper's order, and its column heads.
BENCHMARKS: dict[str, str] = {
    "ifeval": "IFEval",
    "bbh": "BBH",
    "mmlu_pro": "MMLU-Pro",
    "gpqa": "GPQA",
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
}

AR_OBJECTIVE, MARS_OBJECTIVE = "ar", "mars"  # keys of StepCostRow.seconds

Cells = Mapping[tuple[str, str], EvaluationRow]  # (arm, benchmark as in BENCHMARKS) -> its latest row


def columns(plan: TablePlan) -> dict[str, str]:
    """The benchmarks that a table asks, in the paper's order, with their column heads."""
    return {name: BENCHMARKS[name] for name in plan.of(BENCHMARKS)}


def latest_cells(rows: Iterable[Row]) -> Cells:
    """The last row of every cell; a mini benchmark stands in the column of the one that it is modelled on."""
    return {(row.arm, modelled_on(row.benchmark)): row for row in rows if isinstance(row, EvaluationRow)}


def latest_stages(rows: Iterable[Row]) -> dict[TrainedStage, TrainingRow]:
    """The last row of every stage trained, at each of its block sizes."""
    return {TrainedStage(row.stage, row.block_size): row for row in rows if isinstance(row, TrainingRow)}


def latest_step_cost(rows: Iterable[Row]) -> StepCostRow | None:
    """The last row of step costs, if there is one."""
    return next((row for row in reversed(list(rows)) if isinstance(row, StepCostRow)), None)


def done_cells(cells: Cells, arm: str) -> dict[str, EvaluationRow]:
    """The benchmarks on which an arm was measured, in the paper's order."""
    found = {name: cells.get((arm, name)) for name in BENCHMARKS}
    return {name: row for name, row in found.items() if row is not None and row.status == "done"}


def mean_accuracy(rows: Iterable[EvaluationRow]) -> Estimate:
    """The accuracy of a line as a fraction, benchmarks weighing the same; an entry of `rows` is one of them."""
    return mean_of_benchmarks([row.accuracy for row in rows])


def mean_speed(rows: Iterable[EvaluationRow]) -> Estimate:
    """Its tokens per forward pass, alike."""
    return mean_of_benchmarks([row.tokens_per_forward for row in rows])
