"""The position law of the model on this machine, measured when a server starts that is to adapt."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from marsbench.decoding.engine import Batch
from marsbench.decoding.generation import Request
from marsbench.methods.mixed import Mixed
from marsbench.racing.position_law import PositionLaw, law_of
from marsbench.racing.race import synchronize

_WINDOWS = (1, 2, 4, 8)
_PROMPT, _STEPS, _REPEATS = 32, 6, 3


def measured_law(model: Any, rows: int) -> PositionLaw:
    """What a forward costs by its positions, from steps of up to `rows` rows and windows of up to 8; takes seconds."""
    counts = sorted({min(2**power, rows) for power in range(rows.bit_length() + 1)})
    shapes = [(count, window) for count in counts for window in _WINDOWS]
    seconds: list[list[float]] = [[] for _ in shapes]
    for _ in range(_REPEATS):  # in turn, so that a disturbance does not fall on one shape alone
        for place, shape in enumerate(shapes):
            seconds[place].append(_step(model, *shape))
    return law_of([count * window for count, window in shapes], seconds)


def _step(model: Any, rows: int, window: int) -> float:
    """Median seconds of a step; its first two warm up."""
    batch = Batch(model, Mixed(0), eos_id=-1, pad_id=0, on_finished=lambda *_: None)
    request = Request([1] * _PROMPT, _STEPS + 9, threshold=1.0, window=window, ignore_eos=True)
    batch.join(dict.fromkeys(range(rows), request))
    found = []
    for _ in range(_STEPS):
        synchronize()
        started = time.perf_counter()
        batch.step()
        synchronize()
        found.append(time.perf_counter() - started)
    return median(found[2:])
