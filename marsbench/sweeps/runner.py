"""Fills a table's cells in: trains what is missing, evaluates what is missing, keeps every row, renders the page.

Whatever is finished is on disk, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch

from marsbench.decoding.engine import Method
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark, fingerprint
from marsbench.evaluation.harness import AnswerLog, EngineModel, Exam, evaluate, prepare
from marsbench.evaluation.local_data import Unavailable
from marsbench.methods import Options, check_options
from marsbench.methods.fitting import fit
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.progress import Reporter, is_first_process
from marsbench.provenance import provenance
from marsbench.sweeps.plans import Arm, TablePlan, TrainedStage
from marsbench.sweeps.rows import EvaluationRow, Row, StepCostRow, TrainingRow
from marsbench.sweeps.step_cost import step_cost
from marsbench.sweeps.store import Existing, RowStore
from marsbench.sweeps.workspace import Workspace, full_disk_explained
from marsbench.training import checkpoints
from marsbench.training.checkpoints import Loaded
from marsbench.training.stages import Recipe, lineage, recipe, stage

_RowKind = TypeVar("_RowKind", bound=Row)


@dataclass
class Runner:
    """One run at one scale."""

    scale: Preset
    workspace: Workspace
    existing: Existing = "reuse"
    seed: int = 0
    benchmarks: Sequence[str] = ()  # none = the preset's
    limit: int | None = None  # questions per benchmark; None = the preset's
    shard: tuple[int, int] = (1, 1)  # (i, n): answer only the ith of n parts of the questions
    data_dir: Path | None = None
    reporter: Reporter = field(default_factory=Reporter)

    def __post_init__(self) -> None:
        self.workspace.check_writable()
        self.store = RowStore(self.workspace.row_file)
        self._renewed: set[str] = set()  # keys made in this run, which `rerun` must not make twice
        self._exams: dict[tuple[str, int | None], Exam] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # of a table's cells, from 1; none outside a table

    def table(self, plan: TablePlan) -> list[Row]:
        """All rows of a table, in its order: trainings, the cost of a step, then the cells."""
        names = self.asked(plan)
        cells = [(arm.name, name) for arm in plan.arms for name in names]
        self._numbers = {cell: number for number, cell in enumerate(cells, 1)}
        with full_disk_explained(self.workspace.runs):
            rows: list[Row] = [*self.trainings(plan)]
            # Its batches are timed; the paper says what the real scales cost.
            if plan.step_cost and self.scale.world and self.shard == (1, 1):
                rows.append(self.step_cost())
            for _, arms in groupby(plan.arms, key=lambda arm: (arm.trained, arm.draft)):
                rows += self._lines(list(arms), names, plan.questions)
            return rows

    def asked(self, plan: TablePlan) -> list[str]:
        """The benchmarks that a table asks in this run."""
        names = plan.of(self.benchmarks or self.scale.benchmarks)
        if not names:
            raise UserError(
                f"{plan.name} asks none of {', '.join(self.benchmarks)}",
                fix=f"choose among {', '.join(plan.benchmarks)}, or their mini_ counterparts",
            )
        return names

    def trainings(self, plan: TablePlan) -> list[TrainingRow]:
        """The checkpoints that a table needs and is to train, trained, their parents first."""
        wanted = [
            self._recipe(name, trained.block_size)
            for trained in plan.stages
            if self.trains(*trained)
            for name in lineage(self.scale, trained.stage)
        ]
        return [self.train(chosen) for chosen in {one.key: one for one in wanted}.values()]

    def trains(self, stage: str, block_size: int | None) -> bool:
        """Whether a table is to train a stage, or finds it trained."""
        if self._ready(stage, block_size) is not None or self._drafts_from_afar(stage):
            return False
        return self.scale.tables_train or self.is_trained(TrainedStage(stage, block_size))

    def is_trained(self, trained: TrainedStage) -> bool:
        """Whether a stage's own checkpoint is there and finished."""
        return checkpoints.finished(self.workspace.checkpoint(self._recipe(*trained))) is not None

    def missing_checkpoint(self, stage: str, block_size: int | None) -> str:
        """Why a stage has no checkpoint and what to do about it; empty where it has one or trains it."""
        if self._ready(stage, block_size) is not None or self.trains(stage, block_size):
            return ""
        size = TrainedStage.of(stage, block_size).block_size
        option, suffix = ("", "") if size is None else (f" --block-size {size}", f"-b{size}")
        if self._drafts_from_afar(stage):
            return (
                f"scale {self.scale.scale} trains no draft models; name a smaller model's checkpoint with "
                f"--checkpoint {stage}{suffix}=..."
            )
        return (
            f"no checkpoint of stage {stage} is published; train it with marsbench train {stage} "
            f"--scale {self.scale.scale}{option}, or name one with --checkpoint {stage}{suffix}=..."
        )

    def _drafts_from_afar(self, stage_name: str) -> bool:
        """Whether a stage is a draft model's, which the paper's scales do not train: another scale's models draft."""
        return self.scale.pretrained is not None and stage(stage_name).draft

    def _lines(self, arms: Sequence[Arm], names: Sequence[str], questions: int | None) -> list[EvaluationRow]:
        """Lines that share their checkpoints, on every benchmark; what cannot be measured says why."""
        reason, loaded = self.available(arms[0].trained)
        draft = None
        if not reason and arms[0].draft is not None:
            reason, draft = self.available(arms[0].draft)
        if reason or loaded is None:
            return [self._skipped(arm, name, reason) for arm in arms for name in names]
        return [self._cell_or_reason(arm, loaded, name, draft, questions) for arm in arms for name in names]

    def available(self, trained: TrainedStage) -> tuple[str, Loaded | None]:
        """The checkpoint of a table's lines, or their draft model's, on the device, or why there is none."""
        if reason := self.missing_checkpoint(*trained):
            return reason, None
        try:
            with self._others_may_fail(trained):
                return "", self.load(*trained)
        except Unavailable as error:
            return explained(error), None

    @contextmanager
    def _others_may_fail(self, trained: TrainedStage) -> Iterator[None]:
        """A checkpoint that somebody else has published may be gone, or lack what a method needs."""
        try:
            yield
        except UserError as error:
            if self._ready(*trained) is None:
                raise
            raise Unavailable(error.what, where=error.where, fix=error.fix) from error

    def single(self, arm: Arm, name: str, checkpoint: str | None = None, draft: str | None = None) -> EvaluationRow:
        """One benchmark on any checkpoint; without one, on the scale's own, trained now if need be."""
        benchmark(name)
        check_options(arm.method, Options(mask_id=0, **method_options(arm)))
        with full_disk_explained(self.workspace.runs):
            companion = checkpoints.load(draft, device=checkpoints.default_device()) if draft is not None else None
            if checkpoint is not None:
                return self.cell(
                    arm, checkpoints.load(checkpoint, device=checkpoints.default_device()), name, companion
                )
            return self.cell(arm, self.load(*arm.trained), name, companion)

    def train(self, chosen: Recipe) -> TrainingRow:
        """The finished checkpoint of a recipe, trained now if need be (its parent's too)."""
        folder = self.workspace.checkpoint(chosen)
        record = checkpoints.finished(folder)
        if record and self._must_redo(chosen.key, f"checkpoint {chosen.name}", folder):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be about it too
            record = None
        if record is None:
            record = self._train_now(chosen, folder)
        shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)  # left by a kill at the very end
        self._renewed.add(chosen.key)
        row = TrainingRow(
            key=chosen.key,
            status="done",
            reason="",
            scale=self.scale.scale,
            stage=chosen.stage,
            block_size=chosen.block_size,
            parameters=record.parameters,
            steps=record.steps,
            tokens=record.tokens,
            seconds=record.seconds,
            loss=record.loss,
            checkpoint=record.weights,
            measures=record.measures,
            provenance=record.provenance,
        )
        if is_first_process() and self.store.rows().get(chosen.key) != row:
            self.store.append(row)
        return row

    def _train_now(self, chosen: Recipe, folder: Path) -> checkpoints.TrainingRecord:
        from marsbench.training.trainer import train

        parents = lineage(self.scale, chosen.stage)[:-1]
        parent = recipe(self.scale, parents[-1], seed=self.seed) if parents else None
        if parent is not None:
            self.train(parent)
        folder.parent.mkdir(parents=True, exist_ok=True)
        terms = " (mask + AR)" if chosen.objective == "mars" and chosen.ar_weight else ""
        title = chosen.stage if chosen.block_size is None else f"{chosen.stage}, B = {chosen.block_size}"
        with self.reporter.bar(f"training {title}") as bar:
            record = train(
                chosen,
                folder,
                self.workspace.checkpoint(parent) if parent else None,
                lambda step, steps, loss, rate: bar.update(
                    step, steps, f"loss {loss:.3f}{terms}, {rate:,.0f} tokens/s"
                ),
                self.reporter.say,
            )
        self.reporter.say(f"trained {title}: loss {record.loss:.3f}{terms} after {record.seconds:.0f} s")
        return record

    def step_cost(self) -> StepCostRow:
        """The cost of a MARS step over an AR step, on the AR SFT checkpoint."""
        parent = recipe(self.scale, "ar_sft", seed=self.seed)
        key = content_hash({"kind": "step_cost", "parent": parent.key, "started": self._trained_at(parent)})
        known = self.existing_row(key, StepCostRow, "the step costs")
        if known is not None:
            return known
        with self.reporter.bar("timing training steps"):
            cost = step_cost(self.scale, self.workspace.checkpoint(parent), self.seed)
        origin = provenance(seed=self.seed)
        row = StepCostRow(key, "done", "", self.scale.scale, cost.seconds, cost.memory, origin)
        self.keep(row)
        return row

    def _trained_at(self, chosen: Recipe) -> str:
        record = checkpoints.finished(self.workspace.checkpoint(chosen))
        return str(record.provenance["started"]) if record else ""

    def existing_row(self, key: str, kind: type[_RowKind], what: str) -> _RowKind | None:
        """The finished row of a key, None where there is none or where the policy says to measure it again."""
        row = self.store.rows().get(key)
        if not isinstance(row, kind) or row.status != "done" or self._must_redo(key, what, self.workspace.row_file):
            return None
        return row

    def load(self, stage: str, block_size: int | None, dtype: torch.dtype = torch.float32) -> Loaded:
        """The checkpoint of a stage, on the device."""
        return checkpoints.load(
            self.checkpoint(stage, block_size), dtype=dtype, device=checkpoints.default_device(), stage=stage
        )

    def checkpoint(self, stage: str, block_size: int | None) -> str:
        """Folder or hub name of a stage's checkpoint: the ready one if there is one, else ours, trained if need be."""
        ready = self._ready(stage, block_size)
        if ready is not None:
            return ready
        chosen = self._recipe(stage, block_size)
        self.train(chosen)
        return str(self.workspace.checkpoint(chosen))

    def _ready(self, stage: str, block_size: int | None) -> str | None:
        """The checkpoint that stands for a stage without training it, None where it is to be trained."""
        return self.scale.ready_checkpoint(*TrainedStage.of(stage, block_size))

    def _recipe(self, stage: str, block_size: int | None) -> Recipe:
        return recipe(self.scale, stage, block_size=block_size or DEFAULT_BLOCK_SIZE, seed=self.seed)

    def _cell_or_reason(
        self, arm: Arm, loaded: Loaded, name: str, draft: Loaded | None, questions: int | None
    ) -> EvaluationRow:
        """One arm on one benchmark, or a row that says why this machine cannot measure it."""
        try:
            return self.cell(arm, loaded, name, draft, questions)
        except Unavailable as error:
            return self._skipped(arm, name, explained(error))

    def _skipped(self, arm: Arm, name: str, reason: str) -> EvaluationRow:
        """The row of a cell without numbers."""
        self.reporter.say(f"{self._title(arm, name)}: skipped ({reason})")
        key = content_hash({"skipped": [arm.name, name, self.scale.scale, reason]})
        identity = arm.name, arm.stage, arm.method, arm.options, name, benchmark(name).headline
        return EvaluationRow(key, "skipped", reason, self.scale.scale, *identity, provenance=provenance(seed=self.seed))

    def cell(
        self, arm: Arm, loaded: Loaded, name: str, draft: Loaded | None = None, questions: int | None = None
    ) -> EvaluationRow:
        """One arm on one benchmark, on so many questions at most; tables that ask the same share what was measured."""
        method = self.method(arm, loaded, draft)
        key = self._cell_key(arm, name, questions, loaded.weights, draft.weights if draft else None)
        row = self.store.rows().get(key)
        log = self.workspace.answers(key)
        if isinstance(row, EvaluationRow) and row.status == "done":
            if not self._must_redo(key, f"{arm.label} on {name}", log):
                return replace(row, arm=arm.name)  # another table's line may have measured it
            for file in (log, *self.workspace.shards(key)):
                file.unlink(missing_ok=True)
        row = self._measure(arm, loaded, method, self.exam(name, questions).shard(*self.shard), key)
        if self.shard == (1, 1):  # one shard's answers are logged, and make a row together with the others'
            self.keep(row)
        return row

    def is_measured(self, arm: Arm, name: str, questions: int | None) -> bool:
        """Whether there is a row of an arm on a benchmark, decoded from the scale's own checkpoints of today."""
        weights, draft = (self._own_weights(trained) for trained in (arm.trained, arm.draft))
        row = self.store.rows().get(self._cell_key(arm, name, questions, weights, draft))
        return row is not None and row.status == "done"

    def _own_weights(self, trained: TrainedStage | None) -> str | None:
        """The hash of the weights of a stage's own checkpoint, None where there is none."""
        record = checkpoints.finished(self.workspace.checkpoint(self._recipe(*trained))) if trained else None
        return record.weights if record else None

    def _cell_key(self, arm: Arm, name: str, questions: int | None, weights: str | None, draft: str | None) -> str:
        """The key of everything that decides a cell's answers and scores."""
        return content_hash(
            {
                "stage": arm.stage,
                "method": arm.method,
                "options": arm.options,
                "benchmark": name,
                "tasks": fingerprint(self.exam(name, questions).tasks),
                "limit": self._limit(questions),
                "max_new_tokens": self.scale.max_new_tokens,
                "batch_size": self.scale.batch_size,
                "weights": weights,
                "draft": draft,
                "engine": source_hash("decoding", "methods", "evaluation", "world"),
            }
        )

    def method(self, arm: Arm, loaded: Loaded, draft: Loaded | None = None) -> Method | OutsideMethod:
        """An arm's method, with its options, fitted to its checkpoint."""
        with self._others_may_fail(arm.trained):
            return fit(arm.method, loaded, draft=draft, untrained_masks=arm.untrained_masks, **method_options(arm))

    def _title(self, arm: Arm, name: str) -> str:
        """What a cell is called on the terminal, with its number in the table."""
        number = self._numbers.get((arm.name, name))
        return f"{arm.label}, {name}" + (f" (cell {number} of {len(self._numbers)})" if number else "")

    def _limit(self, questions: int | None) -> int | None:
        """How many questions a cell of this run asks where its table asks for so many; None = all."""
        limits = [count for count in (self.limit or self.scale.questions, questions) if count is not None]
        return min(limits, default=None)

    def exam(self, name: str, questions: int | None = None) -> Exam:
        """A benchmark's questions that this run asks, so many at most; None = all."""
        limit = self._limit(questions)
        if (name, limit) not in self._exams:
            self._exams[name, limit] = prepare(benchmark(name), self.data_dir).first(limit)
        return self._exams[name, limit]

    def _measure(self, arm: Arm, loaded: Loaded, method: Method | OutsideMethod, exam: Exam, key: str) -> EvaluationRow:
        """Answer and score; the answers of an interrupted run are taken up."""
        origin, started, chosen = provenance(seed=self.seed), time.perf_counter(), exam.benchmark
        log = AnswerLog(self.workspace.answers(key, self.shard), self.workspace.shards(key))
        title = self._title(arm, chosen.name)
        with self.reporter.bar(title) as bar:
            model = EngineModel(
                exam,
                log,
                loaded,
                method,
                threshold=arm.options.get("threshold"),
                max_new_tokens=self.scale.max_new_tokens,
                batch_size=self.scale.batch_size,
                progress=bar.update,
            )
            scored = evaluate(model)
        row = EvaluationRow(
            key=key,
            status="done",
            reason="",
            scale=self.scale.scale,
            arm=arm.name,
            stage=arm.stage,
            method=arm.method,
            options=arm.options,
            benchmark=chosen.name,
            metric=chosen.headline,
            correct=scored.correct,
            others={name: values for name, values in scored.scores.items() if name != chosen.headline},
            emitted=[answer.emitted for answer in scored.answers],
            forwards=[answer.forwards for answer in scored.answers],
            finished=[int(answer.finished) for answer in scored.answers],
            past_stop=[answer.past_stop for answer in scored.answers],
            seconds=round(time.perf_counter() - started, 3),
            max_new_tokens=self.scale.max_new_tokens,
            checkpoint=loaded.weights,
            provenance=origin,
        )
        share = sum(row.correct) / len(row.correct)
        speed = sum(row.emitted) / sum(row.forwards)
        self.reporter.say(f"{title}: {share:.1%} of {len(row.correct)}, {speed:.2f} tokens/forward")
        return row

    def keep(self, row: Row) -> None:
        """Add a row that has just been measured."""
        self._renewed.add(row.key)
        self.store.append(row)

    def _must_redo(self, key: str, what: str, where: Path) -> bool:
        """Whether the policy says to make a result again that is there already."""
        if key in self._renewed or self.existing == "reuse":
            return False
        if self.existing == "fail":
            raise UserError(f"{what} exists already", where=str(where), fix="choose --existing reuse or rerun")
        return True


def explained(error: UserError) -> str:
    """An error as the reason of a cell without numbers."""
    return f"{error.what}{f' ({error.where})' if error.where else ''}; {error.fix}"


def method_options(arm: Arm) -> dict[str, Any]:
    """Those of an arm's options that are the method's; the others go with every request, or name the draft's stage."""
    names = {option.name for option in fields(Options)} - {"draft"}
    return {name: value for name, value in arm.options.items() if name in names}


def content_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@cache
def source_hash(*parts: str) -> str:
    """Hash of the code in some of the package's rooms, or of single files, as in "sweeps/race.py"."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(file for part in parts for file in package.glob(part if part.endswith(".py") else f"{part}/*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
