"""Chat data of the real scales: conversations from a JSON Lines file or the hub, as token ids with labels.

A row has a column `messages`, a list of {"role", "content"}. Every assistant turn is learned, with the token that ends
it. In a local file every line must be right; rows of a hub data set that are not are left out and counted.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from marsbench.errors import UserError, told_to_user
from marsbench.json_lines import read_lines
from marsbench.keys import content_hash
from marsbench.locks import locked
from marsbench.training.data import TrainingSequence, with_labels
from marsbench.training.objectives import IGNORED

ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, str]  # role and content
# What a turn may say beside its text, as lists and structures do. It would be lost, and the rest learned as if all.
_BESIDE_TEXT = {
    "tool_calls", "tool_call", "function_call", "reasoning_content", "reasoning", "thinking", "thought", "thoughts",
    "refusal", "audio", "image", "video", "file", "prefix",
}  # fmt: skip
_LEARNED = ("weight", "train", "training", "trainable", "loss")  # by which others say that a turn is only read


@dataclass(frozen=True)
class ChatData:
    sequences: Sequence[TrainingSequence]
    lengths: list[int]  # tokens of each sequence
    labelled: list[int]  # how many of them are labelled
    dropped: int  # conversations without a labelled token, or with turns that cannot be read


def read_chat_data(source: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> ChatData:
    """Read and tokenise conversations, cut at `max_length` tokens; `UserError` for what is none, or teaches nothing."""
    from datasets.config import HF_DATASETS_CACHE

    local = source.endswith((".jsonl", ".json")) or Path(source).is_file()
    table = _from_file(Path(source)) if local else _from_hub(source)

    def encoded(batch: dict[str, list[Any]], indices: Iterable[int]) -> dict[str, list[Any]]:
        conversations = []
        for index, turns in zip(indices, batch["messages"], strict=True):
            what, where = "this is no conversation to learn", f"{source}, line {index + 1}"
            mend = told_to_user(what, ValueError, where=where, fix="correct the conversation")
            with mend if local else suppress(ValueError):
                conversations.append(segments(tokenizer, text_turns(turns)))
        sequences = [
            (sequence["input_ids"][:max_length], sequence["labels"][:max_length])
            for sequence in with_labels(tokenizer, conversations)
            if any(label != IGNORED for label in sequence["labels"][1:max_length])
        ]
        return {
            "input_ids": [ids for ids, _ in sequences],
            "labels": [labels for _, labels in sequences],
            "length": [len(ids) for ids, _ in sequences],
            "labelled": [sum(label != IGNORED for label in labels) for _, labels in sequences],
        }

    # All that the tokenised rows depend on, this file included; their name in the cache.
    parts = [table._fingerprint, tokenizer.chat_template, tokenizer.eos_token, sorted(tokenizer.get_vocab().items())]
    parts += [max_length, Path(__file__).read_text(encoding="utf-8")]
    key = content_hash(parts)
    # Data is tokenised once and kept; whichever process comes first does it, and the others wait for it.
    kept = Path(HF_DATASETS_CACHE) / "marsbench" / f"{key}.arrow"
    with locked(kept.with_suffix(".lock")):
        rows = table.map(
            encoded, with_indices=True, batched=True, remove_columns=table.column_names,
            num_proc=None if local else os.cpu_count(), cache_file_name=str(kept), new_fingerprint=key,
        )  # fmt: skip
    if not len(rows):
        raise UserError("no conversation has an assistant's turn to learn", where=source, fix="check the roles")
    return ChatData(rows, list(rows["length"]), list(rows["labelled"]), len(table) - len(rows))


class _Line(TypedDict):
    messages: Any


def _from_file(file: Path) -> Any:
    from datasets import Dataset

    fix, rows = 'write {"messages": [{"role": "user", "content": "..."}, ...]} on one line', []
    for number, record in enumerate(read_lines(file, _Line, what="a conversation", mend=fix), 1):
        with told_to_user("this is no conversation", ValueError, where=f"{file}, line {number}", fix=fix):
            rows.append({"messages": text_turns(record["messages"])})
    return Dataset.from_list(rows)


def _from_hub(name: str) -> Any:
    from datasets import load_dataset

    # It raises a dozen kinds of errors: no network, no such data set, no access, a broken file.
    fix = "check the name and the network, or give a JSON Lines file: --chat-data FILE.jsonl"
    with told_to_user("the chat data cannot be fetched", Exception, where=name, fix=fix):
        table = load_dataset(name, split="train")
    if "messages" not in table.column_names:
        raise UserError("no column messages", where=name, fix="choose a data set of conversations")
    return table


def text_turns(turns: Any) -> list[Message]:
    """The turns with role and content alone; `ValueError` for other roles, no text, or more than text."""
    if not isinstance(turns, list) or not turns:
        raise ValueError("not a list of turns")
    for number, turn in enumerate(turns, 1):
        for name in ("role", "content"):
            if not isinstance(turn, dict) or not isinstance(turn.get(name), str):
                raise ValueError(f"message {number} has no {name}")
        if turn["role"] not in ROLES:
            raise ValueError(f"message {number} has the unknown role {turn['role']!r}; known: {', '.join(ROLES)}")
        for name, value in turn.items():
            if value and (name in _BESIDE_TEXT or isinstance(value, list | dict)):
                raise ValueError(f"message {number} has {name}, and only text can be learned")
        if turn["role"] == "assistant" and any(turn.get(name) in (0, "0") for name in _LEARNED):
            raise ValueError(f"message {number} is not to be learned, and all answers are")
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise ValueError(f"message {number} is an empty answer")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def segments(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[tuple[str, bool]]:
    """A conversation as its chat template writes it, cut into text to read (False) and text to learn (True).

    What is learned is what the assistant says after the template's own opening of its turn, up to and with EOS.
    `ValueError` where the template refuses the conversation, ends no turn with EOS, or rewrites earlier turns.
    """
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    end, parts, at = str(tokenizer.eos_token), list[tuple[str, bool]](), 0
    seen = ""  # of the turns that were taken
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = str(render(messages[:number], add_generation_prompt=True))
            after = str(render(messages[: number + 1]))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses message {number + 1}: {error}") from error
        stop = after.rfind(end, len(before)) + len(end)
        if not before.startswith(seen) or not after.startswith(before) or stop < len(before) + len(end):
            raise ValueError(f"the chat template does not write message {number + 1} as a turn that {end} ends")
        parts += [(after[at : len(before)], False), (after[len(before) : stop], True)]
        at, seen = stop, after[:stop]
    return parts
