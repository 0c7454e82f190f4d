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

from marsbench.decoding.generation import seed_of
from marsbench.serving.desk import Desk, Stream
from marsbench.serving.messages import Ending, Job, Likelihood, MethodName, Piece, Ready, Wishes
from marsbench.serving.text import Writer, bytes_of, decoding
from marsbench.serving.wire import ApiError, ChatRequest, CompletionRequest, Message, StreamOptions, dumps, event

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
    """What the routes share: the tokenizer, and what a body asks of the engine."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.settings = desk, desk.settings
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one at a time, and away from the event loop
        self._ahead = 0  # characters and tokens that it is still to take
        self.token = functools.lru_cache(2**16)(self._token)

    @property
    def ready(self) -> Ready:
        """The engine's account of itself; `ApiError` while there is none."""
        if self.desk.ready is None:
            raise ApiError.not_ready("the engine is not ready")
        return self.desk.ready

    async def aside(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run a tokenizer's work on so much where it keeps nobody waiting; `ApiError` 429 where much waits already."""
        if size > _SMALL and self._ahead + size > self.settings.max_body:
            raise ApiError.too_many("the tokenizer has too much to do already")
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
            raise ApiError.wrong(
                f"this model's context is {self.ready.context} tokens, which have {most:,} characters at most; these "
                f"are {characters:,}", param, "context_length_exceeded",
            )  # fmt: skip

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
            raise ApiError.wrong(f"the chat template refuses this conversation: {error}", "messages") from error
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

    async def jobs(self, body: AnyRequest) -> list[Job]:
        """As many answers to each prompt as are asked for, sampled by one seed after the other."""
        arrived = time.perf_counter()
        if isinstance(body, ChatRequest):
            prompts, limit = [await self.chat_ids(body.messages)], body.max_completion_tokens or body.max_tokens
        else:
            prompts = [await self.text_ids(part) if isinstance(part, str) else part for part in body.prompt]
            limit = body.max_tokens
        found = []
        for ids in prompts:
            seed = random.getrandbits(32) if body.seed is None else body.seed
            most = self._limit(ids, limit, "messages" if isinstance(body, ChatRequest) else "prompt")
            for number in range(body.n or 1):
                found.append(Job(
                    ids, most, id=next(self.desk.numbers), wishes=self._wishes(body),
                    temperature=self.settings.temperature if body.temperature is None else body.temperature,
                    seed=seed_of(seed, number), top_k=max(0, body.top_k or 0),
                    top_p=1.0 if body.top_p is None else body.top_p, min_p=body.min_p or 0.0,
                    ignore_eos=body.ignore_eos, best=body.best, echo=bool(body.echo),
                    streamed=bool(body.stream) and most > 0, arrived=arrived,
                ))  # fmt: skip
        return found

    def _limit(self, ids: list[int], limit: int | None, param: str) -> int:
        """How many tokens may come; `ApiError` for a prompt that leaves no room, or is none."""
        ready = self.ready
        if not ids:
            raise ApiError.wrong("the prompt is empty", param)
        if max(ids) >= ready.vocabulary:
            raise ApiError.wrong(f"a token id lies outside the vocabulary of {ready.vocabulary}", param)
        room = ready.context - len(ids)
        wanted = min(self.settings.max_new_tokens, max(room, 1)) if limit is None else limit
        if wanted > room:
            raise ApiError.wrong(
                f"this model's context is {ready.context} tokens; the prompt has {len(ids)} and {wanted} are to follow",
                param, "context_length_exceeded",
            )  # fmt: skip
        return wanted

    def _wishes(self, body: AnyRequest) -> Wishes:
        usual: MethodName = "mars" if "mars" in self.ready.methods else "ar"
        method = body.method or self.settings.method or usual
        if method not in self.ready.methods:
            raise ApiError.wrong(f"this checkpoint was not trained with masks, so it cannot do {method!r}", "method")
        tau = body.threshold if method == "mars" and body.threshold is not None else 1.0
        if body.min_threshold is not None and body.min_threshold > tau:
            raise ApiError.wrong("'min_threshold' is above 'threshold'", "min_threshold")
        return Wishes(method, body.threshold, body.min_threshold, body.block_size)


class Completion:
    """What a request for completions gets, whole or as it comes."""

    def __init__(self, answers: Answers, body: AnyRequest, entry: Body) -> None:
        """`entry` is the request's line in the log: it is told what the answer took."""
        self._answers, self._body, self._entry = answers, body, entry
        self._options, self._decode = body.stream_options or StreamOptions(), decoding(answers.ready.tokenizer)
        is_chat = isinstance(body, ChatRequest)
        self._shape = Shape(answers.settings.name, is_chat, self._options.include_usage)
        self._choices: list[Choice] = []

    async def _news(self) -> AsyncGenerator[tuple[Choice, list[Piece]], None]:
        """What comes for each choice, the last of it with its ending; it counts as waiting before it is read."""
        body, desk = self._body, self._answers.desk
        with ExitStack() as stack:
            with desk.let_in((body.n or 1) * (1 if isinstance(body, ChatRequest) else len(body.prompt))):
                jobs = await self._answers.jobs(body)
                whole = not body.stream and not body.stops  # else a text must be looked at as it comes
                streams, news = stack.enter_context(desk.submitted(jobs, whole=whole))
            self._choices = [
                Choice(index, stream, Writer(self._decode, body.stops)) for index, stream in enumerate(streams)
            ]
            left = [*self._choices]
            while left:
                await news.wait()
                news.clear()
                for choice in [*left]:
                    ending, pieces = choice.stream.ending, choice.stream.take()
                    if isinstance(ending, Ending):
                        left.remove(choice)
                        choice.ending = ending
                    if pieces or choice.ending is not None:
                        yield choice, pieces
                    if isinstance(ending, ApiError):
                        raise ending
                    if choice.writer.stopped:
                        desk.stop(choice.stream, choice.writer.used)

    async def whole(self) -> bytes:
        """The body of an answer, when all of it is there."""
        async with aclosing(self._news()) as news:
            async for choice, pieces in news:
                choice.text += choice.writer.write(_tokens(pieces))
                if choice.ending is not None:
                    choice.text += choice.writer.close()
        if self._body.best is None:
            return self._worded()
        return await self._answers.aside(0, self._worded)  # a text for every token takes its time

    def _worded(self) -> bytes:
        found = []
        for choice in self._choices:
            scored, text = choice.ending and choice.ending.likelihood, self._echoed(choice) + choice.text
            said = self._logprobs(scored, choice) if scored else None
            kind: Body = {"message": {"role": "assistant", "content": text}} if self._shape.chat else {"text": text}
            found.append({"index": choice.index, **kind, "logprobs": said, "finish_reason": choice.finish})
        return dumps(self._shape.head | {"object": self._shape.whole, "choices": found} | self._costs()).encode()

    def _echoed(self, choice: Choice) -> str:
        """The prompt's text where it is to be repeated."""
        if isinstance(self._body, ChatRequest) or not self._body.echo:
            return ""
        prompt = self._body.prompt[choice.index // (self._body.n or 1)]
        return prompt if isinstance(prompt, str) else self._decode(prompt)

    def _logprobs(self, found: Likelihood, choice: Choice, offset: int = 0) -> Body:
        """Log-probabilities as the API words them, of tokens whose text begins at a place."""
        of_token = self._answers.token
        texts = [of_token(token)[0] for token in found.tokens]
        if not self._shape.chat:
            of_best: list[Any] = [{of_token(token)[0]: value for token, value in place} for place in found.best]
            if None in found.chosen[:1]:
                of_best[0] = None
            return {
                "tokens": texts, "token_logprobs": found.chosen, "top_logprobs": of_best,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
            }  # fmt: skip

        def entry(token: int, value: float | None) -> Body:
            text, own = of_token(token)
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

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A stream's events, to the last, those that come together in one piece."""
        shape, aside = self._shape, self._answers.aside
        async with aclosing(self._news()) as news:
            async for choice, pieces in news:
                found = []
                if choice.index not in shape.begun and (echoed := self._echoed(choice)):
                    found.append(shape.part(choice.index, echoed))
                is_long = choice.stream.job.echo and self._body.best is not None and not choice.scored
                found += await aside(0, self._chunks, choice, pieces) if is_long else self._chunks(choice, pieces)
                if choice.ending is not None:
                    if rest := choice.writer.close():
                        found.append(shape.part(choice.index, rest))
                    scored = choice.ending.likelihood  # of an echo alone: all others came with their tokens
                    said = await aside(0, self._logprobs, scored, choice) if scored else None
                    found.append(event(shape.chunk(choice.index, "", finish=choice.finish, logprobs=said)))
                if found:
                    yield b"".join(found)
        costs = self._costs()
        yield (event(shape.head | {"choices": []} | costs) if shape.with_usage else b"") + event("[DONE]")

    def _chunks(self, choice: Choice, pieces: list[Piece]) -> list[bytes]:
        """What has come as events: one for all of it, or one for each forward, or for each one's log-probabilities."""
        found, by_forward = [], self._options.include_forwards
        if self._body.best is None and not by_forward:
            text = choice.writer.write(_tokens(pieces))
            return [self._shape.part(choice.index, text)] if text else []
        for tokens, likelihood in pieces:
            if choice.writer.stopped:
                break
            before = choice.writer.used
            text = choice.writer.write(tokens)
            used = choice.writer.used - before
            said = None if likelihood is None else self._scored(likelihood, used, choice)
            chunk = self._shape.chunk(choice.index, text, logprobs=said)
            found.append(event(chunk | ({"marsbench": {"tokens": used}} if by_forward else {})))
        return found

    def _scored(self, found: Likelihood, used: int, choice: Choice) -> Body:
        """Log-probabilities of the latest tokens, as far as they are used; of an echoed prompt with the first."""
        if choice.stream.job.echo and not choice.scored:
            used += choice.prompt
        if self._shape.chat or choice.writer.stopped:  # else an EOS has its own too
            found = found.part(0, used)
        said = self._logprobs(found, choice, choice.offset)
        choice.scored += len(found.tokens)
        choice.offset += sum(len(self._answers.token(token)[0]) for token in found.tokens)
        return said

    def _costs(self) -> Body:
        """The usage of all choices together, and how guesses fared in them, under vLLM's names; nothing where none were
        made. The log's entry gets its share.
        """
        choices = self._choices
        endings = [choice.ending for choice in choices if choice.ending is not None]
        # Each prompt was read once.
        read = sum({id(choice.stream.job.prompt_ids): choice.prompt for choice in choices}.values())
        counts = {"prompt_tokens": read, "completion_tokens": sum(choice.used for choice in choices)}
        self._entry |= counts | {"finish": [choice.finish for choice in choices]}
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


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return list(chain.from_iterable(tokens for tokens, _ in pieces))
