"""A checkpoint behind an API: `serve`."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands.shared import Checkpoint, Dtype, OwnStage, Scale, UntrainedMasks, dtype_of, make_run
from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.errors import UserError
from marsbench.files import check_can_be_written
from marsbench.presets import DEFAULT_SCALE

METHODS = ("ar", "mars", "mars-verified")
KEY_VARIABLE = "MARSBENCH_API_KEY"


def serve(
    checkpoint: Checkpoint = None,
    scale: Scale = DEFAULT_SCALE,
    stage: OwnStage = "mars",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model [default: the folder's name, or the stage's].")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Asked for by every route but /health and /ping; may be given several times, or once in "
            "MARSBENCH_API_KEY."
        ),
    ] = None,
    speed_key: Annotated[str | None, typer.Option(help="The only key that turns the knobs.")] = None,
    lock_speed: Annotated[bool, typer.Option("--lock-speed", help="Let nobody turn the knobs.")] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which clients may call the server, beside localhost and addresses; * is any."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A page's origin (https://HOST) that may ask the server; * is any.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="What a proxy puts before every path.")] = "",
    request_log: Annotated[Path | None, typer.Option(help="JSON Lines of all requests, without their texts.")] = None,
    method: Annotated[
        str | None, typer.Option(help="How to decode where a request does not say: ar, mars or mars-verified.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Tau of mars: the knob, to begin with.")] = 0.95,
    draft_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Confidence that drafts of mars-verified must have.")
    ] = 0.5,
    block_size: Annotated[int, typer.Option(min=1, max=16, help="Tokens that one forward settles at most.")] = 4,
    temperature: Annotated[float, typer.Option(min=0, help="Where a request gives none; 0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of a chat's answer that asks for none.")] = 1024,
    max_rows: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 16,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are told 429.")] = 64,
    kv_slots: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV cache may hold [default: full rows].")
    ] = None,
    prefill_positions: Annotated[
        int, typer.Option(min=1, help="Prompt tokens in one forward pass at most.")
    ] = PREFILL_POSITIONS,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the engine; where cores are few, leave HTTP one of them.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body at most.")] = 4 * 2**20,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at once at most.")] = 1024,
    read_timeout: Annotated[float, typer.Option(min=0, help="Seconds that head or body may take to come.")] = 20.0,
    stall_timeout: Annotated[float, typer.Option(min=0, help="Seconds that a reader may take nothing.")] = 60.0,
    ping: Annotated[
        float, typer.Option(min=0, help="Seconds of silence after which a stream says that it is alive; 0: never.")
    ] = 15.0,
    deadline: Annotated[float, typer.Option(min=0, help="Seconds that an answer may take.")] = 3600.0,
    hang_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds without a word after which a busy engine is started anew.")
    ] = 120.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that answers in flight have at the end.")] = 30.0,
    adapt: Annotated[
        bool,
        typer.Option(
            "--adapt",
            help="Choose windows and pruning by what pays at the moment, at no cost in accuracy, and lower tau for "
            "requests with a min_threshold while a target below is missed.",
        ),
    ] = False,
    target_ms_per_token: Annotated[float | None, typer.Option(min=0, help="Of --adapt: time per token.")] = None,
    target_first_token_ms: Annotated[float | None, typer.Option(min=0, help="Of --adapt: wait in the queue.")] = None,
    decision_log: Annotated[
        Path | None, typer.Option(help="Of --adapt: JSON Lines of what was seen and chosen, to be replayed.")
    ] = None,
    dtype: Dtype = "float32",
    untrained_masks: UntrainedMasks = False,
    output: Annotated[Path, typer.Option(help="Folder for runs/, where --scale trains its checkpoint.")] = Path("."),
) -> None:
    """Put a checkpoint behind an API that OpenAI's clients speak, with MARS's speed knob live.

    Point any client at http://HOST:PORT/v1. Beside the usual fields a request may name its method, threshold (tau) and
    block_size; `PUT /v1/speed` turns the default knob for everybody in flight who fixed none. docs/serving.md has the
    rest.
    """
    given = locals()
    dtype_of(dtype)
    if method is not None and method not in METHODS:
        raise UserError(f"method {method!r} cannot be served", fix=f"choose one of: {', '.join(METHODS)}")
    if not adapt and (target_ms_per_token, target_first_token_ms, decision_log) != (None, None, None):
        raise UserError("targets and a log of decisions go with --adapt", fix="add --adapt, or leave them out")
    for log, option in ((decision_log, "--decision-log"), (request_log, "--request-log")):
        if log is not None and not log.is_relative_to("/dev"):
            check_can_be_written(log, option)
    _check_packages()
    from marsbench.serving.serve import serve as run
    from marsbench.serving.settings import Settings

    given["name"] = name or (stage if checkpoint is None else os.path.basename(os.path.normpath(checkpoint)))
    if checkpoint is None:
        from marsbench.running.checkpoints import Checkpoints

        given["checkpoint"] = str(Checkpoints(make_run(scale, output, "reuse", 0)).path(stage, 4))
    given["api_key"] = api_key or [key for key in [os.environ.get(KEY_VARIABLE)] if key is not None]
    for several in ("api_key", "allowed_host", "cors_origin"):
        given[several] = tuple(given[several] or ())
    run(Settings(**{one.name: given[one.name] for one in fields(Settings)}), typer.echo)


def _check_packages() -> None:
    """Find out before anything is trained or loaded whether the extra that brings a server along is there."""
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
