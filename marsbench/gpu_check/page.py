"""The page on GPUs, from the rows in results/gpu: what the checks found, what a step costs, how much faster MARS is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marsbench.files import write_atomically
from marsbench.findings.cells import BENCHMARKS
from marsbench.paper import published
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import facts_section
from marsbench.rows.kinds import CheckRow, MethodStepRow, Row
from marsbench.rows.store import read_rows

ROWS, STEPS, _PAGE = "results/gpu/checks.jsonl", "results/gpu/steps.jsonl", "reports/gpu.md"
_SCALES = {"bytes": (2**30, "GiB"), "s": (1e-3, "ms")}  # a unit in a name -> what it is shown in
_SIZES = {"7b": "7B", "0.5b": "0.5B"}
_SURE, _WINDOW = 0.95, 4  # the paper's threshold, and the block size of its speed tables
_LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "MARS, B = 4": ("mars", {"block_size": 4, "threshold": 0.0}),
    "MARS, B = 8": ("mars", {"block_size": 8, "threshold": 0.0}),
    "verified, linear, W = 4": ("mars-verified", {"block_size": 4, "layout": "linear"}),
    "verified, groups, W = 4": ("mars-verified", {"block_size": 4}),
}
_OPENING = """Models here have the shape of Qwen2.5 and random weights, so this page says what a decoding step costs and
nothing about accuracy. [The page on a real model](135m/real-model.md) has answers of a trained MARS checkpoint."""
_STEPS_MEAN = """A number in brackets is the time of a step in steps of `ar` at the same batch size. "% of reading" is
the time that reading the weights once would take at the memory bandwidth measured on this card, over the time of a step
of `ar`. Weights in bfloat16, prompts of 256 tokens, steps replayed as CUDA graphs; each number is the median of 63
steps in one run, one seed, without an interval. Every draft of MARS is accepted here, which changes what is emitted but
hardly what a step costs."""
_RECKONING = """**A reckoning, not a measurement**: the paper's tokens per forward pass at tau = .95 (its Table 4, B =
4) over the measured cost of a step, in steps of `ar`. It assumes that a step costs the same whatever is accepted, and
leaves out prompts and rows that finish early. Above 1, MARS would be faster than our `ar`."""
_PAPER = """The paper's Table 5 races 256 GSM8K questions at 7B. Its ratios are over its own AR decoding; ours reckons
with the paper's 1.79 tokens per forward pass on GSM8K, over an `ar` that is several times as fast. The ratios agree,
and the baselines do not: a ratio over a slow baseline says little about tokens per second."""


def checks_of(root: Path) -> list[CheckRow]:
    """All rows of checks that there are; none where no GPU was checked."""
    file = root / ROWS
    return [row for row in (read_rows(file) if file.exists() else []) if isinstance(row, CheckRow)]


def steps_of(root: Path) -> list[MethodStepRow]:
    """All rows of timed steps that there are."""
    file = root / STEPS
    return [row for row in (read_rows(file) if file.exists() else []) if isinstance(row, MethodStepRow)]


def write_gpu_page(root: Path) -> list[Path]:
    """Render the page again where there are rows; returns its path."""
    text = page_of(root)
    return [write_atomically(root / _PAGE, text.encode())] if text else []


def page_of(root: Path) -> str:
    """The page as Markdown, a pure function of the rows below a folder; empty without any."""
    steps, checks = steps_of(root), checks_of(root)
    return render(checks, steps) if checks or steps else ""


def render(rows: Sequence[CheckRow], steps: Sequence[MethodStepRow] = ()) -> str:
    every: list[Row] = [*steps, *rows]
    devices = dict.fromkeys(row.device for row in rows)
    commands = dict.fromkeys(str(row.provenance["command"]) for row in every if "command" in row.provenance)
    return paragraphs(
        "# Speed at true size, on a GPU",
        " ".join(_OPENING.split()) if steps else "",
        *[part for device in dict.fromkeys(row.device for row in steps) for part in _speed(device, steps)],
        *[part for device in devices for part in _checked(device, rows)],
        facts_section(every, "; ".join(commands) or "marsbench gpu-check") if every else "",
    ) + ("\n")


# ---- what a step costs ----


def _speed(device: str, steps: Sequence[MethodStepRow]) -> Iterator[str]:
    shapes = {size: Steps([row for row in steps if (row.device, row.scale) == (device, size)]) for size in _SIZES}
    known = {size: shape for size, shape in shapes.items() if shape.rows}
    yield f"## What a decoding step costs on one {device}"
    yield "\n".join(_said(known))
    yield " ".join(_STEPS_MEAN.split())
    for size, shape in known.items():
        yield f"Milliseconds of a step at the shape of {_SIZES[size]}:"
        yield shape.table()
    yield "## How much faster MARS would be"
    yield " ".join(_RECKONING.split())
    for size, shape in known.items():
        yield f"At the shape of {_SIZES[size]}, times as fast as `ar`:"
        yield shape.reckoning()
    for size, shape in known.items():
        if carried := shape.carried():
            yield f"Measured at the shape of {_SIZES[size]}, with the paper's mean acceptance carried over:"
            yield carried
    if "7b" in known:
        yield " ".join(_PAPER.split())
        yield _beside_the_paper(known["7b"])


class Steps:
    """The timed steps of one shape on one card."""

    def __init__(self, rows: Sequence[MethodStepRow]) -> None:
        self.rows = [row for row in rows if row.status == "done"]
        self.size = self.rows[0].scale if self.rows else ""
        self.batch_sizes = sorted({row.batch_size for row in self.rows if row.captured})

    def seconds(self, batch: int, method: str = "ar", options: Mapping[str, Any] | None = None) -> float | None:
        """Seconds of a captured step; None where it was not timed."""
        wanted = batch, method, dict(options or {}), True
        places = ((row.batch_size, row.method, dict(row.options), row.captured) for row in self.rows)
        return next((row.seconds for row, place in zip(self.rows, places, strict=True) if place == wanted), None)

    def cost(self, batch: int, line: str) -> float | None:
        """A step of a line in steps of `ar`."""
        own, ar = self.seconds(batch, *_LINES[line]), self.seconds(batch)
        return own / ar if own and ar else None

    @property
    def costs(self) -> dict[int, float]:
        """A step of MARS with B = 4 in steps of `ar`, by batch size."""
        return {batch: cost for batch in self.batch_sizes if (cost := self.cost(batch, "MARS, B = 4"))}

    def table(self) -> str:
        lines = []
        for batch in self.batch_sizes:
            ar = self.seconds(batch)
            row = self.rows[0]
            reading = "" if not ar else f" ({100 * row.weight_bytes / row.read_per_second / ar:.0f} %)"
            costs = [(self.seconds(batch, *_LINES[line]), self.cost(batch, line)) for line in _LINES]
            shown = [f"{1e3 * own:.2f} ({cost:.2f})" if own and cost else "not measured" for own, cost in costs]
            lines.append([str(batch), f"{1e3 * ar:.2f}{reading}" if ar else "not measured", *shown])
        return table(["rows", "`ar` (% of reading)", *_LINES], lines)

    def reckoning(self) -> str:
        """The published tokens per forward pass of every benchmark over what a step costs."""
        emitted = _emitted(self.size)
        heads = {**BENCHMARKS, "average": "average of six"}
        lines = [
            [head, f"{emitted[name]:.2f}", *[f"{emitted[name] / cost:.2f}" for cost in self.costs.values()]]
            for name, head in heads.items()
        ]
        return table(["", "published tokens/forward", *[f"{batch} rows" for batch in self.costs]], lines)

    def carried(self) -> str:
        """Tokens per second of all rows with acceptance carried over; empty where none was."""
        speeds = {row.batch_size: row.tokens_per_second for row in self.rows if row.method == "ar" and row.captured}
        lines = [
            [str(row.batch_size), f"{ar:,.0f}", f"{row.tokens_per_second:,.0f}", f"{row.tokens_per_second / ar:.2f}"]
            for row in sorted(self.rows, key=lambda row: row.batch_size)
            if "acceptance" in row.options and (ar := speeds.get(row.batch_size))
        ]
        return table(["rows", "`ar`, tokens/s", "MARS, B = 4, tokens/s", "MARS over `ar`"], lines) if lines else ""

    def break_even(self) -> tuple[int, int] | None:
        """The batch sizes between which a step of MARS comes to cost what the paper's mean of tokens per forward is."""
        emitted = _emitted(self.size)["average"]
        below = [batch for batch, cost in self.costs.items() if cost < emitted]
        above = [batch for batch, cost in self.costs.items() if cost >= emitted]
        return (max(below), min(above)) if below and above else None


def _emitted(size: str) -> dict[str, float]:
    """Benchmark -> published tokens per forward pass at tau = .95."""
    rows = published("4", scale=size, metric="tokens_per_forward", block_size=_WINDOW, threshold=_SURE)
    return {str(row.benchmark): row.value for row in rows}


def _said(shapes: Mapping[str, Steps]) -> Iterator[str]:
    """The page in a few lines."""
    for size, shape in shapes.items():
        shown = ", ".join(f"{cost:.2f}" for cost in shape.costs.values())
        yield (
            f"- At the shape of {_SIZES[size]} a step of MARS with B = 4 takes {shown} times as long as a step of `ar` "
            f"at {', '.join(map(str, shape.costs))} rows."
        )
        emitted, limits = _emitted(size)["average"], shape.break_even()
        until = f"until between {limits[0]} and {limits[1]} rows" if limits else "at all of these"
        yield f"- With the paper's mean of {emitted:.2f} tokens per forward pass, that pays {until}."
        eager = [row for row in shape.rows if (row.method, row.captured, row.batch_size) == ("ar", False, 1)]
        generate = [row for row in shape.rows if (row.method, row.batch_size) == ("hf-generate", 1)]
        ar = shape.seconds(1)
        if eager and generate and ar:
            yield (
                f"- For one row, `ar` as a CUDA graph takes {1e3 * ar:.1f} ms, eagerly {1e3 * eager[0].seconds:.1f} "
                f"ms; `generate` of transformers takes {1e3 * generate[0].seconds:.1f} ms."
            )


def _beside_the_paper(shape: Steps) -> str:
    on_gsm8k = _emitted("7b")["gsm8k"]
    lines = []
    for batch in (4, 8, 16):
        ar, cost = shape.seconds(batch), shape.cost(batch, "MARS, B = 4")
        (theirs,) = published("5", method="ar_kv", metric="tokens_per_second", batch_size=batch)
        best = max(row.value for row in published("5", method="mars_block_cache", metric="speedup", batch_size=batch))
        if ar and cost:
            lines.append(
                [str(batch), f"{theirs.value:,.0f}", f"{best:.2f}", f"{batch / ar:,.0f}", f"{on_gsm8k / cost:.2f}"]
            )
    head = "rows|paper: AR, tokens/s|paper: MARS over its AR|ours: `ar`, tokens/s|reckoned: MARS over `ar`"
    return table(head.split("|"), lines)


# ---- what the checks found ----


def _checked(device: str, rows: Sequence[CheckRow]) -> Iterator[str]:
    of_device = [row for row in rows if row.device == device]
    lines = [
        [row.check, verdict(row), f"{row.seconds:.0f} s" if row.seconds else "", "quick" if row.quick else ""]
        for row in of_device
    ]
    yield f"## Checks on one {device}"
    yield "`marsbench gpu-check`, and the speed of training. Models have random weights or are tiny."
    yield table(["check", "verdict", "took", ""], lines, text=(0, 1, 3))
    shown_above = ("steps-near-the-floor", "attention-in-place")
    yield "\n".join(
        f"- {row.check}: {'; '.join(_in_words(row.facts))}."
        for row in of_device
        if row.facts and row.check not in shown_above
    )


def verdict(row: CheckRow) -> str:
    if row.status != "done":
        return f"{row.status}: {row.reason}"
    return {True: "holds", False: "DOES NOT HOLD", None: "measured"}[row.holds]


def _in_words(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        what, _, unit = name.rpartition(", ")
        if isinstance(value, Mapping):
            yield f"{name} ({', '.join(_in_words(value))})"
        elif unit in _SCALES and value is not None:
            yield f"{what} {value / _SCALES[unit][0]:.3g} {_SCALES[unit][1]}"
        elif isinstance(value, list):
            yield f"{name} {', '.join(f'{number:.3f}' for number in value)}"
        else:
            yield f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {'n/a' if value is None else value}"


def reckoned(root: Path, size: str, benchmark: str = "gsm8k") -> dict[int, float] | None:
    """Rows -> speed of MARS over `ar`, reckoned with the paper's tokens per forward pass; None without steps."""
    shape = Steps([row for row in steps_of(root) if row.scale == size])
    return {batch: _emitted(size)[benchmark] / cost for batch, cost in shape.costs.items()} or None
