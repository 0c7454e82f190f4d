"""The rows behind all pages of a scale, by training seed: what the pages on the whole paper are rendered from."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path, PurePath

from marsbench.findings.seeds import BySeed
from marsbench.line import Line
from marsbench.presets import scales_shown_with
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.running.plans import TablePlan


@dataclass(frozen=True)
class Collection:
    """The rows of one scale. Pages without rows are left out."""

    scale: str
    rows: Mapping[str, Mapping[int, Sequence[Row]]]  # page -> training seed -> its rows
    links: Mapping[str, str]  # page of seed 0 -> the way to it from the pages on the whole paper

    def of(self, page: str) -> list[Sequence[Row]]:
        return list(self.rows.get(page, {}).values())

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for by_seed in self.rows.values() for seed in by_seed})

    @property
    def seeds_in_words(self) -> str:
        """A sentence on from how many seeds the rows are; empty without rows."""
        if len(self.seeds) > 1:
            return f"Rows of training seeds {', '.join(map(str, self.seeds))}."
        return "One training seed." if self.seeds else ""

    def shown_with(self, page: str, seed: int) -> BySeed:
        """A page's rows at all training seeds, beginning with the one whose page they are for."""
        of_page = self.rows.get(page, {})
        return {number: of_page[number] for number in sorted(of_page, key=lambda number: number != seed)}


Pages = Mapping[str, TablePlan | None]  # page -> its lines that answer benchmarks


def collect(root: Path, scale: str, pages: Pages) -> list[Collection]:
    """The rows of every scale that is shown together with this one and has any; without any, one empty collection."""
    found = [collection_of(Workspace(root, name), pages) for name in scales_shown_with(scale)]
    return [collection for collection in found if collection.rows] or found[:1]


def whole_paper_folder(root: Path, scale: str) -> Path:
    """Where the pages on the whole paper lie."""
    return Workspace(root, scales_shown_with(scale)[0]).reports


def collection_of(workspace: Workspace, pages: Pages) -> Collection:
    """The rows of one scale, whose folders `workspace` holds at seed 0."""
    rows: dict[str, dict[int, Sequence[Row]]] = {}
    links, folder = {}, whole_paper_folder(workspace.root, workspace.scale)
    for page, (seed, of_seed) in product(pages, workspace.seeds().items()):
        quick = replace(of_seed, variant="-".join(filter(None, ("quick", of_seed.variant))))
        # A quick sweep stands in where there is no whole one.
        if found := next((each for each in (of_seed, quick) if each.results(page).exists()), None):
            measured = [row for row in read_rows(found.results(page)) if row.scale == workspace.scale]
            rows.setdefault(page, {})[seed] = measured
            if seed == 0:
                links[page] = PurePath(os.path.relpath(found.reports / f"{page}.md", folder)).as_posix()
    return Collection(workspace.scale, _completed(rows, pages), links)


def _completed(rows: dict[str, dict[int, Sequence[Row]]], pages: Pages) -> dict[str, dict[int, Sequence[Row]]]:
    """The rows of pages with what they lack at a training seed and another page has measured there.

    A line is the same line on every page: what all seeds say of it must not depend on which page asked them. It is lent
    on all benchmarks that the page asks, or not at all. A page that stands apart neither lends nor borrows.
    """
    found = {page: by_seed for page, by_seed in rows.items() if (plan := pages[page]) and plan.apart}
    others = {page: by_seed for page, by_seed in rows.items() if page not in found}
    seeds = sorted({seed for by_seed in others.values() for seed in by_seed})
    measured = {seed: _answered(*[by_seed.get(seed, []) for by_seed in others.values()]) for seed in seeds}
    for page, by_seed in others.items():
        plan = pages[page]
        asks = list(dict.fromkeys(name for own in by_seed.values() for _, name in _answered(own)))
        found[page] = {}
        for seed in seeds:
            own = by_seed.get(seed, [])
            known = {row.arm for row in own if isinstance(row, EvaluationRow) and row.status == "done"}
            lent = [
                replace(measured[seed][what(line), name], arm=line.name)
                for line in (plan.lines if plan else ())
                if line.name not in known and all((what(line), name) in measured[seed] for name in asks)
                for name in asks
            ]
            if seed in by_seed or lent:
                found[page][seed] = [*own, *lent]
    return found


def what(line: Line | EvaluationRow) -> Hashable:
    """What a line is, whatever a page calls it."""
    return line.stage, line.method, tuple(sorted(line.options.items())), line.dtype


def _answered(*pages: Sequence[Row]) -> dict[tuple[Hashable, str], EvaluationRow]:
    """The cells with numbers, by what their line is and their benchmark."""
    rows = [row for rows in pages for row in rows if isinstance(row, EvaluationRow) and row.status == "done"]
    return {(what(row), row.benchmark): row for row in rows}
