"""Prompts that a model asks itself: users' turns, sampled from where its chat template begins one (arXiv 2406.08464).

For users without prompts: what a model takes for a question is like what it was taught to answer.
"""

import json
from itertools import count
from pathlib import Path

from marsbench.answering import Answering
from marsbench.decoding.generation import Generation, Request
from marsbench.distilling.distill import REPLACED, Chats
from marsbench.errors import UserError
from marsbench.files import write_atomically
from marsbench.progress import Reporter

TEMPERATURE = 0.8
_LONGEST, _SHORTEST = 72, 5  # tokens of a question
_DRAWN = 3  # questions are drawn for one that is kept, at most
_AT_ONCE = 2048  # questions that are drawn before it is looked how many are kept
_PLACE = "~the question~"


def self_asked(answering: Answering, wanted: int, out: Path, reporter: Reporter, *, seed: int = 0) -> Path:
    """Have a model ask so many questions, no two alike, and write them as prompts, one a line.

    A file that is there stays. Every question has a seed of its own, from `seed`. `UserError` where the model asks too
    little that is a question.
    """
    if out.exists():
        return out
    chats = Chats(answering.loaded.tokenizer)
    turn = [{"role": "user", "content": _PLACE}]
    before, place, after = str(chats.tokenizer.apply_chat_template(turn, tokenize=False)).partition(_PLACE)
    if not place or not after.strip():
        raise UserError("the chat template does not say where a user's turn begins and ends", fix="give --prompts")
    ids: list[int] = chats.tokenizer(before, add_special_tokens=False).input_ids
    (first_after, *_) = chats.tokenizer(after, add_special_tokens=False).input_ids
    ends, pad_id = chats.ends(answering.loaded)
    kept, numbers = dict[str, None](), iter(count())

    def finished(_: int, made: Generation) -> None:
        text = chats.text(made.tokens)
        is_whole = made.finish == "eos" and len(made.tokens) >= _SHORTEST and REPLACED not in text
        if len(kept) < wanted and is_whole and text.strip() and text == chats.text(made.tokens, special=True):
            kept[text.strip()] = None
            bar.update(len(kept), wanted)

    with reporter.bar("the model asks itself") as bar:
        for _ in range(0, _DRAWN * wanted, _AT_ONCE):
            drawn = [next(numbers) for _ in range(min(_AT_ONCE, 2 * (wanted - len(kept))))]
            requests = [Request(ids, _LONGEST, temperature=TEMPERATURE, seed=1000 * seed + number) for number in drawn]
            answering.decode(requests, eos_id=sorted({*ends, first_after}), pad_id=pad_id, on_finished=finished)
            if len(kept) == wanted:
                break
    if 10 * len(kept) < wanted:
        raise UserError(f"of {wanted:,} questions the model asked {len(kept):,}", fix="give --prompts")
    reporter.say(f"the model asked itself {len(kept):,} questions")
    write_atomically(out, "".join(json.dumps({"prompt": text}) + "\n" for text in kept).encode())
    return out
