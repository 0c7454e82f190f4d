"""The page of the regime: each criterion decides as it says, and the loss on held-out text is what it says it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up import answered

from marsbench.findings.cells import BENCHMARKS
from marsbench.line import TrainedStage
from marsbench.presets import preset
from marsbench.rows.kinds import Row, TextLossRow
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.statistics.decisions import Verdict
from marsbench.studies.regime import (
    CRITERIA,
    OF_SHORT_BASE,
    PLAN,
    TWICE,
    UNTRAINED_MASKS,
    above_chance,
    measuring,
    room_on_enough,
    tally,
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


def outcome(number: int, of: Sequence[Row]) -> Verdict:
    """What a criterion says of one seed's rows."""
    return CRITERIA[number].of(of).side


@pytest.mark.parametrize(
    ("number", "holding", "failing"),
    [
        (0, rows({}), rows({OF_SHORT_BASE.name: 1300})),
        (1, rows({}), rows({TWICE.name: 1450})),
        (1, rows({}), rows({TWICE.name: 1350})),
        (2, rows({}), rows({"ar_sft": 1980})),
        (2, rows({}), rows({"ar_sft": 1000})),
        (3, rows({}, loss=1.02), rows({}, loss=1.2)),
        (4, rows({}, tokens=101), rows({}, tokens=150)),
        (5, rows({}), rows({"base": 1390})),
    ],
)
def test_a_criterion_holds_and_fails(number: int, holding: list[Row], failing: list[Row]) -> None:
    """Guards against a criterion that cannot fail, one that looks at one side only, and lines taken for each other."""
    assert (outcome(number, holding), outcome(number, failing)) == ("holds", "does not hold")


def test_benchmarks_without_room_and_at_chance_are_seen() -> None:
    """Guards against an average that hides a benchmark at its ceiling, and one that is answered by chance."""
    assert room_on_enough({0: rows({})}) == ("6 surely, 6 possibly", "holds")
    assert room_on_enough({0: rows({"ar_sft": 1990})})[1] == "does not hold"
    assert above_chance({0: rows({})}) == ("none", "holds")
    assert above_chance({0: rows({}, on_bbh=762)}) == ("BBH", "open")
    assert above_chance({0: rows({}, on_bbh=300)})[1] == "does not hold"


def test_several_seeds_that_answer_differently_are_judged_together() -> None:
    """Guards against shares of seeds taken for answers, which are neither right nor wrong."""
    names = ("ar_sft", TWICE.name, OF_SHORT_BASE.name)
    seeds = {seed: rows(dict.fromkeys(names, 1400 + more)) for seed, more in enumerate((0, 20, -20))}
    third = CRITERIA[2].over(seeds.values())
    assert third.seeds == 3 and third.estimate is not None and third.estimate.value == pytest.approx(70.0)
    assert tally(seeds) == "8 of 8 checks hold"


def test_text_loss_is_that_of_the_model(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against padding that is counted, a shift by one, and texts of another difficulty."""
    monkeypatch.setattr(measuring, "TEXTS", 70)
    run = Run(preset("micro"), Workspace(output, "micro"))
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
