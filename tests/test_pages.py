"""Pages on lines, from made-up rows: numbers in their places, claims of the lines they name, verdicts in words."""

import re
import shutil
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from made_up import PAGES, ROOT, answered, answers_of, lines_of, measured_of, section, sweep_row

from marsbench.files import PACKAGE
from marsbench.findings.cells import BENCHMARKS, columns, latest_cells
from marsbench.findings.claims import Claim, Finding, Measured
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import SeedRows
from marsbench.line import Line
from marsbench.overview.pages import write_page, write_study
from marsbench.presets import preset
from marsbench.rendering import figures, markdown
from marsbench.rendering.claims_in_words import page_claims, tally, verdict
from marsbench.rendering.markdown import filled, table
from marsbench.rows.kinds import AnyRow, EvaluationRow, Row, SweepRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.studies import curves, discrepancies, studies_on
from marsbench.studies.curves import CURVES, SCALES_OWN, settled
from marsbench.studies.discrepancies import ALL_MASKS, NO_CACHE
from marsbench.studies.study import TablePage
from marsbench.studies.table2 import STUDY as TABLE2

QUESTIONS = 61  # per benchmark; a prime, so that no share ends in a rounding tie
MOST_WORDS, ALL_WORDS, MOST_PAGES = 2_500, 30_000, 13
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.plan.key)


def rows_of(page: TablePage) -> list[AnyRow]:
    return [*answers_of(page, questions=QUESTIONS)]


@pages
def test_numbers_and_claims_are_of_their_lines(page: TablePage) -> None:
    """Guards against a number in the wrong line or column, a swapped sign or pair, and a claim of a renamed line."""
    rows = rows_of(page)
    cells, text = latest_cells(rows), page.render(rows, "mini")
    printed = {name: line for line in lines_of(text) for name in line[0].split("; ")}
    for line in page.plan.lines:
        if page.lines and line.name not in page.lines:
            continue
        own = [cells[line.name, name] for name in columns(page.plan)]
        shown = printed[line.label]
        assert shown[1 : 1 + len(own)] == [f"{100 * mean(row.correct):.1f}" for row in own]
        average = 100 * mean(mean(row.correct) for row in own)
        tokens = mean(sum(row.emitted) / sum(row.forwards) for row in own)
        assert shown[1 + len(own)].startswith(f"{average:.1f} ") and shown[2 + len(own)].startswith(f"{tokens:.2f} ")
    for claim in page.claims:
        estimate = claim.of(rows).estimate
        assert estimate is not None and set(claim.lines) <= {line.name for line in page.plan.lines}
        if len(claim.lines) == 2 and claim.unit == "points":
            first, second = ([mean(cells[name, b].correct) for b in columns(page.plan)] for name in claim.lines)
            assert estimate.value == pytest.approx(100 * (mean(first) - mean(second)))


@pages
@pytest.mark.parametrize("case", ["no rows", "one question", "all right", "nothing done"])
def test_nothing_undefined_is_printed_or_drawn(page: TablePage, case: str, tmp_path: Path) -> None:
    """Guards against NaN, infinity, None or a crash on a page or its figure, whatever is missing."""
    counts = ("correct", "emitted", "forwards")
    changes: dict[str, Callable[[EvaluationRow], dict[str, Any]]] = {
        "one question": lambda row: {name: getattr(row, name)[:1] for name in counts},
        "all right": lambda row: {"correct": [1.0] * QUESTIONS},
        "nothing done": lambda row: {"status": "failed", "reason": "out of memory", "correct": []},
    }
    rows = [replace(row, **changes[case](row)) for row in rows_of(page)] if case in changes else []
    text = page.render(rows, "mini")
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert ("out of memory" in text) == (case == "nothing done")
    page.draw([rows], tmp_path)


def finding(value: float, side: Any, **options: Any) -> Finding:
    claim = Claim(measure=lambda rows: Measured(), bound=Bound(low=0.0), text="It is so", **options)
    return Finding(claim, Measured(Estimate(value, Interval(value - 1, value + 1), 9)), side, p=0.01)


def test_a_verdict_is_that_after_holm_and_says_where_it_holds() -> None:
    """Guards against verdicts before Holm, toys shown as the paper's, "-2.0" beside a bound -2, p of 0, and pipes."""
    sure = replace(finding(2.0, "holds"), after_holm=0.02)
    assert verdict(sure, "mini") == "holds in the toy" and verdict(sure, "135m") == "holds"
    assert verdict(replace(sure, after_holm=0.06), "mini") == "open"
    assert verdict(finding(2.0, "holds", untestable="Too small."), "mini") == "not testable here"
    assert verdict(finding(2.0, "holds", check=True), "mini") == "by construction"
    assert verdict(finding(2.0, "does not hold", check=True), "mini") == "broken: does not hold"
    assert tally([("mini", sure), ("mini", sure), ("mini", finding(0.0, "open"))]) == "2 hold, 1 open"
    claim = Claim(measure=lambda rows: Measured(), bound=Bound(low=-2.0), signed=True)
    assert Finding(claim, Measured(Estimate(-1.0, Interval(-2.02, 0.04), 9))).found == "-1.00 [-2.02, +0.04] points"
    assert p_value(0.00001) == "< 0.0001" and p_value(0.0499) == "0.0499"
    assert "a\\|b" in table(["x"], [["a|b"]])
    claim, rows = TABLE2.claims[-1], rows_of(TABLE2)
    judged = replace(claim.over([rows]), after_holm=0.5)
    assert "open" in page_claims([claim], SeedRows({0: rows}, [judged]), "mini")


def test_a_study_stands_on_the_page_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two first headings on a page, a part that is lost, and files that differ from run to run."""
    monkeypatch.setitem(figures.FORMATS, "svg", {"Date": None, "Creator": None})
    *on, last = studies_on("table8")
    assert [study.key for study in (*on, last)] == ["table8", "table4", "figure6", "breaks"]
    by_key = {page.plan.key: rows_of(page) for page in PAGES}
    parts = [(study, by_key[study.key], {0: by_key[study.key]}) for study in on]
    written = write_page(parts, "mini", tmp_path)
    text = written[0].read_text(encoding="utf-8")
    assert len(re.findall("^# ", text, re.MULTILINE)) == 1 and "## Table 4 at scale mini" in text
    links = re.findall(r"\]\((figures/\S+\.png)\)", text)
    assert links and all((tmp_path / link).is_file() for link in links)
    first = [file.read_bytes() for file in written]
    assert [file.read_bytes() for file in write_page(parts, "mini", tmp_path)] == first, "the same twice"
    assert {file.suffix for file in written} == {".md", ".png", ".svg"}


def test_pages_are_short_and_layouts_sound() -> None:
    """Guards against reports that are too long, and layouts with a stray brace or lines too long."""
    counts = {
        page: len(page.read_text(encoding="utf-8").split())
        for page in [*(ROOT / "reports").glob("*.md"), *(ROOT / "reports/135m").glob("*.md")]
    }
    assert len(counts) <= MOST_PAGES and sum(counts.values()) <= ALL_WORDS
    assert {page.name: count for page, count in counts.items() if count > MOST_WORDS} == {}
    files = [file for room in ("studies", "overview") for file in (PACKAGE / room).rglob("*.md")]
    assert len(files) > 6
    for file in files:
        text = file.read_text(encoding="utf-8")
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        assert names and all(name.isidentifier() for name in names), file
        assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|")), file


CURVE_N = 300  # questions per benchmark
ENDINGS = CURVES[SCALES_OWN]


def points(*right: tuple[int, int], questions: int = CURVE_N) -> list[Row]:
    """A curve: at each of its steps, so many of its questions right by AR SFT and by every line of MARS."""
    rows = list[Row]()
    for place, (ending, (ar, mars)) in enumerate(zip(ENDINGS, right, strict=False)):
        training = f"mars{ending}", 4, 900_000, 800 * 2**place, 1, 1.0, 1.0
        rows.append(TrainingRow(f"training{ending}", "done", "", "mini", *training, checkpoint=f"trained{ending}"))
        for line in curves.PLAN.lines:
            if line.stage in (f"ar_sft{ending}", f"mars{ending}"):
                count = ar if line.method == "ar" else mars
                correct = [question < count for question in range(questions)]
                rows += [answered(line, name, correct, [120] * questions, [100] * questions) for name in BENCHMARKS]
    return rows


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (((200, 180), (200, 180), (201, 181)), "800"),
        (((200, 180), (200, 220), (200, 221)), "1,600"),  # MARS alone still moves
        (((200, 180), (240, 180), (240, 180)), "1,600"),  # AR SFT alone
        (((200, 180), (200, 180), (200, 220), (200, 220)), "3,200"),  # a pause is no end
        (((200, 180), (200, 220)), "more than 800"),  # the last point has no later one
        (((200, 180),), "not measured"),
    ],
)
def test_the_rule_names_the_steps_after_which_no_line_moves(right: tuple[tuple[int, int], ...], words: str) -> None:
    """Guards against a rule that looks at one line or at the next point only, or decides without points."""
    assert settled([points(*right)], SCALES_OWN) == words


def test_a_page_of_some_points_says_that_it_is_in_part(tmp_path: Path) -> None:
    """Guards against missing points that are drawn, or left out without a note."""
    rows = points((200, 180), (201, 181))
    page = curves.STUDY.render(rows, "mini")
    assert "**In part:** some points are not measured of: shipped base, gentle rate; shipped base, ten" in page
    assert page.count("| shipped base, gentle rate, ") == 2 and "67.0 ± " in page and "; 1.20 |" in page
    assert "1,800 questions per line" in page and "curves_sizes" not in page
    assert {path.stem for path in curves.STUDY.draw([rows], tmp_path)} == {"curves_steps"}


@pytest.mark.parametrize("seed", curves.PLAN.seeds[:2])
def test_a_page_of_a_seed_of_its_own_is_written(seed: int, tmp_path: Path) -> None:
    """Guards against a command that measures all rows and then ends in a KeyError instead of a page."""
    workspace = Workspace(tmp_path, "mini", f"seed{seed}")
    workspace.publish(curves.PLAN.key, points((130, 120), (131, 121), questions=curves.QUESTIONS))
    assert "**In part:**" in write_study(curves.STUDY, workspace).read_text()


def test_only_what_is_trained_is_measured(micro_checkpoints: Path, tmp_path: Path) -> None:
    """Guards against a command that trains for hours before it measures the checkpoints that are there."""
    run = Run(preset("micro"), Workspace(tmp_path, "micro"), limit=2, benchmarks=("mini_gsm8k",))
    shutil.copytree(micro_checkpoints, run.workspace.runs / "checkpoints")
    before = sorted((run.workspace.runs / "checkpoints").iterdir())
    rows = [row for row in measured_of(curves.STUDY, run) if isinstance(row, EvaluationRow)]
    assert {row.stage for row in rows} == {"base", "ar_sft", "mars"} and all(row.status == "done" for row in rows)
    assert sorted((run.workspace.runs / "checkpoints").iterdir()) == before
    assert curves.STUDY.trains(run.scale, quick=False) == []


LAYOUT = """# Speed at scale {scale}

- Fast: {fast}.
- Slow: {slow}.

A paragraph that is
wrapped, on {scale}.

It is {slow} slow.

{slow}

---
## A section

Its words.

{slow}

---
## Another

{fast}

{slow}

| a | b |
|---|---|
"""


def test_what_has_nothing_to_say_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against headings over nothing, half sentences, broken paragraphs, and a slot that is not filled."""
    (tmp_path / "page.md").write_text(LAYOUT, encoding="utf-8")
    monkeypatch.setattr(markdown.resources, "files", lambda package: tmp_path)
    first, section, other = filled("any", "page.md", {"scale": "mini", "fast": "1 {slow}", "slow": ""})
    shown = "# Speed at scale mini\n\n- Fast: 1 {slow}.\n\nA paragraph that is wrapped, on mini."
    assert first == shown, "what fills a slot is no layout"
    assert section == ""
    assert other == "## Another\n\n1 {slow}\n\n| a | b |\n|---|---|"
    with pytest.raises(KeyError, match="slow"):
        filled("any", "page.md", {"scale": "mini", "fast": "1"})


def twenty_questions(arm: str, right: int, tokens: int) -> list[EvaluationRow]:
    """A line that has so many of twenty questions right and emits so many tokens in ten forwards, everywhere."""
    correct, line = [1.0] * right + [0.0] * (20 - right), Line(arm, "", "mars", "mars")
    return [answered(line, name, correct, [tokens] * 20, [10] * 20) for name in BENCHMARKS]


def raced(contender: str, batch_size: int, seconds: Sequence[float]) -> SweepRow:
    """A contender that emits as many tokens in so many seconds as `ar` beside it in one."""
    return sweep_row(contender, contender.partition(",")[0], batch_size, seconds, forwards=50, positions=200)


def of_page(rows: Sequence[Row], number: str) -> str:
    return section(discrepancies.STUDY.render(rows, "mini"), f"{number}:")


def test_differences_have_their_size_sign_and_verdict() -> None:
    """Guards against a difference of wrong sign or in fractions, one that is called seen, and ratios upside down."""
    rows = [*twenty_questions("mars_b4", 18, 10), *twenty_questions("mars_paper_alignment_b4", 15, 10)]
    rows += [*twenty_questions("mars_b4_0.95", 15, 20), *twenty_questions("mars_paper_alignment_b4_0.95", 15, 25)]
    lines = [line for line in of_page(rows, "D1").splitlines() if line.startswith("| MARS")]
    assert "-15.0" in lines[0] and "+0.00" in lines[0] and "accuracy differs" in lines[0]
    assert "+0.0" in lines[1] and "+0.50" in lines[1] and "tokens/forward differs" in lines[1]
    assert discrepancies.tally({0: rows}) == "2 of 2 comparisons of lines differ (2 with one training seed)"
    alike = [*twenty_questions("mars_b4", 18, 10), *twenty_questions("mars_paper_alignment_b4", 18, 10)]
    assert "no difference seen" in of_page(alike, "D1")
    assert discrepancies.tally({0: alike}) == "0 of 1 comparisons of lines differ (1 with one training seed)"
    rows = [raced(NO_CACHE, 1, [1.0, 1.1, 0.9]), raced(ALL_MASKS, 1, [2.0, 2.2, 1.8])]
    (line,) = [line for line in of_page(rows, "D10").splitlines() if line.startswith("| 1 ")]
    assert "0.50 [0.50, 0.50]" in line and "differs" in line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [([0.5, 0.6], "up to 48"), ([0.5, 1.0], "From batch size 48 on"), ([1.0, 0.5], "From batch size 1 on")],
)
def test_the_knee_is_the_first_batch_size_without_a_gain(seconds: list[float], words: str) -> None:
    """Guards against a knee that is missed, or found where MARS is faster."""
    rows = [raced("mars", size, [taken] * 3) for size, taken in zip((1, 48), seconds, strict=True)]
    assert words in of_page(rows, "D14")
