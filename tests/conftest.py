"""What several test files share: the golden vectors and their two small checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from marsbench.quiet import quieten_libraries

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(1)  # two test processes on two cores, neither spinning in the other's way
quieten_libraries()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The vectors recorded from the authors' code."""
    vectors: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return vectors


@pytest.fixture(scope="session")
def golden_models() -> dict[str, PreTrainedModel]:
    """The checkpoints that the vectors were recorded on: `ar` and `mars`."""
    return {
        name: AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval() for name in ("ar", "mars")
    }
