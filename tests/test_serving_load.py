"""The study of a server under load: arrivals, what is made of answers, and the page."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marsbench.presets import preset
from marsbench.rows.kinds import Row, ServingRow
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.studies.serving import STUDY
from marsbench.studies.serving.findings import (
    answered,
    goodput,
    per_token,
    quantiles,
    rejected,
    requests_per_second,
    switches,
)
from marsbench.studies.serving.load import read_answer
from marsbench.studies.serving.measuring import Cell, _times, serving_rows
from marsbench.studies.serving.page import tally
from marsbench.studies.serving.policies import AR, BARE, EXACT, FAST, LOSSLESS, LOSSY, POLICIES, Effort, effort_at

EFFORT = Effort((1.0,), 2, 5.0, 12, 24, 3, 16)


def made_up(policy: str, shape: str, load: float, repeat: int, speed: float, **more: Any) -> ServingRow:
    """Ten requests, two a second, of eleven tokens each; the last is turned away. A token takes 0.01 s over `speed`."""
    intended = [0.5 * number for number in range(10)]
    first = [at + 0.05 for at in intended[:9]] + [0.0]
    last = [at + 0.1 / speed for at in first[:9]] + [0.0]
    row = ServingRow(
        key=f"{policy} {shape} {load} {repeat}", status="done", reason="", scale="mini", stage="mars", policy=policy,
        shape=shape, load=load, repeat=repeat, rows=16, queue=64, seconds=5.0, max_new_tokens=16,
        target_first_token=0.06, target_per_token=0.0101, questions=[0] * 10, intended=intended, lag=[0.001] * 10,
        status_codes=[200] * 9 + [429], first=first, last=last, emitted=[11] * 9 + [0], forwards=[5] * 9 + [0],
        lowest=[0.95] * 10, correct=[1.0] * 6 + [0.0] * 4,
        timeline={"at": [0.0, 1.0], "running": [1, 2], "waiting": [0, 3], "tau": [0.95, 0.5], "window": [4, 2],
                  "relief": [0.0, 0.1]},
    )  # fmt: skip
    return replace(row, **more)


def test_numbers_of_a_cell() -> None:
    """Guards against times that count from when a request was sent, and rejects that count as fast answers."""
    row = made_up("ar", "steady", 1.0, 0, 1.0)
    assert per_token(row) == pytest.approx([0.01] * 9)
    assert goodput(row) == pytest.approx(9 / 5) and goodput(made_up("ar", "steady", 1.0, 0, 0.5)) == 0
    assert rejected([row]) == 0.1 and requests_per_second(row) == pytest.approx(9 / 4.15)
    assert switches(row, "tau") == 1
    found = quantiles([row], per_token)
    assert found is not None and found[0] == pytest.approx(0.01)


_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
)


@given(st.integers(0, len(_ANSWER)), st.integers(0, len(_ANSWER)))
def test_an_answer_is_read_wherever_it_was_cut(one: int, other: int) -> None:
    """Guards against text lost between two reads, times of other parts, and half an answer for a whole."""
    first, second = sorted((one, other))
    came = [(1.0, _ANSWER[:first]), (2.0, _ANSWER[first:second]), (3.0, _ANSWER[second:])]
    status, body = read_answer([piece for piece in came if piece[1]])
    assert status == 200 and b"".join(data for _, data in body) == b"data: a\n\ndata: b\n\n"
    assert all(3.0 >= at >= 1.0 for at, _ in body) and [at for at, _ in body] == sorted(at for at, _ in body)
    assert read_answer([(1.0, _ANSWER[:-3])])[0] == 0 == read_answer([])[0]


def test_arrivals_are_poisson_and_the_same_for_all() -> None:
    """Guards against a load that is not what the page says, and policies that are asked other things."""
    draws = [_times(random.Random(seed), Cell(AR, "steady", 0.5, 0), 40.0, EFFORT) for seed in range(40)]
    assert sum(map(len, draws)) == pytest.approx(40 * 5 * 20, rel=0.05)
    gaps = [after - before for times in draws for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.05) and spread == pytest.approx(mean, rel=0.1)
    step = _times(random.Random(0), Cell(AR, "step", 1.5, 0), 40.0, EFFORT)
    thirds = [sum(5 * third <= at < 5 * third + 5 for at in step) for third in range(3)]
    assert thirds[1] > 2 * thirds[0] and thirds[1] > 2 * thirds[2] and step == sorted(step)


def page_rows(speeds: dict[str, float]) -> list[Row]:
    shapes = [
        ("burst", 0.0, 3),
        ("http", 0.0, 3),
        ("engine", 0.0, 3),
        ("steady", 0.5, 3),
        ("steady", 1.0, 3),
        ("step", 1.5, 1),
    ]
    return [
        made_up(name, shape, load, repeat, speed * (1 + 0.01 * repeat))
        for name, speed in speeds.items()
        for shape, load, repeats in shapes
        for repeat in range(repeats)
    ]


def test_the_page_judges_the_claim(tmp_path: Path) -> None:
    """Guards against a verdict that its numbers do not carry, either way."""
    same = {policy.name: 1.0 for policy in POLICIES}
    page = STUDY.render(page_rows(same | {FAST.name: 4.0}), "mini")
    assert "at a lower tau: **supported**" in page
    assert "**supported**" not in STUDY.render(page_rows(same), "mini")
    assert "at least as good as every fixed policy" in page and "not at least" not in page
    slow = STUDY.render(page_rows(same | {LOSSY.name: 0.5}), "mini")
    assert f"Goodput of `{LOSSY.name}` is not at least" in slow and f"`{LOSSLESS.name}` is at least" in slow
    assert tally({0: page_rows(same | {EXACT.name: 0.5})}).startswith("mars, tau = 0.5 over mars, tau = 0.95")
    files = STUDY.draw(page_rows(same), "mini", tmp_path)
    assert len(files) == 4 and all(file.stat().st_size for file in files)
    served = STUDY.render([replace(row, last=[2 * at for at in row.last]) if row.shape == "http" else row
                     for row in page_rows(same)], "mini")  # fmt: skip
    assert "0.50 [0.50, 0.50]" in served.partition("## What HTTP costs")[2].partition("##")[0]
    busy = [replace(row, others_cores=[0.5]) for row in page_rows(same)]
    assert "was not idle" in STUDY.render(busy, "mini") and "was not idle" not in served
    assert "nothing measured" in STUDY.render([], "mini")


def test_the_study_has_the_machine_for_itself() -> None:
    """Guards against a study taken for one that times nothing: a thread for the engine alone, all for the server's."""
    assert STUDY.times(preset("mini"))


def test_the_whole_study_fits_into_its_time() -> None:
    """Guards against a study that outgrows what was promised for it."""
    assert effort_at(preset("mini")).minutes() <= 25


@pytest.mark.slow
def test_the_study_runs_and_resumes(micro_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a study that loses what it has measured, or asks policies what they are not."""
    (tmp_path / "runs" / "micro").mkdir(parents=True)
    (tmp_path / "runs" / "micro" / "checkpoints").symlink_to(micro_checkpoints)
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    rows = [row for row in serving_rows(run) if isinstance(row, ServingRow)]
    assert {(row.policy, row.shape) for row in rows} >= {
        (policy.name, shape) for policy in POLICIES for shape in ("burst", "steady")
    }
    for row in rows:
        assert set(row.status_codes) <= {200, 429} and 200 in row.status_codes
        assert len(row.others_cores) == 1 and row.others_cores[0] >= 0
        assert all(row.last[number] >= row.first[number] > 0 for number, one in enumerate(row.emitted) if one > 1)
    by_cell = {(row.policy, row.shape, row.repeat): row for row in rows}
    assert len({tuple(by_cell[policy.name, "steady", 0].intended) for policy in POLICIES}) == 1
    fast = by_cell[FAST.name, "steady", 0]
    assert {fast.lowest[number] for number in answered(fast)} == {0.5}  # a slow machine turns some away
    assert min(by_cell[LOSSY.name, "burst", 0].lowest) >= 0.5
    assert by_cell[LOSSLESS.name, "step", 0].timeline["at"]
    for policy in BARE:
        served, bare = (by_cell[policy.name, shape, 0] for shape in ("http", "engine"))
        assert (served.questions, served.emitted, served.correct) == (bare.questions, bare.emitted, bare.correct)
        assert served.forwards == bare.forwards
    known = len(read_rows(run.workspace.row_file))
    monkeypatch.setattr("marsbench.studies.serving.measuring._Server", None)  # nothing is left to be asked
    again = Run(preset("micro"), Workspace(tmp_path, "micro"))
    assert [row.key for row in serving_rows(again)] == [row.key for row in rows]
    assert len(read_rows(run.workspace.row_file)) == known
    assert "## The verdict" in STUDY.render(rows, "micro")
