"""What became of drafts, under the names of other engines."""

import csv
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_static import EOS, PAD, given, method_of, model  # noqa: F401  # fixtures
from tools import decode_by_command

from marsbench.compiled.fixed import Steps
from marsbench.decoding.acceptance_report import Acceptance, cycle_in_words
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.racing import step_time
from marsbench.training.records import AT_PLACE, TrainingRecord

# Forwards that settle 1, 3, 1, 2 and 1 tokens; the prompt's and the last but one verify no draft.
MADE = Generation([9] * 8, [1, 2, 2, 2, 3, 4, 4, 5], 5, "length", drafted=[0, 3, 3, 0, 1])


def test_rates_are_unconditional() -> None:
    """Guards against a rate over other forwards than vLLM's, and a table that other tools cannot read: names count."""
    assert MADE.acceptance_histogram_by_draft_length == {3: [1, 0, 1, 0], 1: [1, 0]}
    found = Acceptance.of([MADE, MADE])
    assert found == Acceptance(num_drafts=6, num_draft_tokens=14, accepted_at=(2, 2, 0))
    assert found.acceptance_rate_per_position == [2 / 6, 2 / 6, 0.0]
    assert found.mean_acceptance_length == 1 + sum(found.acceptance_rate_per_position)
    (line,) = csv.DictReader(io.StringIO(found.csv("prompts")))
    assert {name: float(value) for name, value in line.items() if name != "subset"} == {
        "num_drafts": 6, "num_draft_tokens": 14, "num_accepted_tokens": 4, "acceptance_length": 1 + 4 / 6,
        "acceptance_at_pos_0": 2 / 6, "acceptance_at_pos_1": 2 / 6, "acceptance_at_pos_2": 0.0,
    }  # fmt: skip
    assert cycle_in_words([MADE], Meter(positions=14), 2) == "a cycle: 3.50 tokens, 2 forwards, 7.0 positions"


@pytest.mark.parametrize("what", ["ar", "mars-verified, groups", "mars-verified, linear", "uno", "speculative"])
def test_forwards_say_how_many_drafts_they_verified(what: str, given: dict[str, Any], model: Any) -> None:  # noqa: F811
    """Guards against drafts that are counted where they are made, a forward late, or otherwise in fixed shapes."""
    requests = [Request([5 + row, 6, 7], 20 + row, ignore_eos=True) for row in range(3)]
    method = method_of(what, given)
    how: dict[str, Any] = {"eos_id": EOS, "pad_id": PAD}
    found = decode(model, method, requests, **how)
    for one in found:
        assert len(one.drafted) == one.forwards
        assert all(settled <= drafted + 1 for settled, drafted in zip(one.accepted, one.drafted, strict=True))
    counted = Acceptance.of(found)
    assert bool(counted.num_drafts) == (what != "ar")
    settled = sum(one.emitted for one in found) - sum(one.forwards for one in found)
    assert counted.num_accepted_tokens == settled, "a forward settles its right drafts and one token"
    if method.most() is not None:
        fixed = decode(model, method, requests, kind=partial(Batch, shapes=Steps()), **how)
        assert [one.drafted for one in fixed] == [one.drafted for one in found]


@pytest.mark.parametrize("window", [1, 3])
def test_the_method_auto_is_the_window_that_pays(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: dict[str, Any]
) -> None:
    """Guards against a table that is not heeded, drafts that are not reported, and other tokens than `ar`'s."""
    asked: list[int] = []
    monkeypatch.setattr(step_time, "windows_that_pay", lambda _, rows, __: asked.append(rows) or [window])
    found, more = {}, ["--max-new-tokens", "24", "--acceptance", tmp_path / "csv"]
    for method in ("ar", "auto"):
        done = decode_by_command(tmp_path, golden["prompts"][:3], *more, method=method)
        found[method] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert asked == [3]
    assert [line["tokens"] for line in found["auto"]] == [line["tokens"] for line in found["ar"]]
    drafted = {int(count) for line in found["auto"] for count in line["acceptance_histogram_by_draft_length"]}
    (counted,) = csv.DictReader((tmp_path / "csv").open())
    assert max(drafted, default=0) == window - 1 == len([name for name in counted if "pos" in name])
    assert ("a cycle:" in done.output) == (window > 1)


def test_a_record_says_how_often_drafts_were_right() -> None:
    """Guards against a table of windows that takes shares of all forwards for rates of drafts that were reached."""
    shares = {f"{AT_PLACE}{place}": share for place, share in enumerate((0.8, 0.4, 0.1))}
    record = TrainingRecord("", {}, {}, "", 0, 0, 0, 0.0, 0.0, measures={**shares, f"{AT_PLACE}4": 1.0, "other": 1.0})
    assert record.acceptance == pytest.approx((0.8, 0.5, 0.25))
    assert not TrainingRecord("", {}, {}, "", 0, 0, 0, 0.0, 0.0).acceptance
