"""A run: where its rows go, which questions it asks, and which results are there already."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch

from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark
from marsbench.evaluation.local_data import Unavailable
from marsbench.forward.fastest import reads_bf16
from marsbench.keys import content_hash
from marsbench.presets import Preset
from marsbench.progress import Reporter
from marsbench.provenance import provenance
from marsbench.rows.kinds import Row
from marsbench.rows.workspace import RowFile, Workspace
from marsbench.running.plans import TablePlan

if TYPE_CHECKING:  # who trains, or serves what is trained, needs none of the scoring packages
    from marsbench.evaluation.harness import Exam

Existing = Literal["reuse", "rerun", "fail"]  # what to do about a finished result of an earlier command
_RowKind = TypeVar("_RowKind", bound=Row)


@dataclass
class Run:
    scale: Preset
    workspace: Workspace
    seed: int = 0
    benchmarks: Sequence[str] = ()  # none = the preset's
    limit: int | None = None  # questions per benchmark; None = the preset's
    shard: tuple[int, int] = (1, 1)  # (i, n): only the ith of n parts of the questions
    data_dir: Path | None = None
    max_new_tokens: int | None = None  # of every answer; None = each benchmark's own limit
    gpus_per_training: int = 1
    prefill_positions: int = PREFILL_POSITIONS  # of prompts in one forward; changes no number
    compiled: bool | None = None  # steps as graphs, where they can be; None = where they are recorded
    reporter: Reporter = field(default_factory=Reporter)
    existing: Existing = "reuse"
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    failures: Mapping[str, str] = field(default_factory=dict)  # id of what another task makes -> why it failed

    def __post_init__(self) -> None:
        self.workspace.check_writable()
        self.row_file = RowFile(self.workspace.row_file)
        self._exams: dict[tuple[str, int | None], Exam] = {}

    # ---- what it asks ----

    def benchmarks_of(self, plan: TablePlan) -> list[str]:
        names = plan.of(self.benchmarks or self.scale.benchmarks)
        if not names:
            fix = f"choose among {', '.join(plan.benchmarks)}, or what the world has for them (mini_..., hard_...)"
            raise UserError(f"{plan.name} asks none of {', '.join(self.benchmarks)}", fix=fix)
        return names

    def questions(self, wanted: int | None) -> int | None:
        """How many questions a cell of this run asks where its table asks for so many; None = all."""
        limits = [count for count in (self.limit or self.scale.questions, wanted) if count is not None]
        return min(limits, default=None)

    def exam(self, name: str, questions: int | None = None) -> "Exam":
        from marsbench.evaluation.harness import prepare

        limit = self.questions(questions)
        if (name, limit) not in self._exams:
            self._exams[name, limit] = prepare(benchmark(name), self.data_dir).first(limit).shard(*self.shard)
        return self._exams[name, limit]

    def cannot_ask(self, name: str, questions: int | None = None) -> str:
        try:
            self.exam(name, questions)
        except Unavailable as error:
            return error.reason
        return ""

    def computes_in(self, dtype: str) -> bool:
        """Whether lines of this type of weights are measured here: 16 bits where the machine computes in them."""
        return dtype == "float32" or torch.cuda.is_available() or reads_bf16()

    def answer_limit(self, name: str) -> int:
        return self.max_new_tokens or benchmark(name).answer_limit(self.scale.max_new_tokens)

    # ---- what is there already ----

    @property
    def is_whole(self) -> bool:
        return self.shard == (1, 1)

    def answer_logs(self, key: str) -> list[Path]:
        """Where this run logs the answers of a cell, then, if it is whole, where its parts have logged theirs."""
        if not self.is_whole:
            return [self.workspace.answers("{}.{}-of-{}".format(key, *self.shard))]
        whole = self.workspace.answers(key)
        return [whole, *sorted(whole.parent.glob(f"{key}.*-of-*.jsonl"))]

    def existing_row(self, key: str, kind: type[_RowKind]) -> _RowKind | None:
        row = self.row_file.rows().get(key)
        is_done = row is not None and row.status == "done" and self.counts(row.provenance, self.workspace.row_file)
        return row if is_done and isinstance(row, kind) else None

    def counts(self, provenance: Mapping[str, Any], where: Path) -> bool:
        """Whether a finished result is used as it is; `UserError` if the command is to fail because there is one."""
        is_ours = self.existing == "reuse" or provenance.get("started", "") >= self.began
        if not is_ours and self.existing == "fail":
            raise UserError("there is a result already", where=str(where), fix="choose --existing reuse or rerun")
        return is_ours


def made_once(
    run: Run, kind: type[_RowKind], content: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]
) -> _RowKind:
    """The finished row of what depends on this `content`, or one of the fields and provenance that `make` gives now."""
    key = content_hash(content)
    if (row := run.existing_row(key, kind)) is None:
        origin, made = provenance(seed=run.seed), dict(make())
        made["provenance"] = {**origin, **made.get("provenance", {})}
        row = cast("Callable[..., _RowKind]", kind)(key=key, status="done", reason="", scale=run.scale.scale, **made)
        run.row_file.append(row)
    return row
