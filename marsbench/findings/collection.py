"""The rows behind all pages of a scale, by training seed: what the pages on the whole paper are rendered from."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from marsbench.findings.query import Query
from marsbench.findings.seeds import BySeed, SeedRows
from marsbench.presets import scales_shown_with
from marsbench.rows.kinds import Row, any_measured
from marsbench.rows.workspace import Workspace


@dataclass(frozen=True)
class Collection:
    """The rows of one scale. Pages without rows are left out."""

    scale: str
    rows: Mapping[str, Mapping[int, Sequence[Row]]]  # page -> training seed -> its rows
    links: Mapping[str, str]  # page of seed 0 -> the way to it from the pages on the whole paper
    judged: Sequence[Any] = ()  # what all claims of the scale came to, where that is known

    def of(self, page: str) -> list[Sequence[Row]]:
        return list(self.rows.get(page, {}).values())

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for by_seed in self.rows.values() for seed in by_seed})

    @property
    def seeds_in_words(self) -> str:
        if len(self.seeds) > 1:
            return f"Rows of training seeds {', '.join(map(str, self.seeds))}."
        return "One training seed." if self.seeds else ""

    def shown_with(self, page: str, seed: int) -> BySeed:
        """A page's rows at all training seeds, beginning with the one whose page they are for."""
        of_page = self.rows.get(page, {})
        rows = {number: of_page[number] for number in sorted(of_page, key=lambda number: number != seed)}
        return SeedRows(rows, self.judged)


Pages = Mapping[str, Query]  # page -> what it takes


def collect(root: Path, scale: str, pages: Pages) -> list[Collection]:
    """The rows of every scale that is shown together with this one and has any; without any, one empty collection."""
    collections = [collection_of(Workspace(root, name), pages) for name in scales_shown_with(scale)]
    return [collection for collection in collections if collection.rows] or collections[:1]


def whole_paper_folder(root: Path, scale: str) -> Path:
    return Workspace(root, scales_shown_with(scale)[0]).reports


def collection_of(workspace: Workspace, pages: Pages) -> Collection:
    """The rows of one scale at all training seeds, whatever page measured them; `workspace` is that of seed 0."""
    places = workspace.seeds()
    stored = cache(_of_scale)
    rows: dict[str, dict[int, Sequence[Row]]] = {}
    links, folder = {}, whole_paper_folder(workspace.root, workspace.scale)
    for page, query in pages.items():
        made = {seed: of_seed for seed, place in places.items() if (of_seed := _made_at(place, page)) is not None}
        if not made:
            continue
        shown = {**places, **made} if query.seed is None else {0: replace(workspace, variant=f"seed{query.seed}")}
        asks = {asked for place in shown.values() for asked in query.asks(stored(place))}
        found_at = {seed: query.of(stored(place), asks) for seed, place in shown.items()}
        rows[page] = {seed: of_seed for seed, of_seed in found_at.items() if seed in made or any_measured(of_seed)}
        if 0 in made:
            links[page] = PurePath(os.path.relpath(made[0].reports / f"{page}.md", folder)).as_posix()
    return Collection(workspace.scale, rows, links)


def alone(workspace: Workspace, pages: Pages) -> Collection:
    """The rows of one store, without those of other training seeds."""
    stored = _of_scale(workspace)
    rows = {page: {0: pages[page].of(stored)} for page in workspace.pages if page in pages}
    return Collection(workspace.scale, rows, {})


def _made_at(place: Workspace, page: str) -> Workspace | None:
    """Where a page was made at a training seed; a quick sweep stands in where there is no whole one."""
    quick = replace(place, variant="-".join(filter(None, ("quick", place.variant))))
    return next((each for each in (place, quick) if page in each.pages), None)


def _of_scale(place: Workspace) -> list[Row]:
    return [row for row in place.rows if row.scale == place.scale]
