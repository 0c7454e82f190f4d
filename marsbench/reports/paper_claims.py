"""Every claim of the paper that is tested here: where it is made, whose rows decide it, and how.

The claims that one table decides stand on that table's page (`Page.claims`); here they get their place in the paper,
beside those on speed, on speculative decoding and on the cost of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from marsbench.paper import published
from marsbench.reports import speed_claims as speed
from marsbench.reports.cells import latest_cells, latest_stages, latest_step_cost
from marsbench.reports.claims import POINTS, TIMES, TOKENS, Claim, CurveClaim, Finding, TokensClaim, number
from marsbench.reports.collection import Collection
from marsbench.reports.page import Page
from marsbench.reports.sections import AR_OBJECTIVE, MARS_OBJECTIVE
from marsbench.reports.seeds import Judge, judged
from marsbench.reports.sweep import ALLOWED_LOSS, Sweep
from marsbench.reports.verdicts import counted
from marsbench.statistics.intervals import (
    Estimate,
    Interval,
    Verdict,
    above,
    below,
    median_ratio,
    non_inferiority,
    within,
)
from marsbench.sweeps.plans import BATCH_SIZES, BLOCK_SIZES, TABLES, TablePlan, TrainedStage, mars_name
from marsbench.sweeps.rows import Row

ABSTRACT, NOT_THE_PAPERS = "Abstract", "Not the paper's: ours, and reported elsewhere"
_SECTIONS = {  # what a table of the paper, by its key, belongs to; in the paper's order
    "table2": "Section 4.2: Table 2",
    "table3": "Section 4.3: Table 3",
    "figure3": "Section 4.3: Figure 3",
    "table4": "Section 4.4: Table 4",
    "table5": "Section 4.5: Table 5, wall-clock speed",
    "table6": "Section 4.6: Table 6, speculative decoding",
    "training": "Appendix A: the cost of training",
    "table8": "Appendix B: Table 8",
    "table9": "Appendix C: Table 9",
    "figure6": "Appendix D: Figure 6",
}
SECTIONS = (ABSTRACT, *_SECTIONS.values(), NOT_THE_PAPERS)
_NOT_THE_PAPERS = ("Ours:", "Reported elsewhere:")  # how the words of other claims begin
_ABOUT_TWICE = 1.5, 2.5


@dataclass(frozen=True)
class PaperClaim:
    """A claim with its test, which reads the rows of one page."""

    item: str  # key of the table, figure or appendix that it belongs to
    page: str  # whose rows decide it
    text: str
    tested: str  # the comparison and its bound in words
    unit: str
    judge: Judge
    decide: Callable[[Interval], Verdict]
    published: Callable[[str], str | None]  # what the paper's own numbers say at a scale
    counts: str = "questions"  # what its interval is drawn from
    section: str = ""
    in_abstract: bool = False

    def finding(self, collection: Collection) -> Finding:
        """What one scale's rows say, all training seeds together."""
        return judged(self.judge, self.decide, collection.of(self.page))


@dataclass(frozen=True)
class Judged:
    """A claim with what each scale says of it."""

    claim: PaperClaim
    findings: Mapping[str, Finding]

    @property
    def papers(self) -> bool:
        """Whether it is the paper's own."""
        return self.claim.section != NOT_THE_PAPERS


def judge_all(pages: Sequence[Page], collections: Sequence[Collection]) -> list[Judged]:
    """Every claim judged at every scale, in the order of the paper's sections."""
    return [Judged(claim, {one.scale: claim.finding(one) for one in collections}) for claim in paper_claims(pages)]


def tally(judged: Sequence[Judged], scale: str) -> str:
    """How many claims one scale supports, and what of the others."""
    return counted([one.findings[scale].verdict for one in judged])


def paper_claims(pages: Sequence[Page]) -> list[PaperClaim]:
    """All claims, in the order of the paper's sections."""
    found = [*_abstract(), *_table4(), *[claim for page in pages for claim in _of_page(page)]]
    found += [*_table5(), *_table6(), *_training(), *_best_settings()]
    return sorted(found, key=lambda claim: SECTIONS.index(claim.section))


# ---- claims of a table's page ---------------------------------------------------------------------------------------


def _of_page(page: Page) -> Iterator[PaperClaim]:
    count = Counter(claim.text for claim in page.claims)
    for claim in page.claims:
        others = claim.text.startswith(_NOT_THE_PAPERS) or page.plan.key not in _SECTIONS
        item = "figure3" if isinstance(claim, CurveClaim) and page.plan.key == "table8" else page.plan.key
        section = NOT_THE_PAPERS if others else _SECTIONS[item]
        yield _of_cells(claim, page.plan, item, section, several=count[claim.text] > 1)


def _of_cells(claim: Claim, plan: TablePlan, item: str, section: str, *, several: bool = False) -> PaperClaim:
    """A claim on a table's cells; of several with the same words, each says what it compares."""

    def paper(scale: str) -> str | None:
        value = claim.published(plan, scale)
        return None if value is None else f"{value} {claim.unit}"

    return PaperClaim(
        item=item,
        page=plan.key,
        text=f"{claim.text}: {claim.compared(plan)}" if several else claim.text,
        tested=claim.tested(plan),
        unit=claim.unit,
        judge=lambda rows: claim.judge(latest_cells(rows), plan),
        decide=claim.decide,
        published=paper,
        section=section,
        in_abstract=section != NOT_THE_PAPERS and (plan.key, claim.text) in _IN_ABSTRACT,
    )


_IN_ABSTRACT = {
    ("table2", "MARS at one token per forward pass matches AR SFT"),
    ("table2", "MARS at one token per forward pass exceeds AR SFT"),
    ("table4", "MARS emits several tokens per forward pass (B = 4)"),
    ("table4", "MARS with B = 4 stays level with AR SFT"),
    ("table8", "A lower tau emits more tokens per forward pass (B = 4)"),
}


def _table4() -> Iterator[PaperClaim]:
    """What its page shows without a claim: that there is more than one token per forward pass at all."""
    for size in BLOCK_SIZES:
        text = f"MARS emits several tokens per forward pass (B = {size})"
        claim = TokensClaim("", text, mars_name("mars", size, 0.95), bound=1.0)
        yield _of_cells(claim, TABLES["table4"], "table4", _SECTIONS["table4"])


# ---- claims on a sweep ----------------------------------------------------------------------------------------------


def _of_sweep(
    item: str,
    text: str,
    tested: str,
    measure: Callable[[Sweep], Estimate | None],
    decide: Callable[[Interval], Verdict],
    paper: Callable[[str], float | None],
    *,
    unit: str = TIMES,
    signed: bool = False,
    counts: str = "laps",
    section: str = "",
    in_abstract: bool = False,
) -> PaperClaim:
    def judge(rows: Sequence[Row]) -> Finding:
        return _finding(measure(Sweep.of(rows)), unit, decide, signed=signed)

    def said(scale: str) -> str | None:
        value = paper(scale)
        return None if value is None else f"{number(value, unit, signed=signed)} {unit}"

    where = section or _SECTIONS[item]
    return PaperClaim(item, "speedup", text, tested, unit, judge, decide, said, counts, where, in_abstract)


def _finding(
    estimate: Estimate | None, unit: str, decide: Callable[[Interval], Verdict], *, signed: bool = False
) -> Finding:
    if estimate is None:
        return Finding()
    return Finding(estimate, unit, signed, verdict=decide(estimate.interval))


def _table5() -> Iterator[PaperClaim]:
    small, large = speed.SMALL_BATCH, speed.LARGE_BATCH
    for size in BATCH_SIZES:
        yield _of_sweep(
            "table5",
            f"MARS with the block-level cache is faster than AR with a KV cache at batch {size}",
            f"tokens/s of the fastest B_cache over AR, batch {size} > 1",
            partial(speed.fastest_cached, batch_size=size),
            partial(above, bound=1.0),
            partial(speed.published_fastest_cached, batch_size=size),
            in_abstract=True,
        )
    yield _of_sweep(
        "table5",
        "The speed-up shrinks as the batch grows",
        f"speed-up of the fastest B_cache: batch {small} minus batch {large} > 0",
        speed.shrinking,
        partial(above, bound=0.0),
        speed.published_shrinking,
        signed=True,
    )
    yield _of_sweep(
        "table5",
        "A larger batch favours a smaller B_cache",
        f"speed of the smallest B_cache over that of the largest: batch {large} minus batch {small} > 0",
        speed.smaller_blocks_for_larger_batches,
        partial(above, bound=0.0),
        speed.published_smaller_blocks_for_larger_batches,
        signed=True,
    )
    for size in BATCH_SIZES:
        yield _of_sweep(
            "table5",
            f"Without a cache, MARS is slower than AR with one at batch {size}",
            f"tokens/s of MARS without a cache over AR, batch {size} < 1",
            partial(speed.without_cache, batch_size=size),
            partial(below, bound=1.0),
            partial(speed.published_without_cache, batch_size=size),
        )


def _table6() -> Iterator[PaperClaim]:
    mars, ar, both = speed.MARS_BY_AR, speed.AR_BY_AR, speed.MARS_BY_MARS

    def minus(metric: str) -> Callable[[str], float | None]:
        def gap(scale: str) -> float | None:
            found = speed.published_speculative(scale, metric, mars, ar)
            return found[0] - found[1] if found else None

        return gap

    def over(first: str, second: str) -> Callable[[str], float | None]:
        def ratio(scale: str) -> float | None:
            found = speed.published_speculative(scale, "speedup", first, second)
            return found[0] / found[1] if found else None

        return ratio

    yield _of_sweep(
        "table6",
        "A MARS target yields more tokens per target forward pass than speculative decoding with an AR target",
        "tokens per target forward: MARS target minus AR SFT target, both with an AR SFT draft > 0",
        speed.more_tokens_per_target_forward,
        partial(above, bound=0.0),
        minus("tokens_per_target_forward"),
        unit=TOKENS,
        signed=True,
        counts="questions",
    )
    yield _of_sweep(
        "table6",
        "A MARS target is faster",
        "tokens/s: MARS target over AR SFT target, both with an AR SFT draft, smallest batch raced > 1",
        speed.faster_target,
        partial(above, bound=1.0),
        over(mars, ar),
    )
    yield _of_sweep(
        "table6",
        "A MARS draft makes it faster still",
        "tokens/s: MARS draft over AR SFT draft, both for a MARS target, smallest batch raced > 1",
        speed.faster_draft,
        partial(above, bound=1.0),
        over(both, mars),
    )
    yield _of_sweep(
        "table6",
        "A MARS target costs no accuracy",
        "MARS target minus AR SFT target, both with an AR SFT draft > -2 (non-inferiority)",
        speed.speculative_accuracy,
        partial(non_inferiority, margin=2.0),
        minus("accuracy_delta"),
        unit=POINTS,
        signed=True,
        counts="questions",
    )


def _best_settings() -> Iterator[PaperClaim]:
    """Ours: how much faster the best settings are than AR decoding."""
    settings = {
        f"MARS that loses at most {ALLOWED_LOSS:g} point on the questions raced": ("MARS", speed.best_mars),
        "Verified MARS, whose tokens are those of AR,": ("verified MARS", speed.best_verified),
    }
    for words, (method, measure) in settings.items():
        for size in speed.SERVED:
            yield _of_sweep(
                "speedup",
                f"Ours: {words} is faster than AR at batch {size}",
                f"tokens/s of the best setting of {method} over AR, batch {size} > 1",
                partial(measure, batch_size=size),
                partial(above, bound=1.0),
                lambda scale: None,
                section=NOT_THE_PAPERS,
            )


# ---- the model, its training and its use ----------------------------------------------------------------------------


def _abstract() -> Iterator[PaperClaim]:
    yield PaperClaim(
        item="abstract",
        page="table2",
        text="MARS adds no parameters",
        tested="parameters of MARS over those of AR SFT = 1",
        unit=TIMES,
        judge=lambda rows: _finding(_parameters(rows), TIMES, _is_one),
        decide=_is_one,
        published=lambda scale: None,
        counts="checkpoint",
        section=ABSTRACT,
        in_abstract=True,
    )
    yield _of_sweep(
        "speedup",
        "Under load, lowering tau raises throughput",
        "tokens/s of MARS: lowest tau over highest tau, at the largest batch raced, whatever it costs in accuracy > 1",
        speed.throughput_by_threshold,
        partial(above, bound=1.0),
        lambda scale: None,
        section=ABSTRACT,
        in_abstract=True,
    )


def _parameters(rows: Sequence[Row]) -> Estimate | None:
    """Parameters of MARS over those of AR SFT: a count, without an interval to speak of."""
    trained = latest_stages(rows)
    mars, ar = trained.get(TrainedStage("mars", 4)), trained.get(TrainedStage("ar_sft", None))
    if mars is None or ar is None or not ar.parameters:
        return None
    ratio = mars.parameters / ar.parameters
    return Estimate(ratio, Interval(ratio, ratio), 1)


def _is_one(interval: Interval) -> Verdict:
    return "supported" if interval == Interval(1.0, 1.0) else "not supported"


def _training() -> Iterator[PaperClaim]:
    low, high = _ABOUT_TWICE
    about_twice, more = partial(within, low=low, high=high), partial(above, bound=1.0)
    yield PaperClaim(
        item="training",
        page="table2",
        text="A training step of MARS costs about twice one of AR SFT",
        tested=f"time of a MARS step over an AR step, from {low:g} to {high:g}",
        unit=TIMES,
        judge=lambda rows: _finding(_step(rows, "seconds"), TIMES, about_twice),
        decide=about_twice,
        published=_published_hours,
        counts="batches",
        section=_SECTIONS["training"],
    )
    yield PaperClaim(
        item="training",
        page="table2",
        text="Training MARS takes more memory at its peak than AR SFT",
        tested="bytes that a MARS step must hold over those of an AR step > 1",
        unit=TIMES,
        judge=lambda rows: _finding(_step(rows, "memory"), TIMES, more),
        decide=more,
        published=lambda scale: None,
        counts="batches",
        section=_SECTIONS["training"],
    )


def _step(rows: Sequence[Row], part: Literal["seconds", "memory"]) -> Estimate | None:
    """What a MARS step takes over what an AR step takes, batch by batch."""
    row = latest_step_cost(rows)
    if row is None or row.status != "done":
        return None
    taken: Mapping[str, Sequence[float]] = row.seconds if part == "seconds" else row.memory
    return median_ratio(taken[MARS_OBJECTIVE], taken[AR_OBJECTIVE]) if taken else None


def _published_hours(scale: str) -> str | None:
    """What the paper's hours of whole runs come to."""
    hours = {row.method: row.value for row in published("A", scale=scale, metric="train_h200_hours")}
    return f"{number(hours['mars'] / hours['ar_sft'], TIMES, signed=False)} {TIMES}" if hours else None
