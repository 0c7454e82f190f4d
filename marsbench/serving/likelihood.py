"""How probable a model holds an answer's tokens to be: its own AR log-probabilities, in a pass of their own."""

from collections.abc import Sequence
from typing import Any

import torch

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
def likelihood(model: Any, prompt: Sequence[int], tokens: Sequence[int], best: int) -> Likelihood:
    """Log-probabilities of tokens after a prompt, and of the `best` at each place."""
    ids, cache = torch.tensor([[*prompt, *tokens]], device=device_of(model)), RaggedCache()
    scored = Likelihood(list(tokens), [], [])
    for begin in range(0, ids.shape[1] - 1, _TOGETHER):
        part, after = ids[:, begin : begin + _TOGETHER], ids[0, begin + 1 : begin + 1 + _TOGETHER]
        position = begin + torch.arange(part.shape[1], device=ids.device).unsqueeze(0)
        window = Window(part, position, position[:, 0], begin + part.shape[1], causal(part.shape[1], ids.device))
        answer = forward(decoder_of(model), cache, window)
        asked = slice(max(len(prompt) - 1 - begin, 0), len(after))  # what stands before the answer's tokens
        sure = answer.logits(asked)[0].float().log_softmax(-1).clamp(min=_LEAST)
        scored.chosen.extend(sure.gather(1, after[asked].unsqueeze(1)).squeeze(1).tolist())
        values, indices = (each.tolist() for each in sure.topk(min(best, sure.shape[1])))
        scored.best.extend(dict(zip(*place, strict=True)) for place in zip(indices, values, strict=True))
    return scored
