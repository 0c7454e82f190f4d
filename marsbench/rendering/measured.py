"""What was measured: accuracy and speed of every line of a table, and why a cell has no numbers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from marsbench.findings.cells import Cells, columns, done_cells, latest_cells, means
from marsbench.findings.in_words import one_line, plus_minus
from marsbench.findings.seeds import BySeed
from marsbench.line import Line
from marsbench.rendering.markdown import merged, paragraphs, table
from marsbench.rows.kinds import EvaluationRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import accuracy

HOW_TO_READ_ACCURACY = (
    "Accuracy in % ± half of the 95 % interval. Benchmarks weigh the same in the average and in tokens/forward."
)
HOW_TO_READ_THE_CELLS = (
    f"{HOW_TO_READ_ACCURACY} Lines with tau accept tokens from the left while their confidence reaches tau, the "
    "others one token per forward pass at most."
)
HOW_TO_READ_INCOMPLETE_AVERAGES = (
    'An average with a count such as "(5 of 6)" is over so many benchmarks, those that the line was measured on. It '
    "compares only with an average over the same ones."
)


def measured_section(cells: Cells, plan: TablePlan, seeds: BySeed, reading: str, *tables: str) -> str:
    """Tables of what was measured, by benchmark and by seed, with what is missing or was cut.

    `cells` are of the seed that is shown, `seeds` all; `reading` says how to read the page's own `tables`.
    """
    parts = seeds_table(seeds, plan), reasons(cells, plan), other_scores(cells, plan), what_was_cut(cells, plan)
    return paragraphs("## Measured", reading, *tables, *parts)


def accuracy_table(cells: Cells, plan: TablePlan) -> str:
    """Accuracy per line and benchmark, with the averages of accuracy and of tokens per forward pass."""
    head = ["", *columns(plan).values(), "Average", "tokens/forward"]
    lines = [["questions", *question_counts(cells, plan).values(), "", ""]]
    for line in plan.lines:
        of_benchmarks = [accuracy_cell(cells.get((line.name, name))) for name in columns(plan)]
        lines.append([line.label, *of_benchmarks, *averages(cells, plan, line)])
    counts = {len(done_cells(cells, line.name)) for line in plan.lines} - {0, len(columns(plan))}
    return paragraphs(table(head, merged(lines)), HOW_TO_READ_INCOMPLETE_AVERAGES if counts else "")


def speed_table(cells: Cells, plan: TablePlan) -> str:
    lines = []
    for line in plan.lines:
        speeds = [speed_cell(cells.get((line.name, name))) for name in columns(plan)]
        lines.append([line.label, *speeds, averages(cells, plan, line)[1]])
    return paragraphs("Tokens per forward pass:", table(["", *columns(plan).values(), "Average"], merged(lines)))


def seeds_table(seeds: BySeed, plan: TablePlan) -> str:
    """Accuracy of every line at each training seed, so that a training that failed is seen; empty with one seed."""
    if len(seeds) < 2:
        return ""
    cells = [latest_cells(seeds[seed]) for seed in sorted(seeds)]
    lines = []
    for line in plan.lines:
        done = [done_cells(of_seed, line.name) for of_seed in cells]
        rates = [{name: fmean(row.correct) for name, row in rows.items()} for rows in done]
        for rate in rates:
            rate |= {"average": fmean(rate.values())} if rate.keys() >= columns(plan).keys() else {}
        heads = [*columns(plan), "average"]
        shown = [[f"{100 * rate[name]:.1f}" if name in rate else "n/a" for rate in rates] for name in heads]
        lines.append([line.label, *map(" / ".join, shown)])
    order = " / ".join(map(str, sorted(seeds)))
    lead = f"Accuracy in % at each training seed, in the order {order}. They scatter by the luck of training."
    return paragraphs(lead, table(["", *columns(plan).values(), "Average"], merged(lines)))


def accuracy_cell(row: EvaluationRow | None) -> str:
    """Accuracy in %, or why there is none."""
    return _cell(row, lambda row: plus_minus(row.accuracy, 1, factor=100))


def speed_cell(row: EvaluationRow | None) -> str:
    """Tokens per forward pass, or why there are none."""
    return _cell(row, lambda row: plus_minus(row.tokens_per_forward, 2))


def _cell(row: EvaluationRow | None, shown: Callable[[EvaluationRow], str]) -> str:
    if row is None:
        return "not run"
    return shown(row) if row.status == "done" else row.status


def averages(cells: Cells, plan: TablePlan, line: Line) -> tuple[str, str]:
    """Average accuracy in % and tokens per forward pass of a line; where not over all benchmarks, it says so."""
    done = done_cells(cells, line.name)
    if not done:
        return "n/a", "n/a"
    count = "" if len(done) == len(columns(plan)) else f" ({len(done)} of {len(columns(plan))})"
    speed, share = means(done.values())
    return plus_minus(share, 1, factor=100) + count, plus_minus(speed, 2) + count


def question_counts(cells: Cells, plan: TablePlan) -> dict[str, str]:
    """Benchmark -> the number of answers behind its column; several numbers where lines differ."""
    found: dict[str, set[int]] = {name: set() for name in columns(plan)}
    for line in plan.lines:
        for name, row in done_cells(cells, line.name).items():
            found[name].add(len(row.correct))
    return {name: "/".join(map(str, sorted(counts))) for name, counts in found.items()}


def reasons(cells: Cells, plan: TablePlan) -> str:
    """Why cells have no numbers; those that share a reason share a line."""
    labels_of: dict[tuple[str, str, str], list[str]] = {}  # status, reason, benchmark -> lines
    for name, head in columns(plan).items():
        for line in plan.lines:
            row = cells.get((line.name, name))
            if row is not None and row.status != "done":
                labels_of.setdefault((row.status, one_line(row.reason), head), []).append(line.label)
    benchmarks: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (status, reason, head), labels in labels_of.items():
        benchmarks.setdefault((status, reason, tuple(labels)), []).append(head)
    return "\n".join(
        f"- {status}: {reason} ({', '.join(heads)}: "
        f"{'every line' if len(labels) == len(plan.lines) else '; '.join(labels)})"
        for (status, reason, labels), heads in benchmarks.items()
    )


def other_scores(cells: Cells, plan: TablePlan) -> str:
    """What the benchmarks report beside their accuracy, where it is not the same."""
    done = {line.label: done_cells(cells, line.name) for line in plan.lines}
    differ = {
        label: [
            (name, score) for name, row in found.items() for score in row.others if row.others[score] != row.correct
        ]
        for label, found in done.items()
    }
    known = dict.fromkeys(place for places in differ.values() for place in sorted(places))
    heads = [f"{columns(plan)[name]} {score}" for name, score in known]
    lines = [
        [label, *[_other(done[label].get(name), score) for name, score in known]] for label in differ if differ[label]
    ]
    lead = "Other scores of the same answers, in %, of lines where they differ; `strict` is lm-eval's stock number:"
    return paragraphs(lead, table(["", *heads], lines)) if lines else ""


def _other(row: EvaluationRow | None, score: str) -> str:
    if row is None or score not in row.others:
        return ""
    parts = [part for value in row.others[score] for part in (value if isinstance(value, list) else [value])]
    return plus_minus(accuracy(parts), 1, factor=100)


def what_was_cut(cells: Cells, plan: TablePlan) -> str:
    """Answers without an end, and prompts that lost their beginnings, in % of questions, for the lines with any."""
    kinds: dict[str, Callable[[EvaluationRow], list[bool]]] = {
        "Answers cut at the token limit, in %:": lambda row: [not whole for whole in row.finished],
        "Prompts whose beginnings were cut, as the context has no room for them beside the answer, in %:": lambda row: [
            bool(count) for count in row.prompt_cut
        ],
    }
    parts = []
    for lead, cut in kinds.items():
        lines = []
        for line in plan.lines:
            found = {name: cut(row) for name, row in done_cells(cells, line.name).items()}
            if any(map(any, found.values())):
                shares = [found.get(name) or [] for name in columns(plan)]
                lines.append([line.label, *[f"{100 * sum(part) / len(part):.1f}" if part else "" for part in shares]])
        parts += [lead, table(["", *columns(plan).values()], lines)] if lines else []
    return paragraphs(*parts)
