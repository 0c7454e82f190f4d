"""The command line. A command only translates: it loads its room when called, so that `--help` is instant.

Exit codes: 0 all went well, 1 a bug (with its traceback), 2 a mistake that the user can mend (with one
message that says how), 3 nothing could be measured (with the reason), 130 interrupted.
"""

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from marsbench import __version__
from marsbench.commands import COMMANDS
from marsbench.errors import UserError, integer
from marsbench.progress import quieten_libraries

# Troubles of the machine that the user can mend, and how; any other OSError is a bug.
MENDS = {
    errno.ENOSPC: "free some space, or write to another disk; the same command then goes on where it stopped",
    errno.EACCES: "change the permissions, or choose another folder",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.EISDIR: "give the path of a file",
    errno.ENOTDIR: "choose another folder: a part of this path is a file",
}
# Packages of the extras, by the name that they are imported under; what several bring, the one that is asked for most.
EXTRAS = {
    **dict.fromkeys(("evalplus", "lm_eval", "scipy"), "eval"),
    **dict.fromkeys(("matplotlib", "pandas", "tabulate"), "report"),
    **dict.fromkeys(("msgspec", "prometheus_client", "starlette", "uvicorn"), "serve"),
    "gguf": "real",
    "ray": "cluster",
}


class MendableErrorsGroup(TyperGroup):
    """Gives an error that the user can mend as one message and an exit code; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _exit(f"error: {error}", error.exit_code) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            missing = UserError(f"{package} is not installed", fix=f"pip install 'marsbench[{EXTRAS[package]}]'")
            raise _exit(f"error: {missing}", 2) from error
        except OSError as error:
            if error.errno not in MENDS:
                raise
            trouble = UserError(str(error.strerror), where=error.filename or "", fix=MENDS[error.errno])
            raise _exit(f"error: {trouble}", 2) from error
        except KeyboardInterrupt as interrupt:
            raise _exit("interrupted: the same command resumes the run", 130) from interrupt


class CheckedCommand(TyperCommand):
    """Refuses whole numbers that no tensor holds, whatever an option says of its own bounds."""

    def invoke(self, ctx: Any) -> Any:
        for option in self.params:
            if type(value := ctx.params.get(option.name or "")) is int:
                integer(value, option.opts[0])
        return super().invoke(ctx)


def _exit(message: str, code: int) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(code)


app = typer.Typer(
    cls=MendableErrorsGroup, no_args_is_help=True, rich_markup_mode="markdown", add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"marsbench {__version__}")
        raise typer.Exit


@app.callback()
def marsbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Is MARS real, how fast is it against a strong baseline, and what would it do for my model?

    marsbench trains MARS checkpoints (arXiv 2604.07023: several tokens per forward pass from one ordinary language
    model). It decodes with MARS and its rivals in one loop, scores and times them in the same way, and compares the
    results with the paper's. To begin with:

    - `marsbench doctor`: is this machine ready?
    - `marsbench reproduce table2`: measure the paper's main table, on a laptop with a small model
    - `marsbench report`: render the pages in reports/ again from the measured rows
    """
    quieten_libraries()


for name, command in COMMANDS.items():
    app.command(name=name, cls=CheckedCommand)(command)


def main() -> None:
    app(prog_name="marsbench")
