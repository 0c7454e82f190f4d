"""What other processes use of the machine, and how threads wait: told with what was timed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from stored import page_rows

from marsbench.provenance import others_cores, provenance, warning
from marsbench.rendering.page import busy_remark
from marsbench.rows.kinds import SweepRow

RESULTS = Path(__file__).resolve().parent.parent / "results" / "mini"


def test_a_busy_neighbour_is_counted() -> None:
    """Guards against a measure that sees no other process, and a warning that does not come."""
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started
        used = others_cores(0.3)
        process.kill()
    assert used is not None and used > 0.25
    assert "this machine is not idle" in warning(used) and warning(0.1) == warning(None) == ""


def test_a_machine_that_tells_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a race that dies because the system hides such numbers."""

    def hidden(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_percent", hidden)
    assert others_cores(0.01) is None


@pytest.mark.parametrize(("laps", "used"), [([0.02, 0.05, 0.9], ""), ([0.02, 0.6, 0.9], "0.60"), ([], "0.30")])
def test_a_page_says_what_was_not_timed_alone(laps: list[float], used: str) -> None:
    """Guards against a speed-up that was measured beside a compiler and looks like any other, and a false alarm."""
    alone = next(row for row in page_rows("speedup") if isinstance(row, SweepRow) and row.seconds)
    told: dict[str, Any] = {"others_cores": laps, "provenance": {**alone.provenance, "others_cores": 0.3}}
    remark = busy_remark([replace(alone, others_cores=[]), replace(alone, **told)])
    assert f"up to {used} cores" in remark if used else not remark


def test_rows_say_how_threads_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times of impatient and of patient threads that look as if they came from one setting."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert provenance(seed=0)["wait_policy"] == "the library's own"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert provenance(seed=0)["wait_policy"] == "the library's own, GOMP_SPINCOUNT=1000"
