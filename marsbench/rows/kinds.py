"""The rows that measurements are kept in: one typed class per kind, every key documented here and nowhere else.

Rows are JSON Lines. `kind` names the class, `schema` its version; a reader accepts every version it knows and fills in
what an older one lacked. Raw per-question values are kept, so that every statistic in a report can be recomputed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Discriminator, Tag

from marsbench.methods import METHODS
from marsbench.statistics.intervals import Answers, Estimate, accuracy, mean_of_benchmarks, ratio_of_totals
from marsbench.training.records import weights_with_adapter
from marsbench.training.stages import STAGES

SCHEMA = 1
Status = Literal["done", "skipped", "failed", "timeout"]

_KINDS: "dict[str, type[Row]]" = {}  # by what a line calls them


@dataclass(frozen=True)
class Row:
    kind: ClassVar[str]
    key: str  # hash of everything that can change the numbers
    status: Status
    reason: str  # why there are no numbers; empty when done
    scale: str  # whose models they are of; of checks, whose shape the models have that are timed
    checkpoint: str = field(default="", kw_only=True)  # SHA-256 of the weights; empty where no single one is behind it
    provenance: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _KINDS[cls.kind] = cls

    @property
    def id(self) -> tuple[str, str]:
        """What a store tells rows apart by: one recipe may have been trained twice."""
        return self.key, self.checkpoint


@dataclass(frozen=True)
class _OfLine(Row):
    arm: str  # what the page that stored the row calls the line; pages find rows by what they are (`Query`)
    stage: str
    method: str
    options: Mapping[str, Any]  # the method's options, and `threshold`


@dataclass(frozen=True)
class EvaluationRow(_OfLine):
    """One line on one benchmark. The lists have one entry per question, in the benchmark's order."""

    kind: ClassVar[str] = "evaluation"
    benchmark: str
    metric: str  # name of the score that `correct` is, as the benchmark registry has it
    correct: list[float] = field(default_factory=list)  # 0 or 1
    others: Mapping[str, list[Any]] = field(default_factory=dict)  # the benchmark's other scores, alike
    emitted: list[int] = field(default_factory=list)  # tokens up to EOS, an emitted EOS counted once
    forwards: list[int] = field(default_factory=list)  # forward passes of the model, the prompt's included
    finished: list[int] = field(default_factory=list)  # 1 = ended with EOS, 0 = cut at the token limit
    seconds: float = 0.0  # generation and scoring together; a rough cost, not a benchmark
    max_new_tokens: int = 0
    prompt_cut: list[int] = field(default_factory=list)  # tokens of the prompt that the context had no room for
    dtype: str = "float32"  # of weights and caches
    digests: list[str] = field(default_factory=list)  # of each answer's tokens: alike = the very same ones; or empty

    @property
    def answers(self) -> Answers:
        return Answers(self.correct, self.emitted, self.forwards)

    @property
    def accuracy(self) -> Estimate:
        return accuracy(self.correct)

    @property
    def tokens_per_forward(self) -> Estimate:
        return ratio_of_totals(self.emitted, self.forwards)


@dataclass(frozen=True)
class TrainingRow(Row):
    kind: ClassVar[str] = "training"
    stage: str
    block_size: int | None
    parameters: int  # trained parameters of the model
    steps: int
    tokens: int  # tokens of the sequences seen, padding and noisy copies not counted
    seconds: float  # wall time of training, interruptions not counted
    loss: float  # mean over the last logging interval
    measures: Mapping[str, float] = field(default_factory=dict)  # such as the accuracy of each Medusa head
    parent: str = ""  # SHA-256 of the trained weights that it starts from; of an adapter, of its model

    @property
    def decoded(self) -> str:
        """The `checkpoint` of what is decoded with it: an adapter decodes together with its parent."""
        gated = self.parent and self.stage in STAGES and STAGES[self.stage].objective == "gated"
        return weights_with_adapter(self.parent, self.checkpoint) if gated else self.checkpoint


@dataclass(frozen=True)
class StepCostRow(Row):
    """What one training step costs: the objectives timed in turn on the same batches."""

    kind: ClassVar[str] = "step_cost"
    seconds: Mapping[str, list[float]]  # objective -> seconds of each repeat, in the same batch order for all
    memory: Mapping[str, list[int]] = field(default_factory=dict)  # objective -> bytes that a step must hold, alike


@dataclass(frozen=True)
class SweepRow(Row):
    """One cell of a sweep: a contender at a batch size, raced against the baselines. Lists are "per prompt" in turn."""

    kind: ClassVar[str] = "sweep"
    contender: str  # its name in the grid
    stage: str
    draft: str  # stage of the draft model, empty where there is none
    method: str
    options: Mapping[str, Any]  # the method's options, and `threshold`
    batch_size: int
    benchmarks: list[str]
    prompts: int
    max_new_tokens: int
    seconds: list[float] = field(default_factory=list)  # of each timed lap over all prompts
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> `seconds`, same laps; `emitted`
    correct: list[float] = field(default_factory=list)  # per prompt, 0 or 1, of the generations that were timed
    emitted: list[int] = field(default_factory=list)  # per prompt, tokens up to EOS, an emitted EOS counted once
    row_forwards: list[int] = field(default_factory=list)  # per prompt, forward passes of the model
    finished: list[int] = field(default_factory=list)  # per prompt, 1 = ended with EOS
    first_token: list[float] = field(default_factory=list)  # per prompt, seconds from its batch's start
    last_token: list[float] = field(default_factory=list)  # alike
    forwards: int = 0  # forward passes of the model over windows, a batch counted once; 0 = not known
    positions: int = 0  # entries in those windows, over all rows, fillers left out
    prompt_forwards: int = 0  # passes over prompts, a batch counted once
    prompt_positions: int = 0  # tokens of the prompts, as they were forwarded
    cache_bytes: int = 0  # the most that KV caches held, a draft model's included
    peak_bytes: int | None = None  # the most that all tensors held on a GPU, other contenders included; or not known
    same_as: Mapping[str, int] = field(default_factory=dict)  # baseline -> prompts with its very tokens
    samples: str = ""  # SHA-256 of the log of what was generated
    dtype: str = ""
    prompt_cut: list[int] = field(default_factory=list)  # per prompt, tokens that the context had no room for; or empty
    others_cores: list[float] = field(default_factory=list)  # of each timed lap: what others used; empty = unknown
    compiled: bool = False  # its steps as graphs, or operation by operation
    graphs: int = 0  # shapes of a step that were compiled so far, at smaller batch sizes and other thresholds too
    compile_seconds: float = 0.0  # what that took, or reading it from disk
    profile: Mapping[str, float] = field(default_factory=dict)  # part of an eager step -> seconds, in a run of its own
    grid: str = "speedup"  # the page whose grid it is a cell of

    @property
    def is_lossless(self) -> bool:
        return METHODS[self.method].lossless

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter answers for the masks, and the model is one that MARS has not trained."""
        return STAGES[self.stage].objective == "gated"

    @property
    def by_benchmark(self) -> dict[str, list[float]]:
        return {name: self.correct[place :: len(self.benchmarks)] for place, name in enumerate(self.benchmarks)}

    @property
    def accuracy(self) -> Estimate:
        return mean_of_benchmarks([accuracy(correct) for correct in self.by_benchmark.values()])

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over forward passes of the model, all prompts together."""
        return sum(self.emitted) / sum(self.row_forwards)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.emitted) / median(self.seconds)

    @property
    def lap_speeds(self) -> list[float]:
        """Tokens per second of each lap over those of `ar`; none where `ar` has no numbers."""
        if (ar := self.baselines.get("ar")) is None:
            return []
        laps = zip(ar["seconds"], self.seconds, strict=True)
        return [theirs * sum(self.emitted) / (mine * ar["emitted"]) for theirs, mine in laps]

    @property
    def ms_per_forward(self) -> float:
        """Milliseconds of a lap over its forward passes, drafting and the prompts' passes included; 0 = not known."""
        return 1000 * median(self.seconds) / (self.forwards + self.prompt_forwards) if self.forwards else 0.0

    @property
    def positions_per_forward(self) -> float:
        """Entries of a window, over all rows of the batch; 0 = not known."""
        return self.positions / self.forwards if self.forwards else 0.0


@dataclass(frozen=True)
class StepTimeRow(Row):
    kind: ClassVar[str] = "step_time"
    stage: str
    context: int  # tokens before the window when timing starts
    rows: list[int]  # per shape: sequences in the batch
    window: list[int]  # per shape: entries of each sequence
    seconds: list[list[float]]  # per shape and repeat: one step of the loop
    others_cores: list[float] = field(default_factory=list)  # of each repeat: what others used; empty = unknown
    dtype: str = "float32"  # of weights and caches
    grid: str = "speedup"  # the page whose grid it was timed for


@dataclass(frozen=True)
class GenerationRow(_OfLine):
    kind: ClassVar[str] = "generation"
    question: str
    texts: list[str] = field(default_factory=list)  # what each token before EOS adds to the text
    settled_by: list[int] = field(default_factory=list)  # which forward settled each token, from 1; an EOS comes last
    forwards: int = 0  # forward passes of the model, the prompt's included
    finish: str = ""  # eos or length
    max_new_tokens: int = 0


@dataclass(frozen=True)
class BreakRow(_OfLine):
    """Where a line's answers first differ from those at one token per forward pass. Lists: one entry per question."""

    kind: ClassVar[str] = "break"
    benchmark: str
    drafts: Mapping[str, list[int]] = field(default_factory=dict)  # kind of token -> those that the threshold accepted
    changed: list[str] = field(default_factory=list)  # kind of the first token that differs; empty = answers alike
    near: list[str] = field(default_factory=list)  # where nearby the other answer has what stands there; empty = alike


@dataclass(frozen=True)
class ServingRow(Row):
    """A lap of a server: one policy under one load. Only what requests came to together is kept: there are thousands.

    Times are in seconds and count from when a request was due. A list of times has those at the 50th, 90th and 99th
    percentile of the requests that were answered; it is empty where none was.
    """

    kind: ClassVar[str] = "serving"
    stage: str
    policy: str  # name of the policy: how requests ask to be decoded, and whether the server adapts
    # together = a fixed number in flight, engine = that without a server, steady = Poisson, step = Poisson, up and down
    shape: str
    load: float  # requests in flight; of Poisson ones, per second over what `ar` carries, of a step in its middle third
    repeat: int
    rows: int  # requests that the server decodes together
    queue: int  # requests that may wait
    seconds: float  # over which requests came, where they came by themselves
    max_new_tokens: int
    target_first_token: float = 0.0  # seconds within which a first token is good
    target_per_token: float = 0.0  # seconds per token that are good
    requests: int = 0  # that were sent
    answered: int = 0  # of them, whole; the others were turned away or broken off
    good: int = 0  # of the answers, those within both targets
    took: float = 0.0  # from the first that was due to the last token
    waited: float = 0.0  # of all answers, each to its last token, one added to the other
    emitted: int = 0  # tokens of all answers, each up to its EOS, which counts once
    forwards: int = 0  # forward passes that each took part in, one added to the other
    tau: float = 1.0  # mean over answers of the lowest that each was decoded with; 1 = none, lossless
    right: int | None = None  # answers that are right; None where they were not scored
    first_token: list[float] = field(default_factory=list)  # until it came
    per_token: list[float] = field(default_factory=list)  # per token after the first, of answers that have more
    whole: list[float] = field(default_factory=list)  # until the last token
    lag: list[float] = field(default_factory=list)  # by how much the load generator sent requests late
    answers: list[str] = field(default_factory=list)  # by question: hash of the texts that it was answered by
    others_cores: list[float] = field(default_factory=list)  # what neither server nor clients used; empty = unknown
    threads: int = 0  # of the engine, with HTTP as without; 0 = not said


@dataclass(frozen=True)
class MethodStepRow(Row):
    """What a step of a method costs at a batch size, on a model of a scale's shape with random weights."""

    kind: ClassVar[str] = "method_step"
    method: str
    options: Mapping[str, Any]  # the method's options, and `threshold`
    device: str
    batch_size: int
    captured: bool  # as a CUDA graph, or operation by operation
    context: int  # tokens of each prompt
    steps: int  # timed, prompts' passes left out
    seconds: float  # of a step, the median
    weight_bytes: int
    read_per_second: float  # bytes that reading a large tensor moves
    dtype: str = "bfloat16"
    tokens_per_second: float = 0.0  # of all rows; with acceptance carried over, what a trained model would make


@dataclass(frozen=True)
class CheckRow(Row):
    kind: ClassVar[str] = "check"
    check: str  # its name
    device: str
    quick: bool
    holds: bool | None = None  # None where it only measures
    facts: Mapping[str, Any] = field(default_factory=dict)  # numbers by name, units in names
    seconds: float = 0.0  # that it took


def any_measured(rows: Iterable[Row]) -> bool:
    """Whether rows hold any number that was measured on a checkpoint, not only how checkpoints were trained."""
    return any(row.status == "done" and not isinstance(row, TrainingRow) for row in rows)


def to_json(row: Row) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": row.kind, **asdict(row)}


def _kind_of(record: Any) -> str | None:
    return str(record.get("kind")) if isinstance(record, dict) and record.get("schema") == SCHEMA else None


# A row of any kind, as pydantic reads it from its line.
AnyRow: Any = Annotated[
    Union[tuple(Annotated[kind, Tag(name)] for name, kind in _KINDS.items())],  # noqa: UP007
    Discriminator(_kind_of, custom_error_type="row", custom_error_message="unknown row kind or schema"),
]
