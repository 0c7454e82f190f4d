"""MARS in one file: how it trains and how it decodes, plain and slow, to be read from top to bottom.

MARS (Jin, Wang, Luo, Sun, arXiv 2604.07023; sections and equations below are the paper's) adds no layer and no head to
a causal language model, only one token, `[MASK]`. It is a second fine-tuning and a rule for decoding.

- *Training*: a sequence enters the model twice, as it is (the clean stream) and with masks for its response (the noisy
  stream). The clean stream learns the next token, as ever. The noisy stream learns several tokens ahead: a mask sees
  the clean text before its block of B tokens, and the masks before it in the block.
- *Decoding*: put B - 1 masks behind the text. One forward pass then guesses the next B tokens: the first as an ordinary
  model would, the others from masks. Accept them from the left, as long as the model is sure.

This file needs torch alone. Nothing else in the package uses it: the fast trainer and the fast decoder are tested
against it. Every function is about one sequence: L is its length, S the number of entries in one forward pass, V the
size of the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

Metric = Literal["probability", "entropy", "margin"]


class Model(Protocol):
    """A language model as it is needed here, with a say in who sees whom."""

    def __call__(self, ids: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """Logits [S, V] for tokens `ids` [S] at `position` [S]; entry q attends to k where bool `visible[q, k]`."""
        ...


# ---- training: section 3.2 -------------------------------------------------------------------------------------------


def blocks_of_responses(response: Tensor, block_size: int) -> Tensor:
    """The block of each token, [L], as the paper prints it: each response is cut from its first token on.

    `response` says of each token whether it is the model's to learn, bool [L]. A prompt is a block of its own.
    """
    block, size = [0], 1
    for before, now in pairwise(response.tolist()):
        begins = now != before or (now and size == block_size)
        block.append(block[-1] + begins)
        size = 1 if begins else size + 1
    return torch.tensor(block)


def blocks_of_sequence(length: int, block_size: int) -> Tensor:
    """Blocks as released: counted from the start of the sequence, so that a block may begin in the prompt."""
    return torch.arange(length) // block_size


def causal(size: int) -> Tensor:
    """Every entry sees itself and those before it, bool [S, S]: plain autoregression (AR)."""
    return torch.ones(size, size, dtype=torch.bool).tril()


def training_mask(block: Tensor) -> Tensor:
    """Who sees whom when both streams enter at once, the clean one first: bool [2L query, 2L key].

    No clean token sees a mask, so the clean stream is the ordinary model. No mask sees a clean token of its own block,
    among which are the answers.
    """
    query, key = block.unsqueeze(1), block.unsqueeze(0)
    before = causal(len(block))
    clean = torch.cat([before, torch.zeros_like(before)], dim=1)
    noisy = torch.cat([key < query, (key == query) & before], dim=1)
    return torch.cat([clean, noisy])


class Loss(NamedTuple):
    """The two terms of the MARS loss, scalars."""

    mask: Tensor
    ar: Tensor

    def total(self, ar_weight: float = 1.0) -> Tensor:
        """What is minimised (equation 7); weight 0 is the paper's "w/o SFT loss"."""
        return self.mask + ar_weight * self.ar


def mars_loss(
    model: Model, ids: Tensor, response: Tensor, block: Tensor, mask_id: int, *, printed: bool = False
) -> Loss:
    """Mean cross-entropy of the response's tokens in the noisy stream (equations 4 and 6) and in the clean one.

    Token t is predicted by the entry at t - 1. That is what the released code does, everywhere. So the first token of a
    block is predicted by the last mask of the block before it, although decoding will have clean text there. As
    printed, it is predicted from the clean text, and the mask term holds the AR term of every B-th token.

    `ids` are integer [L]; `response`, bool [L], marks the tokens to learn; `block`, integer [L], is made by
    `blocks_of_sequence`, or, as printed, by `blocks_of_responses`.
    """
    length = len(ids)
    noisy = ids.masked_fill(response, mask_id)
    logits = model(torch.cat([ids, noisy]), torch.arange(length).repeat(2), training_mask(block))
    log_p = logits.log_softmax(-1)
    log_p_clean, log_p_noisy = log_p[:length], log_p[length:]
    clean_terms, noisy_terms = [], []
    for t in range(1, length):
        if response[t]:
            clean_terms.append(-log_p_clean[t - 1, ids[t]])
            opens_block = bool(block[t] != block[t - 1])
            source = log_p_clean if printed and opens_block else log_p_noisy
            noisy_terms.append(-source[t - 1, ids[t]])
    return Loss(torch.stack(noisy_terms).mean(), torch.stack(clean_terms).mean())


def ar_loss(model: Model, ids: Tensor, response: Tensor) -> Tensor:
    """Mean cross-entropy of the response's tokens in plain AR: the stage before MARS, which makes the AR SFT model."""
    log_p = model(ids, torch.arange(len(ids)), causal(len(ids))).log_softmax(-1)
    return torch.stack([-log_p[t - 1, ids[t]] for t in range(1, len(ids)) if response[t]]).mean()


def filled_up(ids: Tensor, response: Tensor, block_size: int, eos_id: int) -> tuple[Tensor, Tensor]:
    """A sequence as the released code trains on it: filled to whole blocks with EOS to be learned, not in the paper."""
    missing = -len(ids) % block_size
    return (
        torch.cat([ids, torch.full((missing,), eos_id)]),
        torch.cat([response, torch.ones(missing, dtype=torch.bool)]),
    )


def train(
    parameters: Sequence[nn.Parameter],
    batches: Sequence[Sequence[tuple[Tensor, Tensor]]],
    loss: Callable[[Tensor, Tensor], Tensor],
    learning_rate: float = 5e-6,
) -> None:
    """AdamW over batches of (ids, response): 3 % of warm-up, then a cosine; a batch's loss is its sequences' mean.

    Both stages train this way (section 4.1), first with `ar_loss`, then with `mars_loss`, on the same data.
    """
    optimizer = torch.optim.AdamW(parameters)
    warm_up = max(1, round(0.03 * len(batches)))
    for step, batch in enumerate(batches):
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warm_up) / max(1, len(batches) - warm_up)))
        optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / warm_up, decay)
        optimizer.zero_grad()
        torch.stack([loss(*sequence) for sequence in batch]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


# ---- decoding: section 3.3 -------------------------------------------------------------------------------------------


def is_sure(logits: Tensor, threshold: float, metric: Metric) -> list[bool]:
    """Of logits [K, V]: is the model sure enough of its first choice (appendix D)?"""
    log_p = logits.float().log_softmax(-1)
    p = log_p.exp()
    if metric == "entropy":
        passes = -(p * log_p).sum(-1) <= threshold  # in nats
    elif metric == "margin":
        first, second = p.topk(2, dim=-1).values.unbind(-1)
        passes = first - second >= threshold
    else:
        passes = p.amax(-1) >= threshold
    return [bool(passed) for passed in passes]


def run_of(passes: Sequence[bool]) -> int:
    """How many pass from the left without a gap."""
    return [*passes, False].index(False)


@dataclass
class Reply:
    """A text as it grows, and how many tokens each forward pass has brought."""

    text: list[int]  # the prompt and what has been answered, an EOS among it
    end: int  # the length at which it is cut
    eos_id: int
    accepted: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it has come to an EOS or to its end."""
        return bool(self.accepted) and (self.text[-1] == self.eos_id or len(self.text) >= self.end)

    def accept(self, tokens: list[int]) -> None:
        """Take tokens up to the first EOS and to the end; nothing behind them counts."""
        taken = tokens[: self.end - len(self.text)]
        if self.eos_id in taken:
            taken = taken[: taken.index(self.eos_id) + 1]
        self.text += taken
        self.accepted.append(len(taken))

    @property
    def tokens_per_forward(self) -> float:
        """The paper's tok/fwd, 1 for AR."""
        return sum(self.accepted) / len(self.accepted)


@torch.no_grad()
def decode(
    model: Model, prompt: Sequence[int], *, mask_id: int, eos_id: int, block_size: int = 4,
    threshold: float | None = 0.95, metric: Metric = "probability", max_new_tokens: int = 256,
) -> Reply:  # fmt: skip
    """Greedy decoding with a sliding window of B candidates.

    The first comes from the last token of the text: it is the AR prediction, and always accepted. Candidate j comes
    from mask j - 1, and is accepted while all before it were. Without a threshold ("tau = 1.0" in the paper's tables)
    only the first is, which is AR decoding.
    """
    answer = Reply(list(prompt), len(prompt) + max_new_tokens, eos_id)
    while not answer.finished:
        ids = torch.tensor(answer.text + [mask_id] * (block_size - 1))
        logits = model(ids, torch.arange(len(ids)), causal(len(ids)))[len(answer.text) - 1 :]  # [B, V]
        more = 0 if threshold is None else run_of(is_sure(logits[1:], threshold, metric))
        answer.accept(logits.argmax(-1).tolist()[: 1 + more])
    return answer


# ---- verified decoding: this project's own, with the mask groups of section 4.6 --------------------------------------


def mask_groups(length: int, drafts: int, masks: int) -> tuple[Tensor, Tensor]:
    """A text of some length, drafts, and groups of masks: positions [S], and who sees whom, bool [S, S].

    A group has so many masks. Group j, from 0 to the number of drafts, stands where the text would go on after j of
    them: it sees the text, these j drafts, and itself causally. Nothing else sees it.
    """
    begin = length + drafts
    position, visible = torch.arange(begin + (drafts + 1) * masks), causal(begin + (drafts + 1) * masks)
    for j in range(drafts + 1):
        group = slice(begin + j * masks, begin + (j + 1) * masks)
        position[group] = torch.arange(length + j, length + j + masks)
        visible[group] = False
        visible[group, : length + j] = True
        visible[group, group] = causal(masks)
    return position, visible


Head = Callable[
    [Tensor, int], Tensor
]  # optional, not MARS: logits [V] of a mask, and the token before it, to logits [V]


def chained(head: Head, group: Tensor, before: int) -> Tensor:
    """A head's logits [K, V] of masks: each is told the guess before it, the first the token `before`."""
    chain: list[Tensor] = []
    for logits in group:
        chain.append(head(logits, before))
        before = int(chain[-1].argmax())
    return torch.stack(chain)


@torch.no_grad()
def decode_verified(
    model: Model, prompt: Sequence[int], *, mask_id: int, eos_id: int, block_size: int = 4,
    threshold: float | None = None, metric: Metric = "probability", max_new_tokens: int = 256, head: Head | None = None,
) -> Reply:  # fmt: skip
    """Masks draft, and the model's own next-token predictions verify: the tokens of AR, up to B per forward.

    Attention is causal and no token sees a mask, so the logits at a draft are AR's as long as all drafts before it are
    right. The same forward verifies the drafts and makes the next: of all groups of masks, the one counts that has seen
    the right drafts and no wrong one. Neither threshold nor head changes a token: they only make for better drafts.
    """
    answer, drafts, masks = Reply(list(prompt), len(prompt) + max_new_tokens, eos_id), list[int](), block_size - 1
    while not answer.finished:
        length, count = len(answer.text), len(drafts)
        ids = torch.tensor(answer.text + drafts + [mask_id] * (masks * (count + 1)))
        logits = model(ids, *mask_groups(length, count, masks))
        own = logits[length - 1 : length + count].argmax(-1).tolist()  # after the text, and after each draft
        right = run_of([draft == said for draft, said in zip(drafts, own, strict=False)])
        answer.accept(own[: right + 1])
        group = logits[length + count + right * masks :][:masks]
        group = chained(head, group, own[right]) if head is not None and masks else group
        sure = masks if threshold is None else run_of(is_sure(group, threshold, metric))
        drafts = group.argmax(-1).tolist()[:sure]
    return answer
