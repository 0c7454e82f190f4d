"""Between texts and tokens: prompts as the model sees them, and answers as the trainer will read them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from marsbench.errors import UserError
from marsbench.training.chat_data import Message, segments
from marsbench.training.tokenizer import prepare_for_chat

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
        """The chat template."""
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
