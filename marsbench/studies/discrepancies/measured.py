"""The lines of the page of discrepancies, and what is measured: pairs of them, races, two scorers, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from marsbench.findings.between_lines import emits_more, label, more_accurate
from marsbench.findings.cells import done_cells, latest_cells
from marsbench.findings.claims import TIMES, Claim, Finding, Measured
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import SweepCells, faster, on_sweep, printed_ratio, speed_up
from marsbench.presets import Preset
from marsbench.racing.grid import Contender, Grid
from marsbench.rendering.claims import questions
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import Row
from marsbench.running.plans import Arm, TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, paired_difference
from marsbench.studies.lines import ABLATIONS, AR_SFT, MARS_VARIANTS, mars, mars_name

PLAN = TablePlan(
    "discrepancies",
    "What difference it makes where paper and released code differ",
    (
        Arm("base", "Base", "base", "ar", {}),
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
_THRESHOLD = 0.95


def cache_grid(scale: Preset) -> Grid:
    """AR, MARS with its sliding window, and with block-level caches whose blocks are windows too, as load grows."""
    blocks = [_entry(BLOCKS, f"{BLOCKS}, B_cache = {size}", cache_block=size) for size in CACHE_BLOCKS]
    return _grid(scale, (Contender(AR, "mars", AR, {}), _entry(WINDOW), *blocks), (1, 4, 16, 48))


def masks_grid(scale: Preset) -> Grid:
    """MARS without a cache, with B - 1 masks in every forward and with as many as tokens may be generated."""
    every = _entry(NO_CACHE, ALL_MASKS, appended_masks=scale.max_new_tokens)
    return _grid(scale, (Contender(AR, "mars", AR, {}), _entry(NO_CACHE), every), (1, 16))


def _entry(method: str, name: str = "", **options: Any) -> Contender:
    return Contender(name or method, "mars", method, {"block_size": 4, **options}, threshold=_THRESHOLD)


def _grid(scale: Preset, contenders: tuple[Contender, ...], batch_sizes: tuple[int, ...]) -> Grid:
    """A race of five laps over 48 prompts; less where the scale asks few questions anyway."""
    if scale.in_seconds:
        return Grid(contenders, tuple(size for size in batch_sizes if size < 16), prompts=12, repeats=3, positions=0)
    return Grid(contenders, batch_sizes, prompts=48, repeats=5, positions=0)


DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"


def effect(seeds: BySeed, first: str, second: str) -> tuple[Finding, Finding] | None:
    """Line `first` minus line `second`: accuracy and tokens per forward pass, on the benchmarks that both answered.

    They are two claims that it has more, open to both sides; None if there are no such benchmarks.
    """
    accuracy, tokens = (kind(PLAN, first, second).over(seeds.values()) for kind in (more_accurate, emits_more))
    return None if accuracy.estimate is None or tokens.estimate is None else (accuracy, tokens)


def verdict(accuracy: Finding, tokens: Finding) -> str:
    """Which of the two differ."""
    names = [name for name, one in (("accuracy", accuracy), ("tokens/forward", tokens)) if one.decided]
    return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def effects_table(seeds: BySeed, pairs: Sequence[tuple[str, str]]) -> str:
    """A table of differences between pairs of lines."""
    head = ["", "accuracy", "p", "tokens/forward", "questions", "seeds", "verdict"]
    return table(head, [_effect_line(seeds, *pair) for pair in pairs], text=(0, 6))


def _effect_line(seeds: BySeed, first: str, second: str) -> list[str]:
    words = f"{label(PLAN, first)} minus {label(PLAN, second)}"
    found = effect(seeds, first, second)
    if found is None:
        return [words, "", "", "", "", "", NOT_RUN]
    accuracy, tokens = found
    numbers = [accuracy.found, p_value(accuracy.p), tokens.number, questions(accuracy), str(accuracy.seeds)]
    return [words, *numbers, verdict(accuracy, tokens)]


# ---- the two small races ----


def cache_blocks(seeds: BySeed) -> str:
    """What B_cache does to positions, tokens per forward and speed: numbers of the seed shown, without a verdict."""
    sweep = _shown(seeds)
    names = list(dict.fromkeys(row.contender for row in sweep.rows if row.method in (WINDOW, BLOCKS)))
    sizes = sorted({size for name, size in sweep.done if name in names})
    if not sizes:
        return ""
    head = ["", *[f"batch {size}" for size in sizes]]
    lines = []
    for name in names:
        rows = [sweep.done.get((name, size)) for size in sizes]
        lines += [
            [
                f"{name}: speed over `ar`",
                *[printed_ratio(speed_up(row), NOT_RUN) for row in rows],
            ],
            ["positions/forward", *[f"{row.positions_per_forward:.0f}" if row else "" for row in rows]],
            ["tokens/forward", *[f"{row.tokens_per_forward:.2f}" if row else "" for row in rows]],
        ]
    lead = (
        f"`{WINDOW}` keeps what it has accepted after every forward; rows never wait for each other, and "
        f"B_cache, as the paper explains it, has no place. `{BLOCKS}` does as the code does: B_cache masks at once."
    )
    return paragraphs(lead, table(head, lines))


def _shown(seeds: BySeed) -> SweepCells:
    return SweepCells.of(next(iter(seeds.values()), ()))


def _judged(measure: Callable[[SweepCells], Estimate | None], seeds: BySeed) -> Finding:
    """A ratio of speeds over all training seeds, held against 1."""
    return Claim(measure=on_sweep(measure), bound=Bound(low=1.0), unit=TIMES).over(seeds.values())


def _all_over_few(sweep: SweepCells, size: int) -> Estimate | None:
    """The speed of all masks over that of B - 1, lap by lap."""
    few, every = sweep.done.get((NO_CACHE, size)), sweep.done.get((ALL_MASKS, size))
    return faster(every, few) if few and every else None


def masks(seeds: BySeed) -> str:
    """B - 1 masks against all that may be generated."""
    sweep = _shown(seeds)
    head = ["batch", "positions/forward, B - 1 masks", "all masks", "speed of all masks over B - 1", "verdict"]
    lines = []
    for size in sweep.batch_sizes:
        few, every = sweep.done.get((NO_CACHE, size)), sweep.done.get((ALL_MASKS, size))
        if few and every:
            ratio = _judged(partial(_all_over_few, size=size), seeds)
            positions = [f"{row.positions_per_forward:.0f}" for row in (few, every)]
            lines.append([str(size), *positions, ratio.number, DIFFERS if ratio.decided else SAME])
    return table(head, lines, text=(0, 4)) if lines else ""


def load(seeds: BySeed) -> str:
    """Speed-up over AR as load grows, and where it ends."""
    sweep = _shown(seeds)
    rows = [row for size in sweep.batch_sizes if (row := sweep.done.get((WINDOW, size)))]
    lines, knee = [], None
    for row in rows:
        size = row.batch_size
        ratio = _judged(lambda sweep, size=size: speed_up(sweep.done.get((WINDOW, size))), seeds)  # type: ignore[misc]
        if ratio.estimate is not None:
            lines.append([str(size), f"{row.positions_per_forward:.0f}", ratio.number])
            knee = size if knee is None and ratio.verdict != "supported" else knee
    if not lines:
        return ""
    largest = lines[-1][0]
    said = (
        f"MARS (tau = .95) is faster than `ar` at every batch size measured, up to {largest}."
        if knee is None
        else f"From batch size {knee} on, MARS (tau = .95) is not shown to be faster than `ar`."
    )
    why = (
        "A forward of MARS covers several positions for each that it settles; once a forward takes as long as its "
        "positions ask for, not as its launch, no threshold can win. The page of [speed](speedup.md) has the law."
    )
    return paragraphs(table(["batch", "positions/forward", "speed over `ar`"], lines), f"{said} {why}")


# ---- scorers and stop strings ----

STRICT, FLEXIBLE = "strict", "flexible"  # GSM8K's two scores
# The lines whose answers are scored twice and looked through for stop strings.
LOOKED_AT = ("base", "ar_sft", mars_name("mars", 4), mars_name("mars", 4, 0.95))


def scorers(seeds: BySeed) -> str:
    """GSM8K by its two scores, on the same answers, of all training seeds."""
    lines = []
    for name in LOOKED_AT:
        measure = partial(_last_number_minus_filter, name=name)
        found = Claim(measure=measure, bound=Bound(low=0.0), signed=True).over(seeds.values())
        if found.estimate is not None:
            verdict = DIFFERS if found.decided else SAME
            lines.append([label(PLAN, name), found.found, p_value(found.p), str(found.seeds), verdict])
    head = ["GSM8K", "last number minus lm-eval's filter", "p", "seeds", "verdict"]
    return table(head, lines, text=(0, 4)) if lines else ""


def _last_number_minus_filter(rows: Sequence[Row], name: str) -> Measured:
    """How the two scores of one line differ; nothing where one is missing."""
    row = done_cells(latest_cells(rows), name).get("gsm8k")
    scores = {row.metric: row.correct, **row.others} if row else {}
    if STRICT not in scores or FLEXIBLE not in scores:
        return Measured()
    return Measured(paired_difference({"gsm8k": scores[FLEXIBLE]}, {"gsm8k": scores[STRICT]}).estimate)


def stop_rules(seeds: BySeed) -> str:
    """How many tokens a stop string would have saved, in the answers of all training seeds."""
    lines = []
    for name in LOOKED_AT:
        cells = [row for rows in seeds.values() for row in done_cells(latest_cells(rows), name).values()]
        rows = [row for row in cells if row.past_stop]
        if rows:
            emitted, past = (sum(sum(getattr(row, name)) for row in rows) for name in ("emitted", "past_stop"))
            answers = [count for row in rows for count in row.past_stop]
            ended = [value for row in rows for value in row.finished]
            lines.append(
                [label(PLAN, name), _percent(sum(ended), len(ended)),
                 f"{sum(map(bool, answers)):,} of {len(answers):,}", _percent(past, emitted), DIFFERS if past else SAME]
            )  # fmt: skip
    head = ["", "ended by EOS, %", "answers with a stop string before", "tokens behind it, % of all", "verdict"]
    return table(head, lines, text=(0, 4)) if lines else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}"
