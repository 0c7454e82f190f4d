"""What several commands share: their options, and the run that most of them start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marsbench.errors import UserError, unknown_name
from marsbench.methods.options import Option

if TYPE_CHECKING:
    import torch

    from marsbench.presets import Preset
    from marsbench.running.run import Run

Scale = Annotated[str, typer.Option(help="Model, data and budgets: see `marsbench list scales`.")]
Output = Annotated[Path, typer.Option(help="Folder for runs/, results/ and reports/.")]
ExistingPolicy = Annotated[str, typer.Option(help="What is there already: reuse it, rerun it, or fail.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of initial weights and training data.")]

AskedBenchmark = Annotated[str, typer.Option(help="What was asked: see `marsbench list benchmarks`.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N questions of each benchmark.")]
Shard = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Answer only the Ith of N parts; without it, their answers are put together."),
]
DataDir = Annotated[Path | None, typer.Option(envvar="MARSBENCH_DATA", help="Local copy of the benchmark data.")]

Checkpoint = Annotated[
    str | None, typer.Option(help="Checkpoint folder or hub name; without it, the scale's own --stage.")
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="Gated adapter to act on the checkpoint's masks; without --checkpoint, on the one that it was trained on.",
    ),
]
OwnStage = Annotated[
    str | None,
    typer.Option(
        help="Stage of the scale's own checkpoint, trained if missing [default: mars; at 135m the shipped adapter].",
        show_default=False,
    ),
]
StageCheckpoints = Annotated[
    list[str] | None,
    typer.Option(help="STAGE=FOLDER_OR_HUB_NAME: use this checkpoint for a stage (mars-b8: for B = 8); repeatable."),
]
TrainAll = Annotated[
    bool,
    typer.Option(
        "--train",
        "--from-scratch",
        help="Train every stage, even where a published checkpoint or a shipped base exists.",
    ),
]

GridFile = Annotated[
    Path | None, typer.Option(help="YAML file of contenders and batch sizes; without it, the scale's own.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, laps and batch sizes, as the grid says.")]

BlockSize = Annotated[int, typer.Option(min=2, help="B that the checkpoint was, or is to be, trained with.")]
Dtype = Annotated[str, typer.Option(help="Of weights and caches: float32, bfloat16 or float16.")]
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
Base = Annotated[
    str | None, typer.Option(help="Pretrained checkpoint to start from, folder or hub name, at a scale that has one.")
]
ChatData = Annotated[
    str | None, typer.Option(help="Conversations, JSON Lines file or hub data set with `messages`, at such a scale.")
]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Steps of every stage, in place of the scale's budget.")]
GpusPerTraining = Annotated[
    int, typer.Option(min=1, help="GPUs of one machine that each training of a real model gets, through accelerate.")
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

_DTYPES = ("float32", "bfloat16", "float16")


def option_of(
    name: str, known: Option, default: Any, *, flags: Sequence[str] = (), help: str = "", panel: str | None = None
) -> Parameter:
    """An option of a dataclass as typer takes it, by default called after its field."""
    hint: Any = list[str] if known.kind is tuple else known.kind
    default = None if known.kind is tuple else default
    option = typer.Option(
        *(flags or [f"--{name.replace('_', '-')}"]), min=known.least, max=known.most, help=help or known.help,
        rich_help_panel=panel,
    )  # fmt: skip
    whole = hint | None if default is None else hint
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[whole, option])


def typed_as(command: Callable[..., None], parameters: Iterable[Parameter]) -> Callable[..., None]:
    """The command, whose options typer takes to be these."""
    found = list(parameters)
    command.__signature__ = Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in found}
    return command


def own_stage(scale: str, stage: str | None) -> str:
    """The stage that a user names, or the one that decodes at a scale where nobody does."""
    from marsbench.presets import preset

    return stage or preset(scale).stage


def use_packing(pack: bool) -> None:
    """Have weights packed for decoding, or not, by this process and those that it starts."""
    from marsbench.forward.linear import set_packing

    set_packing(pack)


def dtype_of(name: str) -> torch.dtype:
    """The torch type of that name."""
    if name not in _DTYPES:
        raise unknown_name("dtype", name, list(_DTYPES))
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def make_run(
    scale: str, output: Path, existing: str, seed: int, *, benchmarks: str | None = None, limit: int | None = None,
    shard: str | None = None, data_dir: Path | None = None, train_all: bool = False,
    checkpoint: list[str] | None = None,
) -> Run:  # fmt: skip
    """The run of a scale, with the machine's noise kept off the terminal.

    What is no run of the scale's own benchmarks in full at seed 0 gets folders of its own.
    """
    from marsbench.quiet import quieten_libraries

    chosen, part = scale_of(scale, checkpoint, train_all=train_all), _part(shard)
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(
            "there is no such folder of benchmark data", where=str(data_dir),
            fix="correct --data-dir or MARSBENCH_DATA, or leave both out to load it from the hub",
        )  # fmt: skip
    from marsbench.evaluation.benchmarks import benchmarks as named
    from marsbench.rows.store import existing_policy
    from marsbench.rows.workspace import Workspace

    policy = existing_policy(existing)
    names = [name.strip() for name in benchmarks.split(",")] if benchmarks else []
    asked = named(names)
    variant = "-".join([*names, *([f"limit{limit}"] if limit else []), *([f"seed{seed}"] if seed else [])])
    workspace = Workspace(output, scale, variant)
    workspace.check_writable()
    quieten_libraries()  # from here on, what is heavy
    from marsbench.running.run import Run

    return Run(chosen, workspace, policy, seed, asked, limit, part, data_dir)


def scale_of(name: str, checkpoint: list[str] | None, *, train_all: bool) -> Preset:
    """A scale with the checkpoints that a user names for its stages, as in "mars=FOLDER" or "mars-b8=FOLDER"."""
    from marsbench.presets import preset
    from marsbench.training.stages import stage

    chosen = preset(name).with_checkpoints(checkpoint or [], train_all=train_all)
    for entry in checkpoint or []:
        named, _, place = entry.partition("=")
        plain, _, size = named.rpartition("-b")
        stage(plain if plain and size.isdecimal() else named)
        if place.startswith((".", "/", "~")) and not Path(place).is_dir():  # what is no path is a name on the hub
            raise UserError(
                "there is no such checkpoint", where=place, fix=f"check the path behind --checkpoint {named}="
            )
    return chosen


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


def _part(text: str | None) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    first, _, last = (text or "1/1").partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--shard {text} is no part of a whole", fix="give it as I/N, from 1/N to N/N")
    return int(first), int(last)
