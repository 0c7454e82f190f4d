"""The rows in results/gpu, and their page: what checks found, what a step costs, how much faster MARS would be."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from marsbench.files import write_atomically
from marsbench.findings.cells import BENCHMARKS
from marsbench.paper import published
from marsbench.rendering.markdown import filled, paragraphs, table
from marsbench.rendering.sections import facts_section
from marsbench.rows.kinds import CheckRow, MethodStepRow
from marsbench.rows.workspace import read_rows, rows_text

_FOLDER, _PAGE = Path("results/gpu"), "reports/gpu.md"
_SCALES = {"bytes": (2**30, "GiB"), "s": (1e-3, "ms")}  # a unit in a name -> what it is shown in
_SIZES = {"7b": "7B", "0.5b": "0.5B"}
_SURE, _WINDOW = 0.95, 4  # the paper's threshold, and the block size of its speed tables
_MARS = "MARS, B = 4"
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    _MARS: ("mars", {"block_size": 4, "threshold": 0.0}),
    "MARS, B = 8": ("mars", {"block_size": 8, "threshold": 0.0}),
    "verified, linear, W = 4": ("mars-verified", {"block_size": 4, "layout": "linear"}),
    "verified, groups, W = 4": ("mars-verified", {"block_size": 4}),
}
# Steps of one row: method, whether captured -> its slot.
_ALONE = {("ar", True): "graph_ms", ("ar", False): "eager_ms", ("hf-generate", False): "generate_ms"}
_BEFORE = "03e4262"  # a commit whose steps had more operations
_SHOWN_ABOVE = ("steps-near-the-floor", "attention-in-place")  # checks whose numbers the table of steps has


def gpu_rows(root: Path) -> tuple[list[CheckRow], list[MethodStepRow]]:
    rows = read_rows(root / _FOLDER) if (root / _FOLDER).exists() else []
    return [row for row in rows if isinstance(row, CheckRow)], [row for row in rows if isinstance(row, MethodStepRow)]


def place(row: CheckRow | MethodStepRow) -> dict[str, Any]:
    """What identifies a row: a newer row with the same place replaces the older one."""
    named = ("check", "quick", "scale", "method", "options", "device", "batch_size", "captured", "dtype")
    return {"kind": row.kind, **{name: getattr(row, name) for name in named if hasattr(row, name)}}


def keep(root: Path, row: CheckRow | MethodStepRow) -> None:
    checks, steps = gpu_rows(root)
    name, known = ("checks", checks) if isinstance(row, CheckRow) else ("steps", steps)
    rows = [*[other for other in known if place(other) != place(row)], row]
    write_atomically(root / _FOLDER / f"{name}.jsonl", rows_text(rows).encode())


def write_gpu_page(root: Path) -> list[Path]:
    text = page_of(root)
    return [write_atomically(root / _PAGE, text.encode())] if text else []


def page_of(root: Path) -> str:
    checks, steps = gpu_rows(root)
    if not (every := [*steps, *checks]):
        return ""
    commands = dict.fromkeys(str(row.provenance["command"]) for row in every if "command" in row.provenance)
    return paragraphs(
        "# Speed at true size, on a GPU",
        *[part for device in dict.fromkeys(row.device for row in steps) for part in _speed(device, steps)],
        *[_checked(device, checks) for device in dict.fromkeys(row.device for row in checks)],
        facts_section(every, "; ".join(commands) or "marsbench gpu-check"),
    ) + "\n"  # fmt: skip


def _speed(device: str, steps: Sequence[MethodStepRow]) -> list[str]:
    shapes = {size: Steps([row for row in steps if (row.device, row.scale) == (device, size)]) for size in _SIZES}
    known = {size: shape for size, shape in shapes.items() if shape.rows}

    def each(words: str, tables: Mapping[str, str]) -> str:
        return paragraphs(*[part for size, shown in tables.items() for part in (words.format(_SIZES[size]), shown)])

    reckoned = {size: shape.reckoning() for size, shape in known.items()}
    carried = {size: shown for size, shape in known.items() if (shown := shape.carried())}
    slots = {
        "device": device,
        "since": _BEFORE if any(str(row.provenance["commit"]).startswith(_BEFORE) for row in steps) else "",
        "said": paragraphs(*[_said(size, shape) for size, shape in known.items()]),
        "costs": each("Milliseconds of a step at the shape of {}:", {size: known[size].table() for size in known}),
        "reckoned": each("Calculated speed over `ar`, at the shape of {}:", reckoned),
        "carried": each("Measured at the shape of {}, with acceptance at the paper's mean:", carried),
        "paper": _beside_the_paper(known["7b"]) if "7b" in known else "",
    }
    *parts, beside = filled(__package__, "steps.md", slots)
    return [*parts, beside if slots["paper"] else ""]


class Steps:
    def __init__(self, rows: Sequence[MethodStepRow]) -> None:
        self.rows = [row for row in rows if row.status == "done"]
        tables = {"metric": "tokens_per_forward", "block_size": _WINDOW, "threshold": _SURE}
        papers = published("4", scale=self.rows[0].scale, **tables) if self.rows else []
        self.emitted = {str(row.benchmark): row.value for row in papers}  # benchmark -> published tokens per forward
        self._captured = [row for row in self.rows if row.captured]
        # Seconds of a captured step, by rows and line; NaN where it was not timed.
        options = {"ar": ("ar", {}), **LINES}.items()
        each = [(row, line) for row in self._captured for line, of in options if of == (row.method, dict(row.options))]
        timed = [(row.batch_size, line, row.seconds) for row, line in each]
        wide = DataFrame(timed, columns=["rows", "line", "s"]).pivot_table("s", "rows", "line", aggfunc="first")
        self.seconds = wide.reindex(columns=["ar", *LINES])

    @property
    def costs(self) -> dict[int, float]:
        return dict((self.seconds[_MARS] / self.seconds["ar"]).dropna())

    def table(self) -> str:
        floor, lines = self.rows[0].weight_bytes / self.rows[0].read_per_second, []
        for batch, (ar, *others) in zip(self.seconds.index, self.seconds.to_numpy(), strict=True):
            shown = [f"{1e3 * ar:.2f} ({100 * floor / ar:.0f} %)", *[f"{1e3 * s:.2f} ({s / ar:.2f})" for s in others]]
            lines.append([str(batch), *["not measured" if "nan" in cell else cell for cell in shown]])
        return table(["rows", "`ar` (% of reading)", *LINES], lines)

    def reckoning(self) -> str:
        lines = [
            [head, f"{self.emitted[name]:.2f}", *[f"{self.emitted[name] / cost:.2f}" for cost in self.costs.values()]]
            for name, head in {**BENCHMARKS, "average": "average of six"}.items()
        ]
        return table(["", "published tokens/forward", *[f"{batch} rows" for batch in self.costs]], lines)

    def carried(self) -> str:
        """Tokens per second of all rows with acceptance carried over; empty where none was."""
        speeds = {row.batch_size: row.tokens_per_second for row in self._captured if row.method == "ar"}
        lines = [
            [str(row.batch_size), f"{ar:,.0f}", f"{row.tokens_per_second:,.0f}", f"{row.tokens_per_second / ar:.2f}"]
            for row in sorted(self.rows, key=lambda row: row.batch_size)
            if "acceptance" in row.options and (ar := speeds.get(row.batch_size))
        ]
        return table(["rows", "`ar`, tokens/s", "MARS, B = 4, tokens/s", "MARS over `ar`"], lines)


def _said(size: str, shape: Steps) -> str:
    costs, emitted = shape.costs, shape.emitted["average"]
    # Between these batch sizes, the cost of a step reaches the tokens that it emits.
    below = [batch for batch, cost in costs.items() if cost < emitted]
    above = [batch for batch, cost in costs.items() if cost >= emitted]
    rows = {(row.method, row.captured): row for row in reversed(shape.rows) if row.batch_size == 1}
    alone = [f"{1e3 * rows[of].seconds:.1f}" if rows.keys() >= _ALONE.keys() else "" for of in _ALONE]
    slots = {
        "size": _SIZES[size],
        "batches": ", ".join(map(str, costs)),
        "costs": ", ".join(f"{cost:.2f}" for cost in costs.values()),
        "emitted": f"{emitted:.2f}",
        "until": f"up to a batch between {max(below)} and {min(above)} rows" if below and above else "at all of these",
        **dict(zip(_ALONE.values(), alone, strict=True)),
    }
    return paragraphs(*filled(__package__, "said.md", slots))


def _beside_the_paper(shape: Steps) -> str:
    lines = []
    for batch in (4, 8, 16):
        ar, cost = shape.seconds["ar"].get(batch), shape.costs.get(batch)
        (theirs,) = published("5", method="ar_kv", metric="tokens_per_second", batch_size=batch)
        best = max(row.value for row in published("5", method="mars_block_cache", metric="speedup", batch_size=batch))
        if ar and cost:
            ours = f"{batch / ar:,.0f}", f"{shape.emitted['gsm8k'] / cost:.2f}"
            lines.append([str(batch), f"{theirs.value:,.0f}", f"{best:.2f}", *ours])
    head = "rows|paper: AR, tokens/s|paper: MARS over its AR|ours: `ar`, tokens/s|calculated: MARS over `ar`"
    return table(head.split("|"), lines)


def steps_at(root: Path, size: str) -> Steps:
    return Steps([row for row in gpu_rows(root)[1] if row.scale == size])


def _checked(device: str, rows: Sequence[CheckRow]) -> str:
    lines, facts = [], []
    for row in [row for row in rows if row.device == device]:
        took = f"{row.seconds:.0f} s" if row.seconds else ""
        lines.append([row.check, verdict(row), took, "quick" if row.quick else ""])
        if row.facts and row.check not in _SHOWN_ABOVE:
            facts.append(f"- {row.check}: {'; '.join(_in_words(row.facts))}.")
    checks = table(["check", "verdict", "took", ""], lines, text=(0, 1, 3))
    return "".join(filled(__package__, "checks.md", {"device": device, "checks": checks, "facts": "\n".join(facts)}))


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
