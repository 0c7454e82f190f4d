"""Reports on accepted drafts, under the names of other engines."""

import csv
import io
import json
from dataclasses import replace
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
EXAMPLE = Generation([9] * 8, [1, 2, 2, 2, 3, 4, 4, 5], 5, "length", drafted=[0, 3, 3, 0, 1])


def test_rates_are_unconditional() -> None:
    """Guards against a rate over other forwards than vLLM's, and names that other tools cannot read."""
    assert EXAMPLE.acceptance_histogram_by_draft_length == {3: [1, 0, 1, 0], 1: [1, 0]}
    report = Acceptance.of([EXAMPLE, EXAMPLE])
    assert report == Acceptance(num_drafts=6, num_draft_tokens=14, accepted_at=(2, 2, 0))
    assert report.acceptance_rate_per_position == [2 / 6, 2 / 6, 0.0]
    assert report.mean_acceptance_length == 1 + sum(report.acceptance_rate_per_position)
    (line,) = csv.DictReader(io.StringIO(report.csv("prompts")))
    assert {name: float(value) for name, value in line.items() if name != "subset"} == {
        "num_drafts": 6, "num_draft_tokens": 14, "num_accepted_tokens": 4, "acceptance_length": 1 + 4 / 6,
        "acceptance_at_pos_0": 2 / 6, "acceptance_at_pos_1": 2 / 6, "acceptance_at_pos_2": 0.0,
    }  # fmt: skip
    assert cycle_in_words([EXAMPLE], Meter(positions=14), 2) == "a cycle: 3.50 tokens, 2 forwards, 7.0 positions"


@pytest.mark.parametrize(
    "what", ["ar", "mars-verified, groups", "mars-verified, linear", "uno", "speculative", "mars-speculative"]
)
def test_forwards_say_how_many_drafts_they_verified(what: str, given: dict[str, Any], model: Any) -> None:  # noqa: F811
    """Guards against drafts counted where they are proposed, a forward late, or differently in fixed shapes."""
    requests = [Request([5 + number, 6, 7], 20 + number, ignore_eos=True) for number in range(3)]
    method = method_of(what, given)
    ids: dict[str, Any] = {"eos_id": EOS, "pad_id": PAD}
    eager = decode(model, method, requests, **ids)
    for row in eager:
        assert len(row.drafted) == row.forwards
        assert all(settled <= drafted + 1 for settled, drafted in zip(row.accepted, row.drafted, strict=True))
    counted = Acceptance.of(eager)
    assert bool(counted.num_drafts) == (what != "ar")
    settled = sum(row.emitted for row in eager) - sum(row.forwards for row in eager)
    assert counted.num_accepted_tokens == settled, "a forward settles its right drafts and one token"
    if method.most() is not None:
        fixed = decode(model, method, requests, kind=partial(Batch, shapes=Steps()), **ids)
        assert [row.drafted for row in fixed] == [row.drafted for row in eager]
    if what == "mars-speculative":  # what masks settle without being verified is no right draft
        sure = [replace(request, threshold=0.0) for request in requests]
        assert Acceptance.of(decode(model, method, sure, **ids)).num_drafts == 0


@pytest.mark.parametrize("window", [1, 3])
def test_the_method_auto_is_the_window_that_pays(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: dict[str, Any]
) -> None:
    """Guards against a table without effect, drafts that are not reported, and other tokens than `ar`'s."""
    batches: list[int] = []
    monkeypatch.setattr(step_time, "windows_that_pay", lambda _, rows, __: batches.append(rows) or [window])
    lines, more = {}, ["--max-new-tokens", "24", "--acceptance", tmp_path / "csv"]
    for method in ("ar", "auto"):
        done = decode_by_command(tmp_path, golden["prompts"][:3], *more, method=method)
        lines[method] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert batches == [3]
    assert [line["tokens"] for line in lines["auto"]] == [line["tokens"] for line in lines["ar"]]
    drafted = {int(count) for line in lines["auto"] for count in line["acceptance_histogram_by_draft_length"]}
    (counted,) = csv.DictReader((tmp_path / "csv").open())
    assert max(drafted, default=0) == window - 1 == len([name for name in counted if "pos" in name])
    assert ("a cycle:" in done.output) == (window > 1)


def test_a_record_says_how_often_drafts_were_right() -> None:
    """Guards against a table of windows that confuses shares of all forwards with rates of reached drafts."""
    shares = {f"{AT_PLACE}{place}": share for place, share in enumerate((0.8, 0.4, 0.1))}
    record = TrainingRecord("", {}, {}, "", 0, 0, 0, 0.0, 0.0, measures={**shares, f"{AT_PLACE}4": 1.0, "other": 1.0})
    assert record.acceptance == pytest.approx((0.8, 0.5, 0.25))
    assert not TrainingRecord("", {}, {}, "", 0, 0, 0, 0.0, 0.0).acceptance
