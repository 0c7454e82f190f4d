"""Tokens as text while they come: the same text whatever the portions, and nothing that should not have been sent."""

from __future__ import annotations

import asyncio
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from marsbench.serving.answers import Choice, Completion
from marsbench.serving.messages import Job, Likelihood
from marsbench.serving.text import Stops, Vocabulary, Writer
from marsbench.training.tokenizer import build_tokenizer


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(300, texts=50)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer())


@cache
def falls_back_to_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has one: spaces are marks before words, and what it lacks is bytes. Token 3 + N is byte N.

    "true", " true" and byte 0x41 beside "A" are tokens that look alike.
    """
    words = ["\u2581", "\u2581true", "true", *"abehlortuwyA", "\u2581wor", "\u2581a"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    core = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>",
                                byte_fallback=True, fuse_unk=True))  # fmt: skip
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def decode(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def portions(items: list[int], cuts: list[int]) -> list[list[int]]:
    """A list in pieces."""
    places = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[first:last] for first, last in pairwise(places)]


def cut(text: str, stops: list[str]) -> str:
    """A text up to the stop string that is complete first, of several the longest: by brute force."""
    for end in range(1, len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(starts)]
    return text


IDS = st.one_of(
    st.lists(st.integers(0, 299), max_size=40),  # bytes of characters that never end among them
    st.text(max_size=20).map(lambda text: list(tokenizer()(text, add_special_tokens=False).input_ids)),
)


@settings(deadline=None)
@given(IDS, st.lists(st.integers(0, 100)))
@example(list("€".encode()), [1, 2])
def test_text_in_portions_is_the_text(ids: list[int], cuts: list[int]) -> None:
    """Guards against characters that are broken where a forward ends, doubled, or lost at the end."""
    writer = Writer(vocabulary())
    sent = [writer.write(portion) for portion in portions(ids, cuts)]
    assert "".join([*sent, writer.close()]) == decode(ids)
    assert writer.used == len(ids)


@settings(deadline=None)
@given(
    IDS, st.lists(st.integers(0, 100)),
    st.lists(st.one_of(st.text("abcdé ", min_size=1, max_size=3), st.sampled_from(["€", "\n", "the"])), max_size=3),
)  # fmt: skip
def test_stop_strings_cut_alike_in_all_portions(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    """Guards against a stop string that is missed across tokens, and text behind it that is sent all the same."""
    writer = Writer(vocabulary(), stops)
    sent = "".join([*(writer.write(portion) for portion in portions(ids, cuts)), writer.close()])
    assert sent == cut(decode(ids), stops)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_ever_sent(pieces: list[str], stops: list[str]) -> None:
    """Guards against the beginning of a stop string that is sent before its end has come."""
    writer, sent, text = Stops(stops), "", ""
    for piece in pieces:
        text += piece
        sent += writer.write(piece)
        assert cut(text, stops).startswith(sent)
        assert writer.found == (cut(text, stops) != text)
    assert sent + writer.close() == cut(text, stops)


def test_the_first_of_several_stops_in_one_forward_wins() -> None:
    """Guards against a list of stop strings whose order decides, where the text should."""
    ids = tokenizer()("one two three", add_special_tokens=False).input_ids
    writer = Writer(vocabulary(), ["three", "two"])
    assert writer.write(ids) == "one " and writer.stopped
    assert decode(ids[: writer.used]).endswith("two") and writer.close() == ""


BYTES = st.lists(
    st.sampled_from([b"\n", b"\xe2", b"\x82", b"\xac", b"a", b" ", b"\xff", "\N{EURO SIGN}".encode()]), max_size=30
).map(b"".join)


@settings(deadline=None)
@given(BYTES, st.lists(st.integers(0, 100)))
@example(b"\n\xe2", [1])
@example(b"\xe2\n", [1])
def test_what_stands_beside_half_a_character_is_kept(data: bytes, cuts: list[int]) -> None:
    """Guards against a line break that is in the stream and not in the whole answer, or in neither."""
    writer = Writer(Vocabulary(falls_back_to_bytes()))
    sent = [writer.write(portion) for portion in portions([3 + byte for byte in data], cuts)]
    assert "".join([*sent, writer.close()]) == data.decode("utf-8", "replace")


def test_a_token_looks_as_it_does_behind_others() -> None:
    """Guards against words that lose their space, and parts of characters that are told as text."""
    own, known = falls_back_to_bytes(), Vocabulary(falls_back_to_bytes())
    for name, text in {
        "\u2581true": " true",
        "true": "true",
        "\u2581": " ",
        "\u2581wor": " wor",
        "<0x0A>": "\n",
    }.items():
        token = known.token(own.convert_tokens_to_ids(name))
        assert (token.text, token.bytes, token.is_special) == (text, text.encode(), False)
    assert known.token(3 + 0xE2).bytes == b"\xe2" and known.token(2).is_special
    writer = Writer(known)
    names = ["\u2581wor", "l", "<0xC3>", "<0xA9>", "\u2581", "</s>", "\u2581true"]
    assert writer.write(own.convert_tokens_to_ids(names)) == " worl\N{LATIN SMALL LETTER E WITH ACUTE}  true"


@settings(deadline=None)
@given(st.text("ab \n\N{EURO SIGN}\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}", min_size=1, max_size=20))
def test_bytes_and_offsets_are_those_of_the_text(text: str) -> None:
    """Guards against parts of characters that each count as one, and the names of special tokens that count at all."""
    for own in (tokenizer(), falls_back_to_bytes()):
        ids = [*own(text, add_special_tokens=False).input_ids, own.eos_token_id]
        said = worded(own, Likelihood(ids, [-1.0] * len(ids), [[]] * len(ids)))
        every = [Vocabulary(own).token(token).bytes for token in ids[:-1]]
        whole = b"".join(every)
        assert whole.decode().removeprefix(" " if own is falls_back_to_bytes() else "") == text
        before = [b"".join(every[:number]).decode("utf-8", "ignore") for number in range(len(ids))]
        assert said["text_offset"] == list(map(len, before))


def test_the_likeliest_of_tokens_that_look_alike_keeps_its_name() -> None:
    """Guards against a likeliest token that vanishes behind another of the same text."""
    own = falls_back_to_bytes()
    letter, byte = own.convert_tokens_to_ids(["A", "<0x41>"])
    half, other = 3 + 0xE2, 3 + 0x82
    best = [[(byte, -0.1), (letter, -2.0), (half, -3.0), (other, -4.0)]]
    (said,) = worded(own, Likelihood([byte], [-0.1], best))["top_logprobs"]
    assert list(said.values()) == [-0.1, -2.0, -3.0, -4.0] and said["A"] == -0.1


def worded(own: PreTrainedTokenizerFast, found: Likelihood) -> dict[str, Any]:
    """Log-probabilities as a completion words them."""
    completion = object.__new__(Completion)
    completion._is_chat, completion._answers = False, SimpleNamespace(vocabulary=Vocabulary(own))  # type: ignore[assignment]
    choice = Choice(0, Writer(Vocabulary(own)), Job([5], 99, id=1, method="ar"), asyncio.Event())
    return completion._logprobs(choice, found, len(found.tokens))
