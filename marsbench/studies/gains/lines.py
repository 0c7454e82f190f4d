"""The lines of the page on where the gain comes from: MARS, lossless MARS, and other ways to several tokens."""

from __future__ import annotations

from dataclasses import replace

from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import AR_SFT, THRESHOLDS, adapted, headed, mars, mars_name, speculative, verified


def _medusa(width: int, shape: str) -> Arm:
    """Medusa, whose heads sit on the frozen AR SFT model."""
    return Arm(f"medusa_{width}", f"Medusa, {shape}", "medusa", "medusa", {"tree_width": width})


ADAPTED = replace(adapted("groups", 4), optional=True)  # rows of a scale may be older than its line
HEADED = headed("network", 4)
MEASURED = TablePlan(
    "gains",
    "What the paper did not test",
    (
        AR_SFT,
        Arm("ar_of_mars", "MARS, AR decoding", "mars", "ar"),
        *[mars("mars", 4, threshold) for threshold in THRESHOLDS],
        verified("linear", 5, 0.5),
        verified("groups", 4),
        Arm("lookup", "MARS, prompt lookup", "mars", "prompt-lookup", {"draft_length": 4}),
        Arm("jacobi_of_mars", "MARS, Jacobi decoding", "mars", "jacobi", {"block_size": 4}),
        _medusa(1, "a chain"),
        _medusa(3, "a tree"),
        replace(speculative("ar_sft", "draft_ar_sft"), label="AR SFT, speculative decoding", published=None),
        ADAPTED,
        HEADED,
    ),
    own="Where the gain comes from",
)
CLASSED = next(arm for arm in MEASURED.arms if arm.name == mars_name("mars", 4, 0.95))  # whose tokens are classed

# The line that is worked out: MARS whose tau was chosen on other questions.
AR_OF_MARS = "ar_of_mars"
CURVE = (AR_OF_MARS, *[mars_name("mars", 4, threshold) for threshold in THRESHOLDS])  # what tau is chosen from
CHOSEN = Arm("mars_chosen", "MARS (B = 4, tau chosen on other questions)", "mars", "mars", {"block_size": 4})
_AFTER = 1 + max(number for number, arm in enumerate(MEASURED.arms) if arm.name in CURVE)
PLAN = replace(MEASURED, arms=(*MEASURED.arms[:_AFTER], CHOSEN, *MEASURED.arms[_AFTER:]))  # with what is worked out
