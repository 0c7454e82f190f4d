"""Where files that are no Python code lie, and writing files whole: a reader never sees half of one."""

import os
import tempfile
from pathlib import Path
from uuid import uuid4

from marsbench.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def tasks_dir() -> Path:
    """The folder of lm-eval task files: `tasks/` of a checkout, `marsbench/_tasks/` of a wheel; `UserError` without."""
    # The wheel's copy goes first: beside an installed package, a folder called `tasks` is of another package.
    for folder in (PACKAGE / "_tasks", PACKAGE.parent / "tasks"):
        if folder.is_dir():
            return folder
    raise UserError("the lm-eval task files are missing", where=str(PACKAGE), fix="install marsbench again")


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a file in one step, its folder too if need be; an interruption leaves the old file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")  # two machines may have processes of one number
    try:
        with draft.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # or a power cut may leave the name without its content
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def check_can_be_written(file: Path, option: str) -> None:
    """Refuse a file that `write_atomically` could not write, before hours of work for it; leaves nothing behind."""
    try:
        folder = nearest_existing(file.parent)
        if file.is_dir():
            unfit = "it is a folder"
        elif file.exists() and not file.is_file():
            unfit = "it is no ordinary file"
        elif not folder.is_dir():
            unfit = f"{folder} is no folder"
        else:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{file.name}.") as probe:
                probe.write(b"\0" * 4096)
                probe.flush()
            return
    except OSError as error:
        unfit = error.strerror or str(error)
    fix = f"free space, change its permissions, or choose another {option}"
    raise UserError(f"the output cannot be written: {unfit}", where=str(file), fix=fix)


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that cannot be written to, or that is what will be read, before any work is done."""
    check_can_be_written(target, "--out")
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError("--out would overwrite what is read", where=str(target), fix="choose another --out")


def nearest_existing(path: Path) -> Path:
    """The path itself or the closest of its parents that exists, so that looking creates no folder."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
