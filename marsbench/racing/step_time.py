"""What one step of the loop costs by the shape of its window, and how fast a device reads memory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from marsbench.decoding.engine import Batch, context_length
from marsbench.decoding.generation import Request
from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import last, linear_window, pending
from marsbench.forward.limits import vocabulary_of
from marsbench.forward.window import Answer, Window
from marsbench.progress import Counted
from marsbench.racing.position_law import ACCEPTANCE, WIDEST, law_of, windows_by_rows
from marsbench.training.checkpoints import synchronize

_CONTEXT = 64  # tokens of every prompt
_STEPS = 8  # timed together
_REPEATS = 9
_ROWS = (1, 4, 16, 64)
_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_FEW_WINDOWS, _FEW_REPEATS = (1, 2, 4, 8), 3  # for who cannot wait
_READ_BYTES = 2**30  # far more than any cache holds
_LAPS = 10  # in a row: a GPU reads it in less than the host may take to notice


@dataclass(frozen=True)
class _Probe(Method):
    """One token per step from a window of a given width: what any method of that width costs at least."""

    name = "probe"

    window: int

    def propose(self, rows: Rows) -> Window:
        return linear_window(rows, masks=self.window - 1, mask_id=0)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        ids = answer.logits(slice(last(rows), None)).max(-1).indices[:, :1]
        return Accepted.leading(rows, ids, torch.ones_like(rows.length), pending(rows))


def step_times(model: Any, positions: int, progress: Counted) -> dict[str, Any]:
    """Time all shapes of up to so many positions in turn, several times: fields of a `StepTimeRow`."""
    room = context_length(model) - _CONTEXT - _STEPS - 1
    shapes = [(rows, width) for rows in _ROWS for width in _WINDOWS if rows * width <= positions and width < room]
    turns, seconds = shapes * (_REPEATS + 1), list[float]()  # the first of each warms up
    for done, shape in enumerate(turns):
        seconds.append(_step(model, *shape))
        progress(done, len(turns))
    of_each = [seconds[place :: len(shapes)][1:] for place in range(len(shapes))]
    rows_of_each, windows = map(list, zip(*shapes, strict=True))
    return {"context": _CONTEXT, "rows": rows_of_each, "window": windows, "seconds": of_each}


def windows_that_pay(model: Any, rows: int, acceptance: Sequence[float]) -> tuple[int, ...]:
    """The window of drafts in a line that pays for 1 row, 2, ... `rows` here, by their `acceptance`; 1 is `ar`."""
    counts = sorted({min(2**power, rows) for power in range(rows.bit_length() + 1)})
    shapes = [*product(counts, _FEW_WINDOWS)]
    # In turn, so that a disturbance does not fall on one shape alone.
    laps = [[_step(model, *shape) for shape in shapes] for _ in range(_FEW_REPEATS)]
    rows_of_each, windows = zip(*shapes, strict=True)
    law = law_of(rows_of_each, windows, list(zip(*laps, strict=True)))
    return windows_by_rows(law, rows, WIDEST, acceptance or (ACCEPTANCE,))


def _step(model: Any, rows: int, window: int) -> float:
    vocabulary = vocabulary_of(model)
    prompt = [token % vocabulary for token in range(_CONTEXT)]
    batch = Batch(model, _Probe(window), eos_id=-1, pad_id=0, on_finished=lambda *_: None)
    batch.join({row: Request(prompt, _STEPS + 3) for row in range(rows)})
    batch.step()
    synchronize()
    started = time.perf_counter()
    for _ in range(_STEPS):
        batch.step()
    synchronize()
    return (time.perf_counter() - started) / _STEPS


def read_per_second(device: torch.device) -> float:
    """Bytes that summing a large tensor, or a product of two, reads a second: what bounds a step that reads weights."""
    values = torch.ones(_READ_BYTES // 4, device=device)
    first, second = values.chunk(2)
    reads: tuple[Callable[[], Tensor], ...] = values.sum, lambda: torch.dot(first, second)
    timers = [Timer("read()", globals={"read": read}, num_threads=torch.get_num_threads()) for read in reads]
    return float(values.nbytes / min(timer.timeit(_LAPS).mean for timer in timers))  # which warms up, and waits
