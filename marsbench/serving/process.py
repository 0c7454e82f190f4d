"""The engine in a process of its own, so that a forward never keeps the event loop from its clients."""

from __future__ import annotations

import selectors
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from marsbench.errors import UserError
from marsbench.serving.controller import Controller, Targets
from marsbench.serving.messages import Cancel, Failed, Job, MethodName, Ready, Speed


@dataclass(frozen=True)
class Setup:
    """What the engine needs to start."""

    checkpoint: str
    dtype: str = "float32"
    untrained_masks: bool = False
    rows: int = 16
    slots: int | None = None  # None: as many as all rows may need
    prefill_positions: int | None = None
    threads: int | None = None
    speed: Speed = field(default_factory=Speed)
    adapt: Targets | None = None  # where a controller is to turn the knobs
    log: Path | None = None  # of its decisions


def run(pipe: Connection, setup: Setup) -> None:
    """Decode for whoever is at the other end, until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process says when to end; its terminal signals both
        signal.signal(number, signal.SIG_IGN)
    try:
        engine, ready = _start(setup)
    except UserError as error:
        pipe.send(Failed(error.what, error.where, error.fix))
        return
    try:
        pipe.send(ready)
        _serve(pipe, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody is left to decode for


def _start(setup: Setup) -> tuple[Any, Ready]:
    """Load the checkpoint; `UserError` for what could not work."""
    import torch

    from marsbench.decoding.engine import context_length
    from marsbench.decoding.generation import PREFILL_POSITIONS
    from marsbench.methods.fitting import default_ids, fit
    from marsbench.methods.settings import load_aloud
    from marsbench.progress import Reporter
    from marsbench.quiet import quieten_libraries
    from marsbench.serving.calibration import measured_law
    from marsbench.serving.engine import BEHIND, Engine, Room
    from marsbench.training.checkpoints import default_device

    quieten_libraries()
    if setup.threads:
        torch.set_num_threads(setup.threads)
    loaded = load_aloud(setup.checkpoint, Reporter(), dtype=getattr(torch, setup.dtype), device=default_device())
    fit("ar", loaded)
    eos_id, pad_id = default_ids(loaded, None, None)
    methods: tuple[MethodName, ...] = ("ar",)
    if loaded.mask_id is not None and (loaded.knows_masks or setup.untrained_masks):
        methods = ("ar", "mars", "mars-verified")
    context = context_length(loaded.model)
    slots = setup.rows * (context + BEHIND + 64) if setup.slots is None else setup.slots
    room = Room(setup.rows, slots, setup.prefill_positions or PREFILL_POSITIONS)
    controller = None
    if setup.adapt is not None:
        controller = Controller(measured_law(loaded.model, setup.rows), setup.adapt, setup.log)
    engine = Engine(
        loaded.model, mask_id=loaded.mask_id, eos_id=eos_id, pad_id=pad_id, room=room, speed=setup.speed,
        controller=controller,
    )  # fmt: skip
    engine.check_room()
    vocabulary = int(loaded.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    return engine, Ready(loaded.tokenizer, context, vocabulary, methods, slots)


def _serve(pipe: Connection, engine: Any) -> None:
    """Rounds without end; with nothing to do, it waits for the next message."""
    with selectors.DefaultSelector() as letters:  # `pipe.poll` would make one of these for every round
        letters.register(pipe, selectors.EVENT_READ)
        while True:
            while engine.idle or letters.select(0):
                _hear(engine, pipe.recv())
            pipe.send(engine.work())


def _hear(engine: Any, message: Job | Cancel | Speed) -> None:
    match message:
        case Job():
            engine.submit(message)
        case Cancel():
            engine.cancel(message.id)
        case Speed():
            engine.speed = message
