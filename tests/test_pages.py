"""Pages on lines, from made-up rows: numbers in their places, claims of the lines they name, verdicts in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from made_up import PAGES, answered, lines_of

from marsbench.findings.cells import columns, latest_cells
from marsbench.findings.claims import Claim, Finding, Measured
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import SeedRows
from marsbench.overview.pages import page_of, write_page
from marsbench.rendering.claims import page_claims, tally, verdict
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import AnyRow, EvaluationRow
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.studies import studies_on
from marsbench.studies.study import TablePage
from marsbench.studies.table2 import STUDY as TABLE2

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = 61  # per benchmark; a prime, so that no share ends in a rounding tie
MOST_WORDS, ALL_WORDS, MOST_PAGES = 2_500, 30_000, 13
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.plan.key)


def rows_of(page: TablePage, change: Callable[[EvaluationRow], EvaluationRow] = lambda row: row) -> list[AnyRow]:
    """Answers that differ from cell to cell; a lower threshold emits more tokens."""

    def made() -> Iterator[EvaluationRow]:
        generator = np.random.default_rng(len(page.plan.lines))
        for benchmark in columns(page.plan):
            for line in page.plan.lines:
                forwards = generator.integers(5, 40, QUESTIONS)
                extra = generator.integers(0, 9, QUESTIONS) * (1.6 - line.options.get("threshold", 1.6))
                correct = generator.integers(0, 2, QUESTIONS)
                yield answered(line, benchmark, correct, forwards + extra.astype(int), forwards)

    return [change(row) for row in made()]


@pages
def test_every_number_stands_in_its_place(page: TablePage) -> None:
    """Guards against a number in the wrong line or column, and a benchmark that the table does not ask."""
    rows = rows_of(page)
    cells, text = latest_cells(rows), page.render(rows, "mini")
    found = {name: line for line in lines_of(text) for name in line[0].split("; ")}
    for line in page.plan.lines:
        if page.lines and line.name not in page.lines:
            continue
        own = [cells[line.name, name] for name in columns(page.plan)]
        shown = found[line.label]
        assert shown[1 : 1 + len(own)] == [f"{100 * mean(row.correct):.1f}" for row in own]
        average = 100 * mean(mean(row.correct) for row in own)
        tokens = mean(sum(row.emitted) / sum(row.forwards) for row in own)
        assert shown[1 + len(own)].startswith(f"{average:.1f} ") and shown[2 + len(own)].startswith(f"{tokens:.2f} ")


@pages
def test_claims_compare_the_lines_that_they_name(page: TablePage) -> None:
    """Guards against a swapped sign or pair, and a renamed line, which would leave its claim out for ever."""
    rows = rows_of(page)
    cells = latest_cells(rows)
    for claim in page.claims:
        found = claim.of(rows)
        assert found.estimate is not None and set(claim.lines) <= {line.name for line in page.plan.lines}
        if len(claim.lines) == 2 and claim.unit == "points":
            one, other = ([mean(cells[name, b].correct) for b in columns(page.plan)] for name in claim.lines)
            assert found.estimate.value == pytest.approx(100 * (mean(one) - mean(other)))


@pages
@pytest.mark.parametrize("case", ["no rows", "one question", "all right", "nothing done"])
def test_nothing_undefined_is_printed_or_drawn(page: TablePage, case: str, tmp_path: Path) -> None:
    """Guards against NaN, infinity, None or a crash on a page or its figure, whatever is missing."""

    def first(row: EvaluationRow) -> EvaluationRow:
        return replace(row, correct=row.correct[:1], emitted=row.emitted[:1], forwards=row.forwards[:1])

    changes: dict[str, Callable[[EvaluationRow], EvaluationRow]] = {
        "one question": first,
        "all right": lambda row: replace(row, correct=[1.0] * QUESTIONS),
        "nothing done": lambda row: replace(row, status="failed", reason="out of memory", correct=[]),
    }
    rows = rows_of(page, changes[case]) if case in changes else []
    text = page.render(rows, "mini")
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert ("out of memory" in text) == (case == "nothing done")
    page.draw(rows, "mini", tmp_path)


def found_of(value: float, side: Any, **said: Any) -> Finding:
    claim = Claim(measure=lambda rows: Measured(), bound=Bound(low=0.0), text="It is so", **said)
    return Finding(claim, Measured(Estimate(value, Interval(value - 1, value + 1), 9)), side, p=0.01)


def test_a_verdict_is_that_after_holm_and_says_where_it_holds() -> None:
    """Guards against a verdict that the correction takes back, and one of small models that passes for the paper's."""
    sure = replace(found_of(2.0, "holds"), after_holm=0.02)
    assert verdict(sure, "mini") == "holds in the toy" and verdict(sure, "135m") == "holds"
    assert verdict(replace(sure, after_holm=0.06), "mini") == "open"
    assert verdict(found_of(2.0, "holds", untestable="Too small."), "mini") == "not testable here"
    assert verdict(found_of(2.0, "holds", check=True), "mini") == "by construction"
    assert verdict(found_of(2.0, "does not hold", check=True), "mini") == "broken: does not hold"
    assert tally([("mini", sure), ("mini", sure), ("mini", found_of(0.0, "open"))]) == "2 hold, 1 open"


def test_a_page_shows_the_verdict_among_all_claims() -> None:
    """Guards against a page and the index that judge the same claim by other corrections."""
    claim = TABLE2.claims[-1]
    rows = rows_of(TABLE2)
    own = claim.over([rows])
    judged = replace(own, after_holm=0.5)
    assert "open" in page_claims([claim], SeedRows({0: rows}, [judged]), "mini")


def test_a_limit_beside_a_bound_is_printed_on_its_side() -> None:
    """Guards against "[-2.0, ...]" beside a bound of -2, which leaves the verdict to be guessed."""
    claim = Claim(measure=lambda rows: Measured(), bound=Bound(low=-2.0), signed=True)
    assert Finding(claim, Measured(Estimate(-1.0, Interval(-2.02, 0.04), 9))).found == "-1.00 [-2.02, +0.04] points"


def test_a_study_stands_on_the_page_of_another(tmp_path: Path) -> None:
    """Guards against two first headings on a page, and a part that is lost."""
    on = studies_on("table8")
    assert [study.key for study in on] == ["table8", "table4", "figure6"]
    by_key = {page.plan.key: rows_of(page) for page in PAGES}
    parts = [(study, by_key[study.key], {0: by_key[study.key]}) for study in on]
    text = page_of(parts, "mini")
    assert len(re.findall("^# ", text, re.MULTILINE)) == 1 and "## Table 4 at scale mini" in text
    written = write_page(parts, "mini", tmp_path)
    links = re.findall(r"\]\((figures/\S+\.png)\)", written[0].read_text(encoding="utf-8"))
    assert links and all((tmp_path / link).is_file() for link in links)
    first = [file.read_bytes() for file in written]
    assert [file.read_bytes() for file in write_page(parts, "mini", tmp_path)] == first, "the same twice"


def test_pages_are_few_and_short() -> None:
    """Guards against reports that nobody reads."""
    counts = {
        page: len(page.read_text(encoding="utf-8").split())
        for page in [*(ROOT / "reports").glob("*.md"), *(ROOT / "reports/135m").glob("*.md")]
    }
    assert len(counts) <= MOST_PAGES and sum(counts.values()) <= ALL_WORDS
    assert {page.name: count for page, count in counts.items() if count > MOST_WORDS} == {}


def test_numbers_and_tables() -> None:
    """Guards against a p value of 0.000, and a pipe that shifts the columns."""
    assert p_value(0.00001) == "< 0.0001" and p_value(0.0499) == "0.0499"
    assert "a\\|b" in table(["x"], [["a|b"]])
