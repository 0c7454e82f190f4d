"""What several commands share: their options, and the run that most of them start.

    @takes("start", Start, ["scale", "seed"])
    def ask(question: str, start: Start) -> None: ...

gives `ask` those options of `Start` beside its own, and `start` has what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marsbench.errors import UserError
from marsbench.methods import HOW
from marsbench.methods.options import Option, option, options_of
from marsbench.presets import DEFAULT_BLOCK_SIZE, DEFAULT_SCALE, preset

if TYPE_CHECKING:
    import torch

    from marsbench.line import TrainedStage
    from marsbench.presets import Preset
    from marsbench.progress import Reporter
    from marsbench.running.run import Run
    from marsbench.training.checkpoints import Loaded

Command = Callable[..., None]

AskedBenchmark = Annotated[str, typer.Option(help="What was asked: see `marsbench list benchmarks`.")]
GridFile = Annotated[Path | None, typer.Option(help="YAML of contenders and batch sizes [default: the scale's own].")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, laps and batch sizes, as the grid says.")]

Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes at a time [default: one per GPU; without GPUs, one per core for the world]."),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="auto|ADDRESS", help="Work on a Ray cluster: the one of this machine, or at an address."
    ),
]
OwnPromptFile = Annotated[
    Path | None,
    typer.Option(
        help='JSON Lines: {"prompt": "..."} or {"messages": [...]} a line; without it, the model asks itself.'
    ),
]
PromptColumn = Annotated[str | None, typer.Option(help="Column with the prompts, as text or turns, such as question.")]

# The options of `Start` that make a run and say what it trains on; the others say which checkpoint decodes.
OF_RUN = (
    "scale", "seed", "benchmarks", "limit", "data_dir", "train_all", "checkpoint", "output", "base", "chat_data",
    "max_steps", "compiled",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Which run a command starts, which checkpoint it decodes with, and what it trains on, as it was typed."""

    scale: str = option("Model, data and budgets: see `marsbench list scales`.", DEFAULT_SCALE)
    seed: int = option("Seed of initial weights and training data.", 0, least=0, most=2**32 - 1)
    benchmarks: str | None = option("Instead of the scale's own: names, `mini` or `real`, with commas between.")
    limit: int | None = option("Only the first N questions of each benchmark.", least=1)
    data_dir: Path | None = option("Local copy of the benchmark data.", shown={"envvar": "MARSBENCH_DATA"})
    train_all: bool = option(
        "Train every stage, even where a published checkpoint or a shipped base exists.", False,
        flags=("--train", "--from-scratch"),
    )  # fmt: skip
    checkpoint: tuple[str, ...] = option(
        "STAGE=FOLDER_OR_HUB_NAME: use this checkpoint for a stage (mars-b8: for B = 8); repeatable.", ()
    )
    output: Path = option("Folder for runs/, results/ and reports/.", Path("."))

    whose: str | None = option(
        "Checkpoint folder or hub name; without it, the scale's own --stage.", flags=("--checkpoint",)
    )
    adapter: str | None = option(
        "Gated adapter to act on the checkpoint's masks; without --checkpoint, on the one that it was trained on.",
        shown={"metavar": "DIR"},
    )
    stage: str | None = option(
        "Stage of the scale's own checkpoint, trained if missing [default: mars; at 135m the shipped adapter]."
    )
    block_size: int = option("B that the checkpoint was, or is to be, trained with.", DEFAULT_BLOCK_SIZE, least=2)

    base: str | None = option("Pretrained checkpoint to start from, folder or hub name, at a scale that has one.")
    chat_data: str | None = option("Conversations, JSON Lines file or hub data set with `messages`, at such a scale.")
    max_steps: int | None = option("Steps of every stage, in place of the scale's budget.", least=1)
    compiled: bool | None = field(default=None, metadata={"option": HOW["compiled"]})

    @property
    def own_stage(self) -> str:
        """The stage that a user names; by default the one that decodes at this scale."""
        return self.stage or preset(self.scale).stage

    @property
    def own(self) -> TrainedStage:
        """The scale's own checkpoint that decodes: of that stage, at the B that a user names or the scale's."""
        from marsbench.line import TrainedStage

        named = self.stage or self.block_size != DEFAULT_BLOCK_SIZE
        return TrainedStage.of(self.own_stage, self.block_size if named else preset(self.scale).block_size)

    @property
    def trained_stage(self) -> str | None:
        """The stage that decodes, None where a checkpoint or adapter was named: nothing is known of it yet."""
        return None if self.whose or self.adapter else self.own_stage

    def loaded(self, run: Run, dtype: str = "float32") -> Loaded:
        """The checkpoint that decodes, trained now if it is the scale's own and missing."""
        if named := self.whose or self.adapter:
            return load_named(named, dtype, run.reporter, adapter=self.adapter)
        from marsbench.running.checkpoints import Checkpoints

        return Checkpoints(run).load(self.own, dtype_of(dtype))

    def preset(self) -> Preset:
        """The scale with what a user names: checkpoints of its stages, as in "mars-b8=FOLDER", or what it trains on."""
        from marsbench.training.stages import stage

        chosen = preset(self.scale).with_checkpoints(self.checkpoint or [], train_all=self.train_all)
        for entry in self.checkpoint or []:
            named, _, place = entry.partition("=")
            plain, _, size = named.rpartition("-b")
            stage(plain if plain and size.isdecimal() else named)
            if place.startswith((".", "/", "~")) and not Path(place).is_dir():  # what is no path is a name on the hub
                raise UserError(
                    "there is no such checkpoint", where=place, fix=f"check the path behind --checkpoint {named}="
                )
        return chosen.adapted(base=self.base, chat_data=self.chat_data, steps=self.max_steps)

    def run(self) -> Run:
        """The run; what is none of the scale's own benchmarks in full at seed 0 gets folders of its own."""
        chosen = self.preset()
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(
                "there is no such folder of benchmark data", where=str(self.data_dir),
                fix="correct --data-dir or MARSBENCH_DATA, or leave both out to load it from the hub",
            )  # fmt: skip
        from marsbench.evaluation.benchmarks import benchmarks
        from marsbench.rows.workspace import Workspace

        names = [name.strip() for name in self.benchmarks.split(",")] if self.benchmarks else []
        asked, limit, seed = benchmarks(names), self.limit, self.seed
        variant = "-".join([*names, *([f"limit{limit}"] if limit else []), *([f"seed{seed}"] if seed else [])])
        workspace = Workspace(self.output, self.scale, variant)
        workspace.check_writable()
        from marsbench.running.run import Run  # heavy

        return Run(chosen, workspace, seed, asked, limit, data_dir=self.data_dir, compiled=self.compiled)


def takes(
    word: str, of: type, names: Iterable[str] = (), options: Mapping[str, Option] | None = None,
    panel: Callable[[str], str | None] = lambda name: None,
) -> Callable[[Command], Command]:  # fmt: skip
    """Give a command fields of a dataclass as options; it gets an object with what was typed as its argument `word`.

    Args:
        word: the command's parameter.
        of: the dataclass.
        names: which of its options; by default all. Those that the command has itself are left out.
        options: what is said of them, in place of what their fields say.
        panel: where `--help` shows an option.
    """
    known, offered = options_of(of) if options is None else options, []
    for name in names or known:
        kind, default = known[name].kind, getattr(of, name)
        if isinstance(default, tuple):
            kind, default = list[str], None
        annotation: Any = Annotated[kind if default is not None else kind | None, typed(name, known[name], panel(name))]
        offered.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def decorated(command: Command) -> Command:
        own = {each.name: each for each in signature(command, eval_str=True).parameters.values() if each.name != word}
        more = [each for each in offered if each.name not in own]

        @wraps(command)
        def called(**given: Any) -> None:
            values = {each.name: given.pop(each.name) for each in more}
            lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            command(**given, **{word: of(**{name: v for name, v in (values | lists).items() if v is not None})})

        called.__signature__ = Signature([*own.values(), *more])  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in (*own.values(), *more)}
        return called

    return decorated


def typed(name: str, option: Option, panel: str | None = None) -> Any:
    """An option as typer takes it."""
    word = name.replace("_", "-")
    return typer.Option(
        *(option.flags or [f"--{word}"]), min=option.least, max=option.most, help=option.help, rich_help_panel=panel,
        **option.shown,
    )  # fmt: skip


def starts(*names: str) -> Callable[[Command], Command]:
    """Give a command some of the options of `Start`."""
    return takes("start", Start, names)


_OF_START = options_of(Start)
DataDir = Annotated[Path | None, typed("data_dir", _OF_START["data_dir"])]
Adapter = Annotated[str | None, typed("adapter", _OF_START["adapter"])]
Pack = Annotated[bool, typed("pack", HOW["pack"])]


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on the terminal, the names in its first column whole."""
    from rich.console import Console

    from marsbench.progress import terminal_table

    Console().print(terminal_table(title, heads, rows, whole_names=True))


def use_packing(pack: bool) -> None:
    """Have weights packed for decoding where that is faster, or not, by this process and those that it starts."""
    from marsbench.forward.native import use_torch

    if not pack:
        use_torch()


def load_named(checkpoint: str, dtype: str, reporter: Reporter, **how: Any) -> Loaded:
    """A user's checkpoint, a folder or a name on the hub, to decode with on the best device there is."""
    from marsbench.answering import load_aloud
    from marsbench.training.checkpoints import default_device

    return load_aloud(checkpoint, reporter, dtype=dtype_of(dtype), device=default_device(), **how)


def dtype_of(name: str) -> torch.dtype:
    HOW["dtype"].check("dtype", name)
    import torch

    return getattr(torch, name)  # type: ignore[no-any-return]
