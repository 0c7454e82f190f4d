"""Looks the machine over before a long run: what is there, what is missing, and how to mend it.

`marsbench doctor` prints the findings. Nothing heavy is imported at the top, and a missing package is a
finding like any other, because a broken environment is where they are needed most.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.markup import escape
from rich.table import Table

from marsbench import neighbours
from marsbench.errors import UserError
from marsbench.files import nearest_existing
from marsbench.paths import tasks_dir
from marsbench.presets import DEFAULT_SCALE, preset
from marsbench.provenance import gpus_now

GIB = 2**30
_BUSY_GPU_PERCENT = 10  # what a GPU may be busy before it is worth a word
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One finding. `ok` is a word: "fail" stops a run, "warn" narrows it; `fix` says how to mend either."""

    name: str
    ok: Literal["ok", "warn", "fail"]
    finding: str
    fix: str = ""


def checks(scale: str, output: Path, data_dir: Path | None = None) -> list[Check]:
    """All findings for a run at `scale` that writes below `output`; changes nothing that stays.

    `data_dir` is where local copies of the real benchmarks lie, None where they are to come from the hub.
    """
    needs = preset(scale)
    return [
        check_python(),
        *check_packages(),
        check_device(scale),
        *check_native(),
        *check_idle(),
        check_memory(needs.memory_gib),
        check_disk(output, needs.disk_gib),
        check_writable(output),
        *check_data(scale, data_dir),
        check_sentence_model(scale, data_dir),
        check_sandbox(),
        check_task_files(),
    ]


def check_python() -> Check:
    """Is this Python among the supported ones? An uninstalled marsbench is for `check_packages` to report."""
    version, supported = platform.python_version(), ""
    with suppress(metadata.PackageNotFoundError):
        supported = metadata.metadata("marsbench")["Requires-Python"]
    fits = SpecifierSet(supported).contains(version, prereleases=True)
    finding = version if fits else f"{version}, needed {supported}"
    return Check("python", "ok" if fits else "fail", finding, "make the environment with a newer Python")


def check_packages() -> Iterator[Check]:
    """Every package that marsbench's own metadata asks for, of the core and of the extras that runs use."""
    try:
        requirements = [Requirement(line) for line in metadata.requires("marsbench") or []]
    except metadata.PackageNotFoundError:
        yield Check("marsbench", "fail", "not installed", "pip install -e '.[all]'")
        return
    for requirement in requirements:
        for extra in ("", "eval", "real", "report"):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield check_package(requirement, extra)
                break


def check_package(requirement: Requirement, extra: str = "") -> Check:
    """Is the package there in a version that fits? One that belongs to an extra only warns."""
    wanted = f"{requirement.name}{requirement.specifier}"
    fix, found = f"pip install 'marsbench[{extra}]'" if extra else f"pip install '{wanted}'", "not installed"
    with suppress(metadata.PackageNotFoundError):
        found = metadata.version(requirement.name)
        if requirement.specifier.contains(found, prereleases=True):
            return Check(requirement.name, "ok", found)
        found += f", needed {wanted}"
    return Check(requirement.name, "warn" if extra else "fail", found, fix)


def check_device(scale: str) -> Check:
    """Which device will compute? Without an accelerator only small scales are practical."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of PyTorch's does not load
        return Check("device", "fail", f"PyTorch cannot be loaded: {error}", "pip install --force-reinstall torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("device", "ok", f"CUDA: {', '.join(names)}; marsbench gpu-check says whether it is fit")
    if torch.backends.mps.is_available():
        return Check("device", "ok", "MPS (Apple silicon)")
    cores = f"CPU, {os.cpu_count()} cores"
    if not preset(scale).needs_gpu:
        return Check("device", "ok", cores)
    return Check("device", "warn", f"{cores}: far too slow for {scale}", f"use a GPU, or --scale {DEFAULT_SCALE}")


def check_native() -> Iterator[Check]:
    """Is what lies between a model's maps built for this CPU? Without it, steps are slower."""
    try:
        import torch

        from marsbench.forward.fastest import in_words
        from marsbench.forward.native import why_not_native
    except (ImportError, OSError):
        return  # reported by `check_device`
    if not torch.cuda.is_available():
        reason = why_not_native()
        fix = "install g++ or clang++: decoding on a CPU is slower without" if reason else ""
        yield Check("native code", "warn" if reason else "ok", reason or in_words(), fix)


def check_idle() -> Iterator[Check]:
    """Does anybody else compute here? It takes half a second to see."""
    fix = "stop them before a race: it would time the scheduler"
    used, busiest = neighbours.look()
    busy = used is not None and used > neighbours.BUSY_CORES
    told = "" if used is None else neighbours.in_words(used, busiest if busy else [])
    finding = told or "this machine does not tell what other processes use"
    yield Check("idle", "warn" if busy else "ok", finding, fix)
    yield from check_idle_gpus(fix)


def check_idle_gpus(fix: str) -> Iterator[Check]:
    """Is any GPU at work? Its driver is asked, where there is one."""
    for index, gpu in enumerate(gpus_now()):
        busy, others = gpu["busy_percent"], gpu["others"]
        finding = f"GPU {index} is at work {busy} % of the time, with {others} other processes on it"
        idle = not others and not (isinstance(busy, float) and busy > _BUSY_GPU_PERCENT)
        yield Check(f"idle: GPU {index}", "ok" if idle else "warn", finding, fix)


def check_memory(needed_gib: float) -> Check:
    """Is enough memory free on the device that will compute?"""
    try:
        import psutil
        import torch

        found = [psutil.virtual_memory().available]
        if torch.cuda.is_available():  # a process loads its model on one device, whatever the others have free
            found = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    except (ImportError, OSError) as error:
        return Check("memory", "warn", f"cannot be measured: {error}", "mend the packages above first")
    available = max(found) / GIB
    finding = f"{available:.1f} GiB available, {needed_gib:g} needed"
    fix = "stop other programs, or choose a smaller --scale"
    return Check("memory", "ok" if available >= needed_gib else "fail", finding, fix)


def check_disk(output: Path, needed_gib: float) -> Check:
    """Is enough room left where the output goes?"""
    folder = nearest_existing(output)
    free = shutil.disk_usage(folder).free / GIB
    finding = f"{free:.1f} GiB free at {folder}, {needed_gib:g} needed"
    fix = "free some space, or choose another folder with --output"
    return Check("disk", "ok" if free >= needed_gib else "fail", finding, fix)


def check_writable(output: Path) -> Check:
    """Can a file be written where the output goes? Writes one and deletes it."""
    folder = nearest_existing(output)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".marsbench-doctor-") as file:
            file.write(b"can this be written?")
    except OSError as error:
        return Check("output", "fail", f"cannot write to {folder}: {error.strerror}", "choose another --output")
    return Check("output", "ok", f"{folder} is writable")


def check_data(scale: str, data_dir: Path | None) -> list[Check]:
    """Where will the benchmarks come from: the embedded world, a local folder, or the hub?"""
    in_world = preset(scale).world is not None
    if data_dir is None and in_world:
        return [Check("data", "ok", "the embedded world is generated on the spot")]
    if data_dir is None:
        fix = "log in there for GPQA, which is gated, or give local copies with --data-dir or MARSBENCH_DATA"
        return [Check("data", "warn", "benchmarks will be loaded from the Hugging Face hub, not tried here", fix)]
    if not data_dir.is_dir():
        fix = "correct --data-dir or MARSBENCH_DATA, or leave both out"
        return [Check("data", "warn" if in_world else "fail", f"{data_dir} is no folder", fix)]
    try:
        from marsbench.evaluation.benchmarks import GROUPS, benchmark, local_files

        files = {name: local_files(benchmark(name)) for name in GROUPS["real"]}
    except (UserError, ImportError, OSError) as error:
        return [Check("data", "warn", f"cannot be looked for: {error}", "mend the packages and task files first")]
    found = []
    for name in files:  # a table skips those that lack some
        missing = [file for file in files[name] if not (data_dir / file).exists()]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        lacks = f"{data_dir} lacks {missing[0]}{more}: {name} will be skipped" if missing else ""
        fix = "put JSON Lines there, with the hub's columns"
        found.append(Check(f"data: {name}", "warn" if lacks else "ok", lacks or f"in {data_dir}", fix))
    return found


def check_sentence_model(scale: str, data_dir: Path | None) -> Check:
    """Is NLTK's sentence model there, which IFEval's checker needs?"""
    if preset(scale).world and data_dir is None:
        return Check("sentences", "ok", "the embedded world needs no sentence model")
    try:
        from marsbench.evaluation.answers import check_sentence_model as check

        check(data_dir)
    except (UserError, ImportError) as error:
        fix = error.fix if isinstance(error, UserError) else 'pip install "marsbench[eval]"'
        return Check("sentences", "warn", "NLTK's punkt_tab is missing: IFEval will be skipped", fix)
    return Check("sentences", "ok", "NLTK's punkt_tab is there")


def check_sandbox() -> Check:
    """Can generated programs be run apart? Their sandbox forks a process for each."""
    if "fork" in multiprocessing.get_all_start_methods():
        return Check("sandbox", "ok", "generated code runs in a process of its own")
    return Check("sandbox", "warn", "no fork: code benchmarks will be skipped", "use Linux, macOS or WSL")


def check_task_files() -> Check:
    """Are the lm-eval task files there?"""
    try:
        return Check("tasks", "ok", str(tasks_dir()))
    except UserError as error:
        return Check("tasks", "fail", error.what, error.fix)


def findings_table(found: list[Check]) -> Table:
    """The findings as a table for a terminal; below each that is not ok stands its mend."""
    table = Table("check", "", "finding", box=None)
    for check in found:
        mend = f"\n[bold]fix:[/bold] {escape(check.fix)}" if check.ok != "ok" else ""
        table.add_row(check.name, f"[{COLOURS[check.ok]}]{check.ok}", escape(check.finding) + mend)
    return table
