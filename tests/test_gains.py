"""The page on where the gain comes from: choosing thresholds fairly, draft models in tables, classes of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored import measured

from marsbench.line import TrainedStage
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Asked, TablePlan
from marsbench.running.run import Run
from marsbench.statistics.intervals import Answers
from marsbench.studies.gains import MEASURED
from marsbench.studies.gains.choice import cross_fitted, fastest_within

# ---- choosing a threshold -------------------------------------------------------------------------------------------

N = 200  # questions; a point of a half is one of them


def setting(wrong: set[int], emitted: int) -> Answers:
    """Ten forward passes a question, so many tokens, and some questions wrong."""
    return Answers([float(place not in wrong) for place in range(N)], [emitted] * N, [10] * N)


def test_each_half_answers_with_what_the_other_half_chose() -> None:
    """Guards against a question that has a say in the setting that answers it, and against swapped halves."""
    careful, fair, reckless = setting(set(), 10), setting({0, 3}, 15), setting(set(range(1, 100, 2)), 30)
    found = cross_fitted([careful, fair, reckless], allowed_loss=1.0)
    # The even questions do not see what the reckless one loses.
    assert found.emitted == [15, 30] * (N // 2)
    assert found.correct == [fair.correct[p] if p % 2 == 0 else reckless.correct[p] for p in range(N)]
    assert fastest_within([careful, fair, reckless], 1.0, range(N)) == 1


def test_a_loss_of_exactly_the_allowed_one_is_allowed() -> None:
    """Guards against rounding that excludes a setting on the bound, and one beyond it that slips in."""
    reference = setting(set(), 10)
    assert fastest_within([reference, setting({0, 2}, 20)], 1.0, range(N)) == 1
    assert fastest_within([reference, setting({0, 2, 4}, 20)], 1.0, range(N)) == 0
    assert fastest_within([reference, setting({0, 2, 4}, 20)], 1.5, range(N)) == 1


def test_choosing_among_equals_does_not_flatter() -> None:
    """Guards against the optimism of a choice that is reported on its own questions: luck must not look like speed."""
    generator = np.random.default_rng(0)
    in_sample, fair = [], []
    for _ in range(60):
        settings = [
            Answers([1.0] * N, generator.integers(10, 31, N).tolist(), [10] * N) for _ in range(7)
        ]  # all emit 2.0 tokens per forward pass on average
        best = fastest_within(settings, 1.0, range(N))
        in_sample.append(sum(settings[best].emitted) / (10 * N))
        fair.append(sum(cross_fitted(settings, 1.0).emitted) / (10 * N))
    assert np.mean(in_sample) > 2.04
    assert np.mean(fair) == pytest.approx(2.0, abs=0.02)


def test_settings_that_cannot_be_compared_are_refused() -> None:
    """Guards against settings of different questions, and against halves without a question."""
    with pytest.raises(ValueError, match="nothing to choose from"):
        cross_fitted([setting(set(), 10), Answers([1.0], [1], [1])], 1.0)
    with pytest.raises(ValueError, match="nothing to choose from"):
        cross_fitted([Answers([1.0], [1], [1])], 1.0)


# ---- measuring ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(output: Path) -> Run:
    """A run on the shared micro checkpoints, with three questions of one benchmark."""
    return Run(preset("micro"), Workspace(output, "micro"), benchmarks=("mini_gsm8k",), limit=3)


def speculative(draft: str) -> TablePlan:
    """A table of AR decoding and of speculative decoding with a draft model."""
    lines = {arm.name: arm for arm in MEASURED.lines}
    line = lines["ar_sft_by_draft_ar_sft"]
    return TablePlan("0", "has a draft", (lines["ar_sft"], replace(line, options={**line.options, "draft": draft})))


def test_a_line_with_a_draft_model_loads_it_and_depends_on_it(run: Run) -> None:
    """Guards against a draft that is not trained, not loaded, or not part of what a cell's numbers depend on."""
    cells = {}
    for draft in ("draft_ar_sft", "draft_mars"):
        plan = speculative(draft)
        rows = measured(run, plan)
        trained = {TrainedStage(row.stage, row.block_size) for row in rows if isinstance(row, TrainingRow)}
        assert trained >= {*plan.stages, TrainedStage("draft_base", None)}
        ar, cells[draft] = [row for row in rows if isinstance(row, EvaluationRow)]
        assert cells[draft].status == "done" and cells[draft].emitted == ar.emitted
        assert cells[draft].options["draft"] == draft
    assert cells["draft_ar_sft"].key != cells["draft_mars"].key
    checkpoints, kept = Checkpoints(run), run.store.rows()
    plan, (target, draft_stage) = speculative("draft_ar_sft"), speculative("draft_ar_sft").stages
    loaded, other = checkpoints.load(target), replace(checkpoints.load(draft_stage), weights="another")
    assert Cells(run).cell(Asked(plan.lines[1], "mini_gsm8k", None), loaded, other).key not in kept, (
        "other weights, another cell"
    )


def test_a_scale_without_draft_models_says_how_to_name_one(tmp_path: Path) -> None:
    """Guards against a table of the paper's scales that one missing draft ends, or that tries to train it."""
    big = Checkpoints(Run(preset("7b").with_checkpoints([], train_all=True), Workspace(tmp_path, "7b")))
    draft = TrainedStage("draft_ar_sft", None)
    assert not big.trains(draft)
    assert "--checkpoint draft_ar_sft=..." in big.missing(draft)
    with_draft = preset("7b").with_checkpoints(["draft_ar_sft=some/draft"])
    named = Checkpoints(Run(with_draft, Workspace(tmp_path, "7b")))
    assert named.missing(draft) == ""
