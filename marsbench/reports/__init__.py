"""Reports: pure functions from rows to Markdown pages and figures.

Nothing here measures, and nothing reads a page back. The same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from marsbench.errors import unknown_name
from marsbench.files import write_atomically
from marsbench.reports import (
    claims_page,
    discrepancies,
    engine,
    figure1,
    figure6,
    gains,
    index,
    speedup,
    table2,
    table3,
    table4,
    table8,
    table9,
)
from marsbench.reports.collection import collect, whole_paper_folder
from marsbench.reports.paper_claims import judge_all
from marsbench.sweeps.rows import Row


class Report(NamedTuple):
    """How rows become a page: both functions take rows and a scale, the second also the folder."""

    render: Callable[[Sequence[Row], str], str]
    draw: Callable[[Sequence[Row], str, Path], list[Path]]


PAGES = (table2.PAGE, table3.PAGE, table4.PAGE, table8.PAGE, table9.PAGE, figure6.PAGE)  # accuracy and tokens
REPORTS: dict[str, Report] = {
    **{page.plan.key: Report(page.render, page.draw) for page in PAGES},
    "discrepancies": Report(discrepancies.render, discrepancies.draw),
    "figure1": Report(figure1.render, figure1.draw),
    "gains": Report(gains.render, gains.draw),
    "engine": Report(engine.render, engine.draw),
    "speedup": Report(speedup.render, speedup.draw),
}


def write_report(name: str, rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
    """Render a page and its figures into a folder, and return the paths, the page first.

    Every file is replaced in one step. Rows of other scales are left out.

    Raises:
        UserError: if there is no report of that name.
    """
    if name not in REPORTS:
        raise unknown_name("report", name, list(REPORTS))
    page = REPORTS[name].render(rows, scale).encode()
    figures = REPORTS[name].draw(rows, scale, reports_dir)
    return [write_atomically(reports_dir / f"{name}.md", page), *figures]


def write_whole_paper(root: Path, scale: str) -> list[Path]:
    """Render the index and the page of claims from the published rows of a scale, and return their paths.

    The paper's scales and the default one share these pages; `root` is the folder that holds results/ and reports/.
    """
    return [write_atomically(path, text.encode()) for path, text in whole_paper(root, scale).items()]


def whole_paper(root: Path, scale: str) -> dict[Path, str]:
    """The pages on the whole paper: where they belong -> their Markdown, a pure function of the published rows."""
    folder, collections = whole_paper_folder(root, scale), collect(root, scale, REPORTS)
    judged = judge_all(PAGES, collections)
    return {
        folder / "index.md": index.render(judged, collections, list(REPORTS)),
        folder / f"{index.CLAIMS}.md": claims_page.render(judged, collections),
    }
