"""From a request's body to jobs, and from the engine's tokens to an answer's body."""

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import cached_property, partial
from typing import Any, TypeVar

from marsbench.decoding.generation import seed_of
from marsbench.serving.engine_client import EngineClient, Stream
from marsbench.serving.messages import Ending, Job, MethodName, Ready
from marsbench.serving.text import Vocabulary, Writer
from marsbench.serving.wire import ApiError, ChatRequest, CompletionRequest, event

T = TypeVar("T")
Body = dict[str, Any]
AnyRequest = ChatRequest | CompletionRequest


class Choice(Stream):
    def __init__(self, index: int, writer: Writer, job: Job, changed: asyncio.Event) -> None:
        super().__init__(job, changed)
        self.index, self.writer = index, writer
        self.text = ""
        self.begun = False  # whether it has had a chunk
        self.forwards = 0  # that brought its text

    def write(self, tokens: list[int]) -> str:
        self.forwards += not self.writer.stopped
        return self.writer.write(tokens)

    @property
    def used(self) -> int:
        """Tokens that it took: up to the one that completed its stop string, or all, with an EOS."""
        return self.ending.emitted if isinstance(self.ending, Ending) and not self.writer.stopped else self.writer.used

    @property
    def finish(self) -> str:
        is_cut = isinstance(self.ending, Ending) and self.ending.finish == "length" and not self.writer.stopped
        return "length" if is_cut else "stop"


class Answers:
    def __init__(self, engine: EngineClient) -> None:
        self.engine, self.settings = engine, engine.settings
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one at a time, and away from the event loop

    @property
    def ready(self) -> Ready:
        return self.engine.check_open()

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a tokenizer's work where it keeps nothing else waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *arguments)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.ready.tokenizer)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ready.tokenizer.get_vocab()))

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit before it is taken apart, which takes a hundred times its memory."""
        most = self.ready.context * self._longest
        if characters > most:
            what = f"this model's context is {self.ready.context} tokens, {most:,} characters; these are {characters:,}"
            raise ApiError.wrong(what, param, "context_length_exceeded")

    async def _chat_ids(self, turns: list[dict[str, str]]) -> list[int]:
        template = partial(self.ready.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
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
                    ignore_eos=bool(body.ignore_eos), best=body.best, arrived=arrived,
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
            what = f"this model's context is {ready.context} tokens, the prompt has {len(ids)}, {wanted} are to follow"
            raise ApiError.wrong(what, param, "context_length_exceeded")
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
    def __init__(self, answers: Answers, body: AnyRequest, entry: Body) -> None:
        """`entry` is the request's line in the log, which hears what the answer took."""
        self._answers, self._body, self._entry = answers, body, entry
        self._options, self._stops = body.options, body.stops
        self._is_chat = isinstance(body, ChatRequest)
        kind, prefix = ("chat.completion", "chatcmpl") if self._is_chat else ("text_completion", "cmpl")
        self._head: Body = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
            "model": answers.settings.name,
        }  # fmt: skip
        self._choices: list[Choice] = []

    async def _arrivals(self) -> AsyncGenerator[tuple[Choice, list[list[int]], bool], None]:
        """What comes for each choice: the tokens of forwards, and whether it has ended."""
        body, engine, changed = self._body, self._answers.engine, asyncio.Event()
        with ExitStack() as stack:
            with engine.let_in((body.n or 1) * (1 if isinstance(body, ChatRequest) else len(body.prompts))):
                self._choices = [
                    Choice(index, Writer(self._answers.vocabulary, self._stops), job, changed)
                    for index, job in enumerate(await self._answers.jobs(body))
                ]
                stack.enter_context(engine.submitted(self._choices))
            left = [*self._choices]
            while left:
                await changed.wait()
                changed.clear()
                for choice in [*left]:
                    ending, pieces = choice.ending, choice.take()
                    ended = isinstance(ending, Ending)
                    if ended:
                        left.remove(choice)
                    if pieces or ended:
                        yield choice, pieces, ended
                    if isinstance(ending, ApiError):
                        raise ending
                    if choice.writer.stopped:
                        engine.stop(choice)

    async def whole(self) -> Body:
        async with aclosing(self._arrivals()) as arrivals:
            async for choice, pieces, ended in arrivals:
                choice.text += "".join(map(choice.write, pieces))
                if ended:
                    choice.text += choice.writer.close()
        choices = []
        for choice in self._choices:
            kind: Body = {"message": {"role": "assistant", "content": choice.text}}
            kind = kind if self._is_chat else {"text": choice.text}
            said = await self._logprobs(choice)
            choices.append({"index": choice.index, **kind, "logprobs": said, "finish_reason": choice.finish})
        return self._head | {"choices": choices} | self._costs()

    async def _logprobs(self, choice: Choice) -> Body | None:
        """Where they are asked for; those of a stream come with its last chunk."""
        return None if self._body.best is None else await self._answers.aside(self._worded, choice)

    def _worded(self, choice: Choice) -> Body:
        """Log-probabilities of the tokens that an answer's text is made of, as the API words them."""
        scored = choice.ending.likelihood if isinstance(choice.ending, Ending) else None
        places = [*zip(*(scored or ()), strict=True)][: choice.writer.used]
        bytes_of, text, offsets = self._answers.vocabulary.bytes, Writer(self._answers.vocabulary), [0]

        def said(token: int, value: float) -> Body:
            data = bytes_of(token)
            return {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data)}

        if self._is_chat:
            every = [(said(token, value), [said(*other) for other in best.items()]) for token, value, best in places]
            return {"content": [chosen | {"top_logprobs": best} for chosen, best in every]}
        by_text: list[dict[str, float]] = [{} for _ in places]
        for names, (token, _, best) in zip(by_text, places, strict=True):
            offsets.append(offsets[-1] + len(text.write([token])))
            for other, value in best.items():  # of several tokens with one text, the likeliest has it for its name
                name = said(other, value)["token"]
                names[f"token_id:{other}" if name in names else name] = value
        return {
            "tokens": [said(token, value)["token"] for token, value, _ in places], "text_offset": offsets[:-1],
            "token_logprobs": [value for _, value, _ in places], "top_logprobs": by_text,
        }  # fmt: skip

    async def events(self) -> AsyncGenerator[bytes, None]:
        self._head["object"] += ".chunk" if self._is_chat else ""
        async with aclosing(self._arrivals()) as arrivals:
            async for choice, pieces, ended in arrivals:
                chunks = [*self._chunks(choice, pieces)]
                if ended:
                    if rest := choice.writer.close():
                        chunks.append(self._chunk(choice, rest))
                    said = await self._logprobs(choice)
                    chunks.append(self._chunk(choice, "", finish_reason=choice.finish, logprobs=said))
                if chunks:
                    yield b"".join(map(event, chunks))
        last = self._head | {"choices": []} | self._costs()
        yield (event(last) if self._options.include_usage else b"") + event("[DONE]")

    def _chunks(self, choice: Choice, pieces: list[list[int]]) -> Iterator[Body]:
        """What has come: one chunk for all of it, or one for each forward."""
        by_forward = self._options.include_forwards
        for part in [[tokens] for tokens in pieces] if by_forward else [pieces]:
            if choice.writer.stopped:
                break
            before = choice.writer.used
            text = "".join(map(choice.write, part))
            if text or by_forward:
                told = {"marsbench": {"tokens": choice.writer.used - before}} if by_forward else {}
                yield self._chunk(choice, text) | told

    def _chunk(self, choice: Choice, text: str, **last: Any) -> Body:
        part: Body = {"index": choice.index, "logprobs": None, "finish_reason": None, **last}
        if not self._is_chat:
            part["text"] = text
        else:
            role = {} if choice.begun else {"role": "assistant"}
            part["delta"] = role | ({"content": text} if text or role else {})
        choice.begun = True
        return self._head | {"choices": [part]} | ({"usage": None} if self._options.include_usage else {})

    def _costs(self) -> Body:
        """The usage of all choices, and how guesses fared in them, under vLLM's names."""
        # Each prompt was read once.
        prompts = {id(choice.job.prompt_ids): len(choice.job.prompt_ids) for choice in self._choices}
        used = sum(choice.used for choice in self._choices)
        counts = {"prompt_tokens": sum(prompts.values()), "completion_tokens": used}
        self._entry |= counts | {"finish": [choice.finish for choice in self._choices]}
        endings = [(choice, choice.ending) for choice in self._choices if isinstance(choice.ending, Ending)]
        of_each = [
            {
                "method": choice.job.method,
                "threshold": None if ending.thresholds is None else list(ending.thresholds),
                "block_size": list(ending.windows), "lossless": ending.lossless, "forwards": forwards,
                "tokens_per_forward": round(choice.used / max(forwards, 1), 4),
            }
            for choice, ending in endings
            for forwards in [choice.forwards if choice.writer.stopped else ending.forwards]
        ]  # fmt: skip
        ours = {"total_tokens": sum(counts.values()), "marsbench": of_each[0] if len(of_each) == 1 else of_each}
        costs: Body = {"usage": counts | ours}
        taken = sum((ending.accepted for _, ending in endings), Counter[int]())
        if steps := taken.total():
            accepted, drafted = sum(taken.elements()), sum(ending.drafted for _, ending in endings)
            masks = max(ending.windows[1] for _, ending in endings) - 1
            costs["metrics"] = {"speculative_decoding": {
                "mean_acceptance_length": round(1 + accepted / steps, 4),
                "draft_acceptance_rate": round(accepted / drafted, 4),
                "acceptance_histogram": [taken[size] for size in range(masks + 1)],
                "num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
                "num_spec_tokens": masks,
            }}  # fmt: skip
        return costs
