"""Table 4: accuracy and tokens per forward pass at tau = .95, by block size.

Lines of our own stand above the paper's: AR SFT, and the same checkpoints at one token per forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from marsbench.findings.between_lines import as_accurate, emits, emits_more, more_accurate
from marsbench.findings.claims import Claim, Section
from marsbench.paper import published
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.studies.lines import AR_SFT, BLOCK_SIZES, mars, mars_name
from marsbench.studies.study import table_study

THRESHOLD = 0.95
PLAN = TablePlan(
    "4",
    "Accuracy and tokens per forward pass at tau = .95, by block size",
    (AR_SFT, *[mars("mars", size, threshold) for threshold in (None, THRESHOLD) for size in BLOCK_SIZES]),
)


UNDER_TRAINED = (
    "MARS is under-trained here for large blocks: ten times the rate takes B = 8 from 1.24 to 2.31 tokens per forward "
    "pass (page regime)."
)


def _claims() -> Iterator[Claim]:
    smallest, middle, largest = BLOCK_SIZES
    sure = {size: mars_name("mars", size, THRESHOLD) for size in BLOCK_SIZES}
    yield emits(
        PLAN, sure[smallest], Bound(low=1.0), f"MARS emits several tokens per forward pass (B = {smallest})",
        "several-tokens", check=True,
        beside=tuple((f"B = {size}", emits(PLAN, sure[size], Bound())) for size in (middle, largest)),
    )  # fmt: skip
    text = f"B = {middle} emits more tokens per forward pass than B = {smallest}"
    yield emits_more(PLAN, sure[middle], sure[smallest], text, "more-tokens", untestable=UNDER_TRAINED)
    text = f"B = {middle} costs some accuracy against B = {smallest}"
    yield more_accurate(PLAN, sure[smallest], sure[middle], text, "costs", untestable=UNDER_TRAINED)
    yield as_accurate(
        PLAN, sure[smallest], "ar_sft", f"At tau = .95, MARS with B = {smallest} stays level with AR SFT", "level",
        beside=(
            *[(f"B = {size}", more_accurate(PLAN, sure[size], "ar_sft")) for size in (middle, largest)],
            ("against its own one token", more_accurate(PLAN, sure[smallest], mars_name("mars", smallest))),
        ),
        published=_published_level,
    )  # fmt: skip


def _published_level(scale: str) -> float | None:
    """The paper's average at tau = .95 over its AR SFT's, which stands in Table 2."""
    sure = published("4", scale=scale, benchmark="average", metric="accuracy", block_size=BLOCK_SIZES[0])
    sft = published("2", scale=scale, benchmark="average", metric="accuracy", method="ar_sft_5ep")
    return sure[0].value - sft[0].value if sure and sft else None


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS at three block sizes, as in the MARS paper's Table 4 (arXiv 2604.07023), decoded greedily and scored by "
        "one program. The lines without tau are ours, for comparison."
    ),
    claims=tuple(_claims()),
)

STUDY = table_study(
    PAGE,
    asks="how many tokens per forward pass, at what accuracy, by block size?",
    section=Section("Table 4", (4, 4)),
    on="table8",
)
