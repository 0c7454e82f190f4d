"""What lies between the linear maps of a layer: norms, rotation and attention, activation.

Two ways to the same numbers, up to rounding: operations of torch, everywhere; and `between.cpp`, for models whose
weights are packed on a CPU, where some twenty small operations a layer take as long as the maps do. It is built once,
where there is a C++ compiler, in about ten seconds. By it an entry's result does not depend on what stands beside it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.fetching.models import cache_folder
from marsbench.forward.cache import RaggedCache
from marsbench.forward.masks import additive_mask
from marsbench.forward.window import Window

VARIABLE = "MARSBENCH_NATIVE"  # 0 = operations of torch everywhere

_COMPILERS = ("g++", "clang++", "c++", "cl")
_SOURCE = Path(__file__).with_suffix(".cpp")
_LANES = 16  # values that it takes at a time
_HEAD_SIZES = (32, 64, 128)
# What a CPU can do, as torch names it -> how a compiler is told. Never more than that: caches are shared by machines.
_FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}


@dataclass(frozen=True)
class Shape:
    """The attention of a model."""

    heads: int
    kv_heads: int
    size: int  # of a head
    scale: float

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


class Norm:
    """A root-mean-square norm by its module's own weight."""

    def __init__(self, module: Any) -> None:
        self.parameters: dict[str, Tensor] = module._parameters  # its weight [H], as it is at the moment
        self.epsilon: float = module.variance_epsilon
        self.constant = torch.tensor(self.epsilon)


class Pass:
    """One forward pass over the real entries of a window, M of N * W, by operations of torch."""

    def __init__(
        self, shape: Shape, cache: RaggedCache, window: Window, relative: Tensor, real: Tensor | None,
        turned: tuple[Tensor, Tensor], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`turned` are cosines and sines [M, 1, size] of the entries, the first half of the sines negated."""
        self._shape, self._cache, self._real = shape, cache, real
        self._rows, self._width = window.input_ids.shape
        self._cos, self._sin = turned
        self._mask = additive_mask(window.visible, relative, dtype, copies=shape.group)

    def norm(self, by: Norm, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states [M, H] with a change added, and these normalised."""
        hidden = hidden if change is None else hidden + change
        if hidden.dtype is torch.float32 and hidden.device.type == "cpu":  # where torch's own takes more operations
            square = torch.linalg.vecdot(hidden, hidden)
            scale = torch.add(by.constant, square, alpha=1 / hidden.shape[1]).rsqrt_()
            return hidden, (hidden * scale.unsqueeze(1)) * by.parameters["weight"]
        return hidden, F.rms_norm(hidden, (hidden.shape[1],), by.parameters["weight"], by.epsilon)

    def attention(self, layer: int, every: Tensor) -> Tensor:
        """Queries, keys and values [M, (heads + 2 key heads) * size] of a layer to what each entry finds, [M, H]."""
        shape = self._shape
        turning, values = every.view(len(every), -1, shape.size).split_with_sizes(
            [shape.heads + shape.kv_heads, shape.kv_heads], 1
        )
        turned = torch.addcmul(turning * self._cos, turning.roll(shape.size // 2, -1), self._sin)
        queries, keys = turned.split_with_sizes([shape.heads, shape.kv_heads], 1)
        keys, values = self._cache.write(layer, keys, values)
        found = self._attend(spread(queries, self._real, self._rows * self._width), keys, values)
        return found if self._real is None else found[self._real]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, [M, I]."""
        return F.silu(gate) * up

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries [N * W, heads, size] over keys and values [N, S, key heads, size]: [N * W, H].

        The query heads that share a key head are folded into the query length, so that keys are never repeated.
        """
        rows, width, shape = self._rows, self._width, self._shape
        if width == 1:  # heads that share a key head lie beside each other already
            folded = queries.view(rows, shape.kv_heads, shape.group, shape.size)
        else:
            parted = queries.view(rows, width, shape.kv_heads, shape.group, shape.size).permute(0, 2, 3, 1, 4)
            folded = parted.reshape(rows, shape.kv_heads, shape.group * width, shape.size)
        found = F.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self._mask, scale=shape.scale
        )
        if width == 1:
            return found.reshape(rows, -1)
        unfolded = found.view(rows, shape.kv_heads, shape.group, width, shape.size).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(rows * width, -1)


class NativePass(Pass):
    """The same by `between.cpp`; hidden states are written in place."""

    def __init__(
        self, shape: Shape, cache: RaggedCache, window: Window, relative: Tensor, real: Tensor | None,
        turned: tuple[Tensor, Tensor], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._shape, self._cache = shape, cache
        self._cos, self._sin = turned
        entries = torch.arange(window.input_ids.numel()) if real is None else real
        self._window = entries, cache.flat_slots, window.begin.contiguous(), window.visible.contiguous(), cache.total

    def norm(self, by: Norm, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Pass`."""
        return hidden, torch.ops.marsbench.norm.default(hidden, change, by.parameters["weight"], by.epsilon)

    def attention(self, layer: int, every: Tensor) -> Tensor:
        """See `Pass`."""
        shape = self._shape
        keys, values = self._cache.stores(layer, every, (shape.kv_heads, shape.size))
        found: Tensor = torch.ops.marsbench.attention.default(
            every, self._cos, self._sin, keys, values, *self._window, shape.scale
        )
        return found

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Pass`."""
        found: Tensor = torch.ops.marsbench.swiglu.default(gate, up)
        return found


def is_for(shape: Shape, sizes: Sequence[int]) -> bool:
    """Whether `between.cpp` takes heads of this kind, and hidden and intermediate states of these sizes."""
    return shape.size in _HEAD_SIZES and not any(size % _LANES for size in sizes)


def spread(values: Tensor, real: Tensor | None, entries: int) -> Tensor:
    """Values [M, ...] of the real entries at their places among all `entries`, zeros at fillers."""
    if real is None:
        return values
    return values.new_zeros(entries, *values.shape[1:]).index_copy_(0, real, values)


# ---- built once ----


def cpp_compiler() -> str | None:
    """The C++ compiler: what CXX names, else one of the usual ones; None where there is none."""
    named = os.environ.get("CXX")
    return next((found for name in ((named,) if named else _COMPILERS) if (found := shutil.which(name))), None)


def is_native() -> bool:
    """Whether `between.cpp` is loaded; it is built now if need be."""
    return os.environ.get(VARIABLE) != "0" and not why_not_native()


@cache
def why_not_native() -> str:
    """Why `between.cpp` cannot be had here, empty where it is loaded."""
    chosen = cpp_compiler()
    if chosen is None:
        return "there is no C++ compiler"
    try:
        _load(_built(chosen))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return f"{chosen} does not build it: {lines[0] if lines else error.stderr.strip()[-200:]}"
    except OSError as error:
        return f"it cannot be built or loaded: {error}"
    return ""


@cache
def _load(library: Path) -> None:
    """Make its operations known, to compilers of graphs too."""
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    empty: dict[str, Callable[..., Tensor]] = {
        "norm": lambda hidden, *_: torch.empty_like(hidden),
        "swiglu": lambda gate, _: gate.new_empty(gate.shape),
        "attention": lambda every, cos, sin, keys, *_: every.new_empty(
            len(every), every.shape[1] - 2 * keys.shape[2] * keys.shape[3]
        ),
    }
    for name, shape in empty.items():
        torch.library.register_fake(f"marsbench::{name}", shape)


def _built(compiler: str) -> Path:
    """The library, built now where it is not there yet: whole or not at all, whoever else builds it meanwhile."""
    torch_at = Path(torch.__file__).parent
    command = [
        compiler, "-shared", "-fPIC", "-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math",
        *_FLAGS.get(torch.backends.cpu.get_cpu_capability(), []), *(["-fopenmp"] if sys.platform == "linux" else []),
        f"-I{torch_at / 'include'}", str(_SOURCE), f"-L{torch_at / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch",
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
    ]  # fmt: skip
    made_of = _SOURCE.read_text(encoding="utf-8"), torch.__version__, command
    folder = cache_folder()
    library = folder / f"between-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            made = Path(unfinished) / library.name
            subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True)
            made.replace(library)
    return library
