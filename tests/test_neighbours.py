"""What other processes use of the machine: the arithmetic on made-up clocks, the measure on a real neighbour."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from marsbench import neighbours
from marsbench.answering import Answering
from marsbench.findings.company import company_of, company_remark
from marsbench.json_lines import parse_json
from marsbench.methods import Options, build_method
from marsbench.neighbours import Neighbour, Reading, Used, Watch, cores, in_words, look, used_between, warning
from marsbench.provenance import provenance
from marsbench.racing.race import Race, RoundLog
from marsbench.rows.kinds import AnyRow, Row, StepTimeRow, SweepRow
from marsbench.rows.store import read_rows, rows_text
from marsbench.studies import study_of
from marsbench.training.checkpoints import Loaded

RESULTS = Path(__file__).resolve().parent.parent / "results" / "mini"


def told(wall: float, machine: float, own: float) -> Used | None:
    """What others used in so many seconds of each clock."""
    return used_between(Reading(5.0, 70.0, 3.0), Reading(5.0 + wall, 70.0 + machine, 3.0 + own))


@contextmanager
def burning() -> Iterator[None]:
    """Another process that never rests."""
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it has started
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def burn(seconds: float) -> Used:
    """Be busy oneself, and watch the neighbours meanwhile."""
    watch, end = Watch(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    used = watch.used()
    assert used is not None
    return used


def test_others_are_the_machine_less_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one's own work taken for a neighbour's, and a tick too few for a negative load."""
    monkeypatch.setattr(neighbours, "_allowed", lambda: [0, 1])
    assert told(2.0, 2.6, 2.0) == Used(pytest.approx(0.6), 2.0)
    assert told(2.0, 1.98, 2.0) == Used(0.0, 2.0)
    assert told(0.0, 0.0, 0.0) is None


def test_a_count_that_is_not_this_machines_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a container's zeros that pass for an idle machine, and a host's cores that are not ours."""
    monkeypatch.setattr(neighbours, "_allowed", lambda: [0, 1])
    assert told(2.0, 0.0, 2.0) is None
    assert told(2.0, 100.0, 2.0) == Used(4.0, 2.0)
    assert used_between(None, Reading(1.0, 1.0, 1.0)) is None


def test_several_times_are_weighed_by_their_length() -> None:
    """Guards against a short busy round that counts as much as a long idle one."""
    assert cores([Used(1.0, 1.0), Used(0.0, 9.0)]) == 0.1
    assert cores([Used(1.0, 1.0), None]) is None and cores([]) is None


def test_only_cores_that_we_may_use_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against work on cores that this process never runs on, and waiting that is taken for work."""
    times = SimpleNamespace(user=4.0, nice=1.0, system=2.0, irq=0.5, softirq=0.25, steal=0.25, idle=90.0, iowait=9.0)
    idle = SimpleNamespace(user=0.0, nice=0.0, system=0.0, idle=99.0)
    fake: Any = SimpleNamespace(cpu_times=lambda percpu=False: [times, idle] if percpu else times)
    monkeypatch.setattr(neighbours.os, "cpu_count", lambda: 2)
    for allowed, expected in (([0], 8.0), ([1], 0.0), ([0, 1], 8.0), ([7], 8.0)):
        monkeypatch.setattr(neighbours, "_allowed", lambda allowed=allowed: allowed)
        assert neighbours._busy_seconds(fake) == expected


def test_a_machine_that_tells_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a race that dies because nobody can be watched."""

    def hidden(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    assert Watch().used() is None and look(0.01)[0] is None and warning() == ""


def test_a_busy_neighbour_is_counted_and_one_self_is_not() -> None:
    """Guards against a measure that sees nobody, or only itself. Whatever else runs here is in both."""
    quiet = min((burn(0.4) for _ in range(2)), key=lambda used: used.cpu)
    with burning():
        loud = [burn(0.4) for _ in range(2)]
        found, busiest = look(0.3)
    assert min(used.cpu / used.wall for used in loud) > 0.25, "on two cores a neighbour gets its share"
    assert quiet.cpu / quiet.wall < len(neighbours._allowed()) - 0.2, "one's own core was counted"
    assert found is not None and found > 0.25
    assert any(one.name.startswith("python") and one.cores > 0.1 for one in busiest)


def test_watching_costs_next_to_nothing() -> None:
    """Guards against a measure that disturbs what it watches."""
    started = time.process_time()
    for _ in range(100):
        Watch().used()
    assert (time.process_time() - started) / 100 < 0.001


def test_a_warning_names_who_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a warning on an idle machine, and one that does not say whom to stop."""
    monkeypatch.setattr(neighbours, "look", lambda: (0.8, [Neighbour("ffmpeg", 0.79)]))
    assert "0.80 of" in warning() and "(ffmpeg 0.79)" in warning()
    monkeypatch.setattr(neighbours, "look", lambda: (0.1, []))
    assert warning() == ""
    assert in_words(0.5, []).endswith("cores")


# ---- in races and their rows ----------------------------------------------------------------------------------------


def test_a_race_keeps_what_others_used_lap_by_lap(
    golden_models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against laps of which nobody knows whether the machine was idle, and a resumed race that forgets it."""
    used = iter([Used(9.0, 1.0), Used(9.0, 1.0), Used(0.0, 3.0), Used(1.0, 1.0), Used(0.5, 1.0), Used(0.5, 1.0)])
    monkeypatch.setattr(Watch, "used", lambda self: next(used))
    method = build_method("ar", Options())
    loaded = Loaded(golden_models["ar"], None, "", None)
    contenders = {name: Answering(loaded, method) for name in ("ar", "again")}
    race = Race(contenders, [[1, 2], [3]], batch_size=1, max_new_tokens=2, eos_id=-1, pad_id=0, laps=2)
    log = RoundLog(tmp_path / "race.jsonl")
    log.begin(["ar", "again"])
    whole = race.run(log)
    assert [whole[name].others_cores for name in whole] == [[0.25, 0.5]] * 2, "the watched lap is none of the timed"
    assert race.run(RoundLog(tmp_path / "race.jsonl"))["ar"].others_cores == [0.25, 0.5]
    file = tmp_path / "old.jsonl"
    lines = [json.loads(line) for line in (tmp_path / "race.jsonl").read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "others": None}) + "\n" for line in lines[:-1]))
    monkeypatch.setattr(Watch, "used", lambda self: Used(0.0, 1.0))
    assert race.run(RoundLog(file))["ar"].others_cores == [], "of half a lap nothing is known"


def raced(study: str, **more: Any) -> list[Row]:
    """The committed rows of a page, those that a clock was on with more in them."""
    rows = read_rows(RESULTS / f"{study}.jsonl")
    return [replace(row, **more) if isinstance(row, SweepRow | StepTimeRow) else row for row in rows]


@pytest.mark.parametrize("study", ["speedup", "engine", "discrepancies"])
def test_a_page_says_what_was_not_timed_alone(study: str) -> None:
    """Guards against a speed-up that was measured beside a compiler and looks like any other, and a cry of wolf."""
    render = study_of(study).render
    plain = render(raced(study), "mini")
    assert "not idle" not in plain
    assert render(raced(study, others_cores=[0.02, 0.05, 0.9]), "mini") == plain, "one lap of three is no median"
    remark = next(line for line in render(raced(study, others_cores=[0.02, 0.6, 0.9]), "mini").split("\n\n")
                  if "not idle" in line)  # fmt: skip
    assert "batch 1: 0.60 (" in remark or "batch 4: 0.60 (" in remark
    assert ("forward passes: 0.60 (1)" in remark) == (study == "speedup")


def test_company_is_of_rows_that_say_so() -> None:
    """Guards against rows of earlier versions, or of cells without numbers, that pass for disturbed ones."""
    (row, *_) = [row for row in raced("speedup") if isinstance(row, SweepRow) and row.status == "done"]
    row = replace(row, others_cores=[])
    assert company_of(row) is None and company_remark([row]) == ""
    told = [replace(row, others_cores=[0.3]), replace(row, key="other", others_cores=[0.5])]
    assert f"batch {row.batch_size}: 0.30 to 0.50 (2)" in company_remark(told)
    assert company_of(replace(told[0], status="skipped")) is None
    assert parse_json(rows_text(told[:1]), AnyRow) == told[0]


def test_rows_say_how_threads_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times of impatient and of patient threads that look as if they came from one setting."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert provenance(seed=0)["wait_policy"] == "the library's own"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert provenance(seed=0)["wait_policy"] == "the library's own, GOMP_SPINCOUNT=1000"
