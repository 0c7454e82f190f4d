"""Steps of fixed shape as graphs: by `torch.compile`, and as CUDA graphs where there is CUDA."""

import time
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from marsbench.compiled.fixed import FixedRows, Shape, Stand, Steps, static_step
from marsbench.decoding.engine import Batch, KindOfBatch, Method, OutsideMethod
from marsbench.decoding.step import FittedRows
from marsbench.forward.decoder import Decoder, LeanDecoder, decoder_of
from marsbench.forward.modules import device_of
from marsbench.forward.native import cpp_compiler
from marsbench.forward.window import recording

_BACKEND = "inductor"  # of `torch.compile`, where none is asked for
_SPARE_BYTES = 4 << 30  # of empty stands, kept for the graphs that were recorded of them
Run = Callable[[], Tensor]
Step = Callable[[Decoder, Method, Stand], Tensor]


def why_not(model: Any, method: Method | OutsideMethod, backend: str | None = None) -> str:
    """Why a method's steps cannot be graphs for a model here, empty if they can; `backend` is that of `Graphs`."""
    if isinstance(method, OutsideMethod):
        return f"method {method.name!r} brings a loop of its own"
    if method.most() is None:
        return f"the windows of method {method.name!r} have no fixed shape"
    if not all(map(_is_bare, (decoder_of(model), *_drafting(method)))):
        return "only plain Qwen2 and Llama models are compiled"
    if not records_on(device_of(model)) and backend in (None, "inductor") and cpp_compiler() is None:
        return "there is no C++ compiler"
    return ""


def wants_graphs(model: Any, compiled: bool | None) -> bool:
    """Whether a model's steps are to be graphs: as was said, or, where nothing was, if they are recorded there."""
    return records_on(device_of(model)) if compiled is None else compiled


def kind_of_batch(model: Any, method: Method | OutsideMethod, compiled: bool | None = None) -> tuple[KindOfBatch, str]:
    """What makes the batch, and why it is not compiled although that was asked; graphs last as long as the model."""
    if not wants_graphs(model, compiled):
        return Batch, ""
    if reason := why_not(model, method):
        return Batch, f"not compiled: {reason}" if compiled else ""
    return _KEPT.setdefault(model, Graphs()).batch, ""


def records_on(device: torch.device) -> bool:
    """Whether steps are recorded there, which launches each as a whole: compiling takes far longer for each shape."""
    return device.type == "cuda"


class Graphs(Steps):
    """Steps as graphs, one for each shape that comes up. Making one takes time: keep this for all batches of a model.

    A batch whose model is no longer plain, because a hook or an adapter came, runs operation by operation. On CUDA, a
    recorded graph is of a stand's buffers, so a stand that a batch has left is kept for the next one, up to a limit for
    the process. Where the model's weights have moved when a batch begins, the step is recorded anew.
    """

    def __init__(self, backend: str | None = None) -> None:
        """`backend` is of `torch.compile`; None = on CUDA steps are recorded as they are, elsewhere inductor."""
        self._backend = backend
        self.compile_seconds = 0.0  # spent so far
        self._compiled: dict[Hashable, Step] = {}
        self._spare: dict[Hashable, tuple[int, Stand]] = {}  # with the number of when it was left
        # The steps that were recorded of a stand, and where the weights lay.
        self._recorded: WeakKeyDictionary[Stand, tuple[Hashable, Run]] = WeakKeyDictionary()
        _ALL.add(self)

    def __len__(self) -> int:
        return len(self._compiled) or len(self._recorded)

    def batch(self, model: Any, method: Method, **settings: Any) -> Batch:
        return Batch(model, method, shapes=self, **settings)

    def __call__(self, decoder: Decoder, method: Method, device: torch.device) -> FixedRows:
        return FixedRows(self, decoder, method, records=records_on(device))

    def spare(self, decoder: Decoder, method: Method, shape: Shape, like: FittedRows) -> Stand | None:
        return self._spare.pop((decoder, method, shape, like.rows.cache.dtype), (0, None))[1]

    def left(self, decoder: Decoder, method: Method, stand: Stand) -> None:
        if stand in self._recorded:
            stand.clear()
            self._spare[decoder, method, stand.shape, stand.rows.cache.dtype] = next(_NUMBERS), stand
            spare = sorted(
                (number, kept.bytes(), graphs, key) for graphs in _ALL for key, (number, kept) in graphs._spare.items()
            )
            held = sum(size for _, size, _, _ in spare)
            for _, size, graphs, key in spare:  # of all graphs, those that were left first are dropped
                if held <= _SPARE_BYTES:
                    return
                del graphs._spare[key]
                held -= size

    def step_on(self, decoder: Decoder, method: Method, stand: Stand) -> Run:
        decoders = decoder, *_drafting(method)
        if not all(map(_is_bare, decoders)):
            return super().step_on(decoder, method, stand)
        if not records_on(stand.rows.length.device):
            natively = tuple(which.natively for which in decoders if isinstance(which, LeanDecoder))
            key = (decoders, natively, method, stand.shape, stand.rows.cache.dtype)
            if key not in self._compiled:
                with self._timed(), stand.still():
                    self._compiled[key] = _compiled(static_step, self._backend or _BACKEND)
                    self._compiled[key](decoder, method, stand)
            return partial(self._compiled[key], decoder, method, stand)
        addresses = _addresses(decoders, method)
        if stand not in self._recorded or self._recorded[stand][0] != addresses:
            step = static_step if self._backend in (None, "eager") else _compiled(static_step, self._backend)
            with self._timed(), stand.still(), recording():
                self._recorded[stand] = addresses, recorded(partial(step, decoder, method, stand))
        return self._recorded[stand][1]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.compile_seconds += time.perf_counter() - started


_KEPT: WeakKeyDictionary[Any, Graphs] = WeakKeyDictionary()  # model -> what was compiled for it
_ALL: WeakSet[Graphs] = WeakSet()
_NUMBERS = count()


def _drafting(method: Any) -> list[Decoder]:
    decoder = getattr(method, "draft_decoder", None)
    return [] if decoder is None else [decoder()]


def _is_bare(decoder: Decoder) -> bool:
    return isinstance(decoder, LeanDecoder) and decoder.is_bare


def _addresses(decoders: tuple[Decoder, ...], method: Method) -> Hashable:
    modules = [value for value in vars(method).values() if isinstance(value, nn.Module)]
    of_heads = [tensor.data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return (*(which.addresses() for which in decoders if isinstance(which, LeanDecoder)), *of_heads)


def _compiled(step: Step, backend: str) -> Step:
    """A step that becomes a graph by its first call, for good: it is only called with what it was made for."""
    # torch keeps graphs by their code, and without guards it would take any of them for all shapes.
    alone = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
    # Checking every weight before every step takes longer than the step of a small model.
    no_guards = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    options = {"guard_filter_fn": no_guards} if no_guards else None
    return torch.compile(alone, fullgraph=True, dynamic=False, backend=backend, options=options)


@cache
def _pool() -> tuple[Any, Any]:
    """The memory of all graphs' intermediate results, and a graph that keeps it: a pool goes with its last graph."""
    pool, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(keeper, pool=pool):
        torch.zeros(1, device="cuda")
    return pool, keeper


def recorded(run: Run) -> Run:
    """A step as a CUDA graph, launched as a whole; what it gives is overwritten by the next launch."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries allocate what they need
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool()[0]):
        given = run()

    def launch() -> Tensor:
        graph.replay()
        return given

    return launch
