"""Tokens as text while they come: the same text whatever the portions, and nothing that should not have been sent."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from marsbench.serving.answers import Shape
from marsbench.serving.text import Stops, Writer, decoding
from marsbench.serving.wire import event
from marsbench.training.tokenizer import build_tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(300, texts=50)


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
    writer = Writer(decode)
    sent = [writer.write(portion) for portion in portions(ids, cuts)]
    assert "".join([*sent, writer.close()]) == decode(ids)
    assert writer.used == len(ids)


@given(st.lists(st.sampled_from([0, 1, 2, 33, 0xE2, 0x82, 0xAC, 0xFF]), min_size=200, max_size=400))
@settings(deadline=None, max_examples=8)
def test_tokens_without_a_text_cost_no_more_the_more_there_are(bytes_and_specials: list[int]) -> None:
    """Guards against special tokens, and bytes that no character comes of, decoded again for each that comes."""
    asked = 0

    def counting(ids: list[int]) -> str:
        nonlocal asked
        asked += len(ids)
        return decode(ids)

    of_bytes = tokenizer().convert_tokens_to_ids(list(ByteLevel.alphabet()))
    for ids in (bytes_and_specials, [of_bytes[one % len(of_bytes)] for one in bytes_and_specials], [1] * 1000,
                [one for one in of_bytes if decode([one]) == UNFINISHED] * 10):  # fmt: skip
        writer, asked = Writer(counting), 0
        assert "".join([*(writer.write([one]) for one in ids), writer.close()]) == decode(ids)
        assert asked < 300 * len(ids)


@settings(deadline=None)
@given(
    IDS, st.lists(st.integers(0, 100)),
    st.lists(st.one_of(st.text("abcdé ", min_size=1, max_size=3), st.sampled_from(["€", "\n", "the"])), max_size=3),
)  # fmt: skip
def test_stop_strings_cut_alike_in_all_portions(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    """Guards against a stop string that is missed across tokens, and text behind it that is sent all the same."""
    writer = Writer(decode, stops)
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
    writer = Writer(decode, ["three", "two"])
    assert writer.write(ids) == "one " and writer.stopped
    assert decode(ids[: writer.used]).endswith("two") and writer.close() == ""


@given(IDS)
def test_the_short_way_to_text_is_the_long_one(ids: list[int]) -> None:
    """Guards against a server whose words differ from those of the tokenizer's own `decode`."""
    assert decoding(tokenizer())(ids) == decode(ids)


@given(st.booleans(), st.booleans(), st.lists(st.text(min_size=1), min_size=1, max_size=4), st.text())
def test_parts_are_the_chunks_that_they_stand_for(chat: bool, usage: bool, texts: list[str], model: str) -> None:
    """Guards against an event put together from pieces that is not the chunk, byte by byte."""
    shape, plain = Shape(model, chat, usage), Shape(model, chat, usage)
    plain.head = shape.head
    for text in texts:
        assert shape.part(0, text) == event(plain.chunk(0, text))
