"""What a finished checkpoint says about itself.

It is a folder that plain transformers loads, with one more file, `marsbench.json`: its recipe, provenance, the hash of
its weights and what its training cost. It appears whole or not at all.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

from marsbench.json_lines import read_json

RECORD = "marsbench.json"
AT_PLACE = "acceptance_at_pos_"  # among a record's measures, as speculators' `acceptance.csv` has it


@dataclass(frozen=True)
class TrainingRecord:
    key: str
    recipe: dict[str, Any]
    provenance: dict[str, Any]
    weights: str  # SHA-256 of the weights file
    parameters: int
    steps: int
    tokens: int  # of the sequences seen, padding and noisy copies not counted
    seconds: float  # wall time of training, interruptions not counted
    loss: float  # mean over the last logging interval
    losses: list[float] = field(default_factory=list)  # mean over every logging interval, all of the same length
    measures: dict[str, float] = field(default_factory=dict)  # what else was measured, such as acceptance
    base_weights: str | None = None  # of an adapter: SHA-256 of the weights of the model that it was trained on

    @property
    def acceptance(self) -> tuple[float, ...]:
        """How often a draft was right where all before it were, by its place in a window; empty if not measured."""
        places = takewhile(self.measures.__contains__, (f"{AT_PLACE}{place}" for place in count()))
        rates = [1.0, *[self.measures[name] for name in places]]  # measured of all forwards that verify drafts
        return tuple(rate / before for before, rate in pairwise(rates) if before)


def finished(folder: Path, mend: str = "copy the checkpoint or train it again") -> TrainingRecord | None:
    file = folder / RECORD
    return read_json(file, TrainingRecord, mend=mend) if file.is_file() else None


def publish(record: TrainingRecord, folder: Path, target: Path) -> None:
    """Write a record into the folder that it is about, and move that to its place in one step."""
    (folder / RECORD).write_bytes(in_json(record))
    folder.rename(target)


def in_json(record: TrainingRecord) -> bytes:
    return f"{json.dumps(asdict(record), indent=1)}\n".encode()


def weights_with_adapter(weights: str, adapter: str) -> str:
    return hashlib.sha256(f"{weights} {adapter}".encode()).hexdigest()


def weights_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
