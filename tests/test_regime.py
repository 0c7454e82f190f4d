"""The page of the regime: each criterion decides as it says, and the loss on held-out text is what it says it is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up import answered, lines_of, section

from marsbench.findings.cells import BENCHMARKS
from marsbench.json_lines import parse_json
from marsbench.line import TrainedStage
from marsbench.presets import preset
from marsbench.rows.kinds import AnyRow, Row, TextLossRow
from marsbench.rows.store import rows_text
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.statistics.decisions import Verdict
from marsbench.studies.regime import (
    CRITERIA,
    OF_SHORT_BASE,
    PLAN,
    STUDY,
    TWICE,
    UNTRAINED_MASKS,
    above_chance,
    beside,
    measuring,
    room_on_enough,
)
from marsbench.studies.regime.measuring import text_losses
from marsbench.training.data import taught
from marsbench.world import difficulty

N = 2000  # questions per benchmark


def rows(right: dict[str, int], *, tokens: int = 100, on_bbh: int | None = None, loss: float = 1.0) -> list[Row]:
    """All lines: so many of N questions right (by line, 1,400, of the base 1,200), on BBH perhaps others."""
    found, right = list[Row](), {"base": 1200, **right}
    for arm in PLAN.lines:
        for name in BENCHMARKS:
            count = right.get(arm.name, 1400) if name != "bbh" or on_bbh is None else on_bbh
            emitted = [tokens] * N if arm == UNTRAINED_MASKS else [100] * N
            found.append(answered(arm, name, [place < count for place in range(N)], emitted, [100] * N))
    for stage, factor in (("base", 1.0), ("ar_sft", loss)):
        nats = [factor * (20 + place % 7) for place in range(499)] + [0.2 * factor]  # one that says next to nothing
        found.append(TextLossRow(stage, "done", "", "mini", stage, nats, [60] * 500))
    return found


def outcome(number: str, of: Sequence[Row]) -> Verdict:
    """What a criterion says of one seed's rows."""
    return next(one for one in CRITERIA if one.letter == number).of(of).verdict


@pytest.mark.parametrize(
    ("number", "holding", "failing"),
    [
        ("i", rows({}), rows({OF_SHORT_BASE.name: 1300})),
        ("ii", rows({}), rows({TWICE.name: 1450})),
        ("ii", rows({}), rows({TWICE.name: 1350})),
        ("iii", rows({}), rows({"ar_sft": 1980})),
        ("iii", rows({}), rows({"ar_sft": 1000})),
        ("iv", rows({}, loss=1.02), rows({}, loss=1.2)),
        ("v", rows({}, tokens=101), rows({}, tokens=150)),
        ("vi", rows({}), rows({"base": 1390})),
    ],
)
def test_a_criterion_holds_and_fails(number: str, holding: list[Row], failing: list[Row]) -> None:
    """Guards against a criterion that cannot fail, one that looks at one side only, and lines taken for each other."""
    assert (outcome(number, holding), outcome(number, failing)) == ("supported", "not supported")


def test_benchmarks_without_room_and_at_chance_are_seen() -> None:
    """Guards against an average that hides a benchmark at its ceiling, and one that is answered by chance."""
    assert room_on_enough({0: rows({})}) == ("6 surely, 6 possibly", "supported")
    assert room_on_enough({0: rows({"ar_sft": 1990})})[1] == "not supported"
    assert above_chance({0: rows({})}) == ("none", "supported")
    assert above_chance({0: rows({}, on_bbh=762)}) == ("BBH", "inconclusive")
    assert above_chance({0: rows({}, on_bbh=300)})[1] == "not supported"


def test_several_seeds_that_answer_differently_are_judged_together() -> None:
    """Guards against shares of seeds taken for answers, which are neither right nor wrong."""
    names = ("ar_sft", TWICE.name, OF_SHORT_BASE.name)
    seeds = {seed: rows(dict.fromkeys(names, 1400 + more)) for seed, more in enumerate((0, 20, -20))}
    third = next(one for one in CRITERIA if one.letter == "iii").over(seeds.values())
    assert third.seeds == 3 and third.estimate is not None and third.estimate.value == pytest.approx(70.0)
    assert STUDY.tally is not None and STUDY.tally(seeds) == "8 of 8 criteria hold"


def test_the_page_says_what_failed_and_what_was_not_run() -> None:
    """Guards against a page that leaves out a criterion that fails, or fills in one that was not measured."""
    text = STUDY.render([replace(row, scale="micro") for row in rows({TWICE.name: 1450}, loss=1.2)[:-1]], "micro", None)
    outcomes = {line[0]: line[6] for line in lines_of(section(text, "Criteria")) if len(line) == 8}
    assert [outcomes[number] for number in ("i", "ii", "iii", "iv", "v")] == [
        "holds",
        "fails",
        "holds",
        "not run",
        "holds",
    ]
    assert "## Trials" not in text and "## Trials" in STUDY.render([], "mini", None)
    loss = rows({})[-1]
    assert parse_json(rows_text([loss]), AnyRow) == loss


def test_text_loss_is_that_of_the_model(
    tmp_path: Path, micro_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against padding that is counted, a shift by one, and texts of another difficulty."""
    monkeypatch.setattr(measuring, "TEXTS", 70)
    shutil.copytree(micro_checkpoints, tmp_path / "runs" / "micro" / "checkpoints")
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    first, second = text_losses(run)
    assert isinstance(first, TextLossRow) and (first.stage, second.stage) == ("base", "ar_sft")
    loaded = Checkpoints(run).load(TrainedStage("base", None))
    for place in (0, 69):
        text = taught("solved_text", loaded.tokenizer, 70, measuring._SEED, difficulty("usual"))[place]
        ids, asked = text["input_ids"], max(1, sum(label == -100 for label in text["labels"]))
        with torch.no_grad():
            logits = loaded.model(torch.tensor([ids])).logits[0, :-1]
        wanted = torch.tensor(ids[asked:])
        nats = torch.nn.functional.cross_entropy(logits[asked - 1 :], wanted, reduction="sum")
        assert first.nats[place] == pytest.approx(float(nats), rel=1e-4) and first.tokens[place] == len(wanted)
    assert text_losses(replace(run)) == [first, second], "rows that are there are not measured again"


def test_scales_stand_beside_each_other() -> None:
    """Guards against a criterion that is shown with another scale's numbers, or a scale without rows as measured."""
    found = lines_of(beside({"micro": {0: rows({TWICE.name: 1200})}, "mini": {0: rows({})}, "7b": {}}))
    assert found[0][3:] == ["micro", "mini", "the paper"]
    (line,) = [one for one in found if one[0] == "ii"]
    assert line[3].endswith("fails") and line[4].endswith("holds")
    assert beside({"7b": {}}) == ""
