"""Adapter: what writing into the model's weights costs and buys, beside an adapter that leaves the model as it is."""

from __future__ import annotations

from collections.abc import Iterator

from marsbench.findings.cells import Cells, done_cells
from marsbench.findings.claims import AccuracyClaim, SpeedClaim, TokensClaim, counted
from marsbench.findings.seeds import BySeed, of_all_seeds
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY, accuracy_table, speed_table
from marsbench.rendering.page import Page
from marsbench.rows.kinds import EvaluationRow
from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import AR_SFT, mars, verified
from marsbench.studies.study import Study

_GROUPS, _LINEAR = verified("groups", 4), verified("linear", 5, 0.5)
_LOSSLESS = {
    "gated_ar": ("AR decoding", "ar", {}),
    "gated_groups": ("verified, groups (W = 4)", _GROUPS.method, _GROUPS.options),
    "gated_linear": ("verified, linear (W = 5)", _LINEAR.method, _LINEAR.options),
}
PLAN = TablePlan(
    "adapter",
    "Masks that learn on a frozen model",
    (
        AR_SFT,
        *[
            Arm(name, f"AR SFT with an adapter, {words}", "mars_gated", method, options, trained_block_size=4)
            for name, (words, method, options) in _LOSSLESS.items()
        ],
        Arm("gated_95", "AR SFT with an adapter (tau = .95)", "mars_gated", "mars", mars("mars", 4, 0.95).options),
        Arm("ar_of_mars", "MARS, AR decoding", "mars", "ar"),
        _GROUPS,
        _LINEAR,
        mars("mars", 4, 0.95),
        Arm("ar_of_hard", "MARS at the adapter's rate, AR decoding", "mars_hard", "ar"),
        Arm("hard_groups", "MARS at the adapter's rate, verified, groups (W = 4)", "mars_hard", _GROUPS.method,
            _GROUPS.options, trained_block_size=4),
    ),
    own="Adapter",
)  # fmt: skip


def _unchanged(cells: Cells, plan: TablePlan) -> str:
    """How many answers of the lossless lines are as right and as long as those of AR SFT."""
    alone = done_cells(cells, AR_SFT.name)
    same = asked = 0
    for name in _LOSSLESS:
        for benchmark, row in done_cells(cells, name).items():
            theirs = alone.get(benchmark)
            if theirs is not None:
                asked += len(row.correct)
                same += sum(a == b for a, b in zip(_marks(row), _marks(theirs), strict=True))
    if not asked:
        return ""
    return (
        f"Of {asked:,} answers with the adapter, by AR decoding and verified, {same:,} are as right and as long as "
        "those of AR SFT alone to the same questions."
    )


def _marks(row: EvaluationRow) -> Iterator[tuple[float, int]]:
    return zip(row.correct, row.emitted, strict=True)


PAGE = Page(
    plan=PLAN,
    opening=(
        "MARS writes into all weights, so the tuned model is another one. A gated adapter acts on masks alone: every "
        "token is the frozen model's own, and verified decoding says what that says, sooner. Same data, steps "
        "and block size; the adapter has a rate of its own, and MARS is trained at it too."
    ),
    claims=(
        TokensClaim(
            "a", "An adapter alone emits several tokens per forward pass", "gated_groups", bound=1.0, check=True
        ),
        AccuracyClaim("a", "It changes no accuracy", "gated_groups", AR_SFT.name, margin=0.5, check=True),
        SpeedClaim("b", "It drafts better than MARS at the gentle rate of the tables", "gated_groups", _GROUPS.name),
        SpeedClaim("c", "MARS at the adapter's rate drafts better still", "hard_groups", "gated_groups"),
        AccuracyClaim("d", "Writing into the weights gently costs accuracy", AR_SFT.name, "ar_of_mars"),
        AccuracyClaim("e", "Writing into them at the adapter's rate costs accuracy", AR_SFT.name, "ar_of_hard"),
    ),
    reading=f"{HOW_TO_READ_ACCURACY} Verified lines emit the tokens of AR decoding of their own checkpoint.",
    tables=(accuracy_table, _unchanged, speed_table),
    published=lambda plan: "",
    deviations=("The paper has no adapter: gated low-rank maps for masks are Apple's idea (arXiv 2507.11851).",),
)


def _tally(seeds: BySeed) -> str:
    claims, checks = (
        [of_all_seeds(claim, PLAN, seeds).verdict for claim in PAGE.claims if claim.check == kind]
        for kind in (False, True)
    )
    return counted(claims, checks)


STUDY = Study(
    key="adapter",
    name="Adapter",
    asks="what does writing into the weights cost and buy, beside an adapter that changes no token?",
    session="A gated adapter beside MARS: accuracy and tokens per forward pass; writes reports/adapter.md.",
    place=3,
    in_paper=False,
    plan=PLAN,
    render=PAGE.render,
    draw=PAGE.draw,
    tally=_tally,
)
