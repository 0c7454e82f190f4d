"""Reports from made-up rows: every number is worked out again here, from the rows and by other means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, mean, median
from typing import Any

import numpy as np
import pytest
from made_up import answered, section

from marsbench.findings.cells import BENCHMARKS
from marsbench.findings.in_words import bracketed, duration, p_value, plus_minus, signed_number
from marsbench.overview.pages import write_page
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, TrainingRow
from marsbench.statistics.intervals import Estimate, Interval, accuracy, mean_of_benchmarks, tokens_per_forward
from marsbench.studies.table2 import CLAIMS, PAGE, STUDY

PLAN, render = PAGE.plan, STUDY.render
Z = NormalDist().inv_cdf(0.975)
CLAIM, CHECK, VERDICT = 9, 7, 7  # cells of a line with a claim, with a check, and the place of a claim's verdict
REPORTS = Path(__file__).parent.parent / "reports"
QUESTIONS = 37  # per benchmark; a prime, so that no share ends in a rounding tie
SKILL = {  # share of right answers of each arm
    "base": 0.2,
    "ar_sft": 0.6,
    "ar_sft_2x": 0.62,
    "block_diffusion": 0.4,
    "block_diffusion_shifted": 0.45,
    "mars_no_sft": 0.5,
    "mars": 0.64,
    "untrained_masks": 0.1,
    "untrained_masks_always": 0.05,
    "mars_95": 0.6,
    "mars_paper": 0.65,
    "mars_paper_95": 0.61,
}
PROVENANCE: dict[str, Any] = {
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "started": "2026-01-02T03:04:05+00:00",
    "python": "3.12.3",
    "platform": "Linux-6.8-x86_64",
    "versions": {"torch": "2.9.1", "lm_eval": "0.4.13"},
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_gib": 15.6, "gpu": None},
    "threads": 2,
    "seed": 7,
}


def evaluation_rows() -> Iterator[EvaluationRow]:
    generator = np.random.default_rng(0)
    for name in BENCHMARKS:
        difficulty = generator.random(QUESTIONS)  # shared by all arms, so that answers are paired
        for arm in PLAN.lines:
            forwards = generator.integers(5, 40, QUESTIONS)
            extra = generator.integers(1, 30, QUESTIONS) * ("threshold" in arm.options)
            more = {"seconds": 10.0, "max_new_tokens": 96, "provenance": PROVENANCE}
            yield answered(arm, name, difficulty < SKILL[arm.name], forwards + extra, forwards, **more)


def training_rows() -> Iterator[TrainingRow]:
    for position, (stage, size) in enumerate(PLAN.stages):
        numbers = (size, 1_000_000, 4000 + position, 5_000_000 + position, 100.0 + position, 1.25)
        yield TrainingRow(stage, "done", "", "mini", stage, *numbers, provenance=PROVENANCE)


STEP_COST = StepCostRow(
    "cost", "done", "", "mini",
    seconds={"ar": [1.0, 2.0, 4.0, 1.0], "mars": [2.0, 5.0, 8.4, 2.3]},
    memory={"ar": [100, 200, 400, 100], "mars": [150, 310, 600, 149]},
    provenance=PROVENANCE,
)  # fmt: skip
ROWS: list[Row] = [*evaluation_rows(), *training_rows(), STEP_COST]


def changed(change: Callable[[EvaluationRow], EvaluationRow | None]) -> list[Row]:
    """ROWS with every evaluation row replaced, or left out where the change gives None."""
    rows = [change(row) if isinstance(row, EvaluationRow) else row for row in ROWS]
    return [row for row in rows if row is not None]


def evaluation(arm: str, benchmark: str) -> EvaluationRow:
    wanted = (arm, f"mini_{benchmark}")
    return next(row for row in ROWS if isinstance(row, EvaluationRow) and (row.arm, row.benchmark) == wanted)


def cells_of(text: str, first: str) -> list[list[str]]:
    """The table lines of a text that begin with a cell, split into cells."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return [line for line in lines if line[0] == first]


def verdicts(page: str) -> list[str]:
    text = section(page, "Claims")
    lines = [line for letter in "abcdefgh" for line in cells_of(text, letter) if len(line) in (CLAIM, CHECK)]
    return [line[VERDICT] if len(line) == CLAIM else line[-1] for line in lines]


def test_claims_compare_the_arms_that_they_name() -> None:
    """Guards against a swapped sign or pair: difference, questions and p are worked out from the rows."""
    page = section(render(ROWS, "mini"), "Claims")
    line = cells_of(page, "c")[0]
    pairs = [(evaluation("ar_sft", name).correct, evaluation("block_diffusion", name).correct) for name in BENCHMARKS]
    points = 100 * mean(mean(a) - mean(b) for a, b in pairs)
    assert line[2] == "AR SFT minus Block Diffusion (B = 4) > 0"
    assert line[3].startswith(f"+{points:.1f} [")
    below = points - float(line[3].split("[")[1].split(",")[0])
    p = 2 * NormalDist().cdf(-Z * points / below)
    assert line[4:6] == [str(6 * QUESTIONS), "1"] and line[7:] == ["supported", ""]
    assert float(line[6].lstrip("< ")) == pytest.approx(p, rel=0.2) or (line[6] == "< 0.0001" and p < 0.0001)


def with_mars_beating_ar_sft_on(better: int, worse: int) -> list[Row]:
    """ROWS in which each benchmark has `better` questions that only MARS gets right, `worse` only AR SFT."""
    same = [1.0] * (QUESTIONS - better - worse)
    answers = {
        "mars": [1.0] * better + [0.0] * worse + same,
        "ar_sft": [0.0] * better + [1.0] * worse + same,
    }
    return changed(lambda row: replace(row, correct=answers.get(row.arm, row.correct)))


@pytest.mark.parametrize(
    ("better", "worse", "matches", "exceeds"),
    [
        (12, 2, "supported, significantly better", "supported"),
        (2, 1, "supported", "inconclusive"),
        (2, 3, "inconclusive", "inconclusive"),
        (2, 12, "not supported", "not supported"),
    ],
)
def test_verdicts_follow_the_data(better: int, worse: int, matches: str, exceeds: str) -> None:
    """Guards against verdicts that flatter the paper: the same claim must be able to fail."""
    page = render(with_mars_beating_ar_sft_on(better, worse), "mini")
    assert verdicts(page)[:2] == [matches, exceeds]


def test_missing_arm_is_not_run_everywhere() -> None:
    """Guards against a crash, or a verdict, when part of a sweep has not run yet."""
    page = render(changed(lambda row: None if row.arm == "mars_no_sft" else row), "mini")
    line = cells_of(section(page, "Measured"), "MARS w/o SFT loss (B = 4)")[0]
    assert line[1:] == ["not run"] * 6 + ["n/a"] * 2
    assert cells_of(section(page, "Claims"), "d")[0][3:] == ["n/a", "n/a", "n/a", "n/a", "not run", ""]


def failed_humaneval(row: EvaluationRow) -> EvaluationRow:
    if row.benchmark != "mini_humaneval":
        return row
    return replace(row, status="skipped", reason="no code\n sandbox", correct=[], emitted=[], forwards=[])


def test_cell_without_numbers_shows_status_and_reason() -> None:
    """Guards against swallowed failures, and against an average over five benchmarks taken for one over six."""
    page = render(changed(failed_humaneval), "mini")
    measured = section(page, "Measured")
    rest = [evaluation("ar_sft", name) for name in BENCHMARKS if name != "humaneval"]
    average = plus_minus(mean_of_benchmarks([accuracy(row.correct) for row in rest]), 1, factor=100)
    speed = plus_minus(mean_of_benchmarks([tokens_per_forward(row.emitted, row.forwards) for row in rest]), 2)
    assert '"(5 of 6)"' in measured and '"(5 of 6)"' not in render(ROWS, "mini")
    assert cells_of(measured, "AR SFT")[0][6:] == ["skipped", f"{average} (5 of 6)", f"{speed} (5 of 6)"]
    assert "- skipped: no code sandbox (HumanEval: every line)" in measured
    assert cells_of(section(page, "Claims"), "b")[0][4] == f"{5 * QUESTIONS} (5 of 6 benchmarks)"


def test_arms_with_unequal_questions_are_not_compared() -> None:
    """Guards against a crash or a wrong pairing when arms were run with different limits."""
    shorter = changed(lambda row: replace(row, correct=row.correct[:30]) if row.arm == "ar_sft" else row)
    line = cells_of(section(render(shorter, "mini"), "Claims"), "a")[0]
    assert "several numbers of questions (30, 37)" in line[3]
    assert line[VERDICT] == "not run"


def test_latest_row_of_a_cell_counts() -> None:
    """Guards against showing an old failure after a cell was measured."""
    old = [failed_humaneval(row) for row in ROWS if isinstance(row, EvaluationRow)]
    assert render([*old, *ROWS], "mini") == render(ROWS, "mini")


def test_other_scales_are_left_out() -> None:
    """Guards against mixing scales in one table, and against naming tiny numbers Qwen's."""
    other = render(ROWS, "0.5b")
    assert cells_of(section(other, "Measured"), "AR SFT")[0][1:7] == ["not run"] * 6
    assert "`nox -s reproduce-table2 -- --scale 0.5b`" in other
    assert "`nox -s reproduce-table2 -- --seed 7`" in render(ROWS, "mini")
    assert "they are not Qwen numbers" in render(ROWS, "mini")
    assert "they are not Qwen numbers" not in other


def test_answers_cut_at_the_limit_are_shown() -> None:
    """Guards against hiding that answers were cut, and against an empty table where none was."""
    cut = changed(lambda row: replace(row, finished=[0, 0, *row.finished[2:]]) if row.arm == "mars" else row)
    text = "Answers cut at the token limit"
    line = cells_of(section(render(cut, "mini"), "Measured").split(text)[1], "MARS (B = 4)")[0]
    assert line[1:] == [f"{100 * 2 / QUESTIONS:.1f}"] * 6
    assert text not in render(ROWS, "mini")


def test_training_is_what_the_rows_say() -> None:
    """Guards against mixed-up columns, and against a ratio of medians instead of paired ratios."""
    text = section(render(ROWS, "mini"), "Training")
    assert cells_of(text, "mars")[0] == [
        "mars",
        "4",
        "4,006",
        "5,000,006",
        "1 min 46 s",
        "1.250",
        "1,000,000",
    ]
    ratio = median([2.0, 2.5, 2.1, 2.3])
    assert f"A MARS step costs {ratio:.2f} [" in text
    assert "Published: 2.0 and 2.2 times" in text
    assert "It holds 1.50 [" in text


def test_failed_stage_shows_status_and_reason() -> None:
    """Guards against a stage that failed and looks as if nobody had asked for it."""
    stages = [replace(row, status="failed", reason="out of | memory") for row in training_rows()][:1]
    text = section(render([*stages, replace(STEP_COST, status="timeout", reason="too slow")], "mini"), "Training")
    assert cells_of(text, "base")[0][2] == "failed"
    assert "- base: failed: out of | memory" in text
    assert cells_of(text, "mars")[0][2] == "not run"
    assert "Cost of a MARS step: timeout: too slow." in text


def test_how_it_was_made_is_what_provenance_says() -> None:
    """Guards against a page whose numbers nobody can trace or time."""
    later = {**PROVENANCE, "started": "2026-01-02T09:00:00+00:00", "commit": "f" * 40, "dirty": True}
    rows = changed(lambda row: replace(row, provenance=later) if row.arm == "mars" else row)
    text = section(render(rows, "mini"), "How this was made")
    facts = {name: cells_of(text, name)[0][1] for name in ("commit", "seed", "hardware", "measured", "versions")}
    assert facts == {
        "commit": "0123456789ab; ffffffffffff with uncommitted changes",
        "seed": "7",
        "hardware": "Some CPU, 4 cores, 16 GiB memory, no GPU",
        "measured": "2026-01-02T03:04:05+00:00 to 2026-01-02T09:00:00+00:00",
        "versions": "lm_eval 0.4.13, torch 2.9.1",
    }
    assert cells_of(text, "tokens per answer at most")[0][1] == "96"
    assert cells_of(text, "ar_sft")[0][1:] == ["1 min 41 s", "3 min 00 s", "4 min 41 s"]  # three arms decode it
    assert cells_of(text, "total")[0][1:] == ["13 min 48 s", "12 min 00 s", "25 min 48 s"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [replace(row, provenance={}) for row in ROWS],
        changed(
            lambda row: replace(
                row,
                correct=row.correct[:1],
                emitted=row.emitted[:1],
                forwards=row.forwards[:1],
                provenance={"hardware": None, "versions": None, "commit": None},
            )
        ),
        [replace(row, loss=float("nan")) for row in training_rows()],
        [replace(STEP_COST, seconds={"ar": [1.0], "mars": [2.0]})],
    ],
    ids=["no rows", "no provenance", "one question", "diverged", "one repeat"],
)
def test_nothing_undefined_is_printed(rows: list[Row]) -> None:
    """Guards against NaN, infinity or None on a page, whatever is missing."""
    page = render(rows, "mini")
    assert not re.search(r"\b(nan|inf|None)\b", page)
    run = {row.arm for row in rows if isinstance(row, EvaluationRow)}
    left_out = {arm.name for arm in PLAN.lines if arm.optional and arm.name not in run}
    assert len(verdicts(page)) == len([claim for claim in CLAIMS if not left_out & {*claim.lines}])


def test_report_is_written_the_same_twice(tmp_path: Path) -> None:
    """Guards against clocks, random identifiers and sets in the files, and against leftovers of writing."""
    first = write_page(STUDY, ROWS, "mini", tmp_path / "first")
    second = write_page(STUDY, ROWS, "mini", tmp_path / "second")
    names = [path.relative_to(tmp_path / "first").as_posix() for path in first]
    assert names == ["table2.md", "figures/table2_accuracy.png", "figures/table2_accuracy.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert sorted(path for path in (tmp_path / "first").rglob("*") if path.is_file()) == sorted(first)
    assert first[0].read_text(encoding="utf-8") == render(ROWS, "mini")


def test_failed_drawing_leaves_the_old_page(tmp_path: Path) -> None:
    """Guards against a page that speaks of a figure that could not be drawn."""
    page = write_page(STUDY, [], "mini", tmp_path)[0]
    before = page.read_bytes()

    def no_space(*_: object) -> list[Path]:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_page(replace(STUDY, figures=no_space), ROWS, "mini", tmp_path)
    assert page.read_bytes() == before


@pytest.mark.parametrize("page", [one for one in REPORTS.rglob("*.md") if "seed" not in str(one)], ids=str)
def test_a_page_can_be_read_in_three_minutes(page: Path) -> None:
    """Guards against an answer longer than five sentences, a table of more lines than one takes in, and one that
    unfolds by itself."""
    text = re.sub(r"<details>.*?</details>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    answer = re.split(r"^(?:!\[|\||## )", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert len(re.findall(r"^- ", answer, re.MULTILINE)) <= 5
    assert len(text.splitlines()) <= 250
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert page.name == "index.md" or all(len(one.splitlines()) - 2 <= 12 for one in tables)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3599.7, "1 h 00 min"), (7620, "2 h 07 min")],
)
def test_durations(seconds: float, text: str) -> None:
    """Guards against "60 s" and "60 min" where rounding carries over."""
    assert duration(seconds) == text


def test_numbers() -> None:
    """Guards against a negative zero, a p value of 0.000 and infinite half-widths."""
    assert signed_number(-0.04, 1) == "+0.0"
    assert bracketed(Interval(-0.04, 1.26), 1) == "[0.0, 1.3]"
    assert bracketed(Interval(-2.0, 1.0), 1, signed=True) == "[-2.0, +1.0]"
    assert (p_value(0.00004), p_value(0.00042), p_value(0.0416)) == ("< 0.0001", "0.00042", "0.042")
    assert (p_value(0.0497), p_value(0.0503), p_value(None)) == ("0.0497", "0.0503", "n/a")
    assert plus_minus(Estimate(0.5, Interval(0.25, 0.85), 9), 1, factor=100) == "50.0 ± 30.0"
    assert plus_minus(Estimate(2.0, Interval(-float("inf"), float("inf")), 1), 2) == "2.00"


def test_table_survives_what_would_break_it() -> None:
    """Guards against a pipe or a line break in a cell that shifts the columns."""
    lines = table(["name", "value"], [["a|b", "one\ntwo"]]).splitlines()
    assert len(lines) == 3
    assert re.findall(r"(?<!\\)\|", lines[2]) == ["|"] * 3
