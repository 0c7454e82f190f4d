"""A gated adapter in training: the model is frozen, and low-rank maps learn what masks are to say.

Nothing of the model changes, so there is nothing to defend: no AR term, and a rate of its own. The clean tokens need no
gradient. They go through the model once, as they are, and masks attend to the keys and values that they leave.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from marsbench.errors import UserError
from marsbench.forward.adapter import Adapter, LowRank, hooked
from marsbench.forward.draft_head import KINDS, DraftHead
from marsbench.forward.limits import vocabulary_of
from marsbench.presets import HeadKind
from marsbench.training.objectives import IGNORED, by_head, mean_over_rows, nll_at
from marsbench.training.visibility import additive_mask, blocks_of_responses


class HeadToTrain(nn.ParameterDict):
    """The weights of a draft head for a model, which begins as one that changes nothing; empty without a kind."""

    def __init__(self, model: PreTrainedModel, kind: HeadKind) -> None:
        super().__init__()
        self._kind = None if kind == "none" else KINDS[kind]
        if self._kind is not None:
            width = model.config.get_text_config().hidden_size
            self.update(self._kind.fresh(vocabulary_of(model), width)._asdict())

    @property
    def head(self) -> DraftHead | None:
        return None if self._kind is None else self._kind(**dict(self.items()))


class GatedAdapter(nn.Module):
    """The adapter's weights, and the frozen model that they act on, which is no part of it.

    A pair of maps for every linear layer of the decoder, and a draft head if one is wanted, begin as nothing.
    `strength` is LoRA's alpha over its rank: maps that count more learn faster at the same rate.
    """

    def __init__(self, model: PreTrainedModel, rank: int, head: HeadKind = "none", strength: float = 1.0) -> None:
        super().__init__()
        self._strength = strength
        self._model = (model,)  # in a tuple, so that it is neither moved, saved nor trained with this
        parts = model.get_decoder().named_modules()  # type: ignore[no-untyped-call]
        layers = {name: layer for name, layer in parts if isinstance(layer, nn.Linear)}
        if not layers:
            raise UserError(f"{type(model).__name__} has no plain linear layers", fix="choose another base")
        self._names = list(layers)
        self.vector = nn.Parameter(torch.zeros(model.config.get_text_config().hidden_size))
        self.downs = nn.ParameterList(torch.empty(rank, layer.in_features) for layer in layers.values())
        self.ups = nn.ParameterList(torch.zeros(layer.out_features, rank) for layer in layers.values())
        for down in self.downs:
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))  # as peft does
        self.of_head = HeadToTrain(model, head)

    @property
    def frozen(self) -> PreTrainedModel:
        return self._model[0]

    @property
    def adapter(self) -> Adapter:
        pairs = zip(self._names, self.downs, self.ups, strict=True)
        maps = {name: LowRank(down, self._strength * up) for name, down, up in pairs}
        return Adapter(self.vector, maps, self.of_head.head)

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.frozen.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def forward(self, **inputs: Any) -> Any:
        with hooked(self.frozen, self.adapter, None):
            return self.frozen(**inputs)


def cast_once(model: PreTrainedModel) -> None:
    """Hold the weights of a frozen model's linear layers in bf16, which autocast would cast them to at every use."""
    for layer in model.get_decoder().modules():  # type: ignore[no-untyped-call]
        if isinstance(layer, nn.Linear):
            layer.to(torch.bfloat16)


def gated_loss(
    adapter: nn.Module, input_ids: Tensor, labels: Tensor, *, model: PreTrainedModel, block_size: int,
    mask_token_id: int,
) -> Tensor:  # fmt: skip
    """The mask term of the MARS objective (paper equation 6), as the paper aligns it, for masks on a frozen model.

    Blocks are counted from the start of the response, in every sequence from a place drawn each time. The first token
    of a block is the model's own to predict; each of the others is predicted by the mask before it, which sees all
    earlier blocks, clean, and the masks of its own. A draft head is told the true token before the predicted one; a
    part of the masks, drawn anew each time, goes without it.

    `adapter` is a `GatedAdapter` (or a distributed wrapper around one), `model` the frozen one below it, `block_size` B
    in tokens; all else is as in `objectives`.
    """
    response = labels != IGNORED
    ahead = torch.randint(block_size, (len(labels), 1)).to(labels.device)
    block = blocks_of_responses(response, block_size, ahead)
    masked = response & (block == block.roll(-1, 1))
    masked[:, -1] = False
    count = masked.sum(1, keepdim=True)
    # A stable sort moves the masks to the front of their row, in order; a shorter row ends in filler. Where there is
    # nothing but filler, there still is a pass: other devices wait for this one's.
    position = torch.argsort(~masked, dim=1, stable=True)[:, : max(int(count.max()), 1)]
    entry = torch.arange(position.shape[1], device=count.device)
    row, column = (entry < count).nonzero(as_tuple=True)
    cache = DynamicCache()
    with torch.no_grad():
        model.get_decoder()(input_ids=input_ids, past_key_values=cache, use_cache=True)  # type: ignore[no-untyped-call]
    # Masks see the clean tokens of earlier blocks, and the masks of their own up to themselves.
    own = block.gather(1, position)
    in_order = (own.unsqueeze(1) == own.unsqueeze(2)) & (entry <= entry.unsqueeze(1))
    # Only filler attends to filler; each must see something.
    masks = (in_order & (entry < count).unsqueeze(1)) | (entry == entry.unsqueeze(1))
    visible = torch.cat([block.unsqueeze(1) < own.unsqueeze(2), masks], dim=2)
    at, alone = position[row, column], getattr(adapter, "module", adapter)
    assert isinstance(alone, GatedAdapter), "that is what is trained here"
    nll = nll_at(
        adapter, row, column, input_ids[row, at + 1], **by_head(alone.of_head.head, model, input_ids[row, at]),
        input_ids=torch.full_like(position, mask_token_id), position_ids=position,
        attention_mask=additive_mask(visible, model.dtype), past_key_values=cache,
    )  # fmt: skip
    return mean_over_rows(nll, row, len(labels))
