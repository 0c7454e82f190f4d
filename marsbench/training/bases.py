"""Checkpoints to hand on: bases and adapters in bf16, with their records, as they are shipped with the package.

`python -m marsbench.training.bases CHECKPOINT FOLDER` makes one of a checkpoint that `marsbench train` has trained.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from marsbench.errors import UserError, told_to_user
from marsbench.training import checkpoints, records
from marsbench.training.adapter_files import CONFIG, base_of, is_adapter


def checked_base(folder: str) -> Path:
    """A shipped base's folder, once its weights are found to be those of its record; `UserError` otherwise."""
    place, fix = Path(folder), "install marsbench again, or train everything with --from-scratch"
    with told_to_user("the shipped base cannot be read", OSError, ValueError, TypeError, where=folder, fix=fix):
        try:
            record = records.finished(place)
        except UserError as error:  # its own fix, another training, is not that of what is shipped
            raise UserError(f"the shipped base cannot be read: {error.what}", where=folder, fix=fix) from error
        if record is None:
            raise UserError("the shipped base is missing", where=folder, fix=fix)
        if record.weights != records.weights_hash(place):
            said = "the shipped base is damaged: its weights are not those of its record"
            raise UserError(said, where=folder, fix=fix)
    return place


def ship(trained: Path, target: Path) -> None:
    """Write a trained checkpoint's shipped form into a folder: bf16, what loads it, and its record.

    An adapter takes its tokenizer along where its model's own knows no mask.
    """
    record = records.finished(trained)
    if record is None:
        raise UserError("this is no finished checkpoint", where=str(trained), fix="give what marsbench train printed")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if is_adapter(trained):
        for file in trained.glob("*.safetensors"):
            halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
            save_file(halves, partial / file.name)
        shutil.copy(trained / CONFIG, partial)
        if checkpoints.load(base_of(trained)).mask_id is None:
            AutoTokenizer.from_pretrained(trained).save_pretrained(partial)
    else:
        loaded = checkpoints.load(trained)
        torch.nn.Module.to(loaded.model, torch.bfloat16)
        loaded.model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
    records.publish(replace(record, weights=records.weights_hash(partial)), partial, target)


if __name__ == "__main__":
    ship(Path(sys.argv[1]), Path(sys.argv[2]))
