"""The engine in a process of its own, so that a forward never keeps the event loop from its clients."""

import gc
import resource
import select
import signal
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from marsbench.errors import UserError
from marsbench.serving.messages import Cancel, Job, MethodName, Ready, Settings

_PAUSE_S = 0.005  # between two reports, where no request starts or ends
_OF_FREE = 0.4  # of the free memory may be the cache: while a layer grows, it is there twice, and steps need some


def run(pipe: Connection, settings: Settings) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process says when to end; its terminal signals both
        signal.signal(number, signal.SIG_IGN)
    try:
        engine, ready = _start(settings)
    except UserError as error:
        pipe.send(error)
        return
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other end is gone
        pipe.send(ready)
        _serve(pipe, engine)


def _start(settings: Settings) -> tuple[Any, Ready]:
    import torch

    from marsbench.answering import default_ids, fit, load_aloud
    from marsbench.decoding.engine import context_length
    from marsbench.forward.limits import check_ids, vocabulary_of
    from marsbench.progress import Reporter, quieten_libraries
    from marsbench.racing.position_law import in_words
    from marsbench.racing.step_time import windows_that_pay
    from marsbench.serving.engine import Engine, bytes_per_slot, slots_needed
    from marsbench.training.checkpoints import default_device

    quieten_libraries()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = default_device()
    dtype = getattr(torch, settings.dtype or usual_dtype(device))
    loaded = load_aloud(settings.checkpoint, Reporter(), dtype=dtype, device=device)
    fit("ar", loaded)
    model = loaded.model
    eos_id, pad_id = default_ids(loaded)
    mask_id = loaded.mask_id if loaded.knows_masks or settings.untrained_masks else None
    check_ids(model, mask=mask_id)
    methods: tuple[MethodName, ...] = ("ar",) if mask_id is None else ("ar", "mars", "mars-verified")
    slots, warning = slots_within(settings, slots_needed(model), _free_bytes(model.device) // bytes_per_slot(model))
    settings = replace(settings, kv_slots=slots)
    windows: tuple[int, ...] = ()
    if settings.adapt:
        rates = loaded.acceptance if settings.acceptance is None else (settings.acceptance,)
        windows = windows_that_pay(model, settings.max_rows, rates)
        Reporter().say(f"windows that pay here: {in_words(windows)}")
    engine = Engine(model, settings, mask_id=mask_id, eos_id=eos_id, pad_id=pad_id, windows=windows)
    engine.capture_ahead(settings.method or methods[:2][-1])
    gc.collect()
    gc.freeze()  # what is there to stay need not be looked through between two steps
    return engine, Ready(loaded.tokenizer, context_length(model), vocabulary_of(model), methods, slots, warning)


def usual_dtype(device: str) -> str:
    """In what a server computes unless it is told: a GPU reads weights and cache of 16 bits in half the time."""
    return "bfloat16" if device == "cuda" else "float32"


def slots_within(settings: Settings, of_one: int, free: int) -> tuple[int, str]:
    """How many slots the cache may have, of `free`, with rows of `of_one`; and a warning where rows cannot be full."""
    if settings.kv_slots is not None and settings.kv_slots < of_one:
        what = f"a cache of {settings.kv_slots} slots cannot hold one request of the model's context"
        raise UserError(what, fix=f"give --kv-slots {of_one} or more")
    if settings.kv_slots is not None:
        return settings.kv_slots, ""
    full, room = settings.max_rows * of_one, max(of_one, int(_OF_FREE * free))
    if full <= room:
        return full, ""
    return room, f"memory has room for {room:,} slots of the KV cache, of {full:,} that full rows may need"


def _free_bytes(device: Any) -> int:
    import psutil
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = int(psutil.virtual_memory().available)
    return free if limit == resource.RLIM_INFINITY else min(free, max(0, limit - psutil.Process().memory_info().vms))


def _serve(pipe: Connection, engine: Any) -> None:
    """Rounds without end; tokens of several short steps go out together, since each message wakes the event loop."""
    told = 0.0
    letters = select.poll()  # `pipe.poll` would make one of these for every round
    letters.register(pipe, select.POLLIN)
    while True:
        while engine.idle or letters.poll(0):
            match message := pipe.recv():
                case Job():
                    engine.submit(message)
                case Cancel():
                    engine.cancel(message.id)
                case Settings():
                    engine.settings = message
        engine.work()
        quiet_s = time.perf_counter() - told
        if quiet_s > _PAUSE_S or engine.is_urgent:
            is_whole = quiet_s > _PAUSE_S / 2  # where the other end is woken anyway, another message is spared
            pipe.send(engine.report(whole=is_whole))
            told += quiet_s if is_whole else 0.0
