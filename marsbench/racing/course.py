"""The course that all contenders of a grid run: their checkpoints, the prompts, the questions behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from marsbench.evaluation.benchmarks import benchmarks
from marsbench.evaluation.harness import room_for_prompt
from marsbench.keys import content_hash, versions
from marsbench.methods.fitting import default_ids
from marsbench.provenance import provenance
from marsbench.racing.entrants import Entrants
from marsbench.racing.grid import Entry, Grid
from marsbench.racing.questions import Prompts, Questions, ask, per_benchmark
from marsbench.racing.race import Race
from marsbench.rows.kinds import TrainingRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded
from marsbench.training.stages import lineage


class Cell(NamedTuple):
    """A contender at a batch size."""

    entry: Entry
    batch_size: int
    key: str

    @property
    def name(self) -> str:
        """The contender's name in the grid."""
        return self.entry.name


class Course:
    """One grid at one scale."""

    def __init__(self, run: Run, grid: Grid) -> None:
        self.run, self.grid = run, grid
        # The run's policy is for what is raced and timed: who races again does not want to train again.
        self._checkpoints = Checkpoints(replace(run, existing="reuse"))
        self.entrants = Entrants(self._checkpoints, getattr(torch, grid.dtype))
        self.benchmarks = benchmarks(grid.benchmarks or run.benchmarks or run.scale.benchmarks)
        self.max_new_tokens = grid.max_new_tokens or max(map(run.answer_limit, self.benchmarks))
        per_benchmark(grid.prompts, self.benchmarks)  # refuses what cannot be shared, before anything is trained

    def trainings(self) -> list[TrainingRow]:
        """The stages that the grid's checkpoints come from, trained now if need be."""
        recipes = {}
        for trained in self.grid.checkpoints:
            if self._checkpoints.trains(*trained):
                for name in lineage(self.run.scale, trained.stage):
                    chosen = self._checkpoints.recipe(name, trained.block_size)
                    recipes[chosen.key] = chosen
        return [self._checkpoints.train(chosen) for chosen in recipes.values()]

    # ---- what the contenders share ----

    @cached_property
    def baseline(self) -> Loaded:
        """The checkpoint of `ar`, whose tokenizer writes the prompts for all."""
        return self.entrants.target(next(entry for entry in self.grid.contenders if entry.name == "ar"))

    @cached_property
    def questions(self) -> Questions:
        """The questions of all benchmarks in turn."""
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
        """Tokens that the context leaves for a prompt."""
        return room_for_prompt(self.baseline.model, self.max_new_tokens)

    @cached_property
    def everywhere(self) -> dict[str, Any]:
        """What can change the numbers of any cell: code, machine, questions, effort."""
        origin = provenance(seed=self.run.seed)
        return {
            "versions": versions("decoding", "timing"),
            "machine": [origin["hardware"], origin["threads"], origin["versions"]["torch"]],
            "dtype": self.grid.dtype,
            "repeats": self.grid.repeats,
            "max_new_tokens": self.max_new_tokens,
            "questions": self.questions.fingerprint(),
        }

    # ---- its cells ----

    def cells(self, batch_size: int) -> list[Cell]:
        """All contenders at a batch size."""
        return [Cell(entry, batch_size, self._key(entry, batch_size)) for entry in self.grid.contenders]

    def _key(self, entry: Entry, batch_size: int) -> str:
        content = {"kind": "sweep", "entry": entry.keyed, "batch_size": batch_size, **self.entrants.weights(entry)}
        return content_hash({**content, **self.everywhere})

    def why_not(self, cell: Cell) -> str:
        """Why a cell cannot be measured, empty if it can."""
        if reason := self.entrants.why_not(cell.entry, cell.batch_size):
            return reason
        tokenizer = self.entrants.target(cell.entry).own_tokenizer
        if tokenizer is not None and self.questions.prompts(tokenizer, self._room) != self.prompts:
            return "its tokenizer reads the prompts otherwise than that of `ar`"
        return ""

    def race(self, cells: Sequence[Cell]) -> Race:
        """The race of some contenders at one batch size."""
        eos_id, pad_id = default_ids(self.baseline, None, None)
        return Race(
            [self.entrants.contender(cell.entry, cell.batch_size) for cell in cells],
            self.prompts.ids,
            batch_size=cells[0].batch_size,
            max_new_tokens=self.max_new_tokens,
            eos_id=eos_id,
            pad_id=pad_id,
            laps=self.grid.repeats,
            limit_s=self.grid.timeout_s,
        )
