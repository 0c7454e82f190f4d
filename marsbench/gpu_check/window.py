"""`marsbench gpu-window`: measures all that it can on a GPU within minutes, the most important rows first.

Each stage has a limit of its own, and what it has measured is written at once. An interrupted window goes on where it
stopped; nothing is fetched.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console

from marsbench.decoding.engine import Batch
from marsbench.fetching.fetch import fetch
from marsbench.fetching.models import is_there, which
from marsbench.files import PACKAGE, write_atomically
from marsbench.gpu_check.bench import Bench, Tried, tried
from marsbench.gpu_check.checks import run_checks
from marsbench.gpu_check.page import LINES, keep, place, write_gpu_page
from marsbench.json_lines import Log
from marsbench.keys import content_hash
from marsbench.provenance import provenance
from marsbench.racing.grid import Carried, carried_of
from marsbench.racing.step_time import read_per_second
from marsbench.rows.kinds import MethodStepRow

_RIGHT = ("methods-agree", "graphs-agree", "gradients-finite", "products-in-full", "training-resumes")
_FITS = ("training-step", "decoding-fits", "attention-in-place")
_ROWS = (1, 4, 16, 8, 64)


@dataclass
class Window:
    device: torch.device
    output: Path  # holds results/, reports/ and runs/
    console: Console
    base: Path | None = None  # the real model's folder; None = it is not there
    data_dir: Path | None = None  # of benchmark data, without which real prompts are not answered
    tiny: bool = False  # all of it small, to try it on a CPU

    @property
    def work(self) -> Path:
        return self.output / "runs" / "gpu-window"


class Stage(NamedTuple):
    name: str
    limit_s: float
    run: Callable[[Window], object]
    of_real_model: bool = False


def run_window(window: Window, minutes: float) -> list[Tried]:
    """Do the remaining stages of a window in the time given; returns how each ended."""
    log = Log[Any](window.work / "stages.jsonl", dict[str, Any], what="a stage of a window", mend="remove the file")
    done, endings = {ended["stage"] for ended in log.records() if ended["status"] == "done"}, list[Tried]()
    deadline = time.monotonic() + 60 * minutes
    for stage in stages(window):
        if stage.name in done:
            continue
        limit = min(stage.limit_s, deadline - time.monotonic())
        window.console.print(f"{stage.name}: at most {max(0.0, limit):.0f} s", highlight=False)
        if stage.of_real_model and window.base is None:
            ended = Tried(stage.name, "skipped", "the real model is not there: marsbench fetch smollm2-135m", 0.0, None)
        elif deadline - time.monotonic() < 1:
            ended = Tried(stage.name, "skipped", "no time is left", 0.0, None)
        else:
            ended = tried(stage.name, partial(stage.run, window), limit)
        log.append(dict(zip(("stage", "status", "reason", "seconds"), ended, strict=False)))
        endings.append(ended)
        window.console.print(f"{stage.name}: {ended.status} {ended.reason} ({ended.seconds:.0f} s)", highlight=False)
        write_gpu_page(window.output)
    return endings


def stages(window: Window) -> list[Stage]:
    sizes = ("small",) if window.tiny else ("7b", "0.5b")

    def train(stage: str, limit_s: float) -> Stage:
        return Stage(stage, limit_s, partial(_train, stage=stage), True)

    def answers(stage: str) -> Stage:
        return Stage(f"answers of {stage}", 60, partial(_score, stage=stage), True)

    return [
        Stage("right", 90, partial(_checks, names=_RIGHT[:1] if window.tiny else _RIGHT)),
        *[Stage(f"steps {size}", 110, partial(time_steps, size=size)) for size in sizes],
        Stage("fits", 60, partial(_checks, names=_FITS[2:] if window.tiny else _FITS)),
        Stage("asked", 30, lambda window: _distill(window, "--limit", "64"), True),
        Stage("answered", 90, _distill, True),
        train("base_gated_network", 120), train("mars", 180),  # AR SFT before it
        answers("mars"), answers("ar_sft"), train("mars_paper_alignment", 110), answers("mars_paper_alignment"),
    ]  # fmt: skip


def _checks(window: Window, names: Sequence[str]) -> None:
    run_checks(window.device, names, quick=window.tiny, output=window.output, console=window.console)


def time_steps(window: Window, size: str) -> None:
    """Time steps by method and rows on random weights, also with the paper's acceptance; keeps each row at once."""
    bench = Bench(window.device, quick=window.tiny)
    bench.say = lambda text: window.console.print(f"  {size}: {text}", highlight=False)
    model = bench.random_model(size, bench.half)
    weights, reading = sum(weight.nbytes for weight in model.parameters()), read_per_second(window.device)
    published = carried_of({"published": "average", "scale": "7b" if size == "small" else size}, 3)
    captured, counts = bench.captured(), _ROWS[:1] if window.tiny else _ROWS
    plans: list[tuple[int, str, dict[str, Any], Carried | None]]
    plans = [(rows, *line, None) for rows, line in product(counts, (("ar", {}), *LINES.values()))]
    carried, first = {"block_size": 4, "threshold": 0.95}, 1 + len(LINES)
    plans[first:first] = [(rows, "mars", carried, published) for rows in counts]
    for number, (rows, name, options, acceptance) in enumerate([*plans, (1, "ar", {}, None)]):
        kind = captured if number < len(plans) else Batch  # the last is timed eagerly
        timed = bench.timed(model, name, rows=rows, kind=kind, options=options, carried=acceptance)
        said = options if acceptance is None else {**options, "acceptance": f"carried over from {acceptance.source}"}
        row = MethodStepRow(
            "", "done", "", size, name, said, bench.called, rows, kind is captured, timed.context, len(timed.steps),
            median(timed.steps), weights, reading, str(bench.half).removeprefix("torch."),
            tokens_per_second=timed.tokens_per_second, provenance=provenance(seed=0),
        )  # fmt: skip
        keep(window.output, replace(row, key=content_hash(place(row))))


def command(*typed: str) -> str:
    """Run a `marsbench` command in its own process, which ends with the stage; returns its last line."""
    done = subprocess.run([sys.executable, "-m", "marsbench", *typed], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().rpartition("\n")[2]


def _distill(window: Window, *more: str) -> None:
    chats = window.work / "chats.jsonl"
    asked, rows, kind, longest = ["--self-asked", "12000"], "512", "bfloat16", "256"
    if window.tiny:
        prompts = chats.with_name("chats.jsonl.prompts")
        texts = [f'{{"prompt": "Tom has {number} apples. He eats one. How many?"}}\n' for number in range(2, 18)]
        write_atomically(prompts, "".join(texts).encode())
        asked, rows, kind, longest = ["--prompts", str(prompts)], "8", "float32", "16"
    window.work.mkdir(parents=True, exist_ok=True)
    command(
        "distill", "--checkpoint", str(window.base), *asked, "--out", str(chats), "--keep-cut", "--batch-size", rows,
        "--dtype", kind, "--max-new-tokens", longest, *more,
    )  # fmt: skip


def _train(window: Window, stage: str) -> str:
    size = ("4", "2") if window.tiny else ("64", "250")
    return command(
        "train", stage, "--scale", "135m", "--base", str(window.base), "--chat-data", str(window.work / "chats.jsonl"),
        "--block-size", "4", "--batch-size", size[0], "--max-steps", size[1], "--output", str(window.work),
    )  # fmt: skip


def _score(window: Window, stage: str) -> None:
    """Have a trained stage answer real prompts, by `ar` and, where it has learned masks, at two thresholds."""
    if window.data_dir is None and not window.tiny:
        raise FileNotFoundError("no benchmark data: give --data-dir, or set MARSBENCH_DATA")
    folder, asked = _train(window, stage), ("mini_gsm8k",) if window.tiny else ("ifeval", "gsm8k", "humaneval")
    where = [] if window.data_dir is None else ["--data-dir", str(window.data_dir)]
    benchmarks = [word for name in asked for word in ("--benchmark", name)]
    for accepts in (["--method", "ar"], *(["--threshold", tau] for tau in ("0.95", "0.8") if stage != "ar_sft")):
        command(
            "eval", "--checkpoint", folder, *benchmarks, "--scale", "135m", "--limit", "2" if window.tiny else "500",
            "--batch-size", "8" if window.tiny else "128", "--output", str(window.work), *where, *accepts,
        )  # fmt: skip


def base_here(tiny: bool) -> Path | None:
    """The real model's folder if it was fetched; for a tiny window, the shipped base."""
    if tiny:
        return PACKAGE / "presets" / "bases" / "mini" / "base"
    name = which("smollm2-135m")
    return fetch(name, lambda _: None) if is_there(name) else None
