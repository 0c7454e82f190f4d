"""Attention patterns and losses, held to the vectors recorded from the authors' code."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import Models
from torch import Tensor
from transformers import PreTrainedModel

from marsbench.presets import preset
from marsbench.training import objectives
from marsbench.training.learners import LEARNERS
from marsbench.training.medusa import MedusaHeads, medusa_loss
from marsbench.training.objectives import ar_loss, block_diffusion_loss, mars_loss
from marsbench.training.stages import STAGES, BlocksFrom, Stage, recipe
from marsbench.training.visibility import blocks_of_responses, blocks_of_sequence, needs_noisy_copy, stream_visibility

MASK = 3
MARS_STAGES = {name: stage for name, stage in STAGES.items() if stage.objective == "mars"}


def test_visibility_between_whole_streams_equals_the_golden_masks(golden: dict[str, Any]) -> None:
    """Guards against a query that sees its own answer, or misses the clean prefix."""
    for entry in golden["attention_masks"]:
        length = entry["length"]
        noisy_first = torch.tensor([[cell == "1" for cell in row] for row in entry["rows"]])
        clean_first = noisy_first.roll((length, length), (0, 1))
        position, noisy = torch.arange(length).repeat(2), torch.arange(2 * length) >= length
        block = blocks_of_sequence(torch.ones(1, length), entry["block_size"])[0].repeat(2)
        assert torch.equal(stream_visibility(position, block, noisy, torch.zeros_like(noisy)), clean_first)


@pytest.mark.parametrize("entry", range(12))
def test_mars_loss_equals_the_golden_losses(entry: int, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against a wrong shift, normalisation, term weight, or a noisy stream cut too short."""
    recorded, model = golden["losses"][entry], golden_models["mars"]
    loss = mars_loss(
        model, torch.tensor(recorded["input_ids"]), torch.tensor(recorded["labels"]), block_size=recorded["block_size"],
        mask_token_id=MASK, ar_weight=recorded["ar_weight"],
    )  # fmt: skip
    assert loss.total.item() == pytest.approx(recorded["loss"], rel=1e-4)
    assert gradient_norm(model, loss.total) == pytest.approx(recorded["grad_norm"], rel=1e-4)
    assert loss.total.item() == pytest.approx((loss.mask + recorded["ar_weight"] * loss.ar).item(), rel=1e-5)


def test_a_row_costs_the_same_in_any_batch_and_loss(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against two definitions of the AR loss, and padding that leaks into a row's loss."""
    recorded, model = golden["losses"][3], golden_models["mars"]
    inputs = torch.tensor(recorded["input_ids"]), torch.tensor(recorded["labels"])
    together = mars_loss(model, *inputs, block_size=4, mask_token_id=MASK)
    assert ar_loss(model, *inputs).item() == pytest.approx(together.ar.item(), rel=1e-5)
    rows = zip(*(each.split(1) for each in inputs), strict=True)
    alone = [mars_loss(model, *row, block_size=4, mask_token_id=MASK).total for row in rows]
    assert together.total.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(1, 8), st.booleans())
def test_needs_noisy_copy_is_what_attention_says(response: list[bool], block_size: int, bidirectional: bool) -> None:
    """Guards against dropping the noisy copy of a token that could see a mask."""
    block = blocks_of_sequence(torch.ones(1, len(response)), block_size)
    copied = needs_noisy_copy(torch.tensor([response]), block, bidirectional=bidirectional)[0]
    for at in range(len(response)):
        block = range(at // block_size * block_size, min(at // block_size * block_size + block_size, len(response)))
        sees_mask = any(response[other] for other in block if bidirectional or other <= at)
        assert bool(copied[at]) == sees_mask


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(1, 8))
def test_blocks_of_responses_by_counting(response: list[bool], block_size: int) -> None:
    """Guards against blocks that go on from one turn to the next, or that begin before the response does."""
    counted = block_numbers(response, block_size, "response")
    assert blocks_of_responses(torch.tensor([response]), block_size).tolist() == [counted]
    if all(response):
        assert blocks_of_sequence(torch.ones(1, len(response)), block_size)[0].tolist() == counted


def block_numbers(response: list[bool], block_size: int, blocks_from: BlocksFrom) -> list[int]:
    """The block of each token, counted one by one."""
    numbers, begin = [0], 0
    for at in range(1, len(response)):
        turn = blocks_from == "response" and response[at] != response[at - 1]
        prompt = blocks_from == "response" and not response[at]
        full = at - begin == block_size and not prompt
        begin = at if turn or full else begin
        numbers.append(numbers[-1] + (turn or full))
    return numbers


def whole_visibility(block: list[int]) -> Tensor:
    """Which position attends to which, cell by cell, for two full streams, clean first: bool [2L, 2L]."""
    length = len(block)

    def sees(query: int, key: int) -> bool:
        at, other = query % length, key % length
        if query < length:
            return key < length and other <= at
        return block[other] < block[at] if key < length else block[other] == block[at] and other <= at

    return torch.tensor([[sees(query, key) for key in range(2 * length)] for query in range(2 * length)])


def defined_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor, stage: Stage, block_size: int) -> Tensor:
    """The MARS loss of one sequence [L] by its definition: two full streams, label by label."""
    length, response = len(ids), labels != -100
    block = block_numbers(response.tolist(), block_size, stage.variant.blocks_from)
    output = model(
        input_ids=torch.cat([ids, ids.masked_fill(response, MASK)]).unsqueeze(0),
        position_ids=torch.arange(length).repeat(2).unsqueeze(0),
        attention_mask=torch.zeros(1, 1, 2 * length, 2 * length).masked_fill(~whole_visibility(block), -torch.inf),
    )
    log_probability = output.logits[0].log_softmax(-1)
    terms = []
    for at in range(1, length):
        if response[at]:
            clean, mask = at - 1, length + at - 1
            if stage.variant.alignment == "paper" and block[at] != block[at - 1]:
                mask = clean
            terms.append(-log_probability[mask, ids[at]] - stage.ar_weight * log_probability[clean, ids[at]])
    return torch.stack(terms).mean()


def turns(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random tokens [1, L] and their labels: prompts and responses of these lengths in turn, the last one padding."""
    ids = torch.randint(4, 900, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    learned = torch.cat([torch.full((length,), bool(turn % 2)) for turn, length in enumerate(lengths)])
    return ids, ids.masked_fill(~learned, -100)


def gradient_norm(model: PreTrainedModel, loss: Tensor) -> float:
    """The norm of the loss's gradient over all parameters."""
    model.zero_grad()
    loss.backward()
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


@pytest.mark.parametrize("stage", MARS_STAGES)
@pytest.mark.parametrize("block_size", [3, 4])
def test_every_mars_stage_learns_what_its_definition_says(stage: str, block_size: int, golden_models: Models) -> None:
    """Guards against a variant that shortens the noisy stream wrongly, shifts, leaks, forgets a turn or a weight."""
    model, chosen = golden_models["mars"], MARS_STAGES[stage]
    rows = [turns(6, 13, 3), turns(5, 4, 3, 7, 3), turns(1, 2, 7, 11, 1)]
    ids, labels = (torch.cat(part) for part in zip(*rows, strict=True))
    batch, weight = {"input_ids": ids, "labels": labels}, torch.ones(3)
    if chosen.variant.weighs_by_timestep:
        weight = batch["weight"] = torch.tensor([1.5, 0.25, 9.0])
    tokenizer: Any = SimpleNamespace(mask_token_id=MASK)
    learner = LEARNERS["mars"](recipe(preset("micro"), stage, block_size=block_size), tokenizer, model)
    loss = learner.loss(model, **batch)
    learner.end()  # a fresh draft head changes no loss, and is no part of the definition
    each = [defined_loss(model, *row, chosen, block_size) for row in zip(ids, labels, strict=True)]
    expected = (weight * torch.stack(each)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradient_norm(model, loss) == pytest.approx(gradient_norm(model, expected), rel=1e-4)


@torch.inference_mode()
def test_the_papers_alignment_is_what_decoding_asks(golden_models: Models) -> None:
    """Guards against a training that the sliding window does not fit: block by block, as decoding predicts them."""
    model, (ids, labels), block_size = golden_models["mars"], turns(6, 13, 3), 4
    blocks = [range(6, 8), range(8, 12), range(12, 16), range(16, 19)]  # of the response, counted from the sequence
    nll = []
    for block in blocks:
        prefix = ids[0, : block.start].tolist()
        window = torch.tensor([prefix + [MASK] * (block_size - 1)])
        log_probability = model(input_ids=window).logits[0, block.start - 1 :].log_softmax(-1)
        nll += [-log_probability[candidate, ids[0, at]] for candidate, at in enumerate(block)]
    decoding = torch.stack(nll).mean().item()
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, "block_size": block_size, "mask_token_id": MASK}
    assert mars_loss(model, **inputs, alignment="paper").mask.item() == pytest.approx(decoding, rel=1e-5)
    assert mars_loss(model, **inputs).mask.item() != pytest.approx(decoding, rel=1e-2)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_logits_in_chunks_teach_the_same(
    autocast: bool, golden: dict[str, Any], golden_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against labels of another chunk, gradients that a chunk loses, and logits that fill the memory."""
    recorded, model = golden["losses"][3], golden_models["mars"]
    ids, labels = (torch.tensor(recorded[name]) for name in ("input_ids", "labels"))
    vocabulary, hidden = model.config.vocab_size, model.config.hidden_size

    def learned() -> tuple[float, list[Tensor], int]:
        """The loss, its gradients, and the elements of the largest tensor of logits that is kept for them."""
        largest = [0]

        def keep(saved: Tensor) -> Tensor:
            if saved.dim() == 2 and saved.shape[1] == vocabulary and len(saved) != hidden:  # not the weight
                largest[0] = max(largest[0], saved.numel())
            return saved

        model.zero_grad()
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved),
        ):
            loss = mars_loss(model, ids, labels, block_size=4, mask_token_id=MASK).total
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None], largest[0]

    at_once, gradients, most = learned()
    monkeypatch.setattr(objectives, "MOST_LOGITS", 7 * vocabulary)
    in_chunks, chunked, least = learned()
    assert in_chunks == pytest.approx(at_once, rel=1e-5)
    torch.testing.assert_close(chunked, gradients, atol=2e-2 if autocast else 1e-6, rtol=1e-3)
    assert most > 20 * vocabulary and least <= 7 * vocabulary


@pytest.mark.parametrize("shifted", [False, True])
def test_block_diffusion_loss_equals_the_whole_layout(shifted: bool, golden_models: Models) -> None:
    """Guards against a shortened noisy stream, a leak of answers, or a wrong weight: compares definitions."""
    model, length, block = golden_models["mars"], 24, 4
    ids = torch.randint(4, 900, (2, length), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(length) < torch.tensor([[6], [9]]), -100)
    torch.manual_seed(1)
    loss = block_diffusion_loss(model, ids, labels, block_size=block, mask_token_id=MASK, shifted=shifted)

    torch.manual_seed(1)
    level = torch.empty(2, 1).uniform_(0.05, 1.0)
    masked = (labels != -100) & (torch.rand(labels.shape) < level)
    of, clean = torch.arange(2 * length) % length // block, torch.arange(2 * length) < length
    visible = (of < of.unsqueeze(1)) & clean  # [query, key]
    visible |= (of == of.unsqueeze(1)) & (clean == clean.unsqueeze(1))
    logits = model(
        input_ids=torch.cat([ids, ids.masked_fill(masked, MASK)], 1),
        position_ids=torch.arange(length).repeat(2, 2),
        attention_mask=torch.zeros(2, 1, 2 * length, 2 * length).masked_fill(~visible, -torch.inf),
    ).logits
    of_clean, logits = logits.split(length, 1)
    if shifted:  # the first token of a block is predicted where the last of the block before it stands, unmasked
        begins = (torch.arange(length) % block == 0).unsqueeze(1)
        logits = torch.where(begins, of_clean.roll(1, 1), logits.roll(1, 1))
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * masked / level
    assert loss.item() == pytest.approx((nll.sum(1) / (labels != -100).sum(1)).mean().item(), rel=1e-5)


def test_medusa_loss_by_hand(golden_models: Models) -> None:
    """Guards against a head taught the wrong token, prompts in the loss, a trained backbone, and noisy fresh heads."""
    backbone = golden_models["ar"]
    torch.manual_seed(0)
    heads = MedusaHeads(backbone.config.hidden_size)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 0, 0], [12, 13, 14, 15, 16, 17, 18, 19, 20]])
    labels = ids.clone()
    labels[0, :3], labels[0, 7:], labels[1, :5] = -100, -100, -100
    backbone.zero_grad()
    loss = medusa_loss(heads, ids, labels, backbone=backbone.requires_grad_(False))
    loss.backward()
    states = heads(backbone.model(input_ids=ids).last_hidden_state)
    total = 0.0
    for head in range(3):
        nll, count = 0.0, 0
        for row, (first, end) in enumerate([(3, 7), (5, 9)]):
            for target in range(first + 1 + head, end):
                logits = backbone.lm_head(states[row, target - 2 - head, head])
                nll -= logits.log_softmax(-1)[ids[row, target]].item()
                count += 1
        total += 0.8**head * nll / count
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in heads.parameters())
    assert all(parameter.grad is None for parameter in backbone.parameters())
    backbone.requires_grad_(True)
    hidden = torch.randn(2, 3, golden_models["ar"].config.hidden_size)
    heads = MedusaHeads(hidden.shape[-1])
    assert torch.equal(heads(hidden), hidden.unsqueeze(2).expand(-1, -1, 3, -1))
