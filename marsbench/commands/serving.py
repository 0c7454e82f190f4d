"""A checkpoint behind an API: `serve`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands import shared
from marsbench.errors import UserError
from marsbench.methods.options import options_of
from marsbench.serving.settings import Settings

KEY_VARIABLE = "MARSBENCH_API_KEY"


@shared.takes("settings", Settings)
@shared.starts("whose", "stage", "scale")
def serve(
    start: shared.Start,
    settings: Settings,
    output: Annotated[Path, typer.Option(help="Folder for runs/, where --scale trains its checkpoint.")] = Path("."),
) -> None:
    """Put a checkpoint behind an API that OpenAI's clients speak, with MARS's speed knob live.

    Point any client at http://HOST:PORT/v1. Beside the usual fields a request may name its method, threshold (tau) and
    block_size; `PUT /v1/speed` turns the default knob for all requests in flight that fixed none. See docs/serving.md.
    """
    known = options_of(Settings)
    for name in ("dtype", "method"):
        if (value := getattr(settings, name)) is not None:
            known[name].check(name, value)
    if settings.adapt and settings.compile:
        raise UserError("--adapt chooses windows, and with --compile none costs less", fix="leave one of them out")
    # Found out before anything is trained or loaded: whether the extra that brings a server along is there.
    from marsbench.serving.serve import serve as run

    checkpoint, stage = start.whose, start.own_stage
    called = settings.name or (stage if checkpoint is None else os.path.basename(os.path.normpath(checkpoint)))
    if checkpoint is None:
        from marsbench.running.checkpoints import Checkpoints

        checkpoint = Checkpoints(replace(start, output=output).run()).path(start.own)
    keys = settings.api_key or tuple(key for key in [os.environ.get(KEY_VARIABLE)] if key is not None)
    run(replace(settings, name=called, checkpoint=checkpoint, api_key=keys), typer.echo)
