"""What decoding keeps in memory: caches that follow the rows, nothing twice, and nothing after the last row."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import tools
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from marsbench.decoding import windows
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.step import FittedRows
from marsbench.forward import window
from marsbench.forward.cache import RaggedCache
from marsbench.methods import Options, build_method

EOS, PAD, MASK = 2, 0, 3
LAYERS, HEADS, SIZE = 6, 2, 8
SLOT = 2 * LAYERS * HEADS * SIZE * 4  # bytes of a slot


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """An untrained model with room for long prompts."""
    return tools.qwen2(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return tools.qwen2(1, **tools.SMALLEST, max_position_embeddings=4096)


def a_batch(model: PreTrainedModel, method: str = "ar", **options: Any) -> tuple[Batch, dict[int, Generation]]:
    """An empty batch whose rows end only at their limits, and their generations."""
    done: dict[int, Generation] = {}
    chosen = build_method(method, Options(mask_id=MASK, **options))
    return Batch(model, chosen, eos_id=-1, pad_id=PAD, on_finished=done.__setitem__), done


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(4, 23) for _ in range(length)]


def cache_bytes(batch: Batch) -> int:
    """The bytes of the model's and the draft model's cache."""
    return batch._running.bytes()


def row_bytes(batch: Batch) -> int:
    """The bytes of the rows, with unused parts of storages."""
    assert isinstance(batch._running, FittedRows)
    tensors = batch._running.rows.tensors().values() if len(batch) else []
    return sum({held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in tensors}.values())


class Held(TorchFunctionMode):
    """Notes the most bytes that tensors made in here have held at a time; it may refuse a tensor."""

    def __init__(self, *, refuse: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        super().__init__()
        self.peak = 0
        self._refuse, self._alive = refuse, list[weakref.ref[Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            if self._refuse(result):
                raise MemoryError
            self._alive = [held for held in self._alive if held() is not None] + [weakref.ref(result)]
            stores = [tensor.untyped_storage() for held in self._alive if (tensor := held()) is not None]
            self.peak = max(self.peak, sum({store.data_ptr(): store.nbytes() for store in stores}.values()))
        return result


def fill(cache: RaggedCache, rows: int, slots: int) -> None:
    """Write every slot of the rows, in each layer another number."""
    place = torch.arange(slots).expand(rows, slots)
    cache.prepare(place, slots)
    for layer in range(LAYERS):
        new = torch.full((rows * slots, HEADS, SIZE), float(layer))
        cache.write(layer, new, new + 0.5)


# ---- the cache ------------------------------------------------------------------------------------------------------
def test_a_long_visitor_takes_its_memory_along_and_leaves_no_trace(model: PreTrainedModel) -> None:
    """Guards against slots for the longest row of the past, and rows cut or mixed up when the cache shrinks."""
    batch, _ = a_batch(model)
    batch.join({row: Request(prompt(20), 200) for row in range(4)})
    batch.step()
    before = cache_bytes(batch), row_bytes(batch)
    batch.join({9: Request(prompt(1500), 3)})
    assert cache_bytes(batch) > 10 * before[0] and row_bytes(batch) > 5 * before[1]
    while 9 in batch:
        batch.step()
    assert len(batch) == 4
    assert cache_bytes(batch) <= 2 * before[0] and row_bytes(batch) <= 1.1 * before[1]
    requests = {row: Request(prompt(5 + row, row), 150 + row) for row in range(5)}
    batch, done = a_batch(model)
    batch.join(requests)
    for visitor in range(10, 14):
        batch.join({visitor: Request(prompt(700, visitor), 2)})
        for _ in range(20):
            batch.step()
    while len(batch):
        batch.step()
    alone = decode(model, build_method("ar", Options()), list(requests.values()), eos_id=-1, pad_id=PAD, batch_size=1)
    assert [done[row] for row in requests] == alone


def test_visitors_in_turn_have_nothing_copied(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache that shrinks whenever a row leaves and grows whenever a row joins."""
    batch, _ = a_batch(model)
    batch.join({row: Request(prompt(20), 190) for row in range(4)})
    batch.join({10: Request(prompt(100), 3)})
    resized: list[int] = []
    monkeypatch.setattr(RaggedCache, "_resize", lambda cache, layer, rows, own=RaggedCache._resize: (
        resized.append(layer), own(cache, layer, rows)))  # fmt: skip
    for visitor in range(11, 25):
        while visitor - 1 in batch:
            batch.step()
        batch.join({visitor: Request(prompt(100), 3)})
    assert resized.count(0) <= 1


@pytest.mark.parametrize("method", ["ar", "speculative"])
def test_an_empty_batch_holds_nothing(method: str, model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Guards against the last rows' cache that is kept until another row joins."""
    batch, _ = a_batch(model, method, draft=draft)
    batch.join({row: Request(prompt(80), 3 + row) for row in range(3)})
    while len(batch):
        assert cache_bytes(batch) > 0
        batch.step()
    assert (cache_bytes(batch), row_bytes(batch), batch._running._rows) == (0, 0, None)
    batch.join({0: Request(prompt(9), 1)})
    assert (cache_bytes(batch), row_bytes(batch)) == (0, 0)


def test_caches_are_there_twice_in_one_layer_at_most() -> None:
    """Guards against two copies of all layers when rows grow, and three caches at once when rows join."""
    cache = RaggedCache()
    with torch.inference_mode(), Held() as held:
        fill(cache, 8, 60)
        held.peak = 0
        fill(cache, 8, 100)
    grown = cache.bytes()
    assert grown == 8 * 128 * SLOT
    assert held.peak <= grown + 1.5 * grown / LAYERS
    for layer, (keys, values) in enumerate(cache._layers):
        assert (keys[:, :100] == layer).all() and (values[:, :100] == layer + 0.5).all()
    own, others = RaggedCache(), [RaggedCache(), RaggedCache()]
    with torch.inference_mode(), Held() as held:
        fill(own, 8, 60)
        for number, other in enumerate(others):
            fill(other, 8, 60 + 30 * number)
        before = own.bytes() + sum(other.bytes() for other in others)
        held.peak = 0
        own.extend(*others)
    after = own.bytes()
    assert after == 24 * 128 * SLOT and [other.bytes() for other in others] == [0, 0]
    assert held.peak <= max(before, after) + 2 * after / LAYERS
    for layer, (keys, _) in enumerate(own._layers):
        assert (keys[:, :60] == layer).all() and (keys[16:, :90] == layer).all()


@pytest.mark.parametrize("allowed", range(0, 4 * LAYERS + 4, 5))
@pytest.mark.parametrize("when", ["joining", "growing"])
def test_want_of_memory_leaves_the_rows_as_they_were(when: str, allowed: int, model: PreTrainedModel) -> None:
    """Guards against layers of different sizes, and rows that have half joined, when memory runs out."""
    requests = [Request(prompt(50, row), 40) for row in range(3)]
    batch, done = a_batch(model)
    batch.join(dict(enumerate(requests)))
    large = 3 * 64 * HEADS * SIZE  # numbers in a store of the rows in flight
    count = 0

    def too_much(tensor: Tensor) -> bool:
        nonlocal count
        count += tensor.dim() == 4 and tensor.is_contiguous() and tensor.numel() > large and not tensor.any()
        return count > allowed

    failed = False
    with Held(refuse=too_much):
        try:
            if when == "joining":
                batch.join({7: Request(prompt(90), 20)})
            for _ in range(20 if when == "growing" else 0):
                batch.step()
        except MemoryError:
            failed = True
    assert failed or allowed >= 2 * LAYERS
    if when == "joining":
        assert len(batch) == (3 if failed else 4)
    while len(batch):
        batch.step()
    alone = decode(model, build_method("ar", Options()), requests, eos_id=-1, pad_id=PAD, batch_size=1)
    assert [done[row].tokens for row in range(3)] == [generation.tokens for generation in alone]


@pytest.mark.parametrize("limit", [1, 3])
def test_memory_that_cannot_be_given_back_is_kept(limit: int, model: PreTrainedModel) -> None:
    """Guards against answers lost when a long row ends, as it joins or later, and there is no memory to move others."""
    requests = [Request(prompt(9, row), 20) for row in range(6)] + [Request(prompt(300), limit)]
    batch, done = a_batch(model)

    def keep(*given: Any, own: Callable[..., None] = RaggedCache.keep) -> None:
        with patch.object(RaggedCache, "_resize", side_effect=MemoryError):
            own(*given)

    with patch.object(RaggedCache, "keep", keep):
        batch.join({0: requests[0]})
        batch.join({row: requests[row] for row in (6, 1, 2, 3, 4, 5)})
        while len(batch):
            batch.step()
    alone = decode(model, build_method("ar", Options()), requests, eos_id=-1, pad_id=PAD, batch_size=1)
    assert [done[row] for row in range(7)] == alone


# ---- windows --------------------------------------------------------------------------------------------------------
@contextmanager
def tensors_kept() -> Iterator[Callable[[], tuple[int, int]]]:
    """Counts the tensors, and their bytes, that are there now and were not before."""
    gc.collect()
    before = {id(held) for held in gc.get_objects() if issubclass(type(held), Tensor)}

    def kept() -> tuple[int, int]:
        gc.collect()
        new = [held for held in gc.get_objects() if issubclass(type(held), Tensor) and id(held) not in before]
        stores = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in new}
        return len(new), sum(stores.values())

    yield kept


@pytest.mark.parametrize("method", ["mars", "mars-verified"])
def test_the_windows_of_prompts_are_not_kept(method: str, model: PreTrainedModel) -> None:
    """Guards against the attention masks of all long prompts: 2 MiB for each prompt of 1,500 tokens."""
    with tensors_kept() as kept:
        for length in range(900, 912):
            decode(model, build_method(method, Options(mask_id=MASK)), [Request(prompt(length), 3, 0.5)], eos_id=-1,
                   pad_id=PAD)  # fmt: skip
        assert kept()[1] < 2 * 2**20


def test_windows_that_recur_are_kept() -> None:
    """Guards against windows that are computed anew at every step, and a store that grows without end."""
    device = torch.device("cpu")
    assert windows.causal(7, device) is windows.causal(7, device)
    assert windows._groups(17, 5, 2, 3, device)[2] is windows._groups(17, 5, 2, 3, device)[2]
    most = window.WIDEST_KEPT
    assert torch.equal(windows.causal(most + 1, device)[:most, :most], windows.causal(most, device))
    sizes = [kept.cache_info().maxsize for kept in window.KEPT]
    assert len(sizes) == 4 and sum(size or 10**9 for size in sizes) * most**2 <= 16 * 2**20


# ---- all of it ------------------------------------------------------------------------------------------------------
def test_memory_is_back_when_all_is_done(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Guards against memory that is left after requests that end, are cancelled, or are refused."""
    draw = random.Random(0)
    soak(model, draft, draw, 30)  # built once: fused weights, windows of decoding steps
    with tensors_kept() as kept:
        soak(model, draft, draw, 200)
        for recurring in window.KEPT:
            recurring.cache_clear()  # another test checks their size
        assert kept() == (0, 0)


def soak(model: PreTrainedModel, draft: PreTrainedModel, draw: random.Random, requests: int) -> None:
    """Random requests through a batch of every kind: each must end, and leave the batch empty."""
    for method, share in (("mars", 0.5), ("mars-verified", 0.25), ("speculative", 0.25)):
        batch, done = a_batch(model, method, draft=draft)
        waiting = list(range(int(requests * share)))
        total = len(waiting)
        while waiting or len(batch):
            arriving = [waiting.pop() for _ in range(min(len(waiting), draw.randint(0, 4), 16 - len(batch)))]
            batch.join({index: random_request(draw, method) for index in arriving})
            here = [seat.index for seat in batch._running.seats.values()]
            if draw.random() < 0.05 and here:
                batch.leave(draw.choice(here))
            if draw.random() < 0.1 and here and method != "speculative":
                batch.turn({draw.choice(here): (draw.random(), 1, False)})
            batch.step()
        assert sorted(done) == list(range(total))
        assert (cache_bytes(batch), row_bytes(batch), len(batch)) == (0, 0, 0)


def random_request(draw: random.Random, method: str) -> Request:
    length = draw.choice([draw.randint(1, 30), draw.randint(1, 30), draw.randint(30, 300)])
    ids = [draw.randint(4, 23) for _ in range(length)]
    threshold = draw.choice([None, draw.random()]) if method != "speculative" else None
    return Request(ids, draw.randint(1, 20), threshold, draw.choice([0.0, 0.0, 1.0]), draw.randint(0, 99))
