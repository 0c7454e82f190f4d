"""The registry of studies: in the paper's order, each with its words, its session and its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from marsbench.errors import UserError
from marsbench.findings.claims import ABSTRACT
from marsbench.rendering.sessions import SESSIONS
from marsbench.studies import items, studies, study_of

ROOT = Path(__file__).resolve().parent.parent


def test_the_registry_is_in_the_papers_order() -> None:
    """Guards against tables in the order of their files, and pages of ours among the paper's."""
    keys = [item.key for item in items()]
    tables = [f"table{number}" for number in (2, 3, 4, 5, 6, 8, 9)]
    figures = [f"figure{number}" for number in (1, 3, 6)]
    assert keys == [
        *tables, *figures, "appendix-a", "regime", "discrepancies", "gains", "lengths", "adapter", "curves", "map",
        "rivals", "speedup", "serving", "real-model",
    ]  # fmt: skip
    assert [session.makes for session in SESSIONS.values()] == keys, "each has a session that README can show"
    assert [key for key in studies() if key in keys] == [key for key in keys if key in studies()]


def test_every_study_is_called_as_its_module_and_says_what_it_is() -> None:
    """Guards against a session that makes another page than its name says, and lines of the index without words."""
    for key, study in studies().items():
        assert study.key == key and study.asks and study.name
        assert study.is_made or study.on
    for item in items():
        assert SESSIONS[item.session].makes == item.key and SESSIONS[item.session].words


def test_what_stands_on_another_page_is_found_there() -> None:
    """Guards against `marsbench reproduce figure3` that knows no such page, and names that are silently accepted."""
    assert [study_of(name).key for name in ("table5", "figure3", "appendix-a", "table2")] == [
        "speedup", "table8", "table2", "table2",
    ]  # fmt: skip
    with pytest.raises(UserError, match="table99"):
        study_of("table99")


def test_every_claim_has_its_place_in_the_paper() -> None:
    """Guards against claims of a page that the page of claims leaves out, or puts under another page's rows."""
    sections = {item.section for item in items()}
    for study in studies().values():
        for claim in (*study.more_claims, *study.claims):
            assert claim.page == study.key
            assert claim.section in sections or claim.section is ABSTRACT
            assert claim.name or claim.section is None, "pages find the paper's claims by their names"
