"""Running the checks one after another, and keeping their rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from marsbench.errors import UserError, unknown_name
from marsbench.files import write_atomically
from marsbench.gpu_check.bench import Bench
from marsbench.gpu_check.checks import CHECKS
from marsbench.gpu_check.page import checks_of, rows_file, verdict, write_gpu_page
from marsbench.keys import content_hash
from marsbench.provenance import provenance
from marsbench.rows.kinds import CheckRow
from marsbench.rows.store import rows_text


def device_here(*, cpu: bool) -> torch.device:
    """The GPU, or the CPU where that is asked for; `UserError` where there is no GPU."""
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("this machine has no GPU that PyTorch can use", fix="--cpu tries the checks small on the CPU")
    return torch.device("cuda")


def run_checks(
    device: torch.device, names: Sequence[str], *, quick: bool, output: Path | None, console: Console
) -> list[CheckRow]:
    """The rows of some checks, of all where none is named.

    A check that fails does not keep the others from running, and what is measured is kept at once. `output` is the
    folder that holds results/ and reports/; None = nothing is written.
    """
    for name in names:
        if name not in CHECKS:
            raise unknown_name("check", name, list(CHECKS))
    bench, made = Bench(device, quick), list[CheckRow]()
    for name in names or CHECKS:
        with console.status(f"{name}: {(CHECKS[name].__doc__ or '').partition(chr(10))[0]}"):
            row = _run(bench, name)
        console.print(f"{name}: {verdict(row)} ({row.seconds:.1f} s)", highlight=False)
        made.append(row)
        if output is not None:
            rows = {one.key: one for one in (*checks_of(output), row)}
            write_atomically(rows_file(output), rows_text(rows.values()).encode())
            write_gpu_page(output)
    return made


def _run(bench: Bench, name: str) -> CheckRow:
    device = torch.cuda.get_device_name(bench.device) if bench.on_gpu else "CPU"
    key = content_hash({"kind": CheckRow.kind, "check": name, "device": device, "quick": bench.quick})
    began = time.perf_counter()
    row = CheckRow(key, "failed", "", bench.size, name, device, bench.quick, provenance=provenance(seed=0))
    try:
        found = CHECKS[name](bench)
        row = replace(row, status="done", holds=found.holds, facts=found.facts)
    except Exception as error:  # a driver's, a compiler's, a lack of memory: the others still run
        row = replace(row, reason=f"{type(error).__name__}: {error}"[:300])
    return replace(row, seconds=round(time.perf_counter() - began, 3))
