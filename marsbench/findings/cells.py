"""Finds the measurement for a cell of a report, or the paper's number, which pages label as published."""

from collections.abc import Iterable, Mapping
from statistics import mean

from marsbench.findings.in_words import one_line
from marsbench.line import Line, TrainedStage
from marsbench.paper import published
from marsbench.rows.kinds import EvaluationRow, Row, TrainingRow
from marsbench.running.plans import TablePlan
from marsbench.world import modelled_on

# The six benchmarks in the paper's order, and its column heads.
BENCHMARKS = dict(ifeval="IFEval", bbh="BBH", mmlu_pro="MMLU-Pro", gpqa="GPQA", gsm8k="GSM8K", humaneval="HumanEval")

AR_OBJECTIVE, MARS_OBJECTIVE = "ar", "mars"  # keys of StepCostRow.seconds

Cells = Mapping[tuple[str, str], EvaluationRow]  # (line, benchmark as in BENCHMARKS) -> its latest row


def columns(plan: TablePlan) -> dict[str, str]:
    """The benchmarks that a table asks, in the paper's order, with their column heads."""
    return {name: BENCHMARKS[name] for name in plan.of(BENCHMARKS)}


def latest_cells(rows: Iterable[Row]) -> Cells:
    """The last row of every cell; a mini benchmark stands in the column of the one that it is modelled on."""
    return {(row.arm, modelled_on(row.benchmark)): row for row in rows if isinstance(row, EvaluationRow)}


def latest_stages(rows: Iterable[Row]) -> dict[TrainedStage, TrainingRow]:
    """The last row of every stage trained, at each of its block sizes."""
    return {TrainedStage(row.stage, row.block_size): row for row in rows if isinstance(row, TrainingRow)}


def done_cells(cells: Cells, line: str) -> dict[str, EvaluationRow]:
    """The benchmarks on which a line was measured, in the paper's order."""
    rows = {name: cells.get((line, name)) for name in BENCHMARKS}
    return {name: row for name, row in rows.items() if row is not None and row.status == "done"}


def same_answers(one: Mapping[str, EvaluationRow], other: Mapping[str, EvaluationRow]) -> tuple[int, int]:
    """How many answers of two lines have the same tokens, and how many both lines have; rows by benchmark."""
    pairs = [(one[name].digests, other[name].digests) for name in one.keys() & other.keys()]
    known = [(a, b) for first, second in pairs if first and second for a, b in zip(first, second, strict=True)]
    return sum(a == b for a, b in known), len(known)


def why_none(row: Row | None) -> str:
    """Why there is no number: "not run", or the status of the row with its reason."""
    return "not run" if row is None else f"{row.status}: {one_line(row.reason)}"


PUBLISHED_SCALES = {"0.5b": "Qwen2.5 0.5B", "7b": "Qwen2.5 7B"}
_ONE_TOKEN = 1.0  # the paper's threshold for exactly one token per forward pass


def published_values(plan: TablePlan, line: Line, scale: str, metric: str) -> dict[str, float]:
    """Benchmark, or "average", -> what the paper's table says of a line."""
    if line.published is None or plan.figure or plan.own:
        return {}
    threshold = line.options.get("threshold", _ONE_TOKEN)
    return {
        str(row.benchmark): row.value
        for row in published(plan.number, scale=scale, method=line.published, metric=metric)
        if row.block_size in (None, line.block_size) and row.threshold in (None, threshold)  # if it states them
    }


def published_average(plan: TablePlan, name: str, scale: str, metric: str) -> float | None:
    """The paper's own average of a line, or the mean of its numbers where its table has no average."""
    papers = published_values(plan, plan.line(name), scale, metric)
    if "average" in papers:
        return papers["average"]
    return mean(papers[of] for of in columns(plan)) if papers.keys() >= columns(plan).keys() else None
