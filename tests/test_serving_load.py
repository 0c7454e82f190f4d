"""The study of a server under load: arrivals, the numbers of answers, and the page."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marsbench.presets import preset
from marsbench.rows.kinds import ServingRow
from marsbench.rows.workspace import Workspace, read_rows
from marsbench.running.run import Run
from marsbench.studies.serving import STUDY, LoadCells, policies, typical
from marsbench.studies.serving.load import Heard, read_answer
from marsbench.studies.serving.measuring import Targets, arrivals, serving_rows, summed

EFFORT = replace(policies.effort_at(preset("mini")), seconds=5.0)


def made_up(policy: str, shape: str, load: float, repeat: int, speed: float, **more: Any) -> ServingRow:
    """Ten requests, two a second, of eleven tokens each. A token takes 0.01 s over `speed`."""
    row = ServingRow(
        key=f"{policy} {shape} {load} {repeat}", status="done", reason="", scale="mini", stage="mars", policy=policy,
        shape=shape, load=load, repeat=repeat, rows=16, queue=64, seconds=5.0, max_new_tokens=16,
        target_first_token=0.06, target_per_token=0.0101, requests=10, answered=10, good=10 if speed >= 1 else 0,
        took=5 / speed, waited=1.5 / speed, emitted=110, forwards=50, tau=0.95, right=6, first_token=[0.05] * 3,
        per_token=[0.01 / speed] * 3, whole=[0.15 / speed] * 3, lag=[0.001] * 3,
        answers=["a", "b", ""] if policy in (policies.AR.name, policies.VERIFIED.name) else [],
    )  # fmt: skip
    return replace(row, **more)


def test_numbers_of_a_lap() -> None:
    """Guards against times from the sending, refusals seen as fast, rates below 0, uncompared answers, wrong loads."""
    cost = {"completion_tokens": 11, "marsbench": {"forwards": 5, "lossless": False, "threshold": [0.5, 0.9]}}
    answered = [Heard(0.5 * number, 0.001, 200, 0.5 * number + 0.05, 0.5 * number + 0.15, "x", cost)
                for number in range(9)]  # fmt: skip
    numbers = summed([*answered, Heard(4.5, 0.0, 429)], Targets(0.06, 0.0101))
    assert (numbers["requests"], numbers["answered"], numbers["good"]) == (10, 9, 9)
    assert (numbers["emitted"], numbers["forwards"], numbers["tau"]) == (99, 45, 0.5)
    assert numbers["first_token"] == pytest.approx([0.05] * 3) and numbers["per_token"] == pytest.approx([0.01] * 3)
    assert numbers["took"] == pytest.approx(4.15) and numbers["waited"] == pytest.approx(9 * 0.15)
    assert summed(answered, Targets(0.06, 0.0099))["good"] == 0
    refused = summed([Heard(0.0, 0.0, 429)], Targets())
    assert refused["answered"] == 0 and refused["whole"] == [] and refused["tau"] == 1.0
    rate = typical([80.0, 20.0, 60.0])
    assert 20 < rate.value < 80 and 0 < rate.interval.low < rate.value < rate.interval.high
    assert typical([0.0, 20.0, 60.0]).interval.low >= 0
    assert typical([3.0]).interval.low == 0 and typical([2.0, 2.0]).interval.high == pytest.approx(2.0)
    cells = LoadCells.of(made_up(name, "together", 1.0, 0, 1.0) for name in (policies.AR.name, policies.VERIFIED.name))
    assert cells.same_answers() == (2, 2)
    other = made_up(policies.VERIFIED.name, "together", 1.0, 0, 1.0, answers=["a", "c", "d"])
    cells[policies.VERIFIED.name, "together", 1.0] = [other]
    assert cells.same_answers() == (1, 2) and cells.full == 0
    cell = policies.Cell(policies.AR, "steady", 0.5, 0)
    draws = [arrivals(random.Random(seed), cell, 40.0, EFFORT) for seed in range(40)]
    assert sum(map(len, draws)) == pytest.approx(40 * 5 * 20, rel=0.05)
    gaps = [after - before for times in draws for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.05) and spread == pytest.approx(mean, rel=0.1)


_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
)


@given(st.integers(0, len(_ANSWER)), st.integers(0, len(_ANSWER)))
def test_an_answer_is_read_wherever_it_was_cut(cut: int, other: int) -> None:
    """Guards against text lost between two reads, times of other parts, and half an answer that counts as one."""
    first, second = sorted((cut, other))
    came = [(1.0, _ANSWER[:first]), (2.0, _ANSWER[first:second]), (3.0, _ANSWER[second:])]
    status, body = read_answer([piece for piece in came if piece[1]])
    assert status == 200 and b"".join(data for _, data in body) == b"data: a\n\ndata: b\n\n"
    assert all(3.0 >= at >= 1.0 for at, _ in body) and [at for at, _ in body] == sorted(at for at, _ in body)
    assert read_answer([(1.0, _ANSWER[:-3])])[0] == 0 == read_answer([])[0]


def page_rows(speeds: dict[str, float]) -> list[ServingRow]:
    shapes = [
        *[("together", float(count), 3) for count in EFFORT.requests],
        ("engine", float(policies.AT_ONCE), 3),
        *[("steady", 0.25 * quarter, 3) for quarter in range(1, 5)],
    ]
    return [
        made_up(name, shape, load, repeat, speed * (1 + 0.01 * repeat))
        for name, speed in speeds.items()
        for shape, load, repeats in shapes
        for repeat in range(repeats)
    ]


def verdict(page: str) -> str:
    """The verdict on the page's only claim, in the last column of the claims' table."""
    (line,) = [line for line in page.splitlines() if line.startswith("| Ours: ")]
    return line.split("|")[-2].strip()


def test_the_page_judges_the_claims() -> None:
    """Guards against a verdict that its numbers do not support, and a study that is not listed as timed."""
    same = {policy.name: 1.0 for policy in policies.POLICIES}
    page = STUDY.render(page_rows(same | {policies.FAST.name: 4.0}), "mini")
    assert "a full server at tau = 0.5: 4.00 [4.00, 4.00]" in page and verdict(page) == "open"
    plain = STUDY.render(page_rows(same), "mini")
    assert verdict(plain) == "open"
    assert verdict(STUDY.render(page_rows(same | {policies.BY_ROWS.name: 1.5}), "mini")) == "holds in the toy"
    assert STUDY.render([*page_rows(same), *page_rows({"another policy": 0.5})], "mini") == plain
    served = STUDY.render([replace(row, took=10.0) if row.load == policies.AT_ONCE
                           and row.shape == "together" else row for row in page_rows(same)], "mini")  # fmt: skip
    assert "| 0.50 [" in served.partition("## What HTTP costs")[2].partition("##")[0]
    busy = [replace(row, others_cores=[0.5]) for row in page_rows(same)]
    assert "was not idle" in STUDY.render(busy, "mini") and "was not idle" not in served
    assert STUDY.timed


@pytest.mark.parametrize(("scale", "most"), [("mini", 20), ("135m", 25)])
def test_the_whole_study_fits_into_its_time(scale: str, most: float) -> None:
    """Guards against a study that takes longer than promised, and a queue that is too short for a lap."""
    effort = policies.effort_at(preset(scale))
    assert effort.minutes() <= most and max(effort.requests.values()) < policies.QUEUE


@pytest.mark.slow
def test_the_study_runs_and_resumes(micro_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a study that loses its measured rows, or measures a policy with other settings."""
    (tmp_path / "runs" / "micro").mkdir(parents=True)
    (tmp_path / "runs" / "micro" / "checkpoints").symlink_to(micro_checkpoints)
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    rows = [row for row in serving_rows(run) if isinstance(row, ServingRow)]
    cells = policies.effort_at(preset("micro")).cells()
    expected = {(cell.policy.name, cell.shape, cell.load) for cell in cells}
    assert {(row.policy, row.shape, row.load) for row in rows} == expected
    for row in rows:
        assert row.answered == row.requests and row.right is not None
        assert row.whole[0] >= row.first_token[0] > 0 and row.waited <= 1.01 * row.took * row.answered
    by_cell = {(row.policy, row.shape, row.load): row for row in rows}
    assert len({by_cell[policy.name, "steady", 1.0].requests for policy in policies.POLICIES}) == 1
    assert by_cell[policies.FAST.name, "steady", 1.0].tau == 0.5
    served, bare = (by_cell[policies.AR.name, shape, float(policies.AT_ONCE)] for shape in ("together", "engine"))
    assert (served.answers, served.emitted, served.right) == (bare.answers, bare.emitted, bare.right)
    assert served.forwards == bare.forwards
    same, compared = LoadCells.of(rows).same_answers()
    assert same == compared > 12
    known = len(read_rows(run.workspace.row_file))
    monkeypatch.setattr("marsbench.studies.serving.measuring._serving", None)  # nothing is left to measure
    again = Run(preset("micro"), Workspace(tmp_path, "micro"))
    assert [row.key for row in serving_rows(again)] == [row.key for row in rows]
    assert len(read_rows(run.workspace.row_file)) == known
    assert "## Load by load" in STUDY.render(rows, "micro")
