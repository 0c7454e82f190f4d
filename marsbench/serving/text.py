"""Tokens as text while they come: nothing is sent that later tokens could change, nor what belongs to a stop string.

Text is made of each token's own bytes, so it does not depend on the portions that tokens come in. (To decode rows of
tokens instead loses what stands beside half a character where a tokenizer falls back to bytes.)
"""

import codecs
import functools
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are no whole character


class Vocabulary:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {*tokenizer.all_special_ids}
        self._special |= {number for number, each in tokenizer.added_tokens_decoder.items() if each.special}
        self._before = list(tokenizer("a", add_special_tokens=False).input_ids)  # at a beginning, spaces may be lost
        self._begins = len(self._decode(self._before))
        self._letters = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
        self.bytes = functools.lru_cache(2**18)(self._bytes)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _bytes(self, token: int) -> bytes:
        """A token behind other text, or the part of a character that it is; nothing of a special token."""
        if token in self._special:
            return b""
        text = self._decode([*self._before, token])[self._begins :]
        if _UNFINISHED not in text:
            return text.encode()
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return bytes(self._letters[letter] for letter in name) if self._letters.keys() >= {*name} else text.encode()


class Writer:
    """Tokens to text, cut at the first whole stop string, of several the longest; `used` counts those that went in."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary, self._stops, self._held = vocabulary, list(stops), ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps back what is no whole character yet
        self.used, self.stopped = 0, False

    def write(self, tokens: Sequence[int]) -> str:
        sent = ""  # one by one, it can be told which token completes a stop string
        for portion in [[token] for token in tokens] if self._stops else [tokens]:
            if self.stopped:
                break
            self.used += len(portion)
            sent += self._cut(self._decoder.decode(b"".join(map(self._vocabulary.bytes, portion))))
        return sent

    def close(self) -> str:
        rest = self._cut(self._decoder.decode(b"", final=True))
        return rest if self.stopped else rest + self._held

    def _cut(self, text: str) -> str:
        """What of the text so far is certain to be no part of a stop string."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._held[: min(ends)[1]]
        # The longest ending with which a stop string may begin is kept back.
        sizes = range(min(len(self._held), max(map(len, self._stops), default=0)), 0, -1)
        keep = next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sent
