"""The page of compiled steps: their tokens, their speed, why it is what it is, and what compiling takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import SweepCells, printed_ratio, printed_speed_up, speed_up
from marsbench.line import Line
from marsbench.presets import Preset
from marsbench.racing.grid import COMPILED_AR, Grid, read_grid, shipped_grid
from marsbench.rendering.figures import by_batch_figure
from marsbench.rendering.markdown import table
from marsbench.rendering.page import laid_out
from marsbench.rows.kinds import Row, StepTimeRow, SweepRow
from marsbench.studies.study import Study, measured_by

EAGER = (
    Line.raced("ar", "mars", "ar"),
    Line.raced("mars, tau = 0.95", "mars", "mars", block_size=4, threshold=0.95),
    Line.raced(
        "mars-verified, linear, window = 4", "mars", "mars-verified", layout="linear", block_size=4, threshold=0.5
    ),
    Line.raced("mars-verified, groups, window = 4", "mars", "mars-verified", layout="groups", block_size=4),
)
COMPILED = tuple(eager.compiled_form() for eager in EAGER)
REFERENCE = "hf-generate"
# Llamas of random weights by their names: what a step costs depends on the shape alone. The weights of the first do not
# fit into a CPU's caches: a step over one token takes the time to read them. The other is for the scale of the tests.
MEMORY_BOUND, _SMALL = "random weights in the shape of SmolLM2-135M", "random weights, two layers"
RANDOM: dict[str, dict[str, Any]] = {
    MEMORY_BOUND: {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    _SMALL: {
        "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def trained_grid(scale: Preset) -> Grid:
    """Contenders of the scale's own sweep, whose rows they share; at a scale for tests few, and no compiler there."""
    contenders = (Line.raced(REFERENCE, "mars", REFERENCE), *EAGER, *COMPILED)
    if scale.in_seconds:
        return Grid(contenders, (1,), prompts=6, repeats=2, positions=0, backend="eager")
    swept, names = read_grid(shipped_grid(scale.scale)), {entry.name for entry in contenders}
    return replace(swept, contenders=tuple(entry for entry in swept.contenders if entry.name in names), positions=0)


def random_grid(scale: Preset) -> Grid:
    """`ar`, eager and compiled, against `generate` on random weights, and what an eager step costs by its shape."""
    small = scale.in_seconds
    stage = _SMALL if small else MEMORY_BOUND
    ar = Line.raced("ar", stage, "ar")
    contenders = Line.raced(REFERENCE, stage, REFERENCE), ar, ar.compiled_form()
    few = Grid(contenders, (1,), prompts=2, repeats=2, max_new_tokens=4, positions=1, backend="eager")
    many = Grid(contenders, (1, 4, 8, 16), prompts=16, repeats=7, max_new_tokens=32, positions=16)
    return replace(few if small else many, benchmarks=(scale.benchmarks[-1],))


FIGURE = "figures/compiled_speed"  # beside the page, less the extension
_PAIRS = tuple(zip(EAGER, COMPILED, strict=True))
_LEFT = {
    **{f"{eager.name}: over `ar`, both eager": (eager.name, "ar") for eager, _ in _PAIRS[1:]},
    **{f"{eager.name}: over `ar`, both compiled": (other.name, COMPILED_AR) for eager, other in _PAIRS[1:]},
}
_BOUGHT = {f"{eager.name}: compiled over eager": (other.name, eager.name) for eager, other in _PAIRS}
_BASELINES = {f"`{name}` over `{REFERENCE}`": (name, REFERENCE) for name in ("ar", COMPILED_AR)}


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    sweep, random = _sweep(rows), _sweep(rows, random=True)
    return {
        "answers": "\n".join(_answers(sweep)),
        "left": _by_batch(sweep, _LEFT, "what is left of MARS's gain"),
        "tokens": _tokens(sweep),
        "baseline": _by_batch(sweep, _BASELINES, "the baseline"),
        "bought": _by_batch(sweep, _BOUGHT, "what it buys"),
        "law": _law(sweep),
        "compiling": _compiling(sweep),
        **_memory_bound(rows, random),
    }


def _sweep(rows: Sequence[Row], *, random: bool = False) -> SweepCells:
    """The races on a trained checkpoint, or on random weights."""
    return SweepCells.of([row for row in rows if isinstance(row, SweepRow) and (row.stage in RANDOM) == random])


def _answers(sweep: SweepCells) -> Iterator[str]:
    """What is left of MARS's gain at the smallest and the largest batch size, and what compiling buys `ar`."""
    for size in dict.fromkeys([*sweep.batch_sizes[:1], *sweep.batch_sizes[-1:]]):
        said = [
            f"{eager.name} {_said(sweep, size, eager.name, 'ar')} eager and "
            f"{_said(sweep, size, other.name, COMPILED_AR)} compiled"
            for eager, other in _PAIRS[1:]
        ]
        yield f"- Over `ar` of its own kind at batch {size}: {'; '.join(said)}."
        bought = _said(sweep, size, COMPILED_AR, "ar")
        yield f"- At batch {size}, compiled `ar` is {bought} times as fast as eager `ar`."


def tally(seeds: BySeed) -> str:
    """What is left of MARS's gain at the smallest batch size, against a baseline as fast as its own steps.

    Numbers, no verdict: those of the first seed, which the page shows.
    """
    sweep = _sweep(next(iter(seeds.values())))
    rows = sweep.at(min(sweep.batch_sizes, default=0), lambda row: row.method == "mars")
    known = [ratio.value for row in sorted(rows, key=lambda row: row.compiled) if (ratio := speed_up(row))]
    if len(known) < 2:
        return "measured"
    return f"MARS over `ar`, batch {rows[0].batch_size}: {known[0]:.2f} eager, {known[1]:.2f} compiled"


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    sweep = _sweep(rows)
    series = {
        entry.name: {size: ratio for size in sweep.batch_sizes if (ratio := sweep.ratio(size, entry.name, "ar"))}
        for entry in (*EAGER, *COMPILED)
    }
    dotted = [eager.name for eager in EAGER]
    return by_batch_figure(series, "tokens per second, relative to eager ar", reports_dir / FIGURE, dotted=dotted)


def _said(sweep: SweepCells, size: int, name: str, baseline: str) -> str:
    return printed_ratio(sweep.ratio(size, name, baseline), "not run")


def _by_batch(sweep: SweepCells, pairs: dict[str, tuple[str, str]], first: str = "") -> str:
    lines = [[line, *[_said(sweep, size, *pair) for size in sweep.batch_sizes]] for line, pair in pairs.items()]
    return table([first, *sweep.heads], lines)


def _tokens(sweep: SweepCells) -> str:
    """Whether compiled steps give the tokens of eager ones."""
    lines = []
    for eager, compiled in _PAIRS:
        pairs = zip(sweep.by_batch(eager.name), sweep.by_batch(compiled.name), strict=True)
        lines.append([compiled.name, *[_same(*pair) for pair in pairs]])
    return table(["", *sweep.heads], lines)


def _same(eager: SweepRow | None, row: SweepRow | None) -> str:
    if eager is None or row is None:
        return "not run"
    return f"{row.same_as.get('ar', 0)} of {row.prompts}" + ("" if row.is_lossless else f" ({eager.same_as['ar']})")


def _law(sweep: SweepCells) -> str:
    lines = []
    for contender in (*EAGER[1:], *COMPILED[1:]):
        of_ar = sweep.by_batch(COMPILED_AR if contender.compiled else "ar")
        for row, ar in zip(sweep.by_batch(contender.name), of_ar, strict=True):
            if row is not None and ar is not None:
                # Milliseconds of a lap per forward of the batch; the prompts' are in the time and not counted.
                steps = median(row.seconds) / row.forwards / (median(ar.seconds) / ar.forwards)
                numbers = row.tokens_per_forward, steps, row.tokens_per_forward / steps
                shown = [f"{row.positions_of_a_row:.1f}", *[f"{value:.2f}" for value in numbers]]
                lines.append([contender.name, str(row.batch_size), *shown, printed_speed_up(row)])
    head = ["", "batch", "positions of a row that count", "tokens/forward", "steps of `ar`", "expected", "measured"]
    return table(head, lines)


def _compiling(sweep: SweepCells) -> str:
    lines = [
        [row.contender, f"{row.graphs}", f"{row.compile_seconds:.0f}", f"{row.compile_seconds / row.graphs:.1f}"]
        for row in sweep.at(max(sweep.batch_sizes, default=0), lambda row: row.graphs > 0)
    ]
    return table(["", "graphs", "seconds", "each"], lines)


def _memory_bound(rows: Sequence[Row], random: SweepCells) -> dict[str, str]:
    """A model whose weights do not fit into caches: how near its steps are to the memory's speed."""
    timed = [row for row in rows if isinstance(row, StepTimeRow) and row.status == "done"]
    if not timed:
        return dict.fromkeys(("shape", "steps", "bound"), "")
    row, lines = timed[-1], []
    for count, window, repeats in zip(row.rows, row.window, row.seconds, strict=True):
        seconds = median(repeats)
        share = f"{100 * row.weight_bytes / seconds / row.read:.0f} %"
        lines.append([f"{count} x {window}", f"{1000 * seconds:.1f}", share])
    return {
        "shape": f"{row.weight_bytes / 1e6:,.0f} MB of weights, {row.read / 1e9:.1f} GB/s read, {row.stage}.",
        "steps": table(["rows x positions, eager", "ms per step", "of the roofline"], lines),
        "bound": _by_batch(random, _BASELINES),
    }


STUDY = Study(
    key="compiled",
    name="Compiled steps",
    asks="what does a step as one graph buy, and how near to the memory's speed is it?",
    place=5,
    in_paper=False,
    measure=measured_by("marsbench.studies.compiled.measuring", "compiled_rows"),
    timed=True,
    sections=laid_out(__package__, slots),
    figures=draw,
    tally=tally,
)
