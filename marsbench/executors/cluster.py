"""A Ray cluster: a CPU or a GPU for each task, several GPUs of one node for some, a whole node for what is timed.

A task is handed over once all that it comes after have ended, and with what they made. Ray decides where and when it
runs, and does it again elsewhere where a process or a node is lost. What needs a node for itself is held back until one
is free.

This module imports Ray, and nobody imports this module but who was asked for a cluster.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, TaskUnschedulableError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from marsbench.errors import UserError
from marsbench.executors.tasks import Ended, Order, Task, ended_by, lost
from marsbench.executors.worker import log_of, perform
from marsbench.files import write_atomically
from marsbench.paths import PACKAGE
from marsbench.provenance import NODE

_LOOK_S = 1.0  # how long Ctrl-C may have to wait
_LOSSES = 5  # of processes or nodes under one task; who loses more has its own reasons
_PATIENCE_S = 600.0  # with a cluster that has lost all nodes on which a task could run
_ANSWER_S = 120.0  # within which every node must say that it sees the shared folder
_SAME = ("torch", "transformers", "lm_eval")  # packages that keys of checkpoints and cells depend on


@dataclass(frozen=True)
class _Node:
    """A machine of the cluster, as Ray describes it."""

    id: str
    host: str
    cpus: int
    gpus: int

    @classmethod
    def alive(cls) -> list[_Node]:
        """Those that are there now."""
        return [
            cls(
                one["NodeID"],
                one["NodeManagerHostname"],
                int(one["Resources"].get("CPU", 0)),
                int(one["Resources"].get("GPU", 0)),
            )
            for one in ray.nodes()  # type: ignore[no-untyped-call]
            if one["Alive"] and one["Resources"].get("CPU")
        ]


class Cluster:
    """The nodes of a Ray cluster."""

    def __init__(self, address: str, logs: Path) -> None:
        """Connect, and make sure that all nodes see one folder and run the same code.

        Args:
            address: of the cluster; "auto" = the one of this machine.
            logs: the folder of the tasks' logs, on storage that all nodes share.

        Raises:
            UserError: there is no such cluster, or a node of it is not fit for the work.
        """
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"there is no Ray cluster: {str(error).splitlines()[0]}",
                where=address,
                fix="start one: `ray start --head` here, `ray start --address=...` on the others; see docs/clusters.md",
            ) from error
        self._logs = logs.resolve()
        nodes = _Node.alive()
        _check(nodes, self._logs)
        self.gpus = sum(node.gpus for node in nodes)
        self.workers = self.gpus or sum(node.cpus for node in nodes)

    def run(self, tasks: Sequence[Task]) -> Generator[Ended, None, None]:
        """See `Executor.run`."""
        flow = _Flow(tasks, self._logs, has_gpus=self.gpus > 0)
        try:
            while flow:
                flow.submit()
                yield from flow.ended()
        finally:
            flow.cancel()


class _Flow:
    """Tasks on their way through the cluster."""

    def __init__(self, tasks: Sequence[Task], logs: Path, *, has_gpus: bool) -> None:
        self._logs, self._has_gpus = logs, has_gpus
        self._how = _How(logs, Path.cwd())
        if self._has_gpus and (most := max(node.gpus for node in _Node.alive())) < max(task.gpus for task in tasks):
            raise UserError(
                f"no node of the cluster has the GPUs that a training wants: they have {most} at most",
                fix="choose a smaller --gpus-per-training",
            )
        self._order = Order(tasks)
        self._running: dict[Any, Task] = {}
        self._losses = Counter[str]()
        self._places: dict[str, _Node] = {}  # task that has a node for itself -> the node
        self._groups: dict[str, PlacementGroup] = {}
        self._stranded: dict[str, float] = {}  # task that no node could run -> since when

    def __bool__(self) -> bool:
        return bool(self._order)

    # ---- handing over ----

    def submit(self) -> None:
        """Hand over what can start."""
        for task in self._order.ready:
            node = self._free_node() if task.alone else None
            if node is not None or not task.alone:
                self._order.take(task)
                self._hand_over(task, node)

    def _reserves(self, task: Task) -> bool:
        return task.alone or (self._has_gpus and task.gpus > 1)

    def _hand_over(self, task: Task, node: _Node | None) -> None:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": task.gpus if self._has_gpus else 0}
        if node is not None:  # all of it, and no other
            self._places[task.name] = node
            strategy: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options = {"num_cpus": node.cpus, "num_gpus": node.gpus, "scheduling_strategy": strategy, "max_retries": 0}
        elif self._reserves(task):
            group = placement_group([{"CPU": 1, "GPU": task.gpus}], strategy="STRICT_PACK")
            self._groups[task.name] = group
            strategy = PlacementGroupSchedulingStrategy(group)
            options |= {"scheduling_strategy": strategy, "max_retries": 0}
        else:
            options |= {"scheduling_strategy": "SPREAD", "max_retries": _LOSSES - 1}
        perform = _PERFORM_ONCE if options["num_gpus"] else _PERFORM
        ref = perform.options(name=task.name, **options).remote(task, self._how, node, self._order.made(task))
        self._running[ref] = task

    def _free_node(self) -> _Node | None:
        """A node for what is to be alone; None while there is none.

        On one machine with several nodes it waits until nothing else is under way: a race that shares its machine is
        none.
        """
        nodes, taken = _Node.alive(), {node.host for node in self._places.values()}
        hosts = Counter(node.host for node in nodes)
        others = any(not task.alone for task in self._running.values())
        here = socket.gethostname()
        fit = [
            node
            for node in nodes
            if node.host not in taken and not (others and hosts[node.host] > 1) and (node.gpus or not self._has_gpus)
        ]
        return min(fit, key=lambda node: (node.host == here, -node.gpus, node.id), default=None)

    # ---- coming back ----

    def ended(self) -> list[Ended]:
        """What has ended, after a while."""
        if self._running:
            done, _ = ray.wait([*self._running], num_returns=1, timeout=_LOOK_S)
        else:  # what is left waits for a node
            done = []
            time.sleep(_LOOK_S)
        found = [end for ref in done if (end := self._end_of(ref, self._running.pop(ref))) is not None]
        found += self._given_up()
        for end in found:
            self._order.end(end)
        return found

    def _given_up(self) -> list[Ended]:
        """The ends of tasks that no node has been able to run for a while: those that could are lost."""
        waiting = [*self._order.ready, *(one for one in self._running.values() if one.name in self._groups)]
        if not waiting:
            return []
        most, now, found = max((node.gpus for node in _Node.alive()), default=-1), time.monotonic(), list[Ended]()
        for task in waiting:
            if most >= (task.gpus if self._has_gpus else 0):
                self._stranded.pop(task.name, None)
            elif now - self._stranded.setdefault(task.name, now) >= _PATIENCE_S:
                found.append(self._strand(task))
        return found

    def _strand(self, task: Task) -> Ended:
        """Give up a task that is held back, or waits for GPUs that are no more."""
        if task in self._order.ready:
            self._order.take(task)
        else:
            ref = next(ref for ref, one in self._running.items() if one is task)
            del self._running[ref]
            ray.cancel(ref, force=True)
            remove_placement_group(self._groups.pop(task.name))
        what = f"{task.title}: the cluster has lost every node that could run it"
        return ended_by(task, UserError(what, fix="give it a node like that, and type the same command again"))

    def _end_of(self, ref: Any, task: Task) -> Ended | None:
        """How a task has ended; None where it is to be handed over again: Ray does that itself for most."""
        self._places.pop(task.name, None)
        if (group := self._groups.pop(task.name, None)) is not None:
            remove_placement_group(group)
        try:
            end: Ended = ray.get(ref)
        except RayError as error:
            # What its work raises is written down where it is done: this is what came before.
            began, log = not isinstance(error, RayTaskError), log_of(self._logs, task.name)
            self._losses[task.name] += 1
            if began and self._reserves(task) and self._losses[task.name] < _LOSSES:
                self._order.give_back(task)
                return None
            with log.open("a", encoding="utf-8") as stream:
                stream.write(f"{error}\n")
            what = f"{task.title} could not begin: {str(error).strip().splitlines()[-1]}"
            trouble = UserError(what, where=str(log), fix="mend what the log says on all nodes")
            return lost(task, _LOSSES, log) if began else ended_by(task, trouble)
        return end

    def cancel(self) -> None:
        for ref in self._running:
            ray.cancel(ref, force=True)
        for group in self._groups.values():
            remove_placement_group(group)


# ---- on the nodes ---------------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """What all tasks of a run share."""

    logs: Path
    cwd: Path  # of the driver, from which relative paths are meant


def _perform(task: Task, how: _How, whole: _Node | None, made: Sequence[Any]) -> Ended:
    """Carry out a task on a node: one that is to be alone only if it holds all of it."""
    context = ray.get_runtime_context()
    os.environ[NODE] = f"{socket.gethostname()}-{context.get_node_id()[:8]}"
    held = context.get_assigned_resources()  # type: ignore[no-untyped-call]
    if whole is not None and (held.get("CPU", 0), held.get("GPU", 0)) != (whole.cpus, whole.gpus):
        refusal = UserError(f"{task.title}: refused beside other work", fix="give it a whole node")
        return ended_by(task, refusal)
    _use_cores(whole.cpus if whole is not None else 1 if not held.get("GPU") else max(1, int(held.get("CPU", 1))))
    if how.cwd.is_dir():
        os.chdir(how.cwd)
    return perform(task, made, how.logs, os.environ[NODE])


# A process that has used a GPU holds memory there, and stays with that GPU: it ends with its task.
_PERFORM, _PERFORM_ONCE = ray.remote(_perform), ray.remote(max_calls=1)(_perform)


def _use_cores(count: int) -> None:
    """Let torch use so many cores, whether it has been imported or is yet to be."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)


class _Look(NamedTuple):
    """What a node sees of the shared folder, and what it would run."""

    token: str
    runs: tuple[str, ...]


@ray.remote(num_cpus=0, max_retries=0)
def _look(file: Path) -> _Look:
    try:
        token = file.read_text(encoding="utf-8")
    except OSError:
        token = ""
    return _Look(token, _what_runs())


def _what_runs() -> tuple[str, ...]:
    """Versions of all that numbers depend on; ours is told by its source, which may be a checkout's."""
    source = b"\0".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))
    found = [f"Python {platform.python_version()}", f"marsbench {hashlib.sha256(source).hexdigest()[:16]}"]
    for package in _SAME:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return tuple(found)


def _check(nodes: Sequence[_Node], folder: Path) -> None:
    """Make sure that all nodes see a folder of ours and would make the same numbers.

    Raises:
        UserError: those that do not, and what they lack.
    """
    token = uuid4().hex
    file = write_atomically(folder / f"token-{token}", token.encode())
    try:
        looks = {
            node.id: _look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(file)
            for node in nodes
        }
        problems = [f"{node.host} ({node.id[:8]}): {why}" for node in nodes if (why := _unfit(looks[node.id], token))]
    finally:
        file.unlink(missing_ok=True)
    if problems:
        raise UserError(
            f"{len(problems)} of {len(nodes)} nodes cannot work for this one: {'; '.join(problems)}",
            where=str(folder),
            fix="choose an --output folder that all nodes see under this name, and install the same on all; "
            "see docs/clusters.md",
        )


def _unfit(looking: Any, token: str) -> str:
    """Why a node cannot take part, empty if it can."""
    try:
        seen: _Look = ray.get(looking, timeout=_ANSWER_S)
    except GetTimeoutError:
        return f"no answer within {_ANSWER_S:g} s"
    except TaskUnschedulableError:
        return ""  # it has left the cluster meanwhile
    except RayError as error:
        return str(error).strip().splitlines()[-1]
    if seen.token != token:
        return "it does not see the folder"
    other = [one for one, ours in zip(seen.runs, _what_runs(), strict=False) if one != ours]
    return f"it has {', '.join(other)}" if other else ""
