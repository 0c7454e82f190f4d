"""Writing pages: a study's page with its figures, and the pages on the whole paper. Nothing reads a page back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from marsbench.files import write_atomically
from marsbench.findings.claims import Judged, judge_all
from marsbench.findings.collection import Collection, collect, collection_of, whole_paper_folder
from marsbench.findings.seeds import BySeed
from marsbench.overview import claims_figure, claims_page, explore, front_door, index
from marsbench.rows.kinds import Row
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.studies import pages, studies
from marsbench.studies.study import Study


def write_page(
    study: Study, rows: Sequence[Row], scale: str, reports_dir: Path, seeds: BySeed | None = None
) -> list[Path]:
    """Render a study's page and its figures into a folder, and return the paths, the page first.

    Every file is replaced in one step. Rows of other scales are left out. `seeds` are the rows that verdicts are of,
    these among them; None = these alone.
    """
    page = study.render(rows, scale, seeds).encode()
    figures = study.draw(rows, scale, reports_dir)
    return [write_atomically(reports_dir / f"{study.key}.md", page), *figures]


def write_study(study: Study, workspace: Workspace) -> Path:
    """Render the page of a study that a workspace has rows of; returns where it is.

    The verdicts of a training seed's page are of all seeds, so the pages of the others are rendered again with it.
    """
    seeds = replace(workspace, variant="").seeds()
    if workspace not in seeds.values():
        return write_page(study, read_rows(workspace.results(study.key)), workspace.scale, workspace.reports)[0]
    collection = collection_of(seeds[0], pages())
    written = {
        place: _write_seed(study, place, seed, collection)
        for seed, place in seeds.items()
        if place.results(study.key).exists()
    }
    return written[workspace]


def write_scale(root: Path, scale: str) -> Iterator[Path]:
    """Render every page of a scale that has rows, one after another, and give each page's path."""
    whole = Workspace(root, scale)
    collection, seeds = collection_of(whole, pages()), {place: seed for seed, place in whole.seeds().items()}
    for workspace, study in product(whole.variants(), studies().values()):
        if workspace.results(study.key).exists():
            seed = seeds.get(workspace)
            yield write_study(study, workspace) if seed is None else _write_seed(study, workspace, seed, collection)


def _write_seed(study: Study, workspace: Workspace, seed: int, collection: Collection) -> Path:
    rows = read_rows(workspace.results(study.key))
    return write_page(study, rows, workspace.scale, workspace.reports, collection.shown_with(study.key, seed))[0]


def write_whole_paper(root: Path, scale: str) -> list[Path]:
    """Render the index and the page of claims with its figures from the published rows of a scale; returns their paths.

    The paper's scales and the default one share these pages; `root` is the folder that holds results/ and reports/.
    """
    collections, judged = _judged(root, scale)
    figures = claims_figure.draw(judged, collections, whole_paper_folder(root, scale))
    texts = _texts(root, scale, collections, judged)
    return [*[write_atomically(path, text.encode()) for path, text in texts.items()], *figures]


def whole_paper(root: Path, scale: str) -> dict[Path, str]:
    """The pages on the whole paper: where they belong -> their text, a pure function of the published rows.

    README is one of them, in a folder that has one with the marks for it, where the default scale is measured.
    """
    return _texts(root, scale, *_judged(root, scale))


def _judged(root: Path, scale: str) -> tuple[list[Collection], list[Judged]]:
    """The published rows of a scale and those shown with it, and what they say of every claim."""
    collections = collect(root, scale, pages())
    return collections, judge_all([claim for study in studies().values() for claim in study.claims], collections)


def _texts(root: Path, scale: str, collections: Sequence[Collection], judged: Sequence[Judged]) -> dict[Path, str]:
    folder = whole_paper_folder(root, scale)
    return {
        folder / "index.md": index.render(judged, collections),
        folder / f"{index.CLAIMS}.md": claims_page.render(judged, collections),
        folder / index.EXPLORE: explore.page_of(collections[0]),
        **front_door.readme_of(root, judged, collections),
    }
