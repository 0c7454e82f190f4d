"""Who else is using the machine: timings taken beside other work are timings of the scheduler.

How much is told in cores: CPU seconds that other processes used, over the seconds that passed. It comes from the
machine's own count of busy time less what this process and its finished children used, so that it costs one small read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

BUSY_CORES = 0.1  # what others may use before it is worth a word
_LOOK_S = 0.5
_BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq", "steal")  # stolen: the hypervisor ran somebody else


class Reading(NamedTuple):
    """Three clocks read at one moment, in seconds."""

    wall: float
    machine: float  # busy time of all cores that this process may use, its own included
    own: float  # of this process and its finished children


class Used(NamedTuple):
    """What others used in some time, in seconds."""

    cpu: float
    wall: float


class Neighbour(NamedTuple):
    """Another process, and how many cores it kept busy."""

    name: str
    cores: float


def read_clocks(*, children: bool = False) -> Reading | None:
    """The clocks now; None where the machine does not tell its busy time.

    With `children`, what those in flight and theirs have used counts as our own, too.
    """
    try:
        import psutil

        machine = _busy_seconds(psutil)
    except Exception:  # psutil is missing, or raises its own on a system that hides such numbers
        return None
    ended = os.times()
    wall, own = time.perf_counter(), time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True) if children else ():
        with suppress(psutil.Error):  # it has just ended
            times = child.cpu_times()
            own += times.user + times.system
    return Reading(wall, machine, own)


def _busy_seconds(psutil: Any) -> float:
    """Busy time of the cores that this process may use, as far as they can be told apart."""
    allowed = _allowed()
    each = [] if len(allowed) == os.cpu_count() else psutil.cpu_times(percpu=True)
    found = [each[core] for core in allowed] if allowed[-1] < len(each) else [psutil.cpu_times()]
    return sum(float(getattr(times, field, 0.0)) for times in found for field in _BUSY_FIELDS)


def _allowed() -> list[int]:
    """The cores that this process may use: all of them, where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def used_between(before: Reading | None, after: Reading | None) -> Used | None:
    """What others used between two readings; None where it cannot be told.

    The machine counts in ticks, often of 10 ms, so a little less than this process itself used is none at all. Much
    less means that the count is not of this machine, as in some containers. No more than all cores is believed.
    """
    if before is None or after is None or after.wall <= before.wall:
        return None
    wall, own = after.wall - before.wall, after.own - before.own
    others = after.machine - before.machine - own
    if others < -(0.1 * own + 0.1):
        return None
    return Used(min(max(others, 0.0), wall * len(_allowed())), wall)


def cores(parts: Iterable[Used | None]) -> float | None:
    """What others used over several times together, in cores; None if one of them cannot be told."""
    known = list(parts)
    wall = sum(0.0 if part is None else part.wall for part in known)
    return round(sum(part.cpu for part in known if part) / wall, 3) if wall and None not in known else None


class Watch:
    """Watches the neighbours from its making on; with `children`, these are none of them."""

    def __init__(self, *, children: bool = False) -> None:
        self._children, self._before = children, read_clocks(children=children)

    def used(self) -> Used | None:
        return used_between(self._before, read_clocks(children=self._children))


def look(seconds: float = _LOOK_S) -> tuple[float | None, list[Neighbour]]:
    """Wait and see: how many cores others use, None where it cannot be told, and the busiest of them."""
    watch, _ = Watch(), _since_last_time()
    time.sleep(seconds)
    busiest = sorted(
        (other for other in _since_last_time() if other.cores >= BUSY_CORES / 2), key=lambda other: -other.cores
    )
    return cores([watch.used()]), busiest[:3]


def _since_last_time() -> list[Neighbour]:
    """Every other process that may be read, and how many cores it kept busy since the last call; 0 at the first."""
    try:
        import psutil
    except ImportError:
        return []
    found = []
    for process in psutil.process_iter(["name"]):  # the same objects in every call, which remember the last
        if process.pid != os.getpid():
            with suppress(psutil.Error):
                found.append(Neighbour(str(process.info["name"]), process.cpu_percent() / 100))
    return found


def in_words(used: float, busiest: Iterable[Neighbour]) -> str:
    names = ", ".join(f"{other.name} {other.cores:.2f}" for other in busiest)
    return f"other processes use {used:.2f} of {len(_allowed())} cores{f' ({names})' if names else ''}"


def warning() -> str:
    """One line for who is about to time something on a machine that is not idle; empty where it is, or cannot tell."""
    used, busiest = look()
    if used is None or used <= BUSY_CORES:
        return ""
    return f"this machine is not idle: {in_words(used, busiest)}; times will be the scheduler's, too"
