"""The page of curves: the rule for the scale's steps decides as it says, and only what is trained is measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_up import answered
from stored import measured_of

from marsbench.findings.cells import BENCHMARKS
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, Row, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.studies.curves import CURVES, PLAN, SCALES_OWN, STUDY, settled

N = 300  # questions per benchmark
ENDINGS = CURVES[SCALES_OWN]


def points(*right: tuple[int, int]) -> list[Row]:
    """A curve: at each of its steps, so many of N questions right by AR SFT and by every line of MARS."""
    found = list[Row]()
    for place, (ending, (ar, mars)) in enumerate(zip(ENDINGS, right, strict=False)):
        size = {
            "block_size": 4,
            "steps": 800 * 2**place,
            "parameters": 900_000,
            "tokens": 1,
            "seconds": 1.0,
            "loss": 1.0,
        }
        found.append(TrainingRow(f"training{ending}", "done", "", "mini", stage=f"mars{ending}", **size))
        for line in PLAN.lines:
            if line.stage in (f"ar_sft{ending}", f"mars{ending}"):
                count = ar if line.method == "ar" else mars
                correct = [question < count for question in range(N)]
                found += [answered(line, name, correct, [120] * N, [100] * N) for name in BENCHMARKS]
    return found


@pytest.mark.parametrize(
    ("right", "steps", "words"),
    [
        (((200, 180), (200, 180), (201, 181)), 800, "800 steps"),
        (((200, 180), (200, 220), (200, 221)), 1600, "1,600 steps"),  # MARS alone still moves
        (((200, 180), (240, 180), (240, 180)), 1600, "1,600 steps"),  # AR SFT alone
        (((200, 180), (200, 180), (200, 220), (200, 220)), 3200, "3,200 steps"),  # a pause is no end
        (((200, 180), (200, 220)), None, "not reached: still moves at 1,600 steps"),
        (((200, 180),), None, "not measured"),
    ],
)
def test_the_rule_names_the_steps_after_which_no_line_moves(
    right: tuple[tuple[int, int], ...], steps: int | None, words: str
) -> None:
    """Guards against a rule that looks at one line, or at the next point alone, or decides without points."""
    assert settled(points(*right), SCALES_OWN) == (steps, words)


def test_a_page_of_some_points_says_that_it_is_in_part(tmp_path: Path) -> None:
    """Guards against missing points that are drawn, or left out in silence."""
    rows = points((200, 180), (201, 181))
    page = STUDY.render(rows, "mini")
    assert "**In part:** points are missing of: shipped base, gentle rate; shipped base, ten" in page
    assert page.count("| shipped base, gentle rate, ") == 2 and "67.0 ± " in page and "; 1.20 |" in page
    assert "1,800 questions a line" in page and "curves_sizes" not in page
    assert {path.stem for path in STUDY.draw(rows, "mini", tmp_path)} == {"curves_steps"}


def test_only_what_is_trained_is_measured(micro_checkpoints: Path, tmp_path: Path) -> None:
    """Guards against a command that trains for hours before it measures the checkpoints that are there."""
    run = Run(preset("micro"), Workspace(tmp_path, "micro"), limit=2, benchmarks=("mini_gsm8k",))
    shutil.copytree(micro_checkpoints, run.workspace.runs / "checkpoints")
    before = sorted((run.workspace.runs / "checkpoints").iterdir())
    rows = [row for row in measured_of(STUDY, run) if isinstance(row, EvaluationRow)]
    assert {row.stage for row in rows} == {"base", "ar_sft", "mars"} and all(row.status == "done" for row in rows)
    assert sorted((run.workspace.runs / "checkpoints").iterdir()) == before
    assert STUDY.trains(run.scale, quick=False) == []
