"""How probable a model holds tokens to be: its own AR log-probabilities, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from marsbench.decoding.engine import forward
from marsbench.decoding.windows import causal
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import decoder_of
from marsbench.forward.modules import device_of
from marsbench.forward.window import Window
from marsbench.serving.messages import Likelihood

_TOGETHER = 256  # positions whose logits are held at once
_LEAST = -9999.0  # JSON has no infinity


@torch.inference_mode()
def likelihood(model: Any, tokens: Sequence[int], best: int, prefill_positions: int) -> Likelihood:
    """Log-probabilities of every token but the first, given those before it, and of the `best` most probable ones."""
    chosen: list[float] = []
    top: list[list[tuple[int, float]]] = []
    ids = torch.tensor([list(tokens)], device=device_of(model))
    for first, logits in _logits(model, ids, prefill_positions):
        after = ids[0, first + 1 : first + 1 + len(logits)]
        sure = logits[: len(after)].float().log_softmax(-1).clamp(min=_LEAST)
        chosen += sure.gather(1, after.unsqueeze(1)).squeeze(1).tolist()
        values, indices = sure.topk(min(best, sure.shape[-1]), dim=-1)
        top += [list(zip(*one, strict=True)) for one in zip(indices.tolist(), values.tolist(), strict=True)]
    return Likelihood(list(tokens), chosen, top)


def _logits(model: Any, ids: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Logits [M, V] at places of ids [1, T], each portion with the place that it begins at."""
    decoder, cache, length = decoder_of(model), RaggedCache(), ids.shape[1]
    for begin in range(0, length, most):
        end = min(begin + most, length)
        position = torch.arange(begin, end, device=ids.device).unsqueeze(0)
        window = Window(ids[:, begin:end], position, position[:, 0], end, causal(end - begin, ids.device))
        answer = forward(decoder, cache, window)
        for first in range(0, end - begin, _TOGETHER):
            yield begin + first, answer.logits(slice(first, min(first + _TOGETHER, end - begin)))[0]
