"""Writing pages: a study's page with its figures, and the pages on the whole paper. Nothing reads a page back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.files import write_atomically
from marsbench.findings.collection import collect, whole_paper_folder
from marsbench.findings.paper_claims import judge_all
from marsbench.overview import claims_page, front_door, index
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
    """Render the index and the page of claims from the published rows of a scale, and return their paths.

    The paper's scales and the default one share these pages; `root` is the folder that holds results/ and reports/.
    """
    return [write_atomically(path, text.encode()) for path, text in whole_paper(root, scale).items()]


def whole_paper(root: Path, scale: str) -> dict[Path, str]:
    """The pages on the whole paper: where they belong -> their Markdown, a pure function of the published rows.

    README is one of them, in a folder that has one with the marks for it, where the default scale is measured.
    """
    folder, collections = whole_paper_folder(root, scale), collect(root, scale, studies())
    judged = judge_all([claim for study in studies().values() for claim in study.claims], collections)
    pages = {
        folder / "index.md": index.render(judged, collections),
        folder / f"{index.CLAIMS}.md": claims_page.render(judged, collections),
    }
    return pages | front_door.readme_of(root, judged, collections)
