"""Steps of fixed shape as compiled graphs: `torch.compile`, and CUDA graphs where there is CUDA."""

from __future__ import annotations

import os
import shutil
import time
import types
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marsbench.compiled.static import Shape, Stand, Steps, static_step
from marsbench.compiled.static_batch import StaticBatch
from marsbench.decoding.engine import Batch, KindOfBatch, Method
from marsbench.decoding.outside import OutsideMethod
from marsbench.decoding.rows import Most, Rows
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import Decoder, LeanDecoder, decoder_of
from marsbench.forward.modules import device_of

_COMPILERS = ("g++", "clang++", "c++", "cl")  # what torch.compile calls for a CPU
Step = Callable[[Decoder, Method, Stand, Tensor], Tensor]


def why_not(model: Any, method: Method | OutsideMethod) -> str:
    """Why a method cannot be compiled for a model here, empty if it can."""
    if isinstance(method, OutsideMethod):
        return f"method {method.name!r} brings a loop of its own"
    if method.most() is None:
        return f"the windows of method {method.name!r} have no fixed shape"
    if not all(isinstance(one, LeanDecoder) for one in (decoder_of(model), *_draft_decoders(method))):
        return "only plain Qwen2 and Llama models are compiled"
    if device_of(model).type == "cpu" and not has_compiler():
        return "there is no C++ compiler"
    return ""


def kind_of_batch(model: Any, method: Method | OutsideMethod, compiled: bool) -> tuple[KindOfBatch, str]:
    """What makes the batch: `Batch`, or compiled steps where they are wanted and can be had; else why they cannot.

    A model's graphs are kept as long as the model is.
    """
    if not compiled:
        return Batch, ""
    if reason := why_not(model, method):
        return Batch, f"not compiled: {reason}"
    if model not in _KEPT:
        _KEPT[model] = Graphs()
    return _KEPT[model].batch, ""


def has_compiler() -> bool:
    """Whether there is what `torch.compile` calls for a CPU: what CXX names, else one of the usual compilers."""
    named = os.environ.get("CXX")
    return any(shutil.which(name) for name in ((named,) if named else _COMPILERS))


class Graphs(Steps):
    """Compiled steps, one for each shape that comes up. Compiling takes seconds: keep it for all batches of a model.

    A batch whose model is no longer plain, because a hook or an adapter came, runs operation by operation. On CUDA, a
    stand that a batch has left is kept for the next one, since a captured graph is of its buffers: one for each shape.

    Args:
        backend: of `torch.compile`.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self.compile_seconds = 0.0  # spent so far
        self._compiled: dict[Hashable, Step] = {}
        self._drafts: dict[Method, list[Decoder]] = {}  # the decoders of their draft models
        self._spare: dict[Hashable, Stand] = {}
        self._captured: WeakKeyDictionary[Stand, _Captured] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._compiled)

    def batch(self, model: Any, method: Method, **settings: Any) -> StaticBatch:
        """A `StaticBatch` whose steps are these; `UserError` for a method without fixed shapes."""
        self._drafts[method] = _draft_decoders(method)
        return StaticBatch(model, method, run=self, **settings)

    def stand(self, method: Method, shape: Shape, most: Most, like: Rows, cache: RaggedCache) -> Stand:
        """A stand with nobody on it: one that was left, or a new one."""
        found = self._spare.pop((method, shape, cache.dtype), None)
        return super().stand(method, shape, most, like, cache) if found is None else found

    def left(self, method: Method, stand: Stand) -> None:
        """Keep a stand that a graph was captured of."""
        if stand in self._captured:
            stand.clear()
            self._spare[method, stand.shape, stand.dtype] = stand

    def __call__(self, decoder: Decoder, method: Method, stand: Stand, eos: Tensor) -> Tensor:
        """One step; see `static_step`."""
        if method not in self._drafts:
            self._drafts[method] = _draft_decoders(method)
        decoders = decoder, *self._drafts[method]
        if not all(isinstance(one, LeanDecoder) for one in decoders):
            return static_step(decoder, method, stand, eos)
        key = (*decoders, method, stand.shape, stand.dtype, len(eos))
        if key not in self._compiled:
            self._compiled[key] = self._made(decoder, method, stand, eos)
        step = self._compiled[key]
        if eos.device.type != "cuda":
            return step(decoder, method, stand, eos)
        if stand not in self._captured:
            self._captured[stand] = _Captured(step, decoder, method, stand, eos)
        return self._captured[stand]()

    def _made(self, decoder: Decoder, method: Method, stand: Stand, eos: Tensor) -> Step:
        """A step that has been compiled, by running it while nobody moves."""
        started = time.perf_counter()
        step = _compiled(static_step, self._backend)
        with stand.still():
            step(decoder, method, stand, eos)
        self.compile_seconds += time.perf_counter() - started
        return step


_KEPT: WeakKeyDictionary[Any, Graphs] = WeakKeyDictionary()  # model -> what was compiled for it


def _draft_decoders(method: Any) -> list[Decoder]:
    drafter = getattr(method, "drafter", None)
    return [] if drafter is None else [decoder_of(drafter.model)]


def _compiled(step: Step, backend: str) -> Step:
    """A step that becomes a graph by its first call, for good: it is only called with what it was made for."""
    # torch keeps graphs by their code, and without guards it would take any of them for all shapes.
    alone = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
    # Checking every weight before every step takes longer than the step of a small model.
    no_guards = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    options = {"guard_filter_fn": no_guards} if no_guards else None
    compiled: Step = torch.compile(alone, fullgraph=True, dynamic=False, backend=backend, options=options)
    return compiled


class _Captured:
    """A step on one stand as a CUDA graph, launched as a whole."""

    def __init__(self, step: Step, decoder: Decoder, method: Method, stand: Stand, eos: Tensor) -> None:
        with stand.still():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries allocate what they need
                    step(decoder, method, stand, eos)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._packed = step(decoder, method, stand, eos)

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._packed
