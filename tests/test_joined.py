"""Forward passes as on a GPU, tried on the CPU: few operations a layer, and the numbers of the other passes."""

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_graphs import taped
from test_host_reads import Operations
from test_static import EOS, MASK, PAD, SETTINGS, llama, method_of
from tools import packing, qwen2
from transformers import Qwen2ForCausalLM

from marsbench.compiled import graphs as graphs_module
from marsbench.compiled.fixed import Steps
from marsbench.compiled.graphs import Graphs
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.forward import joined
from marsbench.forward.joined import attend, parts_of
from marsbench.methods.carried import carried_over
from marsbench.training.medusa import MedusaHeads

MOST = 18  # operations of one layer in one step
# These launch nothing: they are views of the same memory.
VIEWS = (
    "view", "_unsafe_view", "t", "transpose", "permute", "slice", "select", "split", "split_with_sizes", "unbind",
    "alias", "unsqueeze", "squeeze", "expand", "detach", "as_strided", "_reshape_alias", "flatten", "unflatten",
)  # fmt: skip


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for a GPU."""
    monkeypatch.setattr(joined, "joins", lambda device: True)
    with packing(False):
        yield


def qwen(layers: int = 2, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    model = qwen2(
        3, vocab_size=64, hidden_size=64, num_hidden_layers=layers, intermediate_size=96, tie_word_embeddings=True,
        max_position_embeddings=4096, initializer_range=0.02,
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    return model.to(dtype)


def launches(layers: int, what: str, dtype: torch.dtype, length: int) -> Counter[str]:
    """The operations of one step of fixed shape."""
    model, method = qwen(layers, dtype), method_of(what, {"mask_id": MASK})
    batch = Batch(model, method, eos_id=EOS, pad_id=PAD, on_finished=lambda *_: None, shapes=Steps())
    threshold = 0.3 if what == "mars" else None
    batch.join({row: Request([4 + row, 5] * (length // 2), 20, threshold, ignore_eos=True) for row in (0, 1)})
    batch.step()
    with Operations() as seen:
        batch.step()
    return Counter({name: count for name, count in seen.count.items() if name not in VIEWS})


@pytest.mark.parametrize("length", [20, 300], ids=["one part", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["ar", "mars", "mars-verified, groups"])
def test_a_layer_is_few_operations(what: str, dtype: torch.dtype, length: int) -> None:
    """Guards against steps on a GPU that wait for launches: there were 31 operations a layer, where 18 are enough."""
    fewer, more = launches(2, what, dtype, length), launches(5, what, dtype, length)
    of_three = more - fewer
    assert sum(of_three.values()) <= 3 * MOST, of_three
    assert of_three["addmm"] + of_three["addmm_"] + of_three["mm"] + of_three["linear"] == 3 * 4, "products"


@pytest.mark.parametrize(
    ("what", "begins"), [*product(SETTINGS, [4]), *product(("ar", "mars", "mars-verified, groups"), [240])]
)
def test_the_answers_are_the_same(what: str, begins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against operations saved at the cost of a token: rows of several lengths, one part of keys or several."""
    for model, size in ((qwen(), 64), (llama(0), 32)):
        torch.manual_seed(1)
        parts = {"mask_id": MASK, "draft": copy.deepcopy(model), "heads": MedusaHeads(size, 3)}
        method, threshold = method_of(what, parts), 0.3 if what == "mars" else None
        requests = [Request(([4 + row, 5, 6, 7] * 60)[row:begins], 30 - 3 * row, threshold) for row in range(3)]
        how: dict[str, Any] = {"eos_id": -1, "pad_id": PAD}
        with monkeypatch.context() as patch:
            patch.setattr(joined, "joins", lambda device: False)
            plain = decode(copy.deepcopy(model), method, requests, **how)
        assert decode(model, method, requests, kind=lambda *a, **k: Batch(*a, shapes=Steps(), **k), **how) == plain


@pytest.mark.parametrize("what", ["ar", "mars", "mars-verified, groups", "carried over"])
def test_nothing_waits_for_the_device_in_a_recorded_step(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step that cannot be captured, or reads freed memory: the stand-in raises for both."""
    monkeypatch.setattr(graphs_module, "records_on", lambda device: True)
    monkeypatch.setattr(graphs_module, "recorded", taped)
    model, threshold = qwen(), 0.3 if what in ("mars", "carried over") else None
    method = method_of("mars" if what == "carried over" else what, {"mask_id": MASK})
    if what == "carried over":
        method = carried_over(method, [0, 2, 1], torch.device("cpu"))
    requests = [Request([4 + row, 5, 6], 80, threshold) for row in range(3)]
    graphs = Graphs()
    runs = [decode(model, method, requests, eos_id=-1, pad_id=PAD, kind=graphs.batch) for _ in range(2)]
    assert len(graphs) > 0 and runs[0] == runs[1]
    assert runs[0] == decode(model, method, requests, eos_id=-1, pad_id=PAD) or what == "carried over"


def test_a_model_with_joined_weights_is_saved_whole(tmp_path: Path) -> None:
    """Guards against a checkpoint that lacks weights, or holds them many times, since they share their memory."""
    model = qwen()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    decode(model, method_of("ar", {}), [Request([4, 5, 6], 3)], eos_id=-1, pad_id=PAD)
    model.save_pretrained(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 1.2 * sum(weight.nbytes for weight in model.parameters()) + 10_000
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in before.items())


def test_weights_lie_in_memory_once_and_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second copy of all weights on a GPU, and against joined ones that do not follow the model."""
    model, method = qwen(), method_of("ar", {})

    def answers(of: Any) -> Any:
        return decode(of, method, [Request([4, 5, 6], 12)], eos_id=-1, pad_id=PAD)

    names = [name for name, _ in model.named_parameters()]
    before = answers(model)
    attention = model.model.layers[0].self_attn
    storages = {linear.weight.untyped_storage().data_ptr() for linear in (attention.q_proj, attention.v_proj)}
    assert len(storages) == 1 and [name for name, _ in model.named_parameters()] == names
    torch.manual_seed(9)
    other = {name: torch.randn_like(weight) * 0.1 for name, weight in model.state_dict().items()}
    other["lm_head.weight"] = other["model.embed_tokens.weight"]  # they are tied
    for assign in (False, True):  # written in place, and replaced
        model.load_state_dict(other, assign=assign)
        model.tie_weights()
        with monkeypatch.context() as patch:
            patch.setattr(joined, "joins", lambda device: False)
            fresh = qwen()
            fresh.load_state_dict(other)
            plain = answers(fresh)
        assert answers(model) == plain != before
        other = {name: -weight for name, weight in other.items()}


@pytest.mark.parametrize("slots", [64, 65, 331, 1000, 2055, 8192])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_parts_cover_the_cache(slots: int, rows: int) -> None:
    """Guards against slots that no part holds, and against many slots that are read for nothing."""
    count, length = parts_of(slots, 4 * rows)
    assert slots <= count * length <= slots * 1.25 + 16 and length % 16 == 0
    assert count == 1 if rows == 64 else count >= min(slots // 64, 256 // (4 * rows)) * 3 // 4


@pytest.mark.parametrize("slots", [64, 330, 1024, 8192])
@pytest.mark.parametrize("queries", [1, 7, 28])
def test_parts_of_keys_attend_as_all_of_them_do(slots: int, queries: int) -> None:
    """Guards against parts that are not weighed by their sums, also where one of them sees no key."""
    torch.manual_seed(slots + queries)
    count, length = parts_of(slots, 2)
    q, (k, v) = torch.randn(1, 2, queries, 32), torch.randn(2, 1, 2, count * length, 32)
    mask = torch.zeros(1, 1, queries, count * length)
    seen = torch.randint(1, slots // 2 + 2, (queries,))
    mask.masked_fill_(torch.arange(count * length) >= seen.unsqueeze(1), -1e30)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    parted = [tensor.view(1, 2, count, length, 32).transpose(1, 2).flatten(0, 1) for tensor in (k, v)]
    of_parts = mask.view(1, 1, queries, count, length).permute(0, 3, 1, 2, 4).flatten(0, 1).expand(-1, 2, -1, -1)
    attended, sums = attend(q.expand(count, -1, -1, -1), *parted, of_parts, 0.3)
    merged = (attended * sums.softmax(0).unsqueeze(-1)).sum(0, keepdim=True)
    assert merged.isfinite().all() and torch.allclose(merged, plain, atol=2e-6)
    assert joined.parts_attend(torch.device("cpu"), torch.float32, 32), "else keys are never in parts"
