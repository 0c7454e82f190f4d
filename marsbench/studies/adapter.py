"""Adapter: what writing into the model's weights costs and buys, beside an adapter that leaves the model as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from marsbench.findings.between_lines import emits_more, more_accurate
from marsbench.findings.cells import done_cells, latest_cells
from marsbench.line import Line
from marsbench.rendering.page import TablePage
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
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
_STRONG, _STRONG_WORDS = "mars_gated_network_strong", "an adapter and a network whose maps count sixteen times"
_STRONGER = (  # beside AR decoding of the very model below them, which may be another training of AR SFT
    Line(f"{_STRONG}_ar", f"AR SFT with {_STRONG_WORDS}, AR decoding", _STRONG, "ar", optional=True, block_size=8),
    *[drafting(_STRONG, _STRONG_WORDS, window) for window in (4, 8)],
)
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
        *_STRONGER,
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


def _unchanged(rows: Sequence[Row]) -> str:
    """How many answers of the lossless lines have the very tokens of AR SFT's, or are as right and long where older."""
    cells = latest_cells(rows)
    told, same = 0, 0
    own = {line.name: AR_SFT.name for line in (*_LOSSLESS, *_WINDOWS)} | dict.fromkeys(_SIZES, AR_SFT.name)
    for name, ar in (own | {line.name: _STRONGER[0].name for line in _STRONGER[1:]}).items():
        alone = done_cells(cells, ar)
        for benchmark, row in done_cells(cells, name).items():
            if (theirs := alone.get(benchmark)) and row.digests and theirs.digests:
                told += len(row.digests)
                same += sum(one == other for one, other in zip(row.digests, theirs.digests, strict=True))
    if not told:
        return ""
    return (
        f"Of {told:,} answers with the adapter, by AR decoding and verified, {same:,} have the very tokens of AR SFT's."
    )


_CURVES = {  # lines of the figure: what each was trained on, in times the tokens of MARS's training
    "adapter": {1: "gated_groups", 2: "gated_groups_2x"},
    "adapter of three times the rank": {1: "wide_groups", 2: "wide_groups_2x"},
    "MARS": {1: _GROUPS.name},
    "MARS at the adapter's rate": {1: "hard_groups"},
}


_more_accurate, _emits_more = partial(more_accurate, PLAN), partial(emits_more, PLAN)
_MARS_95, _HEADED_95 = (mars_name(stage, 4, 0.95) for stage in ("mars", "mars_network"))
_NETWORK, _NETWORK_99 = "mars_gated_network_groups_4", "mars_gated_network_0.99"
CLAIMS = (
    _emits_more(
        "gated_groups", _GROUPS.name, "An adapter drafts better than MARS at the gentle rate of the tables",
        "adapter-drafts",
        beside=(
            ("than MARS at the adapter's own rate", _emits_more("gated_groups", "hard_groups")),
            ("points that MARS loses there", _more_accurate("ar_of_hard", AR_SFT.name)),
        ),
    ),
    _emits_more(
        _NETWORK, "gated_groups", "A small network behind the masks drafts better", "head",
        beside=(
            ("a table", _emits_more("mars_gated_markov_groups_4", "gated_groups")),
            ("windows of 8 instead of 4", _emits_more("mars_gated_network_groups_8", _NETWORK)),
        ),
    ),
)  # fmt: skip
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS writes into all weights, so the tuned model is another one. A gated adapter acts on masks alone: every "
        "token is the frozen model's own, and verified decoding gives that model's own answers. Same data, steps "
        "and block size; the adapter has a rate of its own, and MARS is trained at it too. Adapters learn on masks as "
        "decoding shows them. MARS uses the released alignment and the adapter the paper's, so the comparison mixes "
        "two differences."
    ),
    claims=CLAIMS,
    lines=(
        *(AR_SFT.name, "gated_groups", "mars_gated_markov_groups_4", _NETWORK, "mars_gated_network_groups_8"),
        *[line.name for line in _STRONGER[1:]],
        *("mars_gated_0.99", _NETWORK_99, "ar_of_mars", _GROUPS.name, _MARS_95, _HEADED_95, "hard_groups"),
    ),
    figure="sizes",
    caption=(
        "Accuracy against tokens per forward pass, verified in groups: adapters of two ranks, trained as long as MARS "
        "and twice as long, with 95 % intervals; across, AR SFT with its interval as a band"
    ),
    curves={words: [*points.values()] for words, points in _CURVES.items()},
    more=(_unchanged,),
    deviations=("The paper has no adapter: gated low-rank maps for masks are Apple's idea (arXiv 2507.11851).",),
)


STUDY = table_study(
    PAGE,
    asks="what does writing into the weights cost and buy, beside an adapter that changes no token?",
    place=3,
    in_paper=False,
)
