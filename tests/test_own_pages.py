"""The page on where the gain comes from: choosing thresholds fairly, draft models in tables, classes of tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import answered, lines_of, measured, page_rows, sweep_row
from tools import invoke

from marsbench.evaluation.harness import digest_of
from marsbench.findings.between_lines import more_accurate
from marsbench.findings.cells import BENCHMARKS
from marsbench.findings.sweep import SweepCells
from marsbench.forward.fastest import reads_bf16
from marsbench.line import TrainedStage
from marsbench.methods import METHODS
from marsbench.presets import preset
from marsbench.racing.grid import COMPILED_AR
from marsbench.rows.kinds import EvaluationRow, Row, StepTimeRow, SweepRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import CellRunner
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import PlannedCell, TablePlan
from marsbench.running.run import Run
from marsbench.statistics.decisions import Verdict
from marsbench.statistics.intervals import Answers
from marsbench.studies import gains, longer, regime
from marsbench.studies.gains import MEASURED, cross_fitted, fastest_within
from marsbench.studies.real_model import AR, AR_OF_MARS, BASE, GRID_NAMES, GROUPS, IN_BF16, OUTSIDERS, PLAN, STUDY

N = 200  # questions; a point of a half is one of them


def setting(wrong: set[int], emitted: int) -> Answers:
    """Ten forward passes a question, so many tokens, and some questions wrong."""
    return Answers([float(place not in wrong) for place in range(N)], [emitted] * N, [10] * N)


def test_each_half_answers_with_what_the_other_half_chose() -> None:
    """Guards against a question that chooses its setting, swapped halves, rounding on bounds, unlike questions."""
    careful, fair, reckless = setting(set(), 10), setting({0, 3}, 15), setting(set(range(1, 100, 2)), 30)
    fitted = cross_fitted([careful, fair, reckless], allowed_loss=1.0)
    # The even questions do not see what the reckless one loses.
    assert fitted.emitted == [15, 30] * (N // 2)
    assert fitted.correct == [fair.correct[p] if p % 2 == 0 else reckless.correct[p] for p in range(N)]
    assert fastest_within([careful, fair, reckless], 1.0, range(N)) == 1
    reference = setting(set(), 10)
    assert fastest_within([reference, setting({0, 2}, 20)], 1.0, range(N)) == 1
    assert fastest_within([reference, setting({0, 2, 4}, 20)], 1.0, range(N)) == 0
    assert fastest_within([reference, setting({0, 2, 4}, 20)], 1.5, range(N)) == 1
    with pytest.raises(ValueError, match="nothing to choose from"):
        cross_fitted([setting(set(), 10), Answers([1.0], [1], [1])], 1.0)
    with pytest.raises(ValueError, match="nothing to choose from"):
        cross_fitted([Answers([1.0], [1], [1])], 1.0)


def test_a_rivals_setting_is_chosen_on_the_other_half_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rival that is judged by the prompts its setting was chosen on, by tokens, or over eager `ar`."""
    monkeypatch.setattr(gains, "_RACED", {"Jacobi decoding": ("mars", "jacobi", {}, "block_size", (2, 3))})
    slow, fast = [0.4, 0.1, 0.4, 0.1], [0.1, 0.4, 0.1, 0.4]  # each is the faster one on half of the prompts
    race = [
        sweep_row(name, method, 1, [1.0], last_token=took, options=options)
        for name, method, took, options in (
            (COMPILED_AR, "ar", [0.4] * 4, {}), ("hf-generate", "hf-generate", [0.8] * 4, {}),
            ("two", "jacobi", slow, {"block_size": 2}), ("three", "jacobi", fast, {"block_size": 3}),
        )
    ]  # fmt: skip
    page = gains._raced(race)
    assert "| Jacobi decoding |          2 | window 2        |" in page
    assert "1.00 [1.00, 1.00] |" in page and "2.00 [2.00, 2.00] |" in page
    assert gains._raced(race[1:]) == ""


def test_a_longer_training_is_raced_over_ar_of_its_own_kind() -> None:
    """Guards against compiled MARS over eager `ar`, and a ratio at the wrong batch size."""
    over = {name: {"seconds": [1.0] * 3, "emitted": 40} for name in (COMPILED_AR, "hf-generate", "ar")}
    over["ar"]["seconds"] = [9.0] * 3
    race = [
        sweep_row(name, method, size, [1.0 / size / speed] * 3, baselines=over, compiled=True)
        for name, method, speed in ((COMPILED_AR, "ar", 1.0), ("tau = .95, compiled", "mars", 1.5))
        for size in (1, 4, 16)
    ]
    page = longer._raced(race)
    lines = [" ".join(line) for line in lines_of(page)]
    assert any(line.startswith("tau = .95 1.50 [1.50, 1.50] 6.00 [6.00, 6.00] 24.00") for line in lines), lines
    assert any(line.startswith("compiled `ar` over `hf-generate` 1.00 [1.00, 1.00] 4.00") for line in lines), lines
    speeds = [speed.measure(race).estimate for words, speed in longer.STUDY.claims[0].beside if words in longer.FASTER]
    assert [speed.value for speed in speeds] == pytest.approx([1.5, 6.0, 24.0]) and longer._raced([]) == ""


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
    checkpoints, kept = Checkpoints(run), run.row_file.rows()
    plan, (target, draft_stage) = speculative("draft_ar_sft"), speculative("draft_ar_sft").stages
    loaded, other = checkpoints.load(target), replace(checkpoints.load(draft_stage), weights="another")
    cell = CellRunner(run).row(PlannedCell(plan.lines[1], "mini_gsm8k", None), loaded, other)
    assert cell.key not in kept, "other weights, another cell"


def test_a_scale_without_draft_models_says_how_to_name_one(tmp_path: Path) -> None:
    """Guards against a table of the paper's scales that stops at a missing draft model, or tries to train it."""
    big = Checkpoints(Run(preset("7b").with_checkpoints([], train_all=True), Workspace(tmp_path, "7b")))
    draft = TrainedStage("draft_ar_sft", None)
    assert not big.is_to_train(draft)
    assert "--checkpoint draft_ar_sft=..." in big.missing(draft)
    with_draft = preset("7b").with_checkpoints(["draft_ar_sft=some/draft"])
    named = Checkpoints(Run(with_draft, Workspace(tmp_path, "7b")))
    assert named.missing(draft) == ""


MANY = 2000  # questions per benchmark


def made_rows(right: dict[str, int], *, tokens: int = 100, on_bbh: int | None = None) -> list[Row]:
    """All lines: so many of 2,000 questions right (by line, 1,400, of the base 1,200), on BBH perhaps others."""
    rows, right = list[Row](), {"base": 1200, **right}
    for arm in regime.PLAN.lines:
        for name in BENCHMARKS:
            count = right.get(arm.name, 1400) if name != "bbh" or on_bbh is None else on_bbh
            emitted = [tokens] * MANY if arm == regime.UNTRAINED_MASKS else [100] * MANY
            rows.append(answered(arm, name, [place < count for place in range(MANY)], emitted, [100] * MANY))
    return rows


def outcome(number: int, of: Sequence[Row]) -> Verdict:
    """The verdict of a criterion on one seed's rows."""
    return regime.CRITERIA[number].of(of).side


@pytest.mark.parametrize(
    ("number", "holding", "failing"),
    [
        (0, made_rows({}), made_rows({regime.OF_SHORT_BASE.name: 1300})),
        (1, made_rows({}), made_rows({regime.TWICE.name: 1450})),
        (1, made_rows({}), made_rows({regime.TWICE.name: 1350})), (2, made_rows({}), made_rows({"ar_sft": 1980})),
        (2, made_rows({}), made_rows({"ar_sft": 1000})), (4, made_rows({}), made_rows({"base": 1390})),
        (3, made_rows({}, tokens=101), made_rows({}, tokens=150)),
    ],
)  # fmt: skip
def test_a_criterion_holds_and_fails(number: int, holding: list[Row], failing: list[Row]) -> None:
    """Guards against a criterion that cannot fail, one that looks at one side only, and lines that are mixed up."""
    assert (outcome(number, holding), outcome(number, failing)) == ("holds", "does not hold")


def test_room_chance_and_seeds_are_seen() -> None:
    """Guards against an average that hides a ceiling or chance, and shares of seeds counted as answers."""
    assert regime.room_on_enough({0: made_rows({})}) == ("6 surely, 6 possibly", "holds")
    assert regime.room_on_enough({0: made_rows({"ar_sft": 1990})})[1] == "does not hold"
    assert regime.above_chance({0: made_rows({})}) == ("none", "holds")
    assert regime.above_chance({0: made_rows({}, on_bbh=762)}) == ("BBH", "open")
    assert regime.above_chance({0: made_rows({}, on_bbh=300)})[1] == "does not hold"
    names = ("ar_sft", regime.TWICE.name, regime.OF_SHORT_BASE.name)
    seeds = {seed: made_rows(dict.fromkeys(names, 1400 + more)) for seed, more in enumerate((0, 20, -20))}
    third = regime.CRITERIA[2].over(seeds.values())
    assert third.seeds == 3 and third.estimate is not None and third.estimate.value == pytest.approx(70.0)
    assert regime.tally(seeds) == "7 of 7 checks hold"


def of_135m(arm: Any, digests: list[str], benchmark: str = "gsm8k") -> EvaluationRow:
    """A cell of scale 135m, whose answers are known by the digests of their tokens."""
    many = len(digests)
    return EvaluationRow(
        f"{arm.name} {benchmark}", "done", "", "135m", arm.name, arm.stage, arm.method, arm.options, benchmark, "score",
        correct=[1.0] * many, emitted=[10] * many, forwards=[5] * many, finished=[1] * many, digests=digests,
    )  # fmt: skip


def test_answers_are_held_against_their_own_checkpoint_and_the_base() -> None:
    """Guards against agreement with another checkpoint, and a division by zero where no answer ends."""
    rows = [
        of_135m(AR, ["a", "b", "c", "d"]),
        of_135m(GROUPS, ["a", "b", "c", "x"]),
        of_135m(AR_OF_MARS, ["a", "m", "n", "o"]),
        of_135m(next(line for line in PLAN.lines if line.name.startswith("base_mars_mars-verified")), [*"amno"]),
    ]
    for ends, share in ((1, "2.00"), (0, "-")):
        page = STUDY.render([replace(row, finished=[ends] * 4) for row in rows], "135m")
        assert "7 of 8 answers of lossless methods equal those of AR decoding." in page
        assert any(f" {share} |" in line for line in page.splitlines() if line.startswith(f"| {GROUPS.label} "))


def test_a_claim_pairs_lines_of_one_type_of_weights() -> None:
    """Guards against a claim that takes rows of another type of weights, and is "not run" where the types are equal."""
    pair = [of_135m(line, ["a"] * 4, benchmark) for line in (AR, GROUPS) for benchmark in PLAN.benchmarks]
    claim = more_accurate(PLAN, AR.name, GROUPS.name)
    assert claim.of(pair).estimate is not None
    refused = claim.of([replace(row, dtype="bfloat16") if row.arm == AR.name else row for row in pair])
    assert refused.estimate is None and "types of weights" in refused.number


def test_a_race_that_lacks_a_contender_is_said_to_be_in_part() -> None:
    """Guards against gaps in one race that rows of the other race or of a shorter one hide."""
    committed = page_rows("real-model", "135m")
    (sweep, *_) = [row for row in committed if isinstance(row, SweepRow) and row.batch_size == 1]
    raced = [
        replace(sweep, key=f"{name} {dtype} {prompts}", contender=name, dtype=dtype, prompts=prompts)
        for name in GRID_NAMES
        for dtype in ("float32", "bfloat16")
        for prompts in (sweep.prompts, 2)
    ]
    answered = [row for row in committed if isinstance(row, EvaluationRow)]

    def lacking(rows: list[SweepRow]) -> str:
        return STUDY.render([*answered, *rows], "135m").partition("Not measured yet")[2].partition("\n")[0]

    assert "the race" not in lacking(raced)
    for dtype in ("float32", "bfloat16"):
        assert "parts of the race." in lacking([row for row in raced if row.key != f"ar {dtype} {sweep.prompts}"])
    assert "the race." in lacking([])


def test_digests_and_budgets() -> None:
    """Guards against equal digests of answers that begin alike, and pages of mini from checkpoints of three steps."""
    digests = {digest_of(tokens) for tokens in ([], [1], [1, 2], [12], [2, 1])}
    assert len(digests) == 5 and all(len(digest) == 8 for digest in digests)
    done = invoke("reproduce", "table2", "--max-steps", "3", code=2)
    assert "--max-steps and --gpus-per-training are not for scale mini" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("brief_training")
def test_the_page_is_made_and_made_once(output: Path) -> None:
    """Guards against a study whose lines, checkpoints or race do not fit together, and rows that are measured again."""
    arguments = ["reproduce", "real-model", "--scale", "micro", "--limit", "4", "--jobs", "1", "--output", str(output)]
    invoke(*arguments)
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
        more = {*(line.name for line in OUTSIDERS), "hf-generate", "ar, again"} if prompts == 2 else set[str]()
        assert {row.contender for row in sweep.rows} == {*GRID_NAMES, *more}
        assert prompts == 2 or len(sweep.rows) == 2 * len(GRID_NAMES)
        assert {row.dtype for row in sweep.rows} == {dtype}
    assert {row.dtype for row in rows if isinstance(row, StepTimeRow)} == {*dtypes}
    page = (workspace.reports / "real-model.md").read_text()
    assert "In part" not in page and all(f"{dtype}, batch 1" in page for dtype in dtypes)
    before = workspace.row_file.read_bytes()
    invoke(*arguments)
    assert workspace.row_file.read_bytes() == before
