"""Where a run keeps its things below one output folder."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically
from marsbench.json_lines import read_json
from marsbench.locks import locked
from marsbench.presets import DEFAULT_SCALE
from marsbench.rows.kinds import Row
from marsbench.rows.store import PATIENCE_S, read_rows, write_rows
from marsbench.training.stages import Recipe

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
        """The folder of the rows that its pages show."""
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
        folder = self.root / "results" / self.scale
        names = sorted(path.name for path in folder.glob("*") if path.is_dir())
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

    def answers(self, key: str, shard: tuple[int, int] = (1, 1)) -> Path:
        """The logged answers of one cell, or of one shard of it."""
        part = "" if shard == (1, 1) else f".{shard[0]}-of-{shard[1]}"
        return self.runs / "answers" / f"{key}{part}.jsonl"

    def shards(self, key: str) -> list[Path]:
        """The logs of a cell's shards, as far as there are any."""
        return sorted((self.runs / "answers").glob(f"{key}.*-of-*.jsonl"))

    def race(self, name: str) -> Path:
        return self.runs / "races" / f"{name}.jsonl"

    def samples(self, key: str) -> Path:
        return self.runs / "samples" / f"{key}.jsonl"

    def check_writable(self) -> None:
        """Refuse an output folder that cannot be written to, before any work is done."""
        check_can_be_written(self.row_file, "--output")
        with locked(self.row_file.with_suffix(".jsonl.lock"), patience_s=PATIENCE_S):
            pass  # locks work here


@contextlib.contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn whatever a library raises on a full disk into one clear message."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        existing = next(path for path in [folder, *folder.parents] if path.exists())
        if shutil.disk_usage(existing).free >= _FULL:
            raise
        raise UserError(
            "the disk is full", where=str(folder), fix="free some space; the same command then goes on where it stopped"
        ) from error
