"""Rows on disk, as JSON Lines: a run's own file, and the stores of pages; and where a run keeps its other things."""

import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from marsbench.errors import UserError
from marsbench.files import check_can_be_written, nearest_existing, write_atomically
from marsbench.json_lines import Log, parse_lines, read_json, read_text
from marsbench.locks import locked
from marsbench.presets import DEFAULT_SCALE
from marsbench.rows.kinds import AnyRow, EvaluationRow, Row, TrainingRow, to_json
from marsbench.training.stages import Recipe

PATIENCE_S = 600.0  # with another writer, who holds the lock for a moment at a time
_MEND = "remove the line; its cell is measured again"


class RowFile:
    """A file of rows. The last row of a key is the one that counts."""

    def __init__(self, file: Path) -> None:
        self._log = Log[Row](file, AnyRow, what="a row", mend=_MEND)
        self._lock = file.with_name(f"{file.name}.lock")

    def append(self, row: Row) -> None:
        with locked(self._lock, patience_s=PATIENCE_S):
            if self.rows().get(row.key) != row:
                self._log.append(to_json(row))

    def rows(self) -> dict[str, Row]:
        """Key -> row; an unfinished last line is passed over."""
        return {row.key: row for row in self._log.records()}


def read_rows(path: Path) -> list[Row]:
    """The rows of a published file, or of a store: all files of a folder, those of folders below it left out."""
    if path.is_dir():
        return [row for file in sorted(path.glob("*.jsonl")) for row in read_rows(file)]
    content = read_text(path, "check the path, or measure: marsbench reproduce table2")
    return parse_lines(content, path, AnyRow, what="a row", mend=_MEND)


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Write a store anew: one file per stage, and one for each other kind of work. Of equal rows, the last is kept."""
    files = defaultdict[str, list[Row]](list)
    for row in {row.id: row for row in rows}.values():
        name = row.stage if isinstance(row, EvaluationRow | TrainingRow) else row.kind
        files[f"{name}.jsonl"].append(row)
    for name, of_file in files.items():
        write_atomically(folder / name, rows_text(of_file).encode())
    for file in folder.glob("*.jsonl"):
        if file.name not in files:
            file.unlink()


def rows_text(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(to_json(row)) + "\n" for row in rows)


_PAGES = "pages.json"  # in a store: the pages that were made from it
_FULL = 32 * 2**20  # bytes free below which a failed write is put down to a full disk


@dataclass(frozen=True)
class Workspace:
    """The folders of one scale: work in progress below `runs/`, what is worth keeping in `results/` and `reports/`."""

    root: Path
    scale: str
    variant: str = ""  # what is measured where it is not the scale's own benchmarks in full at seed 0: "limit8-seed1"

    @property
    def runs(self) -> Path:
        """Checkpoints, logged answers and rows; safe to delete, needed to resume."""
        return self.root / "runs" / self.scale

    @property
    def row_file(self) -> Path:
        return self.runs / "rows.jsonl"

    @property
    def reports(self) -> Path:
        """The pages of this scale: `reports/` for the default scale, folders below it for the others and variants."""
        default = self.scale == DEFAULT_SCALE and not self.variant
        return self.root / "reports" if default else self.root / "reports" / self.scale / self.variant

    @property
    def store(self) -> Path:
        return self.root / "results" / self.scale / self.variant

    @property
    def rows(self) -> list[Row]:
        return read_rows(self.store) if self.store.exists() else []

    @property
    def pages(self) -> list[str]:
        file = self.store / _PAGES
        mend = "restore the file, or make a page again: marsbench reproduce table2"
        return read_json(file, list[str], mend=mend) if file.exists() else []

    def publish(self, page: str, rows: Iterable[Row]) -> None:
        """Replace what its store holds, and add a page to those that are made from it."""
        write_rows(self.store, rows)
        names = sorted({*self.pages, page})
        write_atomically(self.store / _PAGES, (json.dumps(names, indent=0) + "\n").encode())

    def variants(self) -> "list[Workspace]":
        """The folders of everything of this scale that has rows, the scale's own benchmarks first."""
        names = sorted(path.name for path in (self.root / "results" / self.scale).glob("*") if path.is_dir())
        return [replace(self, variant=name) for name in ("", *names)]

    def seeds(self) -> "dict[int, Workspace]":
        """Training seed -> the folders of its rows, for those with pages; seed 0, which has this one's, always."""
        places = [place for place in self.variants() if place.variant.startswith("seed") and place.pages]
        numbers = [place.variant.removeprefix("seed") for place in places]
        others = sorted(int(number) for number in numbers if number.isdecimal())
        return {0: self} | {seed: replace(self, variant=f"seed{seed}") for seed in others}

    def checkpoint(self, recipe: Recipe) -> Path:
        return self.runs / "checkpoints" / recipe.name

    def lock(self, recipe: Recipe) -> Path:
        return self.runs / "locks" / f"{recipe.name}.lock"

    @property
    def logs(self) -> Path:
        return self.runs / "logs"

    def answers(self, key: str) -> Path:
        return self.runs / "answers" / f"{key}.jsonl"

    def samples(self, key: str) -> Path:
        return self.runs / "samples" / f"{key}.jsonl"

    def check_writable(self) -> None:
        """Refuse an output folder that cannot be written to, before any work is done."""
        check_can_be_written(self.row_file, "--output")
        with locked(self.row_file.with_suffix(".jsonl.lock"), patience_s=PATIENCE_S):
            pass  # locks work here


@contextlib.contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if shutil.disk_usage(nearest_existing(folder)).free >= _FULL:
            raise
        fix = "free some space; the same command then goes on where it stopped"
        raise UserError("the disk is full", where=str(folder), fix=fix) from error
