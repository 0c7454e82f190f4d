"""Looks the machine over before a long run. A missing package is a finding: nothing heavy is imported at the top."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from marsbench.errors import UserError
from marsbench.files import check_can_be_written, nearest_existing, tasks_dir
from marsbench.presets import DEFAULT_SCALE, preset
from marsbench.provenance import others_cores, warning

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One finding: "fail" stops a run, "warn" narrows it; `fix` says how to mend either."""

    name: str
    ok: Literal["ok", "warn", "fail"]
    finding: str
    fix: str = ""


def checks(scale: str, output: Path, data_dir: Path | None = None) -> list[Check]:
    """All findings for a run that writes below `output`, with real data from `data_dir`, or the hub if it is None."""
    needs = preset(scale)
    return [
        *check_packages(), *check_device(scale, needs.memory_gib), check_idle(),
        check_output(output, needs.disk_gib), check_data(scale, data_dir),
    ]  # fmt: skip


def check_packages() -> Iterator[Check]:
    """Every package that marsbench's own metadata asks for; those of an extra only warn."""
    try:
        requirements = [Requirement(line) for line in metadata.requires("marsbench") or []]
        tasks_dir()
    except (metadata.PackageNotFoundError, UserError) as error:
        yield Check("marsbench", "fail", f"not installed, or not all of it: {error}", "pip install -e '.[all]'")
        return
    for needed in requirements:
        wants = needed.marker.evaluate if needed.marker else bool
        extra = next((extra for extra in ("", "eval", "real", "report") if wants({"extra": extra})), None)
        if extra is not None:
            version, wanted = "not installed", f"{needed.name}{needed.specifier}"
            with suppress(metadata.PackageNotFoundError):
                version = metadata.version(needed.name)
            fits = version != "not installed" and needed.specifier.contains(version, prereleases=True)
            fix = f"pip install 'marsbench[{extra}]'" if extra else f"pip install '{wanted}'"
            yield Check(needed.name, "ok" if fits else "warn" if extra else "fail", f"{version}, needed {wanted}", fix)


def check_device(scale: str, memory_gib: float) -> Iterator[Check]:
    """What computes, its free memory, and, on a CPU, whether native code is built for it."""
    try:
        import psutil
        import torch

        from marsbench.forward.fastest import in_words
        from marsbench.forward.native import why_not_native
    except (ImportError, OSError) as error:  # OSError: a shared library of PyTorch's does not load
        yield Check("device", "fail", f"PyTorch cannot be loaded: {error}", "pip install --force-reinstall torch")
        return
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)  # a process loads its model on one
    free, slow = [torch.cuda.mem_get_info(index)[0] for index in gpus], preset(scale).needs_gpu and not gpus
    device = f"CUDA: {', '.join(map(torch.cuda.get_device_name, gpus))}; marsbench gpu-check says whether it is fit"
    if not gpus:
        free, device = [psutil.virtual_memory().available], f"CPU, {os.cpu_count()} cores"
        reason, fix = why_not_native(), "install g++ or clang++: decoding on a CPU is slower without"
        yield Check("native code", "warn" if reason else "ok", reason or in_words(), fix)
    finding = f"{device}: far too slow for {scale}" if slow else device
    yield Check("device", "warn" if slow else "ok", finding, f"use a GPU, or --scale {DEFAULT_SCALE}")
    finding = f"{max(free) / GIB:.1f} GiB available, {memory_gib:g} needed"
    enough = max(free) >= memory_gib * GIB
    yield Check("memory", "ok" if enough else "fail", finding, "stop other programs, or choose a smaller --scale")


def check_idle() -> Check:
    busy = warning(others_cores())
    fix = "stop them before a race: they would change its times"
    return Check("idle", "warn" if busy else "ok", busy or "no other process is busy", fix)


def check_output(output: Path, needed_gib: float) -> Check:
    folder = nearest_existing(output)
    try:
        check_can_be_written(output / "rows.jsonl", "--output")
    except UserError as error:
        return Check("output", "fail", f"{error.what} ({error.where})", error.fix)
    free = shutil.disk_usage(folder).free / GIB
    finding = f"{folder} is writable; {free:.1f} GiB free, {needed_gib:g} needed"
    fix = "free some space, or choose another folder with --output"
    return Check("output", "ok" if free >= needed_gib else "fail", finding, fix)


def check_data(scale: str, data_dir: Path | None) -> Check:
    """Where benchmarks come from: the embedded world, a local folder, or the hub; what a folder lacks is skipped."""
    in_world = preset(scale).world is not None
    if data_dir is None and in_world:
        return Check("data", "ok", "the embedded world is generated on the spot")
    if data_dir is not None and not data_dir.is_dir():
        fix = "correct --data-dir or MARSBENCH_DATA, or leave both out"
        return Check("data", "warn" if in_world else "fail", f"{data_dir} is no folder", fix)
    try:
        from marsbench.evaluation.answers import check_sentence_model
        from marsbench.evaluation.benchmarks import GROUPS, benchmark, local_files

        check_sentence_model(data_dir)
        if data_dir is None:
            fix = "log in there for GPQA, which is gated, or give local copies with --data-dir or MARSBENCH_DATA"
            return Check("data", "warn", "benchmarks will be loaded from the Hugging Face hub, not tried here", fix)
        wanted = [(name, file) for name in GROUPS["real"] for file in local_files(benchmark(name))]
    except (UserError, ImportError, OSError) as error:
        fix = error.fix if isinstance(error, UserError) else "pip install 'marsbench[eval]'"
        return Check("data", "warn", str(error).partition("\n")[0], fix)
    lacks = [f"{file} ({name} will be skipped)" for name, file in wanted if not (data_dir / file).exists()]
    fix = "put JSON Lines there, with the hub's columns"
    return Check("data", "warn" if lacks else "ok", f"{data_dir}{' lacks ' if lacks else ''}{', '.join(lacks)}", fix)
