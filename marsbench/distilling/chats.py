"""Between texts and tokens: prompts as the model sees them, and answers as the trainer will read them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from marsbench.errors import UserError
from marsbench.json_lines import read_objects
from marsbench.training.chat_data import ROLES, Message, segments
from marsbench.training.tokenizer import prepare_for_chat

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


# What the trainer will read of an answer's text: the model's own tokens, other tokens of the same text, or another text
# (a special token in the midst, half a character at the end, a chat template that rewrites answers).
Spelling = Literal["own", "other", "lost"]
_REPLACED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no text are decoded to


class Chats:
    """A checkpoint's chat template and tokenizer, as the trainer uses them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make a copy ready as the trainer does; the one that is given stays as it is.

        Raises:
            UserError: the trainer could not use it.
        """
        self._tokenizer = copy.deepcopy(tokenizer)
        try:
            prepare_for_chat(self._tokenizer)
        except UserError as error:
            raise UserError(error.what, where=error.where, fix="choose a checkpoint that is made for chats") from error

    @property
    def template(self) -> str:
        return str(self._tokenizer.chat_template)

    @property
    def end_id(self) -> int:
        """The token that the trainer ends an answer with."""
        return int(self._tokenizer.eos_token_id)

    def encoded(self, prompts: Sequence[list[Message]], source: Path) -> list[list[int]]:
        """Prompts as token ids, up to where the assistant begins; `UserError` for one that the template refuses."""
        texts = [self._opened(turns, f"{source}, line {number}") for number, turns in enumerate(prompts, 1)]
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False).input_ids
        return ids

    def _opened(self, turns: list[Message], where: str) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise UserError(
                f"the chat template refuses the prompt: {error}", where=where, fix="mend or remove the line"
            ) from error

    def text(self, tokens: list[int], *, special: bool = False) -> str:
        """Tokens as text, with the special ones among them or without; nothing is tidied up."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def spelling(self, tokens: list[int], turns: list[Message]) -> Spelling:
        """Whether the trainer will read an answer's text as its tokens, as others of the same text, or otherwise."""
        text = self.text(tokens)
        try:
            (*_, (learned, _)) = segments(self._tokenizer, [*turns, {"role": "assistant", "content": text}])
        except ValueError:
            return "lost"
        *read, _ = self._tokenizer(learned, add_special_tokens=False).input_ids  # the last one ends the turn
        if read == tokens:
            return "own"
        # Templates may write the white space around an answer in a way of their own, here as in all chat data.
        texts = {one.strip() for one in (text, self.text(tokens, special=True), self.text(read))}
        return "other" if len(texts) == 1 and _REPLACED not in text else "lost"
