"""What the work behind some studies will take on so many machines: the graph with its costs, and how long it runs.

Estimates, like those that they are made of; nothing is run, read or fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from rich.table import Table

from marsbench.errors import UserError
from marsbench.executors.tasks import Ended, Order, Task
from marsbench.overview.graph import graph_of
from marsbench.presets import Preset
from marsbench.progress import Reporter
from marsbench.running.estimates import terminal_table
from marsbench.running.graph import AnsweringPiece, Nothing, PagePiece, Piece, TrainingPiece
from marsbench.studies.study import Study

_WORKERS = {"one core": 1, "2 cores": 2, "8 cores": 8}, {"one GPU": 1, "8 GPUs": 8, "64 GPUs": 64}
_GPUS_OF_A_NODE = 8  # whose other GPUs idle while one is raced on


def work_tables(
    studies: Sequence[Study], scale: Preset, *, quick: bool = False, gpus: int = 1, overhead: float
) -> list[Table | str]:
    """The work from nothing, what waits for what, and how long so many devices take.

    Args:
        studies: whose pages are made.
        scale: of the models.
        quick: whether a study that races a grid races its quick one.
        gpus: how many GPUs each training gets.
        overhead: seconds that every task costs beside its work.
    """
    devices = _WORKERS[scale.pretrained is not None]

    def pieces(workers: int) -> list[Piece]:
        return graph_of(studies, scale, Nothing(scale), quick=quick, workers=workers, gpus=min(gpus, workers))

    hours = {name: makespan(pieces(count), count, overhead) / 3600 for name, count in devices.items()}
    said = ", ".join(f"{name} {_in_hours(took)}" for name, took in hours.items())
    return [
        _graph_table(pieces(max(devices.values()))),
        f"All of it from nothing, every answer as long as it may be and {overhead:g} s for the start of every task: "
        f"{said}. An estimate, not a measurement; races have a node of up to {_GPUS_OF_A_NODE} devices for themselves.",
    ]


def _in_hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 0.1 else f"{hours * 60:.1f} minutes"


def _graph_table(pieces: Sequence[Piece]) -> Table:
    """All pieces, those of the same checkpoint or page together."""
    table = terminal_table("The work", "what", "after", "pieces", "device hours")
    groups = defaultdict(list)
    for piece in pieces:
        groups[_group(piece)].append(piece)
    group_of = {piece.name: _group(piece) for piece in pieces}
    for title, some in groups.items():
        after = dict.fromkeys(group_of[name] for piece in some for name in piece.after)
        shown = ", ".join(after) if len(after) <= _MOST_SHOWN else f"{len(after)} of the above"
        table.add_row(title, shown or "-", str(len(some)), _hours_of(some))
    table.add_row("together", "", str(len(pieces)), _hours_of(pieces))
    return table


_MOST_SHOWN = 2


def _hours_of(pieces: Sequence[Piece]) -> str:
    return f"{sum(piece.seconds * piece.gpus for piece in pieces) / 3600:,.2f}"


def _group(piece: Piece) -> str:
    """What a piece is listed under."""
    if isinstance(piece, TrainingPiece):
        return piece.title
    if isinstance(piece, AnsweringPiece):
        return f"answering with {piece.cells[0].arm.trained.title}"
    if isinstance(piece, PagePiece):
        return f"{piece.title}{' (alone)' if piece.alone else ''}"
    return f"{piece.title} (alone)"


# ---- how long it runs -----------------------------------------------------------------------------------------------


class _NoWork:
    """What stands for the work of a task that is only planned."""

    def __call__(self, made: Sequence[Any], reporter: Reporter) -> Any:
        return None

    def failed(self, error: UserError) -> Any:
        return None


def makespan(pieces: Sequence[Piece], workers: int, overhead: float) -> float:
    """Seconds from the start of the first piece to the end of the last, if an executor carries them out.

    Args:
        pieces: what is to be done.
        workers: devices, on nodes of up to eight.
        overhead: seconds that each piece takes beside its own.
    """
    work = _NoWork()
    order = Order([Task(one.name, one.title, work, one.after, one.seconds, one.gpus, one.alone) for one in pieces])
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
