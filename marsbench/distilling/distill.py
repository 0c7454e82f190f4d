"""`marsbench distill`: prompts in a JSON Lines file, chat data with a model's own answers in another.

Answers are checked as the trainer will read them, and logged beside the data as they come; the data appears whole, in
the order of the prompts.
"""

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from marsbench.answering import Answering, default_ids
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError, told_to_user
from marsbench.files import write_atomically
from marsbench.forward.limits import room_for_prompt
from marsbench.json_lines import Log, read_lines
from marsbench.keys import content_hash
from marsbench.locks import locked
from marsbench.progress import Reporter
from marsbench.training.chat_data import Message, segments, text_turns
from marsbench.training.checkpoints import Loaded
from marsbench.training.tokenizer import prepare_for_chat

_ASKING = ("user", "tool")  # whose turns are answered
REPLACED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no text are decoded to

Prompt = list[Message]  # the turns before an answer
Key = tuple[int, int]  # of an answer: which prompt, and which answer to it, from 0


def read_prompts(file: Path, column: str | None = None) -> list[Prompt]:
    """The turns that stand before each answer, one prompt a line.

    A prompt is a text, which is the user's turn, or a list of turns, whose closing turns of the assistant are left out:
    so any chat data serves. `column` holds the prompts; None = `messages`, else `prompt`. `UserError` for a line that
    asks nothing, with its number.
    """
    prompts = []
    lines = read_lines(file, dict[str, Any], what="a prompt", mend='write {"prompt": "..."} on each line')
    for number, record in enumerate(lines, 1):
        name = column or ("messages" if "messages" in record else "prompt")
        fix = f"write a text or a list of turns, or say with --column which one holds the prompts: {', '.join(record)}"
        with told_to_user(f"{name} holds no prompt", ValueError, where=f"{file}, line {number}", fix=fix):
            said = record.get(name)
            turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
            while isinstance(turns, list) and turns and _is_answer(turns[-1]):
                turns = turns[:-1]
            turns = text_turns(turns) if turns != [] else []
            if not turns or turns[-1]["role"] not in _ASKING or not turns[-1]["content"].strip():
                raise ValueError("it asks nothing: no user's turn with a text comes last, before the answer")
            prompts.append(turns)
    return prompts


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


class Chats:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make a copy ready as the trainer does; `UserError` where the trainer could not use it."""
        self.tokenizer = copy.deepcopy(tokenizer)
        prepare_for_chat(self.tokenizer)

    def ends(self, loaded: Loaded) -> tuple[list[int], int]:
        """The ids that end an answer, that with which the trainer ends it among them; and the id that pads."""
        ends, pad = default_ids(loaded)
        return sorted({*ends, int(self.tokenizer.eos_token_id)}), pad

    def encoded(self, prompts: Sequence[Prompt], source: Path) -> list[list[int]]:
        texts, mend = list[str](), "mend or remove the line"
        for number, turns in enumerate(prompts, 1):
            place = f"{source}, line {number}"
            with told_to_user("the chat template refuses the prompt", TemplateError, where=place, fix=mend):
                texts.append(str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False).input_ids
        return ids

    def text(self, tokens: list[int], *, special: bool = False) -> str:
        """Tokens as text, with the special ones among them or without; nothing is tidied up."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def keeps(self, tokens: list[int], turns: list[Message]) -> str:
        """Whether the trainer will read an answer's "tokens", or its "text" as others; "" where a special token or half
        a character makes it another text.
        """
        text = self.text(tokens)
        try:
            (*_, (learned, _)) = segments(self.tokenizer, [*turns, {"role": "assistant", "content": text}])
        except ValueError:
            return ""
        *read, _ = self.tokenizer(learned, add_special_tokens=False).input_ids  # the last one ends the turn
        # Templates may write the white space around an answer in a way of their own, here as in all chat data.
        texts = {form.strip() for form in (text, self.text(tokens, special=True), self.text(read))}
        if len(texts) > 1 or REPLACED in text:
            return ""
        return "tokens" if read == tokens else "text"


# Why an answer is left out.
_CUT, _EMPTY = "cut at --max-new-tokens (--keep-cut keeps them)", "empty"
_LOST = "that chat data cannot hold (special tokens in the midst, half characters)"


@dataclass(frozen=True)
class Response:
    prompt: int  # which one, from 0
    text: str
    tokens: int  # an EOS counted once
    ended: bool  # with EOS, not at the limit
    kept: bool  # by chat data, see `Chats.keeps`
    sample: int = 0  # which answer to the prompt
    own: bool = True  # its tokens are kept, too

    def left_out(self, *, keep_cut: bool) -> str | None:
        if not self.ended and not keep_cut:
            return _CUT
        if not self.text.strip():
            return _EMPTY
        return None if self.kept else _LOST


# Prompts are decoded by length within stretches of so many batches: so the time left is known, and memory bounded.
_BATCHES_AT_ONCE = 64


@dataclass
class Distiller:
    """A checkpoint that answers prompts by a lossless method; `UserError` where its context has no room for one."""

    answering: Answering
    reporter: Reporter
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0  # from which every answer has its own

    def __post_init__(self) -> None:
        self.chats = Chats(self.answering.loaded.tokenizer)
        self._room = room_for_prompt(self.answering.loaded.model, self.max_new_tokens)

    def distill(
        self, prompts: Sequence[Prompt], source: Path, out: Path, *, limit: int | None = None, samples: int = 1,
        keep_cut: bool = False,
    ) -> tuple[int, str]:  # fmt: skip
        """Answer the first `limit` prompts of `source`, `samples` times each, and write `out`, in their order.

        An interrupted run goes on from the answers beside `out`; `keep_cut` writes those cut at the limit too. Returns
        how many were written, and that in words. `UserError` where another file lies there, or no answer is left to
        write.
        """
        asked = prompts[:limit]
        lock = out.with_name(f"{out.name}.lock")
        with locked(lock, patience_s=0.0, busy="another command is writing these answers"):
            log = self._log(prompts, out)
            requests = {
                (number, sample): Request(
                    ids, self.max_new_tokens, self.answering.threshold, temperature=self.temperature,
                    seed=random.Random(f"{self.seed} {number} {sample}").getrandbits(63),
                )
                for number, ids in enumerate(self.chats.encoded(asked, source))
                for sample in range(samples)
                if len(ids) <= self._room
            }  # fmt: skip
            answers = self._answer(requests, asked, log)
            reasons = [answer.left_out(keep_cut=keep_cut) for answer in answers]
            written = [answer for answer, reason in zip(answers, reasons, strict=True) if reason is None]
            too_long = f"to prompts longer than the {self._room:,} tokens that the context leaves for them"
            left_out = Counter({too_long: samples * len(asked) - len(requests)}) + Counter(filter(None, reasons))
            others = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
            tokens = sum(answer.tokens for answer in written)
            words = f"{len(written):,} answers with {tokens:,} tokens; left out: {others or 'none'}"
            if not written:
                raise UserError(f"nothing to write: {words}", where=str(source), fix="give other prompts or options")
            chats = ([*asked[response.prompt], {"role": "assistant", "content": response.text}] for response in written)
            write_atomically(out, "".join(json.dumps({"messages": turns}) + "\n" for turns in chats).encode())
        if retold := sum(not response.own for response in written):
            words += f"; {retold:,} are learned as other tokens of the same text"
        if earlier := sum(any(map(_is_answer, asked[response.prompt])) for response in written):
            words += f"; earlier answers stand in {earlier:,} of the conversations, and are learned as they are"
        return len(written), words

    def _log(self, prompts: Sequence[Prompt], out: Path) -> Log[Response]:
        """The log beside `out`, named after all that decides the answers: a lossless method and batches do not."""
        settings = {
            "weights": self.answering.loaded.weights, "chat template": str(self.chats.tokenizer.chat_template),
            "prompts": prompts, "max_new_tokens": self.max_new_tokens, "temperature": self.temperature,
            "seed": self.seed, "dtype": self.answering.loaded.dtype,
        }  # fmt: skip
        file = out.with_name(f"{out.name}.{content_hash(settings)}.answers")
        if out.exists() and not file.exists():
            what = f"the file exists, with other settings (one of: {', '.join(settings)})"
            raise UserError(what, where=str(out), fix="choose another --out")
        return Log(file, Response, what="an answer", mend="remove the line, and its prompt is answered again")

    def _answer(self, requests: Mapping[Key, Request], prompts: Sequence[Prompt], log: Log[Response]) -> list[Response]:
        answers = {(line.prompt, line.sample): line for line in log.records()}
        todo = [key for key in requests if key not in answers]
        stretch = _BATCHES_AT_ONCE * self.answering.batch_size
        done, tokens, started = len(requests) - len(todo), 0, time.perf_counter()
        if done:
            self.reporter.say(f"going on after {done:,} of {len(requests):,} answers")
        eos_ids, pad_id = self.chats.ends(self.answering.loaded)

        def finished(keys: Sequence[Key], index: int, generation: Generation) -> None:
            nonlocal done, tokens
            (number, sample), said = keys[index], generation.tokens
            kept, ended = self.chats.keeps(said, prompts[number]), generation.finish == "eos"
            answers[keys[index]] = Response(
                number, self.chats.text(said), generation.emitted, ended, bool(kept), sample, kept == "tokens"
            )
            log.append(vars(answers[keys[index]]))
            done, tokens = done + 1, tokens + generation.emitted
            bar.update(done, len(requests), f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")

        with self.reporter.bar(f"answering by {self.answering.method.name}") as bar:
            for first in range(0, len(todo), stretch):
                keys = todo[first : first + stretch]
                asked, told = [requests[key] for key in keys], partial(finished, keys)
                self.answering.decode(asked, eos_id=eos_ids, pad_id=pad_id, on_finished=told)
        return [answers[key] for key in requests]


TEMPERATURE = 0.8
_LONGEST, _SHORTEST = 72, 5  # tokens of a question
_DRAWN = 3  # questions are drawn for one that is kept, at most
_AT_ONCE = 2048  # questions that are drawn before it is looked how many are kept
_PLACE = "~the question~"


def self_asked(answering: Answering, wanted: int, out: Path, reporter: Reporter, *, seed: int = 0) -> Path:
    """Have a model ask so many questions, no two alike, written as prompts unless they are there (arXiv 2406.08464)."""
    if out.exists():
        reporter.say(f"the questions are those of {out}, however many; for others, remove it")
        return out
    chats = Chats(answering.loaded.tokenizer)
    turn = [{"role": "user", "content": _PLACE}]
    before, place, after = str(chats.tokenizer.apply_chat_template(turn, tokenize=False)).partition(_PLACE)
    if not place or not after.strip():
        raise UserError("the chat template does not say where a user's turn begins and ends", fix="give --prompts")
    ids: list[int] = chats.tokenizer(before, add_special_tokens=False).input_ids
    (first_after, *_) = chats.tokenizer(after, add_special_tokens=False).input_ids
    ends, pad_id = chats.ends(answering.loaded)
    kept = dict[str, None]()

    def finished(_: int, made: Generation) -> None:
        text = chats.text(made.tokens)
        is_whole = made.finish == "eos" and len(made.tokens) >= _SHORTEST and REPLACED not in text
        if len(kept) < wanted and is_whole and text.strip() and text == chats.text(made.tokens, special=True):
            kept[text.strip()] = None
            bar.update(len(kept), wanted)

    with reporter.bar("the model asks itself") as bar:
        for first in range(0, _DRAWN * wanted, _AT_ONCE):
            numbers = range(first, first + min(_AT_ONCE, 2 * (wanted - len(kept))))
            requests = [Request(ids, _LONGEST, temperature=TEMPERATURE, seed=1000 * seed + place) for place in numbers]
            answering.decode(requests, eos_id=sorted({*ends, first_after}), pad_id=pad_id, on_finished=finished)
            if len(kept) == wanted:
                break
    if 10 * len(kept) < wanted:
        raise UserError(f"the model asked only {len(kept):,} of {wanted:,} questions", fix="give --prompts")
    reporter.say(f"the model asked itself {len(kept):,} questions")
    write_atomically(out, "".join(json.dumps({"prompt": text}) + "\n" for text in kept).encode())
    return out
