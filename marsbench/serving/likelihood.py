"""How probable a model holds tokens to be: its own AR log-probabilities, in one pass over them."""

from __future__ import annotations

from collections.abc import Sequence
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


class Scorer:
    """Reads a row of tokens part by part."""

    def __init__(self, model: Any, best: int, prefill_positions: int) -> None:
        self._model, self._best, self._most = model, best, prefill_positions
        self._cache, self._length = RaggedCache(), 0
        self._next: Tensor | None = None  # [1, V], log-probabilities of the token that comes next

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Likelihood:
        """Log-probabilities of tokens given all that came before them, and of the best at each of these places."""
        found = Likelihood(list(tokens), [], [])
        for begin in range(0, len(tokens), self._most):
            ids = torch.tensor([list(tokens[begin : begin + self._most])], device=device_of(self._model))
            position = self._length + torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            self._length += ids.shape[1]
            window = Window(ids, position, position[:, 0], self._length, causal(ids.shape[1], ids.device))
            answer = forward(decoder_of(self._model), self._cache, window)
            for first in range(0, ids.shape[1], _TOGETHER):
                part = ids[0, first : first + _TOGETHER]
                logits = answer.logits(slice(first, first + len(part)))[0].float()
                self._score(part, logits.log_softmax(-1).clamp(min=_LEAST), found)
        return found

    def _score(self, ids: Tensor, after: Tensor, found: Likelihood) -> None:
        """Add what is known of tokens [M], behind each of which the next ones' log-probabilities are [M, V]."""
        if self._next is None:  # nothing says how probable the first token of all is
            found.chosen.append(None)
            found.best.append([])
            ids, sure = ids[1:], after[:-1]
        else:
            sure = torch.cat([self._next, after[:-1]])
        self._next = after[-1:]
        found.chosen.extend(sure.gather(1, ids.unsqueeze(1)).squeeze(1).tolist())
        values, indices = sure.topk(min(self._best, sure.shape[-1]), dim=-1)
        found.best.extend(
            list(zip(*place, strict=True)) for place in zip(indices.tolist(), values.tolist(), strict=True)
        )
