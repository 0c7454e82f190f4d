"""The speed sweep: every contender of a grid at every batch size, speed and accuracy from the same generations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from marsbench.decoding.engine import context_length
from marsbench.decoding.generation import Generation
from marsbench.evaluation.benchmarks import benchmarks
from marsbench.files import write_atomically
from marsbench.methods.fitting import default_ids
from marsbench.provenance import provenance
from marsbench.sweeps.entrants import Entrants, size_of
from marsbench.sweeps.grid import BASELINES, Entry, Grid
from marsbench.sweeps.questions import Questions, ask, per_benchmark
from marsbench.sweeps.race import Outcome, Race, RoundLog
from marsbench.sweeps.rows import Row, StepTimeRow, SweepRow, TrainingRow
from marsbench.sweeps.runner import Runner, content_hash, source_hash
from marsbench.sweeps.step_time import step_times
from marsbench.sweeps.workspace import full_disk_explained
from marsbench.training.checkpoints import Loaded
from marsbench.training.stages import lineage, recipe


class _Cell(NamedTuple):
    """A contender at a batch size."""

    entry: Entry
    batch_size: int
    key: str

    @property
    def name(self) -> str:
        return self.entry.name


class SpeedupSweep:
    """One grid at one scale, with a runner's checkpoints and rows; its policy is for what is raced and timed."""

    def __init__(self, runner: Runner, grid: Grid) -> None:
        self._runner, self._grid = runner, grid
        self._trainer = replace(runner, existing="reuse")  # who races again does not want to train again
        self._entrants = Entrants(self._trainer, getattr(torch, grid.dtype))
        self._max_new_tokens = grid.max_new_tokens or runner.scale.max_new_tokens
        self._benchmarks = benchmarks(grid.benchmarks or runner.benchmarks or runner.scale.benchmarks)
        per_benchmark(grid.prompts, self._benchmarks)  # refuses what cannot be shared, before anything is trained

    def rows(self) -> list[Row]:
        """All rows, in the grid's order: trainings, what a forward costs, then the cells."""
        with full_disk_explained(self._runner.workspace.runs):
            rows: list[Row] = list(self._trainings())
            if self._grid.positions:
                rows.append(self._step_times())
            for batch_size in self._grid.batch_sizes:
                rows += self._at(batch_size)
            return rows

    def _trainings(self) -> list[TrainingRow]:
        """The stages that the grid's checkpoints come from, trained now if need be."""
        scale, recipes = self._runner.scale, {}
        for entry in self._grid.contenders:
            for name in filter(None, (entry.stage, entry.draft)):
                if self._trainer.trains(name, entry.trained_block_size):
                    for one in lineage(scale, name):
                        chosen = recipe(scale, one, block_size=entry.trained_block_size, seed=self._runner.seed)
                        recipes[chosen.key] = chosen
        return [self._trainer.train(chosen) for chosen in recipes.values()]

    # ------------------------------------------------------------------ what the contenders share

    @cached_property
    def _baseline(self) -> Loaded:
        """The checkpoint of `ar`, whose tokenizer writes the prompts for all."""
        return self._entrants.target(next(entry for entry in self._grid.contenders if entry.name == "ar"))

    @cached_property
    def _questions(self) -> Questions:
        return ask(self._benchmarks, self._grid.prompts, self._baseline.tokenizer, self._runner.data_dir)

    @cached_property
    def _prompts(self) -> list[list[int]]:
        room = context_length(self._baseline.model) - self._max_new_tokens
        return self._questions.prompts(self._baseline.tokenizer, room)

    @cached_property
    def _everywhere(self) -> dict[str, Any]:
        """What can change the numbers of any cell: code, machine, questions, effort."""
        origin = provenance(seed=self._runner.seed)
        return {
            "source": source_hash("decoding", "methods"),
            "machine": [origin["hardware"], origin["threads"], origin["versions"]["torch"]],
            "dtype": self._grid.dtype,
            "repeats": self._grid.repeats,
            "max_new_tokens": self._max_new_tokens,
            "questions": self._questions.fingerprint(),
        }

    def _step_times(self) -> StepTimeRow:
        """What a forward costs by its shape, on the checkpoint of `ar`."""
        loaded = self._baseline
        key = content_hash({"kind": "step_time", "weights": loaded.weights, **self._everywhere})
        known = self._runner.existing_row(key, StepTimeRow, "the times of forward passes")
        if known is not None:
            return known
        origin = provenance(seed=self._runner.seed)
        with self._runner.reporter.bar("timing forward passes by their shape") as bar:
            found = step_times(loaded.model, self._grid.positions, bar.update)
        row = StepTimeRow(
            key=key,
            status="done",
            reason="",
            scale=self._runner.scale.scale,
            stage=str(loaded.stage),
            context=found.context,
            rows=[shape.rows for shape in found.shapes],
            window=[shape.window for shape in found.shapes],
            seconds=found.seconds,
            copied_per_second=found.copied_per_second,
            weight_bytes=size_of(loaded.model),
            checkpoint=loaded.weights,
            provenance=origin,
        )
        self._runner.keep(row)
        return row

    # ------------------------------------------------------------------ races

    def _at(self, batch_size: int) -> list[SweepRow]:
        """The rows of all cells at a batch size; those that are missing are raced together, with the baselines."""
        cells = [_Cell(entry, batch_size, self._key(entry, batch_size)) for entry in self._grid.contenders]
        if self._missing(cells):
            file = self._runner.workspace.race(content_hash([cell.key for cell in cells]))
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):  # of two sweeps in one folder, the second waits and finds the rows
                self._race(cells, RoundLog(file))
                file.unlink(missing_ok=True)  # its rows are kept; who failed may try again
        rows = self._runner.store.rows()
        return [row for cell in cells if isinstance(row := rows.get(cell.key), SweepRow)]

    def _key(self, entry: Entry, batch_size: int) -> str:
        content = {"kind": "sweep", "entry": vars(entry), "batch_size": batch_size, **self._entrants.weights(entry)}
        return content_hash({**content, **self._everywhere})

    def _missing(self, cells: Sequence[_Cell]) -> list[_Cell]:
        """The cells without a finished row."""
        what = "{0.name} at batch size {0.batch_size}"
        return [cell for cell in cells if not self._runner.existing_row(cell.key, SweepRow, what.format(cell))]

    def _race(self, cells: Sequence[_Cell], log: RoundLog) -> None:
        """Race the missing cells, or go on with what an interruption has left of that race, and keep the rows."""
        ready = []
        for cell in self._missing(cells):
            if reason := self._why_not(cell):
                self._skip(cell, reason)
            else:
                ready.append(cell)
        if not ready:
            return
        if not {cell.name for cell in ready} <= set(log.contenders):
            baselines = [cell for cell in cells if cell.name in BASELINES and not self._why_not(cell)]
            log.begin([cell.name for cell in cells if cell in ready or cell in baselines])
        racing = [cell for cell in cells if cell.name in log.contenders]
        with self._runner.reporter.bar(f"racing {len(racing)} contenders, {cells[0].batch_size} at once") as bar:
            outcomes = self._plan(racing).run(log, bar.update)
        for cell in ready:
            self._keep(cell, outcomes[cell.name], outcomes)
        self._runner.reporter.say(f"raced {len(racing)} contenders at batch size {cells[0].batch_size}")

    def _skip(self, cell: _Cell, reason: str) -> None:
        """Write down why a cell has no numbers, once."""
        known = self._runner.store.rows().get(cell.key)
        if not (isinstance(known, SweepRow) and (known.status, known.reason) == ("skipped", reason)):
            self._keep(cell, Outcome([], status="skipped", reason=reason), {})

    def _why_not(self, cell: _Cell) -> str:
        """Why a cell cannot be measured, empty if it can."""
        if reason := self._entrants.why_not(cell.entry, cell.batch_size):
            return reason
        tokenizer = self._entrants.target(cell.entry).own_tokenizer
        room = context_length(self._baseline.model) - self._max_new_tokens
        if tokenizer is not None and self._questions.prompts(tokenizer, room) != self._prompts:
            return "its tokenizer reads the prompts otherwise than that of `ar`"
        return ""

    def _plan(self, cells: Sequence[_Cell]) -> Race:
        eos_id, pad_id = default_ids(self._baseline, None, None)
        return Race(
            [self._entrants.contender(cell.entry, cell.batch_size) for cell in cells],
            self._prompts,
            batch_size=cells[0].batch_size,
            max_new_tokens=self._max_new_tokens,
            eos_id=eos_id,
            pad_id=pad_id,
            laps=self._grid.repeats,
            limit_s=self._grid.timeout_s,
        )

    # ------------------------------------------------------------------ rows

    def _keep(self, cell: _Cell, found: Outcome, outcomes: Mapping[str, Outcome]) -> None:
        """Write a cell's samples and its row; `outcomes` are those of its race."""
        entry = cell.entry
        identity: dict[str, Any] = {
            "key": cell.key,
            "status": found.status,
            "reason": found.reason,
            "scale": self._runner.scale.scale,
            "contender": entry.name,
            "stage": entry.stage,
            "draft": entry.draft or "",
            "method": entry.method,
            "options": entry.shown,
            "batch_size": cell.batch_size,
            "benchmarks": self._questions.benchmarks,
            "prompts": len(self._prompts),
            "prompts_hash": content_hash(self._prompts),
            "max_new_tokens": self._max_new_tokens,
            "dtype": self._grid.dtype,
            "provenance": provenance(seed=self._runner.seed),
        }
        measured = self._measured(cell, found, outcomes) if found.status == "done" else {}
        self._runner.keep(SweepRow(**identity, **measured))

    def _measured(self, cell: _Cell, found: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        """What a finished cell's row says."""
        tokenizer, generations = self._baseline.tokenizer, found.generations
        responses = [str(tokenizer.decode(one.tokens, skip_special_tokens=True)) for one in generations]
        correct = self._questions.score(responses)
        target, together = self._entrants.weight_bytes(cell.entry)
        return {
            "seconds": [round(seconds, 6) for seconds in found.seconds],
            "baselines": _baselines(outcomes),
            "correct": correct,
            "emitted": [one.emitted for one in generations],
            "row_forwards": [one.forwards for one in generations],
            "finished": [int(one.finish == "eos") for one in generations],
            "first_token": found.first_token,
            "last_token": found.last_token,
            "forwards": found.meter.forwards,
            "positions": found.meter.positions,
            "prompt_forwards": found.meter.prompt_forwards,
            "prompt_positions": found.meter.prompt_positions,
            "cache_bytes": found.meter.cache_bytes,
            "target_bytes": target,
            "weight_bytes": together,
            "peak_bytes": found.peak_bytes,
            "same_as": self._same_as(found, outcomes),
            "samples": self._log_samples(cell.key, generations, responses, correct),
            "race": content_hash(sorted(outcomes)),
            "checkpoint": self._entrants.target(cell.entry).weights,
        }

    def _same_as(self, found: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, int]:
        """Each contender that decodes by `ar` -> prompts that it and this one give the same tokens."""
        tokens = [one.tokens for one in found.generations]
        references = [entry.name for entry in self._grid.contenders if entry.method == "ar"]
        return {
            name: sum(mine == theirs.tokens for mine, theirs in zip(tokens, outcomes[name].generations, strict=True))
            for name in references
            if name in outcomes and outcomes[name].status == "done"
        }

    def _log_samples(
        self, key: str, generations: Sequence[Generation], responses: Sequence[str], correct: Sequence[float]
    ) -> str:
        """Write down what was generated; returns the hash of that file."""
        lines = [
            {
                "benchmark": question.benchmark,
                "doc_id": question.doc_id,
                "response": response,
                "correct": right,
                "tokens": one.tokens,
                "eos_id": one.eos_id,
                "accepted": one.accepted,
            }
            for question, response, right, one in zip(
                self._questions.questions, responses, correct, generations, strict=True
            )
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = write_atomically(self._runner.workspace.samples(key), content)
        logged = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for one, line in zip(generations, logged, strict=True):
            in_log = len(line["tokens"]) + (line["eos_id"] is not None)
            if not sum(line["accepted"]) == one.emitted == in_log:
                raise RuntimeError(f"{sum(line['accepted'])} accepted, {one.emitted} emitted, {in_log} logged tokens")
        return hashlib.sha256(content).hexdigest()


def _baselines(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """The baselines of a race: their seconds in each lap, and their tokens."""
    found = {name: outcomes[name] for name in BASELINES if name in outcomes and outcomes[name].status == "done"}
    return {
        name: {"seconds": [round(seconds, 6) for seconds in one.seconds], "emitted": one.emitted}
        for name, one in found.items()
    }
