"""How probable a model holds an answer's tokens to be: its own AR log-probabilities, in a pass of their own."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from marsbench.decoding.engine import forward
from marsbench.decoding.windows import causal
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import decoder_of
from marsbench.forward.modules import device_of
from marsbench.forward.window import Answer, Window
from marsbench.serving.messages import Likelihood

_TOGETHER = 256  # positions whose logits are held at once
_LEAST = -9999.0  # JSON has no infinity


class Scorer:
    """Reads an answer part by part, behind its prompt."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompt: Sequence[int], best: int, prefill_positions: int) -> None:
        self._model, self._best, self._most = model, best, prefill_positions
        self._cache, self._length = RaggedCache(), 0
        for _, answer in self._forwards(prompt):
            self._next = _log_probabilities(answer, slice(-1, None))  # [1, V], of the token that comes next

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Likelihood:
        """Log-probabilities of tokens given all that came before them, and of the best at each of these places."""
        scored = Likelihood(list(tokens), [], [])
        for ids, answer in self._forwards(tokens):
            for first in range(0, len(ids), _TOGETHER):
                part = ids[first : first + _TOGETHER]
                after = _log_probabilities(answer, slice(first, first + len(part)))
                sure = torch.cat([self._next, after[:-1]])
                self._next = after[-1:]
                scored.chosen.extend(sure.gather(1, part.unsqueeze(1)).squeeze(1).tolist())
                values, indices = sure.topk(min(self._best, sure.shape[-1]), dim=-1)
                pairs = zip(indices.tolist(), values.tolist(), strict=True)
                scored.best.extend(list(zip(*place, strict=True)) for place in pairs)
        return scored

    def _forwards(self, tokens: Sequence[int]) -> Iterator[tuple[Tensor, Answer]]:
        """Token ids [M] as many as go together, and what the model says to them."""
        for begin in range(0, len(tokens), self._most):
            ids = torch.tensor([list(tokens[begin : begin + self._most])], device=device_of(self._model))
            position = self._length + torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            self._length += ids.shape[1]
            window = Window(ids, position, position[:, 0], self._length, causal(ids.shape[1], ids.device))
            yield ids[0], forward(decoder_of(self._model), self._cache, window)


def _log_probabilities(answer: Answer, places: slice) -> Tensor:
    return answer.logits(places)[0].float().log_softmax(-1).clamp(min=_LEAST)
