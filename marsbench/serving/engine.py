"""The decoding half of the server: one batch, whose rounds forward newcomers' prompts, in pieces, or step all."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from marsbench.compiled.graphs import Graphs, wants_graphs, why_not
from marsbench.decoding.engine import Batch, check_requests, context_length
from marsbench.decoding.generation import Generation, Meter, Request, as_list
from marsbench.errors import UserError
from marsbench.methods.mixed import Mixed
from marsbench.serving.likelihood import likelihood
from marsbench.serving.messages import WIDEST, Ending, Job, Knob, MethodName, Report, Settings, State

BEHIND = 2 * WIDEST  # slots for guesses: drafts, and masks behind them
_SLOT_STEP = 64  # the cache grows by so many slots
_PIECE = 256  # positions of prompts that are forwarded between two steps, at most
_NO_MEMORY = (MemoryError, RuntimeError)  # torch's own lack of memory is a RuntimeError


class Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        # What it may need of the cache: prompt, answer, and the guesses behind it.
        self.slots = -(-(len(job.prompt_ids) + job.max_new_tokens + BEHIND) // _SLOT_STEP) * _SLOT_STEP
        self.knob = Knob(None, 1)
        self.ending = Ending("cancelled", windows=(WIDEST, 1))

    def turn(self, knob: Knob) -> None:
        """Decode otherwise; an answer tells its tau, or its pruning if always checked."""
        self.knob, told = knob, self.ending
        told.windows = min(told.windows[0], knob.window), max(told.windows[1], knob.window)
        checked = knob.verified or self.job.method == "ar"
        if told.lossless and not checked:
            told.lossless, told.thresholds = False, None
        if knob.threshold is not None and (told.lossless or not checked):
            low, high = told.thresholds or (knob.threshold, knob.threshold)
            told.thresholds = min(low, knob.threshold), max(high, knob.threshold)


class Engine:
    def __init__(
        self, model: Any, settings: Settings, *, mask_id: int | None, eos_id: int | Sequence[int], pad_id: int,
        windows: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`windows` has the widest window by rows in flight, for those whose answers it does not change; none = any."""
        self.model, self.settings = model, settings
        self.slots = settings.kv_slots or settings.max_rows * slots_needed(model)
        self._windows = windows
        self._eos_ids = as_list(eos_id)
        self._meter = Meter()
        method = Mixed(-1 if mask_id is None else mask_id, widest=settings.block_size)
        asked = settings.compile or (not settings.adapt and wants_graphs(model, settings.compile))
        reason = why_not(model, method) if asked else "it was not asked for"
        if settings.compile and reason:
            raise UserError(f"steps cannot be compiled: {reason}", fix="serve without --compile")
        self._shapes = None if reason else Graphs()
        self._widest, method = (WIDEST, replace(method, widest=None)) if reason else (settings.block_size, method)
        self._make_batch: Callable[..., Batch] = lambda **other: Batch(
            model, method, eos_id=eos_id, pad_id=pad_id, prefill_positions=settings.prefill_positions,
            shapes=self._shapes,
            **{"on_finished": self._finished, "on_tokens": self._tokens, "meter": self._meter, **other},
        )  # fmt: skip
        self._batch = self._make_batch()
        self._waiting: dict[int, Running] = {}  # in their order
        self._joining: dict[int, Running] = {}  # those whose prompts are being forwarded
        self._running: dict[int, Running] = {}
        self._pieces: Iterator[None] = iter(())  # what is left of the prompts of those that join
        self._turned_by: Any = None  # what the knobs of all in flight are made of; None = not known
        self._stepping = False  # whether the last round was a step, so that newcomers come next
        self._report = Report(State())  # what has come since the last one

    def capture_ahead(self, method: MethodName) -> None:
        """Record the steps that requests come to need, by numbers of rows, before one waits for them."""
        if self._shapes is None or not wants_graphs(self.model, None):  # what is compiled takes too long
            return
        longest = min(self.settings.max_new_tokens, context_length(self.model) - BEHIND)
        job = Job([0], longest, id=0, method=method)
        request = replace(job, **self._knob(job)._asdict())
        for rows in (2**power for power in range((self.settings.max_rows - 1).bit_length() + 1)):
            batch = self._make_batch(on_finished=lambda *_: None, on_tokens=None, meter=None)
            batch.join(dict.fromkeys(range(rows), request))
            for row in range(rows):
                batch.leave(row)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._joining or self._running or self._report.ended)

    def submit(self, job: Job) -> None:
        self._waiting[job.id] = Running(job)

    def cancel(self, number: int) -> None:
        """End a request; what it has come to is reported as cancelled. One that is gone already stays as it is."""
        if number in self._joining:  # a long prompt comes alone
            self._pieces = iter(())
        for requests in (self._waiting, self._joining):
            if requests.pop(number, None):
                self._report.ended.append((number, Ending("cancelled")))
        if number in self._running:
            self._safely(lambda: self._batch.leave(number))

    @property
    def is_urgent(self) -> bool:
        return bool(self._report.started or self._report.ended)

    def report(self, *, whole: bool = True) -> Report:
        """What came since the last report; if it is not `whole`, tokens only of requests that started or ended."""
        report, self._report = self._report, Report(State())
        if not whole:
            urgent = {*report.started, *(number for number, _ in report.ended)}
            self._report.tokens.update((number, report.tokens.pop(number)) for number in report.tokens.keys() - urgent)
        report.counted["marsbench:forwards"] = self._meter.forwards + self._meter.prompt_forwards
        self._meter.forwards = self._meter.prompt_forwards = 0
        running = [*self._running.values(), *self._joining.values()]
        knobs = [request.knob for request in running]
        taus = [knob.threshold for knob in knobs if knob.threshold is not None and not knob.verified]
        longest = max((request.slots for request in running), default=0)
        return replace(report, state=State(
            running=len(running), waiting=len(self._waiting), slots=longest * len(running),
            threshold=sum(taus) / len(taus) if taus else None,
            window=sum(knob.window for knob in knobs) / len(knobs) if knobs else 0.0,
        ))  # fmt: skip

    def work(self) -> None:
        is_turn = self._stepping or not self._running
        newcomers = self._scheduled() if is_turn and not self._joining else []
        self._stepping = not newcomers and not (is_turn and self._joining)
        if newcomers:
            self._join(newcomers)
        elif not self._stepping:
            self._prefill()
        elif self._running:
            self._turn()
            self._safely(self._batch.step)

    # ---- schedule ----

    def _scheduled(self) -> list[Running]:
        newcomers: list[Running] = []
        if not self._waiting:  # as before most steps
            return newcomers
        longest = max((running.slots for running in self._running.values()), default=0)
        prompt = 0
        for first in self._waiting.values():
            longest, prompt = max(longest, first.slots), max(prompt, len(first.job.prompt_ids))
            rows = len(self._running) + len(newcomers) + 1
            if rows > self.settings.max_rows or (rows > 1 and rows * longest > self.slots):
                break
            if newcomers and (len(newcomers) + 1) * prompt > self._most_positions():
                break
            newcomers.append(first)
        for newcomer in newcomers:
            del self._waiting[newcomer.job.id]
        return newcomers

    def _most_positions(self) -> int:
        return min(_PIECE, self.settings.prefill_positions) if self._running else self.settings.prefill_positions

    def _knob(self, job: Job) -> Knob:
        if job.method == "ar":
            return Knob(None, 1)
        window = min(self.settings.block_size if job.widest is None else job.widest, self._widest)
        is_checked = job.method == "mars-verified"
        usual = self.settings.draft_threshold if is_checked else self.settings.threshold
        threshold = usual if job.threshold is None else job.threshold
        if self._windows and (is_checked or job.min_threshold is not None):
            window = min(window, self._window_now())
            if self._waiting and job.min_threshold is not None and window > 1:
                return Knob(job.min_threshold if is_checked else min(threshold, job.min_threshold), window)
        return Knob(threshold, window, is_checked)

    def _window_now(self) -> int:
        return self._windows[min(max(len(self._running), 1), len(self._windows)) - 1]

    def _turn(self) -> None:
        by = self.settings, self._windows and (self._window_now(), bool(self._waiting))
        if by == self._turned_by:  # none has joined since, and no knob has changed
            return
        self._turned_by, turned = by, {}
        for number, running in self._running.items():
            knob = self._knob(running.job)
            if knob != running.knob:
                running.turn(knob)
                turned[number] = knob
        self._batch.turn(turned)

    # ---- run ----

    def _join(self, newcomers: list[Running]) -> None:
        """Begin with their prompts; one that cannot be run is told so, and keeps no other out."""
        requests: dict[int, Request] = {}
        for newcomer in newcomers:
            job = newcomer.job
            self._report.started.append(job.id)
            newcomer.turn(self._knob(job))
            request = replace(job, **newcomer.knob._asdict())
            try:
                check_requests([request], self.model)
            except UserError as error:
                self._report.ended.append((job.id, Ending("cancelled", failure=error.what)))
                continue
            self._joining[job.id] = newcomer
            requests[job.id] = request
        self._pieces = self._batch.joining(requests, self._most_positions())
        self._prefill()

    def _prefill(self) -> None:
        """Forward the next piece of prompts; with the last one, they are in flight."""
        try:
            for _ in self._pieces:
                return
        except _NO_MEMORY as error:  # then none has joined
            why = f"the prompt cannot be run: {_first_line(error)}"
            self._report.ended.extend((number, Ending("cancelled", failure=why)) for number in self._joining)
            self._joining.clear()
        self._running |= self._joining
        self._joining.clear()
        self._turned_by = None  # their knobs may be others, and be turned back before the next step

    def _safely(self, work: Callable[[], None]) -> None:
        """Let the batch work; where it lacks memory, the youngest of the requests that hold the most ends."""
        try:
            work()
        except _NO_MEMORY as error:
            why = f"this answer cannot be gone on with: {_first_line(error)}"
            if not self._running:
                raise
            number = max(self._running, key=lambda number: (self._running[number].slots, number))
            self._running[number].ending.failure = why
            try:
                self._batch.leave(number)
            except _NO_MEMORY:  # not even that: all of them end
                self._report.ended.extend((number, Ending("cancelled", failure=why)) for number in self._running)
                self._running.clear()
                self._batch = self._make_batch()

    # ---- postprocess ----

    def _tokens(self, number: int, tokens: list[int]) -> None:
        if number in self._joining:  # these are of its prompt's forward
            running = self._running[number] = self._joining.pop(number)
        else:
            running = self._running[number]
            self._report.counted["settled"] += len(tokens)
            self._report.counted["rows moved"] += 1
            if running.job.method == "mars":  # masks that it does not check; drafts are counted when they all are
                self._count(running.ending, running.knob.window - 1, len(tokens) - 1)
        self._report.counted["vllm:generation_tokens"] += len(tokens)
        ended = tokens[-1] in self._eos_ids and not running.job.ignore_eos
        self._report.tokens.setdefault(number, []).append(tokens[:-1] if ended else tokens)

    def _count(self, ending: Ending, drafted: int, accepted: int) -> None:
        """Count a window's drafts, and those that became tokens; a window without drafts says nothing of them."""
        if drafted:
            counted = self._report.counted
            counted["vllm:spec_decode_num_drafts"] += 1
            counted["vllm:spec_decode_num_draft_tokens"] += drafted
            counted["vllm:spec_decode_num_accepted_tokens"] += accepted
            self._report.accepted.update(range(accepted))
            ending.drafted += drafted
            ending.accepted[accepted] += 1

    def _finished(self, number: int, generation: Generation) -> None:
        running = self._running.pop(number)
        job, ending = running.job, running.ending
        ending.finish, ending.emitted, ending.forwards = generation.finish, generation.emitted, generation.forwards
        if job.method == "mars-verified":  # of pruned drafts, a window may have any number
            for drafted, settled in zip(generation.drafted, generation.accepted, strict=False):
                self._count(ending, drafted, min(settled - 1, drafted))
        if job.best is not None and not ending.failure:  # a stop string has it cancelled, too
            try:
                ending.likelihood = likelihood(self.model, job.prompt_ids, generation.tokens, job.best)
            except _NO_MEMORY as error:
                ending.failure = f"its log-probabilities cannot be had: {_first_line(error)}"
        self._report.ended.append((number, ending))


def slots_needed(model: Any) -> int:
    return context_length(model) + BEHIND + _SLOT_STEP


def bytes_per_slot(model: Any) -> int:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def _first_line(error: BaseException) -> str:
    if isinstance(error, getattr(torch, "AcceleratorError", ())):  # this process can use its device no more
        raise error
    return next(iter(str(error).splitlines()), "") or "no memory"
