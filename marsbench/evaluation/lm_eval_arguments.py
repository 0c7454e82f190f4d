"""What `lm_eval --model marsbench` is told: which options there are, what their values mean, how mistakes are said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from marsbench.errors import UserError
from marsbench.methods import OPTIONS, Options, check_options, check_threshold
from marsbench.methods.fitting import check_accept

DEFAULT_ROWS = 16  # decoded at once where nobody says how many
METHOD_OPTIONS = ["mask_id", *OPTIONS]


def check_names(options: Iterable[str], others: Sequence[str]) -> None:
    """Refuse an option that is neither a method's nor among the `others` that there are."""
    known = [*others, *METHOD_OPTIONS]
    for name in options:
        if name not in METHOD_OPTIONS:
            near = get_close_matches(name, known)
            fix = f"did you mean {' or '.join(near)}?" if near else f"choose among {', '.join(known)}"
            raise UserError(f"lm-eval's model marsbench has no option {name!r}", where="--model_args", fix=fix)


def value(given: Any) -> Any:
    """A value as lm-eval's command line would read it: text that says a number, yes or no, or nothing, is meant so."""
    from lm_eval.utils import handle_arg_string

    return handle_arg_string(given) if isinstance(given, str) else given


def check_values(
    pretrained: Any, method: Any, accept: Any, threshold: Any, switches: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse what cannot be meant, before anything is loaded; `switches` are on or off."""
    if not pretrained:
        raise UserError("no checkpoint is named", fix="give --model_args pretrained=FOLDER_OR_HUB_NAME")
    for name, given in switches.items():
        if not isinstance(given, bool):
            raise UserError(f"{name}={given!r} is neither true nor false", fix="give one of the two")
    check_accept(method, accept, threshold)
    chosen = Options(**options)
    check_options(method, chosen)
    check_threshold(method, threshold, chosen.metric)


def rows(batch_size: int | str) -> int:
    if str(batch_size).startswith("auto"):
        return DEFAULT_ROWS
    return count(batch_size, "batch size {!r} is no number of rows", "give 1 or more, or auto")


def count(given: int | str, wrong: str, fix: str = "give 1 or more") -> int:
    """A number from 1; `wrong` says what anything else is not."""
    if not str(given).isdecimal() or not int(given):
        raise UserError(wrong.format(given), fix=fix)
    return int(given)


def on_command_line() -> bool:
    """Whether this is `lm_eval ...` or `python -m lm_eval ...`, and not a program that calls lm-eval."""
    program = Path(sys.argv[0])
    return program.stem in ("lm_eval", "lm-eval") or program.parts[-2:] == ("lm_eval", "__main__.py")


def asks_for_rows(arguments: Sequence[str]) -> bool:
    """Whether lm-eval's command line, or the configuration file that it names, says how many rows to decode at once.

    lm-eval itself does not tell: it hands a batch size of 1 on, whether somebody asked for it or not.
    """
    parser = argparse.ArgumentParser(add_help=False)  # takes abbreviations, as lm-eval's does
    parser.add_argument("--batch_size", "-b")
    parser.add_argument("--config", "-C", type=Path)
    found, _ = parser.parse_known_args(list(arguments))
    if found.batch_size is not None or found.config is None:
        return found.batch_size is not None
    return "batch_size" in (yaml.safe_load(found.config.read_text(encoding="utf-8")) or {})


@contextmanager
def explained() -> Iterator[None]:
    """On lm-eval's command line, a mistake that the user can mend is one message and exit status 2, as on our own."""
    try:
        yield
    except UserError as error:
        if not on_command_line():
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
