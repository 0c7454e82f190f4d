"""The accuracy and speed of every line of a table beside the paper's, and why a cell has no numbers."""

from collections.abc import Sequence
from statistics import fmean

from marsbench.findings.between_lines import line_numbers
from marsbench.findings.cells import PUBLISHED_SCALES, Cells, columns, done_cells, latest_cells, published_average
from marsbench.findings.claims import DIGITS, Finding
from marsbench.findings.in_words import one_line, plus_minus
from marsbench.findings.seeds import BySeed
from marsbench.rendering.markdown import merged, table
from marsbench.running.plans import TablePlan

HOW_TO_READ_ACCURACY = (
    "Accuracy is in %, averaged over training seeds. Benchmarks have equal weight in the average and in "
    "tokens/forward; ± is half of the 95 % interval."
)


def numbers_table(plan: TablePlan, seeds: BySeed, names: Sequence[str] = ()) -> str:
    """The lines of a plan (or those named) with accuracy and speed over all training seeds, beside the paper's."""
    cells = [latest_cells(rows) for rows in seeds.values()]
    shown = [line for line in plan.lines if not names or line.name in names]
    papers = {metric: [_published(plan, line.name, metric) for line in shown] for metric in _PAPERS}
    heads = {metric: head for metric, head in _PAPERS.items() if any(papers[metric])}
    lines = [["questions", *_counts(cells, plan), "", "", "", *[""] * len(heads)]]
    for place, line in enumerate(shown):
        done = [done_cells(of_seed, line.name) for of_seed in cells]
        of_seeds = [[fmean(of_seed[name].correct) for of_seed in done if name in of_seed] for name in columns(plan)]
        of_benchmarks = [f"{100 * fmean(shares):.1f}" if shares else "not run" for shares in of_seeds]
        # As claims without a bound: they pool the seeds as all claims do.
        accuracy, tokens = (claim.over(seeds.values()) for claim in line_numbers(plan, line.name))
        numbers = [*of_benchmarks, _plus_minus(accuracy), _plus_minus(tokens), str(accuracy.seeds) if any(done) else ""]
        lines.append([line.label, *numbers, *[papers[metric][place] for metric in heads]])
    return table(["", *columns(plan).values(), "average", "tokens/forward", "seeds", *heads.values()], merged(lines))


_PAPERS = {"accuracy": "paper: average, 0.5B / 7B", "tokens_per_forward": "paper: tokens/forward"}


def _published(plan: TablePlan, name: str, metric: str) -> str:
    digits = 1 if metric == "accuracy" else 2
    values = [published_average(plan, name, scale, metric) for scale in PUBLISHED_SCALES]
    said = ["-" if value is None else f"{value:.{digits}f}" for value in values]
    return " / ".join(said) if any(value is not None for value in values) else ""


def _counts(cells: Sequence[Cells], plan: TablePlan) -> list[str]:
    """The number of questions behind every column; several where lines differ."""
    counts = []
    for name in columns(plan):
        rows = [row for of_seed in cells for line in plan.lines if (row := done_cells(of_seed, line.name).get(name))]
        counts.append("/".join(map(str, sorted({len(row.correct) for row in rows}))))
    return counts


def _plus_minus(result: Finding) -> str:
    """A number with half its interval; it says if benchmarks are missing."""
    if result.estimate is None:
        return "not run"
    judged, asked = len(result.measured.benchmarks), result.measured.asked
    missing = "" if judged == asked else f" ({judged} of {asked})"
    return plus_minus(result.estimate, DIGITS[result.claim.unit]) + missing


def reasons(cells: Cells, plan: TablePlan) -> str:
    """Why cells have no numbers; those that share a reason share a line."""
    arms: dict[tuple[str, str, str], list[str]] = {}  # status, reason, benchmark -> arms
    for name, head in columns(plan).items():
        for line in plan.lines:
            row = cells.get((line.name, name))
            if row is not None and row.status != "done":
                arms.setdefault((row.status, one_line(row.reason), head), []).append(line.label)
    benchmarks: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (status, reason, head), labels in arms.items():
        benchmarks.setdefault((status, reason, tuple(labels)), []).append(head)
    return "\n".join(
        f"- {status}: {reason} ({', '.join(heads)}: "
        f"{'every line' if len(labels) == len(plan.lines) else '; '.join(labels)})"
        for (status, reason, labels), heads in benchmarks.items()
    )
