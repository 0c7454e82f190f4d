"""The paper's Tables 5 and 6 from a sweep, its claims about speed, and ours about the best settings."""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from operator import sub, truediv
from typing import Any, NamedTuple, TypeVar

from marsbench.findings.claims import ABSTRACT, POINTS, TIMES, TOKENS, Claim, Section
from marsbench.findings.in_words import number, with_interval
from marsbench.findings.sweep import SweepCells, gain, on_sweep, printed_ratio, speed_ratio, speed_up
from marsbench.paper import published
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import SweepRow
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Answers, Estimate, difference, speed_difference
from marsbench.studies.lines import BATCH_SIZES

PAPERS_SCALE = "7b"  # of its Tables 5 and 6
AR_SFT = "ar, AR SFT"  # `ar` on the checkpoint that MARS training starts from


class Pairing(NamedTuple):
    words: str
    draft: str  # the paper's name of it
    target: str

    def row(self, sweep: SweepCells, batch_size: int) -> SweepRow | None:
        return sweep.done.get((f"speculative, {self.words}", batch_size))

    def published(self, scale: str = PAPERS_SCALE) -> dict[str, float]:
        return {row.metric: row.value for row in published("6", scale=scale, draft=self.draft, target=self.target)}


AR_BY_AR = Pairing("AR SFT by AR SFT", "ar_sft_0.5b", "ar_sft_7b")
MARS_BY_AR = Pairing("MARS by AR SFT", "ar_sft_0.5b", "mars_7b_b4")
MARS_BY_MARS = Pairing("MARS by MARS", "mars_0.5b_b4", "mars_7b_b4")
TABLE6 = (AR_BY_AR, MARS_BY_AR, MARS_BY_MARS)

TABLE5_SECTION = Section("Table 5, wall-clock speed", (4, 5))
TABLE6_SECTION = Section("Table 6, speculative decoding", (4, 6))
_ENDS = BATCH_SIZES[0], BATCH_SIZES[-1]

_Measure = Callable[[SweepCells], Estimate | None]
_OfRows = Callable[[SweepRow, SweepRow], Estimate | None]
_Effect = TypeVar("_Effect")


def _of_both(effect: Callable[..., _Effect], *both: Any) -> _Effect | None:
    """An effect of two things, None where one of them is missing."""
    return None if None in both else effect(*both)


def _claim(
    measure: _Measure, name: str = "", text: str = "", *, low: float = 1.0, compiled: bool = False, **said: Any
) -> Claim:
    """A claim about the eager contenders, or about all; eager is compared with eager, compiled with compiled."""
    measured = on_sweep(measure if compiled else lambda sweep: measure(sweep.eager))
    return Claim(measure=measured, bound=Bound(low=low), name=name, text=text, **{"unit": TIMES, **said})


def _shown(words: str, measure: _Measure, **said: Any) -> tuple[str, Claim]:
    """A number that is shown beside a claim's, with its words."""
    return words, _claim(measure, low=-inf, **said)


NOT_LAUNCH_BOUND = (
    "A step over 8 positions takes 1.3 times as long here as over one, and hardly longer on a GPU (page gpu). The "
    "paper's ratios depend on that."
)


def speed_claims() -> Iterator[Claim]:
    yield _claim(
        _by_threshold(speed_ratio), "load", "Under load (a full batch, offline), lowering tau raises throughput",
        section=ABSTRACT,
        beside=(
            _shown("accuracy in % at lowest tau", _by_threshold(lambda low, _: low.accuracy.times(100)), unit=POINTS),
            _shown("right answers per second, over highest tau", _by_threshold(_right_per_second)),
        ),
    )  # fmt: skip
    yield from _table5()
    yield from _table6()
    for name, best in BESTS.items():
        yield _claim(
            partial(best.over_ar, size=1), name, f"{best.claimed} is faster than AR (batch 1)",
            compiled=True, ours=True,
            beside=tuple(
                _shown(f"batch {size}", partial(best.over_ar, size=size), compiled=True) for size in BATCH_SIZES
            ),
        )  # fmt: skip


def _by_threshold(effect: _OfRows) -> _Measure:
    """An effect of MARS at its lowest threshold and at its highest, at the largest batch raced."""

    def measure(sweep: SweepCells) -> Estimate | None:
        rows = sweep.at(max(sweep.batch_sizes, default=0), lambda row: row.method == "mars")
        thresholds = {float(row.options["threshold"]): row for row in rows if row.options.get("threshold") is not None}
        return effect(thresholds[min(thresholds)], thresholds[max(thresholds)]) if len(thresholds) > 1 else None

    return measure


def _right_per_second(low: SweepRow, high: SweepRow) -> Estimate | None:
    one, other = (sum(row.correct) / sum(row.emitted) for row in (low, high))
    ratio = speed_ratio(low, high)
    return ratio.times(one / other) if ratio and other else None


# ---- Table 5: the block-level cache ---------------------------------------------------------------------------------


def _table5() -> Iterator[Claim]:
    of_table = partial(_claim, section=TABLE5_SECTION)
    small, *others = BATCH_SIZES
    yield of_table(
        partial(_fastest, batch_size=small), "cache-faster",
        f"MARS with the block-level cache is faster than AR with a KV cache (batch {small})",
        published=partial(_published_fastest, batch_size=small), untestable=NOT_LAUNCH_BOUND,
        beside=(
            *[_shown(f"batch {size}", partial(_fastest, batch_size=size)) for size in others],
            _shown("over transformers' generate", partial(_fastest, batch_size=small, baseline="hf-generate")),
        ),
    )  # fmt: skip
    yield of_table(
        lambda sweep: _of_both(difference, *(_fastest(sweep, size) for size in _ENDS)),
        "shrinks", "The speed-up shrinks as the batch grows", low=0.0, signed=True,
        published=lambda scale: _of_both(sub, *(_published_fastest(scale, size) for size in _ENDS)),
    )  # fmt: skip
    yield of_table(
        _smaller_blocks, "smaller-blocks", "A larger batch favours a smaller B_cache", low=0.0, signed=True,
        published=_published_smaller_blocks,
    )  # fmt: skip


def _fastest(sweep: SweepCells, batch_size: int, baseline: str | None = None) -> Estimate | None:
    """Speed-up over a baseline, `ar` unless told, of the fastest B_cache, chosen on the laps that judge it."""
    ratios = [speed_up(row, baseline) for row in sweep.at(batch_size, lambda row: row.method == "mars-block-cache")]
    return max(filter(None, ratios), key=lambda estimate: estimate.value, default=None)


def _published_fastest(scale: str, batch_size: int) -> float | None:
    return max(published5(batch_size, scale=scale).values(), default=None)


def _smaller_blocks(sweep: SweepCells) -> Estimate | None:
    """How many times as fast the smallest B_cache is as the largest: at the largest batch minus at the smallest."""
    cached = [sweep.at(size, lambda row: row.method == "mars-block-cache") for size in _ENDS]
    at_small, at_large = ({int(row.options["cache_block"]): row for row in rows} for rows in cached)
    blocks = at_small.keys() & at_large.keys()
    if len(blocks) < 2:
        return None
    return _of_both(difference, *(speed_ratio(rows[min(blocks)], rows[max(blocks)]) for rows in (at_large, at_small)))


def _published_smaller_blocks(scale: str) -> float | None:
    small, large = (published5(size, scale=scale) for size in _ENDS)
    return large[min(large)] / large[max(large)] - small[min(small)] / small[max(small)] if small and large else None


# ---- Table 6: speculative decoding ----------------------------------------------------------------------------------


def _table6() -> Iterator[Claim]:
    """Compares lines at the smallest batch size raced; the paper's is 1."""

    def of_lines(
        effect: _OfRows, metric: str, papers: Callable[[float, float], float], first: Pairing, second: Pairing,
        *said: str, **more: Any,
    ) -> Claim:  # fmt: skip
        def measure(sweep: SweepCells) -> Estimate | None:
            least = min(sweep.batch_sizes, default=0)
            return _of_both(effect, first.row(sweep, least), second.row(sweep, least))

        def published(scale: str) -> float | None:
            return _of_both(papers, *(line.published(scale).get(metric) for line in (first, second)))

        return _claim(measure, *said, section=TABLE6_SECTION, published=published, **more)

    def tokens(mars: SweepRow, ar: SweepRow) -> Estimate:
        return speed_difference(*(Answers(row.correct, row.emitted, row.row_forwards) for row in (mars, ar)))

    yield of_lines(
        tokens, "tokens_per_target_forward", sub, MARS_BY_AR, AR_BY_AR, "target-yields-more",
        "With a MARS target, speculative decoding emits more tokens per target forward pass",
        unit=TOKENS, signed=True, low=0.0,
    )  # fmt: skip
    yield of_lines(
        speed_ratio, "speedup", truediv, MARS_BY_AR, AR_BY_AR, "target-faster",
        "With a MARS target, speculative decoding is faster", untestable=NOT_LAUNCH_BOUND,
    )  # fmt: skip
    yield of_lines(
        speed_ratio, "speedup", truediv, MARS_BY_MARS, MARS_BY_AR, "draft-faster",
        "With a MARS draft, too, it is even faster", untestable=NOT_LAUNCH_BOUND,
    )  # fmt: skip
    yield of_lines(
        gain, "accuracy_delta", sub, MARS_BY_AR, AR_BY_AR, "target-costs-nothing", "A MARS target costs no accuracy",
        unit=POINTS, signed=True, low=-1.0, untestable="102 questions cannot show a loss of one point.",
    )  # fmt: skip


class Best(NamedTuple):
    """The fastest setting of a kind, compared with AR."""

    find: Callable[[SweepCells, int], SweepRow | None]
    claimed: str  # its words in the claim that it is faster than AR
    shown: str  # its words in the page's first table

    def over_ar(self, sweep: SweepCells, size: int) -> Estimate | None:
        return sweep.over_ar_alike(self.find(sweep, size))


BESTS = {
    "mars-95": Best(SweepCells.sure_mars, "MARS at tau = .95", "`mars` at tau = .95"),
    "best-verified": Best(SweepCells.best_verified, "Verified MARS", "`mars-verified`"),
    "best-adapter": Best(
        partial(SweepCells.best_verified, adapted=True), "A verified adapter on AR SFT",
        "`mars-verified` with an adapter on AR SFT",
    ),
}  # fmt: skip


def table5(sweep: SweepCells) -> dict[str, str]:
    cached = {int(row.options["cache_block"]): row.contender for row in sweep.rows if row.method == "mars-block-cache"}
    if not cached:
        return {"table5": "", "published5": ""}
    without = next((row.contender for row in sweep.rows if row.method == "mars-no-cache"), "")
    names = [without, *[cached[block] for block in sorted(cached)]]
    lines, accuracies = [], list[str]()
    for size in sweep.batch_sizes:
        cells = [sweep.done.get((name, size)) for name in names]
        lines.append([str(size), *[printed_ratio(speed_up(row)) if row else "not run" for row in cells]])
        lines.append(["positions/forward", *[f"{row.positions_per_forward:.0f}" if row else "" for row in cells]])
        accuracies = [f"{100 * row.accuracy.value:.1f}" if row else "" for row in cells]
    lines.append(["accuracy in %", *accuracies])  # of the largest batch
    papers = {size: {**published5(size, "mars_no_cache"), **published5(size)} for size in BATCH_SIZES}
    shown = [[str(size), *[f"{speed:g}" for speed in speeds.values()]] for size, speeds in papers.items()]
    heads = sorted(cached), [block for block in papers[BATCH_SIZES[0]] if block]
    ours, theirs = (["batch", "no cache", *[f"B_cache {block}" for block in blocks]] for blocks in heads)
    return {"table5": table(ours, lines), "published5": table(theirs, shown)}


def published5(batch_size: int, method: str = "mars_block_cache", scale: str = PAPERS_SCALE) -> dict[int, float]:
    """B_cache, 0 for none, -> the paper's speed-up."""
    rows = published("5", scale=scale, method=method, batch_size=batch_size, metric="speedup")
    return {row.cache_block or 0: row.value for row in rows}


def table6(sweep: SweepCells) -> dict[str, str]:
    head = ["", "tokens/target forward", "ms/round", "tokens/s over `ar`", "over AR SFT by AR SFT",
            "points gained [95 %]"]  # fmt: skip
    parts = []
    for size in sweep.batch_sizes:
        known = [(line, row) for line in TABLE6 if (row := line.row(sweep, size))]
        lines = []
        for line, row in known:
            gained = gain(row, sweep.done.get((AR_SFT, size)))
            numbers = [f"{row.tokens_per_forward:.2f}", f"{row.ms_per_forward:.2f}", printed_ratio(speed_up(row))]
            ratio = f"{row.tokens_per_second / known[0][1].tokens_per_second:.2f}"
            lines.append([line.words, *numbers, ratio, with_interval(gained, 1, signed=True) if gained else ""])
        parts += [f"Batch size {size}:", table(head, lines)] if lines else []
    return {"table6": paragraphs(*parts), "published6": _published6() if parts else ""}


def _published6() -> str:
    head = ["", "tokens/target forward", "ms/round (derived)", "tokens/s", "over AR SFT by AR SFT", "points gained"]
    lines = []
    for line in TABLE6:
        papers = line.published()
        tokens, speed = papers["tokens_per_target_forward"], papers["tokens_per_second"]
        numbers = [f"{tokens:g}", f"{1000 * tokens / speed:.0f}", f"{speed:g}", f"{papers['speedup']:g}"]
        lines.append([line.words, *numbers, number(papers["accuracy_delta"], 1, signed=True)])
    return table(head, lines)
