"""The page on where the gain comes from: choosing thresholds fairly, draft models in tables, classes of tokens."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import answered, claim_lines, lines_of, section
from transformers import AutoTokenizer

from marsbench import world
from marsbench.line import TrainedStage
from marsbench.overview.pages import write_page
from marsbench.presets import preset
from marsbench.progress import quieten_libraries
from marsbench.rows.kinds import EvaluationRow, Row, TokenClassRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import Cells, Table
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Asked, TablePlan
from marsbench.running.run import Run
from marsbench.show import token_texts
from marsbench.statistics.intervals import Answers, share_of_tokens
from marsbench.studies import study_of
from marsbench.studies.gains import CLAIMS, STUDY
from marsbench.studies.gains.free_tokens import Token, answers_of, share_free, share_together
from marsbench.studies.gains.lines import CHOSEN, CURVE, HEADED, MEASURED, PLAN, cross_fitted, fastest_within
from marsbench.studies.gains.word_classes import CLASSES, template_words, token_class

# ---- choosing a threshold -------------------------------------------------------------------------------------------

N = 200  # questions; a point of a half is one of them


def setting(wrong: set[int], emitted: int) -> Answers:
    """Ten forward passes a question, so many tokens, and some questions wrong."""
    return Answers([float(place not in wrong) for place in range(N)], [emitted] * N, [10] * N)


def test_each_half_answers_with_what_the_other_half_chose() -> None:
    """Guards against a question that has a say in the setting that answers it, and against swapped halves."""
    careful, fair, reckless = setting(set(), 10), setting({0, 3}, 15), setting(set(range(1, 100, 2)), 30)
    found = cross_fitted([careful, fair, reckless], allowed_loss=1.0)
    assert (found.by_even, found.by_odd) == (2, 1), "the even questions do not see what the reckless one loses"
    assert found.answers.emitted == [15, 30] * (N // 2)
    assert found.answers.correct == [fair.correct[p] if p % 2 == 0 else reckless.correct[p] for p in range(N)]
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
        fair.append(sum(cross_fitted(settings, 1.0).answers.emitted) / (10 * N))
    assert np.mean(in_sample) > 2.04
    assert np.mean(fair) == pytest.approx(2.0, abs=0.02)


# ---- classes of tokens ----------------------------------------------------------------------------------------------


def test_tokens_of_the_world_get_the_class_that_a_reader_would_give(micro_checkpoints: Path) -> None:
    """Guards against digits taken for words, punctuation for code, and a template that holds an answer's own words."""
    tokenizer = AutoTokenizer.from_pretrained(next(micro_checkpoints.glob("mars-b4-*")))

    def classes(text: str, *, code: bool = False) -> list[tuple[str, str]]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return [(one.strip(), token_class(one, code=code, template=template)) for one in token_texts(ids, tokenizer)]

    responses = [example.response for example in world.test_set("mini_gsm8k", 60)]
    template = template_words([token_texts(tokenizer(text).input_ids, tokenizer) for text in responses])
    assert {"The", "answer", "is"} <= template
    assert not {"Tom", "apples", "7", "+"} & template
    found = dict(classes("Tom adds 3, so 12 + 3 = 15. The answer is 15."))
    assert {found[digit] for digit in "1235"} == {"digits"}
    assert {found[sign] for sign in (",", "+", "=", ".")} == {"symbols"}
    assert {found[word] for word in ("The", "answer", "is")} == {"template words"}
    assert token_class(" apples", code=False, template=template) == "content words"
    program = classes("```python\ndef solve(x):\n    return x + 7\n```", code=True)
    assert {kind for text, kind in program if re.fullmatch(r"def|return|x", text)} == {"code"}
    assert {kind for text, kind in program if not re.search(r"\w", text)} == {"symbols"}
    assert ("7", "digits") in program
    assert token_class(None, code=False, template=template) == "end"


def test_a_share_of_tokens_has_an_interval_over_questions() -> None:
    """Guards against tokens of one answer taken for independent, and against certainty where nothing varies."""
    generator = np.random.default_rng(2)
    whole = generator.integers(5, 15, 300)
    part = np.where(generator.random(300) < 0.3, whole, 0)  # whole answers are free, or not at all
    found = share_of_tokens([*part.tolist(), 0], [*whole.tolist(), 0])
    assert found.n == 300 and found.value == pytest.approx(part.sum() / whole.sum())
    ratios = []
    for _ in range(1000):
        drawn = generator.integers(0, 300, 300)
        ratios.append(part[drawn].sum() / whole[drawn].sum())
    assert found.interval.half_width == pytest.approx(1.96 * np.std(ratios), rel=0.15)
    assert share_of_tokens([0] * 20, [5] * 20).interval.high > 0.03
    with pytest.raises(ValueError, match="no tokens"):
        share_of_tokens([0], [0])


# ---- the page, from made-up rows ------------------------------------------------------------------------------------

QUESTIONS = 12
TOKENS = {name: 20 for name in (arm.name for arm in PLAN.lines)} | {
    "ar_sft": 10, "ar_of_mars": 10, "mars_b4_0.95": 14, "mars_b4_0.9": 16, "mars_b4_0.8": 18,
    "verified_groups": 25, "verified_linear": 22, "medusa_hard_1": 21, "medusa_hard_3": 24, "lookup": 12,
    "jacobi_of_mars": 11, "ar_sft_by_draft_ar_sft": 40,
}  # fmt: skip
WRONG = {"mars_b4_0.8": {0}, "mars_b4_0.7": {1, 2}, "mars_b4_0.6": {1, 2}, "mars_b4_0.5": {1, 2}}  # questions


def cell(arm: str, benchmark: str) -> EvaluationRow:
    """Ten forward passes a question; `TOKENS` says how many tokens, `WRONG` which questions are wrong."""
    line = next(line for line in MEASURED.lines if line.name == arm)
    correct = [place not in WRONG.get(arm, set()) for place in range(QUESTIONS)]
    emitted = [TOKENS[arm] + place % 2 for place in range(QUESTIONS)]
    return answered(line, benchmark, correct, emitted, [10] * QUESTIONS, seconds=1.0, max_new_tokens=96)


DIGITS, SYMBOLS, CODE, TEMPLATE, CONTENT, END = range(len(CLASSES))
CLASSIFIED = TokenClassRow(
    "classes", "done", "", "mini", "mars_b4_0.95", "mars", "mars", {"block_size": 4, "threshold": 0.95}, "mini_gsm8k",
    list(CLASSES),
    [[TEMPLATE, CONTENT, DIGITS, SYMBOLS, END], [TEMPLATE, TEMPLATE, DIGITS, SYMBOLS]],
    [[0, 0, 0, 1, 2], [0, 1, 2, 0]],
    ["The", "answer"],
)  # fmt: skip
ROWS: list[Row] = [
    *[cell(arm.name, benchmark) for arm in MEASURED.lines for benchmark in ("gsm8k", "bbh")],
    *[TrainingRow(n, "done", "", "mini", n, size, 1000, 800, 5000, 60.0, 0.5) for n, size in MEASURED.stages],
    CLASSIFIED,
]  # fmt: skip


def line_of(text: str, first: str) -> list[str]:
    return next(line for line in lines_of(text) if line[0] == first)


def test_the_page_reports_what_the_other_half_chose() -> None:
    """Guards against the threshold of all questions on the chosen line, and a lossless line in another place."""
    text = STUDY.render(ROWS, "mini")
    # A question of six is 17 points: tau = .8 fails on question 0, which is even, the lower ones on 1 and 2.
    chosen = line_of(section(text, "MARS that may lose 1 point"), "GSM8K")
    assert [value.split(" ± ")[0] for value in chosen[1:6]] == ["0.9", "1.65", "0.9", "0.8", "1.75"]
    assert chosen[6].startswith("+8.3 [") and chosen[7].startswith("+0.80 [") and chosen[8].startswith("+0.50 [")
    assert line_of(section(text, "MARS that may lose 1 point"), "IFEval")[1:] == ["not run"] * 8
    speeds = section(text, "Measured").partition("Tokens per forward pass:")[2]
    assert line_of(speeds, CHOSEN.label)[5].startswith("1.75 ")
    assert line_of(speeds, "MARS verified, groups (W = 4)")[5].startswith("2.55 ")
    assert "up to 4 forward passes of a second" in text and "16 positions in `groups` and 9 in `linear`" in text


def test_free_tokens_are_counted_by_class_and_by_pair() -> None:
    """Guards against a paid token taken for a free one, a lost end, and a pair read the wrong way round."""
    answers = answers_of(CLASSIFIED)
    assert answers[0][-1] == Token("end", 2)
    shares = {kind: share_free(answers, kind) for kind in CLASSES}
    assert {kind: share.value for kind, share in shares.items() if share} == {
        "digits": 1 / 2, "symbols": 1 / 2, "template words": 1 / 3, "content words": 0.0, "end": 1.0
    }  # fmt: skip
    together = share_together(answers, "digits", "symbols")
    assert together is not None and together.value == 0.5
    assert share_together(answers, "symbols", "digits") is None
    text = section(STUDY.render(ROWS, "mini"), "Which tokens come for free")
    by_place = line_of(text.partition("All questions together")[2], "symbols")
    assert by_place[1:] == ["2", "22.2", "50.0", "50.0", "0.0", "0.0", "25.0"]
    by_class = line_of(text, "template words")
    assert [value.split(" ± ")[0] for value in by_class[1:]] == ["33.3", "33.3"]
    after = line_of(text.partition("Which classes come together")[2], "content words")
    assert after[1].startswith("0.0") and after[2:] == [""] * 5
    assert "GSM8K: `The`, `answer`." in text


@pytest.mark.parametrize("case", ["no rows", "one question", "no classes", "skipped", "lines of unequal length"])
def test_nothing_undefined_is_printed_or_drawn(case: str, tmp_path: Path) -> None:
    """Guards against NaN, infinity, None or a crash on the page or its figures, whatever is missing."""

    def first(row: Row) -> Row:
        if isinstance(row, TokenClassRow):
            return replace(row, tokens=row.tokens[:1], places=row.places[:1])
        if not isinstance(row, EvaluationRow):
            return row
        return replace(row, correct=row.correct[:1], emitted=row.emitted[:1], forwards=row.forwards[:1])

    def skipped(row: Row) -> Row:
        if isinstance(row, TokenClassRow) or (isinstance(row, EvaluationRow) and row.arm in CURVE):
            return replace(row, status="skipped", reason="no\ncheckpoint")
        return row

    rows: list[Row] = {
        "no rows": list,
        "one question": lambda: [first(row) for row in ROWS],
        "no classes": lambda: ROWS[:-1],
        "skipped": lambda: [skipped(row) for row in ROWS],
        "lines of unequal length": lambda: [first(row) if row.key.startswith("mars_b4_0.9/") else row for row in ROWS],
    }[case]()
    page, *figures = write_page(study_of("gains"), rows, "mini", tmp_path)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\b(nan|inf|None)\b", text)
    run = {row.arm for row in rows if isinstance(row, EvaluationRow)}
    asked = [claim for claim in CLAIMS if HEADED.name in run or HEADED.name not in claim.lines]
    assert len(claim_lines(section(text, "Claims"))) == len(asked)
    assert all((tmp_path / link).is_file() for link in re.findall(r"\]\((\S+\.png)\)", text)) and len(figures) == 2
    if case == "skipped":
        assert "- GSM8K: skipped: no checkpoint" in text and "- skipped: no checkpoint" in text


# ---- measuring ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(micro_checkpoints: Path, tmp_path: Path) -> Run:
    """A run on the shared micro checkpoints, with three questions of one benchmark."""
    workspace = Workspace(tmp_path, "micro")
    shutil.copytree(micro_checkpoints, workspace.runs / "checkpoints")
    quieten_libraries()
    return Run(preset("micro"), workspace, benchmarks=("mini_gsm8k",), limit=3)


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
        rows = Table(run, plan).rows()
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


def test_the_page_is_measured_once_and_its_parts_agree(run: Run) -> None:
    """Guards against classes of other answers than the table's, and against a second run that measures again."""
    rows = STUDY.rows(run)
    cells = {row.arm: row for row in rows if isinstance(row, EvaluationRow)}
    assert set(cells) == {arm.name for arm in MEASURED.lines}
    assert all(row.status == "done" and len(row.correct) == 3 for row in cells.values())
    assert cells["verified_linear"].checkpoint == cells["mars_b4_0.95"].checkpoint, "its window of 5 is not its B"
    for arm in ("verified_groups", "verified_linear", "lookup", "jacobi_of_mars"):
        assert cells[arm].emitted == cells["ar_of_mars"].emitted
    (classified,) = [row for row in rows if isinstance(row, TokenClassRow)]
    measured = cells[classified.arm]
    assert [len(tokens) for tokens in classified.tokens] == measured.emitted
    assert [found.count(0) for found in classified.places] == measured.forwards
    ends = [tokens[-1:] == [END] for tokens in classified.tokens]
    assert ends == [bool(finished) for finished in measured.finished]
    before = run.workspace.row_file.read_bytes()
    assert STUDY.rows(replace(run)) == rows
    assert run.workspace.row_file.read_bytes() == before
