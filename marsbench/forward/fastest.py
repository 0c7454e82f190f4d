"""Which product is faster on this CPU, `linear.cpp`'s or torch's: timed once for each number of threads, and kept.

They are timed in turn, over more weights than a cache holds; times of a busy machine are kept for an hour. Where
`linear.cpp` is slower at few positions, it is not used. Where it is slower at many, torch takes those over in fp32; in
bf16 a sum that depends on the number of positions would make verified answers differ from `ar`'s.
"""

import json
import os
import sys
from contextlib import suppress
from functools import cache
from time import perf_counter, time

import torch
import torch.nn.functional as F

from marsbench.files import write_atomically
from marsbench.forward.native import VARIABLE, instructions, is_native, large_pages, library, pack, product
from marsbench.json_lines import parse_json
from marsbench.keys import content_hash
from marsbench.provenance import cpu_name, others_cores, warning

POSITIONS = (1, 8, 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVERY = sys.maxsize  # positions
FEW = 16  # positions, up to which it is used in fp32 where torch is faster with 64
LOSES = 1.1  # times torch's time: where both only read memory, one machine says 0.9 and 1.05 in turn

_TORCHS = "ONEDNN_MAX_CPU_ISA"  # bounds the instructions that torch's own product uses

_SHAPE = 1536, 576  # of a weight
_BYTES = 48 << 20  # of weights that are read in turn at few positions; at 64, where it is not reading that counts, less
_REPEATS = 25  # some two seconds for everything; fewer are over within one burst of other work
_FOR_NOW_S = 3600.0  # for which times of a busy machine are kept


def most_positions(dtype: torch.dtype) -> int:
    """Up to how many positions `linear.cpp` multiplies, 0 where torch is faster; `MARSBENCH_NATIVE` may say so."""
    if not is_native():
        return 0
    if os.environ.get(VARIABLE) == "1":
        return EVERY
    few, several, many = (_times(torch.get_num_threads())[str(dtype).removeprefix("torch.")][str(m)] for m in POSITIONS)
    if max(few, several) > LOSES:
        return 0
    return FEW if many > LOSES and dtype is torch.float32 else EVERY


def reads_bf16() -> bool:
    """Whether decoding in bf16 is fast on this CPU."""
    return most_positions(torch.bfloat16) > 0 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def times_torch() -> dict[str, dict[str, float]]:
    """By type and positions, how long `linear.cpp` takes, torch taking 1; empty where it cannot be had."""
    return _times(torch.get_num_threads()) if is_native() else {}


def in_words() -> str:
    each = [
        f"{name} {' / '.join(f'{1 / time:.1f}' for time in times.values())}"
        + ("" if most_positions(DTYPES[name]) else " (so torch's are used)")
        for name, times in times_torch().items()
    ]
    positions = " / ".join(map(str, POSITIONS))
    return f"products in C++ with {instructions()}, x torch at {positions} positions: {', '.join(each)}"


@cache
def _times(threads: int) -> dict[str, dict[str, float]]:
    name = content_hash([cpu_name(), threads, os.environ.get(_TORCHS), _REPEATS])
    kept, for_now = (library().with_suffix(f".{name}{end}.json") for end in ("", ".busy"))
    for file, lasts in ((kept, sys.maxsize), (for_now, _FOR_NOW_S)):
        with suppress(OSError, ValueError):  # not there, or damaged
            if time() - file.stat().st_mtime < lasts:
                return dict(parse_json(file.read_bytes(), dict[str, dict[str, float]]))
    busy = warning(others_cores())  # a choice that was made beside other work must not stay for good
    times = {name: {str(m): _measured(dtype, m) for m in POSITIONS} for name, dtype in DTYPES.items()}
    write_atomically(for_now if busy else kept, json.dumps(times).encode())
    return times


@torch.inference_mode()
def _measured(dtype: torch.dtype, positions: int) -> float:
    """The shortest time over torch's shortest: other work on the machine only adds."""
    weight = torch.full(_SHAPE, 0.01, dtype=dtype)
    count = max(2, _BYTES // weight.nbytes // (1 if positions <= 8 else 8))
    values = torch.ones(positions, _SHAPE[1], dtype=dtype)
    plain, once = [weight.clone() for _ in range(count)], pack(weight)
    packed = large_pages(count * once.nbytes).view(dtype).view(count, *once.shape).copy_(once)
    laps = list[tuple[float, float]]()
    for _ in range(_REPEATS + 1):  # the first warms up
        begin = perf_counter()
        for matrix in plain:
            F.linear(values, matrix)
        middle = perf_counter()
        for matrix in packed:
            product(values, matrix)
        laps.append((middle - begin, perf_counter() - middle))
    return round(min(ours for _, ours in laps) / min(torchs for torchs, _ in laps), 3)
