"""Writing pages: a study's page with its figures, and the pages on the whole paper. Nothing reads a page back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.files import write_atomically
from marsbench.findings.collection import Collection, collect, whole_paper_folder
from marsbench.findings.paper_claims import Judged, judge_all
from marsbench.overview import claims_figure, claims_page, front_door, index
from marsbench.rows.kinds import Row
from marsbench.studies import studies
from marsbench.studies.study import Study


def write_page(study: Study, rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
    """Render a study's page and its figures into a folder, and return the paths, the page first.

    Every file is replaced in one step. Rows of other scales are left out.
    """
    page = study.render(rows, scale).encode()
    figures = study.draw(rows, scale, reports_dir)
    return [write_atomically(reports_dir / f"{study.key}.md", page), *figures]


def write_whole_paper(root: Path, scale: str) -> list[Path]:
    """Render the index and the page of claims with its figures from the published rows of a scale; returns their paths.

    The paper's scales and the default one share these pages; `root` is the folder that holds results/ and reports/.
    """
    collections, judged = _judged(root, scale)
    figures = claims_figure.draw(claims_page.numbers(judged), collections, whole_paper_folder(root, scale))
    pages = _texts(root, scale, judged, collections)
    return [*[write_atomically(path, text.encode()) for path, text in pages.items()], *figures]


def whole_paper(root: Path, scale: str) -> dict[Path, str]:
    """The pages on the whole paper: where they belong -> their Markdown, a pure function of the published rows.

    README is one of them, in a folder that has one with the marks for it, where the default scale is measured.
    """
    collections, judged = _judged(root, scale)
    return _texts(root, scale, judged, collections)


def _judged(root: Path, scale: str) -> tuple[list[Collection], list[Judged]]:
    """The published rows of a scale and those shown with it, and what they say of every claim."""
    collections = collect(root, scale, studies())
    return collections, judge_all([claim for study in studies().values() for claim in study.claims], collections)


def _texts(root: Path, scale: str, judged: Sequence[Judged], collections: Sequence[Collection]) -> dict[Path, str]:
    folder = whole_paper_folder(root, scale)
    pages = {
        folder / "index.md": index.render(judged, collections),
        folder / f"{index.CLAIMS}.md": claims_page.render(judged, collections),
    }
    return pages | front_door.readme_of(root, judged, collections)
