"""Where the gain comes from: MARS against other ways to several tokens per forward pass at equal accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from marsbench.findings.between_lines import emits_more
from marsbench.findings.cells import Cells
from marsbench.findings.claims import Claim
from marsbench.rendering.figures import Labelled, labelled_figure, line_on, shared_benchmarks
from marsbench.rendering.page import TablePage
from marsbench.rows.kinds import TokenClassRow
from marsbench.running.plans import TablePlan
from marsbench.studies.gains.lines import ADAPTED, AR_OF_MARS, CHOSEN, HEADED, MEASURED, PLAN, with_choice
from marsbench.studies.lines import AR_SFT
from marsbench.studies.study import table_study

VERIFIED = {"verified_groups": "groups", "verified_linear": "linear"}
DRAFTED = "ar_sft_by_draft_ar_sft"
RIVALS = {
    "medusa_hard_3": "Medusa with a tree",
    "medusa_hard_1": "Medusa with a chain",
    DRAFTED: "speculative decoding",
    "lookup": "prompt lookup",
    "jacobi_of_mars": "Jacobi decoding",
}
_SHOWN = (CHOSEN.name, *VERIFIED, *RIVALS, ADAPTED.name, HEADED.name)


def _all_claims() -> Iterator[Claim]:
    groups = "verified_groups"

    def over(line: str, rivals: Iterable[str]) -> tuple[tuple[str, Claim], ...]:
        return tuple((f"than {RIVALS[rival]}", emits_more(PLAN, line, rival)) for rival in rivals)

    best, *others = RIVALS
    yield emits_more(
        PLAN, groups, best, f"Verified MARS (groups) emits more tokens per forward pass than {RIVALS[best]}",
        "verified-rivals", beside=over(groups, others),
    )  # fmt: skip
    yield emits_more(
        PLAN, HEADED.name, best, f"An adapter with a draft head emits more tokens per forward pass than {RIVALS[best]}",
        "headed-rivals", beside=over(HEADED.name, [DRAFTED, "lookup"]),
    )  # fmt: skip


CLAIMS = tuple(replace(claim, prepared=with_choice) for claim in _all_claims())


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    benchmarks = shared_benchmarks(cells, plan)
    shown = {line.label: point[0] for line in plan.lines if (point := line_on(cells, line.name, benchmarks))}
    return labelled_figure([Labelled("tokens per forward pass", {"": shown})], path_stem)


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS, verified and with a threshold, against other ways to emit several tokens per forward pass. Lines with "
        "tau may lose accuracy, and no tau between .95 and 1 was measured here; all others emit the very tokens of AR "
        "decoding of their own checkpoint. **Tokens per forward pass is not speed:** a round of speculative decoding "
        "also costs forward passes of a second model, and a verified forward covers up to 16 positions; the page of "
        "speed has tokens per second. Medusa and the draft model are trained at the rate at which they draft better."
    ),
    claims=CLAIMS,
    lines=(AR_SFT.name, AR_OF_MARS, *_SHOWN),
    figure="speed",
    caption="Tokens per forward pass, all benchmarks weighing the same, with 95 % intervals",
    drawing=_draw,
    prepared=with_choice,
)


STUDY = table_study(
    PAGE,
    name="Gains",
    asks="where does the gain come from, and what is left of it at equal accuracy?",
    place=2,
    plan=MEASURED,
    kinds=(TokenClassRow,),
)
