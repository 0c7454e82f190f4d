"""Adapter: MARS, which changes the model's weights, beside an adapter that leaves the model as it is."""

from collections.abc import Sequence
from functools import partial

from marsbench.findings.between_lines import emits_more, more_accurate
from marsbench.findings.cells import done_cells, latest_cells, same_answers
from marsbench.line import Line
from marsbench.rendering.figures import accuracy_figure
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import AR_SFT, HEADS, drafting, headed, mars, mars_name, short, verified
from marsbench.studies.study import TablePage

_GROUPS, _LINEAR = verified("groups", 4), verified("linear", 5, 0.5)
_LOSSLESS = (
    Line("gated_ar", "AR SFT with an adapter, AR decoding", "mars_gated", "ar"),
    verified("groups", 4, stage="mars_gated"),
    verified("linear", 5, 0.5, stage="mars_gated"),
)
_SIZES = [verified("groups", 4, stage=stage) for stage in ("mars_gated_2x", "mars_gated_wide", "mars_gated_wide_2x")]
_WINDOWS = (drafting("mars_gated", "an adapter", 8), *[headed(kind, window) for window in (4, 8) for kind in HEADS])
_STRONG, _STRONG_WORDS = "mars_gated_network_strong", "an adapter and a network whose maps count sixteen times"
_STRONGER = (  # beside AR decoding of their own base, which may be another training of AR SFT
    Line(f"{_STRONG}_ar", f"AR SFT with {_STRONG_WORDS}, AR decoding", _STRONG, "ar", optional=True, block_size=8),
    *[drafting(_STRONG, _STRONG_WORDS, window) for window in (4, 8)],
)
_SURE = tuple(  # not verified: masks decide, four positions per forward pass
    Line(
        f"{stage}_{tau:g}", f"AR SFT with {words} (tau = {short(tau)})", stage, "mars",
        {"window": 4, "threshold": tau}, optional=True,
    )
    for stage, words, taus in (
        ("mars_gated", "an adapter", (0.99,)),
        *[(f"mars_gated_{kind}", f"an adapter and {words} behind it", (0.99, 0.95)) for kind, words in HEADS.items()],
    )
    for tau in taus
)  # fmt: skip
PLAN = TablePlan(
    "adapter",
    "An adapter for masks on a frozen model",
    (
        AR_SFT,
        *_LOSSLESS,
        *_SIZES,
        *_WINDOWS,
        *_STRONGER,
        Line("gated_95", "AR SFT with an adapter (tau = .95)", "mars_gated", "mars", mars("mars", 4, 0.95).options),
        *_SURE,
        Line("ar_of_mars", "MARS, AR decoding", "mars", "ar"),
        _GROUPS,
        _LINEAR,
        mars("mars", 4, 0.95),
        Line("mars_network_ar", "MARS with a draft head, AR decoding", "mars_network", "ar", optional=True),
        verified("groups", 4, stage="mars_network"),
        *[mars("mars_network", 4, threshold) for threshold in (0.99, 0.95)],
        Line("ar_of_hard", "MARS at the adapter's rate, AR decoding", "mars_hard", "ar"),
        verified("groups", 4, stage="mars_hard"),
    ),
    own="Adapter",
)


def _unchanged(rows: Sequence[Row]) -> str:
    """How many answers of the lossless lines have exactly the tokens of AR decoding of their base."""
    cells = latest_cells(rows)
    own = {line.name: AR_SFT.name for line in (*_LOSSLESS, *_WINDOWS, *_SIZES)}
    own |= {line.name: _STRONGER[0].name for line in _STRONGER[1:]}
    counts = [same_answers(done_cells(cells, name), done_cells(cells, ar)) for name, ar in own.items()]
    same, told = map(sum, zip(*counts, strict=True))
    what = f"Of {told:,} answers with an adapter, by AR decoding or verified"
    return f"{what}, {same:,} have exactly the tokens of AR SFT." if told else ""


_more_accurate, _emits_more = partial(more_accurate, PLAN), partial(emits_more, PLAN)
_MARS_95, _HEADED_95 = (mars_name(stage, 4, 0.95) for stage in ("mars", "mars_network"))
_NETWORK, _NETWORK_99 = "mars_gated_network_groups_4", "mars_gated_network_0.99"
CLAIMS = (
    _emits_more(
        "gated_groups", _GROUPS.name, "An adapter drafts better than MARS at the tables' learning rate",
        "adapter-drafts",
        beside=(
            ("than MARS at the adapter's own rate", _emits_more("gated_groups", "hard_groups")),
            ("MARS minus AR SFT there, points", _more_accurate("ar_of_hard", AR_SFT.name)),
        ),
    ),
    _emits_more(
        _NETWORK, "gated_groups", "An adapter drafts better with a small network behind it", "head",
        beside=(
            ("with a table", _emits_more("mars_gated_markov_groups_4", "gated_groups")),
            ("window 8 over window 4", _emits_more("mars_gated_network_groups_8", _NETWORK)),
        ),
    ),
)  # fmt: skip

STUDY = TablePage(
    asks="does MARS draft better than an adapter that leaves the model as it is?",
    order=3,
    plan=PLAN,
    claims=CLAIMS,
    lines=(
        *(AR_SFT.name, "gated_groups", "mars_gated_markov_groups_4", _NETWORK, "mars_gated_network_groups_8"),
        *[line.name for line in _STRONGER[1:]],
        *("mars_gated_0.99", _NETWORK_99, "ar_of_mars", _GROUPS.name, _MARS_95, _HEADED_95, "hard_groups"),
    ),
    figure="sizes",
    caption=(
        "Accuracy by tokens per forward pass, verified in groups: adapters of two ranks, trained as long as MARS and "
        "twice as long. Bars are 95 % intervals; the band is AR SFT with its interval"
    ),
    drawing=accuracy_figure(
        {  # adapters trained as long as MARS, and twice as long
            "adapter": ("gated_groups", "gated_2x_groups"),
            "adapter of three times the rank": ("wide_groups", "wide_2x_groups"),
            "MARS": (_GROUPS.name,),
            "MARS at the adapter's rate": ("hard_groups",),
        }
    ),
    more=(_unchanged,),
    deviations=("The paper has no adapter: gated low-rank maps for masks are Apple's idea (arXiv 2507.11851).",),
)
