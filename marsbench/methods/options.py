"""Options as data: a field of a dataclass says what a user is told of it, and which values it may have.

threshold: float = option("Confidence to accept a token.", 0.95, least=0, most=1)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from marsbench.errors import UserError, check_known, integer


@dataclass(frozen=True)
class Option:
    help: str
    least: float | None = None
    most: float | None = None
    usual: Any = None  # what counts where nothing is given, if that is not the field's default
    called: str = ""  # in messages, where its name does not say enough
    flags: tuple[str, ...] = ()  # on the command line, if not its name
    shown: Mapping[str, Any] = field(default_factory=dict)  # what typer is told besides
    kind: Any = None  # the field's type, without None
    choices: tuple[str, ...] = ()  # of a `Literal`

    def check(self, name: str, value: Any) -> None:
        words = self.called or name.replace("_", " ")
        if self.choices:
            check_known(words, value, self.choices)
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise UserError(f"{name}={value!r} is neither true nor false", fix="give one of the two")
        elif self.kind is int:
            integer(value, words, least=self.least, most=self.most)
        elif self.kind is float:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(f"{words} {value!r} is not a number", fix=f"give one, as in {name}=0.95")
            number = cast("float", value)
            if self.least is not None and self.most is not None and not self.least <= number <= self.most:
                raise UserError(f"{words} {value} is out of range", fix=f"give {self.least:g} to {self.most:g}")


def option(help: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, **more)})


def options_of(of: type) -> dict[str, Option]:
    hints, given = get_type_hints(of), {each.name: each.metadata.get("option") for each in fields(of)}
    return {name: each if each.kind else replace(each, **_kind(hints[name])) for name, each in given.items() if each}


def _kind(hint: Any) -> dict[str, Any]:
    (kind,) = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    origin = get_origin(kind)
    return {"kind": str, "choices": get_args(kind)} if origin is Literal else {"kind": origin or kind}
