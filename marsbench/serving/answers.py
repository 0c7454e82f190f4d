"""From a request's body to jobs, and from the engine's tokens to an answer's body."""

import asyncio
import codecs
import functools
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from itertools import chain, zip_longest
from typing import Any, TypeVar

from marsbench.decoding.acceptance_report import Acceptance
from marsbench.decoding.generation import seed_of
from marsbench.serving.engine_client import EngineClient, Stream
from marsbench.serving.messages import Ending, Job, Likelihood, MethodName, Piece, Ready
from marsbench.serving.text import Vocabulary, Writer
from marsbench.serving.wire import ApiError, ChatRequest, CompletionRequest, dumps, event

T = TypeVar("T")
Body = dict[str, Any]
AnyRequest = ChatRequest | CompletionRequest
PING = b": ping\n\n"  # a comment, which clients pass over


class Choice(Stream):
    def __init__(self, index: int, writer: Writer, job: Job, news: asyncio.Event, *, whole: bool = False) -> None:
        super().__init__(job, news, whole=whole)
        self.index, self.writer = index, writer
        self.text = ""
        self.begun = False  # whether it has had a chunk
        self.offset, self._scored = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def passes(self, data: bytes) -> int:
        """Where the text of a token with these bytes begins, if it is the next one to be scored."""
        offset = self.offset
        self.offset += len(self._scored.decode(data))
        return offset

    @property
    def used(self) -> int:
        """Tokens that it took: up to the one that completed its stop string, or all, with an EOS."""
        return self.ending.emitted if isinstance(self.ending, Ending) and not self.writer.stopped else self.writer.used

    @property
    def finish(self) -> str:
        """OpenAI's word for what ended it."""
        is_cut = isinstance(self.ending, Ending) and self.ending.finish == "length" and not self.writer.stopped
        return "length" if is_cut else "stop"


class Answers:
    """What the routes share: the tokenizer, and what a body asks of the engine."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine, self.settings = engine, engine.settings
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one at a time, and away from the event loop

    @property
    def ready(self) -> Ready:
        """The engine's account of itself; `ApiError` while it is not ready."""
        if self.engine.ready is None:
            raise ApiError.not_ready("the engine is not ready")
        return self.engine.ready

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a tokenizer's work where it keeps nothing else waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *arguments)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.ready.tokenizer)

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self.ready.tokenizer.get_vocab()))

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit before it is taken apart, which takes a hundred times its memory."""
        most = self.ready.context * self._longest
        if characters > most:
            raise ApiError.wrong(
                f"this model's context is {self.ready.context} tokens, which have {most:,} characters at most; these "
                f"are {characters:,}", param, "context_length_exceeded",
            )  # fmt: skip

    async def _chat_ids(self, turns: list[dict[str, str]]) -> list[int]:
        template = functools.partial(
            self.ready.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True
        )
        self._check_length(sum(len(turn["content"]) for turn in turns), "messages")
        try:
            return list((await self.aside(template, turns))["input_ids"])
        except Exception as error:  # of any kind: a template is a program that came with the checkpoint
            raise ApiError.wrong(f"the chat template refuses this conversation: {error}", "messages") from error

    async def _text_ids(self, text: str) -> list[int]:
        self._check_length(len(text), "prompt")
        return list((await self.aside(self.ready.tokenizer, text)).input_ids)

    async def jobs(self, body: AnyRequest) -> list[Job]:
        """As many answers to each prompt as are asked for, sampled by one seed after the other."""
        arrived = time.perf_counter()
        if isinstance(body, ChatRequest):
            prompts, limit, param = [await self._chat_ids(body.turns)], body.max_completion_tokens, "messages"
            limit = limit or body.max_tokens
        else:
            prompts = [await self._text_ids(part) if isinstance(part, str) else part for part in body.prompts]
            limit, param = body.max_tokens, "prompt"
        method, jobs = self._method(body), []
        for ids in prompts:
            seed = random.getrandbits(32) if body.seed is None else body.seed
            most = self._limit(ids, limit, param)
            for number in range(body.n or 1):
                jobs.append(Job(
                    ids, most, body.threshold, id=next(self.engine.numbers), method=method,
                    min_threshold=body.min_threshold, widest=body.block_size,
                    temperature=self.settings.temperature if body.temperature is None else body.temperature,
                    seed=seed_of(seed, number), top_k=max(0, body.top_k or 0),
                    top_p=1.0 if body.top_p is None else body.top_p, min_p=body.min_p or 0.0,
                    ignore_eos=bool(body.ignore_eos), best=body.best, streamed=bool(body.stream), arrived=arrived,
                ))  # fmt: skip
        return jobs

    def _limit(self, ids: list[int], limit: int | None, param: str) -> int:
        """How many tokens may come; `ApiError` for a prompt that leaves no room, or is empty."""
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

    def _method(self, body: AnyRequest) -> MethodName:
        """By which method a request is decoded; `ApiError` where the checkpoint cannot, or thresholds contradict."""
        usual: MethodName = "mars" if "mars" in self.ready.methods else "ar"
        method = body.method or self.settings.method or usual
        if method not in self.ready.methods:
            raise ApiError.wrong(f"this checkpoint was not trained with masks, so it cannot do {method!r}", "method")
        tau = body.threshold if method == "mars" and body.threshold is not None else 1.0
        if body.min_threshold is not None and body.min_threshold > tau:
            raise ApiError.wrong("'min_threshold' is above 'threshold'", "min_threshold")
        return method


class Completion:
    """What a request for completions gets, whole or as it comes."""

    def __init__(self, answers: Answers, body: AnyRequest, entry: Body) -> None:
        """`entry` is the request's line in the log: it is told what the answer took."""
        self._answers, self._body, self._entry = answers, body, entry
        self._options, self._stops = body.options, body.stops
        self._is_chat = isinstance(body, ChatRequest)
        kind, prefix = ("chat.completion", "chatcmpl") if self._is_chat else ("text_completion", "cmpl")
        self._head: Body = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
            "model": answers.settings.name,
        }  # fmt: skip
        self._choices: list[Choice] = []

    async def _news(self) -> AsyncGenerator[tuple[Choice, list[Piece], bool], None]:
        """What comes for each choice, which counts as waiting before it is read: pieces, and whether it has ended;
        neither is a sign that the server is alive.
        """
        body, engine, news = self._body, self._answers.engine, asyncio.Event()
        with ExitStack() as stack:
            with engine.let_in((body.n or 1) * (1 if isinstance(body, ChatRequest) else len(body.prompts))):
                whole = not body.stream and not self._stops  # else a text must be looked at as it comes
                self._choices = [
                    Choice(index, Writer(self._answers.vocabulary, self._stops), job, news, whole=whole)
                    for index, job in enumerate(await self._answers.jobs(body))
                ]
                stack.enter_context(engine.submitted(self._choices))
            left = [*self._choices]
            while left:
                await news.wait()
                news.clear()
                for choice in [*left]:
                    ending, is_quiet, pieces = choice.ending, choice.is_quiet, choice.take()
                    ended = isinstance(ending, Ending)
                    if ended:
                        left.remove(choice)
                    if pieces or ended or is_quiet:
                        yield choice, pieces, ended
                    if isinstance(ending, ApiError):
                        raise ending
                    if choice.writer.stopped:
                        engine.stop(choice, choice.writer.used)

    async def whole(self) -> bytes:
        async with aclosing(self._news()) as news:
            async for choice, pieces, ended in news:
                choice.text += choice.writer.write(_tokens(pieces))
                if ended:
                    choice.text += choice.writer.close()
        if self._body.best is None:
            return self._worded()
        return await self._answers.aside(self._worded)  # a text for every token takes its time

    def _worded(self) -> bytes:
        choices = []
        for choice, ending in self._ended():
            scored = ending.likelihood
            said = self._logprobs(choice, scored, choice.writer.used) if scored else None
            kind: Body = {"message": {"role": "assistant", "content": choice.text}}
            kind = kind if self._is_chat else {"text": choice.text}
            choices.append({"index": choice.index, **kind, "logprobs": said, "finish_reason": choice.finish})
        return dumps(self._head | {"choices": choices} | self._costs()).encode()

    def _ended(self) -> list[tuple[Choice, Ending]]:
        return [(choice, choice.ending) for choice in self._choices if isinstance(choice.ending, Ending)]

    def _logprobs(self, choice: Choice, scored: Likelihood, used: int) -> Body:
        """Log-probabilities of an answer's next tokens as the API words them, as far as they are used.

        In plain completions, an EOS has its own too.
        """
        if self._is_chat or choice.writer.stopped:
            scored = scored.part(used)
        of_token = self._answers.vocabulary.token
        if self._is_chat:

            def entry(token: int, value: float) -> Body:
                return {"token": of_token(token).text, "logprob": value, "bytes": list(of_token(token).bytes)}

            return {
                "content": [
                    entry(token, value) | {"top_logprobs": [entry(*other) for other in best]}
                    for token, value, best in zip(*scored, strict=True)
                ]
            }
        by_text: list[dict[str, float]] = []
        for place in scored.best:
            by_text.append({})
            for token, value in place:  # of several tokens with one text, the likeliest has it for its name
                text = of_token(token).text
                by_text[-1][f"token_id:{token}" if text in by_text[-1] else text] = value
        tokens = [of_token(token) for token in scored.tokens]
        return {
            "tokens": [token.text for token in tokens], "token_logprobs": scored.chosen, "top_logprobs": by_text,
            "text_offset": [choice.passes(b"" if token.is_special else token.bytes) for token in tokens],
        }  # fmt: skip

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A stream's events, to the last, those that come together in one piece."""
        self._head["object"] += ".chunk" if self._is_chat else ""
        async with aclosing(self._news()) as news:
            async for choice, pieces, ended in news:
                chunks = [*self._chunks(choice, pieces)]
                if ended:
                    if rest := choice.writer.close():
                        chunks.append(self._chunk(choice, rest))
                    chunks.append(self._chunk(choice, "", finish=choice.finish))
                if chunks or not pieces:
                    yield b"".join(map(event, chunks)) or PING
        costs = self._costs()
        yield (event(self._head | {"choices": []} | costs) if self._options.include_usage else b"") + event("[DONE]")

    def _chunks(self, choice: Choice, pieces: list[Piece]) -> Iterator[Body]:
        """What has come: one chunk for all of it, or one for each forward, or for each one's log-probabilities."""
        by_forward = self._options.include_forwards
        if self._body.best is None and not by_forward:
            pieces = [(_tokens(pieces), None)]
        for tokens, likelihood in pieces:
            if choice.writer.stopped:
                break
            before = choice.writer.used
            text = choice.writer.write(tokens)
            used = choice.writer.used - before
            said = None if likelihood is None else self._logprobs(choice, likelihood, used)
            if text or said or by_forward:
                chunk = self._chunk(choice, text, logprobs=said)
                yield chunk | ({"marsbench": {"tokens": used}} if by_forward else {})

    def _chunk(self, choice: Choice, text: str, *, finish: str | None = None, logprobs: Body | None = None) -> Body:
        part: Body = {"index": choice.index, "logprobs": logprobs, "finish_reason": finish}
        if not self._is_chat:
            part["text"] = text
        else:
            role = {} if choice.begun else {"role": "assistant"}
            part["delta"] = role | ({"content": text} if text or role else {})
        choice.begun = True
        return self._head | {"choices": [part]} | ({"usage": None} if self._options.include_usage else {})

    def _costs(self) -> Body:
        """The usage of all choices together, and how drafts fared, under vLLM's names; the log gets its share."""
        ended = self._ended()
        # Each prompt was read once.
        prompts = {id(choice.job.prompt_ids): len(choice.job.prompt_ids) for choice, _ in ended}
        counts = {
            "prompt_tokens": sum(prompts.values()), "completion_tokens": sum(choice.used for choice, _ in ended)
        }  # fmt: skip
        self._entry |= counts | {"finish": [choice.finish for choice, _ in ended]}
        of_each = [
            {
                "method": choice.job.method,
                "threshold": None if ending.thresholds is None else list(ending.thresholds),
                "block_size": list(ending.windows), "lossless": ending.lossless, "forwards": ending.forwards,
                "tokens_per_forward": round(choice.used / max(ending.forwards, 1), 4),
            }
            for choice, ending in ended
        ]  # fmt: skip
        ours = {"total_tokens": sum(counts.values()), "marsbench": of_each[0] if len(of_each) == 1 else of_each}
        costs: Body = {"usage": counts | ours}
        if any(ending.accepted for _, ending in ended):
            costs["metrics"] = {"speculative_decoding": _acceptance([ending for _, ending in ended])}
        return costs


def _acceptance(endings: Sequence[Ending]) -> Body:
    """How drafts fared in some answers, under the names of vLLM and speculators."""
    by_length: dict[int, list[int]] = {}
    for ending in endings:
        for length, sizes in ending.accepted.items():
            by_length[length] = _summed([by_length.get(length, []), sizes])
    of_all, histogram = Acceptance.counted([by_length]), _summed(by_length.values())
    return {
        "mean_acceptance_length": round(of_all.mean_acceptance_length, 4),
        "draft_acceptance_rate": round(of_all.num_accepted_tokens / of_all.num_draft_tokens, 4),
        "acceptance_histogram": histogram, "num_spec_steps": of_all.num_drafts,
        "num_accepted_draft_tokens": of_all.num_accepted_tokens, "num_draft_tokens": of_all.num_draft_tokens,
        "num_spec_tokens": len(histogram) - 1,
        "acceptance_rate_per_position": [round(rate, 4) for rate in of_all.acceptance_rate_per_position],
        "acceptance_histogram_by_draft_length": {str(length): by_length[length] for length in sorted(by_length)},
    }  # fmt: skip


def _summed(lists: Iterable[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip_longest(*lists, fillvalue=0)]


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return list(chain.from_iterable(tokens for tokens, _ in pieces))
