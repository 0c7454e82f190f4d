"""MARS in one file, held to the golden vectors; and the trainer and the decode loop, held to that file."""

import ast
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tools
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_training_losses import gradient_norm
from torch import Tensor
from transformers import PreTrainedModel

from marsbench import reference
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.files import PACKAGE
from marsbench.forward.adapter import Adapted, Adapter
from marsbench.forward.draft_head import Markov
from marsbench.methods import Options, build_method
from marsbench.reference import Metric, Model, Reply
from marsbench.training.data import Collator
from marsbench.training.objectives import ar_loss, mars_loss
from marsbench.training.stages import Alignment, BlocksFrom
from marsbench.training.visibility import blocks_of_responses

MASK, EOS, PAD = 3, 2, 0
VOCABULARY = 40
DECODERS: dict[str, Callable[..., Reply]] = {"mars": reference.decode, "mars-verified": reference.decode_verified}


def plain(model: PreTrainedModel) -> Model:
    """A transformers model in the reference's form: for one sequence, with an explicit mask."""

    def logits(ids: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        hidden = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        output = model(input_ids=ids[None], position_ids=position[None], attention_mask=hidden[None, None])
        values: Tensor = output.logits[0]
        return values

    return logits


def random_model(seed: int) -> PreTrainedModel:
    """A small model with weights so large that it is sometimes sure, sometimes unsure."""
    return tools.qwen2(
        seed, vocab_size=VOCABULARY, intermediate_size=64, initializer_range=0.3, eos_token_id=EOS, pad_token_id=PAD,
        bos_token_id=None,
    )  # fmt: skip


def random_batch(seed: int, rows: int) -> tuple[Tensor, Tensor, list[int]]:
    """Sequences of several turns: ids and labels [N, L], padded on the right, and how long each of them is."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(8, 30, (), generator=rng)) for _ in range(rows)]
    ids, labels = torch.full((rows, max(sizes)), PAD), torch.full((rows, max(sizes)), -100)
    for row, size in enumerate(sizes):
        ids[row, :size] = torch.randint(4, VOCABULARY, (size,), generator=rng)
        cuts = sorted(torch.randint(1, size - 1, (3,), generator=rng).tolist())
        for begin, end in ((cuts[0], cuts[1]), (cuts[2], size)):
            labels[row, begin:end] = ids[row, begin:end]
    return ids, labels, sizes


def by_reference(
    method: str, model: PreTrainedModel, prompts: list[list[int]], block_size: int, limit: int, **settings: Any
) -> list[Reply]:
    settings |= {"mask_id": MASK, "eos_id": EOS, "block_size": block_size, "max_new_tokens": limit}
    return [DECODERS[method](plain(model), prompt=prompt, **settings) for prompt in prompts]


def same(answers: list[Reply], generations: list[Generation], prompts: list[list[int]]) -> None:
    """Checks that tokens agree, and the forward that brought each of them."""
    for answer, generation, prompt in zip(answers, generations, prompts, strict=True):
        emitted = generation.tokens + [EOS] * (generation.finish == "eos")
        assert answer.text[len(prompt) :] == emitted
        assert answer.accepted == generation.accepted
        assert answer.tokens_per_forward == generation.tokens_per_forward


# ---- the reference against the authors' vectors ----------------------------------------------------------------------
def test_the_mask_is_the_authors(golden: dict[str, Any]) -> None:
    """Guards against a reference whose masks see their own answer, or miss the clean prefix."""
    for entry in golden["attention_masks"]:
        length = entry["length"]
        noisy_first = torch.tensor([[cell == "1" for cell in row] for row in entry["rows"]])
        block = reference.blocks_of_sequence(length, entry["block_size"])
        assert torch.equal(reference.training_mask(block), noisy_first.roll((length, length), (0, 1)))


@pytest.mark.parametrize("entry", range(12))
def test_the_loss_is_the_authors(entry: int, golden: dict[str, Any], golden_models: tools.Models) -> None:
    """Guards against a wrong shift, mean or weight in the loss as released."""
    recorded, model = golden["losses"][entry], golden_models["mars"]
    ids, labels = torch.tensor(recorded["input_ids"]), torch.tensor(recorded["labels"])
    block = reference.blocks_of_sequence(ids.shape[1], recorded["block_size"])
    each = [
        reference.mars_loss(plain(model), row, label != -100, block, MASK).total(recorded["ar_weight"])
        for row, label in zip(ids, labels, strict=True)
    ]
    loss = torch.stack(each).mean()
    assert loss.item() == pytest.approx(recorded["loss"], rel=1e-4)
    assert gradient_norm(model, loss) == pytest.approx(recorded["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("index", [*range(21), 45, 46])
def test_decoding_is_the_authors(index: int, golden: dict[str, Any], golden_models: tools.Models) -> None:
    """Guards against any token or forward of the sliding window, or of AR, that differs from the authors' samplers."""
    recorded = golden["decoding"][index]
    assert recorded["sampler"] in ("sliding_window", "sliding_window_cached", "greedy_ar")
    answers = by_reference(
        "mars", golden_models[recorded.get("checkpoint", "mars")], golden["prompts"][:8], recorded.get("block_size", 1),
        golden["max_new_tokens"], threshold=recorded.get("threshold"), metric=recorded.get("metric", "probability"),
    )  # fmt: skip
    for answer, prompt, row in zip(answers, golden["prompts"], recorded["rows"], strict=False):
        assert [token for token in answer.text[len(prompt) :] if token != EOS] == row["tokens"]
        assert len(answer.accepted) == row.get("forwards", len(answer.accepted))


# ---- training and decoding against the reference ---------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(1, 9), st.sampled_from(["released", "paper"]),
    st.sampled_from(["sequence", "response"]), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_the_trainers_losses_are_the_references(
    seed: int, block_size: int, alignment: Alignment, blocks_from: BlocksFrom, ar_weight: float
) -> None:
    """Guards against a shortened noisy stream, a shift, a mean or a mask that is not what the definition says."""
    model, (ids, labels, sizes) = random_model(seed), random_batch(seed, 3)
    losses = mars_loss(
        model, ids, labels, block_size=block_size, mask_token_id=MASK, ar_weight=ar_weight, alignment=alignment,
        blocks_from=blocks_from,
    )  # fmt: skip
    expected = []
    for row, label, size in zip(ids, labels, sizes, strict=True):
        response = label[:size] != -100
        block = reference.blocks_of_sequence(size, block_size)
        if blocks_from == "response":
            block = reference.blocks_of_responses(response, block_size)
            assert torch.equal(block, blocks_of_responses(response[None], block_size)[0])
        printed = alignment == "paper"
        expected.append(reference.mars_loss(plain(model), row[:size], response, block, MASK, printed=printed))
    mask, ar = (torch.stack(term).mean() for term in zip(*expected, strict=True))
    total = torch.stack([loss.total(ar_weight) for loss in expected]).mean()
    assert losses.mask.item() == pytest.approx(mask.item(), rel=1e-5)
    assert losses.ar.item() == pytest.approx(ar.item() if ar_weight else 0, rel=1e-5)
    assert losses.total.item() == pytest.approx(total.item(), rel=1e-5)
    each = [
        reference.ar_loss(plain(model), row[:size], label[:size] != -100)
        for row, label, size in zip(ids, labels, sizes, strict=True)
    ]
    assert ar_loss(model, ids, labels).item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from(list(DECODERS)), st.integers(1, 9),
    st.one_of(
        st.tuples(st.just("probability"), st.sampled_from([None, 0.1, 0.2, 0.4, 0.7])),
        st.tuples(st.just("margin"), st.sampled_from([0.02, 0.1, 0.4])),
        st.tuples(st.just("entropy"), st.sampled_from([1.0, 2.0, 3.0])),
    ),
)  # fmt: skip
def test_the_decode_loops_tokens_are_the_references(
    seed: int, method: str, block_size: int, passes: tuple[Metric, float | None]
) -> None:
    """Guards against a token, or a forward, of the cached, batched loop that differs from whole forward passes."""
    model, (metric, threshold), rng = random_model(seed), passes, torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 12, (5,), generator=rng).tolist()
    prompts = [torch.randint(4, VOCABULARY, (size,), generator=rng).tolist() for size in sizes]
    options = Options(mask_id=MASK, window=block_size, metric=metric)
    requests = [Request(prompt, 24, threshold) for prompt in prompts]
    generations = decode(model, build_method(method, options), requests, eos_id=EOS, pad_id=PAD, batch_size=3)
    same(by_reference(method, model, prompts, block_size, 24, threshold=threshold, metric=metric), generations, prompts)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(DECODERS)), st.sampled_from([2, 4, 7]), st.sampled_from([None, 0.6, 0.95]))
def test_a_trained_model_answers_the_same(
    golden: dict[str, Any], golden_models: tools.Models, method: str, block_size: int, threshold: float | None
) -> None:
    """Guards against what random weights never do: several tokens in most forwards, and answers that end with EOS."""
    model, prompts = golden_models["mars"], golden["prompts"][:6]
    options = Options(mask_id=MASK, window=block_size)
    requests = [Request(prompt, 96, threshold) for prompt in prompts]
    generations = decode(model, build_method(method, options), requests, eos_id=EOS, pad_id=PAD, batch_size=4)
    answers = by_reference(method, model, prompts, block_size, 96, threshold=threshold)
    same(answers, generations, prompts)
    if method == "mars-verified":
        ar = by_reference("mars", model, prompts, 1, 96, threshold=None)
        assert [answer.text for answer in answers] == [answer.text for answer in ar]


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_masks_are_chained_as_here(threshold: float | None) -> None:
    """Guards against a draft head that gets another token here than in the reference."""
    model, prompts = random_model(3), [[5, 6, 7], [9, 10, 11, 12, 13]]
    alone = by_reference("mars-verified", model, prompts, 4, 60, threshold=threshold)
    followers = torch.zeros(VOCABULARY, VOCABULARY)
    for answer in alone:
        followers[answer.text[1:], answer.text[:-1]] = 9.0  # for each token, those that the model has put after it
    head = Markov(torch.eye(VOCABULARY), followers)
    adapted = Adapted(model, Adapter(torch.zeros(model.config.hidden_size), {}, head))
    method = build_method("mars-verified", Options(mask_id=MASK, head_top=VOCABULARY))
    requests = [Request(prompt, 60, threshold=threshold) for prompt in prompts]
    generations = decode(adapted, method, requests, eos_id=EOS, pad_id=PAD)
    answers = [
        reference.decode_verified(
            plain(model), prompt, mask_id=MASK, eos_id=EOS, threshold=threshold, max_new_tokens=60,
            head=lambda logits, before: logits + head.after @ head.before[before],
        )
        for prompt in prompts
    ]  # fmt: skip
    same(answers, generations, prompts)
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert [answer.accepted for answer in answers] != [answer.accepted for answer in alone]


def test_sequences_are_filled_as_the_collator_fills_them() -> None:
    """Guards against a reference that adds other tokens to a sequence than the released code."""
    ids, response = torch.tensor([7, 8, 9, 10, 11]), torch.tensor([False, False, True, True, True])
    filled, learned = reference.filled_up(ids, response, 4, EOS)
    labels = ids.masked_fill(~response, -100).tolist()
    batch = Collator(PAD, EOS, 4)([{"input_ids": ids.tolist(), "labels": labels}])
    assert filled.tolist() == batch["input_ids"][0].tolist()
    assert learned.tolist() == (batch["labels"][0] != -100).tolist()


def test_the_references_trainer_teaches_its_loss() -> None:
    """Guards against a schedule that stands still, a forgotten gradient, and a mean over the wrong things."""
    model = random_model(0)
    before = copy.deepcopy(model.state_dict())
    ids, labels, sizes = random_batch(0, 4)
    rows = [(row[:size], label[:size] != -100) for row, label, size in zip(ids, labels, sizes, strict=True)]

    def loss(ids: Tensor, response: Tensor) -> Tensor:
        return reference.mars_loss(plain(model), ids, response, reference.blocks_of_sequence(len(ids), 4), MASK).total()

    engine = partial(mars_loss, model, ids, labels, block_size=4, mask_token_id=MASK)
    first = engine().total.item()
    reference.train([*model.parameters()], [rows] * 40, loss, learning_rate=3e-3)
    assert engine().total.item() < 0.5 * first
    learned = model.state_dict()
    model.load_state_dict(before)
    reference.train([*model.parameters()], [[rows[0]]], lambda *_: engine().total, learning_rate=1e-3)
    by_engine = copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    reference.train([*model.parameters()], [rows], loss, learning_rate=1e-3)
    assert any(not torch.equal(learned[name], before[name]) for name in before)
    torch.testing.assert_close(model.state_dict(), by_engine, atol=2e-5, rtol=0)


# ---- the file itself -------------------------------------------------------------------------------------------------
def test_the_reference_is_one_file_of_torch() -> None:
    """Guards against a file that grows, that imports the package, or that the package imports."""
    source = (PACKAGE / "reference.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    imports = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imports - {"__future__", "collections", "dataclasses", "itertools", "math", "typing"} == {"torch"}
    users = [
        other.name
        for other in PACKAGE.rglob("*.py")
        if any(words in other.read_text(encoding="utf-8") for words in ("marsbench.reference", "import reference"))
    ]
    assert users == []
