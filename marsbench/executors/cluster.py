"""A Ray cluster: a CPU or a GPU for each task, several GPUs of one node for some, a whole node for what is timed.

A task is handed over once all that it comes after have ended, and with what they made; Ray decides where and when it
runs. What needs a node for itself is held back until one is free. Only what was asked for a cluster imports this.
"""

import hashlib
import logging
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from marsbench.errors import UserError
from marsbench.executors.tasks import LOOK_S, Ended, Executor, Task, ended_by, log_of, perform
from marsbench.files import write_atomically
from marsbench.paths import PACKAGE
from marsbench.provenance import NODE

_ANSWER_S = 120.0  # within which every node must say that it sees the shared folder
_SAME = ("torch", "transformers", "lm_eval")  # packages that keys of checkpoints and cells depend on


@dataclass(frozen=True)
class _Node:
    id: str
    host: str
    cpus: int
    gpus: int

    @classmethod
    def alive(cls) -> "list[_Node]":
        return [
            cls(node["NodeID"], node["NodeManagerHostname"], int(held["CPU"]), int(held.get("GPU", 0)))
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"] and (held := node["Resources"]).get("CPU")
        ]

    def only(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self.id, soft=False)


class Cluster(Executor):
    tries = 5

    def __init__(self, address: str, logs: Path) -> None:
        """Connect, and make sure that all nodes see one folder and run the same code.

        Address "auto" is the cluster of this machine. The logs lie on storage that all nodes share.

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
        self.logs, nodes = logs.resolve(), _Node.alive()
        _check(nodes, self.logs)
        self.gpus = sum(node.gpus for node in nodes)
        self.workers = self.gpus or sum(node.cpus for node in nodes)

    def open(self, tasks: Sequence[Task]) -> None:
        """See `Executor.open`; `UserError` where no node has the GPUs that a task wants."""
        most = max(node.gpus for node in _Node.alive())
        if self.gpus and most < max(task.gpus for task in tasks):
            raise UserError(
                f"no node of the cluster has the GPUs that a training wants: they have {most} at most",
                fix="choose a smaller --gpus-per-training",
            )
        self._cwd, self._running = Path.cwd(), dict[Any, Task]()
        self._places = dict[str, _Node]()  # task that has a node for itself -> the node

    def start(self, task: Task, made: Sequence[Any]) -> bool:
        """Hand a task over; one that is to be alone gets all of one node, and no other, once that is free."""
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": task.gpus if self.gpus else 0}
        strategy: Any = "SPREAD"
        if task.alone:
            node = self._free_node()
            if node is None:
                return False
            self._places[task.name] = node
            options, strategy = {"num_cpus": node.cpus, "num_gpus": node.gpus}, node.only()
        carry = (_PERFORM_ONCE if options["num_gpus"] else _PERFORM).options(
            name=task.name, scheduling_strategy=strategy, max_retries=0, **options
        )
        self._running[carry.remote(task, made, self.logs, self._cwd)] = task
        return True

    def _free_node(self) -> _Node | None:
        """A node for a task that is to be alone; None while none is free.

        On one machine with several nodes it waits until nothing else is under way: a race that shares its machine is
        none.
        """
        nodes, taken = _Node.alive(), {node.host for node in self._places.values()}
        if not all(task.alone for task in self._running.values()):
            hosts = Counter(node.host for node in nodes)
            taken |= {host for host, count in hosts.items() if count > 1}
        fit = [node for node in nodes if node.host not in taken and (node.gpus or not self.gpus)]
        here = socket.gethostname()
        return min(fit, key=lambda node: (node.host == here, -node.gpus, node.id), default=None)

    def ended(self) -> list[tuple[Task, Ended | None]]:
        if not self._running:  # what is left waits for a node
            time.sleep(LOOK_S)
            return []
        done, _ = ray.wait([*self._running], num_returns=1, timeout=LOOK_S)
        return [(task, self._end_of(ref, task)) for ref in done for task in [self._running.pop(ref)]]

    def _end_of(self, ref: Any, task: Task) -> Ended | None:
        """How a task has ended; None where its process or node was lost."""
        self._places.pop(task.name, None)
        try:
            end: Ended = ray.get(ref)
            return end
        except RayError as error:
            # What its work raises is written down where it is done: this is what came before.
            log = log_of(self.logs, task.name)
            with log.open("a", encoding="utf-8") as stream:
                stream.write(f"{error}\n")
            if not isinstance(error, RayTaskError):
                return None
            what = f"{task.title} could not begin: {str(error).strip().splitlines()[-1]}"
            return ended_by(task, UserError(what, where=str(log), fix="mend what the log says on all nodes"))

    def close(self) -> None:
        for ref in self._running:
            ray.cancel(ref, force=True)


# ---- on the nodes ---------------------------------------------------------------------------------------------------


def _perform(task: Task, made: Sequence[Any], logs: Path, cwd: Path) -> Ended:
    """Carry out a task on a node, with the cores that it holds; relative paths are meant from `cwd`, the driver's."""
    import torch

    context = ray.get_runtime_context()
    os.environ[NODE] = f"{socket.gethostname()}-{context.get_node_id()[:8]}"
    cores = int(context.get_assigned_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    os.environ["OMP_NUM_THREADS"] = str(cores)  # for processes that it starts
    torch.set_num_threads(cores)
    if cwd.is_dir():
        os.chdir(cwd)
    return perform(task, made, logs, os.environ[NODE])


# A process that has used a GPU holds memory there, and stays with that GPU: it ends with its task.
_PERFORM, _PERFORM_ONCE = ray.remote(_perform), ray.remote(max_calls=1)(_perform)


@ray.remote(num_cpus=0, max_retries=0)
def _seen(file: Path) -> tuple[bool, tuple[str, ...]]:
    """Whether a node sees a file of the shared folder, and what runs there."""
    return file.exists(), _what_runs()


def _what_runs() -> tuple[str, ...]:
    """Versions of all that numbers depend on; ours is told by its source, which may be a checkout's."""
    source = b"\0".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))
    versions = [f"Python {platform.python_version()}", f"marsbench {hashlib.sha256(source).hexdigest()[:16]}"]
    for package in _SAME:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return tuple(versions)


def _check(nodes: Sequence[_Node], folder: Path) -> None:
    """`UserError` with the nodes that do not see a folder of ours, or would make other numbers, and why."""
    file, complaints = write_atomically(folder / f"token-{uuid4().hex}", b""), list[str]()
    ours = _what_runs()
    asked = [_seen.options(scheduling_strategy=node.only()).remote(file) for node in nodes]
    for node, answer in zip(nodes, asked, strict=True):
        try:
            sees_it, runs = ray.get(answer, timeout=_ANSWER_S)
            other = ", ".join(theirs for theirs in runs if theirs not in ours)
            complaint = (f"it has {other}" if other else "") if sees_it else "it does not see the folder"
        except TaskUnschedulableError:  # it has left the cluster meanwhile
            continue
        except RayError as error:  # one that does not answer in time among them
            complaint = str(error).strip().splitlines()[-1]
        complaints += [f"{node.host}: {complaint}"] if complaint else []
    file.unlink(missing_ok=True)
    if complaints:
        raise UserError(
            f"{len(complaints)} of {len(nodes)} nodes cannot work for this one: {'; '.join(complaints)}",
            where=str(folder),
            fix="choose an --output folder that all nodes see under this name, and install the same on all; "
            "see docs/clusters.md",
        )
