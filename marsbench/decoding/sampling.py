"""Choosing tokens: the top one, or one sampled with noise that belongs to the position and not to the step.

Sampling adds Gumbel noise to the scaled logits and takes the top one, which draws from their softmax. The noise is a
function of a request's seed, the position and the token alone. So every method that verifies drafts against "what the
model itself would say here" emits the same tokens as AR decoding with that seed, and what it does is the standard
rejection rule: a draft d is kept with probability p(d), else replaced by a draw from p without d (arXiv 2211.17192, for
drafts that are one token). p is what top-k, top-p and min-p leave of the softmax.
"""

import torch
from torch import Tensor


def choose(logits: Tensor, position: Tensor, temperature: Tensor, seed: Tensor, cut: Tensor | None = None) -> Tensor:
    """The tokens [N, K] by logits [N, K, V], at a `position` [N, K]: the top ones where `temperature` fp32 [N] is 0."""
    scaled = logits.float() / temperature.clamp(min=1e-6).view(-1, 1, 1)
    if cut is not None:
        scaled = cut_off(scaled, *cut.unbind(-1))
    sampled = (scaled + _gumbel(seed, position, logits.shape[-1])).argmax(-1)
    return torch.where(temperature.unsqueeze(1) > 0, sampled, logits.argmax(-1))


def cut_off(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Of logits fp32 [N, K, V], divided by the temperature, those of what may be sampled, -inf elsewhere.

    The top token always may. Others are one of the `top_k` [N] most probable (0 or less: of all), of these one of the
    fewest that together are as probable as `top_p` [N] (1: of all), and at least `min_p` [N] times as probable as the
    top.
    """
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[-1], device=logits.device)
    most = torch.where(top_k > 0, top_k, logits.shape[-1]).view(-1, 1, 1)
    ranked = ranked.masked_fill(place >= most, -torch.inf)
    probability = ranked.softmax(-1)
    before = probability.cumsum(-1) - probability  # of all that are more probable
    whole, least = top_p.view(-1, 1, 1), min_p.view(-1, 1, 1)
    out = (place > 0) & (((before >= whole) & (whole < 1)) | (probability < least * probability[..., :1]))
    return torch.empty_like(logits).scatter_(-1, order, ranked.masked_fill(out, -torch.inf))


def _gumbel(seed: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise fp32 [N, K, V], the same for the same (seed, position, token) on every device.

    It is -log(-log(u)) of a uniform u. Of many draws the largest matter, where u is next to 1 and fp32 has no numbers
    left; so the bits say how far u lies below 1: the noise ends at 28, not at infinity.
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
