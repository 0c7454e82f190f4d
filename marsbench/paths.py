"""Where the files that are not Python code lie, in a checkout and in an installed wheel alike."""

from pathlib import Path

from marsbench.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def tasks_dir() -> Path:
    """The folder of lm-eval task files: `tasks/` of a checkout, `marsbench/_tasks/` of a wheel; `UserError` without."""
    # The wheel's copy goes first: beside an installed package, a folder called `tasks` is of another package.
    for folder in (PACKAGE / "_tasks", PACKAGE.parent / "tasks"):
        if folder.is_dir():
            return folder
    raise UserError("the lm-eval task files are missing", where=str(PACKAGE), fix="install marsbench again")
