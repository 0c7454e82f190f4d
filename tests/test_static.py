"""Steps of fixed shape: the same tokens as the eager loop's, no number read in between, one graph per shape."""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import tools
import torch
from test_host_reads import reads_of
from transformers import LlamaForCausalLM, PreTrainedModel

from marsbench.compiled import graphs as graphs_module
from marsbench.compiled.fixed import FixedRows, Steps
from marsbench.compiled.graphs import Graphs, why_not
from marsbench.decoding.engine import Batch, Method
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.forward.native import cpp_compiler
from marsbench.methods import METHODS, Options, build_method
from marsbench.training.medusa import MedusaHeads

EOS, PAD, MASK, VOCABULARY = 2, 0, 3, 48
REQUESTS = 60

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ar": ("ar", {}), "mars": ("mars", {}), "mars-verified, groups": ("mars-verified", {}),
    "mars-verified, two groups": ("mars-verified", {"groups": 2}),
    "mars-verified, linear": ("mars-verified", {"layout": "linear", "window": 3}), "uno": ("uno", {"window": 3}),
    "speculative": ("speculative", {"draft_length": 3}), "mars-speculative": ("mars-speculative", {"draft_length": 2}),
    "medusa, chain": ("medusa", {}), "medusa, tree": ("medusa", {"tree_width": 3}), "jacobi": ("jacobi", {}),
    "prompt-lookup": ("prompt-lookup", {}), "mars-lookup, groups": ("mars-lookup", {"window": 3, "draft_length": 2}),
    "mars-lookup, linear": ("mars-lookup", {"layout": "linear", "window": 3, "draft_length": 2}),
}  # fmt: skip


def llama(seed: int, layers: int = 1) -> Any:
    sizes = {"vocab_size": VOCABULARY, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers}
    return tools.llama(seed, **sizes, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama(0)


@pytest.fixture(scope="module")
def given(model: LlamaForCausalLM) -> dict[str, Any]:
    """What methods need of a checkpoint: a draft model that is sometimes right, and heads."""
    draft = llama(0)
    with torch.no_grad():
        draft.model.embed_tokens.weight.add_(torch.randn_like(draft.model.embed_tokens.weight), alpha=0.1)
    torch.manual_seed(1)
    return {"mask_id": MASK, "draft": draft, "heads": MedusaHeads(32, 3)}


def method_of(what: str, given: dict[str, Any]) -> Any:
    name, options = SETTINGS[what]
    return build_method(name, Options(**given, **options))


class Traffic:
    """Random requests that join, leave and change their thresholds, in the same way for every kind of batch."""

    def __init__(self, kind: Callable[..., Any], model: PreTrainedModel, method: Any, seed: int, count: int) -> None:
        self.random, self.count, self.thresholds = random.Random(seed), count, METHODS[method.name].takes_threshold
        self.done: dict[int, Generation] = {}
        self.told: dict[int, list[int]] = {}
        self.meter = Meter()
        self.batch = kind(
            model, method, eos_id=[EOS, EOS + 2], pad_id=PAD, meter=self.meter,
            on_finished=self.done.__setitem__, on_tokens=lambda index, new: self.told.setdefault(index, []).extend(new),
        )  # fmt: skip

    def run(self) -> None:
        joined, rounds = 0, 0
        while joined < self.count or len(self.batch):
            if joined < self.count and rounds % 3 == 0:
                new = min(self.random.choice([0, 1, 1, 2, 5]), self.count - joined)
                self.batch.join({joined + place: self._request() for place in range(new)})
                joined += new
            self.batch.step()
            rounds += 1
            if rounds % 17 == 0 and joined:
                self.batch.leave(self.random.randrange(joined))
            if self.thresholds and rounds % 5 == 0 and joined:
                self.batch.turn({self.random.randrange(joined): (self.random.choice([None, 0.3, 0.9]), 1, False)})

    def _request(self) -> Request:
        choose = self.random
        tokens = [choose.randrange(4, VOCABULARY) for _ in range(choose.choice([1, 2, 9, 30]))]
        return Request(
            tokens, max_new_tokens=choose.choice([1, 2, 7, 40, 70]),
            threshold=choose.choice([None, 0.3, 0.7]) if self.thresholds else None,
            temperature=choose.choice([0.0, 0.0, 0.0, 1.0]),
            seed=(seed := choose.randrange(100)), top_k=3 * (seed % 3), top_p=(0.8, 1.0)[seed % 2],
        )  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
def test_fixed_shapes_change_no_token(what: str, model: LlamaForCausalLM, given: dict[str, Any]) -> None:
    """Guards against fillers that are read, rows that go on after their end, and seats that are mixed up."""
    runs = []
    for kind in (Batch, partial(Batch, shapes=Steps())):
        traffic = Traffic(kind, model, method_of(what, given), seed=7, count=REQUESTS)
        traffic.run()
        runs.append(traffic)
    eager, static = runs
    assert len(static.done) == REQUESTS
    assert (static.done, static.told) == (eager.done, eager.told)
    assert static.meter.forwards == eager.meter.forwards and static.meter.positions == eager.meter.positions


def in_flight(model: PreTrainedModel, method: Method, shapes: Steps | None = None) -> Batch:
    """Three rows that have just joined, and stay for long."""
    shapes = Steps() if shapes is None else shapes
    batch = Batch(model, method, eos_id=-1, pad_id=PAD, on_finished=lambda *_: None, shapes=shapes)
    threshold = 0.3 if METHODS[method.name].takes_threshold else None
    batch.join({row: Request([4 + row, 5, 6, 4 + row, 5][row:], 300, threshold) for row in range(3)})
    return batch


def tokens_of(batch: Batch) -> dict[int, list[int]]:
    """The tokens of the requests in flight."""
    return {seat.index: seat.tokens for seat in batch._running.seats.values()}


def verify(graphs: Graphs, model: PreTrainedModel, method: Method) -> None:
    """Check that the first steps give the same tokens as graphs and without graphs."""
    batch, plain = (in_flight(model, method, shapes) for shapes in (graphs, None))
    for _ in range(4):
        batch.step()
        plain.step()
    assert tokens_of(batch) == tokens_of(plain)


@pytest.mark.parametrize("what", SETTINGS)
def test_a_step_reads_one_packed_tensor(what: str, model: LlamaForCausalLM, given: dict[str, Any]) -> None:
    """Guards against reads that creep into a step: each waits for the device."""
    batch = in_flight(model, method_of(what, given))
    for reads in reads_of(batch, 6):
        assert reads.count.total() == 1, dict(reads.count)


@pytest.mark.parametrize("what", SETTINGS)
def test_a_step_is_one_graph(
    what: str, model: LlamaForCausalLM, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against graph breaks (each would raise), and against shapes that are compiled twice."""
    monkeypatch.setattr(graphs_module, "_BACKEND", "eager")
    graphs = Graphs()
    verify(graphs, model, method_of(what, given))
    assert len(graphs) == 1


def test_answers_outlive_a_failed_step(model: LlamaForCausalLM, given: dict[str, Any]) -> None:
    """Guards against rows whose end was read in a step that then fails, and is never told of."""
    done: dict[int, Generation] = {}
    batch = Batch(model, method_of("ar", given), eos_id=-1, pad_id=PAD, on_finished=done.__setitem__,
                  shapes=lambda *of: FixedRows(Steps(), *of[:2], records=True))  # fmt: skip
    batch.join({row: Request([5, 6, 8], limit) for row, limit in enumerate((3, 4, 20))})
    with patch("marsbench.compiled.fixed.Stand", side_effect=MemoryError):
        for _ in range(6):
            with suppress(MemoryError):
                batch.step()
    assert [*done] == [0, 1]


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_compiled_steps_follow_the_model(given: dict[str, Any]) -> None:
    """Guards against graphs that keep the weights, or skip the hooks, of the model that they were made for."""
    model, other, graphs = llama(0), llama(5), Graphs()
    same = partial(verify, graphs, model, method_of("mars", given))
    same()
    model.load_state_dict(other.state_dict(), assign=True)
    model.tie_weights()
    same()
    with torch.no_grad():
        model.model.norm.weight.neg_()
    same()
    assert len(graphs) == 1
    hook = model.model.layers[0].register_forward_hook(lambda module, inputs, output: -output)
    same()
    hook.remove()
    same()


def test_other_architectures_have_a_reason(given: dict[str, Any]) -> None:
    """Guards against a graph of modules whose hooks and adapters it would not see."""
    model = llama(0)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "plain Qwen2 and Llama" in why_not(model, method_of("ar", given))
