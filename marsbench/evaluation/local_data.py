"""Benchmark data from local files: JSON Lines below a data folder, in the columns of the hub's data sets."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from marsbench.errors import UserError, told_to_user
from marsbench.json_lines import read_lines

DATA_DIR = "data_dir"  # the column that says where a question came from


class Unavailable(UserError):
    """What this machine does not have, data or a checkpoint: a table skips its cells and says so."""


# What the columns of a file may hold, by what task files call it; lines may lack an "optional" one.
_KINDS: dict[str, Any] = {
    "text": str, "texts": Annotated[list[str], Field(min_length=1)], "number": int,
    "settings": list[dict[str, str | int | list[str] | None]],
}  # fmt: skip
_KINDS |= {f"optional {name}": NotRequired[kind] for name, kind in _KINDS.items()}


def dataset(
    data_dir: str, files: Mapping[str, str], columns: Mapping[str, str], id_column: str | None = None, **_: Any
) -> dict[str, Any]:
    """A `Dataset` for each split, from what a task file says; `DATA_DIR` says where a question came from."""
    return {split: _split(data_dir, file, tuple(columns.items()), id_column) for split, file in files.items()}


@lru_cache(maxsize=64)
def _split(data_dir: str, name: str, columns: tuple[tuple[str, str], ...], id_column: str | None) -> Any:
    """One file, without columns that are not asked for; the subtasks of a benchmark may share it."""
    from datasets import Dataset  # the registry of benchmarks imports this module, and is read without it
    from pyarrow import ArrowException

    file, mend = local_file(Path(data_dir), name), f"every line needs {', '.join(column for column, _ in columns)}"
    kind = TypedDict("Question", {column: _KINDS[kind] for column, kind in columns})  # type: ignore[misc]
    records = read_lines(file, kind, what="a question", mend=mend, unique=id_column)
    what, fix = "values of one setting are of several types", "write the same type in every line"
    with told_to_user(what, ArrowException, OverflowError, where=file, fix=fix):
        return Dataset.from_list([record | {DATA_DIR: data_dir} for record in records])


def local_file(data_dir: Path, name: str) -> Path:
    if not (data_dir / name).exists():
        fix = "put it there, or leave --data-dir out to load it from the hub"
        raise Unavailable("there is no local copy of this benchmark's data", where=str(data_dir / name), fix=fix)
    return data_dir / name
