"""Training data: texts and conversations as token ids with labels, and the batches made of them."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from marsbench import world
from marsbench.training.objectives import IGNORED

# Streams of the world are told apart by seed: the plain text never repeats the conversations word for word.
_TEXT_SEED, _CHAT_SEED, _BASE_CHAT_SEED = 10_000, 20_000, 30_000
_LEAST_TIMESTEP = 1e-3


class TrainingSequence(TypedDict):
    input_ids: list[int]
    labels: list[int]  # -100 on the prompt
    weight: NotRequired[float]  # by how much its loss counts, where that differs from sequence to sequence


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """A user's turn as the model sees it, up to where the assistant begins."""
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


Teaching = Literal["conversations", "plain_text", "instruct_data"]


def taught(
    what: Teaching, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, level: world.Difficulty
) -> list[TrainingSequence]:
    """The first sequences of what the world teaches, each with an EOS behind it.

    Of conversations only the answer and its EOS are labelled; of plain text every token is. An instruct base learns
    from texts, of which all but problems are labelled, and conversations in turn, none that fine-tuning will meet:
    problems are drawn at random, and a model that is to foresee them learns to copy from them much later.
    """

    def chats(seed: int) -> Iterator[tuple[str, str]]:
        return ((chat_prompt(tokenizer, chat.prompt), chat.response) for chat in world.conversations(seed, level))

    texts = world.texts(_TEXT_SEED + seed, level)
    endless: dict[Teaching, Iterable[tuple[str, str]]] = {
        "conversations": chats(_CHAT_SEED + seed),
        "plain_text": (("", given + said) for given, said in texts),
        "instruct_data": chain.from_iterable(zip(texts, chats(_BASE_CHAT_SEED + seed), strict=False)),
    }
    pairs, end = islice(endless[what], count), tokenizer.eos_token
    return with_labels(tokenizer, [[(read, False), (said + end, True)] for read, said in pairs])


def with_labels(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[tuple[str, bool]]]
) -> list[TrainingSequence]:
    """Conversations in segments to read (False) and to learn (True), tokenised apart, as prompts are in decoding."""
    texts = [text for parts in conversations for text, _ in parts]
    pieces = iter(tokenizer(texts, add_special_tokens=False).input_ids if texts else [])
    sequences = list[TrainingSequence]()
    for parts in conversations:
        ids, labels = list[int](), list[int]()
        for _, learned in parts:
            piece = next(pieces)
            ids += piece
            labels += piece if learned else [IGNORED] * len(piece)
        sequences.append({"input_ids": ids, "labels": labels})
    return sequences


def lengths(sequences: Sequence[TrainingSequence]) -> tuple[list[int], list[int]]:
    labelled = [sum(label != IGNORED for label in sequence["labels"]) for sequence in sequences]
    return [len(sequence["input_ids"]) for sequence in sequences], labelled


def shuffled_passes(size: int, count: int, seed: int) -> list[int]:
    """The indices below `size` over and over, every pass in an order of its own, cut at `count`."""
    rng, drawn = random.Random(seed), list[int]()
    while len(drawn) < count:
        drawn += rng.sample(range(size), size)
    return drawn[:count]


def in_batches(drawn: Sequence[int], sizes: Sequence[int], batch_size: int, *, seed: int) -> list[int]:
    """`drawn`, sorted by size within stretches of fifty batches, whose batches are shuffled."""
    rng, stretch, order = random.Random(seed), 50 * batch_size, list[int]()
    for first in range(0, len(drawn), stretch):
        chosen = list(drawn[first : first + stretch])
        rng.shuffle(chosen)
        chosen.sort(key=sizes.__getitem__)
        batches = [chosen[at : at + batch_size] for at in range(0, len(chosen), batch_size)]
        rng.shuffle(batches)
        order += [index for batch in batches for index in batch]
    return order


def timestep_weights(count: int, seed: int) -> list[float]:
    """1/t for each of `count` sequences in training order, t uniform between 0.001 (dLLM's default) and 1.

    The released "w/o SFT loss" trainer draws such a diffusion timestep, masks all of the response whatever it is, and
    still weighs the loss by 1/t: by 6.9 in the mean. Drawn ahead of training, the weights survive a resumption.
    """
    rng = random.Random(f"timesteps {seed}")
    return [1 / (_LEAST_TIMESTEP + (1 - _LEAST_TIMESTEP) * rng.random()) for _ in range(count)]


@dataclass(frozen=True)
class TrainingData:
    sequences: Sequence[TrainingSequence]
    order: Sequence[int]
    tokens: int  # of all sequences as often as they come, padding and noisy copies not counted
    weights: Sequence[float] | None = None  # by how much the loss counts at each position; None = all the same

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> TrainingSequence:
        sequence = self.sequences[self.order[position]]
        return sequence if self.weights is None else {**sequence, "weight": self.weights[position]}


@dataclass(frozen=True)
class Collator:
    """Pads a batch on the right; with a block size, sequences first get labelled EOS up to a multiple of it."""

    pad_id: int
    eos_id: int
    block_size: int | None = None

    def __call__(self, sequences: Sequence[TrainingSequence]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, integer [N, L], and `weight`, fp32 [N], where the sequences have weights."""
        eos = [[self.eos_id] * (-len(sequence["input_ids"]) % (self.block_size or 1)) for sequence in sequences]
        ids = [torch.tensor(sequence["input_ids"] + more) for sequence, more in zip(sequences, eos, strict=True)]
        labels = [torch.tensor(sequence["labels"] + more) for sequence, more in zip(sequences, eos, strict=True)]
        weights = [sequence["weight"] for sequence in sequences if "weight" in sequence]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            **({"weight": torch.tensor(weights)} if weights else {}),
        }
