"""The page of compiled steps: their tokens, their speed, why it is what it is, and what compiling takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from marsbench.findings.company import company_remark
from marsbench.findings.races import Race, races_of, speed_ratio
from marsbench.findings.seeds import BySeed
from marsbench.racing.grid import COMPILED_AR
from marsbench.rendering.figures import COLOURS, MARKERS, drawn_alike, error_bars, new_figure, save
from marsbench.rendering.markdown import table
from marsbench.rendering.sections import facts_section, seeds_in_words
from marsbench.rows.kinds import Row, SpeedRow, StepTimeRow
from marsbench.studies.compiled.contenders import METHODS, RACE, REFERENCE

FIGURE = "figures/compiled_speed"  # beside the page, less the extension

WHAT_IT_IS = (
    "An eager step is some 150 operations, launched one by one and fitted to the rows: no row that has ended, no "
    "position that a row does not need. A compiled step is one graph of a fixed shape: as many rows as the next power "
    "of two, lengths in steps of up to a factor of two, every window as wide as the method's widest. What a row lacks "
    "is filled up and thrown away. `ar` and MARS are compiled alike, so that neither is held against the other's "
    "launch costs."
)
HOW_RATIOS_ARE_MEASURED = (
    "All contenders, eager and compiled, decode the same prompts in one run, batch by batch in turn, the first of them "
    "changing every time, after an untimed pass, in which everything is compiled. A number is the median over repeats "
    "of the ratio of tokens per second, with its bootstrap 95 % interval."
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
    "*Of the roofline* is the bytes of the weights over the step's time, in % of what copying a large tensor moves per "
    "second on the same machine, measured between the steps. Weights are random: what a step costs depends on the "
    "shape alone."
)


def render(rows: Sequence[Row], scale: str, seeds: BySeed | None = None) -> str:
    """The report as Markdown: a pure function of the rows of that scale."""
    rows = [row for row in rows if row.scale == scale]
    races, bound = races_of(rows, "compiled,"), races_of(rows, "random weights")
    sections = [
        f"# Compiled steps at scale {scale}: what a step as one graph buys",
        WHAT_IT_IS,
        seeds_in_words(seeds or {}),
        company_remark(row for found in (races, bound) for race in found.values() for row in race.values()),
        _tokens(races),
        _speed(races),
        f"![Tokens per second over eager ar by batch size]({FIGURE}.png)",
        _law(races),
        _compiling(races),
        _memory_bound(rows, bound),
        facts_section(rows, f"`nox -s reproduce-compiled{'' if scale == 'tiny' else f' -- --scale {scale}'}`"),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def tally(seeds: BySeed) -> str:
    """What is left of MARS's gain at the smallest batch size, against a baseline as fast as its own steps.

    Numbers, no verdict: those of the first seed, which the page shows.
    """
    races = races_of(next(iter(seeds.values())), "compiled,")
    race = races[min(races)] if races else {}
    if not {"mars", "mars, compiled", "ar", COMPILED_AR} <= race.keys():
        return "measured"
    eager, compiled = speed_ratio(race, "mars", "ar").value, speed_ratio(race, "mars, compiled", COMPILED_AR).value
    return f"MARS over `ar`, batch {min(races)}: {eager:.2f} eager, {compiled:.2f} compiled"


def draw(rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
    """Write the figure that the report shows, as PNG and SVG."""
    races = races_of([row for row in rows if row.scale == scale], "compiled,")
    with drawn_alike():
        figure = new_figure(7.5, 4.6)
        axes = figure.subplots()
        for place, name in enumerate(METHODS):
            for contender, line in ((name, ":"), (f"{name}, compiled", "-")):
                found = {
                    size: speed_ratio(race, contender, "ar")
                    for size, race in races.items()
                    if {contender, "ar"} <= race.keys()
                }
                axes.errorbar(
                    list(found), [one.value for one in found.values()], yerr=error_bars([*found.values()], 1.0),
                    label=contender, capsize=2, color=COLOURS[place], marker=MARKERS[place], linestyle=line,
                )  # fmt: skip
        axes.set(xlabel="batch size", ylabel="tokens per second, relative to eager ar")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(races), [str(size) for size in races])
        if races:
            figure.legend(loc="outside right upper", frameon=False)
        return save(figure, reports_dir / FIGURE)


def _said(race: Race, name: str, baseline: str) -> str:
    if not {name, baseline} <= race.keys():
        return "not run"
    found = speed_ratio(race, name, baseline)
    return f"{found.value:.2f} [{found.interval.low:.2f}, {found.interval.high:.2f}]"


def _by_batch(races: dict[int, Race], pairs: dict[str, tuple[str, str]], first: str = "") -> str:
    """A table of ratios: line -> contender and baseline."""
    head = [first, *[f"batch {size}" for size in races]]
    return table(head, [[line, *[_said(race, *pair) for race in races.values()]] for line, pair in pairs.items()])


def _tokens(races: dict[int, Race]) -> str:
    """Whether compiled steps give the tokens of eager ones."""
    lines = [
        [f"{name}, compiled", *[_same(race, name) for race in races.values()]]
        for name in METHODS
        if all(f"{name}, compiled" in race for race in races.values())
    ]
    text = (
        "Prompts whose tokens are those of eager `ar`, in fp32. `mars` commits what it has not verified: its line is "
        "to be read beside eager `mars`, in brackets."
    )
    return "\n\n".join(["## The same tokens", text, table(["", *[f"batch {size}" for size in races]], lines)])


def _same(race: Race, name: str) -> str:
    row, eager = race[f"{name}, compiled"], race[name]
    return f"{row.same_as_ar} of {row.prompts}" + (f" ({eager.same_as_ar})" if name == "mars" else "")


def _speed(races: dict[int, Race]) -> str:
    over_generate = {f"`{name}` over `{REFERENCE}`": (name, REFERENCE) for name in ("ar", COMPILED_AR)}
    over_eager = {f"{name}: compiled over eager": (f"{name}, compiled", name) for name in METHODS}
    over_ar = {f"{name}: over `ar`, both eager": (name, "ar") for name in METHODS[1:]}
    over_ar |= {f"{name}: over `ar`, both compiled": (f"{name}, compiled", COMPILED_AR) for name in METHODS[1:]}
    return "\n\n".join(
        [
            "## Speed",
            HOW_RATIOS_ARE_MEASURED,
            _by_batch(races, over_generate, "the baseline"),
            _by_batch(races, over_eager, "what compiling buys"),
            _by_batch(races, over_ar, "what is left of MARS's gain"),
        ]
    )


def _law(races: dict[int, Race]) -> str:
    """Tokens per forward, what a step costs in steps of `ar`, and what follows."""
    lines = []
    for entry in RACE:
        baseline = COMPILED_AR if entry.compiled else "ar"
        for size, race in races.items():
            if entry.name not in race or entry.method in ("ar", REFERENCE):
                continue
            row, ar = race[entry.name], race[baseline]
            steps, tokens = _ms(row) / _ms(ar), row.emitted / row.row_forwards
            forwards = max(row.row_forwards - row.prompts, 1)
            lines.append([
                entry.name, str(size), f"{row.positions / forwards:.1f}", f"{tokens:.2f}", f"{steps:.2f}",
                f"{tokens / steps:.2f}", _said(race, entry.name, baseline),
            ])  # fmt: skip
    head = ["", "batch", "positions of a row that count", "tokens/forward", "steps of `ar`", "expected", "measured"]
    return "\n\n".join(["## Why it falls as it does", THE_LAW, table(head, lines)])


def _ms(row: SpeedRow) -> float:
    """Milliseconds of a lap per forward of the batch; the prompts' forwards are in the time and not counted."""
    return 1000 * median(row.seconds) / row.forwards


def _compiling(races: dict[int, Race]) -> str:
    """How many shapes came up, and what compiling them took."""
    if not races:
        return ""
    last = races[max(races)]
    lines = [
        [name, f"{row.graphs}", f"{row.compile_seconds:.0f}", f"{row.compile_seconds / max(row.graphs, 1):.1f}"]
        for name, row in last.items()
        if row.graphs
    ]
    text = (
        "Shapes that came up over all batch sizes of the page, and the seconds that it took to compile them, or to "
        "take them from torch's cache on disk where they had been compiled before. Decoding pays once for each."
    )
    return "\n\n".join(["## What compiling takes", text, table(["", "graphs", "seconds", "each"], lines)])


def _memory_bound(rows: Sequence[Row], races: dict[int, Race]) -> str:
    """A model whose weights do not fit into caches: how near its steps are to the memory's speed."""
    timed = [row for row in rows if isinstance(row, StepTimeRow) and row.status == "done"]
    if not timed:
        return ""
    row = timed[-1]
    copied = median(row.copied_per_second)
    shapes = list(zip(row.rows, row.window, row.seconds, strict=True))
    lines = [
        [
            f"{rows_} x {window}", f"{1000 * median(seconds):.1f}",
            f"{100 * row.weight_bytes / median(seconds) / copied:.0f} %",
        ]
        for rows_, window, seconds in shapes
    ]  # fmt: skip
    steps = table(["rows x positions, eager", "ms per step", "of the roofline"], lines)
    pairs = {f"`{name}` over `{REFERENCE}`": (name, REFERENCE) for name in ("ar", COMPILED_AR)}
    said = f"{row.weight_bytes / 1e6:,.0f} MB of weights, {copied / 1e9:.1f} GB/s copied, {row.stage}."
    return "\n\n".join(["## A model that memory bounds", said, MEMORY_BOUND, steps, _by_batch(races, pairs)])
