"""What a user is told of an option, and what it may be: said where the field of a dataclass is, for all who ask for it.

threshold: Annotated[float, Option("Confidence to accept a token.", least=0, most=1)] = 0.95
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Option:
    """One option; its default is the field's."""

    help: str
    least: float | None = None
    most: float | None = None
    called: str = ""  # in messages, where its name does not say enough
    kind: Any = None  # the field's type, without None
    choices: tuple[str, ...] = ()  # of a `Literal`


def options_of(of: type) -> dict[str, Option]:
    """The fields of a dataclass that are options, by name."""
    hints = get_type_hints(of, include_extras=True)
    return {
        name: replace(one, **_kind(hint.__origin__))
        for name, hint in hints.items()
        for one in getattr(hint, "__metadata__", ())
        if isinstance(one, Option)
    }


def _kind(hint: Any) -> dict[str, Any]:
    """What values a hint allows."""
    kinds = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
    if get_origin(kinds[0]) is Literal:
        return {"kind": str, "choices": get_args(kinds[0])}
    return {"kind": get_origin(kinds[0]) or kinds[0]}
