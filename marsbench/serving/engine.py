"""The decoding half of the server: one batch that requests join and leave, as far as rows and cache have room.

A long prompt comes in pieces, one between two steps of those in flight, so that no answer stalls.

It knows nothing of HTTP or text. Its driver calls `work` again and again, and now and then passes on the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from marsbench.compiled.graphs import Graphs, wants_graphs, why_not
from marsbench.decoding.engine import Batch, check_requests, context_length
from marsbench.decoding.generation import Generation, Meter, Request, as_list
from marsbench.errors import UserError
from marsbench.methods.mixed import Mixed
from marsbench.serving.likelihood import Scorer
from marsbench.serving.messages import WIDEST, Ending, Job, Knob, Likelihood, Report, State, Wishes
from marsbench.serving.settings import Settings

BEHIND = 2 * WIDEST  # slots for guesses: drafts, and masks behind them
_SLOT_STEP = 64  # the cache grows by so many slots
_PIECE = 256  # positions of prompts that are forwarded between two steps, at most
_TROUBLE = (MemoryError, RuntimeError)  # torch's own lack of memory is a RuntimeError


class Running:
    """A request: it waits, its prompt is read, it is in flight, it ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # What it may need of the cache: prompt, answer, and the guesses behind it.
        self.slots = -(-(len(job.prompt_ids) + job.max_new_tokens + BEHIND) // _SLOT_STEP) * _SLOT_STEP
        # What is kept besides where tokens are scored as they come: all of it once more.
        self.scored_slots = self.slots if job.streamed and job.best is not None else 0
        self.scorer: Scorer | None = None  # once its log-probabilities are looked for
        self.used: int | None = None  # tokens that are wanted of it, once that is known
        self.failure = ""  # why it cannot be answered
        self.before = 0  # the engine's steps before its first
        self.knob = Knob(None, 1)
        self.thresholds: tuple[float, float] | None = None
        self.windows = (WIDEST, 1)
        self.lossless = True
        # Its steps with masks, by their masks and the tokens that they settled beyond the first.
        self.accepted: Counter[tuple[int, int]] = Counter()
        self._drafted = self.counted = 0  # masks that stood in its steps, up to that one of the engine

    def drafted(self, steps: int) -> int:
        """Masks that have stood in its steps when the engine has done so many."""
        return self._drafted + (steps - self.counted) * (self.knob.window - 1)

    def turn(self, knob: Knob, steps: int) -> None:
        """Decode otherwise after so many steps; an answer tells its tau, or its pruning if always checked."""
        self._drafted, self.counted = self.drafted(steps), steps
        self.knob = knob
        self.windows = min(self.windows[0], knob.window), max(self.windows[1], knob.window)
        checked = knob.verified or self.job.wishes.method == "ar"
        if self.lossless and not checked:
            self.lossless, self.thresholds = False, None
        if knob.threshold is not None and (self.lossless or not checked):
            low, high = self.thresholds or (knob.threshold, knob.threshold)
            self.thresholds = min(low, knob.threshold), max(high, knob.threshold)


class Engine:
    """Jobs in, reports out; a round is either a forward over newcomers' prompts or one for all in flight."""

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
        self._running: dict[int, Running] = {}
        self._joining: dict[int, Running] = {}  # those whose prompts are being forwarded
        self._pieces: Iterator[None] = iter(())  # what is left of that
        self._apart: set[int] = set()  # those that wait since there was no memory for their prompts together
        self._steps = 0
        self._settled = self._rows = self._guesses = 0  # of the last two, those of requests that have ended
        self._accepted: Counter[int] = Counter()  # drafts that counted, by their place in a step
        self._failed: list[int] = []  # requests that are to leave since they have failed
        self._by: Any = None  # what all in flight decode by; None = not known
        self._stepping = False  # whether the last round was a step, so that newcomers come next
        self._report = Report(State())  # what has come since the last one

    def capture_ahead(self, kind: Wishes) -> None:
        """Record the steps that requests of a kind come to need, by numbers of rows, before one waits for them."""
        if self._shapes is None or not wants_graphs(self.model, None):  # what is compiled takes too long
            return
        knob, longest = self._knob(kind), min(self.settings.max_new_tokens, context_length(self.model) - BEHIND)
        one = Request([0], longest, knob.threshold, window=knob.window, verified=knob.verified)
        for rows in (2**power for power in range((self.settings.max_rows - 1).bit_length() + 1)):
            batch = self._make_batch(on_finished=lambda *_: None, on_tokens=None, meter=None)
            batch.join(dict.fromkeys(range(rows), one))
            for row in range(rows):
                batch.leave(row)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._joining or self._running or self._report.ended)

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self._waiting[job.id] = Running(job)

    def cancel(self, number: int, used: int | None = None) -> None:
        """End a request; what it has come to is reported as cancelled, or as stopped where its first `used` tokens are
        all that is wanted. One that is gone already is none.
        """
        if number in self._waiting:
            self._apart.discard(number)
            self._end(self._waiting.pop(number).job, Ending("cancelled"))
        if number in self._joining:  # a long prompt comes alone
            self._pieces = iter(())
            self._end(self._joining.pop(number).job, Ending("cancelled"))
        if number in self._running:
            self._running[number].used = used
            self._safely(lambda: self._batch.leave(number))

    @property
    def is_urgent(self) -> bool:
        """Whether the report should go out at once: a request has started, or ended."""
        return bool(self._report.started or self._report.ended)

    def report(self, *, whole: bool = True) -> Report:
        """What came since the last report; unless it is to be whole, tokens only of those who have started or ended."""
        report, self._report = self._report, Report(State())
        if not whole:
            urgent = {*report.started, *(number for number, _ in report.ended)}
            self._report.tokens.update((number, report.tokens.pop(number)) for number in report.tokens.keys() - urgent)
        return replace(report, state=self._state())

    def work(self) -> None:
        """One round."""
        is_turn = self._stepping or not self._running
        newcomers = self._next_in_line() if is_turn and not self._joining else []
        self._stepping = not newcomers and not (is_turn and self._joining)
        if newcomers:
            self._join(newcomers)
        elif not self._stepping:
            self._join_on()
        elif self._running:
            self._turn()
            self._step()

    # ---- who may come in ----

    def _next_in_line(self) -> list[Running]:
        """Those at the head of the queue that rows, cache and one prefill have room for."""
        found: list[Running] = []
        if not self._waiting:  # as before most steps
            return found
        longest = max((running.slots for running in self._running.values()), default=0)
        prompt, scored = 0, sum(running.scored_slots for running in self._running.values())
        for number, first in self._waiting.items():
            longest, prompt = max(longest, first.slots), max(prompt, len(first.job.prompt_ids))
            rows = len(self._running) + len(found) + 1
            scored += first.scored_slots
            if rows > self.settings.max_rows or (rows > 1 and rows * longest + scored > self.slots):
                break
            if found and ((len(found) + 1) * prompt > self._piece() or {number, found[0].job.id} & self._apart):
                break
            found.append(first)
        for newcomer in found:
            del self._waiting[newcomer.job.id]
            self._apart.discard(newcomer.job.id)
        return found

    def _piece(self) -> int:
        """Positions of prompts in one forward, at most: few where others wait for the next step."""
        return min(_PIECE, self.settings.prefill_positions) if self._running else self.settings.prefill_positions

    def _join(self, newcomers: list[Running]) -> None:
        """Begin with their prompts; one that cannot be run is told so, and keeps no other out."""
        requests: dict[int, Request] = {}
        for newcomer in newcomers:
            job, knob = newcomer.job, self._knob(newcomer.job.wishes)
            self._report.started.append(job.id)
            newcomer.turn(knob, 0)
            request = replace(job, threshold=knob.threshold, window=knob.window, verified=knob.verified)
            try:
                check_requests([request], self.model)
            except UserError as error:
                self._fail(job, error.what)
                continue
            self._joining[job.id] = newcomer
            requests[job.id] = request
        self._pieces = self._batch.joining(requests, self._piece())
        self._join_on()

    def _join_on(self) -> None:
        """Forward the next piece of prompts; who has come with the last is in flight."""
        try:
            for _ in self._pieces:
                return
        except _TROUBLE as error:  # then none has joined
            jobs = [newcomer.job for newcomer in self._joining.values()]
            self._joining.clear()
            if len(jobs) > 1:
                self._put_back(jobs)
            else:
                for job in jobs:
                    self._fail(job, f"the prompt cannot be run: {_first_line(error)}")
        for number in list(self._joining):
            self._arrive(number)
        self._by = None  # their knobs may be others, and be turned back before the next step

    def _put_back(self, jobs: list[Job]) -> None:
        """Let newcomers wait once more, to come one by one: where many find no memory, each of them may."""
        self._apart |= {job.id for job in jobs}
        self._waiting = {job.id: Running(job) for job in jobs} | self._waiting
        self._report.started[:] = [number for number in self._report.started if number not in self._apart]

    def _arrive(self, number: int) -> None:
        """A request is in flight, with its first tokens."""
        newcomer = self._running[number] = self._joining.pop(number)
        newcomer.before = newcomer.counted = self._steps

    def _fail(self, job: Job, why: str) -> None:
        self._end(job, Ending("cancelled", failure=why))

    # ---- knobs ----

    def widest(self, wishes: Wishes) -> int:
        """The widest window that a request may get."""
        if wishes.method == "ar":
            return 1
        return min(self.settings.block_size if wishes.window is None else wishes.window, self._widest)

    def _knob(self, wishes: Wishes) -> Knob:
        """How a request decodes as things are now."""
        window, is_checked = self.widest(wishes), wishes.method == "mars-verified"
        if wishes.method == "ar":
            return Knob(None, 1)
        usual = self.settings.draft_threshold if is_checked else self.settings.threshold
        threshold = usual if wishes.threshold is None else wishes.threshold
        if self._windows and (is_checked or wishes.min_threshold is not None):
            window = min(window, self._window_now())
            if self._waiting and wishes.min_threshold is not None and window > 1:
                return Knob(wishes.min_threshold if is_checked else min(threshold, wishes.min_threshold), window)
        return Knob(threshold, window, is_checked)

    def _window_now(self) -> int:
        """The widest window that pays for so many rows as are in flight."""
        return self._windows[min(max(len(self._running), 1), len(self._windows)) - 1]

    def _turn(self) -> None:
        """Bring the knobs of all in flight up to date."""
        by = self.settings, self._windows and (self._window_now(), bool(self._waiting))
        if by == self._by:  # none has joined since, and no knob has changed
            return
        self._by, turned = by, {}
        for number, running in self._running.items():
            knob = self._knob(running.job.wishes)
            if knob != running.knob:
                running.turn(knob, self._steps)
                turned[number] = knob
        self._batch.turn(turned)

    # ---- a forward ----

    def _step(self) -> None:
        self._steps += 1
        self._safely(self._batch.step)
        while self._failed:
            number = self._failed.pop()
            if number in self._running:
                self._safely(partial(self._batch.leave, number))

    def _safely(self, work: Callable[[], None]) -> None:
        """Let the batch work; where it lacks memory, the request that holds the most ends, and of these the youngest.

        What was not finished is done again by the next step: only whole forwards change rows.
        """
        try:
            work()
        except _TROUBLE as error:
            why = f"this answer cannot be gone on with: {_first_line(error)}"
            if not self._running:
                raise
            number = max(self._running, key=lambda number: (self._running[number].slots, number))
            self._running[number].failure = why
            try:
                self._batch.leave(number)
            except _TROUBLE:  # not even that: all of them end
                for running in list(self._running.values()):
                    self._fail(running.job, why)
                self._running.clear()
                self._batch = self._make_batch()

    def _tokens(self, number: int, tokens: list[int]) -> None:
        if number in self._joining:
            self._arrive(number)
        running = self._running[number]
        if running.before < self._steps:  # else these are the prompt's
            self._settled += len(tokens)
            if running.knob.window > 1:  # without masks there is nothing to accept
                running.accepted[running.knob.window - 1, len(tokens) - 1] += 1
                self._accepted.update(range(len(tokens) - 1))
        found = self._read(running, tokens) if running.scored_slots else None
        if running.failure:
            self._failed.append(number)
        if tokens[-1] in self._eos_ids and not running.job.ignore_eos:
            tokens = tokens[:-1]
        if tokens or found:
            self._report.tokens.setdefault(number, []).append((tokens, found))

    def _read(self, running: Running, tokens: Sequence[int]) -> Likelihood | None:
        """How probable its next tokens are; before the first ones, the prompt is read."""
        job = running.job
        if job.best is None:
            return None
        try:
            if running.scorer is None:
                running.scorer = Scorer(self.model, job.prompt_ids, job.best, self.settings.prefill_positions)
            return running.scorer.read(tokens)
        except _TROUBLE as error:
            running.failure = f"its log-probabilities cannot be had: {_first_line(error)}"
            return None

    def _finished(self, number: int, generation: Generation) -> None:
        running = self._running.pop(number)
        job, found, finish = running.job, None, generation.finish if running.used is None else "stop"
        if not job.streamed and finish != "cancelled":
            ended_by = [] if generation.eos_id is None else [generation.eos_id]  # emitted, so it has a probability too
            found = self._read(running, [*generation.tokens, *ended_by][: running.used])
        steps, drafted = self._steps - running.before, running.drafted(self._steps)
        self._rows += steps
        self._guesses += drafted
        accepted = {
            masks: tuple(running.accepted[masks, size] for size in range(self._widest))[: running.windows[1]]
            for masks in sorted({masks for masks, _ in running.accepted})
        }
        ending = Ending(
            finish, generation.emitted, generation.forwards, running.thresholds, running.windows, running.lossless,
            accepted, drafted, found, running.failure,
        )  # fmt: skip
        self._end(job, ending)

    def _end(self, job: Job, ending: Ending) -> None:
        self._report.ended.append((job.id, ending))

    def _state(self) -> State:
        running = [*self._running.values(), *self._joining.values()]
        taus = [one.knob.threshold for one in running if one.knob.threshold is not None and not one.knob.verified]
        longest = max((one.slots for one in running), default=0)
        return State(
            running=len(running),
            waiting=len(self._waiting),
            slots=longest * len(running) + sum(one.scored_slots for one in running),
            forwards=self._meter.forwards + self._meter.prompt_forwards,
            positions=self._meter.positions + self._meter.prompt_positions,
            settled=self._settled,
            rows=self._rows + sum(self._steps - one.before for one in self._running.values()),
            guesses=self._guesses + sum(one.drafted(self._steps) for one in self._running.values()),
            accepted=tuple(self._accepted[place] for place in range(WIDEST - 1)),
            threshold=sum(taus) / len(taus) if taus else None,
            window=sum(one.knob.window for one in running) / len(running) if running else 0.0,
        )


def slots_needed(model: Any) -> int:
    """Slots of one row that may grow as long as the model allows."""
    return context_length(model) + BEHIND + _SLOT_STEP


def bytes_per_slot(model: Any) -> int:
    """Bytes that the keys and values of one token take."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or "no memory"
