"""No page hangs on how a claim is worded: every sentence is rewritten, and nothing but that sentence changes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from made_up import PAGES, render
from test_claims_figure import drawn, marks, rows_of

from marsbench.findings.claims import Claim, Judged, judge_all
from marsbench.findings.collection import Collection, collect
from marsbench.overview import claims_page, index
from marsbench.overview.front_door import front_door
from marsbench.rendering.page import TablePage
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.studies import pages, regime, studies

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"


def rewritten(claim: Claim, number: int) -> Claim:
    """The claim in other words, which hold all that a page might look for."""
    text, compared = (f"<{kind} {number}: Ours: b at batch 7 > 0, point, 9.9 times" for kind in ("text", "compared"))
    return replace(claim, text=f"{text}>", compared=f"{compared}>")


def in_its_words(text: str, claims: list[Claim]) -> str:
    """A page of rewritten claims with their own sentences in it again, whatever the width of its columns."""
    for number, claim in enumerate(claims):
        other = rewritten(claim, number)
        text = text.replace(other.text, claim.text).replace(other.compared, claim.compared)
    assert "b at batch 7" not in text
    return flat(text)


def flat(text: str) -> str:
    return re.sub(r"-{2,}", "--", re.sub(r"\s+", " ", text))


@cache
def collections() -> list[Collection]:
    return collect(ROOT, "mini", pages())


@cache
def claims() -> list[Claim]:
    return [claim for study in studies().values() for claim in study.claims]


@cache
def judged() -> list[Judged]:
    return judge_all([rewritten(claim, number) for number, claim in enumerate(claims())], collections())


def test_index_and_page_of_claims_read_no_sentence() -> None:
    """Guards against claims that are found, sorted, grouped or counted by their words, and numbers read out of them."""
    for name, page in (("index", index), ("claims", claims_page)):
        text = (REPORTS / f"{name}.md").read_text(encoding="utf-8")
        assert in_its_words(page.render(judged(), collections()), claims()) == flat(text), name


def test_readme_reads_no_sentence() -> None:
    """Guards against answers on the first page that go missing, or become another claim's, when one is reworded."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert in_its_words(front_door(judged(), collections(), collections()[0]), claims()) in flat(text)


def test_the_figure_reads_no_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against published values and panels that follow from words."""
    as_told = [
        replace(one, claim=replace(one.claim, text=claim.text, compared=claim.compared))
        for one in judged()
        for claim in [next(known for known in claims() if known.measure is one.claim.measure)]
    ]
    told, other = (drawn(found, monkeypatch, tmp_path) for found in (as_told, judged()))
    assert [marks(panel) for panel in told] == [marks(panel) for panel in other]
    for panel, same in zip(told, other, strict=True):
        assert [flat(label) for label in rows_of(panel)] == [
            in_its_words(flat(label), claims()) for label in rows_of(same)
        ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.plan.key)
def test_pages_of_tables_read_no_sentence(page: TablePage) -> None:
    """Guards against verdicts on a table's own page that follow from words."""
    other = replace(page, claims=tuple(rewritten(claim, number) for number, claim in enumerate(page.claims)))
    seeds = collections()[0].shown_with(page.plan.key, 0)
    rows = read_rows(Workspace(ROOT, "mini").results(page.plan.key))  # without what other pages lend it
    shown = in_its_words(render(other, rows, "mini", seeds), list(page.claims))
    assert shown.partition("## The paper's numbers")[0] in flat((REPORTS / f"{page.plan.key}.md").read_text())


def test_the_regime_reads_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against criteria that are told by their words."""
    told = regime.beside({"mini": collections()[0].rows["regime"]})
    criteria = regime.CRITERIA
    changed = tuple(rewritten(claim, number) for number, claim in enumerate(criteria))
    monkeypatch.setattr(regime, "CRITERIA", changed)
    shown = regime.beside({"mini": collections()[0].rows["regime"]})
    assert shown != told and in_its_words(shown, list(criteria)) == flat(told)
