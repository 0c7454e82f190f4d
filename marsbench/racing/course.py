"""The course that all contenders of a grid run: their checkpoints, the prompts, the questions behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from marsbench.compiled.graphs import default_backend
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmarks
from marsbench.evaluation.harness import room_for_prompt
from marsbench.keys import content_hash, versions
from marsbench.methods.fitting import default_ids
from marsbench.provenance import products, provenance
from marsbench.racing.entrants import Entrants, Load
from marsbench.racing.grid import Contender, Grid
from marsbench.racing.profile import profile
from marsbench.racing.questions import Prompts, Questions, ask, per_benchmark
from marsbench.racing.race import Outcome, Race
from marsbench.racing.step_time import StepTimes, step_times
from marsbench.rows.kinds import TrainingRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded, default_device


class Cell(NamedTuple):
    """A contender at a batch size."""

    contender: Contender
    batch_size: int
    key: str

    @property
    def name(self) -> str:
        return self.contender.name


class Course:
    """One grid at one scale."""

    def __init__(self, run: Run, grid: Grid, load: Load | None = None) -> None:
        """Take the contenders' models from `load`, or else from the run's checkpoints, trained where need be."""
        self.run, self.grid = run, grid
        # The run's policy is for what is raced and timed: who races again does not want to train again.
        self._checkpoints = Checkpoints(replace(run, existing="reuse"))
        self._trains = load is None
        self._backend = grid.backend or default_backend(torch.device(default_device()))
        self.entrants = Entrants(load or self._checkpoint, getattr(torch, grid.dtype), self._backend)
        self.benchmarks = benchmarks(grid.benchmarks or run.benchmarks or run.scale.benchmarks)
        self.max_new_tokens = grid.max_new_tokens or max(map(run.answer_limit, self.benchmarks))
        per_benchmark(grid.prompts, self.benchmarks)  # refuses what cannot be shared, before anything is trained

    def trainings(self) -> list[TrainingRow]:
        """The stages that the grid's checkpoints come from, trained now if need be; none where models were given."""
        return self._checkpoints.trainings(self.grid.checkpoints) if self._trains else []

    def _checkpoint(self, stage: str, block_size: int, dtype: torch.dtype) -> Loaded:
        """A stage's checkpoint; `UserError` where there is none and training one would take days."""
        if reason := self._checkpoints.missing(stage, block_size):
            raise UserError(reason)
        return self._checkpoints.load(stage, block_size, dtype)

    # ---- what the contenders share ----

    @property
    def plain(self) -> Contender:
        return next(contender for contender in self.grid.contenders if contender.name == "ar")

    @cached_property
    def baseline(self) -> Loaded:
        """The checkpoint of `ar`, whose tokenizer writes the prompts for all."""
        return self.entrants.target(self.plain)

    @property
    def ids(self) -> dict[str, Any]:
        eos_id, pad_id = default_ids(self.baseline)
        return {"eos_id": eos_id, "pad_id": pad_id}

    @cached_property
    def questions(self) -> Questions:
        return ask(self.benchmarks, self.grid.prompts, self.baseline.tokenizer, self.run.data_dir)

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts as token ids; what the context has no room for is said."""
        found = self.questions.prompts(self.baseline.tokenizer, self._room)
        for said in self.questions.cut_in_words(found, self._room):
            self.run.reporter.say(said)
        return found

    @property
    def _room(self) -> int:
        return room_for_prompt(self.baseline.model, self.max_new_tokens)

    @cached_property
    def everywhere(self) -> dict[str, Any]:
        """What can change the numbers of any cell: code, machine, questions, effort."""
        origin = provenance(seed=self.run.seed)
        return {
            "versions": versions("decoding", "timing"),
            "machine": [origin["hardware"], origin["threads"], origin["versions"]["torch"]],
            "dtype": self.grid.dtype,
            **products(self.grid.dtype),
            "repeats": self.grid.repeats,
            "max_new_tokens": self.max_new_tokens,
            "questions": self.questions.fingerprint(),
        }

    # ---- its cells ----

    def cells(self, batch_size: int) -> list[Cell]:
        return [Cell(contender, batch_size, self._key(contender, batch_size)) for contender in self.grid.contenders]

    def _key(self, contender: Contender, batch_size: int) -> str:
        content = {
            "kind": "sweep",
            "entry": contender.keyed,
            "batch_size": batch_size,
            **self.entrants.weights(contender),
        }
        compiled = {"backend": self._backend} if contender.compiled else {}
        profiled = {"profiled": True} if self.grid.profiled else {}
        return content_hash({**content, **self.everywhere, **compiled, **profiled})

    def why_not(self, cell: Cell) -> str:
        """Why a cell cannot be measured, empty if it can."""
        if reason := self.entrants.why_not(cell.contender, cell.batch_size):
            return reason
        tokenizer = self.entrants.target(cell.contender).own_tokenizer
        if tokenizer is not None and self.questions.prompts(tokenizer, self._room) != self.prompts:
            return "its tokenizer reads the prompts otherwise than that of `ar`"
        return ""

    def race(self, cells: Sequence[Cell], laps: int | None = None) -> Race:
        """The race of some contenders at one batch size, of so many timed laps; None = as many as the grid says."""
        return Race(
            [self.entrants.entrant(cell.contender, cell.batch_size) for cell in cells],
            self.prompts.ids,
            batch_size=cells[0].batch_size,
            max_new_tokens=self.max_new_tokens,
            laps=self.grid.repeats if laps is None else laps,
            limit_s=self.grid.timeout_s,
            **self.ids,
        )

    def responses(self, found: Outcome) -> list[str]:
        tokenizer: Any = self.baseline.tokenizer
        return [str(tokenizer.decode(one.tokens, skip_special_tokens=True)) for one in found.generations]

    def step_times(self) -> StepTimes:
        with self.run.reporter.bar("timing forward passes by their shape") as bar:
            return step_times(self.baseline.model, self.grid.positions, bar.update)

    def profile(self, cell: Cell) -> dict[str, float]:
        """Where a contender's time goes, where the grid asks for it; a loop that is not ours is not looked into."""
        entrant = self.entrants.entrant(cell.contender, cell.batch_size)
        if not self.grid.profiled or entrant.compiled or isinstance(entrant.method, OutsideMethod):
            return {}
        return profile(
            entrant, self.prompts.ids, batch_size=cell.batch_size, max_new_tokens=self.max_new_tokens, **self.ids
        )
