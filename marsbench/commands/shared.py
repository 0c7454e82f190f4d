"""What several commands share: their options, and the run that most of them start.

    @starts("scale", "seed")
    def ask(question: str, start: Start) -> None: ...

gives `ask` those options of `Start` beside its own, and hands over in `start` what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from marsbench.decoding.generation import DTYPES
from marsbench.errors import UserError, unknown_name
from marsbench.methods import Option
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
DataDir = Annotated[Path | None, typer.Option(envvar="MARSBENCH_DATA", help="Local copy of the benchmark data.")]

Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="Gated adapter to act on the checkpoint's masks; without --checkpoint, on the one that it was trained on.",
    ),
]
GridFile = Annotated[
    Path | None, typer.Option(help="YAML file of contenders and batch sizes; without it, the scale's own.")
]
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
GpusPerTraining = Annotated[
    int, typer.Option(min=1, help="GPUs of one machine that each training of a real model gets, through accelerate.")
]
PromptFile = Annotated[
    Path, typer.Option(help='JSON Lines: {"prompt": "..."} or {"messages": [...]} a line, or see --column.')
]
OwnPromptFile = Annotated[
    Path | None,
    typer.Option(
        help='JSON Lines: {"prompt": "..."} or {"messages": [...]} a line; without it, the model asks itself.'
    ),
]
PromptColumn = Annotated[
    str | None, typer.Option(help="Column that holds the prompts, as text or turns, such as `question`.")
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Run each step as one graph: the same tokens (in 16 bits, up to rounding), sooner. The default on CUDA, "
        "where it is recorded, in less than a second for each shape. On a CPU it is compiled: ten seconds for each "
        "shape (rows and lengths, in steps of up to a factor of two), kept on disk, so it pays on long runs.",
        show_default=False,
    ),
]
Pack = Annotated[
    bool,
    typer.Option(
        "--pack/--no-pack",
        help="On a CPU, copy large weights in the order in which they are read: as much memory again, and sooner.",
    ),
]
UntrainedMasks = Annotated[
    bool, typer.Option("--untrained-masks", help="Use masks even if the checkpoint never saw any.")
]

# The options of `Start` that make a run and say what it trains on; the others say which checkpoint decodes.
OF_RUN = (
    "scale", "seed", "benchmarks", "limit", "shard", "existing", "data_dir", "train_all", "checkpoint", "output",
    "base", "chat_data", "max_steps", "compiled",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Which run a command starts, which checkpoint it decodes with, and what it trains on, as it was typed."""

    scale: Annotated[str, typer.Option(help="Model, data and budgets: see `marsbench list scales`.")] = DEFAULT_SCALE
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of initial weights and training data.")] = 0
    benchmarks: Annotated[
        str | None, typer.Option(help="Instead of the scale's own: names, `mini` or `real`, with commas between.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N questions of each benchmark.")] = None
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Answer only the Ith of N parts; without it, their answers are put together."),
    ] = None
    existing: Annotated[str, typer.Option(help="What is there already: reuse it, rerun it, or fail.")] = "reuse"
    data_dir: DataDir = None
    train_all: Annotated[
        bool,
        typer.Option(
            "--train",
            "--from-scratch",
            help="Train every stage, even where a published checkpoint or a shipped base exists.",
        ),
    ] = False
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="STAGE=FOLDER_OR_HUB_NAME: use this checkpoint for a stage (mars-b8: for B = 8); repeatable."
        ),
    ] = None
    output: Annotated[Path, typer.Option(help="Folder for runs/, results/ and reports/.")] = Path(".")

    whose: Annotated[
        str | None,
        typer.Option("--checkpoint", help="Checkpoint folder or hub name; without it, the scale's own --stage."),
    ] = None
    adapter: Adapter = None
    stage: Annotated[
        str | None,
        typer.Option(
            help="Stage of the scale's own checkpoint, trained if missing "
            "[default: mars; at 135m the shipped adapter].",
            show_default=False,
        ),
    ] = None
    block_size: Annotated[int, typer.Option(min=2, help="B that the checkpoint was, or is to be, trained with.")] = (
        DEFAULT_BLOCK_SIZE
    )

    base: Annotated[
        str | None,
        typer.Option(help="Pretrained checkpoint to start from, folder or hub name, at a scale that has one."),
    ] = None
    chat_data: Annotated[
        str | None,
        typer.Option(help="Conversations, JSON Lines file or hub data set with `messages`, at such a scale."),
    ] = None
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of every stage, in place of the scale's budget.")
    ] = None
    compiled: Compile = None

    @property
    def own_stage(self) -> str:
        """The stage that a user names, or the one that decodes at this scale where nobody does."""
        return self.stage or preset(self.scale).stage

    @property
    def own(self) -> TrainedStage:
        """The scale's own checkpoint that decodes: of that stage, at the B that a user names or the scale's."""
        from marsbench.line import TrainedStage

        named = self.stage or self.block_size != DEFAULT_BLOCK_SIZE
        return TrainedStage.of(self.own_stage, self.block_size if named else preset(self.scale).block_size)

    @property
    def trained_stage(self) -> str | None:
        """The same, None where somebody's checkpoint or adapter decodes, of which nothing is known yet."""
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
        chosen, (first, _, last) = self.preset(), (self.shard or "1/1").partition("/")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UserError(f"--shard {self.shard} is no part of a whole", fix="give it as I/N, from 1/N to N/N")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(
                "there is no such folder of benchmark data", where=str(self.data_dir),
                fix="correct --data-dir or MARSBENCH_DATA, or leave both out to load it from the hub",
            )  # fmt: skip
        from marsbench.evaluation.benchmarks import benchmarks
        from marsbench.rows.store import existing_policy
        from marsbench.rows.workspace import Workspace

        policy = existing_policy(self.existing)
        names = [name.strip() for name in self.benchmarks.split(",")] if self.benchmarks else []
        asked, limit, seed = benchmarks(names), self.limit, self.seed
        variant = "-".join([*names, *([f"limit{limit}"] if limit else []), *([f"seed{seed}"] if seed else [])])
        workspace = Workspace(self.output, self.scale, variant)
        workspace.check_writable()
        from marsbench.running.run import Run  # heavy

        part = int(first), int(last)
        return Run(chosen, workspace, policy, seed, asked, limit, part, self.data_dir, compiled=self.compiled)


def starts(*names: str) -> Callable[[Command], Command]:
    """Give a command some of the options of `Start`."""
    return handing("start", options_from(Start, names), lambda typed: Start(**typed))


def options_from(of: type, names: Iterable[str], panel: str | None = None) -> list[Parameter]:
    """Fields of a dataclass that typer can take as they are."""
    hints, found = get_type_hints(of, include_extras=True), []
    for name in names:
        (option,) = map(copy, hints[name].__metadata__)
        option.rich_help_panel = panel
        kind = Annotated[hints[name].__origin__, option]  # type: ignore[valid-type]
        found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(of, name, None), annotation=kind))
    return found


def option_of(
    name: str, known: Option, default: Any, *, flags: Sequence[str] = (), help: str = "", panel: str | None = None
) -> Parameter:
    """An `Option` of a dataclass as typer takes it, by default called after its field."""
    hint: Any = list[str] if known.kind is tuple else known.kind
    default = None if known.kind is tuple else default
    word = name.replace("_", "-")
    switch = f"--{word}/--no-{word}" if known.kind is bool and default is None else f"--{word}"
    option = typer.Option(
        *(flags or [switch]), min=known.least, max=known.most, help=help or known.help,
        rich_help_panel=panel,
    )  # fmt: skip
    whole = hint | None if default is None else hint
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[whole, option])


def handing(
    name: str, options: Iterable[Parameter], made_of: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """Give a command more options, but for those that it has itself; what was typed is handed to it as one thing."""

    def decorated(command: Command) -> Command:
        own = {
            field.name: field for field in signature(command, eval_str=True).parameters.values() if field.name != name
        }
        more = [field for field in options if field.name not in own]

        @wraps(command)
        def typed(**given: Any) -> None:
            others = {field.name: given.pop(field.name) for field in more}
            command(**given, **{name: made_of(others)})

        parameters = [*own.values(), *more]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typed.__annotations__ = {field.name: field.annotation for field in parameters}
        return typed

    return decorated


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on the terminal, the names in its first column whole."""
    from rich.console import Console

    from marsbench.progress import terminal_table

    Console().print(terminal_table(title, heads, rows, whole_names=True))


def use_packing(pack: bool) -> None:
    """Have weights packed for decoding, or not, by this process and those that it starts."""
    from marsbench.forward.linear import set_packing

    set_packing(pack)


def load_named(checkpoint: str, dtype: str, reporter: Reporter, **how: Any) -> Loaded:
    """A user's checkpoint, a folder or a name on the hub, to decode with on the best device there is."""
    from marsbench.methods.settings import load_aloud
    from marsbench.training.checkpoints import default_device

    return load_aloud(checkpoint, reporter, dtype=dtype_of(dtype), device=default_device(), **how)


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise unknown_name("dtype", name, list(DTYPES))
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def check_cluster(cluster: str | None, **given: object) -> None:
    """Refuse, before anything heavy, a cluster that could not be used, and options that it would leave unheard.

    `given` is what goes with no cluster, by its option; None or False where it was not given.
    """
    if cluster is None:
        return
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UserError("--cluster needs Ray, which is not installed", fix="pip install 'marsbench[cluster]'")
    for option, value in given.items():
        if value:
            raise UserError(
                f"--{option} and --cluster do not go together",
                fix=f"leave --{option} out: the cluster shares the work out, and makes what is missing",
            )
