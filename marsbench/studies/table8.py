"""The page of thresholds: Tables 4 and 8, and Figures 3 and 6.

The paper draws Figure 6 (appendix D) without numbers; here the two benchmarks of its Figure 3 are asked.
"""

from pathlib import Path
from typing import Any

from marsbench.findings.between_lines import as_accurate, emits, emits_more, lies_above, more_accurate
from marsbench.findings.cells import columns
from marsbench.findings.claims import Claim, Section
from marsbench.line import Line
from marsbench.paper import published
from marsbench.rendering.figures import Seeds, panels_figure, speed_panel
from marsbench.rendering.sections import ABLATIONS_DEVIATION
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.studies.lines import AR_SFT, BLOCK_SIZES, HEADED_MARS, MARS_STAGES, TAUS, mars, mars_name, short
from marsbench.studies.study import Item, TablePage

_SMALLEST, *_LARGER = BLOCK_SIZES
SURE, UNSURE = TAUS[1], TAUS[-1]
_ONE_TOKEN, _SURE = (mars_name("mars", _SMALLEST, tau) for tau in (None, SURE))

PLAN = TablePlan(
    "8",
    "Accuracy against tokens per forward pass, by threshold and block size, with and without the SFT loss",
    (
        AR_SFT,
        *[mars(stage, size, tau) for stage in MARS_STAGES for size in BLOCK_SIZES for tau in TAUS],
        *[mars("mars_network", _SMALLEST, tau) for tau in TAUS],  # with a draft head, which the paper does not have
    ),
    benchmarks=("gsm8k", "humaneval"),
)
FIGURE3 = Section("Figure 3", (4, 3))


def _by_threshold(stage: str, size: int) -> tuple[str, ...]:
    return tuple(mars_name(stage, size, tau) for tau in TAUS)


def _higher(size: int, *said: str, **more: Any) -> Claim:
    full, without = (_by_threshold(stage, size) for stage in ("mars", "mars_no_sft_released"))
    return lies_above(PLAN, full, without, *said, section=FIGURE3, **more)


def _draw(seeds: Seeds, plan: TablePlan, path_stem: Path) -> list[Path]:
    panels, known = [], {line.name for line in plan.lines}
    for benchmark, title in columns(plan).items():
        for size in BLOCK_SIZES:
            # Colours go by place, so what one panel alone has comes last.
            shown = (*reversed(MARS_STAGES.items()), *HEADED_MARS.items())
            curves = {label: _by_threshold(stage, size) for stage, label in shown if mars_name(stage, size) in known}
            panels.append(speed_panel(seeds, plan, f"{title}, B = {size}", curves, [benchmark]))
    return panels_figure(panels, path_stem, across=len(BLOCK_SIZES))


STUDY = TablePage(
    asks="how do accuracy and tokens per forward pass depend on the threshold?",
    section=Section("Table 8", appendix="B"),
    holds=(
        Item(
            key="figure3", name="Figure 3", asks="is MARS more accurate with the SFT loss, at equal speed?",
            anchor="#figure-3", section=FIGURE3,
        ),
    ),
    plan=PLAN,
    claims=(
        _higher(
            _SMALLEST, f"With the SFT loss, accuracy is higher at equal speed (B = {_SMALLEST})", "higher",
            beside=tuple((f"B = {size}", _higher(size)) for size in _LARGER),
        ),
        more_accurate(
            PLAN, _SURE, mars_name("mars", _SMALLEST, UNSURE),
            f"tau = .5 costs accuracy against tau = .95 (B = {_SMALLEST})", "low-tau-costs",
            beside=(("change in tokens/forward", emits_more(PLAN, mars_name("mars", _SMALLEST, UNSURE), _SURE)),),
        ),
    ),
    lines=(
        *(AR_SFT.name, *[mars_name("mars", size, tau) for size in BLOCK_SIZES for tau in (None, SURE, UNSURE)]),
        *(mars_name("mars_no_sft", 4), mars_name("mars_no_sft_released", 4)),
    ),
    figure="pareto",
    figure_title="Figure 3",
    caption=(
        "Accuracy by tokens per forward pass: one token at the left, the lowest tau at the right. Bars and the "
        "band of AR SFT are 95 % intervals"
    ),
    drawing=_draw,
    deviations=(ABLATIONS_DEVIATION,),
)  # fmt: skip

PLAN4 = TablePlan(
    "4",
    "Accuracy and tokens per forward pass at tau = .95, by block size",
    (AR_SFT, *[mars("mars", size, threshold) for threshold in (None, SURE) for size in BLOCK_SIZES]),
)


def _published_level(scale: str) -> float | None:
    """The paper's average at tau = .95 over its AR SFT's, which stands in Table 2."""
    sure = published("4", scale=scale, benchmark="average", metric="accuracy", block_size=_SMALLEST)
    sft = published("2", scale=scale, benchmark="average", metric="accuracy", method="ar_sft_5ep")
    return sure[0].value - sft[0].value if sure and sft else None


_LARGER_SURE = {size: mars_name("mars", size, SURE) for size in _LARGER}
_MIDDLE = _LARGER[0]
CLAIMS4 = (
    emits(
        PLAN4, _SURE, Bound(low=1.0), f"MARS emits several tokens per forward pass (B = {_SMALLEST})",
        "several-tokens", check=True,
        beside=tuple((f"B = {size}", emits(PLAN4, line, Bound())) for size, line in _LARGER_SURE.items()),
    ),
    emits_more(
        PLAN4, _LARGER_SURE[_MIDDLE], _SURE, f"B = {_MIDDLE} emits more tokens per forward pass than B = {_SMALLEST}",
        "more-tokens",
    ),
    more_accurate(
        PLAN4, _SURE, _LARGER_SURE[_MIDDLE], f"B = {_MIDDLE} costs some accuracy against B = {_SMALLEST}", "costs",
    ),
    as_accurate(
        PLAN4, _SURE, "ar_sft", f"At tau = .95, MARS with B = {_SMALLEST} stays level with AR SFT", "level",
        beside=(
            *[(f"B = {size}", more_accurate(PLAN4, line, "ar_sft")) for size, line in _LARGER_SURE.items()],
            ("against its own one token", more_accurate(PLAN4, _SURE, _ONE_TOKEN)),
        ),
        published=_published_level,
    ),
)  # fmt: skip
TABLE4 = TablePage(
    asks="how many tokens per forward pass, at what accuracy, by block size?",
    section=Section("Table 4", (4, 4)),
    on="table8",
    plan=PLAN4,
    claims=CLAIMS4,
)

METRIC_THRESHOLDS: dict[str, tuple[float, ...]] = {  # surest first; entropy in nats
    "probability": TAUS[1:],
    "entropy": (0.05, 0.2, 0.4, 0.7, 1.0, 1.5),
    "margin": (0.9, 0.8, 0.7, 0.5, 0.3),
}


def _line(metric: str, threshold: float) -> Line:
    """MARS (B = 4) that accepts tokens by one of the paper's three metrics; probability is its default."""
    options = {"window": 4, "threshold": threshold} | ({} if metric == "probability" else {"metric": metric})
    sign = "<=" if metric == "entropy" else ">="
    return Line(f"{metric}_{threshold:g}", f"MARS, {metric} {sign} {short(threshold)}", "mars", "mars", options)


_BY_METRIC = {metric: [_line(metric, at) for at in thresholds] for metric, thresholds in METRIC_THRESHOLDS.items()}
_CURVES = {metric: (_ONE_TOKEN, *[line.name for line in lines]) for metric, lines in _BY_METRIC.items()}
PLAN6 = TablePlan(
    "6",
    "Three metrics of confidence, each at several thresholds",
    (AR_SFT, mars("mars", 4), *[line for lines in _BY_METRIC.values() for line in lines]),
    benchmarks=("gsm8k", "humaneval"),
    figure=True,
)
FIGURE6 = TablePage(
    asks="which metric of confidence is best?",
    section=Section("Figure 6", appendix="D"),
    on="table8",
    plan=PLAN6,
    claims=tuple(
        lies_above(
            PLAN6, _CURVES["probability"], _CURVES[metric],
            f"Probability, the paper's default, is no worse than {metric}", f"no-worse-than-{metric}", margin=1.0,
        )
        for metric in ("entropy", "margin")
    ),
    lines=(AR_SFT.name, _ONE_TOKEN, *[lines[at].name for lines in _BY_METRIC.values() for at in (0, 2, -1)]),
    figure="metrics",
    figure_title="Figure 6",
    caption=(
        "Accuracy by tokens per forward pass, for each metric of confidence and threshold. Bars and the band of AR "
        "SFT are 95 % intervals"
    ),
    drawing=lambda seeds, plan, path_stem: panels_figure(
        [speed_panel(seeds, plan, title, _CURVES, [name]) for name, title in columns(plan).items()], path_stem, across=2
    ),
)  # fmt: skip
