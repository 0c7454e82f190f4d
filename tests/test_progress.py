"""Progress where there is no terminal, lines now and then with the time left; and how processes come and go."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed
from rich.console import Console

from marsbench import progress
from marsbench.progress import Bar, all_processes, roughly


def test_lines_come_now_and_then_and_say_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a log flooded with lines, and against work of an interrupted run taken for this run's speed."""
    clock, log = [0.0], StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = Bar("racing", None, Console(file=log, width=80))
    for seconds, done, note in [(0, 100, ""), (10, 105, ""), (30, 115, "loss 2"), (40, 120, ""), (60, 130, "")]:
        clock[0] = seconds
        bar.update(done, 400, note)
    assert log.getvalue().splitlines() == [
        "  racing: 115/400, about 10 min left, loss 2",  # 15 in 30 seconds, 285 to go
        "  racing: 130/400, about 9 min left",
    ]


def test_no_time_is_guessed_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a division by zero when the first news comes late."""
    clock, log = [0.0], StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = Bar("training", None, Console(file=log, width=80))
    clock[0] = 60
    bar.update(25, 500, "loss 2")
    assert log.getvalue() == "  training: 25/500, loss 2\n"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "less than a minute"), (60, "about 1 min"), (5000, "about 83 min"), (9000, "about 2.5 hours")],
)
def test_times_are_said_as_one_would(seconds: float, said: str) -> None:
    """Guards against a wrong unit."""
    assert roughly(seconds) == said


def test_processes_part_before_python_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against threads that listen on and abort Python, one time in three, after all is answered or trained."""
    at_the_end: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert all_processes() and torch.distributed.is_initialized()
    for part in at_the_end:
        part()
    assert not torch.distributed.is_initialized()
