"""Pages of the tables beyond Table 2, from made-up rows: numbers are worked out again here, by other means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import PAGES, answered, claim_lines, lines_of, render, section

from marsbench.findings.cells import columns, paper_label
from marsbench.findings.claims import Claim, Finding, Measured
from marsbench.line import Line, TrainedStage
from marsbench.overview.pages import write_page
from marsbench.paper import published
from marsbench.rendering.page import TablePage
from marsbench.rows.kinds import EvaluationRow, GenerationRow, Row, TrainingRow
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.studies import study_of
from marsbench.studies.figure1 import STUDY as FIGURE1
from marsbench.studies.lines import ABLATIONS, mars_name

QUESTIONS = 61  # per benchmark; a prime, so that no share ends in a rounding tie
BY_KEY = {page.plan.key: page for page in PAGES}
NEW_PAGES = [page for page in PAGES if page.plan.key != "table2"]
MODELS = {"0.5b": "Qwen2.5 0.5B", "7b": "Qwen2.5 7B"}

pages = pytest.mark.parametrize("page", NEW_PAGES, ids=lambda page: page.plan.key)


def evaluation_rows(page: TablePage) -> Iterator[EvaluationRow]:
    """Answers that differ from cell to cell; a lower threshold emits more tokens."""
    generator = np.random.default_rng(len(page.plan.lines))
    for benchmark in columns(page.plan):
        for arm in page.plan.lines:
            forwards = generator.integers(5, 40, QUESTIONS)
            extra = generator.integers(0, 9, QUESTIONS) * (1.6 - arm.options.get("threshold", 1.6))
            correct = generator.integers(0, 2, QUESTIONS)
            more = {"seconds": 10.0, "max_new_tokens": 96}
            yield answered(arm, benchmark, correct, forwards + extra.astype(int), forwards, **more)


def training_rows(page: TablePage) -> Iterator[TrainingRow]:
    parents = [TrainedStage("base", None), TrainedStage("ar_sft", None)]
    for stage, size in dict.fromkeys([*parents, *page.plan.stages]):
        yield TrainingRow(f"{stage}{size}", "done", "", "mini", stage, size, 1000, 800 + (size or 0), 5000, 60.0, 0.5)


def rows_of(page: TablePage, change: Callable[[EvaluationRow], EvaluationRow | None] = lambda row: row) -> list[Row]:
    changed = [change(row) for row in evaluation_rows(page)]
    return [*training_rows(page), *[row for row in changed if row is not None]]


def value(cell: str) -> str:
    """What stands before the half-width."""
    return cell.split(" ± ")[0]


# ---- what was measured ----------------------------------------------------------------------------------------------


@pages
def test_a_skipped_benchmark_leaves_an_average_that_says_so(page: TablePage) -> None:
    """Guards against a skipped benchmark that takes the averages with it, or that they keep silent about."""

    def skipped(row: EvaluationRow) -> EvaluationRow:
        return replace(row, status="skipped", reason="no data") if row.benchmark == "mini_humaneval" else row

    text = render(page, rows_of(page, skipped), "mini")
    asked = len(columns(page.plan))
    assert "- skipped: no data (HumanEval: every line)" in text
    assert f"({asked - 1} of {asked} benchmarks)" in section(text, "Claims")
    if page.plan.key != "table8":
        assert text.count(f" ({asked - 1} of {asked}) ") >= len(page.plan.lines)


@pages
@pytest.mark.parametrize("case", ["no rows", "one question", "all right", "lines of unequal length"])
def test_nothing_undefined_is_printed_or_drawn(page: TablePage, case: str, tmp_path: Path) -> None:
    """Guards against NaN, infinity, None or a crash on a page or its figure, whatever is missing."""

    def first(row: EvaluationRow) -> EvaluationRow:
        return replace(row, correct=row.correct[:1], emitted=row.emitted[:1], forwards=row.forwards[:1])

    def shorter(row: EvaluationRow) -> EvaluationRow:
        return replace(row, correct=row.correct[1:], emitted=row.emitted[1:], forwards=row.forwards[1:])

    rows: list[Row] = {
        "no rows": lambda: [],
        "one question": lambda: rows_of(page, first),
        "all right": lambda: rows_of(page, lambda row: replace(row, correct=[1.0] * QUESTIONS)),
        "lines of unequal length": lambda: rows_of(page, lambda row: shorter(row) if len(row.arm) % 2 else row),
    }[case]()
    text = render(page, rows, "mini")
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert len(claim_lines(section(text, "Claims"))) == len(page.claims)
    if case == "one question":  # the case that error bars cannot be drawn for
        page.figures(rows, tmp_path)


def test_a_figure_is_drawn_the_same_twice(tmp_path: Path) -> None:
    """Guards against random identifiers in a drawing, and against one that does not follow its rows."""
    page = BY_KEY["table4"]
    first, second = (page.figures(rows_of(page), tmp_path / name) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    other = page.figures(rows_of(page, lambda row: replace(row, correct=[1.0] * QUESTIONS)), tmp_path / "c")
    assert other[1].read_bytes() != first[1].read_bytes()


# ---- claims ---------------------------------------------------------------------------------------------------------


def test_a_limit_beside_a_bound_is_printed_on_its_side() -> None:
    """Guards against "[-2.0, ...]" beside a bound of -2, which leaves the verdict to be guessed."""
    claim = Claim(measure=lambda rows: Measured(), bound=Bound(low=-2.0), signed=True)
    assert Finding(claim, Measured(Estimate(-1.0, Interval(-2.02, 0.04), 9))).found == "-1.00 [-2.02, +0.04] points"
    assert Finding(claim, Measured(Estimate(-1.0, Interval(-2.1, 0.1), 9))).found == "-1.0 [-2.1, +0.1] points"


@pages
def test_claims_name_lines_of_the_plan(page: TablePage) -> None:
    """Guards against a renamed line, which would leave its claim "not run" for ever."""
    found = claim_lines(section(render(page, rows_of(page), "mini"), "Claims"))
    assert len(found) == len(page.claims)
    assert all("not run" not in line for line in found)


def with_answers(page: TablePage, answers: Mapping[str, list[float]]) -> list[Row]:
    return rows_of(page, lambda row: replace(row, correct=answers.get(row.arm, row.correct)))


@pytest.mark.parametrize(("at_4", "at_16", "verdict"), [(1, 30, "supported"), (30, 1, "not supported"), (9, 9, "inc")])
def test_a_gain_that_grows_needs_a_gain_that_grows(at_4: int, at_16: int, verdict: str) -> None:
    """Guards against a swapped pair: the SFT loss may help everywhere and still not help more at larger blocks."""
    page, right = BY_KEY["table3"], [1.0] * QUESTIONS
    lost = {4: at_4, 16: at_16}
    answers = {mars_name("mars", size): right for size in lost}
    answers |= {mars_name(name, n): [0.0] * lost[n] + right[lost[n] :] for name in ABLATIONS for n in lost}
    claim = next(claim for claim in page.claims if claim.name == "helps-more-b16")
    finding = claim.of(with_answers(page, answers))
    assert finding.verdict.startswith(verdict)
    assert finding.found.startswith(f"{100 * (at_16 - at_4) / QUESTIONS:+.1f} [")


@pytest.mark.parametrize(("extra", "nothing", "less"), [(0, "supported", "supported"), (9, "not supported", "not")])
def test_jacobi_may_gain_something(extra: int, nothing: str, less: str) -> None:
    """Guards against bounds the wrong way round: "gains almost nothing" must fail for a fast method."""
    page = BY_KEY["table9"]

    def jacobi(row: EvaluationRow) -> EvaluationRow:
        forwards = [10] * QUESTIONS
        emitted = {"jacobi": [10 + extra + number % 2 for number in range(QUESTIONS)], "ar_sft": forwards}
        return replace(row, forwards=forwards, emitted=emitted.get(row.arm, [14 + n % 3 for n in range(QUESTIONS)]))

    found = {claim.name: claim.of(rows_of(page, jacobi)).verdict for claim in page.claims}
    assert found["jacobi-slow"] == nothing
    assert found["beats-jacobi"].startswith(less)


def test_curves_are_compared_at_equal_speed() -> None:
    """Guards against a comparison at equal thresholds: a faster line must not look better than it is."""
    page = BY_KEY["table8"]
    claim = next(claim for claim in page.claims if claim.letter == "a")
    height = {None: 50, 0.95: 45, 0.9: 40, 0.8: 35, 0.7: 30, 0.6: 25, 0.5: 20}  # right answers by threshold

    def slower_ablation(row: EvaluationRow) -> EvaluationRow:
        # Both lie on one line, 50 right answers less 5 per half token; the ablation gets half as far along it.
        right, slow = height[row.options.get("threshold")], row.stage in ABLATIONS
        steps = (50 - right) / 5 / (2 if slow else 1)
        correct = [1.0] * round(50 - 5 * steps) + [0.0] * QUESTIONS
        return replace(row, correct=correct[:QUESTIONS], forwards=[20] * QUESTIONS,
                       emitted=[20 + round(10 * steps)] * QUESTIONS)  # fmt: skip

    finding = claim.of(rows_of(page, slower_ablation))
    assert abs(float(finding.found.split()[0])) < 0.5  # rounding to whole answers
    assert finding.verdict == "inconclusive"


# ---- published numbers ----------------------------------------------------------------------------------------------


def line_of(page: TablePage, scale: str, method: str, block_size: int | None, threshold: float | None) -> Line:
    """The first line of ours that stands for one of the paper's."""
    return next(
        arm
        for arm in page.plan.lines
        if arm.published == method
        and block_size in (None, arm.block_size)
        and threshold in (None, arm.options.get("threshold", 1.0))
    )


@pytest.mark.parametrize("number", ["3", "4", "9"])
def test_every_published_number_is_shown_in_its_line(number: str) -> None:
    """Guards against lost lines, and against the paper's numbers under the wrong label, column or unit."""
    page = BY_KEY[f"table{number}"]
    text = section(render(page, [], "mini"), "The paper's numbers")
    tables = text.split("**Published** too")
    heads = [*columns(page.plan), "average"]
    for row in published(number):
        digits, part = (1, tables[0]) if row.metric == "accuracy" else (2, tables[1])
        label = paper_label(line_of(page, row.scale, row.method, row.block_size, row.threshold).label)
        (line,) = [line for line in lines_of(part) if line[:2] == [MODELS[row.scale], label]]
        assert line[2 + heads.index(str(row.benchmark))] == f"{row.value:.{digits}f}"
    shown = sum(bool(re.fullmatch(r"\d+\.\d+", cell)) for line in lines_of(text) for cell in line[2:])
    assert shown == len(published(number))


def average(number: str, **filters: Any) -> float:
    (row,) = published(number, benchmark="average", **filters)
    return row.value


# ---- Figure 1 -------------------------------------------------------------------------------------------------------

TEXTS = ["Tom", " has", " 7", " apples"]


def answer(arm: str, settled_by: list[int], finish: str = "eos") -> GenerationRow:
    identity = ("done", "", "mini", arm, "mars", arm, {}, "How many apples?")
    return GenerationRow(arm, *identity, TEXTS, settled_by, settled_by[-1], finish, 96)  # type: ignore[arg-type]


def test_figure_1_tells_forward_passes_apart(tmp_path: Path) -> None:
    """Guards against text shaded with the wrong forward pass, and against an EOS that is not counted."""
    rows: list[Row] = [answer("ar", [1, 2, 3, 4, 5]), answer("mars", [1, 1, 2, 2, 2])]
    text = FIGURE1.render(rows, "mini")
    assert "\nTom| has| 7| apples\n" in text and "\nTom has| 7 apples\n" in text
    assert [line[1:] for line in lines_of(text)[2:4]] == [["5", "5", "1.00"], ["5", "2", "2.50"]]
    assert "cut at the token limit" not in text
    page, *figures = write_page(study_of("figure1"), rows, "mini", tmp_path)
    assert all((tmp_path / link).is_file() for link in re.findall(r"\]\((\S+\.png)\)", page.read_text()))
    again = write_page(study_of("figure1"), rows, "mini", tmp_path / "again")[1:]
    assert [file.read_bytes() for file in figures] == [file.read_bytes() for file in again]


def test_figure_1_says_what_it_lacks(tmp_path: Path) -> None:
    """Guards against a crash without answers, and against an answer cut at the limit that looks complete."""
    skipped = replace(answer("mars", [1]), status="skipped", reason="no\ncheckpoint", texts=[], settled_by=[])
    text = FIGURE1.render([answer("ar", [1, 2, 3, 4], "length"), skipped], "mini")
    assert "cut at the token limit" in text and "skipped: no checkpoint" in text
    assert "not run" in FIGURE1.render([], "mini")
    assert len(write_page(study_of("figure1"), [], "mini", tmp_path)) == 3
