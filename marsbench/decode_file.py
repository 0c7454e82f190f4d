"""`marsbench decode`: prompts as token ids in a JSON Lines file, continuations as token ids in another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marsbench.decoding.engine import KindOfBatch, Method, check_requests, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically
from marsbench.json_lines import read_objects
from marsbench.progress import Reporter


def read_prompts(file: Path) -> list[list[int]]:
    """The prompts of a file, one `{"prompt_ids": [...]}` a line; `UserError` with the line of whatever is wrong."""
    return [
        _prompt(one["prompt_ids"], f"{file}, line {number}")
        for number, one in enumerate(read_objects(file, ["prompt_ids"]), 1)
    ]


def _prompt(ids: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError('"prompt_ids" is not a list of integers', where=where, fix="give token ids, not text")
    return ids


def decode_file(
    model: Any,
    method: Method | OutsideMethod,
    requests: Sequence[Request],
    source: Path,
    target: Path,
    *,
    eos_id: Sequence[int],
    pad_id: int,
    batch_size: int,
    prefill_positions: int,
    kind: KindOfBatch,
    reporter: Reporter,
) -> list[Generation]:
    """Continue the requests read from `source`, one a line, and write `target`, in the same order and all at once.

    Raises:
        UserError: a line that the model cannot run, or a target that cannot be written to; before anything is decoded.
    """
    check_target(source, target)
    check_requests(requests, model, where=f"{source}, line {{}}")
    vocabulary = model.get_input_embeddings().num_embeddings
    for name, token in (*(("EOS", token) for token in eos_id), ("pad", pad_id)):
        if not 0 <= token < vocabulary:
            raise UserError(f"{name} id {token} lies outside the vocabulary of {vocabulary}", fix="give another id")
    done = 0
    with reporter.bar(f"decoding {source.name} by {method.name}") as bar:

        def finished(index: int, generation: Generation) -> None:
            nonlocal done
            done += 1
            bar.update(done, len(requests))

        generations = decode(
            model, method, requests, eos_id=eos_id, pad_id=pad_id, batch_size=batch_size, on_finished=finished,
            prefill_positions=prefill_positions, kind=kind,
        )  # fmt: skip
    told = ("tokens", "forwards", "accepted", "finish")
    lines = [json.dumps({name: getattr(one, name) for name in told}) + "\n" for one in generations]
    write_atomically(target, "".join(lines).encode())
    return generations


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that cannot be written to, or that holds the prompts, before any work is done."""
    check_can_be_written(target, "--out")
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError("--out would overwrite the prompts", where=str(target), fix="choose another --out")
