"""`marsbench distill`: prompts in a JSON Lines file, chat data with a model's own answers in another.

Prompts are read as the model sees them, and answers checked as the trainer will read them.

Answers are logged beside the data as they come, and the data appears whole, in the order of the prompts.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from marsbench.answering import Answering
from marsbench.decoding.engine import context_length
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.files import write_atomically
from marsbench.json_lines import Log, read_objects
from marsbench.keys import content_hash
from marsbench.locks import LockedError, locked
from marsbench.methods.fitting import default_ids
from marsbench.progress import Reporter
from marsbench.training.chat_data import Message, segments, text_turns
from marsbench.training.tokenizer import prepare_for_chat

_COLUMNS = ("messages", "prompt")  # where a prompt may stand unless a column is named, the first that there is
_ASKING = ("user", "tool")  # whose turns are answered


# ---- between texts and tokens ---------------------------------------------------------------------------------------


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
    if not isinstance(turns, list):
        raise ValueError(f"{name} is neither a text nor a list of turns")
    turns = text_turns(turns, f"turn {{}} of {name}") if turns else []
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns or turns[-1]["role"] not in _ASKING or not turns[-1]["content"].strip():
        raise ValueError(f"{name} asks nothing: no user's turn with a text comes last, before the answer")
    return turns


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


# ---- answers --------------------------------------------------------------------------------------------------------

Reason = Literal["cut", "empty", "lost"]  # why an answer is left out


@dataclass(frozen=True)
class Response:
    """One answer to one prompt."""

    prompt: int  # which one, from 0
    sample: int  # which of the answers to it, from 0
    text: str
    tokens: int  # an EOS counted once
    ended: bool  # with EOS, not at the limit
    spelling: Spelling

    def left_out(self, *, keep_cut: bool) -> Reason | None:
        """Why this answer is nothing to learn from, None where it is."""
        if not self.ended and not keep_cut:
            return "cut"
        if not self.text.strip():
            return "empty"
        return "lost" if self.spelling == "lost" else None


class ResponseLog:
    """Every answer, on disk as soon as it is there, behind a first line that says how all of them came about."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Open a log, with the answers in it.

        Raises:
            UserError: it holds answers that came about otherwise, or lines that are none.
        """
        self._log = Log(
            file, lambda record: record if "settings" in record else Response(**record),
            what="a line that distill has written",
            mend="remove the line, and its prompt is answered again; without line 1, remove the file",
        )  # fmt: skip
        lines: list[Response | dict[str, Any]] = self._log.records()
        self._head = None if lines else {"settings": settings}
        if lines:
            self._check(lines[0]["settings"] if isinstance(lines[0], dict) else {}, settings)
        # By prompt and sample.
        self.answers = {(one.prompt, one.sample): one for one in lines if isinstance(one, Response)}

    def add(self, answer: Response) -> None:
        """Keep an answer; it is on disk when this returns."""
        if self._head is not None:
            self._log.append(self._head)
            self._head = None
        self._log.append(vars(answer))
        self.answers[answer.prompt, answer.sample] = answer

    def _check(self, theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Refuse to mix answers that came about in different ways."""
        other = [
            f"{name} {theirs.get(name)}, not {value}" for name, value in settings.items() if theirs.get(name) != value
        ]
        if other:
            raise UserError(
                f"the answers so far are of another run ({'; '.join(other)})",
                where=str(self._log.file),
                fix="type what was typed then, or choose another --out; removing this file gives its answers up",
            )


@contextmanager
def alone_with(file: Path) -> Iterator[None]:
    """Keeps a second command from answering the same prompts into the same file meanwhile."""
    try:
        with locked(file.with_name(f"{file.name}.lock"), patience_s=0.0):
            yield
    except LockedError as error:
        raise UserError(
            "another command is writing these answers", where=str(file), fix="wait for it, or choose another --out"
        ) from error


# Prompts are decoded by length within stretches of so many batches: little is wasted on padding, the time that is left
# can be told from the time that has passed, and no more than a stretch of generations is held in memory.
_BATCHES_AT_ONCE = 64

Key = tuple[int, int]  # prompt and sample, both from 0


@dataclass(frozen=True)
class Asking:
    """What prompts are asked for."""

    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Summary:
    """What came of it."""

    written: list[Response]
    left_out: Counter[Reason]
    unasked: int  # answers to prompts that are too long
    room: int  # tokens that the context leaves for a prompt
    limit: int  # tokens of an answer

    def in_words(self) -> str:
        """Counts on one line: what was written, and what was left out and why."""
        reasons = [
            (self.left_out["cut"], f"cut at {self.limit:,} tokens (--keep-cut keeps them)"),
            (self.left_out["empty"], "empty"),
            (self.left_out["lost"], "that chat data cannot hold (special tokens in the midst, half characters)"),
            (self.unasked, f"to prompts longer than the {self.room:,} tokens that the context leaves for them"),
        ]
        left_out = ", ".join(f"{count:,} {words}" for count, words in reasons if count)
        tokens = sum(answer.tokens for answer in self.written)
        return f"{len(self.written):,} answers with {tokens:,} tokens; left out: {left_out or 'none'}"


def log_beside(out: Path) -> Path:
    """The file in which the answers of some chat data are logged."""
    return out.with_name(f"{out.name}.answers")


def check_is_ours(out: Path) -> None:
    """Refuse to write over a file that is not the outcome of an earlier run."""
    if out.exists() and not log_beside(out).exists():
        raise UserError(
            "there is a file of that name, and no answers beside it to go on from",
            where=str(out),
            fix="choose another --out, or remove the file",
        )


class Distiller:
    """A checkpoint that answers prompts by a lossless method."""

    def __init__(self, answering: Answering, asking: Asking, reporter: Reporter) -> None:
        """Make ready.

        Raises:
            UserError: chats are not for this checkpoint, or its context has no room for a prompt.
        """
        self._answering, self._asking, self._reporter = answering, asking, reporter
        loaded = answering.loaded
        self._chats = Chats(loaded.tokenizer)
        ends, self._pad_id = default_ids(loaded)
        self._eos_ids = sorted({*ends, self._chats.end_id})  # a turn ends where the trainer will end it, too
        context = context_length(loaded.model)
        self._room = context - asking.max_new_tokens
        if self._room < 1:
            raise UserError(
                f"answers of {asking.max_new_tokens:,} tokens leave no room for a prompt in the model's context of "
                f"{context:,}",
                fix="lower --max-new-tokens",
            )

    def distill(
        self, prompts: Sequence[list[Message]], source: Path, out: Path, *, limit: int | None = None,
        keep_cut: bool = False,
    ) -> Summary:  # fmt: skip
        """Answer prompts and write them as chat data, in their order.

        Args:
            prompts: the turns before each answer.
            source: the file that they are read from, one a line.
            out: where the chat data goes; `log_beside` it are the answers that an interrupted run goes on from.
            limit: only so many of the prompts; None = all.
            keep_cut: write answers that were cut at the limit too.

        Raises:
            UserError: answers of another run lie there, the template refuses a prompt, or no answer is left to write.
        """
        asked, file = prompts[:limit], log_beside(out)
        with alone_with(file):
            log = ResponseLog(file, self._settings(prompts))
            requests = self._requests(asked, source)
            self._answer(requests, asked, log)
            answers = [log.answers[key] for key in requests]
            reasons = [answer.left_out(keep_cut=keep_cut) for answer in answers]
            summary = Summary(
                [answer for answer, reason in zip(answers, reasons, strict=True) if reason is None],
                Counter(reason for reason in reasons if reason is not None),
                len(asked) * self._asking.samples - len(answers),
                self._room,
                self._asking.max_new_tokens,
            )
            if not summary.written:
                raise UserError(
                    f"nothing to write: {summary.in_words()}", where=str(source), fix="give other prompts or options"
                )
            lines = [_line(asked[answer.prompt], answer) for answer in summary.written]
            write_atomically(out, "".join(lines).encode())
        self._say_what_differs(summary.written, asked)
        return summary

    def _settings(self, prompts: Sequence[list[Message]]) -> dict[str, Any]:
        """Everything that decides the answers; a lossless method does not, and neither does the batch size."""
        return {
            "weights": self._answering.loaded.weights[:16],
            "chat template": content_hash(self._chats.template),
            "prompts": content_hash(prompts),
            "max_new_tokens": self._asking.max_new_tokens,
            "temperature": self._asking.temperature,
            "seed": self._asking.seed,
            "dtype": str(self._answering.loaded.model.dtype).removeprefix("torch."),
        }

    def _requests(self, prompts: Sequence[list[Message]], source: Path) -> dict[Key, Request]:
        """What to decode, for the prompts that the context has room for."""
        asking, encoded = self._asking, self._chats.encoded(prompts, source)
        fitting = [number for number, ids in enumerate(encoded) if len(ids) <= self._room]
        return {
            (number, sample): Request(
                encoded[number],
                asking.max_new_tokens,
                self._answering.threshold,
                temperature=asking.temperature,
                seed=random.Random(f"{asking.seed} {number} {sample}").getrandbits(63),
            )
            for number, sample in product(fitting, range(asking.samples))
        }

    def _answer(self, requests: Mapping[Key, Request], prompts: Sequence[list[Message]], log: ResponseLog) -> None:
        """Decode what has no answer yet, with a bar; every answer is logged as soon as its row is finished."""
        todo = [key for key in requests if key not in log.answers]
        stretch = _BATCHES_AT_ONCE * self._answering.batch_size
        done, tokens, started = len(requests) - len(todo), 0, time.perf_counter()
        if done:
            self._reporter.say(f"going on after {done:,} of {len(requests):,} answers")

        def finished(keys: Sequence[Key], index: int, generation: Generation) -> None:
            nonlocal done, tokens
            said, turns = generation.tokens, prompts[keys[index][0]]
            text, spelling = self._chats.text(said), self._chats.spelling(said, turns)
            log.add(Response(*keys[index], text, generation.emitted, generation.finish == "eos", spelling))
            done, tokens = done + 1, tokens + generation.emitted
            bar.update(done, len(requests), f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")

        with self._reporter.bar(f"answering by {self._answering.method.name}") as bar:
            for first in range(0, len(todo), stretch):
                keys = todo[first : first + stretch]
                self._answering.decode(
                    [requests[key] for key in keys],
                    eos_id=self._eos_ids,
                    pad_id=self._pad_id,
                    on_finished=partial(finished, keys),
                )

    def _say_what_differs(self, written: Sequence[Response], prompts: Sequence[list[Message]]) -> None:
        """Say of how many conversations more, or other tokens, will be learned than the model has said."""
        if others := sum(answer.spelling == "other" for answer in written):
            self._reporter.say(f"answers to be learned as other tokens of the same text: {others:,}")
        if earlier := sum(any(turn["role"] == "assistant" for turn in prompts[one.prompt]) for one in written):
            self._reporter.say(
                f"conversations with earlier answers, which stay as they are and are learned too: {earlier:,}"
            )


def _line(turns: list[Message], answer: Response) -> str:
    return json.dumps({"messages": [*turns, {"role": "assistant", "content": answer.text}]}) + "\n"
