"""Adapter: what writing into the model's weights costs and buys, beside an adapter that leaves the model as it is."""

from __future__ import annotations

from functools import partial

from marsbench.findings.between_lines import emits, emits_more, more_accurate
from marsbench.findings.cells import Cells, done_cells
from marsbench.line import Line
from marsbench.rendering.figures import line_on, shared_benchmarks
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY, accuracy_table, speed_table
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.studies.lines import AR_SFT, HEADS, drafting, headed, mars, mars_name, short, verified
from marsbench.studies.study import table_study

_GROUPS, _LINEAR = verified("groups", 4), verified("linear", 5, 0.5)
_LOSSLESS = (
    Line("gated_ar", "AR SFT with an adapter, AR decoding", "mars_gated", "ar"),
    verified("groups", 4, stage="mars_gated"),
    verified("linear", 5, 0.5, stage="mars_gated"),
)
_SIZES = {
    "gated_groups_2x": ("AR SFT with an adapter trained twice as long", "mars_gated_2x"),
    "wide_groups": ("AR SFT with an adapter of three times the rank", "mars_gated_wide"),
    "wide_groups_2x": ("AR SFT with one of three times the rank trained twice as long", "mars_gated_wide_2x"),
}


def _thresholded(stage: str, words: str, threshold: float) -> Line:
    """The same whose masks decide what passes, four positions to a forward pass."""
    label, options = f"AR SFT with {words} (tau = {short(threshold)})", {"block_size": 4, "threshold": threshold}
    return Line(f"{stage}_{threshold:g}", label, stage, "mars", options, optional=True)


_WITH_HEADS = {f"mars_gated_{kind}": f"an adapter and {words} behind it" for kind, words in HEADS.items()}
_WINDOWS = (drafting("mars_gated", "an adapter", 8), *[headed(kind, window) for window in (4, 8) for kind in HEADS])
_SURE = (
    _thresholded("mars_gated", "an adapter", 0.99),
    *[_thresholded(stage, words, tau) for stage, words in _WITH_HEADS.items() for tau in (0.99, 0.95)],
)


_HEADED_MARS = (
    Line("mars_network_ar", "MARS with a draft head, AR decoding", "mars_network", "ar", optional=True),
    verified("groups", 4, stage="mars_network"),
    *[mars("mars_network", 4, threshold) for threshold in (0.99, 0.95)],
)
PLAN = TablePlan(
    "adapter",
    "Masks that learn on a frozen model",
    (
        AR_SFT,
        *_LOSSLESS,
        *[
            Line(name, f"{words}, verified, groups (W = 4)", stage, _GROUPS.method, _GROUPS.options)
            for name, (words, stage) in _SIZES.items()
        ],
        *_WINDOWS,
        Line("gated_95", "AR SFT with an adapter (tau = .95)", "mars_gated", "mars", mars("mars", 4, 0.95).options),
        *_SURE,
        Line("ar_of_mars", "MARS, AR decoding", "mars", "ar"),
        _GROUPS,
        _LINEAR,
        mars("mars", 4, 0.95),
        *_HEADED_MARS,
        Line("ar_of_hard", "MARS at the adapter's rate, AR decoding", "mars_hard", "ar"),
        Line("hard_groups", "MARS at the adapter's rate, verified, groups (W = 4)", "mars_hard", _GROUPS.method,
            _GROUPS.options),
    ),
    own="Adapter",
)  # fmt: skip


def _unchanged(cells: Cells, plan: TablePlan) -> str:
    """How many answers of the lossless lines are as right and as long as those of AR SFT."""
    alone = done_cells(cells, AR_SFT.name)
    same = [
        (a, b) == (c, d)
        for name in (*[line.name for line in (*_LOSSLESS, *_WINDOWS)], *_SIZES)
        for benchmark, row in done_cells(cells, name).items()
        if (theirs := alone.get(benchmark))
        for a, b, c, d in zip(row.correct, row.emitted, theirs.correct, theirs.emitted, strict=True)
    ]
    said = (
        f"Of {len(same):,} answers with the adapter, by AR decoding and verified, {sum(same):,} are as right and as "
        "long as those of AR SFT alone to the same questions."
    )
    return said if same else ""


# ---- by rank and by tokens trained

_CURVES = {  # lines of the figure: what each was trained on, in times the tokens of MARS's training
    "adapter": {1: "gated_groups", 2: "gated_groups_2x"},
    "adapter of three times the rank": {1: "wide_groups", 2: "wide_groups_2x"},
    "MARS": {1: _GROUPS.name},
    "MARS at the adapter's rate": {1: "hard_groups"},
}


def _part_of_the_best(cells: Cells, plan: TablePlan) -> str:
    """What the adapters emit in % of MARS at their rate, all verified in groups."""
    benchmarks = shared_benchmarks(cells, plan)
    (_, best), *others = [(words, line_on(cells, found[1], benchmarks)) for words, found in reversed(_CURVES.items())]
    said = [f"{words} {100 * point[0].value / best[0].value:.0f} %" for words, point in others if best and point]
    if not best or not said:
        return ""
    return (
        f"Verified in groups, after as many tokens trained, in % of the {best[0].value:.2f} tokens/forward of MARS at "
        f"the adapter's rate: {', '.join(said)}."
    )


_more_accurate, _emits_more = partial(more_accurate, PLAN), partial(emits_more, PLAN)
_MARS_95, _HEADED_95 = (mars_name(stage, 4, 0.95) for stage in ("mars", "mars_network"))
_NETWORK, _NETWORK_99 = "mars_gated_network_groups_4", "mars_gated_network_0.99"
CLAIMS = (
    emits(
        PLAN, "gated_groups", Bound(low=1.0), "a", "An adapter alone emits several tokens per forward pass", check=True
    ),
    _more_accurate("gated_groups", AR_SFT.name, "a", "It changes no accuracy", margin=0.5, check=True),
    _emits_more(
        "gated_groups", _GROUPS.name, "b", "An adapter drafts better than MARS at the gentle rate of the tables",
        "adapter-drafts",
    ),
    _emits_more("hard_groups", "gated_groups", "c", "MARS at the adapter's rate drafts better still"),
    _more_accurate(AR_SFT.name, "ar_of_mars", "d", "Writing into the weights gently costs accuracy"),
    _more_accurate(AR_SFT.name, "ar_of_hard", "e", "Writing into them at the adapter's rate costs accuracy"),
    _emits_more("wide_groups", "gated_groups", "f", "Three times the rank drafts better", check=True),
    _emits_more("gated_groups_2x", "gated_groups", "g", "Twice the training drafts better", check=True),
    _emits_more(
        "mars_gated_markov_groups_4", "gated_groups", "h",
        "A table that tells masks of the guess before them drafts better",
    ),
    _emits_more(_NETWORK, "gated_groups", "h", "A small network does too"),
    _emits_more(
        _NETWORK, "hard_groups", "i", "With the network an adapter drafts better than MARS at the adapter's rate"
    ),
    _emits_more("mars_gated_network_groups_8", _NETWORK, "j", "Longer windows pay with it"),
    _emits_more(_NETWORK_99, "mars_gated_0.99", "k", "At tau = .99 it lets more tokens pass"),
    _more_accurate(
        _NETWORK_99, AR_SFT.name, "k", "What passes with it at tau = .99 costs less than a point of accuracy",
        margin=1.0,
    ),
    _emits_more("mars_network_groups", _GROUPS.name, "l", "Behind MARS's own masks a draft head drafts better too"),
    _more_accurate(_HEADED_95, _MARS_95, "l", "With it MARS loses less at tau = .95", "mends"),
    _emits_more(_HEADED_95, _MARS_95, "l", "With it more tokens pass at tau = .95"),
)  # fmt: skip
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS writes into all weights, so the tuned model is another one. A gated adapter acts on masks alone: every "
        "token is the frozen model's own, and verified decoding says what that says, sooner. Same data, steps "
        "and block size; the adapter has a rate of its own, and MARS is trained at it too. Adapters learn on masks as "
        "decoding shows them, aligned as the paper prints it; lines called MARS are trained as released, so what "
        "parts them is alignment as well."
    ),
    claims=CLAIMS,
    answers=("b", "c", "d", "i", "mends"),
    lines=(
        *(AR_SFT.name, "gated_groups", "mars_gated_markov_groups_4", _NETWORK, "mars_gated_network_groups_8"),
        *("mars_gated_0.99", _NETWORK_99, "ar_of_mars", _GROUPS.name, _MARS_95, _HEADED_95, "hard_groups"),
    ),
    figure="sizes",
    caption=(
        "Accuracy against tokens per forward pass, verified in groups: adapters of two ranks, trained as long as MARS "
        "and twice as long, with 95 % intervals; across, AR SFT with its interval as a band"
    ),
    curves={words: [*points.values()] for words, points in _CURVES.items()},
    reading=f"{HOW_TO_READ_ACCURACY} Verified lines emit the tokens of AR decoding of their own checkpoint.",
    tables=(accuracy_table, _unchanged, speed_table, _part_of_the_best),
    deviations=("The paper has no adapter: gated low-rank maps for masks are Apple's idea (arXiv 2507.11851).",),
)


STUDY = table_study(
    PAGE,
    asks="what does writing into the weights cost and buy, beside an adapter that changes no token?",
    place=3,
    in_paper=False,
    tally=PAGE.tally,
)
