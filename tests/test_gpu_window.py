"""A window on a GPU, walked through on the CPU: every stage, in order, within its limit, and none of them twice."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console

from marsbench.cli import app
from marsbench.gpu_check import window as windows
from marsbench.gpu_check.bench import at_most
from marsbench.gpu_check.page import checks_of, steps_of
from marsbench.gpu_check.window import Stage, Window, base_here, run_window, stages


def tiny(output: Path, typed: list[tuple[str, ...]]) -> Window:
    """A window on the CPU whose commands are only written down."""

    def command(*words: str) -> str:
        typed.append(words)
        return "FOLDER"

    console = Console(file=io.StringIO(), width=200)
    return Window(torch.device("cpu"), output, console, base_here(True), None, True, command)


def test_a_tiny_window_walks_through_all_of_it(tmp_path: Path) -> None:
    """Guards against a stage that a GPU's ten minutes find broken, and a command that there is not."""
    typed: list[tuple[str, ...]] = []
    window = tiny(tmp_path, typed)
    ended = run_window(window, 20)
    assert [(one.stage, one.status, one.reason) for one in ended] == [(one.name, "done", "") for one in stages(window)]
    steps = steps_of(tmp_path)
    assert {row.method for row in steps} == {"ar", "mars", "mars-verified"} and len({row.key for row in steps}) == 7
    (forced,) = [row for row in steps if "acceptance" in row.options]
    assert forced.options["acceptance"].startswith("carried over from the paper's Table 4")
    assert forced.tokens_per_second > 0 and len(checks_of(tmp_path)) == 2 and (tmp_path / "reports/gpu.md").exists()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, *words in typed:
        assert commands[name].make_context(name, list(words)).params
    assert [words[0] for words in typed].count("train") == 6
    assert run_window(window, 20) == [], "what is done is not done again"
    again = len(steps_of(tmp_path))
    windows.time_steps(window, "small")
    assert len(steps_of(tmp_path)) == again, "newer rows take the place of older ones"


def test_a_stage_that_hangs_or_fails_leaves_the_others_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ten minutes that are spent on one stage, or lost with it."""
    seen: list[str] = []

    def broken(window: Window) -> None:
        raise RuntimeError("no such kernel")

    several = [
        Stage("hangs", 0.2, lambda window: time.sleep(60)), Stage("breaks", 9, broken),
        Stage("runs", 9, lambda window: seen.append("runs")),
        Stage("real", 9, lambda window: seen.append("real"), True),
    ]  # fmt: skip
    monkeypatch.setattr(windows, "stages", lambda window: several)
    window = tiny(tmp_path, [])
    window.base = None
    assert [one.status for one in run_window(window, 1)] == ["timeout", "failed", "done", "skipped"]
    assert seen == ["runs"]
    left = run_window(window, 0)
    assert [(one.stage, one.status) for one in left] == [(name, "skipped") for name in ("hangs", "breaks", "real")]


def test_a_limit_within_a_limit_keeps_both() -> None:
    """Guards against a check's own limit that takes away its stage's."""
    began = time.monotonic()
    with pytest.raises(TimeoutError), at_most(0.3):
        with at_most(9):
            pass
        time.sleep(5)
    with pytest.raises(TimeoutError), at_most(0.2), at_most(9):
        time.sleep(5)
    assert time.monotonic() - began < 3
