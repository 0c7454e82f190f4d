"""The launch files for clusters: what they say can be parsed, and starts the command that it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import complaint

from marsbench.paths import PACKAGE

LAUNCH = PACKAGE / "presets" / "launch"
SLURM, KUBERNETES = LAUNCH / "ray_on_slurm.sbatch", LAUNCH / "ray_on_kubernetes.yaml"
ON_TWO_NODES = {
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_JOB_ID": "7",
    "SLURM_CPUS_ON_NODE": "32",
    "SLURM_GPUS_ON_NODE": "8",
}
PROGRAMS = {  # what the script calls -> what stands for it here
    "scontrol": 'printf "a1\\na2\\n"',
    "srun": 'case "$*" in *hostname*) echo 10.0.0.1 fe80::1;; esac',
    "python": "cat > /dev/null",
    "sleep": "",
    "marsbench": '[ -z "${STAYS:-}" ] || { trap "/bin/sleep 1; echo ended >&2; exit 5" TERM; touch "$STAYS"; '
    'while :; do /bin/sleep 0.1; done; }; echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >&2; exit "${FAILS:-0}"',
}


def wait_for(file: Path) -> None:
    """Until a file is there."""
    until = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < until, f"{file} does not come"
        time.sleep(0.05)


def submit(folder: Path, *words: str, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script as SLURM would, on two nodes; and what it has called."""
    log = folder / "log"
    environment = allocation(folder, **more)
    done = subprocess.run(["bash", str(SLURM), *words], env=environment, capture_output=True, text=True, check=False)
    return done, log.read_text().splitlines() if log.exists() else []


def allocation(folder: Path, **more: str) -> dict[str, str]:
    """The environment of an allocation of two nodes, whose programs only write down that they were called."""
    programs = folder / "bin"
    programs.mkdir()
    for name, does in PROGRAMS.items():
        program = programs / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder / "log"}"\n{does}\n')
        program.chmod(0o755)
    return {**ON_TWO_NODES, **more, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_script_starts_ray_on_all_nodes_and_the_command_on_one(tmp_path: Path) -> None:
    """Guards against a cluster of one node, a lost argument, and a status that SLURM never sees."""
    done, called = submit(tmp_path, "reproduce", "all", "--scale", "7b", "--output", "a folder", FAILS="3")
    assert done.returncode == 3, done.stderr
    lent = "--num-cpus=32 --num-gpus=8 --disable-usage-stats --block"
    steps = [line for line in called if "ray start" in line]
    head, others = sorted(steps, key=lambda line: "--head" not in line)
    assert "--nodelist=a1" in head and head.endswith(f"--node-ip-address=10.0.0.1 --port=20007 {lent}")
    assert "--nodes=1 --ntasks=1 --overlap --exclude=a1" in others and f"--address=10.0.0.1:20007 {lent}" in others
    assert "python - 10.0.0.1:20007 2" in called, "it does not wait for both"
    (command,) = (line for line in called if line.startswith("marsbench "))
    assert command == "marsbench reproduce all --scale 7b --output a folder --cluster 10.0.0.1:20007"
    assert not complaint(command.replace("a folder", "folder").split()[1:])


def test_the_slurm_script_asks_for_a_command(tmp_path: Path) -> None:
    """Guards against an allocation that is held for nothing."""
    done, called = submit(tmp_path)
    assert done.returncode == 2 and "which marsbench command?" in done.stderr and not called


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_script_waits_for_a_command_that_is_told_to_end(tmp_path: Path) -> None:
    """Guards against an allocation that is given back while the command still writes down what it has."""
    begun = tmp_path / "begun"
    script = ["bash", str(SLURM), "reproduce", "all"]
    environment = allocation(tmp_path, STAYS=str(begun))
    with subprocess.Popen(script, env=environment, stderr=subprocess.PIPE, text=True) as running:
        wait_for(begun)
        running.terminate()
        assert running.wait() == 5 and running.stderr is not None and "ended" in running.stderr.read()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("given", "length"), [({}, 64), ({"RAY_AUTH_TOKEN": "mine"}, 4)])
def test_the_clusters_ask_for_a_token(given: dict[str, str], length: int, tmp_path: Path) -> None:
    """Guards against a cluster that runs the code of whoever reaches its ports."""
    done, _ = submit(tmp_path, "reproduce", "all", **given)
    assert f"token {length}" in done.stderr
    cluster = yaml.safe_load(KUBERNETES.read_text(encoding="utf-8"))["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] >= "2.52"


def test_what_the_slurm_script_asks_slurm_for() -> None:
    """Guards against two Ray nodes on one machine, and a command that the end of the allocation kills unawares."""
    asked = [line.removeprefix("#SBATCH ") for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--ntasks-per-node=1", "--exclusive", "--signal=B:TERM@120"} <= {*asked}


def test_the_rayjob_is_whole() -> None:
    """Guards against a command that does not exist, a volume that nobody mounts, and pods of several images."""
    job: dict[str, Any] = yaml.safe_load(KUBERNETES.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = job["spec"]["entrypoint"].split()
    assert words[0] == "marsbench" and not complaint(words[1:]) and words[-2:] == ["--cluster", "auto"]
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    images, output = set(), words[words.index("--output") + 1]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {*mounts.values()} == volumes.keys()
        assert volumes[mounts[output]]["persistentVolumeClaim"]["claimName"] == "marsbench"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        images.add(container["image"])
    assert len(images) == 1
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
