"""What is computed in C++: the results of torch, and those of each entry alone."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from marsbench.compiled import graphs as graphs_module
from marsbench.compiled.graphs import Graphs
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.fetching.models import CACHE_VARIABLE
from marsbench.forward import fastest
from marsbench.forward import linear as linear_module
from marsbench.forward import native as native_module
from marsbench.forward.decoder import LeanDecoder, decoder_of
from marsbench.forward.linear import packing_in_words
from marsbench.forward.native import VARIABLE, cpp_compiler, is_native, pack, why_not_native
from marsbench.methods import Options, build_method

MASK, HEADS, KV_HEADS, SIZE = 3, 4, 2, 32
HEAD_SIZES = (16, 32, 64, 80, 128)
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256,
    "initializer_range": 0.3,
}  # fmt: skip
PROMPTS = [[5 + (7 * row + place) % 80 for place in range(4 + 3 * row)] for row in range(6)]
native = pytest.mark.skipif(not is_native(), reason=f"not built here: {why_not_native()}")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """C++ is used, even where torch is faster; the library is looked for anew."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(linear_module, "COPIES", WeakValueDictionary())  # without other tests' models
    yield
    monkeypatch.undo()
    why_not_native.cache_clear()
    torch._dynamo.reset()  # compiled steps hold their models, and so their copies
    gc.collect()


@pytest.fixture(params=[LlamaForCausalLM, Qwen2ForCausalLM])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param(request.param.config_class(**SHAPE)).eval()


def tokens(model: Any, name: str, batch_size: int, **options: Any) -> list[list[int]]:
    method = build_method(name, Options(mask_id=MASK, **options))
    requests = [Request(prompt, 40) for prompt in PROMPTS]
    generations = decode(model, method, requests, eos_id=2, pad_id=0, batch_size=batch_size)
    return [generation.tokens for generation in generations]


@native
@pytest.mark.parametrize("name", ["ar", "mars-verified", "jacobi", "prompt-lookup", "mars-no-cache"])
def test_tokens_are_those_of_torchs_operations(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a wrong rotation, slot, filler or norm in native code."""
    by_native = tokens(model, name, 4)
    decoder = decoder_of(model)
    assert isinstance(decoder, LeanDecoder) and decoder._is_native
    assert packing_in_words()["packing"]["by"] == ["native"]
    monkeypatch.setenv(VARIABLE, "0")
    assert tokens(model, name, 4) == by_native
    assert packing_in_words() == {}


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 48), (130, 16), (576, 960)])
def test_a_product_is_right_and_the_same_in_any_batch(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Guards against blocks or positions left out, sums that depend on the window, a state of the CPU left behind."""
    torch.manual_seed(0)
    values, weight, bias = (torch.randn(*size).to(dtype) for size in ((64, inputs), (outputs, inputs), (outputs,)))
    product, packed = torch.ops.marsbench.product, pack(weight)
    by_torch = F.linear(values, weight)
    for added in (None, bias):
        together = product(values, packed, added)
        exact = values.double() @ weight.double().t() + (0 if added is None else added.double())
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(together.double(), exact, rtol=tolerance, atol=tolerance * inputs**0.5)
        for most in range(1, 40):
            parts = [product(part, packed, added) for part in values.split(most)]
            assert torch.equal(torch.cat(parts), together), most
    down = torch.randn(48, inputs).to(dtype) / inputs  # the first layer has 16, the second none, the last 32
    ups = [torch.randn(size, rank).to(dtype) for size, rank in ((16, 16), (outputs - 16 - 16 * (outputs > 16), 0))]
    ups += [torch.randn(16, 32).to(dtype)] * (outputs > 16)
    up = torch.block_diag(*ups)
    gate = torch.arange(64).view(-1, 1).remainder(3).eq(0).to(dtype)
    maps = pack(down), [*map(pack, ups)]
    adapted = torch.ops.marsbench.adapted(values, packed, bias, *maps, gate)
    for most in (1, 9, 16, 17, 33):
        each = zip(values.split(most), gate.split(most), strict=True)
        parts = [torch.ops.marsbench.adapted(part, packed, bias, *maps, gates) for part, gates in each]
        assert torch.equal(torch.cat(parts), adapted), most
    assert torch.equal(F.linear(values, weight), by_torch)
    down = down[: up.shape[1]]
    kept, together = gate[:, 0].bool(), product(values, packed, bias)
    assert torch.equal(adapted[~kept], together[~kept])
    change = (values.double() @ down.double().t()) @ up.double().t()
    expected = together.double() + change
    torch.testing.assert_close(adapted[kept].double(), expected[kept], rtol=tolerance, atol=5 * tolerance * inputs**0.5)
    assert not torch.allclose(adapted[kept], together[kept], rtol=tolerance, atol=tolerance)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_prompt_gives_the_same_bits_however_it_comes(dtype: torch.dtype) -> None:
    """Guards against another kernel for many positions, whose sums depend on their number."""
    torch.manual_seed(0)
    layer, values = torch.nn.Linear(64, 96, dtype=dtype), torch.randn(150, 64, dtype=dtype)
    site = linear_module.Site({"layer": layer})
    linear_module.pack_sites([site])
    assert site.copy is not None
    (together,), parts = site(values), [site(part)[0] for part in values.split([1, 63, 86])]
    assert torch.equal(together, torch.cat(parts))


def verified_as_ar(head_size: int) -> None:
    """Verified answers of a model in bf16 are those of `ar`, in every layout and batch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "head_dim": head_size})).to(torch.bfloat16).eval()
    with torch.no_grad():
        expected = tokens(model, "ar", 1)
        for batch_size in (1, 4):
            assert tokens(model, "ar", batch_size) == expected
            for layout in ("groups", "linear"):
                assert tokens(model, "mars-verified", batch_size, window=4, layout=layout) == expected


def slower_than_torch() -> list[str]:
    """Where the product that is chosen here takes over 1.5 times as long as torch's, twice in a row."""
    return [
        f"{dtype} at {positions} positions"
        for dtype in fastest.DTYPES.values()
        for positions in (1, 4, 16, 64)
        if positions <= fastest.most_positions(dtype)
        and all(fastest._measured(dtype, positions) > 1.5 for _ in range(2))
    ]


@native
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_verified_is_ar_in_bf16_too(head_size: int) -> None:
    """Guards against near ties that another token wins because of the entries beside it."""
    verified_as_ar(head_size)


@native
def test_the_chosen_product_is_not_slower_than_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a kernel that is fast on one kind of CPU and slow on this one."""
    monkeypatch.delenv(VARIABLE)
    assert slower_than_torch() == []


@native
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has been tried")
def test_a_cpu_without_avx512_is_served_as_well() -> None:
    """Guards against tiles for AVX-512's registers only, or AMX used unchecked: slower than torch, or wrong answers."""
    script = """
import test_native as t
[*map(t.verified_as_ar, (16, 80))]
print(t.native_module.instructions(), t.slower_than_torch())
"""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    env.pop(VARIABLE, None)
    options: Any = {"cwd": Path(__file__).parent, "env": env, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", script], **options)
    assert run.stdout.splitlines()[-1:] == ["AVX2 []"], run.stdout + run.stderr


@native
def test_what_is_timed_beside_other_work_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a choice that is timed beside other work and stays: a product twice as slow from then on."""
    monkeypatch.setattr(fastest, "library", lambda: tmp_path / "native.so")

    def at_64(others: float, ratio: float) -> float:
        fastest._times.cache_clear()
        monkeypatch.setattr(fastest, "others_cores", lambda: others)
        monkeypatch.setattr(fastest, "_measured", lambda *_: ratio)
        return fastest._times(1)["float32"]["64"]

    assert at_64(1.5, 3.8) == at_64(0.0, 0.7) == 3.8, "for an hour"
    (busy,) = tmp_path.iterdir()
    os.utime(busy, (0, 0))
    assert at_64(0.0, 0.7) == at_64(1.5, 3.8) == 0.7, "for good"
    fastest._times.cache_clear()


@native
def test_a_product_that_loses_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a choice by the name of a CPU, and a sum in bf16 that depends on the number of positions."""
    monkeypatch.delenv(VARIABLE)
    for few, many, taken in (
        (1.5, 0.5, (0, 0)),
        (0.5, 1.5, (fastest.FEW, fastest.EVERY)),
        (0.5, 0.5, (fastest.EVERY,) * 2),
    ):
        times = {name: {"1": 0.9, "8": few, "64": many} for name in fastest.DTYPES}
        monkeypatch.setattr(fastest, "_times", lambda _, times=times: times)
        assert tuple(map(fastest.most_positions, fastest.DTYPES.values())) == taken
    values = torch.randn(fastest.FEW + 1, 64)
    site = linear_module.Site({"layer": torch.nn.Linear(64, 96)})
    linear_module.pack_sites([site])
    assert site.copy is not None
    site.copy.most = fastest.FEW
    monkeypatch.setattr(linear_module, "product", lambda values, *_: values.new_zeros(len(values), 96))
    with torch.no_grad():
        assert site(values)[0].any() and not site(values[1:])[0].any()


def attended(every: Tensor, turned: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], entries: list[int]) -> Tensor:
    """The attention of a window's entries behind 37 cached slots: each sees itself and what is before it."""
    begin, width = 37, len(entries)
    slots = torch.arange(begin, begin + width)
    keys, values = (part.clone() for part in cache)
    chosen = torch.tensor(entries)
    attention: Tensor = torch.ops.marsbench.attention(
        every[chosen], turned[0][chosen], turned[1][chosen], keys, values, torch.arange(width), slots,
        torch.tensor([begin]), torch.ones(width, width, dtype=torch.bool).tril(), begin + width, SIZE**-0.5,
    )  # fmt: skip
    return attention


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_gets_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Guards against sums whose order depends on the window."""
    torch.manual_seed(0)
    every = torch.randn(20, (HEADS + 2 * KV_HEADS) * SIZE).to(dtype)
    turned = torch.randn(20, 1, SIZE).to(dtype), torch.randn(20, 1, SIZE).to(dtype)
    keys, values = (torch.randn(1, 80, KV_HEADS, SIZE).to(dtype) for _ in range(2))
    together = attended(every, turned, (keys, values), [*range(20)])
    for most in range(1, 20):
        assert torch.equal(attended(every, turned, (keys, values), [*range(most)]), together[:most])
    hidden, change, weight = (torch.randn(20, 128).to(dtype) for _ in range(3))
    normed = torch.ops.marsbench.norm(hidden.clone(), change, weight[0], 1e-5)
    acted = torch.ops.marsbench.swiglu(hidden, change)
    for row in range(20):
        at = slice(row, row + 1)
        assert torch.equal(torch.ops.marsbench.norm(hidden[at].clone(), change[at], weight[0], 1e-5), normed[at])
        assert torch.equal(torch.ops.marsbench.swiglu(hidden[at], change[at]), acted[at])


@native
def test_bounds_and_odd_sizes_are_kept_to() -> None:
    """Guards against reads before a row's first slot or behind the last, and sizes cut to a multiple of a vector's."""
    every, turned = torch.randn(4, (HEADS + 2 * KV_HEADS) * SIZE), torch.ones(4, 1, SIZE)
    keys, values = torch.zeros(2, 3, KV_HEADS, SIZE), torch.zeros(2, 3, KV_HEADS, SIZE)
    visible = torch.ones(2, 2, dtype=torch.bool).tril()
    output = torch.ops.marsbench.attention(
        every, turned, turned, keys, values, torch.arange(4), torch.tensor([2, 0, 4, 5]), torch.tensor([-1, 1]),
        visible, 2, SIZE**-0.5,
    )  # fmt: skip
    assert output.isfinite().all() and not output[0].any() and output[1].any()
    sizes = {**SHAPE, "hidden_size": 96, "intermediate_size": 100}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    decoder = decoder_of(model)
    assert isinstance(decoder, LeanDecoder) and not decoder._is_native
    assert tokens(model, "mars-verified", 2) == tokens(model, "ar", 1)


def test_it_is_left_where_there_is_no_compiler(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against decoding that fails where there is no compiler."""
    expected = tokens(model, "ar", 1)
    why_not_native.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not_native() == "there is no C++ compiler" and not is_native()
    assert tokens(model, "ar", 1) == expected


def left_in(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix != ".lock"]


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_what_does_not_build_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against half a library that the next process loads, and a reason that is not shown."""
    why_not_native.cache_clear()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    broken = tmp_path / "broken.cpp"
    broken.write_text("int twice(int x) { return 2 * y; }\n", encoding="utf-8")
    monkeypatch.setattr(native_module, "_SOURCES", [broken])
    assert "does not build them" in why_not_native() and "error" in why_not_native()
    assert left_in(tmp_path / "cache") == []
    why_not_native.cache_clear()
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert "cannot be built or loaded" in why_not_native()


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_several_build_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a process that loads a half-written library, or waits for a killed process."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    small = tmp_path / "small.cpp"
    small.write_text("int twice(int x) { return 2 * x; }\n", encoding="utf-8")
    monkeypatch.setattr(native_module, "_SOURCES", [small])
    with ThreadPoolExecutor(3) as pool:
        built = {*pool.map(lambda _: native_module.library(), range(3))}
    assert len(built) == 1 and left_in(tmp_path / "cache") == [*built]


@native
def test_graphs_have_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against compiled steps that are slower than eager ones, and graphs that copy the cache to write it."""
    monkeypatch.setattr(graphs_module, "_BACKEND", "aot_eager")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"num_hidden_layers": 1})).eval()
    graphs, requests = Graphs(), [Request(prompt, 20) for prompt in PROMPTS[:3]]
    for name in ("ar", "mars-verified"):
        method = build_method(name, Options(mask_id=MASK))
        kinds = Batch, graphs.batch
        eager, compiled = (decode(model, method, requests, eos_id=2, pad_id=0, kind=kind) for kind in kinds)
        assert compiled == eager
    assert len(graphs) >= 2
