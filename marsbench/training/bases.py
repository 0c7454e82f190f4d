"""Bases that are shipped with the package, as Qwen2.5 is with its own: trained once, in bf16, with their records.

`python -m marsbench.training.bases CHECKPOINT FOLDER` makes one of a checkpoint that `marsbench train base` or
`draft_base` has trained.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from marsbench.errors import UserError
from marsbench.training import checkpoints, records


def checked_base(folder: str) -> Path:
    """A shipped base's folder, once its weights are found to be those of its record; `UserError` otherwise."""
    fix = "install marsbench again, or train everything anew with --from-scratch"
    try:
        record = records.finished(Path(folder))
        whole = record is not None and record.weights == records.weights_hash(Path(folder))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the shipped base cannot be read: {error}", where=folder, fix=fix) from error
    if record is None:
        raise UserError("the shipped base is missing", where=folder, fix=fix)
    if not whole:
        raise UserError("the shipped base is damaged: its weights are not those of its record", where=folder, fix=fix)
    return Path(folder)


def ship(trained: Path, target: Path) -> None:
    """Write a trained checkpoint's shipped form into a folder: bf16, what loads it, and its record."""
    record = records.finished(trained)
    if record is None:
        raise UserError("this is no finished checkpoint", where=str(trained), fix="give what marsbench train printed")
    loaded = checkpoints.load(trained)
    torch.nn.Module.to(loaded.model, torch.bfloat16)
    loaded.model.save_pretrained(target)
    loaded.tokenizer.save_pretrained(target)
    shipped = replace(record, weights=records.weights_hash(target))
    (target / records.RECORD).write_text(json.dumps(asdict(shipped), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    ship(Path(sys.argv[1]), Path(sys.argv[2]))
