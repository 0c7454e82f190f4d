"""Writing pages: a study's page with its figures, and the pages on the whole paper. Nothing reads a page back."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from marsbench.files import write_atomically
from marsbench.findings.claims import Judged, judge_all
from marsbench.findings.collection import Collection, alone, collect, collection_of, whole_paper_folder
from marsbench.findings.seeds import BySeed
from marsbench.overview import explore, front_door, index
from marsbench.rows.kinds import Row
from marsbench.rows.workspace import Workspace
from marsbench.studies import claims, queries, studies, studies_on
from marsbench.studies.study import Study

Parts = Sequence[tuple[Study, Sequence[Row], BySeed]]  # what stands on a page: the rows shown, and those of all seeds


def write_page(parts: Parts, scale: str, reports_dir: Path) -> list[Path]:
    """Render a page and its figures into a folder; returns the paths, the page first."""
    if parts[0][0].page == index.EXPLORE:
        return [reports_dir / f"{index.EXPLORE}.html"]  # one of the pages on the whole paper
    first, *more = [study.render(rows, scale, seeds) for study, rows, seeds in parts]
    # What stands on another study's page becomes a part of that.
    page = "\n".join([first, *[re.sub("^#", "##", text, flags=re.MULTILINE) for text in more]])
    figures = [path for study, _, seeds in parts for path in study.draw([*seeds.values()], reports_dir)]
    return [write_atomically(reports_dir / f"{parts[0][0].page}.md", page.encode()), *figures]


def parts_at(page: str, workspace: Workspace, collection: Collection) -> Parts:
    """What stands on a page of a workspace, of the rows of a collection that has them, as far as it was made there."""
    made, seeds = set(workspace.pages), replace(workspace, variant="").seeds()
    own = next((seed for seed, place in seeds.items() if place == workspace), 0)
    shown = [(study, collection.shown_with(study.key, own)) for study in studies_on(page) if study.key in made]
    return [(study, next(iter(of.values())), of) for study, of in shown if own in of or (study.query.seeds and of)]


def write_study(study: Study, workspace: Workspace) -> Path:
    """Render the page of a study that a workspace has rows of; returns where it is.

    The verdicts of a training seed's page are of all seeds, so the pages of the others are rendered again with it.
    """
    seeds = list(replace(workspace, variant="").seeds().values())
    places = seeds if workspace in seeds else [workspace]
    return {place: path for place, path in _written([study.page], places)}[workspace]


def write_scale(root: Path, scale: str) -> Iterator[Path]:
    wanted = dict.fromkeys(study.page for study in studies().values())
    return (path for _, path in _written(wanted, Workspace(root, scale).variants()))


def _written(wanted: Iterable[str], places: Sequence[Workspace]) -> Iterator[tuple[Workspace, Path]]:
    """Writes some pages as far as they were made at some places of one scale."""
    whole = replace(places[0], variant="")
    judged, seeds = cache(judged_collection), whole.seeds().values()
    for place in places:
        rows = judged(whole) if place in seeds else alone(place, queries())
        for page in wanted:
            if parts := parts_at(page, place, rows):
                yield place, write_page(parts, place.scale, place.reports)[0]


def judged_collection(workspace: Workspace) -> Collection:
    """The rows of one scale, with what all claims come to together."""
    collection = collection_of(workspace, queries())
    judged = judge_all(claims(), [collection])
    return replace(collection, judged=[entry.findings[workspace.scale] for entry in judged])


def write_whole_paper(root: Path, scale: str) -> list[Path]:
    """Render the index, explore and README with its picture from the rows of a scale below `root`; their paths."""
    texts, judged = whole_paper(root, scale)
    figures = front_door.draw(judged, whole_paper_folder(root, scale))
    return [*[write_atomically(path, text.encode()) for path, text in texts.items()], *figures]


def whole_paper(root: Path, scale: str) -> tuple[dict[Path, str], Sequence[Judged]]:
    """The pages on the whole paper, where they belong -> their text, with README where it has marks; and all claims."""
    collections = collect(root, scale, queries())
    judged, folder = judge_all(claims(), collections), whole_paper_folder(root, scale)
    texts = {
        folder / "index.md": index.render(judged, collections),
        folder / f"{index.EXPLORE}.html": explore.page_of(collections),
        **front_door.readme_of(root, judged, collections),
    }
    return texts, judged
