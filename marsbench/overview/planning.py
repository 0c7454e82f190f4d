"""What the work behind some studies will take on so many machines: the graph with its costs, and how long it runs.

Estimates, like those that they are made of; nothing is run, read or fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from rich.table import Table

from marsbench.executors.tasks import Ended, Order, Task
from marsbench.overview.work import tasks_of
from marsbench.presets import Preset
from marsbench.running.estimates import cost, terminal_table
from marsbench.running.graph import Known, RunTask
from marsbench.studies.study import Study

_WORKERS = {"one core": 1, "2 cores": 2, "8 cores": 8}, {"one GPU": 1, "8 GPUs": 8, "64 GPUs": 64}
_GPUS_OF_A_NODE = 8  # whose other GPUs idle while one is raced on


def work_tables(
    studies: Sequence[Study], scale: Preset, *, gpus: int = 1, overhead: float, price: float | None = None
) -> list[Table | str]:
    """The work from nothing, what waits for what, and how long so many devices take.

    `overhead` is in seconds of every task beside its work, `price` of an hour of one device.
    """
    devices = _WORKERS[scale.pretrained is not None]

    def tasks(workers: int) -> list[RunTask]:
        return tasks_of(studies, scale, Known(scale), workers=workers, gpus=min(gpus, workers))

    hours = {name: makespan(tasks(count), count, overhead) / 3600 for name, count in devices.items()}
    times = {name: f"{took:,.1f} hours" if took >= 0.1 else f"{took * 60:.1f} minutes" for name, took in hours.items()}
    said = ", ".join(f"{name} {times[name]}{cost(devices[name] * took, price)}" for name, took in hours.items())
    return [
        _graph_table(tasks(max(devices.values()))),
        f"All of it from nothing, every answer as long as it may be and {overhead:g} s for the start of every task: "
        f"{said}. An estimate, not a measurement; races have a node of up to {_GPUS_OF_A_NODE} devices for themselves.",
    ]


def _graph_table(tasks: Sequence[RunTask]) -> Table:
    table = terminal_table("The work", "what", "after", "pieces", "device hours")
    groups = defaultdict(list)
    for task in tasks:
        groups[task.listed].append(task)
    listed = {task.name: task.listed for task in tasks}
    for title, some in groups.items():
        after = dict.fromkeys(listed[name] for task in some for name in task.after)
        shown = ", ".join(after) if len(after) <= 2 else f"{len(after)} of the above"
        table.add_row(title, shown or "-", str(len(some)), _hours_of(some))
    table.add_row("together", "", str(len(tasks)), _hours_of(tasks))
    return table


def _hours_of(tasks: Sequence[RunTask]) -> str:
    return f"{sum(task.seconds * task.gpus for task in tasks) / 3600:,.2f}"


# ---- how long it runs -----------------------------------------------------------------------------------------------


def makespan(tasks: Sequence[Task], workers: int, overhead: float) -> float:
    """Seconds from the start of the first task to the end of the last, if an executor carries them out.

    `overhead` is in seconds of every task beside its own; devices stand on nodes of up to eight.
    """
    order = Order(tasks)
    size = min(workers, _GPUS_OF_A_NODE)
    free = [size] * max(1, workers // size)
    running: list[tuple[float, str, int, int]] = []  # (end, name, node, devices of it)
    now = 0.0
    while order:
        for task in order.ready:
            wanted = size if task.alone else min(task.gpus, size)
            node = next((number for number, devices in enumerate(free) if devices >= wanted), None)
            if node is not None:
                order.take(task)
                free[node] -= wanted
                heappush(running, (now + task.seconds + overhead, task.name, node, wanted))
        now, name, node, wanted = heappop(running)
        free[node] += wanted
        order.end(Ended(name, None, None, "", 0.0))
    return now
