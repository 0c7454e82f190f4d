"""The cluster: two Ray nodes on this machine do what processes here do, and lose nothing when nodes die."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster as Simulated
from small_work import count_and_die, do, fail, its_number, nothing, sleep_long, stay, wait_for_word
from test_docs import complaint
from test_work import Here, assert_ends, comparable, run_in, wait_for
from tools import invoke

from marsbench.errors import UserError
from marsbench.executors import cluster
from marsbench.executors.cluster import Cluster
from marsbench.executors.tasks import Ended, Task, log_of
from marsbench.files import PACKAGE
from marsbench.overview.work import carry_out
from marsbench.studies import study_of

MEMORY = 80 * 2**20  # bytes of a node's object store


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    """A cluster of a node with two cores and one with one, both on this machine."""
    known = [str(PACKAGE.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, known)))
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.setenv("RAY_health_check_period_ms", "500")
        head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": MEMORY}
        nodes = Simulated(initialize_head=True, head_node_args=head)
        nodes.add_node(num_cpus=1, object_store_memory=MEMORY)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def two(simulated: Simulated, tmp_path: Path) -> Cluster:
    return Cluster(simulated.address, tmp_path / "logs")


def ends(executor: Cluster, tasks: Sequence[Task]) -> dict[str, Ended]:
    ended = [*executor.run(tasks)]
    assert sorted(end.name for end in ended) == sorted(task.name for task in tasks)
    return {end.name: end for end in ended}


def test_tasks_are_shared_out_races_run_alone_and_failures_are_heard(two: Cluster, tmp_path: Path) -> None:
    """Guards against one node that does all work, a task beside a race on its node, and a task lost for ever."""
    (tmp_path / "dies").mkdir()
    tasks = [do(f"task{number}", stay, tmp_path) for number in range(6)]
    tasks += [do(f"race{number}", stay, tmp_path, alone=True) for number in range(2)]
    tasks += [do("bad", fail, tmp_path, title="the bad one")]
    tasks += [do("dies", count_and_die, tmp_path / "dies", title="this one"), do("child", nothing, tmp_path, "dies")]
    ended = ends(two, tasks)
    assert ended["race0"].value == ended["race1"].value == []
    nodes = {ended[f"task{number}"].node for number in range(6)}
    assert len(nodes) > 1 and all(nodes)
    error = ended["bad"].error
    assert error is not None and error.what == "the bad one failed: ValueError: it does not work"
    assert "this one: its process was lost 5 times" in ended["child"].value[0]
    assert len([*(tmp_path / "dies").glob("try*")]) == 5
    assert log_of(tmp_path / "logs", "bad").read_text().count("Traceback") == 1


def test_what_a_lost_node_did_is_done_elsewhere(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a run that ends when a node does, or waits for ever without nodes, and GPU memory that is kept."""
    nodes = [simulated.add_node(num_cpus=1, num_gpus=2, object_store_memory=MEMORY) for _ in range(2)]
    try:
        on_gpus = Cluster(simulated.address, tmp_path / "logs")
        assert on_gpus.workers == 4
        with pytest.raises(UserError, match="wants 3 GPUs of a node, and nodes have 2 at most"):
            ends(on_gpus, [do("wide", nothing, tmp_path, title="it", gpus=3)])
        of_each = ends(on_gpus, [do(f"task{number}", its_number, tmp_path, gpus=1 + number % 2) for number in range(3)])
        processes = {end.value for end in of_each.values()}
        assert len(processes) == 3
        for process in processes:
            assert_ends(process)
        task, child = (do("task", wait_for_word, tmp_path, alone=True), do("child", nothing, tmp_path, "task"))

        def lose() -> None:
            where = wait_for(tmp_path / "running", 300)
            lost = next(node for node in nodes if where.endswith(node.node_id[:8]))
            simulated.remove_node(lost, allow_graceful=False)

        losing = Thread(target=lose)
        losing.start()
        ended = ends(on_gpus, [task, child])
        losing.join()
        assert ended["task"].error is None and ended["child"].value == [ended["task"].value]
        assert ended["task"].value == ended["task"].node != (tmp_path / "running").read_text()
    finally:
        for node in simulated.worker_nodes & {*nodes}:
            simulated.remove_node(node)  # gracefully: the next test must not count its GPU
    monkeypatch.setattr(cluster, "_PATIENCE_S", 1.0)
    for alone in (True, False):
        with pytest.raises(UserError, match="lost every node"):
            ends(on_gpus, [do("left", nothing, tmp_path, alone=alone)])


def test_who_stops_listening_ends_what_runs(two: Cluster, tmp_path: Path) -> None:
    """Guards against a cluster that works on after Ctrl-C."""
    running = two.run([do("quick", nothing, tmp_path), do("long", sleep_long, tmp_path)])
    assert next(running).name == "quick"
    process = int(wait_for(tmp_path / "started"))
    running.close()
    assert_ends(process)


def test_a_node_that_does_not_see_the_folder_is_named(
    two: Cluster, simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against checkpoints that are trained again on every node, hours later."""
    monkeypatch.setattr(cluster, "write_atomically", lambda path, _: path)
    with pytest.raises(UserError, match=r"(?s)2 of 2 nodes .*it does not see the folder.*--output folder that all"):
        Cluster(simulated.address, tmp_path / "logs")
    monkeypatch.undo()
    monkeypatch.setattr(cluster, "_what_runs", lambda file: ["it has Python 2.7"])
    with pytest.raises(UserError, match=r"it has Python 3"):
        Cluster(simulated.address, tmp_path / "logs")


def test_a_page_made_by_a_cluster_is_the_page(two: Cluster, tmp_path: Path, micro_checkpoints: Path) -> None:
    """Guards against rows that depend on where they were made, lack their node, or are written by a node."""
    options = {"benchmarks": ("mini_gsm8k",), "limit": 2}
    results = []
    for executor in (Here(tmp_path / "logs"), two):
        run = run_in(tmp_path / type(executor).__name__, micro_checkpoints, **options)
        table9 = study_of("table9")
        assert table9.plan is not None
        few = replace(table9, plan=replace(table9.plan, lines=table9.plan.lines[:1]))
        rows = carry_out([few], run, executor)["table9"]
        assert isinstance(rows, list)
        results.append(rows)
        assert len(run.workspace.row_file.read_text().splitlines()) == len(run.row_file.rows())
    here, there = results
    assert comparable(there) == comparable(here)
    measured = [row.provenance for row in there if row.kind == "evaluation"]
    assert measured and all("node" in provenance for provenance in measured)
    assert not any("node" in row.provenance for row in here)


def test_nothing_of_ray_is_imported_without_a_cluster() -> None:
    """Guards against a second of imports, or an error without the extra, for users of one computer."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert file.name == "cluster.py" or not re.search(r"^\s*(import|from) ray\b", text, re.M), file
        assert "\nfrom marsbench.executors.cluster import" not in text, file


@pytest.mark.parametrize(("more", "message"), [
    ([], "pip install 'marsbench[cluster]'"), (["--jobs", "2"], "--jobs and --cluster do not go together"),
])  # fmt: skip
def test_a_cluster_that_cannot_be_used_is_refused_at_once(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback where Ray is not installed, and options that are ignored without an error."""
    if not more:
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delitem(sys.modules, "marsbench.executors.cluster")
    arguments = ["reproduce", "table2", "--scale", "micro", "--cluster", "auto", "--output", str(tmp_path), *more]
    done = invoke(*arguments, code=2)
    assert message in done.output and not [*tmp_path.glob("runs/*/checkpoints")]


LAUNCH = PACKAGE / "presets" / "launch"
SLURM, KUBERNETES = LAUNCH / "ray_on_slurm.sbatch", LAUNCH / "ray_on_kubernetes.yaml"
ON_TWO_NODES = {
    "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "32", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip
PROGRAMS = {  # what the script calls -> what stands for it here
    "scontrol": 'printf "a1\\na2\\n"',
    "srun": 'case "$*" in *hostname*) echo 10.0.0.1 fe80::1;; esac',
    "python": "cat > /dev/null",
    "sleep": "",
    "marsbench": '[ -z "${STAYS:-}" ] || { trap "/bin/sleep 1; echo ended >&2; exit 5" TERM; echo > "$STAYS"; '
    'while :; do /bin/sleep 0.1; done; }; echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >&2; exit "${FAILS:-0}"',
}


def submit(folder: Path, *words: str, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script as SLURM would, on two nodes; returns also the programs that it called."""
    log = folder / "log"
    environment = allocation(folder, **more)
    done = subprocess.run(["bash", str(SLURM), *words], env=environment, capture_output=True, text=True, check=False)
    return done, log.read_text().splitlines() if log.exists() else []


def allocation(folder: Path, **more: str) -> dict[str, str]:
    """The environment of an allocation of two nodes, whose programs only write down that they were called."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, does in PROGRAMS.items():
        program = programs / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder / "log"}"\n{does}\n')
        program.chmod(0o755)
    return {**ON_TWO_NODES, **more, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_script_starts_ray_on_all_nodes_and_the_command_on_one(tmp_path: Path) -> None:
    """Guards against a cluster of one node, or without a token, lost arguments or status, and a run without command."""
    done, called = submit(tmp_path / "none")
    assert done.returncode == 2 and "which marsbench command?" in done.stderr and not called
    options = [line.removeprefix("#SBATCH ") for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--ntasks-per-node=1", "--exclusive", "--signal=B:TERM@120"} <= {*options}
    done, called = submit(tmp_path, "reproduce", "all", "--scale", "7b", "--output", "a folder", FAILS="3")
    assert done.returncode == 3 and "token 64" in done.stderr, done.stderr
    resources = "--num-cpus=32 --num-gpus=8 --disable-usage-stats --block"
    steps = [line for line in called if "ray start" in line]
    head, others = sorted(steps, key=lambda line: "--head" not in line)
    assert "--nodelist=a1" in head and head.endswith(f"--node-ip-address=10.0.0.1 --port=20007 {resources}")
    assert "--nodes=1 --ntasks=1 --overlap --exclude=a1" in others and f"--address=10.0.0.1:20007 {resources}" in others
    assert "python - 10.0.0.1:20007 2" in called, "it does not wait for both"
    (command,) = (line for line in called if line.startswith("marsbench "))
    assert command == "marsbench reproduce all --scale 7b --output a folder --cluster 10.0.0.1:20007"
    assert not complaint(command.replace("a folder", "folder").split()[1:])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_script_waits_for_a_command_that_is_told_to_end(tmp_path: Path) -> None:
    """Guards against an allocation that ends while the command still writes its rows."""
    begun = tmp_path / "begun"
    script = ["bash", str(SLURM), "reproduce", "all"]
    environment = allocation(tmp_path, STAYS=str(begun))
    with subprocess.Popen(script, env=environment, stderr=subprocess.PIPE, text=True) as running:
        wait_for(begun)
        running.terminate()
        assert running.wait() == 5 and running.stderr is not None and "ended" in running.stderr.read()


def test_the_rayjob_is_whole() -> None:
    """Guards against a command that does not exist, a volume that is not mounted, and pods of several images."""
    job: dict[str, Any] = yaml.safe_load(KUBERNETES.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = job["spec"]["entrypoint"].split()
    assert words[0] == "marsbench" and not complaint(words[1:]) and words[-2:] == ["--cluster", "auto"]
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] >= "2.52"
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {*mounts.values()} == volumes.keys()
        assert volumes[mounts[words[words.index("--output") + 1]]]["persistentVolumeClaim"]["claimName"] == "marsbench"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["image"] == cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
