"""The three training objectives: AR, MARS and block diffusion.

All of them, and those of heads and adapters elsewhere, share one convention. The model is a causal language model of
transformers, or a distributed wrapper around one. `input_ids`, integer [N, L], are padded on the right; `labels`,
integer [N, L], are -100 on prompt and padding, and the tokens themselves on the response. The loss is the mean over a
sequence's labelled tokens, then over the batch (the authors' normalisation), a scalar tensor. Logits are taken only
where there is a label.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from marsbench.forward.draft_head import DraftHead, Markov
from marsbench.training.stages import Alignment, BlocksFrom
from marsbench.training.visibility import (
    additive_mask,
    blocks_of_responses,
    blocks_of_sequence,
    needs_noisy_copy,
    stream_visibility,
)

IGNORED = -100
# The part of masks that learn without the draft head: in decoding, masks alone say which tokens it chooses from.
ALONE = 0.2
# Logits that are held at once: 64 MiB in fp32, and several times that with what the loss keeps of them. The world's
# batches stay far below. A GPU is only busy with more.
MOST_LOGITS, MOST_LOGITS_ON_CUDA = 1 << 24, 1 << 28
# Models whose logits are what the LM head gives.
_HEAD_IS_LAST = (Qwen2ForCausalLM, LlamaForCausalLM)


@dataclass(frozen=True)
class MarsLoss:
    """The MARS loss and its two terms, scalar tensors: `total = mask + ar_weight * ar` (paper equation 7)."""

    total: Tensor
    mask: Tensor
    ar: Tensor


def ar_loss(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    row, column = _labelled(labels)
    nll = nll_at(model, row, column - 1, labels[row, column], input_ids=input_ids)
    return mean_over_rows(nll, row, len(labels))


def mars_loss(
    model: nn.Module, input_ids: Tensor, labels: Tensor, *, block_size: int, mask_token_id: int, ar_weight: float = 1.0,
    alignment: Alignment = "released", blocks_from: BlocksFrom = "sequence", weight: Tensor | None = None,
    head: DraftHead | None = None,
) -> MarsLoss:  # fmt: skip
    """The MARS objective (paper section 3, equations 4 to 7), with the noisy stream cut down to what it needs.

    Both terms use right-shifted logits: those at position t predict token t + 1, in the noisy stream as in the clean
    one. Where the noisy copy of a token would equal the clean one (the prompt, up to the first mask of the block that
    straddles prompt and response), the clean token serves both terms. Value and gradient equal those of the full 2L
    layout.

    The released code shifts across block borders, so that the last mask of a block predicts the first token of the
    next. In the paper's equations 4 and 6, that token is predicted from the clean tokens before it, so that 1/B of the
    mask term is AR's own. Decoding is the same for both.

    `block_size` is B in tokens, `mask_token_id` what stands in for response tokens in the noisy stream, `ar_weight` the
    weight of the AR term (0 is the paper's "w/o SFT loss", cleanly ablated), `alignment` what predicts the first token
    of a block, `blocks_from` where blocks are counted from, `weight` fp32 [N] how much each sequence counts, and `head`
    a draft head behind the masks, which learns with them.
    """
    response = labels != IGNORED
    # The last labelled token is only ever predicted: neither it nor anything after it need enter the model.
    enters = _up_to_last(response).roll(-1, 1)
    enters[:, -1] = False
    block = (blocks_of_responses if blocks_from == "response" else blocks_of_sequence)(response, block_size)
    copied = needs_noisy_copy(response, block)
    if alignment == "paper":
        # The last mask of a block predicts nothing, and no other mask sees it.
        copied &= block == block.roll(-1, 1)
    noise = input_ids.masked_fill(response, mask_token_id)
    inputs, clean_at, noisy_at = _streams(model, input_ids, noise, enters, copied, block)
    row, column = _labelled(labels)
    from_copy = copied[row, column - 1]
    # The clean logits serve the AR term everywhere and the mask term where there is no noisy copy.
    from_clean = torch.ones_like(from_copy) if ar_weight else ~from_copy
    clean_at, noisy_at = (at[row, column - 1] for at in (clean_at, noisy_at))
    at = torch.cat([clean_at[from_clean], noisy_at[from_copy]])
    rows, targets, before = (
        torch.cat([tensor[from_clean], tensor[from_copy]])
        for tensor in (row, labels[row, column], input_ids[row, column - 1])
    )
    clean = int(from_clean.sum())
    at_mask = torch.arange(len(rows), device=rows.device) >= clean
    nll = nll_at(model, rows, at, targets, **by_head(head, model, before, at_mask), **inputs)
    clean_nll = nll.new_zeros(len(row)).masked_scatter(from_clean, nll[:clean])
    mask_nll = clean_nll.masked_scatter(from_copy, nll[clean:])
    mask = mean_over_rows(mask_nll, row, len(labels), weight)
    ar = mean_over_rows(clean_nll, row, len(labels), weight) if ar_weight else torch.zeros_like(mask)
    return MarsLoss(total=mask + ar_weight * ar, mask=mask, ar=ar)


def block_diffusion_loss(
    model: nn.Module, input_ids: Tensor, labels: Tensor, *, block_size: int, mask_token_id: int, shifted: bool = False
) -> Tensor:
    """The block-diffusion baseline's objective (BD3-LM, linear schedule, bidirectional blocks).

    Every sequence draws t ~ U(0.05, 1), masks each response token with probability t, and weighs the cross-entropy of
    the masked tokens by 1/t. Each is predicted from its own position, or `shifted` from the one before it: in the noisy
    stream, and for the first token of a block in the clean one. The rest is as for `mars_loss`.
    """
    response = labels != IGNORED
    noise_level = torch.empty(len(labels), 1, device=labels.device).uniform_(0.05, 1.0)
    masked = response & (torch.rand(labels.shape, device=labels.device) < noise_level)
    noise = input_ids.masked_fill(masked, mask_token_id)
    block = blocks_of_sequence(response, block_size)
    copied = needs_noisy_copy(response, block, bidirectional=True)
    enters = _up_to_last(response)
    inputs, clean_at, noisy_at = _streams(model, input_ids, noise, enters, copied, block, bidirectional=True)
    row, column = masked.nonzero(as_tuple=True)
    at = noisy_at[row, column]
    if shifted:
        begins = block[row, column] != block[row, column - 1]
        at = torch.where(begins, clean_at[row, column - 1], noisy_at[row, column - 1])
    nll = nll_at(model, row, at, labels[row, column], **inputs)
    weighted = nll / noise_level[row, 0]
    tokens = response.sum(1).clamp(min=1)
    return torch.zeros(len(labels), device=labels.device).index_add(0, row, weighted).div(tokens).mean()


def _streams(
    model: nn.Module, clean: Tensor, noise: Tensor, enters: Tensor, copied: Tensor, block: Tensor, *,
    bidirectional: bool = False,
) -> tuple[dict[str, Any], Tensor, Tensor]:  # fmt: skip
    """Both streams in one row: the clean tokens that enter the model, then the noisy copies of those that need one.

    All tensors are [N, L]: tokens of both streams, which of them matter to the loss at all (`enters`), which of these
    need a noisy copy, and their blocks. Returns a model's keyword arguments, S entries a row; and integer [N, L], where
    a clean token stands in its row, and where its noisy copy does, if it has one.
    """
    length = clean.shape[1]
    wanted = torch.cat([enters, enters & copied], dim=1)
    counts = wanted.sum(1, keepdim=True)
    # A stable sort moves what is wanted to the front of its row, in order; a shorter row ends in filler.
    source = torch.argsort(~wanted, dim=1, stable=True)[:, : int(counts.max())]
    position, noisy = source % length, source >= length
    stands_in = torch.cat([~copied, torch.zeros_like(copied)], dim=1).gather(1, source)
    visible = stream_visibility(position, block.gather(1, position), noisy, stands_in, bidirectional=bidirectional)
    # Only filler attends to filler; each must see something.
    entry = torch.arange(source.shape[1], device=clean.device)
    visible &= (entry < counts).unsqueeze(1) | (entry == entry.unsqueeze(1))
    inputs = {
        "input_ids": torch.cat([clean, noise], dim=1).gather(1, source),
        "position_ids": position,
        "attention_mask": additive_mask(visible, next(model.parameters()).dtype),
    }
    clean_at, noisy_at = torch.split(wanted.cumsum(1) - 1, length, dim=1)
    return inputs, clean_at, noisy_at


def _up_to_last(marked: Tensor) -> Tensor:
    return marked.int().flip(1).cummax(1).values.flip(1).bool()


def _labelled(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every label that has a token before it to be predicted from."""
    row, column = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    return row, column + 1


def by_head(head: DraftHead | None, model: Any, before: Tensor, at_mask: Tensor | None = None) -> dict[str, Any]:
    """What `nll_at` is told of a draft head behind tokens `before` [n]; it acts on a drawn part of `at_mask` [n]."""
    if head is None:
        return {}
    heeds = (torch.rand(len(before), 1) >= ALONE).to(before.device)
    if at_mask is not None:
        heeds &= at_mask.unsqueeze(1)
    if isinstance(head, Markov):
        return {"more": (heeds * head.before[before], head.after)}
    with torch.no_grad():  # and before a forward pass of masks in which embeddings are shifted
        embedded: Tensor = getattr(model, "module", model).get_input_embeddings()(before)
    return {"change": lambda states: states + heeds * head.change(head.seen(states), embedded)}


def nll_at(
    model: nn.Module, row: Tensor, column: Tensor, targets: Tensor, *, change: Callable[[Tensor], Tensor] | None = None,
    more: tuple[Tensor, Tensor] | None = None, **inputs: Any,
) -> Tensor:  # fmt: skip
    """Negative log-likelihood [n] in fp32 of `targets` [n] at the given entries; the rest never meets the LM head.

    A hook in front of the LM head picks the entries, so that the call goes through the model's own `forward` and
    distributed wrappers keep synchronising gradients. Where the logits would fill the memory, the head itself makes
    them a chunk at a time, and once more on the way back.

    `row` and `column`, integer [n], are the entries' places in the inputs. Of a draft head, `change` is what it makes
    of their states [n, H] before the LM head reads them, and `more`, [n, r] and [V, r], has a product for the logits.
    """
    alone: Any = getattr(model, "module", model)  # without a distributed wrapper
    head: Any = alone.get_output_embeddings()
    head_is_last = _kind(getattr(alone, "frozen", alone)) in _HEAD_IS_LAST and type(head) is nn.Linear
    entries = max(1, most_logits(row.device) // head.out_features)
    chunked = head_is_last and len(row) > entries
    code, after = more or (None, None)

    def pick(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        states = arguments[0][row, column]
        return (states if change is None else change(states),)

    def nll_of(states: Tensor) -> Tensor:
        codes = [None] * len(targets) if code is None else torch.split(code, entries)
        chunks = zip(torch.split(states, entries), torch.split(targets, entries), codes, strict=False)
        weights = after, head.weight, head.bias
        return torch.cat([checkpoint(_nll_of_chunk, *chunk, *weights, use_reentrant=False) for chunk in chunks])

    picking = head.register_forward_pre_hook(pick)
    if chunked:
        head.forward = nll_of
    try:
        logits: Tensor = model(**inputs, use_cache=False).logits
    finally:
        picking.remove()
        vars(head).pop("forward", None)
    return logits if chunked else _nll(logits, targets, code, after)


def _kind(model: nn.Module) -> type[nn.Module]:
    """The class of a model as it was before its weights were sharded, which makes a class of the wrapper's own."""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed"))


def most_logits(device: torch.device) -> int:
    return MOST_LOGITS_ON_CUDA if device.type == "cuda" else MOST_LOGITS


def _nll_of_chunk(
    hidden: Tensor, targets: Tensor, code: Tensor | None, after: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return _nll(F.linear(hidden, weight, bias), targets, code, after)


def _nll(logits: Tensor, targets: Tensor, code: Tensor | None, after: Tensor | None) -> Tensor:
    """Negative log-likelihood [n] in fp32 by logits [n, V], to which a draft head may add [n, r] times [V, r]."""
    if code is not None and after is not None:
        logits = logits + code @ after.T
    # Straight from bf16 logits to sums in fp32: no copy of them in fp32 beside it, nor of their gradient.
    return F.nll_loss(logits.log_softmax(-1, dtype=torch.float32), targets, reduction="none")


def mean_over_rows(nll: Tensor, row: Tensor, rows: int, weight: Tensor | None = None) -> Tensor:
    """Mean over each row's labelled tokens, then over the rows of the batch, each times its weight."""
    tokens = torch.bincount(row, minlength=rows).clamp(min=1)
    means = torch.zeros(rows, dtype=nll.dtype, device=nll.device).index_add(0, row, nll).div(tokens)
    return (means if weight is None else means * weight).mean()
