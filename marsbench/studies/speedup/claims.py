"""What the paper claims of wall-clock speed and of speculative decoding, and what we claim of the best settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import sub, truediv
from typing import Any

from marsbench.findings.claims import ABSTRACT, OURS, POINTS, TIMES, TOKENS, Claim, Measured, Section
from marsbench.findings.sweep import ALLOWED_LOSS, SweepCells
from marsbench.rows.kinds import Row
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.lines import BATCH_SIZES
from marsbench.studies.speedup import measures
from marsbench.studies.speedup.tables import AR_BY_AR, MARS_BY_AR, MARS_BY_MARS, Pairing

TABLE5_SECTION = Section("Table 5, wall-clock speed", (4, 5))
TABLE6_SECTION = Section("Table 6, speculative decoding", (4, 6))
_ABOVE_0, _ABOVE_1, _BELOW_1 = Bound(low=0.0), Bound(low=1.0), Bound(high=1.0)


def _on_sweep(
    measure: Callable[[SweepCells], Estimate | None], bound: Bound, *, compiled: bool = False, **said: Any
) -> Claim:
    """A claim on the eager contenders, or on all of them: like is held against like."""

    def measured(rows: Sequence[Row]) -> Measured:
        sweep = SweepCells.of(rows)
        return Measured(measure(sweep if compiled else sweep.eager))

    return Claim(measure=measured, bound=bound, **{"page": "speedup", "unit": TIMES, "counts": "laps", **said})


_of_page = partial(_on_sweep, item="speedup")
_of_table5 = partial(_on_sweep, item="table5", section=TABLE5_SECTION)
_of_table6 = partial(_on_sweep, item="table6", section=TABLE6_SECTION)


def speed_claims() -> Iterator[Claim]:
    yield _of_page(
        measures.throughput_by_threshold,
        _ABOVE_1,
        name="load",
        text="Under load (a full batch, offline), lowering tau raises throughput",
        compared="tokens/s of MARS: lowest tau over highest tau, at the largest batch raced, whatever it costs in "
        "accuracy",
        section=ABSTRACT,
        in_abstract=True,
    )
    yield from _table5()
    yield from _table6()
    yield from _best_settings()


def _table5() -> Iterator[Claim]:
    small, large = measures.SMALL_BATCH, measures.LARGE_BATCH
    for size in BATCH_SIZES:
        yield _of_table5(
            partial(measures.fastest_cached, batch_size=size),
            _ABOVE_1,
            name="cache-faster",
            text="MARS with the block-level cache is faster than AR with a KV cache",
            compared="tokens/s of the fastest B_cache over AR",
            batch_size=size,
            published=partial(measures.published_fastest_cached, batch_size=size),
            in_abstract=True,
        )
    yield _of_table5(
        measures.shrinking,
        _ABOVE_0,
        name="shrinks",
        text="The speed-up shrinks as the batch grows",
        compared=f"speed-up of the fastest B_cache: batch {small} minus batch {large}",
        published=measures.published_shrinking,
        signed=True,
    )
    yield _of_table5(
        measures.smaller_blocks_for_larger_batches,
        _ABOVE_0,
        name="smaller-blocks",
        text="A larger batch favours a smaller B_cache",
        compared=f"speed of the smallest B_cache over that of the largest: batch {large} minus batch {small}",
        published=measures.published_smaller_blocks_for_larger_batches,
        signed=True,
    )
    for size in BATCH_SIZES:
        yield _of_table5(
            partial(measures.without_cache, batch_size=size),
            _BELOW_1,
            name="no-cache-slower",
            text="Without a cache, MARS is slower than AR with one",
            compared="tokens/s of MARS without a cache over AR",
            batch_size=size,
            published=partial(measures.published_without_cache, batch_size=size),
            check=True,
        )


def _table6() -> Iterator[Claim]:
    yield _of_table6(
        measures.more_tokens_per_target_forward,
        _ABOVE_0,
        name="target-yields-more",
        text="A MARS target yields more tokens per target forward pass than speculative decoding with an AR target",
        compared="tokens per target forward: MARS target minus AR SFT target, both with an AR SFT draft",
        published=_published("tokens_per_target_forward", sub, MARS_BY_AR, AR_BY_AR),
        unit=TOKENS,
        signed=True,
        counts="questions",
    )
    yield _of_table6(
        measures.faster_target,
        _ABOVE_1,
        name="target-faster",
        text="A MARS target is faster",
        compared="tokens/s: MARS target over AR SFT target, both with an AR SFT draft, smallest batch raced",
        published=_published("speedup", truediv, MARS_BY_AR, AR_BY_AR),
    )
    yield _of_table6(
        measures.faster_draft,
        _ABOVE_1,
        name="draft-faster",
        text="A MARS draft makes it faster still",
        compared="tokens/s: MARS draft over AR SFT draft, both for a MARS target, smallest batch raced",
        published=_published("speedup", truediv, MARS_BY_MARS, MARS_BY_AR),
    )
    yield _of_table6(
        measures.speculative_accuracy,
        Bound.losing_less_than(2.0),
        name="target-costs-nothing",
        text="A MARS target costs no accuracy",
        compared="MARS target minus AR SFT target, both with an AR SFT draft",
        published=_published("accuracy_delta", sub, MARS_BY_AR, AR_BY_AR),
        unit=POINTS,
        signed=True,
        counts="questions",
    )


def _published(
    metric: str, effect: Callable[[float, float], float], first: Pairing, second: Pairing
) -> Callable[[str], float | None]:
    """Scale -> what the paper's Table 6 says of one line against another."""

    def published(scale: str) -> float | None:
        found = measures.published_speculative(scale, metric, first, second)
        return effect(*found) if found else None

    return published


def _best_settings() -> Iterator[Claim]:
    settings = (
        ("best-mars", f"MARS that loses at most {ALLOWED_LOSS:g} point on the questions raced", "MARS",
         measures.best_mars),
        ("best-verified", "Verified MARS, whose tokens are those of AR,", "verified MARS", measures.best_verified),
        ("best-adapter", "An adapter on AR SFT, verified,", "an adapter", measures.best_adapted),
    )  # fmt: skip
    for name, words, method, measure in settings:
        for size in measures.SERVED:
            yield _of_page(
                partial(measure, batch_size=size),
                _ABOVE_1,
                name=name,
                text=f"{words} is faster than AR",
                compared=f"tokens/s of the best setting of {method} over AR, each in its faster form",
                batch_size=size,
                compiled=True,
                whose=OURS,
            )
