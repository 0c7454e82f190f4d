"""Table 2: the accuracy of every training recipe when one token is generated per forward pass.

Three lines of our own stand below the paper's: mask decoding without MARS training, at a threshold and always, and
MARS with a threshold. The page also says what training costs, as the paper's Appendix A does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from marsbench.findings.cells import AR_OBJECTIVE, MARS_OBJECTIVE, latest_stages, latest_step_cost
from marsbench.findings.claims import TIMES, AccuracyClaim, TokensClaim, number
from marsbench.findings.paper_claims import ABSTRACT, PaperClaim, found
from marsbench.paper import published
from marsbench.rendering.deviations import NO_SFT_DEVIATION
from marsbench.rendering.figures import accuracy_figure
from marsbench.rendering.page import Page
from marsbench.rows.kinds import Row
from marsbench.running.plans import Arm, TablePlan, TrainedStage
from marsbench.statistics.intervals import Estimate, Interval, Verdict, above, median_ratio, within
from marsbench.studies.lines import AR_SFT, ONE_TOKEN, mars
from marsbench.studies.study import Item, table_study

_BLOCKS = {"block_size": 4}
PLAN = TablePlan(
    "2",
    "Accuracy when one token is generated per forward pass",
    (
        Arm("base", "Base", "base", "ar", {}, "base"),
        AR_SFT,
        Arm("ar_sft_2x", "AR SFT (compute-matched)", "ar_sft_2x", "ar", {}, "ar_sft_10ep"),
        Arm(
            "block_diffusion", "Block Diffusion (B = 4)", "block_diffusion", "block-diffusion",
            {**_BLOCKS, **ONE_TOKEN}, "block_diffusion",
        ),
        Arm(
            "mars_no_sft", "MARS w/o SFT loss (B = 4)", "mars_no_sft", "mars", {**_BLOCKS, **ONE_TOKEN}
        ),
        Arm("mars", "MARS (B = 4)", "mars", "mars", {**_BLOCKS, **ONE_TOKEN}, "mars"),
        Arm(
            "untrained_masks", "AR SFT, mask decoding (B = 4, tau = .95)", "ar_sft", "mars",
            {**_BLOCKS, "threshold": 0.95}, untrained_masks=True,
        ),
        Arm(
            "untrained_masks_always", "AR SFT, mask decoding (B = 4, tau = 0)", "ar_sft", "mars",
            {**_BLOCKS, "threshold": 0.0}, untrained_masks=True,
        ),
        Arm("mars_95", "MARS (B = 4, tau = .95)", "mars", "mars", {**_BLOCKS, "threshold": 0.95}),
    ),
    step_cost=True,
    elsewhere=(mars("mars_no_sft_released", 4),),  # the paper's ablation; Table 3 measures it
)  # fmt: skip
CLAIMS = (
    AccuracyClaim(
        "a", "MARS at one token per forward pass matches AR SFT", "mars", "ar_sft", margin=2.0, in_abstract=True
    ),
    AccuracyClaim("a", "MARS at one token per forward pass exceeds AR SFT", "mars", "ar_sft", in_abstract=True),
    AccuracyClaim("b", "More AR training does not explain it", "mars", "ar_sft_2x"),
    AccuracyClaim("c", "Block diffusion degrades the model", "ar_sft", "block_diffusion"),
    AccuracyClaim("d", "MARS without the SFT loss is worse", "mars", "mars_no_sft"),
    TokensClaim("e", "Reported elsewhere: it needs no training, untuned masks speed up too", "untrained_masks", 1.05),
    AccuracyClaim(
        "e", "Reported elsewhere: what untuned masks say is right", "untrained_masks_always", "ar_sft", margin=2.0
    ),
    TokensClaim("f", "Ours: MARS emits several tokens per forward pass", "mars_95", bound=1.0, check=True),
    AccuracyClaim("f", "Ours: these cost little accuracy", "mars_95", "mars", margin=2.0),
)
PAGE = Page(
    plan=PLAN,
    opening=(
        "Every training recipe of the MARS paper's Table 2 (arXiv 2604.07023), trained, decoded greedily and "
        "scored by one program."
    ),
    claims=CLAIMS,
    figure="accuracy",
    caption="Accuracy per benchmark and line, with 95 % intervals",
    drawing=accuracy_figure,
    deviations=("Block diffusion predicts every token in place, as BD3-LM does.", NO_SFT_DEVIATION),
)

# ---- the model and its training: claims that its checkpoints decide ----

APPENDIX_A = "Appendix A: the cost of training"
_ABOUT_TWICE = 1.5, 2.5


def _parameters(rows: Sequence[Row]) -> Estimate | None:
    """Parameters of MARS over those of AR SFT: a count, without an interval to speak of."""
    trained = latest_stages(rows)
    ours, ar = trained.get(TrainedStage("mars", 4)), trained.get(TrainedStage("ar_sft", None))
    if ours is None or ar is None or not ar.parameters:
        return None
    ratio = ours.parameters / ar.parameters
    return Estimate(ratio, Interval(ratio, ratio), 1)


def _is_one(interval: Interval) -> Verdict:
    return "supported" if interval == Interval(1.0, 1.0) else "not supported"


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


_about_twice, _more = partial(within, low=_ABOUT_TWICE[0], high=_ABOUT_TWICE[1]), partial(above, bound=1.0)
TRAINING_CLAIMS = (
    PaperClaim(
        item="abstract",
        page=PLAN.key,
        text="MARS adds no parameters",
        tested="parameters of MARS over those of AR SFT = 1",
        unit=TIMES,
        judge=lambda rows: found(_parameters(rows), TIMES, _is_one),
        decide=_is_one,
        counts="checkpoint",
        check=True,
        section=ABSTRACT,
        in_abstract=True,
    ),
    PaperClaim(
        item="appendix-a",
        page=PLAN.key,
        text="A training step of MARS costs about twice one of AR SFT",
        tested=f"time of a MARS step over an AR step, from {_ABOUT_TWICE[0]:g} to {_ABOUT_TWICE[1]:g}",
        unit=TIMES,
        judge=lambda rows: found(_step(rows, "seconds"), TIMES, _about_twice),
        decide=_about_twice,
        published=_published_hours,
        counts="batches",
        section=APPENDIX_A,
    ),
    PaperClaim(
        item="appendix-a",
        page=PLAN.key,
        text="Training MARS takes more memory at its peak than AR SFT",
        tested="bytes that a MARS step must hold over those of an AR step > 1",
        unit=TIMES,
        judge=lambda rows: found(_step(rows, "memory"), TIMES, _more),
        decide=_more,
        counts="batches",
        check=True,
        section=APPENDIX_A,
    ),
)

STUDY = table_study(
    PAGE,
    asks="does MARS keep its accuracy at one token per forward pass?",
    section="Section 4.2: Table 2",
    session="Reproduce the paper's Table 2 (quality of every recipe); writes reports/table2.md.",
    more_claims=TRAINING_CLAIMS,
    holds=(
        Item(
            key="appendix-a",
            name="Appendix A",
            asks="what does training cost?",
            anchor="#training",
            section=APPENDIX_A,
            session="Reproduce the paper's Appendix A (the cost of training); writes reports/table2.md.",
        ),
    ),
)
