"""`marsbench distill`: prompts in a JSON Lines file, chat data with a model's own answers in another.

Prompts are read as the model sees them, and answers checked as the trainer will read them.

Answers are logged beside the data as they come, and the data appears whole, in the order of the prompts.
"""

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from marsbench.answering import Answering
from marsbench.decoding.engine import context_length
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError, told_to_user
from marsbench.files import write_atomically
from marsbench.json_lines import Log, read_lines
from marsbench.keys import content_hash
from marsbench.locks import locked
from marsbench.methods.fitting import default_ids
from marsbench.progress import Reporter
from marsbench.training.chat_data import Message, segments, text_turns
from marsbench.training.checkpoints import Loaded
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
    lines = read_lines(file, dict[str, Any], what="a prompt", mend='write {"prompt": "..."} on each line')
    return [_prompt(record, column, f"{file}, line {number}") for number, record in enumerate(lines, 1)]


def _prompt(record: Mapping[str, Any], column: str | None, where: str) -> list[Message]:
    columns = (column,) if column else _COLUMNS
    name = next((known for known in columns if known in record), None)
    if name is None:
        fix = f"say with --column which one holds the prompts: {', '.join(record) or 'this line has none'}"
        raise UserError(f"no column {' or '.join(columns)}", where=where, fix=fix)
    turns = [{"role": "user", "content": record[name]}] if isinstance(record[name], str) else record[name]
    fix = f'write {{"{name}": "..."}} or {{"{name}": [{{"role": "user", "content": "..."}}, ...]}} on one line'
    with told_to_user("this is no prompt", ValueError, where=where, fix=fix):
        if not isinstance(turns, list):
            raise ValueError(f"{name} is neither a text nor a list of turns")
        while turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
            turns = turns[:-1]
        turns = text_turns(turns, f"turn {{}} of {name}") if turns else []
        if not turns or turns[-1]["role"] not in _ASKING or not turns[-1]["content"].strip():
            raise ValueError(f"{name} asks nothing: no user's turn with a text comes last, before the answer")
    return turns


# What the trainer will read of an answer's text: the model's own tokens, other tokens of the same text, or another text
# (a special token in the midst, half a character at the end, a chat template that rewrites answers).
Spelling = Literal["own", "other", "lost"]
REPLACED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no text are decoded to


class Chats:
    """A checkpoint's chat template and tokenizer, as the trainer uses them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make a copy ready as the trainer does; the one that is given stays as it is.

        Raises:
            UserError: the trainer could not use it.
        """
        self.tokenizer = copy.deepcopy(tokenizer)
        try:
            prepare_for_chat(self.tokenizer)
        except UserError as error:
            raise UserError(error.what, where=error.where, fix="choose a checkpoint that is made for chats") from error

    def ends(self, loaded: Loaded) -> tuple[list[int], int]:
        """The ids that end an answer, that with which the trainer ends it among them; and the id that pads."""
        ends, pad = default_ids(loaded)
        return sorted({*ends, int(self.tokenizer.eos_token_id)}), pad

    def encoded(self, prompts: Sequence[list[Message]], source: Path) -> list[list[int]]:
        """Prompts as token ids, up to where the assistant begins; `UserError` for one that the template refuses."""
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

    def spelling(self, tokens: list[int], turns: list[Message]) -> Spelling:
        """Whether the trainer will read an answer's text as its tokens, as others of the same text, or otherwise."""
        text = self.text(tokens)
        try:
            (*_, (learned, _)) = segments(self.tokenizer, [*turns, {"role": "assistant", "content": text}])
        except ValueError:
            return "lost"
        *read, _ = self.tokenizer(learned, add_special_tokens=False).input_ids  # the last one ends the turn
        if read == tokens:
            return "own"
        # Templates may write the white space around an answer in a way of their own, here as in all chat data.
        texts = {form.strip() for form in (text, self.text(tokens, special=True), self.text(read))}
        return "other" if len(texts) == 1 and REPLACED not in text else "lost"


# ---- answers --------------------------------------------------------------------------------------------------------

Reason = Literal["cut", "empty", "lost"]  # why an answer is left out


@dataclass(frozen=True)
class Response:
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


def log_beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.answers")


def check_is_ours(out: Path) -> None:
    """Refuse to write over a file that is not the outcome of an earlier run."""
    if out.exists() and not log_beside(out).exists():
        fix = "choose another --out, or remove the file"
        raise UserError("there is a file of that name, and no answers beside it to go on from", where=str(out), fix=fix)


Answers = dict[tuple[int, int], Response]  # by prompt and sample, both from 0


@dataclass(frozen=True)
class _Settings:
    """The first line of a log: how all answers come about."""

    settings: dict[str, Any]


def _open_log(file: Path, settings: Mapping[str, Any]) -> tuple[Callable[[Response], None], Answers]:
    """What logs an answer, the first behind a line that says how all come about; and the answers that are logged.

    Raises:
        UserError: it holds answers that came about otherwise, or lines that are none.
    """
    log: Log[Response | _Settings] = Log(
        file, Response | _Settings,
        what="a line that distill has written",
        mend="remove the line, and its prompt is answered again; without line 1, remove the file",
    )  # fmt: skip
    lines = log.records()
    head: list[dict[str, Any]] = [] if lines else [{"settings": settings}]
    answers = {(line.prompt, line.sample): line for line in lines if isinstance(line, Response)}

    def add(answer: Response) -> None:
        for record in (*head, vars(answer)):
            log.append(record)
        head.clear()
        answers[answer.prompt, answer.sample] = answer

    theirs = lines[0].settings if lines and isinstance(lines[0], _Settings) else {}
    other = [f"{name} {theirs.get(name)}, not {value}" for name, value in settings.items() if theirs.get(name) != value]
    if lines and other:
        fix = "type what was typed then, or choose another --out; removing this file gives its answers up"
        raise UserError(f"the answers so far are of another run ({'; '.join(other)})", where=str(file), fix=fix)
    return add, answers


# Prompts are decoded by length within stretches of so many batches: little is wasted on padding, the time that is left
# can be told from the time that has passed, and no more than a stretch of generations is held in memory.
_BATCHES_AT_ONCE = 64


@dataclass
class Distiller:
    """A checkpoint that answers prompts by a lossless method.

    Raises:
        UserError: chats are not for this checkpoint, or its context has no room for a prompt.
    """

    answering: Answering
    reporter: Reporter
    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1  # answers to each prompt
    seed: int = 0  # from which every answer has its own

    def __post_init__(self) -> None:
        self.chats = Chats(self.answering.loaded.tokenizer)
        context = context_length(self.answering.loaded.model)
        self._room = context - self.max_new_tokens
        if self._room < 1:
            raise UserError(
                f"answers of {self.max_new_tokens:,} tokens leave no room for a prompt in the model's context of "
                f"{context:,}",
                fix="lower --max-new-tokens",
            )

    def distill(
        self, prompts: Sequence[list[Message]], source: Path, out: Path, *, limit: int | None = None,
        keep_cut: bool = False,
    ) -> tuple[int, str]:  # fmt: skip
        """Answer prompts and write them as chat data, in their order.

        Args:
            prompts: the turns before each answer.
            source: the file that they are read from, one a line.
            out: where the chat data goes; `log_beside` it are the answers that an interrupted run goes on from.
            limit: only so many of the prompts; None = all.
            keep_cut: write answers that were cut at the limit too.

        Returns:
            how many answers were written; and that with what was left out, in words.

        Raises:
            UserError: answers of another run lie there, the template refuses a prompt, or no answer is left to write.
        """
        asked, file = prompts[:limit], log_beside(out)
        lock = file.with_name(f"{file.name}.lock")
        with locked(lock, patience_s=0.0, busy="another command is writing these answers"):
            requests = {
                (number, sample): Request(
                    ids, self.max_new_tokens, self.answering.threshold, temperature=self.temperature,
                    seed=random.Random(f"{self.seed} {number} {sample}").getrandbits(63),
                )
                for number, ids in enumerate(self.chats.encoded(asked, source))
                for sample in range(self.samples)
                if len(ids) <= self._room
            }  # fmt: skip
            add, answers = _open_log(file, self._settings(prompts))
            self._answer(requests, asked, add, answers)
            reasons = {key: answers[key].left_out(keep_cut=keep_cut) for key in requests}
            written = [answers[key] for key in requests if reasons[key] is None]
            words = self._in_words(written, Counter(reasons.values()), len(asked) * self.samples - len(requests))
            if not written:
                raise UserError(f"nothing to write: {words}", where=str(source), fix="give other prompts or options")
            chats = ([*asked[response.prompt], {"role": "assistant", "content": response.text}] for response in written)
            write_atomically(out, "".join(json.dumps({"messages": turns}) + "\n" for turns in chats).encode())
        # Of how many conversations more, or other tokens, will be learned than the model has said.
        if others := sum(answer.spelling == "other" for answer in written):
            self.reporter.say(f"answers to be learned as other tokens of the same text: {others:,}")
        if earlier := sum(any(turn["role"] == "assistant" for turn in asked[answer.prompt]) for answer in written):
            self.reporter.say(
                f"conversations with earlier answers, which stay as they are and are learned too: {earlier:,}"
            )
        return len(written), words

    def _in_words(self, written: Sequence[Response], left_out: Counter[Reason | None], unasked: int) -> str:
        """Counts on one line: what was written, and what was left out and why."""
        reasons = [
            (left_out["cut"], f"cut at {self.max_new_tokens:,} tokens (--keep-cut keeps them)"),
            (left_out["empty"], "empty"),
            (left_out["lost"], "that chat data cannot hold (special tokens in the midst, half characters)"),
            (unasked, f"to prompts longer than the {self._room:,} tokens that the context leaves for them"),
        ]
        others = ", ".join(f"{count:,} {words}" for count, words in reasons if count)
        tokens = sum(answer.tokens for answer in written)
        return f"{len(written):,} answers with {tokens:,} tokens; left out: {others or 'none'}"

    def _settings(self, prompts: Sequence[list[Message]]) -> dict[str, Any]:
        """Everything that decides the answers; a lossless method does not, and neither does the batch size."""
        return {
            "weights": self.answering.loaded.weights[:16],
            "chat template": content_hash(str(self.chats.tokenizer.chat_template)), "prompts": content_hash(prompts),
            "max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "seed": self.seed,
            "dtype": self.answering.loaded.dtype,
        }  # fmt: skip

    def _answer(
        self, requests: Mapping[tuple[int, int], Request], prompts: Sequence[list[Message]],
        add: Callable[[Response], None], answers: Answers,
    ) -> None:  # fmt: skip
        """Decode what has no answer yet, with a bar; every answer is logged as soon as its row is finished."""
        todo = [key for key in requests if key not in answers]
        stretch = _BATCHES_AT_ONCE * self.answering.batch_size
        done, tokens, started = len(requests) - len(todo), 0, time.perf_counter()
        if done:
            self.reporter.say(f"going on after {done:,} of {len(requests):,} answers")
        eos_ids, pad_id = self.chats.ends(self.answering.loaded)

        def finished(keys: Sequence[tuple[int, int]], index: int, generation: Generation) -> None:
            nonlocal done, tokens
            key, said = keys[index], generation.tokens
            text, spelling = self.chats.text(said), self.chats.spelling(said, prompts[key[0]])
            add(Response(*key, text, generation.emitted, generation.finish == "eos", spelling))
            done, tokens = done + 1, tokens + generation.emitted
            bar.update(done, len(requests), f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")

        with self.reporter.bar(f"answering by {self.answering.method.name}") as bar:
            for first in range(0, len(todo), stretch):
                keys = todo[first : first + stretch]
                self.answering.decode(
                    [requests[key] for key in keys], eos_id=eos_ids, pad_id=pad_id, on_finished=partial(finished, keys)
                )
