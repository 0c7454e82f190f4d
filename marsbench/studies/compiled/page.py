"""The page of compiled steps: their tokens, their speed, why it is what it is, and what compiling takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from marsbench.findings.company import company_remark
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import (
    Race,
    SweepCells,
    printed_ratio,
    printed_speed_up,
    races_in_words,
    speed_ratio,
    speed_up,
)
from marsbench.presets import Preset
from marsbench.racing.grid import COMPILED_AR, Contender, Grid, called, read_grid, shipped_grid
from marsbench.rendering.figures import by_batch_figure
from marsbench.rendering.markdown import folded, paragraphs, table
from marsbench.rendering.sections import command, facts_section, racing, seeds_in_words
from marsbench.rows.kinds import Row, StepTimeRow, SweepRow
from marsbench.statistics.intervals import Estimate
from marsbench.studies.study import Study, measured_by

EAGER = (
    Contender("ar", "mars", "ar", {}),
    Contender("mars, tau = 0.95", "mars", "mars", {"block_size": 4}, 0.95),
    Contender("mars-verified, linear, window = 4", "mars", "mars-verified", {"layout": "linear", "block_size": 4}, 0.5),
    Contender("mars-verified, groups, window = 4", "mars", "mars-verified", {"layout": "groups", "block_size": 4}),
)
COMPILED = tuple(replace(one, name=called(one.name, True), compiled=True) for one in EAGER)
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
    contenders = (Contender(REFERENCE, "mars", REFERENCE, {}), *EAGER, *COMPILED)
    if scale.in_seconds:
        return Grid(contenders, (1,), prompts=6, repeats=2, positions=0, backend="eager")
    swept, names = read_grid(shipped_grid(scale.scale)), {one.name for one in contenders}
    return replace(swept, contenders=tuple(one for one in swept.contenders if one.name in names), positions=0)


def random_grid(scale: Preset) -> Grid:
    """`ar`, eager and compiled, against `generate` on random weights, and what an eager step costs by its shape."""
    small = scale.in_seconds
    stage = _SMALL if small else MEMORY_BOUND
    ar = Contender("ar", stage, "ar", {})
    contenders = (Contender(REFERENCE, stage, REFERENCE, {}), ar, replace(ar, name=COMPILED_AR, compiled=True))
    few = Grid(contenders, (1,), prompts=2, repeats=2, max_new_tokens=4, positions=1, backend="eager")
    many = Grid(contenders, (1, 4, 8, 16), prompts=16, repeats=7, max_new_tokens=32, positions=16)
    return replace(few if small else many, benchmarks=(scale.benchmarks[-1],))


FIGURE = "figures/compiled_speed"  # beside the page, less the extension

WHAT_IT_IS = (
    "An eager step is some 150 operations, launched one by one and fitted to the rows: no row that has ended, no "
    "position that a row does not need. A compiled step is one graph of a fixed shape: as many rows as the next power "
    "of two, lengths in steps of up to a factor of two, every window as wide as the method's widest. What a row lacks "
    "is filled up and thrown away. `ar` and MARS are compiled alike, so that neither is held against the other's "
    "launch costs."
)
THE_LAW = (
    "A method's speed over `ar` is its tokens per forward over what its step costs in steps of `ar`. Compiling takes "
    "the launch costs, alike for all, out of every step; what is left grows with positions, so a step of many "
    "positions costs more steps of `ar` than before, while tokens per forward stay as they are. So the faster the "
    "baseline, the less a wide window gains on the clock. *Steps of `ar`* is ms per forward over that of `ar` of the "
    "same kind, the prompts' forwards included in both; *expected* is tokens per forward over it."
)
MEMORY_BOUND = (
    "A step over one token reads every weight once and does little else, so the time to read the weights is its floor. "
    "*Of the roofline* is the bytes of the weights over the step's time, in % of what reading a large tensor moves per "
    "second on the same machine, measured between the steps. Weights are random: what a step costs depends on the "
    "shape alone."
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    races, bound = _races(rows), _races(rows, random=True)
    raced = [row for found in (races, bound) for race in found.values() for row in race.values()]
    return [
        f"# Compiled steps at scale {scale}: what a step as one graph buys",
        "\n".join(_answers(races)),
        f"![Tokens per second over eager ar by batch size]({FIGURE}.png)",
        _by_batch(races, _LEFT, "what is left of MARS's gain"),
        f"{WHAT_IT_IS} {racing(scale)} {seeds_in_words(seeds)}",
        races_in_words(raced),
        company_remark(raced),
        folded(
            _tokens(races),
            _speed(races),
            _law(races),
            _compiling(races),
            _memory_bound(rows, bound),
            facts_section(rows, command("reproduce-compiled", scale)),
        ),
    ]


def _answers(races: dict[int, Race]) -> Iterator[str]:
    """What is left of MARS's gain at the smallest and the largest batch size, and what compiling buys `ar`."""
    for size in [size for size in races if size in (min(races), max(races))]:
        race = races[size]
        said = [
            f"{name} {_said(race, name, 'ar')} eager and {_said(race, called(name, True), COMPILED_AR)} compiled"
            for name in (one.name for one in EAGER[1:])
        ]
        yield f"- Over `ar` of its own kind at batch {size}: {'; '.join(said)}."
        yield f"- At batch {size}, compiled `ar` is {_said(race, COMPILED_AR, 'ar')} times as fast as eager `ar`."


def _races(rows: Sequence[Row], *, random: bool = False) -> dict[int, Race]:
    """The races on a trained checkpoint, or on random weights."""
    raced = [row for row in rows if isinstance(row, SweepRow) and (row.stage in RANDOM) == random]
    return SweepCells.of(raced).races


def tally(seeds: BySeed) -> str:
    """What is left of MARS's gain at the smallest batch size, against a baseline as fast as its own steps.

    Numbers, no verdict: those of the first seed, which the page shows.
    """
    races = _races(next(iter(seeds.values())))
    race = races[min(races)] if races else {}
    rows = [row for row in race.values() if row.method == "mars"]
    known = [ratio.value for row in sorted(rows, key=lambda row: row.compiled) if (ratio := speed_up(row))]
    if len(known) < 2:
        return "measured"
    return f"MARS over `ar`, batch {min(races)}: {known[0]:.2f} eager, {known[1]:.2f} compiled"


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    races = _races(rows)
    series = {
        one.name: {size: ratio for size, race in races.items() if (ratio := _ratio(race, one.name, "ar"))}
        for one in (*EAGER, *COMPILED)
    }
    dotted = [one.name for one in EAGER]
    return by_batch_figure(series, "tokens per second, relative to eager ar", reports_dir / FIGURE, dotted=dotted)


def _ratio(race: Race, name: str, baseline: str) -> Estimate | None:
    return speed_ratio(race[name], race[baseline]) if {name, baseline} <= race.keys() else None


def _said(race: Race, name: str, baseline: str) -> str:
    return printed_ratio(_ratio(race, name, baseline)) if {name, baseline} <= race.keys() else "not run"


def _by_batch(races: dict[int, Race], pairs: dict[str, tuple[str, str]], first: str = "") -> str:
    head = [first, *[f"batch {size}" for size in races]]
    return table(head, [[line, *[_said(race, *pair) for race in races.values()]] for line, pair in pairs.items()])


def _tokens(races: dict[int, Race]) -> str:
    """Whether compiled steps give the tokens of eager ones."""
    lines = [
        [compiled.name, *[_same(race[compiled.name], race[eager.name]) for race in races.values()]]
        for eager, compiled in zip(EAGER, COMPILED, strict=True)
        if all({eager.name, compiled.name} <= race.keys() for race in races.values())
    ]
    text = (
        "Prompts whose tokens are those of eager `ar`, in fp32. `mars` commits what it has not verified: its line is "
        "to be read beside eager `mars`, in brackets."
    )
    return paragraphs("## The same tokens", text, table(["", *[f"batch {size}" for size in races]], lines))


def _same(row: SweepRow, eager: SweepRow) -> str:
    return f"{row.same_as.get('ar', 0)} of {row.prompts}" + ("" if row.is_lossless else f" ({eager.same_as['ar']})")


_PAIRS = list(zip(EAGER, COMPILED, strict=True))
_LEFT = {
    **{f"{one.name}: over `ar`, both eager": (one.name, "ar") for one, _ in _PAIRS[1:]},
    **{f"{one.name}: over `ar`, both compiled": (other.name, COMPILED_AR) for one, other in _PAIRS[1:]},
}


def _speed(races: dict[int, Race]) -> str:
    over_generate = {f"`{name}` over `{REFERENCE}`": (name, REFERENCE) for name in ("ar", COMPILED_AR)}
    over_eager = {f"{one.name}: compiled over eager": (other.name, one.name) for one, other in _PAIRS}
    baseline, bought = _by_batch(races, over_generate, "the baseline"), _by_batch(races, over_eager, "what it buys")
    return paragraphs("## Speed", baseline, bought)


def _law(races: dict[int, Race]) -> str:
    lines = []
    for contender in (*EAGER[1:], *COMPILED[1:]):
        for size, race in races.items():
            row, ar = race.get(contender.name), race.get(COMPILED_AR if contender.compiled else "ar")
            if row is None or ar is None:
                continue
            # Milliseconds of a lap per forward of the batch; the prompts' are in the time and not counted.
            steps = median(row.seconds) / row.forwards / (median(ar.seconds) / ar.forwards)
            tokens = row.tokens_per_forward
            lines.append([
                contender.name, str(size), f"{row.positions_of_a_row:.1f}", f"{tokens:.2f}", f"{steps:.2f}",
                f"{tokens / steps:.2f}", printed_speed_up(row),
            ])  # fmt: skip
    head = ["", "batch", "positions of a row that count", "tokens/forward", "steps of `ar`", "expected", "measured"]
    return paragraphs("## Why it falls as it does", THE_LAW, table(head, lines))


def _compiling(races: dict[int, Race]) -> str:
    if not races:
        return ""
    lines = [
        [name, f"{row.graphs}", f"{row.compile_seconds:.0f}", f"{row.compile_seconds / row.graphs:.1f}"]
        for name, row in races[max(races)].items()
        if row.graphs
    ]
    text = (
        "Shapes that came up over all batch sizes of the page, and the seconds that it took to compile them, or to "
        "take them from torch's cache on disk where they had been compiled before. Decoding pays once for each."
    )
    return paragraphs("## What compiling takes", text, table(["", "graphs", "seconds", "each"], lines))


def _memory_bound(rows: Sequence[Row], races: dict[int, Race]) -> str:
    """A model whose weights do not fit into caches: how near its steps are to the memory's speed."""
    timed = [row for row in rows if isinstance(row, StepTimeRow) and row.status == "done"]
    if not timed:
        return ""
    row = timed[-1]
    lines = []
    for count, window, repeats in zip(row.rows, row.window, row.seconds, strict=True):
        seconds = median(repeats)
        share = f"{100 * row.weight_bytes / seconds / row.read:.0f} %"
        lines.append([f"{count} x {window}", f"{1000 * seconds:.1f}", share])
    steps = table(["rows x positions, eager", "ms per step", "of the roofline"], lines)
    pairs = {f"`{name}` over `{REFERENCE}`": (name, REFERENCE) for name in ("ar", COMPILED_AR)}
    said = f"{row.weight_bytes / 1e6:,.0f} MB of weights, {row.read / 1e9:.1f} GB/s read, {row.stage}."
    return paragraphs("## A model that memory bounds", said, MEMORY_BOUND, steps, _by_batch(races, pairs))


STUDY = Study(
    key="compiled",
    name="Compiled steps",
    asks="what does a step as one graph buy, and how near to the memory's speed is it?",
    place=5,
    in_paper=False,
    measure=measured_by("marsbench.studies.compiled.measuring", "compiled_rows"),
    timed=True,
    sections=sections,
    figures=draw,
    tally=tally,
)
