"""The checkpoints of a run: which are there, which are trained now, which there cannot be."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from marsbench.answering import load_aloud
from marsbench.errors import UserError
from marsbench.evaluation.local_data import Unavailable
from marsbench.fetching.models import which
from marsbench.line import Line, TrainedStage
from marsbench.locks import locked
from marsbench.presets import DEFAULT_BLOCK_SIZE
from marsbench.progress import all_processes, is_first_process
from marsbench.rows.kinds import TrainingRow
from marsbench.running.plans import drafts_from_afar, is_ours, parents_first
from marsbench.running.run import Run
from marsbench.training import records
from marsbench.training.checkpoints import Loaded, checked_base, default_device
from marsbench.training.records import TrainingRecord
from marsbench.training.stages import Recipe, recipe, stage

_COST = ("parameters", "steps", "tokens", "seconds", "loss", "measures")  # what rows have of a training's record
_PATIENCE_S = 90.0  # how long a network file system may hide from one machine what another has written


class Checkpoints:
    def __init__(self, run: Run) -> None:
        self._run, self._workspace = run, run.workspace
        pretrained = run.scale.pretrained  # a short name stands for one of two models: from here on, for which of them
        self._scale = run.scale if pretrained is None else run.scale.adapted(base=which(pretrained.base))

    # ---- which there are ----

    def recipe(self, trained: TrainedStage) -> Recipe:
        size = trained.block_size or DEFAULT_BLOCK_SIZE
        return recipe(self._scale, trained.stage, block_size=size, seed=self._run.seed)

    def record(self, trained: TrainedStage) -> TrainingRecord | None:
        """What a stage's own checkpoint says about itself, None where it is not there or not finished."""
        return records.finished(self._workspace.checkpoint(self.recipe(trained)))

    def own(self, trained: TrainedStage) -> TrainingRecord | None:
        another = self._scale.ready_checkpoint(*trained) or drafts_from_afar(trained, self._scale)
        return None if another else self.record(trained)

    def is_to_train(self, trained: TrainedStage) -> bool:
        """Whether a table is to train a stage, or finds it trained."""
        failed = trained.id in self._run.failures
        return not failed and (is_ours(trained, self._scale) or self.own(trained) is not None)

    def missing(self, trained: TrainedStage) -> str:
        """Why a stage has no checkpoint and what to do about it; empty where it has one or trains it."""
        if failed := self._run.failures.get(trained.id, ""):
            return failed
        if self._scale.ready_checkpoint(*trained) is not None or self.is_to_train(trained):
            return ""
        option = "" if trained.block_size is None else f" --block-size {trained.block_size}"
        if drafts_from_afar(trained, self._scale):
            why = f"scale {self._scale.scale} trains no draft models; name a smaller model's checkpoint"
        else:
            trains = f"marsbench train {trained.stage} --scale {self._scale.scale}{option}"
            why = f"no checkpoint of stage {trained.stage} is published; train it with {trains}, or name one"
        return f"{why} with --checkpoint {trained.slug}=..."

    # ---- loaded ----

    def load(self, trained: TrainedStage, dtype: torch.dtype = torch.float32) -> Loaded:
        path = self.path(trained)
        return load_aloud(path, self._run.reporter, dtype=dtype, device=default_device(), stage=trained.stage)

    def path(self, trained: TrainedStage) -> str:
        """Folder or hub name of a stage's checkpoint: the ready one if there is one, else ours, trained if need be."""
        ready = self._scale.ready_checkpoint(*trained)
        if ready is not None and self._scale.ships(ready):
            self._run.reporter.say_once(f"{trained.stage} is the one that came with marsbench")
            return str(checked_base(ready))
        if ready is not None:
            return ready
        chosen = self.recipe(trained)
        self.train(chosen)
        return str(self._workspace.checkpoint(chosen))

    def of_line(self, line: Line) -> list[Loaded]:
        """The checkpoint of a line, then that of its draft model; `Unavailable` where there is none."""
        loaded: list[Loaded] = []
        for trained in line.needs:
            if reason := self.missing(trained):
                raise Unavailable(reason)
            with self.others_may_fail(trained):
                loaded.append(self.load(trained, getattr(torch, line.dtype)))
        return loaded

    @contextmanager
    def others_may_fail(self, trained: TrainedStage) -> Iterator[None]:
        """A published checkpoint may be gone, or lack what a method needs."""
        try:
            yield
        except UserError as error:
            if self._scale.ready_checkpoint(*trained) is None:
                raise
            raise Unavailable(error.what, where=error.where, fix=error.fix) from error

    # ---- trained ----

    def rows(self, wanted: Iterable[TrainedStage], *, now: bool = False) -> list[TrainingRow]:
        """Those of some checkpoints that this run trains, parents first: all, trained `now`, or those there are."""
        ours = parents_first([each for each in wanted if self.is_to_train(each)], self._scale)
        if now:
            return [self.train(self.recipe(each)) for each in ours]
        rows = [self._row(self.recipe(each), record) for each in ours if (record := self.record(each)) is not None]
        for row in rows:  # a checkpoint may be older than the run's rows
            self._run.row_file.append(row)
        return rows

    def await_visible(self, wanted: Iterable[TrainedStage]) -> None:
        """Wait until a network file system shows what others have trained; `UserError` rather than train it twice."""
        patience = time.monotonic() + _PATIENCE_S
        for trained in wanted:
            folder = self._workspace.checkpoint(self.recipe(trained))
            while self.record(trained) is None:
                if time.monotonic() > patience:
                    fix = "check that all machines share the output folder, and see the log of its training"
                    what = f"this machine cannot see the checkpoint of {trained.title}"
                    raise UserError(what, where=str(folder), fix=fix)
                list(folder.parent.glob("*"))  # has a network file system look again
                time.sleep(1.0)

    def discard_old(self, chosen: Recipe) -> None:
        """Remove a recipe's checkpoint of an earlier command, if that is not to be used."""
        folder, ours = self._workspace.checkpoint(chosen), is_first_process()
        if (record := records.finished(folder)) and not self._run.counts(record.provenance, folder) and ours:
            shutil.rmtree(folder)
        if self._run.existing != "reuse":
            all_processes().wait_for_everyone()

    def train(self, chosen: Recipe) -> TrainingRow:
        """The row of a recipe's checkpoint, trained now if need be (its parent's too) by one command at a time."""
        folder = self._workspace.checkpoint(chosen)
        record = records.finished(folder)
        if record is None:
            said = f"another command is training {chosen.name} ({{}}): waiting for it"
            say, lock = lambda holder: self._run.reporter.say(said.format(holder)), self._workspace.lock(chosen)
            with locked(lock, say=say) if is_first_process() else nullcontext():
                if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    all_processes().wait_for_everyone()
                record = records.finished(folder) or self._train_now(chosen, folder)
                # Left by a kill at the very end.
                shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)
        row = self._row(chosen, record)
        if is_first_process():
            self._run.row_file.append(row)
        return row

    def _row(self, chosen: Recipe, record: TrainingRecord) -> TrainingRow:
        cost = {name: getattr(record, name) for name in _COST}
        origin = {**record.provenance, **({"base": chosen.pretrained.base} if chosen.pretrained else {})}
        this = TrainedStage(chosen.stage, chosen.block_size)
        parent = parents_first([this], self._scale)[this]
        started_from = self.record(parent) if parent else None
        return TrainingRow(
            chosen.key, "done", "", chosen.scale, chosen.stage, chosen.block_size, **cost, checkpoint=record.weights,
            provenance=origin, parent=record.base_weights or (started_from.weights if started_from else ""),
        )  # fmt: skip

    def _train_now(self, chosen: Recipe, folder: Path) -> TrainingRecord:
        from marsbench.training.trainer import train

        this, started_from = TrainedStage(chosen.stage, chosen.block_size), stage(chosen.stage).parent
        start = None  # random weights, or another's base
        if parent := parents_first([this], self._scale)[this]:
            self.train(self.recipe(parent))
            start = self._workspace.checkpoint(self.recipe(parent))
        elif self._scale.world and started_from:
            start = Path(self.path(TrainedStage(started_from, None)))
        folder.parent.mkdir(parents=True, exist_ok=True)
        terms = " (mask + AR)" if chosen.objective == "mars" and chosen.ar_weight else ""
        with self._run.reporter.bar(f"training {this.title}") as bar:

            def logged(step: int, steps: int, loss: float, rate: float) -> None:
                bar.update(step, steps, f"loss {loss:.3f}{terms}, {rate:,.0f} tokens/s")

            record = train(chosen, folder, start, logged, self._run.reporter.say)
        self._run.reporter.say(f"trained {this.title}: loss {record.loss:.3f}{terms} after {record.seconds:.0f} s")
        return record
