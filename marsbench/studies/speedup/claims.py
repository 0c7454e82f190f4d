"""What the paper claims of wall-clock speed and of speculative decoding, and what we claim of the best settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from marsbench.findings.claims import POINTS, TOKENS
from marsbench.findings.paper_claims import ABSTRACT, PaperClaim, on_sweep
from marsbench.findings.sweep import ALLOWED_LOSS
from marsbench.statistics.intervals import above, below, non_inferiority
from marsbench.studies.lines import BATCH_SIZES
from marsbench.studies.speedup import measures

TABLE5_SECTION = "Section 4.5: Table 5, wall-clock speed"
TABLE6_SECTION = "Section 4.6: Table 6, speculative decoding"
_of_page = partial(on_sweep, item="speedup", page="speedup")
_of_table5 = partial(on_sweep, item="table5", page="speedup", section=TABLE5_SECTION)
_of_table6 = partial(on_sweep, item="table6", page="speedup", section=TABLE6_SECTION)
_above_0, _above_1, _below_1 = partial(above, bound=0.0), partial(above, bound=1.0), partial(below, bound=1.0)


def speed_claims() -> Iterator[PaperClaim]:
    """All of them."""
    yield _of_page(
        "Under load, lowering tau raises throughput",
        "tokens/s of MARS: lowest tau over highest tau, at the largest batch raced, whatever it costs in accuracy > 1",
        measures.throughput_by_threshold,
        _above_1,
        section=ABSTRACT,
        in_abstract=True,
    )
    yield from _table5()
    yield from _table6()
    yield from _best_settings()


def _table5() -> Iterator[PaperClaim]:
    small, large = measures.SMALL_BATCH, measures.LARGE_BATCH
    for size in BATCH_SIZES:
        yield _of_table5(
            f"MARS with the block-level cache is faster than AR with a KV cache at batch {size}",
            f"tokens/s of the fastest B_cache over AR, batch {size} > 1",
            partial(measures.fastest_cached, batch_size=size),
            _above_1,
            partial(measures.published_fastest_cached, batch_size=size),
            in_abstract=True,
        )
    yield _of_table5(
        "The speed-up shrinks as the batch grows",
        f"speed-up of the fastest B_cache: batch {small} minus batch {large} > 0",
        measures.shrinking,
        _above_0,
        measures.published_shrinking,
        signed=True,
    )
    yield _of_table5(
        "A larger batch favours a smaller B_cache",
        f"speed of the smallest B_cache over that of the largest: batch {large} minus batch {small} > 0",
        measures.smaller_blocks_for_larger_batches,
        _above_0,
        measures.published_smaller_blocks_for_larger_batches,
        signed=True,
    )
    for size in BATCH_SIZES:
        yield _of_table5(
            f"Without a cache, MARS is slower than AR with one at batch {size}",
            f"tokens/s of MARS without a cache over AR, batch {size} < 1",
            partial(measures.without_cache, batch_size=size),
            _below_1,
            partial(measures.published_without_cache, batch_size=size),
            check=True,
        )


def _table6() -> Iterator[PaperClaim]:
    mars, ar, both = measures.MARS_BY_AR, measures.AR_BY_AR, measures.MARS_BY_MARS
    yield _of_table6(
        "A MARS target yields more tokens per target forward pass than speculative decoding with an AR target",
        "tokens per target forward: MARS target minus AR SFT target, both with an AR SFT draft > 0",
        measures.more_tokens_per_target_forward,
        _above_0,
        _published_gap("tokens_per_target_forward", mars, ar),
        unit=TOKENS,
        signed=True,
        counts="questions",
    )
    yield _of_table6(
        "A MARS target is faster",
        "tokens/s: MARS target over AR SFT target, both with an AR SFT draft, smallest batch raced > 1",
        measures.faster_target,
        _above_1,
        _published_ratio(mars, ar),
    )
    yield _of_table6(
        "A MARS draft makes it faster still",
        "tokens/s: MARS draft over AR SFT draft, both for a MARS target, smallest batch raced > 1",
        measures.faster_draft,
        _above_1,
        _published_ratio(both, mars),
    )
    yield _of_table6(
        "A MARS target costs no accuracy",
        "MARS target minus AR SFT target, both with an AR SFT draft > -2 (non-inferiority)",
        measures.speculative_accuracy,
        partial(non_inferiority, margin=2.0),
        _published_gap("accuracy_delta", mars, ar),
        unit=POINTS,
        signed=True,
        counts="questions",
    )


def _published_gap(metric: str, first: str, second: str) -> Callable[[str], float | None]:
    """Scale -> what the paper's Table 6 says of one line minus another."""

    def gap(scale: str) -> float | None:
        found = measures.published_speculative(scale, metric, first, second)
        return found[0] - found[1] if found else None

    return gap


def _published_ratio(first: str, second: str) -> Callable[[str], float | None]:
    """Scale -> how many times as fast one line of the paper's Table 6 is as another."""

    def ratio(scale: str) -> float | None:
        found = measures.published_speculative(scale, "speedup", first, second)
        return found[0] / found[1] if found else None

    return ratio


def _best_settings() -> Iterator[PaperClaim]:
    """Ours: how much faster the best settings are than AR decoding."""
    settings = {
        f"MARS that loses at most {ALLOWED_LOSS:g} point on the questions raced": ("MARS", measures.best_mars),
        "Verified MARS, whose tokens are those of AR,": ("verified MARS", measures.best_verified),
    }
    for words, (method, measure) in settings.items():
        for size in measures.SERVED:
            yield _of_page(
                f"Ours: {words} is faster than AR at batch {size}",
                f"tokens/s of the best setting of {method} over AR, batch {size} > 1",
                partial(measure, batch_size=size),
                _above_1,
            )
