"""The page on a real model: who agrees with whom, what is missing, and that its rows are made once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored import page_rows
from typer.testing import CliRunner

from marsbench.cli import app
from marsbench.evaluation.harness import digest_of
from marsbench.findings.between_lines import more_accurate
from marsbench.findings.collection import collect
from marsbench.findings.sweep import SweepCells
from marsbench.forward.fastest import reads_bf16
from marsbench.methods import METHODS
from marsbench.rows.kinds import EvaluationRow, SweepRow
from marsbench.rows.workspace import Workspace
from marsbench.studies import pages
from marsbench.studies.real_model import STUDY
from marsbench.studies.real_model.lines import (
    AR,
    AR_OF_MARS,
    BASE,
    CLAIMS,
    GRID_NAMES,
    GROUPS,
    IN_BF16,
    OUTSIDERS,
    PLAN,
)

RESULTS = Path(__file__).parent.parent / "results"


def answers(arm: Any, digests: list[str], benchmark: str = "gsm8k") -> EvaluationRow:
    """A cell of scale 135m whose answers are given by what their tokens hash to."""
    many = len(digests)
    return EvaluationRow(
        f"{arm.name} {benchmark}", "done", "", "135m", arm.name, arm.stage, arm.method, arm.options, benchmark, "score",
        correct=[1.0] * many, emitted=[10] * many, forwards=[5] * many, finished=[1] * many, digests=digests,
    )  # fmt: skip


def test_answers_are_held_against_their_own_checkpoint_and_the_base() -> None:
    """Guards against agreement with another checkpoint's answers, and a count that takes unlike lengths for alike."""
    rows = [
        answers(AR, ["a", "b", "c", "d"]),
        answers(GROUPS, ["a", "b", "c", "x"]),
        answers(AR_OF_MARS, ["a", "m", "n", "o"]),
        answers(
            next(line for line in PLAN.lines if line.stage == "base_mars" and line.method == "mars-verified"), [*"amno"]
        ),
    ]
    page = STUDY.render(rows, "135m")
    assert "of 8 answers that a method promises to be those of AR decoding, 7 are." in page


def test_a_claim_pairs_lines_of_one_type_of_weights_on_the_same_questions() -> None:
    """Guards against a claim that takes rows of another type of weights, on fewer questions, and is "not run"."""
    (collection,) = [each for each in collect(RESULTS.parent, "135m", pages()) if each.scale == "135m"]
    rows = collection.rows[STUDY.key][0]
    lines = {arm.name: arm.dtype for arm in (*PLAN.lines, *IN_BF16.lines)}
    assert all(row.dtype == lines[row.arm] for row in rows if isinstance(row, EvaluationRow))
    found = [claim.over([rows]) for claim in CLAIMS]
    assert {(one.measured.benchmarks, one.estimate and one.estimate.n) for one in found} == {
        (("gsm8k", "humaneval"), 100)
    }
    without_a_head = dict(CLAIMS[0].beside)["without a head"].over([rows]).estimate
    assert without_a_head is not None and round(without_a_head.value, 2) == -0.35, "prompt lookup drafts better"
    answered = [row for row in rows if isinstance(row, EvaluationRow)]
    mixed = [row if row.arm != AR.name else replace(row, dtype="bfloat16") for row in answered]
    refused = more_accurate(PLAN, AR.name, GROUPS.name).of(mixed)
    assert refused.estimate is None and "types of weights" in refused.number


def test_a_race_that_lacks_a_contender_is_said_to_be_in_part() -> None:
    """Guards against what one race lacks, hidden by the other's rows of the same contenders, or by a shorter race."""
    committed = page_rows("real-model", "135m")
    (one, *_) = [row for row in committed if isinstance(row, SweepRow) and row.batch_size == 1]
    raced = [
        replace(one, key=f"{name} {dtype} {prompts}", contender=name, dtype=dtype, prompts=prompts)
        for name in GRID_NAMES
        for dtype in ("float32", "bfloat16")
        for prompts in (one.prompts, 2)
    ]
    answered = [row for row in committed if isinstance(row, EvaluationRow)]

    def lacking(rows: list[SweepRow]) -> str:
        return STUDY.render([*answered, *rows], "135m").partition("Not measured yet")[2].partition("\n")[0]

    assert "the race" not in lacking(raced)
    for dtype in ("float32", "bfloat16"):
        assert "parts of the race." in lacking([row for row in raced if row.key != f"ar {dtype} {one.prompts}"])
    assert "the race." in lacking([])


def test_a_digest_is_of_all_tokens() -> None:
    """Guards against answers that count as alike because they begin or read alike."""
    found = {digest_of(tokens) for tokens in ([], [1], [1, 2], [12], [2, 1])}
    assert len(found) == 5 and all(len(one) == 8 for one in found)


def test_budgets_of_the_world_are_not_cut_for_a_page() -> None:
    """Guards against pages of scale mini over checkpoints of three steps."""
    done = CliRunner().invoke(app, ["reproduce", "table2", "--max-steps", "3"])
    assert done.exit_code == 2 and "--max-steps is not for scale mini" in done.stderr


@pytest.mark.slow
def test_the_page_is_made_and_made_once(output: Path) -> None:
    """Guards against a study whose lines, checkpoints or race do not fit together, and rows that are made anew."""
    arguments = ["reproduce", "real-model", "--scale", "micro", "--limit", "4", "--jobs", "1", "--output", str(output)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    workspace = Workspace(output, "micro", "limit4")
    rows = STUDY.query.of(workspace.rows)
    cells = {row.arm: row for row in rows if isinstance(row, EvaluationRow)}
    arms = [*PLAN.lines, *(IN_BF16.lines if reads_bf16() else ())]
    assert cells.keys() == {arm.name for arm in arms} and all(row.digests for row in cells.values())
    in_bf16 = [cells[arm.name] for arm in arms[len(PLAN.lines) :]]
    assert all(row.dtype == "bfloat16" and row.digests == in_bf16[0].digests for row in in_bf16)
    for arm in PLAN.lines:
        if METHODS[arm.method].lossless and (arm.stage == BASE or "gated" in arm.stage):
            assert cells[arm.name].digests == cells[AR.name].digests, arm.label
    races = SweepCells.by_race(rows)
    dtypes = ["float32", "bfloat16"] if reads_bf16() else ["float32"]
    assert list(races) == [(dtype, prompts) for dtype in dtypes for prompts in (4, 2)]
    for (dtype, prompts), sweep in races.items():  # a race that held another's rows would have two of a contender
        more = {*OUTSIDERS, "hf-generate", "ar, again"} if prompts == 2 else set[str]()
        assert {row.contender for row in sweep.rows} == {*GRID_NAMES, *more}
        assert prompts == 2 or len(sweep.rows) == 2 * len(GRID_NAMES)
        assert {row.dtype for row in sweep.rows} == {dtype} and sweep.step_times and sweep.step_times.dtype == dtype
    page = (workspace.reports / "real-model.md").read_text()
    assert "In part" not in page and all(f"{dtype}, batch 1" in page for dtype in dtypes)
    before = workspace.row_file.read_bytes()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert workspace.row_file.read_bytes() == before
