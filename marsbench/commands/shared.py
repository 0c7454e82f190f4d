"""What several commands share: their options, and the run that most of them start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marsbench.errors import UserError

if TYPE_CHECKING:
    from marsbench.running.run import Run

Scale = Annotated[str, typer.Option(help="Model, data and budgets: see `marsbench list scales`.")]
Output = Annotated[Path, typer.Option(help="Folder for runs/, results/ and reports/.")]
ExistingPolicy = Annotated[str, typer.Option(help="What is there already: reuse it, rerun it, or fail.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights and training data.")]

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
OwnStage = Annotated[str, typer.Option(help="Stage of the scale's own checkpoint, trained if missing.")]
StageCheckpoints = Annotated[
    list[str] | None,
    typer.Option(help="STAGE=FOLDER_OR_HUB_NAME: use this checkpoint for a stage (mars-b8: for B = 8); repeatable."),
]
TrainAll = Annotated[bool, typer.Option("--train", help="Train every stage, even where a published checkpoint exists.")]

GridFile = Annotated[
    Path | None, typer.Option(help="YAML file of contenders and batch sizes; without it, the scale's own.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, laps and batch sizes, as the grid says.")]

DecodingMethod = Annotated[str, typer.Option(help="How to decode: see `marsbench list methods`.")]
BlockSize = Annotated[int, typer.Option(help="B: tokens predicted per forward pass at most.")]
Metric = Annotated[
    str, typer.Option(help="Confidence of mars methods and block-diffusion: probability, entropy or margin.")
]
Draft = Annotated[
    str | None, typer.Option(help="Draft model's checkpoint folder, for speculative, mars-speculative and hf-assisted.")
]
UntrainedMasks = Annotated[
    bool, typer.Option("--untrained-masks", help="Use masks even if the checkpoint never saw any.")
]


def make_run(
    scale: str, output: Path, existing: str, seed: int, *, benchmarks: str | None = None, limit: int | None = None,
    shard: str | None = None, data_dir: Path | None = None, train_all: bool = False,
    checkpoint: list[str] | None = None,
) -> Run:  # fmt: skip
    """The run of a scale, with the machine's noise kept off the terminal.

    What is no run of the scale's own benchmarks in full at seed 0 gets folders of its own.
    """
    from marsbench.presets import preset
    from marsbench.quiet import quieten_libraries

    chosen = preset(scale).with_checkpoints(checkpoint or [], train_all=train_all)
    part = _part(shard)
    quieten_libraries()
    from marsbench.evaluation.benchmarks import benchmarks as named
    from marsbench.rows.store import existing_policy
    from marsbench.rows.workspace import Workspace
    from marsbench.running.run import Run

    names = [name.strip() for name in benchmarks.split(",")] if benchmarks else []
    variant = "-".join([*names, *([f"limit{limit}"] if limit else []), *([f"seed{seed}"] if seed else [])])
    workspace = Workspace(output, scale, variant)
    return Run(chosen, workspace, existing_policy(existing), seed, named(names), limit, part, data_dir)


def _part(text: str | None) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    first, _, last = (text or "1/1").partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--shard {text} is no part of a whole", fix="give it as I/N, from 1/N to N/N")
    return int(first), int(last)
