"""Making checkpoints: `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands.shared import BlockSize, ExistingPolicy, Output, Scale, Seed, make_run


def train(
    stage: Annotated[str, typer.Argument(help="What to train: see `marsbench list stages`.")],
    scale: Scale = "tiny",
    block_size: BlockSize = 4,
    base: Annotated[
        str | None, typer.Option(help="Pretrained checkpoint to start from, folder or hub name (0.5b, 7b).")
    ] = None,
    chat_data: Annotated[
        str | None, typer.Option(help="Conversations, JSON Lines file or hub data set with `messages` (0.5b, 7b).")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of every stage, in place of the scale's budget.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step, over all devices, in place of the scale's.")
    ] = None,
    seed: Seed = 0,
    existing: ExistingPolicy = "reuse",
    output: Output = Path("."),
) -> None:
    """Train one stage and whatever it starts from; prints the checkpoint's folder.

    An interrupted training goes on where it stopped when the same command is given again. To use several
    devices: `accelerate launch -m marsbench train mars --scale ...`; ready-made `--config_file`s lie in
    marsbench/presets/launch. The batch of a step stays the same, however many devices share it.
    """
    from marsbench.training.stages import recipe
    from marsbench.training.stages import stage as stage_of

    stage_of(stage)
    run = make_run(scale, output, existing, seed)
    from marsbench.progress import is_first_process
    from marsbench.running.checkpoints import Checkpoints

    run.scale = run.scale.adapted(base=base, chat_data=chat_data, steps=max_steps, batch_size=batch_size)
    chosen = recipe(run.scale, stage, block_size=block_size, seed=seed)
    Checkpoints(run).train(chosen)
    if is_first_process():
        typer.echo(run.workspace.checkpoint(chosen))
