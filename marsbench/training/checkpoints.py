"""Checkpoints on disk: where they lie, what they say about themselves, how they are loaded.

A finished checkpoint is a folder that plain `AutoModelForCausalLM` and `AutoTokenizer` load, with one more file,
`marsbench.json`: its recipe, provenance, the hash of its weights and what its training cost. It appears whole or not
at all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from marsbench.errors import UserError
from marsbench.training.medusa import MedusaHeads
from marsbench.training.stages import BLOCKWISE, STAGES, Recipe

RECORD = "marsbench.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class TrainingRecord:
    """What a finished checkpoint says about itself."""

    key: str
    recipe: dict[str, Any]
    provenance: dict[str, Any]
    weights: str  # SHA-256 of the weights file
    parameters: int
    steps: int
    tokens: int  # of the sequences seen, padding and noisy copies not counted
    seconds: float  # wall time of training, interruptions not counted
    loss: float  # mean over the last logging interval
    measures: dict[str, float] = field(default_factory=dict)  # what else was measured, such as the accuracy of heads


@dataclass(frozen=True)
class Loaded:
    """A checkpoint ready to decode."""

    model: PreTrainedModel
    own_tokenizer: PreTrainedTokenizerBase | None  # None where the folder holds none and none was asked for
    weights: str  # SHA-256 of the weights files
    stage: str | None  # the stage that trained it, None where it does not say
    heads: MedusaHeads | None = None  # Medusa heads, where the checkpoint has some

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; `UserError` for a checkpoint without one."""
        if self.own_tokenizer is None:
            raise UserError(
                "the checkpoint has no tokenizer.json",
                where=str(self.model.name_or_path),
                fix="copy it from the checkpoint it was made of",
            )
        return self.own_tokenizer

    @property
    def mask_id(self) -> int | None:
        """The id of `<|mask|>`, None for a tokenizer without one."""
        if self.own_tokenizer is None:
            return None
        mask: int | None = self.tokenizer.mask_token_id
        if mask is None:
            mask = self.tokenizer.get_vocab().get("<|mask|>")
        return mask

    @property
    def knows_masks(self) -> bool:
        """Whether its training showed it masks; True where it does not say how it was trained."""
        return self.stage is None or STAGES[self.stage].objective in BLOCKWISE


def finished(folder: Path) -> TrainingRecord | None:
    """The record of a finished checkpoint, None where there is none."""
    try:
        return TrainingRecord(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def publish(folder: Path, target: Path, recipe: Recipe, **facts: Any) -> None:
    """Write the record into a folder that holds model and tokenizer, and move it to its place in one step."""
    record = TrainingRecord(key=recipe.key, recipe=asdict(recipe), weights=weights_hash(folder), **facts)
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    folder.rename(target)


def weights_hash(folder: Path) -> str:
    """SHA-256 over all weights files of a checkpoint."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    needs_tokenizer: bool = True,
) -> Loaded:
    """Load a checkpoint folder (or a hub name) for decoding.

    Raises:
        UserError: the folder is missing, incomplete or cut short.
    """
    folder = Path(path)
    local = folder.is_absolute() or folder.exists() or str(path).startswith(".")
    if local:
        _check_folder(folder, needs_tokenizer)
    without = local and not (folder / "tokenizer.json").is_file()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        torch.nn.Module.to(model, device).eval()  # type: ignore[no-untyped-call]
        tokenizer = None if without else AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers and safetensors raise a dozen kinds for a file cut short
        raise UserError(
            f"the checkpoint cannot be loaded: {str(error).splitlines()[0]}",
            where=str(path),
            fix="the folder or hub name may be wrong or a file cut short; copy or train it again",
        ) from error
    record = finished(folder)
    stage = str(record.recipe["stage"]) if record else None
    heads = MedusaHeads.load(folder, dtype=dtype, device=device)
    return Loaded(model, tokenizer, record.weights if record else weights_hash(folder), stage, heads)


def _check_folder(folder: Path, needs_tokenizer: bool) -> None:
    """Refuse a folder in which a model cannot be, with a clearer word than the loader's."""
    if not folder.is_dir():
        raise UserError(
            "there is no such checkpoint",
            where=str(folder),
            fix="check the path, or train it: marsbench train",
        )
    for name in ("config.json", *(["tokenizer.json"] if needs_tokenizer else [])):
        if not (folder / name).is_file():
            raise UserError(f"the checkpoint has no {name}", where=str(folder), fix="copy or train it again")
    if not list(folder.glob("*.safetensors")):
        raise UserError("the checkpoint has no weights", where=str(folder), fix="copy or train it again")
