"""The page of discrepancies: where the paper and its released code differ, and what each difference comes to here.

What is said and done stands in `page.md`; here is what a run found: pairs of lines, races, scorers, stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from marsbench.findings.between_lines import emits_more, label, more_accurate
from marsbench.findings.cells import done_cells, latest_cells
from marsbench.findings.claims import TIMES, Claim, Finding, Measured
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import SweepCells, on_sweep, printed_ratio, speed_up
from marsbench.line import Line
from marsbench.presets import Preset, preset
from marsbench.racing.grid import Grid
from marsbench.rendering.claims import plainly, questions
from marsbench.rendering.markdown import table
from marsbench.rendering.measured import accuracy_table, reasons
from marsbench.rendering.page import laid_out
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, paired_difference
from marsbench.studies.lines import ABLATIONS, AR_SFT, MARS_VARIANTS, mars, mars_name
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run

PLAN = TablePlan(
    "discrepancies",
    "What difference it makes where paper and released code differ",
    (
        Line("base", "Base", "base", "ar", {}),
        AR_SFT,
        *[
            mars(stage, 4, threshold)
            for stage in dict.fromkeys((*MARS_VARIANTS, *ABLATIONS))
            for threshold in (None, 0.95)
        ],
        mars("mars", 4, 1.0),
    ),
    own="Discrepancies",
)
AR, WINDOW, BLOCKS, NO_CACHE = "ar", "mars", "mars-block-cache", "mars-no-cache"
CACHE_BLOCKS = (4, 16, 64)
ALL_MASKS = f"{NO_CACHE}, all masks"


def cache_grid(scale: Preset) -> Grid:
    """AR, MARS with its sliding window, and with block-level caches whose blocks are windows too, as load grows."""
    blocks = [_entry(BLOCKS, f"{BLOCKS}, B_cache = {size}", cache_block=size) for size in CACHE_BLOCKS]
    return _grid(scale, (1, 4, 16, 48), _entry(WINDOW), *blocks)


def masks_grid(scale: Preset) -> Grid:
    """MARS without a cache, with B - 1 masks in every forward and with as many as tokens may be generated."""
    every = _entry(NO_CACHE, ALL_MASKS, appended_masks=scale.max_new_tokens)
    return _grid(scale, (1, 16), _entry(NO_CACHE), every)


def _entry(method: str, name: str = "", **options: Any) -> Line:
    return Line.raced(name or method, "mars", method, **{"block_size": 4, **options, "threshold": 0.95})


def _grid(scale: Preset, batch_sizes: tuple[int, ...], *entries: Line) -> Grid:
    """A race against AR, of five laps over 48 prompts; less where the scale asks few questions anyway."""
    contenders = Line.raced(AR, "mars", AR), *entries
    if scale.in_seconds:
        return Grid(contenders, tuple(size for size in batch_sizes if size < 16), prompts=12, repeats=3, positions=0)
    return Grid(contenders, batch_sizes, prompts=48, repeats=5, positions=0)


DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"


def _trained(stage: str, other: str = "mars") -> tuple[tuple[str, str], ...]:
    """A way of training against another, at one token per forward pass and with a threshold."""
    return tuple((mars_name(stage, 4, tau), mars_name(other, 4, tau)) for tau in (None, 0.95))


# What a discrepancy comes to between lines: pairs of them.
PAIRS = {
    "d1": _trained("mars_paper_alignment"),
    "d2": (
        *_trained("mars_no_sft", "mars_no_sft_released"),
        *[(mars_name("mars", 4), mars_name(name, 4)) for name in ABLATIONS],
    ),
    "d3": _trained("mars_response_blocks"),
    "d4": _trained("mars_no_eos_padding"),
    "d7": ((mars_name("mars", 4, 1.0), mars_name("mars", 4)),),
}
_TOLD = ("d1", "d2", "d3", "d4")  # whose first pair the page begins with


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells = latest_cells(rows)
    shown = SweepCells.of(next(iter(seeds.values()), ()))  # numbers without a verdict are of the seed shown
    load, knee = _load(shown, seeds)
    found = {"d5": _cache_blocks(shown), "d8": _scorers(seeds), "d10": _masks(shown, seeds), "d13": _stop_rules(seeds)}
    return {
        "tally": tally(seeds),
        **{f"first_{number}": _plainly(seeds, *PAIRS[number][0]) for number in _TOLD},
        "effects": _effects_table(seeds, [pair for pairs in PAIRS.values() for pair in pairs]),
        "caveat": preset(scale).caveat,
        **{number: _effects_table(seeds, pairs) for number, pairs in PAIRS.items()},
        **{number: said or NOT_RUN for number, said in {**found, "d14": load}.items()},
        "knee": knee,
        "accuracy": accuracy_table(cells, PLAN),
        "reasons": reasons(cells, PLAN),
    }


# ---- pairs of lines ----


def effect(seeds: BySeed, first: str, second: str) -> tuple[Finding, Finding] | None:
    """Line `first` minus line `second`: accuracy and tokens per forward pass, on the benchmarks that both answered.

    They are two claims that it has more, open to both sides; None if there are no such benchmarks.
    """
    accuracy, tokens = (kind(PLAN, first, second).over(seeds.values()) for kind in (more_accurate, emits_more))
    return None if accuracy.estimate is None or tokens.estimate is None else (accuracy, tokens)


def tally(seeds: BySeed) -> str:
    """How many of the compared lines differ, and how many of these comparisons are of one training seed."""
    found = [measured for pairs in PAIRS.values() for pair in pairs if (measured := effect(seeds, *pair))]
    differ, alone = sum(_verdict(*pair) != SAME for pair in found), sum(accuracy.seeds == 1 for accuracy, _ in found)
    return f"{differ} of {len(found)} comparisons of lines differ ({alone} of one training seed alone)"


def _plainly(seeds: BySeed, first: str, second: str) -> str:
    found = effect(seeds, first, second)
    return plainly(found[0]) if found else ""


def _verdict(*found: Finding) -> str:
    """Which of accuracy and tokens per forward pass differ."""
    names = [name for name, finding in zip(("accuracy", "tokens/forward"), found, strict=True) if finding.decided]
    return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def _effects_table(seeds: BySeed, pairs: Sequence[tuple[str, str]]) -> str:
    """A table of differences between pairs of lines."""
    lines = []
    for first, second in pairs:
        words = f"{label(PLAN, first)} minus {label(PLAN, second)}"
        if found := effect(seeds, first, second):
            accuracy, tokens = found
            numbers = [accuracy.found, p_value(accuracy.p), tokens.number, questions(accuracy), str(accuracy.seeds)]
            lines.append([words, *numbers, _verdict(*found)])
        else:
            lines.append([words, *[""] * 5, NOT_RUN])
    head = ["", "accuracy", "p", "tokens/forward", "questions", "seeds", "verdict"]
    return table(head, lines, text=(0, 6))


# ---- the two small races ----


def _cache_blocks(sweep: SweepCells) -> str:
    """What B_cache does to positions, tokens per forward and speed."""
    raced = SweepCells([row for row in sweep.rows if row.method in (WINDOW, BLOCKS)])
    lines = []
    for name in raced.names:
        rows = raced.by_batch(name)
        lines += [
            [f"{name}: speed over `ar`", *[printed_ratio(speed_up(row), NOT_RUN) for row in rows]],
            ["positions/forward", *[f"{row.positions_per_forward:.0f}" if row else "" for row in rows]],
            ["tokens/forward", *[f"{row.tokens_per_forward:.2f}" if row else "" for row in rows]],
        ]
    return table(["", *raced.heads], lines)


def _times(seeds: BySeed, measure: Callable[[SweepCells], Estimate | None]) -> Finding:
    """A ratio of speeds over all training seeds, held against 1."""
    return Claim(measure=on_sweep(measure), bound=Bound(low=1.0), unit=TIMES).over(seeds.values())


def _masks(sweep: SweepCells, seeds: BySeed) -> str:
    """B - 1 masks against all that may be generated."""
    lines = []
    for size in sweep.batch_sizes:
        rows = [row for name in (NO_CACHE, ALL_MASKS) if (row := sweep.done.get((name, size)))]
        if len(rows) == 2:
            ratio = _times(seeds, partial(SweepCells.ratio, batch_size=size, name=ALL_MASKS, baseline=NO_CACHE))
            positions = [f"{row.positions_per_forward:.0f}" for row in rows]
            lines.append([str(size), *positions, ratio.number, DIFFERS if ratio.decided else SAME])
    head = ["batch", "positions/forward, B - 1 masks", "all masks", "speed of all masks over B - 1", "verdict"]
    return table(head, lines, text=(0, 4))


def _load(sweep: SweepCells, seeds: BySeed) -> tuple[str, str]:
    """Speed-up over AR as load grows, and where it ends, in words."""

    def speed(sweep: SweepCells, size: int) -> Estimate | None:
        return speed_up(sweep.done.get((WINDOW, size)))

    lines, said = [], ""
    for row in filter(None, sweep.by_batch(WINDOW)):
        found = _times(seeds, partial(speed, size=row.batch_size))
        if found.estimate is None:
            continue
        lines.append([str(row.batch_size), f"{row.positions_per_forward:.0f}", found.number])
        if found.verdict != "supported" and not said:
            said = f"From batch size {row.batch_size} on, MARS (tau = .95) is not shown to be faster than `ar`."
    if lines and not said:
        said = f"MARS (tau = .95) is faster than `ar` at every batch size measured, up to {lines[-1][0]}."
    return table(["batch", "positions/forward", "speed over `ar`"], lines), said


# ---- scorers and stop strings ----

STRICT, FLEXIBLE = "strict", "flexible"  # GSM8K's two scores
# The lines whose answers are scored twice and looked through for stop strings.
LOOKED_AT = ("base", "ar_sft", mars_name("mars", 4), mars_name("mars", 4, 0.95))


def _scorers(seeds: BySeed) -> str:
    """GSM8K by its two scores, on the same answers, of all training seeds."""
    lines = []
    for name in LOOKED_AT:
        measure = partial(_last_number_minus_filter, name=name)
        found = Claim(measure=measure, bound=Bound(low=0.0), signed=True).over(seeds.values())
        if found.estimate is not None:
            verdict = DIFFERS if found.decided else SAME
            lines.append([label(PLAN, name), found.found, p_value(found.p), str(found.seeds), verdict])
    head = ["GSM8K", "last number minus lm-eval's filter", "p", "seeds", "verdict"]
    return table(head, lines, text=(0, 4))


def _last_number_minus_filter(rows: Sequence[Row], name: str) -> Measured:
    """How the two scores of one line differ; nothing where one is missing."""
    row = done_cells(latest_cells(rows), name).get("gsm8k")
    scores = {row.metric: row.correct, **row.others} if row else {}
    if STRICT not in scores or FLEXIBLE not in scores:
        return Measured()
    return Measured(paired_difference({"gsm8k": scores[FLEXIBLE]}, {"gsm8k": scores[STRICT]}))


def _stop_rules(seeds: BySeed) -> str:
    """How many tokens a stop string would have saved, in the answers of all training seeds."""
    lines = []
    for name in LOOKED_AT:
        cells = [row for rows in seeds.values() for row in done_cells(latest_cells(rows), name).values()]
        rows = [row for row in cells if row.past_stop]
        if rows:
            kinds = ("emitted", "past_stop", "finished")
            emitted, past, ended = ([value for row in rows for value in getattr(row, kind)] for kind in kinds)
            stopped = f"{sum(map(bool, past)):,} of {len(past):,}"
            whole, behind = 100 * sum(ended) / len(ended), 100 * sum(past) / sum(emitted)
            shown = f"{whole:.2f}", stopped, f"{behind:.2f}"
            lines.append([label(PLAN, name), *shown, DIFFERS if any(past) else SAME])
    head = ["", "ended by EOS, %", "answers with a stop string before", "tokens behind it, % of all", "verdict"]
    return table(head, lines, text=(0, 4))


def _races(run: Run) -> list[Row]:
    from marsbench.racing.sweep import Sweep

    return [row for grid in (cache_grid, masks_grid) for row in Sweep(run, grid(run.scale)).rows()]


STUDY = Study(
    key="discrepancies",
    name="Discrepancies",
    asks="where paper and released code differ: does it matter?",
    place=1,
    plan=PLAN,
    measure=_races,
    timed=True,
    sections=laid_out(__package__, slots, PLAN),
    tally=tally,
)
