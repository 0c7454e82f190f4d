"""The decoding methods, one file each, and what each of them needs.

The registry is read without torch; only `build_method` loads it, with the method itself.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from marsbench.errors import UserError
from marsbench.methods.registry import METHODS, NEEDS, OPTIONS, Options, check_options, check_threshold, explained

if TYPE_CHECKING:
    from marsbench.decoding.outside import OutsideMethod
    from marsbench.decoding.step import Method

__all__ = [
    "METHODS",
    "NEEDS",
    "OPTIONS",
    "Options",
    "build_method",
    "check_installed",
    "check_options",
    "check_threshold",
    "explained",
    "method_class",
]


def method_class(name: str) -> Any:
    """The class of a method."""
    module, _, made_by = METHODS[name].place.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), made_by)


def check_installed(name: str) -> None:
    """Refuse a method whose package is missing, with a `UserError`."""
    if (package := METHODS[name].package) and find_spec(package) is None:
        raise UserError(f"method {name!r} needs the package {package}", fix="pip install 'marsbench[peers]'")


def build_method(name: str, options: Options) -> Method | OutsideMethod:
    """A method by name; `UserError` for an unknown one, for options out of range, and for what it needs and lacks.

    A class is made of the options that its fields are called after.
    """
    check_options(name, options)
    info = METHODS[name]
    wants_mask = info.needs_masks or ("draft" in info.needs and options.draft_method == "mars")
    if wants_mask and options.mask_id is None:
        raise UserError(
            f"method {name!r} needs a mask token and this checkpoint's tokenizer has none",
            fix="use a MARS checkpoint or another method; where a token's id can be given (marsbench decode --mask-id, "
            "in Python mask_id=), give that of a mask",
        )
    if "draft" in info.needs and options.draft is None:
        raise UserError(
            f"method {name!r} needs a draft model",
            fix="give one (--draft DIR, or draft=MODEL in Python): a smaller checkpoint with the same vocabulary, "
            "such as marsbench train draft_ar_sft makes",
        )
    if "heads" in info.needs and options.heads is None:
        raise UserError(
            f"method {name!r} needs Medusa heads and this checkpoint has none",
            fix="use a checkpoint of stage medusa (marsbench train medusa)",
        )
    chosen = method_class(name)
    taken: dict[str, Any] = {field.name: getattr(options, field.name, None) for field in fields(chosen) if field.init}
    if "drafter" in taken:
        from marsbench.methods.speculative import Drafter

        taken["drafter"] = Drafter.of(options)
    made: Method | OutsideMethod = chosen(**taken)
    return made
