"""From a request's body to jobs, and from the engine's tokens to an answer's body."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from marsbench.serving.desk import Desk, Stream
from marsbench.serving.errors import ApiError, not_ready, wrong
from marsbench.serving.messages import Ending, Job, Likelihood, MethodName, Ready, Wishes
from marsbench.serving.text import Writer, decoding
from marsbench.serving.wire import (
    ChatRequest,
    CompletionRequest,
    Message,
    dumps,
    event,
    finish_reason,
    total,
    usage,
)

T = TypeVar("T")
Body = dict[str, Any]
_MARK = "\0"  # where the text of a chunk goes


@dataclass(frozen=True)
class Defaults:
    """What counts where a request says nothing."""

    model: str  # the name that the server gives its checkpoint
    method: MethodName | None = None  # None: `mars` where the checkpoint can, else `ar`
    temperature: float = 0.0
    max_new_tokens: int = 1024


@dataclass(frozen=True)
class Answer:
    """One finished answer."""

    stream: Stream
    text: str
    used: int  # tokens
    ending: Ending

    @property
    def reason(self) -> str:
        """What ended it, in OpenAI's word."""
        return finish_reason(self.ending, self.stream.stopped)

    @property
    def usage(self) -> Body:
        """What it took."""
        job = self.stream.job
        return usage(len(job.prompt_ids), self.used, job.wishes.method, self.ending)


class Answers:
    """What the routes for completions do."""

    def __init__(self, desk: Desk, defaults: Defaults) -> None:
        self.desk, self.defaults = desk, defaults
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one at a time, and away from the event loop

    @property
    def ready(self) -> Ready:
        """The engine's account of itself; `ApiError` while there is none."""
        if self.desk.ready is None:
            raise not_ready("the engine is not ready")
        return self.desk.ready

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a tokenizer's work where it keeps nobody waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *arguments)

    # ---- jobs ----

    @asynccontextmanager
    async def _submitted(self, body: ChatRequest | CompletionRequest) -> AsyncIterator[list[Stream]]:
        """A request's jobs in the engine, for the time of a `with` block; it counts as waiting before it is read."""
        arrived = time.perf_counter()
        with ExitStack() as stack:
            with self.desk.let_in(1 if isinstance(body, ChatRequest) else len(body.prompts)):
                jobs = await self._jobs(body, arrived)
                streams = stack.enter_context(self.desk.submitted(jobs))
            yield streams

    async def _jobs(self, body: ChatRequest | CompletionRequest, arrived: float) -> list[Job]:
        """The one job of a conversation, or a job for each prompt."""
        if isinstance(body, ChatRequest):
            ids = await self.aside(self.chat_ids, body.messages)
            best = (body.top_logprobs or 0) if body.logprobs else None
            return [self._job(ids, body, arrived, body.max_completion_tokens or body.max_tokens, "messages", best)]
        jobs = []
        for prompt in body.prompts:
            ids = await self.aside(self.text_ids, prompt) if isinstance(prompt, str) else prompt
            jobs.append(self._job(ids, body, arrived, body.max_tokens, "prompt", body.logprobs))
        return jobs

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation by the checkpoint's chat template, up to where the assistant begins."""
        turns = [
            {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text} for turn in messages
        ]
        try:
            found = self.ready.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # whatever a template raises: it is a program that came with the checkpoint
            raise wrong(f"the chat template refuses this conversation: {error}", "messages") from error
        return list(found["input_ids"])

    def text_ids(self, text: str, special: bool = True) -> list[int]:
        """A text's tokens."""
        return list(self.ready.tokenizer(text, add_special_tokens=special).input_ids)

    def decode(self, ids: list[int]) -> str:
        """Tokens as text."""
        return decoding(self.ready.tokenizer)(ids)

    def decode_all(self, ids: list[int]) -> str:
        """Tokens as text, special ones too."""
        return str(self.ready.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not our checkpoint's."""
        if name not in (None, self.defaults.model, self.desk.setup.checkpoint):
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.defaults.model!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def _job(
        self, ids: list[int], body: ChatRequest | CompletionRequest, arrived: float, limit: int | None, param: str,
        best: int | None,
    ) -> Job:  # fmt: skip
        limit = self._limit(ids, limit, param)
        sampled = self.defaults.temperature if body.temperature is None else body.temperature
        seed = random.getrandbits(32) if body.seed is None else body.seed
        return Job(
            self.desk.number(), ids, limit, self._wishes(body), temperature=sampled, seed=seed,
            ignore_eos=body.ignore_eos, likelihood=best, arrived=arrived,
        )  # fmt: skip

    def _limit(self, ids: list[int], limit: int | None, param: str) -> int:
        """How many tokens may come; `ApiError` for a prompt that leaves no room, or is none."""
        ready = self.ready
        if not ids:
            raise wrong("the prompt is empty", param)
        if max(ids) >= ready.vocabulary:
            raise wrong(f"a token id lies outside the vocabulary of {ready.vocabulary}", param)
        room = ready.context - len(ids)
        wanted = min(self.defaults.max_new_tokens, max(room, 1)) if limit is None else limit
        if wanted > room:
            raise wrong(
                f"this model's context is {ready.context} tokens; the prompt has {len(ids)} and {wanted} are to follow",
                param, "context_length_exceeded",
            )  # fmt: skip
        return wanted

    def _wishes(self, body: ChatRequest | CompletionRequest) -> Wishes:
        usual: MethodName = "mars" if "mars" in self.ready.methods else "ar"
        method = body.method or self.defaults.method or usual
        if method not in self.ready.methods:
            raise wrong(f"this checkpoint was not trained with masks, so it cannot do {method!r}", "method")
        tau = body.threshold if method == "mars" and body.threshold is not None else 1.0
        if body.min_threshold is not None and body.min_threshold > tau:
            raise wrong("'min_threshold' is above 'threshold'", "min_threshold")
        return Wishes(method, body.threshold, body.min_threshold, body.block_size)

    # ---- answers ----

    async def collect(self, body: ChatRequest | CompletionRequest) -> list[Answer]:
        """All answers, when they are there."""
        async with self._submitted(body) as streams:
            return list(await asyncio.gather(*[self._collected(stream, body.stops) for stream in streams]))

    async def _collected(self, stream: Stream, stops: list[str]) -> Answer:
        writer, text = Writer(decoding(self.ready.tokenizer), stops), ""
        async for news in stream.read():
            if isinstance(news, Ending):
                text += writer.close()
                return Answer(stream, text, _used(writer, news), news)
            for tokens in news:
                text += "" if writer.stopped else writer.write(tokens)
            if writer.stopped:
                self.desk.stop(stream)
        raise AssertionError("a stream ends with its ending")

    async def events(self, body: ChatRequest | CompletionRequest, shape: Shape) -> AsyncGenerator[bytes, None]:
        """A stream's events, to the last."""
        asked = body.stream_options
        per_forward = asked is not None and asked.include_forwards
        writer = Writer(decoding(self.ready.tokenizer), body.stops)
        async with self._submitted(body) as (stream,):
            try:
                async for news in stream.read():
                    if isinstance(news, Ending):
                        ending = news
                        break
                    for chunk in self._chunks(writer, news, shape, per_forward):
                        yield chunk
                    if writer.stopped:
                        self.desk.stop(stream)
            except ApiError as error:
                if shape.begun:  # else the response has a status of its own
                    yield event(error.envelope)
                    return
                raise
        answer = Answer(stream, writer.close(), _used(writer, ending), ending)
        if answer.text:
            yield shape.part(answer.text)
        yield event(shape.chunk("", finish=answer.reason))
        if asked is not None and asked.include_usage:
            yield event(shape.head | {"choices": [], "usage": answer.usage})
        yield event("[DONE]")

    def _chunks(self, writer: Writer, news: list[list[int]], shape: Shape, per_forward: bool) -> list[bytes]:
        """What has come as events: one for all of it, or one for each forward."""
        found = []
        for tokens in news if per_forward else [list(chain.from_iterable(news))]:
            if writer.stopped:
                break
            before = writer.used
            text = writer.write(tokens)
            if per_forward:
                found.append(event(shape.chunk(text) | {"marsbench": {"tokens": writer.used - before}}))
            elif text:
                found.append(shape.part(text))
        return found


def _used(writer: Writer, ending: Ending) -> int:
    """Tokens that an answer took: up to the one that completed its stop string, or all, with an EOS."""
    return writer.used if writer.stopped else ending.emitted


class Shape:
    """The bodies of one kind of completion."""

    def __init__(self, model: str, chat: bool, with_usage: bool = False) -> None:
        self._chat, self.begun = chat, False
        self._around: tuple[bytes, bytes] | None = None  # what stands before and behind the text of a part
        self._usage: Body = {"usage": None} if with_usage else {}
        made = int(time.time())
        kind = "chat.completion.chunk" if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        self.head: Body = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": made, "model": model}

    def chunk(self, text: str, finish: str | None = None) -> Body:
        """A part of a streamed answer; the first names the role."""
        choice: Body = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self._chat:
            choice["delta"] = ({} if self.begun else {"role": "assistant"}) | (
                {"content": text} if text or not self.begun else {}
            )
        else:
            choice["text"] = text
        self.begun = True
        return self.head | {"choices": [choice]} | self._usage

    def part(self, text: str) -> bytes:
        """A part with some text as an event; those behind the first differ in the text alone: the rest is made once."""
        if not self.begun:
            return event(self.chunk(text))
        if self._around is None:
            before, _, behind = event(self.chunk(_MARK)).rpartition(dumps(_MARK).encode("ascii"))
            self._around = before, behind
        before, behind = self._around
        return before + dumps(text).encode("ascii") + behind

    def whole(self, answers: list[Answer], choices: list[Body]) -> Body:
        """An answer that was not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self.head | {"object": kind, "choices": choices, "usage": total([one.usage for one in answers])}


def chat_choice(answer: Answer, token: Callable[[int], str]) -> Body:
    """The choice of a conversation."""
    found = answer.ending.likelihood
    said = None
    if found is not None:
        entries = _chat_logprobs(found, len(answer.stream.job.prompt_ids), token)
        said = {"content": entries[:-1] if answer.ending.finish == "eos" else entries}  # of the text alone
    message = {"role": "assistant", "content": answer.text}
    return {"index": 0, "message": message, "logprobs": said, "finish_reason": answer.reason}


def completion_choice(number: int, answer: Answer, prompt: str | None, token: Callable[[int], str]) -> Body:
    """The choice of a prompt, which is echoed where it is given."""
    found, start = answer.ending.likelihood, len(answer.stream.job.prompt_ids)
    said = None if found is None else _logprobs(found, 0 if prompt is not None else start, token)
    return {"index": number, "text": (prompt or "") + answer.text, "logprobs": said, "finish_reason": answer.reason}


def _logprobs(found: Likelihood, first: int, token: Callable[[int], str]) -> Body:
    """Log-probabilities of the tokens from `first` on, as `/v1/completions` words them; the very first has none."""
    texts = [token(one) for one in found.tokens]
    values = [None, *found.chosen]
    best = [None, *[{token(one): value for one, value in place} for place in found.best]]
    offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
    return {
        "tokens": texts[first:],
        "token_logprobs": values[first:],
        "top_logprobs": best[first:],
        "text_offset": offsets[first:],
    }


def _chat_logprobs(found: Likelihood, first: int, token: Callable[[int], str]) -> list[Body]:
    """The same as `/v1/chat/completions` words it."""

    def entry(one: int, value: float) -> Body:
        return {"token": token(one), "logprob": value, "bytes": list(token(one).encode())}

    places = zip(found.tokens[1:], found.chosen, found.best, strict=True)
    return [
        entry(one, value) | {"top_logprobs": [entry(*other) for other in best]}
        for one, value, best in list(places)[first - 1 :]
    ]
