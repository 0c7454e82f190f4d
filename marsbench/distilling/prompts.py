"""Prompts as users have them: questions, conversations, or a column of any JSON Lines file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marsbench.errors import UserError
from marsbench.json_lines import read_objects
from marsbench.training.chat_data import ROLES, Message

_COLUMNS = ("messages", "prompt")  # where a prompt may stand unless a column is named, the first that there is
_ASKING = ("user", "tool")  # whose turns are answered


def read_prompts(file: Path, column: str | None = None) -> list[list[Message]]:
    """The turns that stand before each answer, one prompt a line.

    A prompt is a text, which is the user's turn, or a list of turns, whose closing turns of the assistant are left out:
    so any chat data serves as prompts.

    Args:
        file: JSON Lines.
        column: holds the prompts; None = `messages`, else `prompt`.

    Raises:
        UserError: a line that asks nothing, with its number.
    """
    return [
        _prompt(record, column, f"{file}, line {number}")
        for number, record in enumerate(read_objects(file, [column] if column else []), 1)
    ]


def _prompt(record: Mapping[str, Any], column: str | None, where: str) -> list[Message]:
    """The turns before the answer of one line."""
    name = column or next((known for known in _COLUMNS if known in record), None)
    if name is None:
        raise UserError(
            f"no column {' or '.join(_COLUMNS)}", where=where,
            fix=f"say with --column which one holds the prompts: {', '.join(record) or 'this line has none'}",
        )  # fmt: skip
    try:
        return _turns(record[name], name)
    except ValueError as error:
        raise UserError(
            str(error), where=where,
            fix=f'write {{"{name}": "..."}} or {{"{name}": [{{"role": "user", "content": "..."}}, ...]}} on one line',
        ) from error  # fmt: skip


def _turns(value: Any, name: str) -> list[Message]:
    """The turns before the answer; raises ValueError for anything but text turns that end in a question."""
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{name} is neither a text nor a list of turns")
    while turns and turns[-1].get("role") == "assistant":
        turns = turns[:-1]
    for number, turn in enumerate(turns, 1):
        if turn.get("role") not in ROLES:
            raise ValueError(f"turn {number} of {name} has no role among {', '.join(ROLES)}")
        if not isinstance(turn.get("content"), str):
            raise ValueError(f"turn {number} of {name} has no content that is text")
    if not turns or turns[-1]["role"] not in _ASKING or not turns[-1]["content"].strip():
        raise ValueError(f"{name} asks nothing: no user's turn with a text comes last, before the answer")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]
