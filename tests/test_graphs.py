"""Steps that are recorded once and launched as one, as CUDA graphs are: they read the memory of the recording.

No GPU is needed: a stand-in records operations, keeps nothing but its own results, and raises an error where a graph
would read memory that was freed.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import count, product
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from test_packed import given_data
from test_static import EOS, MASK, PAD, SETTINGS, Traffic, llama, method_of
from test_wrappers import CHANGES as CHANGES_BY_MODULES
from tools import packing
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import LlamaForCausalLM

from marsbench import generate
from marsbench.commands.shared import Start
from marsbench.compiled import graphs as graphs_module
from marsbench.compiled.graphs import Graphs, Run, kind_of_batch
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.forward import decoder, window
from marsbench.forward.window import additive_mask, lowest_of
from marsbench.methods import Decoding, Options, build_method
from marsbench.running import run as running
from marsbench.serving.messages import Settings
from marsbench.training import visibility
from marsbench.training.medusa import MedusaHeads

RECORDED = graphs_module.recorded
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")  # no graph can hold these: they wait


class Freed(Exception):
    """A graph reads memory that is no longer there."""


@dataclass(frozen=True)
class Result:
    """The result of a recorded operation."""

    name: int


class Outside:
    """A tensor that no recorded operation made: its memory and its layout."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._layout = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def read(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise Freed
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class Tape(TorchDispatchMode):
    """Operations, with their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any]] = []
        self._names: dict[int, Result] = {}
        self._alive: list[Any] = []  # while it records, so that no two tensors go by one name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = function is torch.ops.aten.lift_fresh.default and not args[0].dim()  # as in `values[:] = 3`
        waits = function is torch.ops.aten.lift_fresh.default and not is_number  # for numbers of the host
        assert not waits and function.__name__.split(".")[0] not in READS, f"{function} waits"
        inputs = (args, {}) if is_number else tree_map(self._place, (args, kwargs or {}))
        output = function(*args, **(kwargs or {}))
        self._operations.append((function, inputs, [self._name(leaf) for leaf in tree_leaves(output)]))
        return output

    def stop(self, output: Tensor) -> Run:
        """End the recording, whose result is `output`; returns what launches it."""
        launch = partial(self._launch, self._names[id(output)])
        self._names, self._alive = {}, []
        return launch

    def _place(self, leaf: Any) -> Any:
        self._alive.append(leaf)
        return self._names.get(id(leaf), Outside(leaf)) if isinstance(leaf, Tensor) else leaf

    def _name(self, leaf: Any) -> Any:
        self._alive.append(leaf)
        return self._names.setdefault(id(leaf), Result(len(self._names))) if isinstance(leaf, Tensor) else leaf

    def _launch(self, output: Result) -> Tensor:
        values: dict[Result, Tensor] = {}

        def value(of: Any) -> Any:
            if isinstance(of, list | tuple):  # not `tree_map`, which takes longer than the operations
                return [value(each) for each in of]
            return of.read() if isinstance(of, Outside) else values[of] if isinstance(of, Result) else of

        for function, (args, kwargs), names in self._operations:
            produced = function(*value(args), **{name: value(of) for name, of in kwargs.items()})
            values |= dict(zip(names, tree_leaves(produced), strict=True))
        return values[output]


def taped(run: Run) -> Run:
    run()
    with Tape() as tape:
        output = run()
    return tape.stop(output)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for a device on which steps are recorded."""
    monkeypatch.setattr(graphs_module, "records_on", lambda device: True)
    monkeypatch.setattr(graphs_module, "recorded", taped)
    with packing(False):
        yield


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"mask_id": MASK, "draft": llama(3), "heads": MedusaHeads(32, 3)}


def answers(
    model: Any, method: Any, kind: Any = None, eos_id: Any = -1, length: int = 12, threshold: float | None = None
) -> Any:
    """The generations of three requests."""
    requests = [Request([4 + row, 5, 6, 7][row:], length, threshold) for row in range(3)]
    return decode(model, method, requests, eos_id=eos_id, pad_id=PAD, kind=kind)


@pytest.mark.parametrize("what", SETTINGS)
def test_recorded_steps_say_what_eager_ones_do(what: str, parts: dict[str, Any]) -> None:
    """Guards against steps that cannot be recorded, lost tokens, graphs that read cached tensors after their end."""
    model, method, graphs = llama(0), method_of(what, parts), Graphs()
    outcomes = []
    for kind in (Batch, graphs.batch, graphs.batch):
        traffic = Traffic(kind, model, method, seed=5, count=5)
        traffic.run()
        outcomes.append((traffic.done, traffic.told, traffic.meter.forwards))
        for kept in window.KEPT:
            kept.cache_clear()
        decode(model, method_of("ar", parts), [Request([5] * 300, 1)], eos_id=EOS, pad_id=PAD)
    assert outcomes[1] == outcomes[0] and outcomes[2] == outcomes[0]
    assert 0 < len(graphs) < 12


def test_graphs_hold_nothing_that_is_kept_for_a_while(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    for module in (window, decoder):
        monkeypatch.setattr(module, "makes_a_graph", lambda: False)
    with pytest.raises(Freed):
        test_recorded_steps_say_what_eager_ones_do("mars", parts)


def test_each_batch_has_an_eos_of_its_own(parts: dict[str, Any]) -> None:
    """Guards against a graph that reads the EOS of the batch that it was recorded for, which is freed."""
    model, method, graphs = llama(0), method_of("mars", parts), Graphs()
    uncut = answers(model, method)
    first, second, third = (generation.tokens[4 + row] for row, generation in enumerate(uncut))
    for eos_id in (first, [first, second], [second, third, EOS], third, -1):
        cut = answers(model, method, graphs.batch, eos_id)
        assert cut == answers(model, method, eos_id=eos_id) and (cut == uncut) == (eos_id == -1)
        gc.collect()


def load_anew(model: LlamaForCausalLM) -> None:
    model.load_state_dict({name: weight.clone() for name, weight in llama(5).state_dict().items()}, assign=True)
    model.tie_weights()


def train(model: LlamaForCausalLM) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[4, 5, 6]]), labels=torch.tensor([[4, 5, 6]])).loss.backward()
    optimizer.step()


CHANGES: list[Callable[[Any], Any]] = [
    load_anew, given_data, train, CHANGES_BY_MODULES["weight replaced"], CHANGES_BY_MODULES["layer hooked"],
    CHANGES_BY_MODULES["head hooked"],
]  # fmt: skip


@pytest.mark.parametrize(("what", "change"), [*product(["mars"], CHANGES), *product(["speculative"], CHANGES[:2])])
def test_a_graph_follows_the_model(what: str, change: Callable[[Any], None], parts: dict[str, Any]) -> None:
    """Guards against graphs of weights that have moved since, and of the model as it was before it got hooks."""
    model, graphs = llama(0), Graphs()
    method = method_of(what, {**parts, "draft": copy.deepcopy(model)})
    seen = [answers(model, method, graphs.batch)]
    for _ in range(2):
        change(model if what == "mars" else method.draft)
        gc.collect()
        seen.append(answers(model, method, graphs.batch))
        assert seen[-1] == answers(model, method)
    assert what != "mars" or seen[1] != seen[0]


def test_a_graph_of_moved_weights_would_read_freed_memory(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    monkeypatch.setattr(graphs_module, "_addresses", lambda *_: ())
    with pytest.raises(Freed):
        test_a_graph_follows_the_model("mars", load_anew, parts)


def test_graphs_are_few_and_of_their_own_models(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against graphs of another model or of freed heads, one for every shape, and recordings in mid-answer."""
    graphs, method, models = Graphs(), method_of("ar", parts), [llama(0), llama(5)]
    for model in (*models, *models):
        assert answers(model, method, graphs.batch) == answers(model, method)
    assert len(graphs) == 2
    model, graphs, heads = llama(0), Graphs(), MedusaHeads(32, 3)
    method = build_method("medusa", Options(heads=heads))
    for seed in (1, 2):
        torch.manual_seed(seed)
        heads.load_state_dict({name: torch.randn_like(old) for name, old in heads.state_dict().items()}, assign=True)
        assert answers(model, method, graphs.batch) == answers(model, method)
    model, graphs = llama(0), Graphs()
    requests = [Request([4, 5, 6], 10 + 17 * row) for row in range(9)]
    decode(model, method_of("ar", parts), requests, eos_id=-1, pad_id=PAD, kind=graphs.batch, batch_size=7)
    shapes = {(stand.shape.rows, stand.shape.length) for stand in graphs._recorded}
    assert {rows for rows, _ in shapes} <= {1, 2, 4, 8} and {length for _, length in shapes} <= {64, 128, 256}
    model, method, graphs = llama(0), method_of("mars", parts), Graphs()
    assert answers(model, method, graphs.batch, -1, 100, 0.3) == answers(model, method, None, -1, 100, 0.3)
    assert len({stand.shape.length for stand in graphs._recorded}) == 1


def test_stands_that_are_left_are_kept_up_to_a_limit(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against gigabytes that are kept for every method that ever ran, and a recording for every batch."""
    model, method, several = llama(0), method_of("mars", parts), [Graphs() for _ in range(3)]
    for graphs in several:
        answers(model, method, graphs.batch)
    sizes = [[stand.bytes() for _, stand in graphs._spare.values()] for graphs in several]
    assert [len(spare) for spare in sizes] == [1, 1, 1]
    seconds = several[2].compile_seconds
    answers(model, method, several[2].batch)
    assert several[2].compile_seconds == seconds, "what was kept is taken again"
    monkeypatch.setattr(graphs_module, "_SPARE_BYTES", sum(sizes[1] + sizes[2]))
    answers(model, method, several[1].batch)
    assert [len(graphs._spare) for graphs in several] == [0, 1, 1], "the first to be left is the first to go"
    monkeypatch.setattr(graphs_module, "_SPARE_BYTES", 0)
    answers(model, method, several[1].batch)
    assert [(len(graphs._spare), len(graphs)) for graphs in several] == [(0, 0)] * 3
    assert answers(model, method, several[0].batch) == answers(model, method)


def test_recording_needs_no_compiler(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against compiling where recording is enough, and against recording alone where a backend is asked for."""
    model, method = llama(0), method_of("ar", parts)
    monkeypatch.setattr(graphs_module, "_compiled", None)
    monkeypatch.setattr(graphs_module, "cpp_compiler", lambda: None)
    kind, reason = kind_of_batch(model, method, True)
    assert not reason and answers(model, method, kind) == answers(model, method)
    backends: list[str] = []
    monkeypatch.setattr(graphs_module, "_compiled", lambda step, backend: backends.append(backend) or step)
    assert answers(model, method, Graphs("inductor").batch) == answers(model, method) and {*backends} == {"inductor"}


class Capture:
    """In place of CUDA's graphs: a pool is freed with the last graph that holds it, as in torch's allocator."""

    holders: ClassVar[Counter[int]] = Counter()
    gone: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.pool: int | None = None

    @classmethod
    @contextmanager
    def graph(cls, graph: Any, pool: int) -> Iterator[None]:
        assert pool not in cls.gone, "use_count > 0"
        graph.pool = pool
        cls.holders[pool] += 1
        yield

    def __del__(self) -> None:
        if self.pool is not None:
            self.holders[self.pool] -= 1
            if not self.holders[self.pool]:
                self.gone.add(self.pool)

    def replay(self) -> None:
        """Nothing is computed."""


def test_steps_are_recorded_by_default(parts: dict[str, Any]) -> None:
    """Guards against a GPU that records steps only when told to, and a warning where nothing can be recorded."""
    model, method, outside = llama(0), method_of("mars", parts), build_method("hf-generate", Options())
    assert kind_of_batch(model, method)[0] is not Batch and kind_of_batch(model, method, False) == (Batch, "")
    assert kind_of_batch(model, outside) == (Batch, "") and "loop of its own" in kind_of_batch(model, outside, True)[1]
    defaults = [Decoding().compiled, Start().compiled, Settings("").compile]
    defaults += [signature(function).parameters["compiled"].default for function in (running.Run, generate)]
    assert defaults == [None] * 5


def test_the_memory_of_graphs_outlives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pool that is freed with the last graph captured into it, so that the next capture crashes."""
    nothing = SimpleNamespace(wait_stream=lambda other: None)
    for name, put in {
        "graph_pool_handle": count(1).__next__, "CUDAGraph": Capture, "graph": Capture.graph,
        "Stream": lambda: nothing, "current_stream": lambda: nothing, "stream": lambda stream: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, put)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    graphs_module._pool.cache_clear()
    try:
        for _ in range(3):
            launch = RECORDED(lambda: torch.ones(1))
            assert launch().item() == 1
            del launch
            gc.collect()
    finally:
        graphs_module._pool.cache_clear()


def test_a_read_cannot_be_recorded() -> None:
    """The stand-in refuses what waits for the device, and what is made of the host's numbers."""
    values = torch.arange(3)
    for reads in (lambda: values.sum().item(), values.nonzero, lambda: torch.tensor([1, 2])):
        with pytest.raises(AssertionError, match="waits"), Tape():
            reads()


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("slots", [16, 17, 31])
def test_a_mask_needs_no_copy_on_a_device(width: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows of a length that kernels pad: they copy the mask in every layer."""
    relative = torch.zeros(2, slots, dtype=torch.long, device="meta")
    mask = additive_mask(torch.ones(width, width, dtype=torch.bool, device="meta"), relative, torch.bfloat16, copies=2)
    assert mask.shape == (2, 1, 1 if width == 1 else 2 * width, slots)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know the meta device
    in_training = visibility.additive_mask(torch.ones(2, slots, slots, dtype=torch.bool, device="meta"), torch.bfloat16)
    assert in_training.shape == (2, 1, slots, slots)
    for bias in (mask, in_training):
        assert all(stride % 16 == 0 for stride, size in zip(bias.stride()[:-1], bias.shape, strict=False) if size > 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_hides_a_slot_stays_finite_when_kernels_scale_it(dtype: torch.dtype) -> None:
    """Guards against minus infinity, which makes NaN of rows that see nothing; float16 has no more room."""
    lowest = torch.tensor(lowest_of(dtype), dtype=dtype)
    assert lowest.isfinite() and torch.exp(lowest.float()) == 0
    assert dtype is torch.float16 or (lowest * 1.4427).isfinite()
    scores = torch.tensor([-50.0, 50.0], dtype=dtype)
    assert (scores + lowest).float().softmax(0).isfinite().all()
