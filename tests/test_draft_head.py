"""A draft head shows masks the guesses before them, and changes no token of the model's own."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_adapter import noise, noisy, tokens, with_noise
from test_architectures import EOS, MASK, NEW, PAD, SHAPE, prompts
from test_host_reads import reads_of
from test_static import in_flight, llama
from tools import qwen2
from torch import Tensor
from transformers import PreTrainedModel

from marsbench.compiled import graphs as graphs_module
from marsbench.compiled.fixed import Steps
from marsbench.compiled.graphs import Graphs
from marsbench.decoding.acceptance import confidence
from marsbench.decoding.engine import Batch, KindOfBatch, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.reading import _likeliest
from marsbench.errors import UserError
from marsbench.forward.adapter import Adapted, hooked
from marsbench.forward.decoder import LeanDecoder, decoder_of
from marsbench.forward.draft_head import KINDS, DraftHead, HeadInUse, Markov, Network
from marsbench.methods import Options, build_method
from marsbench.methods.mars_lookup import MarsLookup
from marsbench.methods.mixed import Mixed

VOCABULARY = SHAPE["vocab_size"]
LOSSLESS = {
    "groups": ("mars-verified", {}), "linear": ("mars-verified", {"layout": "linear"}), "lookup": ("mars-lookup", {}),
}  # fmt: skip


def knowing(model: PreTrainedModel, kind: str) -> Adapted:
    """A model with noise in its adapter, and a head that knows which token the model has put after which."""
    followers = torch.zeros(VOCABULARY, dtype=torch.long)
    for answer in tokens(run(model, "ar")):
        followers[answer[:-1]] = torch.tensor(answer[1:])
    rows = model.lm_head.weight.detach()[followers]  # [V, H]
    if kind == "markov":
        one_hot = torch.nn.functional.one_hot(followers, VOCABULARY).T
        head: DraftHead = Markov(torch.eye(VOCABULARY), 8.0 * one_hot)
    else:
        torch.manual_seed(13)
        of_token, size = torch.randn(2 * VOCABULARY, model.config.hidden_size), model.config.hidden_size
        embedded = model.get_input_embeddings().weight.detach()
        inside = torch.nn.functional.silu(torch.nn.functional.rms_norm(embedded, (size,)) @ of_token.T)
        out = torch.linalg.lstsq(inside, 8.0 * rows / rows.norm(dim=1, keepdim=True)).solution.T
        head = Network(torch.randn_like(of_token) / 100, of_token, out.contiguous())
    return Adapted(model, replace(noisy(model, 0.3), head=head))


@pytest.fixture
def model() -> PreTrainedModel:
    return qwen2(**SHAPE)


def run(
    model: Any, method: str, kind: KindOfBatch | None = None, *, request: dict[str, Any] | None = None,
    count: int | None = None, **options: Any,
) -> list[Generation]:  # fmt: skip
    """All prompts, or the first `count` of them, in one batch of mixed lengths."""
    chosen = build_method(method, Options(**({"mask_id": MASK, "window": 4, "head_top": VOCABULARY} | options)))
    requests = [Request(prompt, NEW, **(request or {})) for prompt in prompts()[:count]]
    return decode(model, chosen, requests, eos_id=EOS, pad_id=PAD, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_answers_are_the_model_s(kind: str, model: PreTrainedModel) -> None:
    """Guards against a draft drawn with the noise of another place."""
    how = {"temperature": 1.0, "seed": 3, "top_k": 9}
    alone = tokens(run(model, "ar", request=how))
    for layout in ("groups", "linear"):
        assert tokens(run(with_noise(model, kind), "mars-verified", request=how, layout=layout)) == alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["groups", "linear", "lookup"])
def test_fixed_shapes_say_what_fitted_ones_do(layout: str, kind: str, model: PreTrainedModel) -> None:
    """Guards against fillers that are taken for masks."""
    method, options = LOSSLESS[layout]
    adapted = knowing(model, kind)
    eager = run(adapted, method, **options)
    assert eager != run(Adapted(model, replace(adapted.adapter, head=None)), method, **options)
    assert run(adapted, method, partial(Batch, shapes=Steps()), **options) == eager
    assert tokens(eager) == tokens(run(model, "ar"))


@pytest.mark.slow
def test_graphs_say_what_fitted_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a graph that leaves the head out, was made for another one, or reads logits before they change."""
    monkeypatch.setattr(graphs_module, "_BACKEND", "aot_eager")
    method, options = LOSSLESS["linear"]
    model = qwen2(**SHAPE | {"num_hidden_layers": 1})
    graphs, knows = Graphs(), knowing(model, "markov")
    for adapted in (knows, Adapted(model, replace(knows.adapter, head=None)), model, knows):
        captured = run(adapted, method, graphs.batch, count=1, **options)  # one row: one shape to compile for each
        assert captured == run(adapted, method, count=1, **options)
    assert len(graphs) == 3


def test_a_row_alone_reads_no_masks_in_vain(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against small steps of a head whose guesses are not used, and missing guesses that would be used."""
    adapted, read = with_noise(model, "network"), list[int]()
    behind = HeadInUse.behind

    def counted(head: HeadInUse, states: Tensor, ids: Tensor, logits: Tensor) -> Any:
        read.append(states.shape[1])
        return behind(head, states, ids, logits)

    monkeypatch.setattr(HeadInUse, "behind", counted)
    method = build_method("mars-verified", Options(mask_id=MASK, layout="linear"))
    (generation,) = decode(adapted, method, [Request(prompts()[0], NEW)], eos_id=EOS, pad_id=PAD)
    assert generation.forwards == NEW, "drafts of noise are wrong"
    assert read == [3] * (NEW // 2 + 1), "in every other forward masks have seen no wrong draft, and in the last one"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_one_packed_tensor(kind: str) -> None:
    """Guards against a chain of guesses that reads each of them from the device."""
    method = build_method("mars-verified", Options(mask_id=MASK))
    batch = in_flight(with_noise(llama(0), kind), method)
    for reads in reads_of(batch, 4):
        assert reads.count.total() == 1, dict(reads.count)


def heeding(head: DraftHead, model: Any, logits: Tensor, state: Tensor, before: int) -> Tensor:
    """Logits [V] of one mask after a token, over the whole vocabulary, as the kinds of heads are defined."""
    if isinstance(head, Markov):
        return logits + head.before[before] @ head.after.T

    def normed(values: Tensor) -> Tensor:
        return values / (values.square().mean() + torch.finfo(values.dtype).eps).sqrt()

    assert isinstance(head, Network)
    embedded: Tensor = model.get_input_embeddings()(torch.tensor(before))
    inside = head.of_state @ normed(state) + head.of_token @ normed(embedded)
    heeded: Tensor = model.lm_head(state + head.out @ torch.nn.functional.silu(inside))
    return heeded


@torch.no_grad()
def one_by_one(adapted: Adapted, prompt: list[int], threshold: float, block: int) -> list[list[int]]:
    """What each forward of `mars` accepts, by the model's own forward pass over all of the text and its masks."""
    text, steps = list(prompt), list[list[int]]()
    head, model = adapted.adapter.head, adapted.model
    assert head is not None
    while sum(map(len, steps)) < NEW:
        ids = torch.tensor([[*text, *[MASK] * (block - 1)]])
        with hooked(model, adapted.adapter, torch.arange(ids.shape[1]).unsqueeze(0) >= len(text)):
            states = model.get_decoder()(input_ids=ids).last_hidden_state[0, len(text) - 1 :]
        logits = model.lm_head(states)
        accepted = [int(logits[0].argmax())]
        for state, its in zip(states[1:], logits[1:], strict=True):
            heeded = heeding(head, model, its, state, accepted[-1])
            if confidence(heeded, "probability") < threshold:
                break
            accepted.append(int(heeded.argmax()))
        steps.append(accepted)
        text += accepted
    return steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_modules", [False, True])
def test_thresholded_decoding_heeds_the_head(by_modules: bool, kind: str, model: PreTrainedModel) -> None:
    """Guards against a guess that depends on the wrong token, and a threshold without the head."""
    if by_modules:
        model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    adapted = knowing(model, kind)
    assert isinstance(decoder_of(adapted), LeanDecoder) != by_modules
    generations = run(adapted, "mars", request={"threshold": 0.2})
    several = False
    for prompt, generation in zip(prompts(), generations, strict=True):
        steps = one_by_one(adapted, prompt, 0.2, 4)
        assert generation.tokens == [token for step in steps for token in step][:NEW]
        assert generation.accepted[:-1] == [len(step) for step in steps][:-1]
        several |= any(len(step) > 2 for step in steps)
    assert several, "some forward goes on after a guess"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_heed_it_as_they_do_alone(kind: str, model: PreTrainedModel) -> None:
    """Guards against rows that use each other's tokens, a server's masks without their head, and an unused option."""
    adapted = knowing(model, kind)
    for method in ("mars", "mars-no-cache", "mars-block-cache", "mars-verified"):
        chosen = build_method(method, Options(mask_id=MASK, head_top=VOCABULARY))
        together = run(adapted, method, request={"threshold": 0.2})
        for prompt, generation in zip(prompts(), together, strict=True):
            request = Request(prompt, NEW, threshold=0.2)
            assert decode(adapted, chosen, [request], eos_id=EOS, pad_id=PAD) == [generation]
    assert run(adapted, "mars", request={"threshold": 0.2}) == run(adapted, "mars-no-cache", request={"threshold": 0.2})
    every, mixed = prompts(), Mixed(MASK, head_top=VOCABULARY)
    requests = [
        Request(every[0], NEW, threshold=0.2, window=4),
        Request(every[1], NEW, window=1),
        Request(every[2], NEW, threshold=0.2, window=3, verified=True),
    ]
    generations = decode(adapted, mixed, requests, eos_id=EOS, pad_id=PAD)
    ways = [("mars", {}), ("ar", {}), ("mars-verified", {"layout": "linear", "window": 3})]
    for (method, options), request, generation in zip(ways, requests, generations, strict=True):
        chosen = build_method(method, Options(**({"mask_id": MASK, "window": 4, "head_top": VOCABULARY} | options)))
        assert decode(adapted, chosen, [request], eos_id=EOS, pad_id=PAD) == [generation]
    alone, mars = Adapted(model, replace(adapted.adapter, head=None)), {"request": {"threshold": 0.0}}
    (few, *_), (every, *_) = (run(adapted, "mars", **mars, head_top=top) for top in (2, VOCABULARY))
    assert few != every
    lowered = Markov(torch.eye(VOCABULARY), torch.full((VOCABULARY, VOCABULARY), -50.0))  # which a softmax cannot see
    blind = Adapted(model, replace(adapted.adapter, head=lowered))
    for top in (2, 16):
        assert tokens(run(blind, "mars", **mars, head_top=top)) == tokens(run(alone, "mars", **mars))


def test_extensions_of_speculative_decoding_heed_it(model: PreTrainedModel) -> None:
    """Guards against an extension after another token than the verified one, and a head of other sizes."""
    adapted, draft = knowing(model, "markov"), qwen2(1, **SHAPE | {"num_hidden_layers": 1})
    plain = tokens(run(model, "ar"))
    assert tokens(run(adapted, "mars-speculative", draft=draft)) == plain
    bold = {"request": {"threshold": 0.0}, "draft": draft, "draft_length": 1}
    alone = Adapted(model, replace(adapted.adapter, head=None))
    assert tokens(run(adapted, "mars-speculative", **bold)) != tokens(run(alone, "mars-speculative", **bold))
    for kind, size in (("markov", {"vocab_size": 80}), ("network", {"hidden_size": 64})):
        with pytest.raises(UserError, match="draft head is of another size"):
            Adapted(model, replace(noisy(model), head=noise(kind, qwen2(**SHAPE | size), 1.0)))


@pytest.mark.parametrize("vocabulary", [96, 3200, 4999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_of_a_mask_are_the_largest(vocabulary: int, dtype: torch.dtype) -> None:
    """Guards against a search in two parts that leaves out a token, or returns another one."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, vocabulary).to(dtype)
    values, ids = _likeliest(logits, 16)
    assert torch.equal(values.sort(descending=True).values, logits.topk(16).values)
    assert torch.equal(logits.gather(-1, ids), values) and ids.sort().values.diff().min() > 0


def test_lookup_asks_its_masks_for_what_it_was_asked() -> None:
    """Guards against an option that reaches the masks under the name of another."""
    lookup = MarsLookup(MASK, window=3, metric="margin", layout="linear", head_top=7)
    assert [getattr(lookup, name) for name in ("metric", "layout", "head_top", "groups")] == ["margin", "linear", 7, 3]
