"""From a request's body to jobs, and from the engine's tokens to an answer's body."""

from __future__ import annotations

import asyncio
import functools
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from itertools import accumulate, chain, zip_longest
from typing import Any, TypeVar

from marsbench.serving.desk import Desk, Stream
from marsbench.serving.errors import ApiError, not_ready, too_many, wrong
from marsbench.serving.messages import Ending, Job, Likelihood, MethodName, Piece, Ready, Wishes
from marsbench.serving.text import Writer, bytes_of, decoding
from marsbench.serving.wire import ChatRequest, CompletionRequest, Message, dumps, event

T = TypeVar("T")
Body = dict[str, Any]
AnyRequest = ChatRequest | CompletionRequest
_MARK = "\0"  # where the text of a chunk goes
_SMALL = 2**16  # characters or tokens that the tokenizer takes in no time


class Choice:
    """One of the answers to a request, as far as it has come."""

    def __init__(self, index: int, stream: Stream, writer: Writer) -> None:
        self.index, self.stream, self.writer = index, stream, writer
        self.text = ""
        self.scored = self.offset = 0  # tokens whose log-probabilities have been sent, and where their text ends
        self.ending: Ending | None = None

    @property
    def prompt(self) -> int:
        """Tokens of its prompt."""
        return len(self.stream.job.prompt_ids)

    @property
    def used(self) -> int:
        """Tokens that it took: up to the one that completed its stop string, or all, with an EOS."""
        return self.writer.used if self.ending is None or self.writer.stopped else self.ending.emitted

    @property
    def finish(self) -> str:
        """OpenAI's word for what ended it."""
        return "length" if self.ending and self.ending.finish == "length" and not self.writer.stopped else "stop"


class Answers:
    """What the routes for completions do."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.settings = desk, desk.settings
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one at a time, and away from the event loop
        self._ahead = 0  # characters and tokens that it is still to take
        self.token = functools.lru_cache(2**16)(self._token)

    @property
    def ready(self) -> Ready:
        """The engine's account of itself; `ApiError` while there is none."""
        if self.desk.ready is None:
            raise not_ready("the engine is not ready")
        return self.desk.ready

    async def aside(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run a tokenizer's work on so much where it keeps nobody waiting; `ApiError` 429 where much waits already."""
        if size > _SMALL and self._ahead + size > self.settings.max_body:
            raise too_many("the tokenizer has too much to do already")
        self._ahead += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *arguments)
        finally:
            self._ahead -= size

    @functools.cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.ready.tokenizer.get_vocab()))

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit before it is taken apart, which takes a hundred times its memory."""
        most = self.ready.context * self._longest
        if characters > most:
            raise wrong(
                f"this model's context is {self.ready.context} tokens, which have {most:,} characters at most; these "
                f"are {characters:,}", param, "context_length_exceeded",
            )  # fmt: skip

    # ---- jobs ----

    async def _prompt_ids(self, body: AnyRequest) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            return [await self.chat_ids(body.messages)]
        return [await self.text_ids(part) if isinstance(part, str) else part for part in body.prompt]

    async def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation by the checkpoint's chat template, up to where the assistant begins."""
        turns = [{"role": turn.role.replace("developer", "system"), "content": turn.text} for turn in messages]
        template = functools.partial(
            self.ready.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True
        )
        size = sum(len(turn["content"]) for turn in turns)
        self._check_length(size, "messages")
        try:
            found = await self.aside(size, template, turns)
        except ApiError:
            raise
        except Exception as error:  # whatever a template raises: it is a program that came with the checkpoint
            raise wrong(f"the chat template refuses this conversation: {error}", "messages") from error
        return list(found["input_ids"])

    async def text_ids(self, text: str, special: bool = True) -> list[int]:
        """A text's tokens."""
        self._check_length(len(text), "prompt")
        tokenize = functools.partial(self.ready.tokenizer, add_special_tokens=special)
        return list((await self.aside(len(text), tokenize, text)).input_ids)

    def decode_all(self, ids: list[int]) -> str:
        """Tokens as text, special ones too."""
        return str(self.ready.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _token(self, token: int) -> tuple[str, list[int]]:
        """How a token looks by itself, and its bytes."""
        text = self.decode_all([token])
        return text, list(bytes_of(self.ready.tokenizer, token, text))

    def _jobs(self, ids: list[int], body: AnyRequest, arrived: float) -> list[Job]:
        """As many answers to a prompt as are asked for, sampled by one seed after the other."""
        echo, chat = not isinstance(body, ChatRequest) and bool(body.echo), isinstance(body, ChatRequest)
        limit = (body.max_completion_tokens or body.max_tokens) if isinstance(body, ChatRequest) else body.max_tokens
        limit = self._limit(ids, limit, "messages" if chat else "prompt")
        seed = random.getrandbits(32) if body.seed is None else body.seed
        sampled = self.settings.temperature if body.temperature is None else body.temperature
        cut = max(0, body.top_k or 0), 1.0 if body.top_p is None else body.top_p, body.min_p or 0.0
        return [
            Job(
                next(self.desk.numbers), ids, limit, self._wishes(body), temperature=sampled, cut=cut,
                seed=(seed + number + 2**63) % 2**64 - 2**63, ignore_eos=body.ignore_eos, best=body.best, echo=echo,
                streamed=bool(body.stream) and limit > 0, arrived=arrived,
            )
            for number in range(body.n or 1)
        ]  # fmt: skip

    def _limit(self, ids: list[int], limit: int | None, param: str) -> int:
        """How many tokens may come; `ApiError` for a prompt that leaves no room, or is none."""
        ready = self.ready
        if not ids:
            raise wrong("the prompt is empty", param)
        if max(ids) >= ready.vocabulary:
            raise wrong(f"a token id lies outside the vocabulary of {ready.vocabulary}", param)
        room = ready.context - len(ids)
        wanted = min(self.settings.max_new_tokens, max(room, 1)) if limit is None else limit
        if wanted > room:
            raise wrong(
                f"this model's context is {ready.context} tokens; the prompt has {len(ids)} and {wanted} are to follow",
                param, "context_length_exceeded",
            )  # fmt: skip
        return wanted

    def _wishes(self, body: AnyRequest) -> Wishes:
        usual: MethodName = "mars" if "mars" in self.ready.methods else "ar"
        method = body.method or self.settings.method or usual
        if method not in self.ready.methods:
            raise wrong(f"this checkpoint was not trained with masks, so it cannot do {method!r}", "method")
        tau = body.threshold if method == "mars" and body.threshold is not None else 1.0
        if body.min_threshold is not None and body.min_threshold > tau:
            raise wrong("'min_threshold' is above 'threshold'", "min_threshold")
        return Wishes(method, body.threshold, body.min_threshold, body.block_size)

    # ---- answers ----

    async def _news(self, body: AnyRequest) -> AsyncGenerator[tuple[Choice, list[Piece]], None]:
        """What comes for each choice, the last of it with its ending; it counts as waiting before it is read."""
        arrived, decode = time.perf_counter(), decoding(self.ready.tokenizer)
        with ExitStack() as stack:
            with self.desk.let_in((body.n or 1) * (1 if isinstance(body, ChatRequest) else len(body.prompt))):
                jobs = [job for ids in await self._prompt_ids(body) for job in self._jobs(ids, body, arrived)]
                whole = not body.stream and not body.stops  # else a text must be looked at as it comes
                streams, news = stack.enter_context(self.desk.submitted(jobs, whole=whole))
            choices = [Choice(index, stream, Writer(decode, body.stops)) for index, stream in enumerate(streams)]
            while choices:
                await news.wait()
                news.clear()
                for choice in list(choices):
                    ending, pieces = choice.stream.ending, choice.stream.take()
                    if isinstance(ending, Ending):
                        choices.remove(choice)
                        choice.ending = ending
                    if pieces or choice.ending is not None:
                        yield choice, pieces
                    if isinstance(ending, ApiError):
                        raise ending
                    if choice.writer.stopped:
                        self.desk.stop(choice.stream, choice.writer.used)

    async def collect(self, body: AnyRequest, shape: Shape, entry: Body) -> bytes:
        """The body of an answer, when all of it is there."""
        choices = []
        async with aclosing(self._news(body)) as news:
            async for choice, pieces in news:
                choice.text += choice.writer.write(list(chain.from_iterable(tokens for tokens, _ in pieces)))
                if choice.ending is not None:
                    choice.text += choice.writer.close()
                    choices.append(choice)
        choices.sort(key=lambda choice: choice.index)
        if body.best is None:
            return self._whole(body, choices, shape, entry)
        return await self.aside(0, self._whole, body, choices, shape, entry)  # a text for every token takes its time

    def _whole(self, body: AnyRequest, choices: list[Choice], shape: Shape, entry: Body) -> bytes:
        found = []
        for choice in choices:
            scored = choice.ending.likelihood if choice.ending else None
            said = None if scored is None else self._logprobs(body, scored, choice, 0)
            text = self._echoed(body, choice) + choice.text
            kind: Body = {"message": {"role": "assistant", "content": text}} if shape.chat else {"text": text}
            found.append({"index": choice.index, **kind, "logprobs": said, "finish_reason": choice.finish})
        return dumps(shape.head | {"object": shape.whole, "choices": found} | _costs(choices, entry)).encode()

    def _echoed(self, body: AnyRequest, choice: Choice) -> str:
        """The prompt's text where it is to be repeated."""
        if isinstance(body, ChatRequest) or not body.echo:
            return ""
        prompt = body.prompt[choice.index // (body.n or 1)]
        return prompt if isinstance(prompt, str) else decoding(self.ready.tokenizer)(prompt)

    def _logprobs(self, body: AnyRequest, found: Likelihood, choice: Choice, offset: int) -> Body:
        """Log-probabilities as the API words them, of tokens whose text begins at a place."""
        texts = [self.token(token) for token in found.tokens]
        if not isinstance(body, ChatRequest):
            of_best: list[Any] = [{self.token(token)[0]: value for token, value in place} for place in found.best]
            if None in found.chosen[:1]:
                of_best[0] = None
            return {
                "tokens": [text for text, _ in texts], "token_logprobs": found.chosen, "top_logprobs": of_best,
                "text_offset": list(accumulate((len(text) for text, _ in texts[:-1]), initial=offset)),
            }  # fmt: skip

        def entry(token: int, value: float | None) -> Body:
            text, own = self.token(token)
            return {"token": text, "logprob": value, "bytes": own}

        places = list(zip(found.tokens, found.chosen, found.best, strict=True))
        if choice.ending is not None and choice.ending.finish == "eos" and not choice.writer.stopped:
            del places[choice.used - 1 :]  # no part of the text
        return {
            "content": [
                entry(token, value) | {"top_logprobs": [entry(*other) for other in best]}
                for token, value, best in places
            ]
        }

    async def events(self, body: AnyRequest, shape: Shape, entry: Body) -> AsyncGenerator[bytes, None]:
        """A stream's events, to the last, those that come together in one piece."""
        choices = []
        async with aclosing(self._news(body)) as news:
            async for choice, pieces in news:
                found = []
                if choice.index not in shape.begun and (echoed := self._echoed(body, choice)):
                    found.append(shape.part(choice.index, echoed))
                chunks = functools.partial(self._chunks, body, choice, pieces, shape)
                is_long = choice.stream.job.echo and body.best is not None and not choice.scored
                found += await self.aside(0, chunks) if is_long else chunks()
                if choice.ending is not None:
                    choices.append(choice)
                    if rest := choice.writer.close():
                        found.append(shape.part(choice.index, rest))
                    scored = choice.ending.likelihood  # of an echo alone: all others came with their tokens
                    said = None if scored is None else await self.aside(0, self._logprobs, body, scored, choice, 0)
                    found.append(event(shape.chunk(choice.index, "", finish=choice.finish, logprobs=said)))
                if found:
                    yield b"".join(found)
        choices.sort(key=lambda choice: choice.index)
        costs = _costs(choices, entry)
        yield (event(shape.head | {"choices": []} | costs) if shape.with_usage else b"") + event("[DONE]")

    def _chunks(self, body: AnyRequest, choice: Choice, pieces: list[Piece], shape: Shape) -> list[bytes]:
        """What has come as events: one for all of it, or one for each forward, or for each one's log-probabilities."""
        found = []
        scored = body.best is not None
        if not (scored or body.asks_for_forwards):
            pieces = [(list(chain.from_iterable(tokens for tokens, _ in pieces)), None)]
        for tokens, likelihood in pieces:
            if choice.writer.stopped:
                break
            before = choice.writer.used
            text = choice.writer.write(tokens)
            used = choice.writer.used - before
            if not (scored or body.asks_for_forwards):
                found += [shape.part(choice.index, text)] if text else []
                continue
            said = None if likelihood is None else self._scored(body, likelihood, used, choice)
            chunk = shape.chunk(choice.index, text, logprobs=said)
            found.append(event(chunk | ({"marsbench": {"tokens": used}} if body.asks_for_forwards else {})))
        return found

    def _scored(self, body: AnyRequest, found: Likelihood, used: int, choice: Choice) -> Body:
        """Log-probabilities of the latest tokens, as far as they are used; of an echoed prompt with the first."""
        if choice.stream.job.echo and not choice.scored:
            used += choice.prompt
        if isinstance(body, ChatRequest) or choice.writer.stopped:  # else an EOS has its own too
            found = found.part(0, used)
        said = self._logprobs(body, found, choice, choice.offset)
        choice.scored += len(found.tokens)
        choice.offset += sum(len(self.token(token)[0]) for token in found.tokens)
        return said


class Shape:
    """The bodies of one kind of completion."""

    def __init__(self, model: str, chat: bool, with_usage: bool = False) -> None:
        self.chat, self.with_usage = chat, with_usage
        self.begun: set[int] = set()  # the choices that have had a chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}  # choice -> what stands before and behind the text of a part
        self.whole = "chat.completion" if chat else "text_completion"
        kind, prefix = ("chat.completion.chunk", "chatcmpl") if chat else ("text_completion", "cmpl")
        self.head: Body = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model
        }  # fmt: skip

    def chunk(self, index: int, text: str, *, finish: str | None = None, logprobs: Body | None = None) -> Body:
        """A part of a streamed answer; the first of each choice names the role."""
        choice: Body = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        if not self.chat:
            choice["text"] = text
        elif index in self.begun:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["delta"] = {"role": "assistant", "content": text}
        self.begun.add(index)
        return self.head | {"choices": [choice]} | ({"usage": None} if self.with_usage else {})

    def part(self, index: int, text: str) -> bytes:
        """A part with some text as an event; those behind the first differ in the text alone: the rest is made once."""
        if index not in self.begun:
            return event(self.chunk(index, text))
        if index not in self._around:
            before, _, behind = event(self.chunk(index, _MARK)).rpartition(dumps(_MARK).encode("ascii"))
            self._around[index] = before, behind
        before, behind = self._around[index]
        return before + dumps(text).encode("ascii") + behind


def _costs(choices: Sequence[Choice], entry: Body) -> Body:
    """The usage of all choices together, and how guesses fared in them, under vLLM's names; nothing where none were
    made. The log's entry gets its share.
    """
    endings = [choice.ending for choice in choices if choice.ending is not None]
    # Each prompt was read once.
    read = sum({id(choice.stream.job.prompt_ids): choice.prompt for choice in choices}.values())
    counts = {"prompt_tokens": read, "completion_tokens": sum(choice.used for choice in choices)}
    entry |= counts | {"finish": [choice.finish for choice in choices]}
    of_each = [
        {
            "method": choice.stream.job.wishes.method,
            "threshold": None if ending.thresholds is None else list(ending.thresholds),
            "block_size": list(ending.windows), "lossless": ending.lossless, "forwards": ending.forwards,
            "tokens_per_forward": round(choice.used / max(ending.forwards, 1), 4),
        }
        for choice, ending in zip(choices, endings, strict=True)
    ]  # fmt: skip
    ours = {"total_tokens": sum(counts.values()), "marsbench": of_each[0] if len(of_each) == 1 else of_each}
    found: Body = {"usage": counts | ours}
    histogram = [sum(sizes) for sizes in zip_longest(*(ending.accepted for ending in endings), fillvalue=0)]
    if drafted := sum(ending.drafted for ending in endings):
        steps, accepted = sum(histogram), sum(size * count for size, count in enumerate(histogram))
        found["metrics"] = {"speculative_decoding": {
            "mean_acceptance_length": round(1 + accepted / steps, 4),
            "draft_acceptance_rate": round(accepted / drafted, 4), "acceptance_histogram": histogram,
            "num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
            "num_spec_tokens": len(histogram) - 1,
        }}  # fmt: skip
    return found
