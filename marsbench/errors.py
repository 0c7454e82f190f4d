"""The error that a user sees, `UserError`: what, where, how to mend it. A command exits with 2 for it, or with 3."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any


class UserError(Exception):
    exit_code = 2  # of the command that it ends

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        parts = [what, f"  where: {where}" if where else "", f"  fix:   {fix}" if fix else ""]
        super().__init__("\n".join(part for part in parts if part))

    @property
    def reason(self) -> str:
        """On one line, as the reason of a cell without numbers."""
        return f"{self.what}{f' ({self.where})' if self.where else ''}{f'; {self.fix}' if self.fix else ''}"


class NothingMeasured(UserError):
    """A run that could not measure anything: it leaves no rows and no page behind."""

    exit_code = 3


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is none of those known, which the error lists."""
    if name not in (names := list(known)):
        raise unknown_name(kind, name, names)


def unknown_name(kind: str, name: str, known: list[str]) -> UserError:
    return UserError(f"unknown {kind} {name!r}", fix=f"choose one of: {', '.join(known)}")


def integer(
    value: Any, name: str, *, least: float | None = None, most: float | None = None, where: str = "", fix: str = ""
) -> int:
    """A value as an int from `least` to `most`, by default as wide as a tensor's; `UserError` for any other."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} {value!r} is not a whole number", where=where, fix=fix or "give one, such as 4")
    number, lowest, highest = int(value), -(2**63) if least is None else least, 2**63 - 1 if most is None else most
    if lowest <= number <= highest:
        return number
    if most is None and least is not None and number < least:
        raise UserError(f"{name} {number} is below {least}", where=where, fix=fix or f"give {least} or more")
    fix = fix or f"give a value from {lowest} to {highest}"
    raise UserError(f"{name} {number} is out of range", where=where, fix=fix)


@contextmanager
def told_to_user(what: str, *kinds: type[Exception], where: object, fix: str) -> Iterator[None]:
    """Within a `with` block, errors of some kinds are the user's to mend: `what` failed, and their own first line."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what}: {next(iter(str(error).splitlines()), '')}", where=str(where), fix=fix) from error
