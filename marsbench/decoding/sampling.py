"""Choosing tokens: the top one, or one sampled with noise that belongs to the position and not to the step.

Sampling adds Gumbel noise to the scaled logits and takes the top one, which draws from their softmax. The noise is a
function of a request's seed, the position and the token alone. So every method that verifies drafts against "what the
model itself would say here" emits the same tokens as AR decoding with that seed, and what it does is the standard
rejection rule: a draft d is kept with probability p(d), and a rejected one is replaced by a draw from p without d
(arXiv 2211.17192, for drafts that are one token, not a distribution).
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, position: Tensor, temperature: Tensor, seed: Tensor) -> Tensor:
    """The token at every position.

    Args:
        logits: [N, K, V], any dtype.
        position: integer [N, K], where the tokens will stand.
        temperature: fp32 [N], 0 for the top token.
        seed: integer [N].

    Returns:
        integer [N, K].
    """
    scaled = logits.float() / temperature.clamp(min=1e-6).view(-1, 1, 1)
    sampled = (scaled + _gumbel(seed, position, logits.shape[-1])).argmax(-1)
    return torch.where(temperature.unsqueeze(1) > 0, sampled, logits.argmax(-1))


def _gumbel(seed: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise fp32 [N, K, V], the same for the same (seed, position, token) on every device.

    It is -log(-log(u)) of a uniform u. What matters are the largest of many draws, where u is next to 1 and fp32 has no
    numbers left; so the bits say how far u lies below 1, where it has plenty: the noise ends at 28, not at infinity.
    """
    token = torch.arange(vocabulary, device=position.device)
    place = _mixed(_mixed(seed.unsqueeze(1)) + position)
    bits = _mixed(place.unsqueeze(-1) + token)
    below_one = ((bits & 0xFFFFFFFFFF).float() + 0.5) / 2**40
    return -(-torch.log1p(-below_one)).log()


def _mixed(values: Tensor) -> Tensor:
    """A bijection of 64-bit integers that leaves no pattern behind (the finalizer of SplitMix64)."""
    values = values + -0x61C8864680B583EB
    values = (values ^ (values >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    values = (values ^ (values >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return values ^ (values >> 31 & 0x1FFFFFFFF)
