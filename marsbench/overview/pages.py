"""Writing pages: a study's page with its figures, and the pages on the whole paper. Nothing reads a page back."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from marsbench.files import write_atomically
from marsbench.findings.claims import Judged, judge_all
from marsbench.findings.collection import Collection, alone, collect, collection_of, whole_paper_folder
from marsbench.findings.seeds import BySeed
from marsbench.overview import explore, front_door, index
from marsbench.rows.kinds import Row
from marsbench.rows.workspace import Workspace
from marsbench.studies import claims, pages, studies, studies_on
from marsbench.studies.study import Study

EXPLORE = "explore"  # what stands on that page has none in Markdown
Parts = Sequence[tuple[Study, Sequence[Row], BySeed]]  # what stands on a page: the rows shown, and those of all seeds


def page_of(parts: Parts, scale: str) -> str:
    """A page as Markdown; what stands on another study's page becomes a part of that."""
    first, *more = [study.render(rows, scale, seeds) for study, rows, seeds in parts]
    return "\n".join([first, *[re.sub("^#", "##", text, flags=re.MULTILINE) for text in more]])


def write_page(parts: Parts, scale: str, reports_dir: Path) -> list[Path]:
    """Render a page and its figures into a folder, and return the paths, the page first.

    Every file is replaced in one step. Rows of other scales are left out.
    """
    if parts[0][0].page == EXPLORE:
        return [reports_dir / f"{EXPLORE}.html"]  # one of the pages on the whole paper
    page = page_of(parts, scale).encode()
    figures = [path for study, rows, _ in parts for path in study.draw(rows, scale, reports_dir)]
    return [write_atomically(reports_dir / f"{parts[0][0].page}.md", page), *figures]


def parts_at(page: str, workspace: Workspace, collection: Collection) -> Parts:
    """What stands on a page of a workspace, of the rows of a collection that has them, as far as it was made there."""
    parts, made = list[tuple[Study, Sequence[Row], BySeed]](), set(workspace.pages)
    for study in [study for study in studies_on(page) if study.key in made]:
        seed = 0 if study.query.seed is not None else seed_of(workspace)  # a seed of its own is none of the page's
        if seed in (shown := collection.shown_with(study.key, seed)):
            parts.append((study, shown[seed], shown))
    return parts


def seed_of(workspace: Workspace) -> int:
    """The training seed of a workspace among those of its scale; 0 where it is none of them."""
    places = replace(workspace, variant="").seeds()
    return next((seed for seed, place in places.items() if place == workspace), 0)


def write_study(study: Study, workspace: Workspace) -> Path:
    """Render the page of a study that a workspace has rows of; returns where it is.

    The verdicts of a training seed's page are of all seeds, so the pages of the others are rendered again with it.
    """
    seeds = replace(workspace, variant="").seeds()
    if workspace not in seeds.values():
        parts = parts_at(study.page, workspace, alone(workspace, pages()))
        return write_page(parts, workspace.scale, workspace.reports)[0]
    collection = judged_collection(seeds[0])
    written = {
        place: write_page(parts, place.scale, place.reports)[0]
        for place in seeds.values()
        if (parts := parts_at(study.page, place, collection))
    }
    return written[workspace]


def write_scale(root: Path, scale: str) -> Iterator[Path]:
    whole = Workspace(root, scale)
    collection, seeds = judged_collection(whole), whole.seeds().values()
    for workspace in whole.variants():
        rows = collection if workspace in seeds else alone(workspace, pages())
        for page in dict.fromkeys(study.page for study in studies().values()):
            if parts := parts_at(page, workspace, rows):
                yield write_page(parts, scale, workspace.reports)[0]


def judged_collection(workspace: Workspace) -> Collection:
    """The rows of one scale, with what all claims come to together."""
    collection = collection_of(workspace, pages())
    judged = judge_all(claims(), [collection])
    return replace(collection, judged=[entry.findings[workspace.scale] for entry in judged])


def write_whole_paper(root: Path, scale: str) -> list[Path]:
    """Render the index, with README's numbers and picture, from the published rows of a scale; returns their paths.

    The paper's scales and the default one share these pages; `root` is the folder that holds results/ and reports/.
    """
    collections = collect(root, scale, pages())
    judged = judge_all(claims(), collections)
    figures = front_door.draw(judged, collections, whole_paper_folder(root, scale))
    texts = _texts(root, scale, collections, judged)
    return [*[write_atomically(path, text.encode()) for path, text in texts.items()], *figures]


def whole_paper(root: Path, scale: str) -> dict[Path, str]:
    """The pages on the whole paper: where they belong -> their text, a pure function of the published rows.

    README is one of them, in a folder that has one with the marks for it, where the default scale is measured.
    """
    collections = collect(root, scale, pages())
    return _texts(root, scale, collections, judge_all(claims(), collections))


def _texts(root: Path, scale: str, collections: Sequence[Collection], judged: Sequence[Judged]) -> dict[Path, str]:
    folder = whole_paper_folder(root, scale)
    return {
        folder / "index.md": index.render(judged, collections),
        folder / index.EXPLORE: explore.page_of(collections),
        **front_door.readme_of(root, judged, collections),
    }
