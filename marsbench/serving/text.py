"""Tokens as text while they come: nothing is sent that later tokens could change, nor what belongs to a stop string.

Whatever the portions that tokens come in, what is written is the same: the text of all tokens, up to the stop string
that is complete first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_MOST_OPEN = 64  # tokens without a text of their own that are kept: parts of characters, or special tokens
_ENOUGH = 8  # tokens to know by what character is open: it has four bytes at most
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are no whole character yet
Decode = Callable[[list[int]], str]


def decoding(tokenizer: Any) -> Decode:
    """How a tokenizer of transformers makes text of tokens, special ones left out.

    Where that is what the Rust library below it says, this is asked at once: a server decodes every token, and what
    transformers does before asking takes ten times as long.
    """
    from transformers import PreTrainedTokenizerFast

    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        rust = tokenizer.backend_tokenizer
        return lambda ids: str(rust.decode(ids, skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def bytes_of(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes that a token stands for, whose text by itself is known: of a part of a character, these are no text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if _UNFINISHED not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    return bytes(letters[letter] for letter in name) if letters.keys() >= set(name) else text.encode()


class Detokenizer:
    """The text of a growing row of tokens.

    Tokens are decoded together with those just before them, because a token's text may depend on its neighbours; so
    writing costs as much at the end of a long answer as at its beginning.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # those that are still needed: context, and tokens that are not written out
        self._known = 0  # how many of them are context
        self._written = 0  # characters of their text that are out

    def write(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text; a character that is not whole yet is kept back."""
        self._ids += tokens
        text = self._decode(self._ids)
        is_long = len(self._ids) - self._known > _MOST_OPEN
        held = len(text) - len(text.rstrip(_UNFINISHED))
        if held and is_long:  # bytes that no character comes of; only the last of them may still be part of one
            held = 1
        fresh, self._written = text[self._written : len(text) - held], max(self._written, len(text) - held)
        if held and is_long:
            self._ids, self._known = [token for token in self._ids if self._decode([token])][-_ENOUGH:], 0
            self._written = len(self._decode(self._ids)) - held
        elif not held and (context := self._decode(self._ids[self._known :])):
            self._ids = self._ids[self._known :]
            self._known, self._written = len(self._ids), len(context)
        elif not held and is_long:  # special tokens, which say nothing beside any others
            del self._ids[self._known :]
        return fresh

    def close(self) -> str:
        """What was kept back, when no more tokens come."""
        return self._decode(self._ids)[self._written :]


class Stops:
    """Cuts a text at the first stop string that is complete in it, of several that end together at the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = list(stops), ""
        self.found = False

    def write(self, text: str) -> str:
        """What of the text so far is certain to be no part of a stop string."""
        if self.found:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            return self._held[: min(ends)[1]]
        # The longest ending with which a stop string may begin is kept back.
        sizes = [size for stop in self._stops for size in range(min(len(stop), len(self._held) + 1))
                 if self._held.endswith(stop[:size])]  # fmt: skip
        keep = max(sizes, default=0)
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sent

    def close(self) -> str:
        """What was kept back, when no more text comes."""
        return "" if self.found else self._held


class Writer:
    """Tokens to text, cut at stop strings; `used` counts the tokens that went into it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(decode), Stops(stops)
        self._one_by_one = bool(stops)  # which token completes a stop string can then be told
        self.used = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.found

    def write(self, tokens: Sequence[int]) -> str:
        """What these tokens add to what may be sent."""
        sent = ""
        for portion in [[token] for token in tokens] if self._one_by_one else [tokens]:
            if self.stopped:
                break
            self.used += len(portion)
            sent += self._stops.write(self._detokenizer.write(portion))
        return sent

    def close(self) -> str:
        """What was kept back, when no more tokens come."""
        return self._stops.write(self._detokenizer.close()) + self._stops.close()
