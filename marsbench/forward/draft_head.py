"""A small head behind masks that tells each of them which token stands before it.

Masks of one window guess side by side. A draft head adds to a mask's logits what the token before makes of them, so
masks are read from left to right, after the one forward pass that they share. It never acts on a token of the text, so
verified decoding says what the model says. In decoding, a mask's likeliest tokens alone are left to choose from.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.forward.native import can_pack, pack

_RANK = 64  # of the table
Linear = Callable[[Tensor, Tensor], Tensor]  # values [..., in] and a weight to [..., out]
Norm = Callable[[Tensor], Tensor]


def _normed(values: Tensor) -> Tensor:
    return F.rms_norm(values, values.shape[-1:])


class Markov(NamedTuple):
    """A table of low rank: `before[previous token] @ after.T` is added to the logits."""

    before: Tensor  # [V, r]
    after: Tensor  # [V, r]

    @classmethod
    def fresh(cls, vocabulary: int, size: int) -> "Markov":
        return cls(torch.randn(vocabulary, _RANK) / math.sqrt(_RANK), torch.zeros(vocabulary, _RANK))

    def fits(self, vocabulary: int, size: int) -> bool:
        return self.before.shape == self.after.shape and len(self.after) == vocabulary


class Network(NamedTuple):
    """Two layers that see a mask's state and the previous token's embedding, and change what the LM head reads."""

    of_state: Tensor  # [F, H]
    of_token: Tensor  # [F, H]
    out: Tensor  # [H, F]

    @classmethod
    def fresh(cls, vocabulary: int, size: int) -> "Network":
        first, second = (nn.init.kaiming_uniform_(torch.empty(size, size), a=math.sqrt(5)) for _ in range(2))
        return cls(first, second, torch.zeros(size, size))

    def fits(self, vocabulary: int, size: int) -> bool:
        middle = len(self.of_state)
        return self.of_state.shape == self.of_token.shape == (middle, size) and self.out.shape == (size, middle)

    def seen(self, states: Tensor, linear: Linear = F.linear, normed: Norm = _normed) -> Tensor:
        """What it sees of masks' states [..., H], as the LM head reads them: [..., F]."""
        rows = states.reshape(-1, states.shape[-1])  # a product of our own takes two dimensions
        seen = linear(normed(rows), self.of_state)
        return seen.view(*states.shape[:-1], seen.shape[-1])

    def change(self, seen: Tensor, embedded: Tensor, linear: Linear = F.linear, normed: Norm = _normed) -> Tensor:
        """What is added to the states [..., H], from `seen` [..., F] and the previous tokens' embeddings [..., H]."""
        return linear(F.silu(seen + linear(normed(embedded), self.of_token)), self.out)


DraftHead = Markov | Network
KINDS: dict[str, type[Markov] | type[Network]] = {"markov": Markov, "network": Network}


@dataclass(frozen=True)
class HeadInUse:
    head: DraftHead  # on the model's device and of its type
    embed: Callable[[Tensor], Tensor]  # tokens [...] to embeddings [..., H]
    lm_head: Callable[[Tensor], Tensor]
    rows: Tensor | None  # [V, H], the LM head's, where nothing else makes logits of states
    linear: Linear = F.linear  # what multiplies by a network's weights as they lie in `head`
    normed: Norm = _normed  # what normalises states and embeddings

    def behind(self, states: Tensor, ids: Tensor, logits: Tensor) -> Callable[[int, Tensor], Tensor]:
        """What it makes of the masks' `logits` [N, K, T] of the tokens `ids` [N, K, T], one mask after the other.

        A function of a mask's place and the tokens [N] before it, that gives logits fp32 [N, T]. `states` [N, K, H] are
        of the masks, as the LM head reads them.
        """
        head, logits = self.head, logits.float()
        if isinstance(head, Markov):
            after = F.embedding(ids, head.after).float()
            return lambda place, before: _plus(logits[:, place], after[:, place], F.embedding(before, head.before))
        seen = head.seen(states, self.linear, self.normed)
        rows = None if self.rows is None else F.embedding(ids, self.rows).float()

        def heeding(place: int, before: Tensor) -> Tensor:
            code = head.change(seen[:, place], self.embed(before), self.linear, self.normed)
            if rows is not None:
                return _plus(logits[:, place], rows[:, place], code)
            return self.lm_head((states[:, place] + code).unsqueeze(1)).squeeze(1).gather(1, ids[:, place]).float()

        return heeding


def packed(head: DraftHead | None) -> DraftHead | None:
    """A network as `native.product` reads it; None where it does not, and of a table, which is looked up."""
    if isinstance(head, Network) and all(can_pack(weight.shape[0], weight.shape[1], weight.dtype) for weight in head):
        return Network(*map(pack, head))
    return None


def _plus(logits: Tensor, rows: Tensor, code: Tensor) -> Tensor:
    """Logits fp32 [N, T], and fp32 [N, T, R] times [N, R]."""
    return torch.baddbmm(logits.unsqueeze(-1), rows, code.float().unsqueeze(-1)).squeeze(-1)
