"""A Ray cluster, imported where it is asked for: a CPU or GPU for each task, a whole node for what is timed."""

import hashlib
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from ray.exceptions import RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from marsbench.errors import UserError
from marsbench.executors.tasks import LOOK_S, Ended, Executor, Task, log_of, perform
from marsbench.files import PACKAGE, write_atomically
from marsbench.provenance import NODE, package_versions

_ANSWER_S = 120.0  # within which every node must say that it sees the shared folder
_PATIENCE_S = 600.0  # with a cluster that has lost all nodes on which tasks could run


class _Node(NamedTuple):
    gpus: int
    cpus: int
    id: str
    host: str

    def only(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self.id, soft=False)


def _nodes() -> list[_Node]:
    return [
        _Node(int(held.get("GPU", 0)), int(held["CPU"]), node["NodeID"], node["NodeManagerHostname"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and (held := node["Resources"]).get("CPU")
    ]


class Cluster(Executor):
    tries = 5

    def __init__(self, address: str, logs: Path) -> None:
        """Connect ("auto": to this machine's cluster); `UserError` without one, or if a node lacks folder or code."""
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            fix = "start one: `ray start --head` here, `ray start --address=...` on the others; see docs/clusters.md"
            what = f"there is no Ray cluster: {str(error).splitlines()[0]}"
            raise UserError(what, where=address, fix=fix) from error
        self.logs, nodes = logs.resolve(), _nodes()
        _check(nodes, self.logs)
        self.gpus = sum(node.gpus for node in nodes)
        self.workers = self.gpus or sum(node.cpus for node in nodes)
        self._cwd, self._running = Path.cwd(), {}
        self._fit_until = time.monotonic()

    def _fit(self) -> list[_Node]:
        """Nodes on which tasks can run; `UserError` where there has been none for long."""
        fit, now = [node for node in _nodes() if node.gpus or not self.gpus], time.monotonic()
        if not fit and now - self._fit_until > _PATIENCE_S:
            what = "the cluster has lost every node that could go on"
            raise UserError(what, fix="give it a node with a GPU, and type the same command again")
        self._fit_until = now if fit else self._fit_until
        return fit

    def start(self, task: Task, made: Sequence[Any]) -> bool:
        """Hand a task over; what is to be alone gets all of a node of an idle machine, False while there is none."""
        place, fit, taken = "", self._fit(), {host for _, host in self._running.values()}
        shared = {node.host for node in fit if sum(other.host == node.host for other in fit) > 1}
        if shared & taken:  # nothing else may run on that machine
            return False
        if self.gpus and fit and task.gpus > (most := max(fit).gpus):
            what = f"{task.title} wants {task.gpus} GPUs of a node, and nodes have {most} at most"
            raise UserError(what, fix="choose a smaller --gpus-per-training")
        gpus = task.gpus if self.gpus else 0
        how: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        if task.alone:
            # Where tasks without a place run, Ray decides.
            free = [node for node in fit if node.host not in taken | (shared if "" in taken else set())]
            if not free:
                return False
            node = max(free)
            place = node.host
            how = {"num_cpus": node.cpus, "num_gpus": node.gpus, "scheduling_strategy": node.only()}
        carry = (_PERFORM_ONCE if how["num_gpus"] else _PERFORM).options(name=task.name, max_retries=0, **how)
        self._running[carry.remote(task, made, self.logs, self._cwd)] = task, place
        return True

    def ended(self) -> list[tuple[Task, Ended | None]]:
        self._fit()
        if not self._running:  # what is left waits for a node
            time.sleep(LOOK_S)
            return []
        done, _ = ray.wait([*self._running], num_returns=1, timeout=LOOK_S)
        endings = list[tuple[Task, Ended | None]]()
        for ref in done:
            task, _ = self._running.pop(ref)
            try:
                endings.append((task, ray.get(ref)))
            except RayError as error:  # its process or node was lost; what its work raises is in its end
                with log_of(self.logs, task.name).open("a", encoding="utf-8") as stream:
                    stream.write(f"{error}\n")
                endings.append((task, None))
        return endings

    def close(self) -> None:
        for ref in self._running:
            ray.cancel(ref, force=True)


def _perform(task: Task, made: Sequence[Any], logs: Path, cwd: Path) -> Ended:
    """Carry out a task on a node, with the cores that it holds; relative paths are meant from `cwd`, the driver's."""
    context = ray.get_runtime_context()
    os.environ[NODE] = f"{socket.gethostname()}-{context.get_node_id()[:8]}"
    cores = int(context.get_assigned_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    os.environ["OMP_NUM_THREADS"] = str(cores)  # for torch, once it is imported, and for processes that it starts
    if torch := sys.modules.get("torch"):  # by another task
        torch.set_num_threads(cores)
    if cwd.is_dir():
        os.chdir(cwd)
    return perform(task, made, logs, os.environ[NODE])


# A process that has used a GPU holds memory there, and stays with that GPU: it ends with its task.
_PERFORM, _PERFORM_ONCE = ray.remote(_perform), ray.remote(max_calls=1)(_perform)


def _what_runs(file: Path) -> list[str]:
    """Versions of all that numbers depend on, our own code's by its source; and whether a file cannot be seen."""
    source = b"\0".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))
    versions = {**package_versions(), "Python": platform.python_version(), "code": hashlib.sha256(source).hexdigest()}
    unseen = [] if file.exists() else ["it does not see the folder"]
    return [*unseen, *(f"it has {name} {version[:16]}" for name, version in versions.items())]


_SEEN = ray.remote(num_cpus=0, max_retries=0)(_what_runs)


def _check(nodes: Sequence[_Node], folder: Path) -> None:
    file, complaints = write_atomically(folder / f"token-{uuid4().hex}", b""), list[str]()
    ours, asked = _what_runs(folder), [_SEEN.options(scheduling_strategy=node.only()).remote(file) for node in nodes]
    for node, answer in zip(nodes, asked, strict=True):
        try:
            others = [said for said in ray.get(answer, timeout=_ANSWER_S) if said not in ours]
        except TaskUnschedulableError:  # it has left the cluster meanwhile
            continue
        except RayError as error:  # one that does not answer in time among them
            others = [str(error).strip().splitlines()[-1]]
        complaints += [f"{node.host}: {', '.join(others)}"] if others else []
    file.unlink(missing_ok=True)
    if complaints:
        what = f"{len(complaints)} of {len(nodes)} nodes cannot work for this one: {'; '.join(complaints)}"
        fix = "choose an --output folder that all nodes see, and install the same on all; see docs/clusters.md"
        raise UserError(what, where=str(folder), fix=fix)
