"""Where a number comes from: commit, versions, hardware. Everything that a row says about its origin is read here."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

NODE = "MARSBENCH_NODE"  # the environment variable that names this machine in a cluster
PACKAGES = ("marsbench", "torch", "transformers", "accelerate", "lm_eval", "evalplus", "scipy", "numpy")


def provenance(*, seed: int) -> dict[str, Any]:
    """What to write beside a measurement that starts now."""
    return {
        **_commit(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "hardware": _hardware(),
        "threads": _threads(),
        "wait_policy": _wait_policy(),
        "seed": seed,
        **({"node": node()} if node() else {}),
    }


def node() -> str:
    """The name of this machine among those of a cluster; empty where a run has one machine only."""
    return os.environ.get(NODE, "")


@cache
def _commit() -> dict[str, Any]:
    """The commit of the source tree and whether the tree differs from it; unknown outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--", "marsbench", "tasks")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": None}


@cache
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _hardware() -> dict[str, Any]:
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": ", ".join(gpus) or None,
    }


def _cpu_name() -> str:
    """The processor's marketing name where Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _wait_policy() -> str:
    """How threads wait for each other: what the environment asks for, if anything."""
    policy = os.environ.get("OMP_WAIT_POLICY", "the library's own")
    spins = os.environ.get("GOMP_SPINCOUNT")
    return policy if spins is None else f"{policy}, GOMP_SPINCOUNT={spins}"


def _threads() -> int:
    import torch

    return torch.get_num_threads()
