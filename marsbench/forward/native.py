"""The operations in C++, `between.cpp` and `linear.cpp`, built once, in some twenty seconds, where there is a compiler.

They are never needed: torch gives the same numbers, up to rounding.
"""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from marsbench.fetching.models import cache_folder
from marsbench.keys import content_hash

VARIABLE = "MARSBENCH_NATIVE"  # 0 = operations of torch everywhere, 1 = C++ wherever it can be built

_COMPILERS = ("g++", "clang++", "c++", "cl")
_SOURCES = [Path(__file__).with_name(name) for name in ("between.cpp", "linear.cpp")]
_HEADER = Path(__file__).with_name("lanes.h")
# What a CPU can do, as torch names it -> how a compiler is told. Never more than that: caches are shared by machines,
# and flags are part of a library's name. Tiles (AMX) are only used where the system lets this process have them.
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
_AVX512 += ["-mavx512bf16"] if torch.cpu._is_avx512_bf16_supported() else []
_AMX = ["-mamx-tile", "-mamx-bf16"]
_FLAGS = {"AVX512": _AVX512, "AVX512 and AMX": [*_AVX512, *_AMX], "AVX2": ["-mavx2", "-mfma"]}
BLOCK = 16  # outputs of packed weights that lie beside each other


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] as `linear.cpp` reads it: [out / 16, words, 16], a word being one float or two bf16."""
    outputs, inputs = weight.shape
    each = 4 // weight.element_size()
    blocks = weight.detach().reshape(outputs // BLOCK, BLOCK, inputs // each, each)
    return blocks.transpose(1, 2).reshape(outputs // BLOCK, inputs // each, BLOCK * each).contiguous()


def large_pages(nbytes: int) -> Tensor:
    """Memory, uint8 [nbytes], in large pages if there are some: from small ones reading takes up to a fifth longer."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def product(values: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.marsbench.product.default(values, packed, bias)
    return out


def unit_norm(values: Tensor) -> Tensor:
    """`F.rms_norm` of values [M, H] without a weight, in one operation."""
    values, epsilon = values.contiguous(), torch.finfo(torch.float32).eps
    out: Tensor = torch.ops.marsbench.norm.default(values, None, values.new_ones(values.shape[1]), epsilon)
    return out


def can_pack(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16) and outputs % BLOCK == 0 and inputs % 2 == 0


def cpp_compiler() -> str | None:
    """The C++ compiler: what CXX names, else one of the usual ones; None where there is none."""
    named = os.environ.get("CXX")
    return next((compiler for name in ((named,) if named else _COMPILERS) if (compiler := shutil.which(name))), None)


@cache
def instructions() -> str:
    """The instructions that the operations are built for, as torch names them, and whether AMX is among them."""
    capability = torch.backends.cpu.get_cpu_capability()
    has_tiles = capability == "AVX512" and "-mavx512bf16" in _AVX512 and torch.cpu._init_amx()
    return f"{capability} and AMX" if has_tiles else capability


def use_torch() -> None:
    os.environ[VARIABLE] = "0"


def is_native() -> bool:
    """Whether the operations are loaded; they are built now if need be."""
    return os.environ.get(VARIABLE) != "0" and not why_not_native()


@cache
def why_not_native() -> str:
    """Why they cannot be had here, empty where they are loaded."""
    if cpp_compiler() is None:
        return "there is no C++ compiler"
    try:
        _load(library())
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return f"{cpp_compiler()} does not build them: {lines[0] if lines else error.stderr.strip()[-200:]}"
    except OSError as error:
        return f"they cannot be built or loaded: {error}"
    return ""


@cache
def _load(built: Path) -> None:
    torch.ops.load_library(str(built))  # type: ignore[no-untyped-call]
    empty: dict[str, Callable[..., Tensor]] = {
        "norm": lambda hidden, *_: torch.empty_like(hidden),
        "swiglu": lambda gate, _: gate.new_empty(gate.shape),
        "attention": lambda every, cos, sin, keys, *_: every.new_empty(
            len(every), every.shape[1] - 2 * keys.shape[2] * keys.shape[3]
        ),
        **dict.fromkeys(
            ("product", "adapted"), lambda values, packed, *_: values.new_empty(len(values), packed.shape[0] * BLOCK)
        ),
    }
    for name, shape in empty.items():
        torch.library.register_fake(f"marsbench::{name}", shape)


def library() -> Path:
    """The library for this CPU, built by one process if need be; `OSError` or `CalledProcessError` if that fails."""
    if (compiler := cpp_compiler()) is None:
        raise FileNotFoundError("a C++ compiler")
    torch_at = Path(torch.__file__).parent
    flags = [
        "-shared", "-fPIC", "-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math",
        *_FLAGS.get(instructions(), []),
        *(["-fopenmp"] if sys.platform == "linux" else []),
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
    ]  # fmt: skip
    libraries = f"-L{torch_at / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"
    texts = [source.read_text(encoding="utf-8") for source in (*_SOURCES, _HEADER)]
    built = cache_folder() / f"native-{content_hash([texts, torch.__version__, compiler, flags])}.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(built.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=built.parent) as unfinished:
        if not built.exists():
            print(f"building C++ operations for this CPU, once, into {built.parent} (about 20 s)", file=sys.stderr)
            made = Path(unfinished) / built.name
            command = [compiler, *flags, f"-I{torch_at / 'include'}", *map(str, _SOURCES), *libraries, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(built)
    return built
