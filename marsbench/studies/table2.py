"""Table 2: the accuracy of every training recipe when one token is generated per forward pass, beside lines of our own.

The page also says what training costs, as the paper's Appendix A does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Literal

from marsbench.findings.between_lines import as_accurate, emits, more_accurate
from marsbench.findings.cells import AR_OBJECTIVE, MARS_OBJECTIVE, latest_stages
from marsbench.findings.claims import ABSTRACT, TIMES, Claim, Measured, Section
from marsbench.line import Line, TrainedStage
from marsbench.paper import published
from marsbench.rendering.figures import differences_figure
from marsbench.rendering.sections import ABLATIONS_DEVIATION
from marsbench.rows.kinds import Row, StepCostRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, Interval, median_ratio
from marsbench.studies.lines import AR_SFT, ONE_TOKEN, mars, mars_name
from marsbench.studies.study import Item, TablePage

_ONE, _SURE = {"window": 4, **ONE_TOKEN}, {"window": 4, "threshold": 0.95}
PLAN = TablePlan(
    "2",  # of the paper: its key is "table2"
    "Accuracy when one token is generated per forward pass",
    (
        Line("base", "Base", stage="base", method="ar", published="base"),
        AR_SFT,
        Line("ar_sft_2x", "AR SFT (compute-matched)", "ar_sft_2x", "ar", {}, "ar_sft_10ep"),
        Line(
            "block_diffusion", "Block Diffusion (B = 4)", "block_diffusion", "block-diffusion", _ONE, "block_diffusion"
        ),
        Line(
            "block_diffusion_shifted", "Block Diffusion, predicted as in AR (B = 4)", "block_diffusion_shifted",
            "block-diffusion", _ONE, optional=True,
        ),
        Line("mars_no_sft", "MARS w/o SFT loss (B = 4)", "mars_no_sft", "mars", _ONE),
        Line("mars", "MARS (B = 4)", stage="mars", method="mars", options=_ONE, published="mars"),
        Line(
            "untrained_masks", "AR SFT, mask decoding (B = 4, tau = .95)", "ar_sft", "mars", _SURE,
            untrained_masks=True,
        ),
        Line(
            "untrained_masks_always", "AR SFT, mask decoding (B = 4, tau = 0)", "ar_sft", "mars",
            {"window": 4, "threshold": 0.0}, untrained_masks=True,
        ),
        Line("mars_95", "MARS (B = 4, tau = .95)", "mars", "mars", _SURE),
        *[replace(mars("mars_paper_alignment", 4, tau), optional=True) for tau in (None, 0.95)],
    ),
)  # fmt: skip
_ALIGNED, _ALIGNED_95 = (mars_name("mars_paper_alignment", 4, tau) for tau in (None, 0.95))
_more_accurate, _as_accurate, _emits = partial(more_accurate, PLAN), partial(as_accurate, PLAN), partial(emits, PLAN)
NOTHING_TO_TEACH = (
    "Fine-tuning adds almost nothing to the base here, and half of the benchmarks are near 100 %. At one token, MARS "
    "can only lose. The page regime has more training and another base."
)
_UNDER_TRAINED = "Block diffusion has 800 steps here. With 3,200 it is right nine times as often (page gains)."
CLAIMS = (
    _as_accurate(
        "mars", "ar_sft", "MARS at one token per forward pass matches AR SFT", "matches-ar-sft",
        untestable=NOTHING_TO_TEACH,
        beside=(
            ("in the paper's alignment", _more_accurate(_ALIGNED, "ar_sft")),
            ("over AR SFT trained twice as long", _more_accurate("mars", "ar_sft_2x")),
        ),
    ),
    _more_accurate(
        "ar_sft", "block_diffusion", "Block diffusion degrades the model", "diffusion", untestable=_UNDER_TRAINED,
        beside=(("if it predicts as AR does", _more_accurate("ar_sft", "block_diffusion_shifted")),),
    ),
    _emits(
        "untrained_masks", Bound(high=1.05), "Without MARS training, masks emit nothing", "untuned-masks",
        ours=True,
        beside=(("accuracy at tau = 0, over AR SFT", _more_accurate("untrained_masks_always", "ar_sft")),),
    ),
    _more_accurate(
        _ALIGNED, "mars", "MARS is more accurate in the paper's alignment than in the released one", "alignment",
        ours=True, beside=(("at tau = .95", _more_accurate(_ALIGNED_95, "mars_95")),),
    ),
)  # fmt: skip

# ---- the model and its training: claims that its checkpoints decide ----

APPENDIX_A = Section("the cost of training", appendix="A")


def _parameters(rows: Sequence[Row]) -> Measured:
    """Parameters of MARS over those of AR SFT: a count, so its interval is a point."""
    trained = latest_stages(rows)
    ours, ar = trained.get(TrainedStage("mars", 4)), trained.get(TrainedStage("ar_sft", None))
    if ours is None or ar is None or not ar.parameters:
        return Measured()
    ratio = ours.parameters / ar.parameters
    return Measured(Estimate(ratio, Interval(ratio, ratio), 1))


def _step(rows: Sequence[Row], part: Literal["seconds", "memory"]) -> Measured:
    """Time or memory of a MARS step over that of an AR step, batch by batch."""
    row = next((row for row in reversed(rows) if isinstance(row, StepCostRow)), None)
    if row is None or row.status != "done":
        return Measured()
    taken: Mapping[str, Sequence[float]] = row.seconds if part == "seconds" else row.memory
    return Measured(median_ratio(taken[MARS_OBJECTIVE], taken[AR_OBJECTIVE]) if taken else None)


def _published_hours(scale: str) -> float | None:
    hours = {row.method: row.value for row in published("A", scale=scale, metric="train_h200_hours")}
    return hours["mars"] / hours["ar_sft"] if hours else None


TRAINING_CLAIMS = (
    Claim(
        name="no-parameters", text="MARS adds no parameters", measure=_parameters, unit=TIMES,
        bound=Bound(low=1.0, high=1.0, closed=True), section=ABSTRACT, check=True,
    ),
    Claim(
        name="step-costs-twice", text="A training step of MARS costs about twice one of AR SFT",
        measure=partial(_step, part="seconds"), unit=TIMES, section=APPENDIX_A,
        bound=Bound(low=1.8, high=2.4), published=_published_hours,  # as published, give or take a tenth
        beside=(("memory of a step", Claim(measure=partial(_step, part="memory"), bound=Bound(), unit=TIMES)),),
    ),
)  # fmt: skip

STUDY = TablePage(
    kinds=(StepCostRow,),
    measure=lambda run: resolve_name("marsbench.running.training_cost:step_costs")(run),  # loaded when it is called
    in_world=True,
    timed=True,
    asks="does MARS keep its accuracy at one token per forward pass?",
    section=Section("Table 2", (4, 2)),
    holds=(Item(key="appendix-a", name="Appendix A", asks="what does training cost?", section=APPENDIX_A),),
    plan=PLAN,
    claims=CLAIMS,
    figure="differences",
    caption="Difference in accuracy to AR SFT in points, by benchmark, on the same questions",
    drawing=differences_figure("ar_sft", "ar_sft_2x", "mars", _ALIGNED, "mars_95"),
    deviations=("Block diffusion predicts each token at its own position, as BD3-LM does.", ABLATIONS_DEVIATION),
    prose_claims=TRAINING_CLAIMS,
)

# ---- the same recipes on questions no longer than in training ----

LENGTHS = TablePage(
    asks="what does MARS lose on questions that are no longer than in training?",
    order=2,
    in_paper=True,
    on="table2",
    plan=TablePlan(
        "lengths",
        "Questions no longer than in training",
        (AR_SFT, *[mars(stage, 4, tau) for tau in (None, 0.95) for stage in ("mars", "mars_paper_alignment")]),
        within_training=True,
        own="Lengths",
    ),
)
