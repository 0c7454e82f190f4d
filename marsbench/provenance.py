"""Where a number comes from: commit, versions, hardware, and what else ran there: what a row says about its origin."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

NODE = "MARSBENCH_NODE"  # the environment variable that names this machine in a cluster
_PATIENCE_S = 20.0  # with the driver
BUSY_CORES = 0.1  # what others may use before it is worth a word
PACKAGES = "marsbench torch transformers accelerate lm_eval evalplus scipy numpy llama_cpp_python"


def provenance(*, seed: int) -> dict[str, Any]:
    """What to write beside a measurement that starts now."""
    import torch

    policy, spins = os.environ.get("OMP_WAIT_POLICY", "the library's own"), os.environ.get("GOMP_SPINCOUNT")
    return {
        **_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": package_versions(),
        "hardware": _hardware(),
        **({"gpus": gpus} if (gpus := gpus_now()) else {}),
        "threads": torch.get_num_threads(),
        "float32_products": float32_products(),
        "wait_policy": policy if spins is None else f"{policy}, GOMP_SPINCOUNT={spins}",  # how threads wait
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

    with suppress(OSError, subprocess.CalledProcessError):
        dirty = bool(git("status", "--porcelain", "--", "marsbench", "tasks"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    return {"commit": "unknown", "dirty": None}


@cache
def package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@cache
def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _hardware() -> dict[str, Any]:
    import psutil
    import torch

    memory = round(psutil.virtual_memory().total / 2**30, 1)
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gib": memory, "gpu": gpus or None}


# What the driver tells of each GPU: as nvidia-smi calls it -> as rows do. Clocks are in MHz, power in watts.
_OF_GPU = {
    "driver_version": "driver", "clocks.sm": "clock", "clocks.max.sm": "highest_clock", "clocks.mem": "memory_clock",
    "power.limit": "power_limit", "power.draw": "power", "temperature.gpu": "celsius",
    "utilization.gpu": "busy_percent", "memory.used": "memory_used_mib",
}  # fmt: skip


def gpus_now() -> list[dict[str, str]]:
    """Driver, clocks, power and use of every GPU at this moment; none without a GPU of Nvidia's that answers."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_OF_GPU)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    told = [line.split(",") for line in said.splitlines() if line.strip()]
    return [dict(zip(_OF_GPU.values(), map(str.strip, parts), strict=True)) for parts in told]


def float32_products() -> str:
    """How a GPU multiplies fp32: "highest" = exactly, "high" = as TF32 (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1)."""
    import torch

    return torch.get_float32_matmul_precision()


def products(dtype: str) -> dict[str, str]:
    """What keys hold of how numbers of a type are multiplied: nothing, unless fp32 is rounded on the way."""
    how = float32_products()
    return {} if how == "highest" or dtype != "float32" else {"float32_products": how}


def others_cores(seconds: float = 0.5) -> float | None:
    """How many cores are busy while this process rests for so many seconds; None where the system does not tell."""
    try:
        import psutil

        return round(float(psutil.cpu_percent(seconds)) * float(psutil.cpu_count()) / 100, 2)
    except Exception:  # psutil is missing, or raises its own on a system that hides such numbers
        return None


def warning(used: float | None) -> str:
    """One line for what is timed while others use so many cores; empty where that is next to nothing, or not known."""
    if used is None or used <= BUSY_CORES:
        return ""
    return f"this machine is not idle: other processes use {used:.2f} cores; they change the times"
