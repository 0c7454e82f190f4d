"""All rows of the page of compiled steps: races on a trained checkpoint, and the steps of a model bound by memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marsbench.keys import content_hash
from marsbench.racing.course import Course
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.running.run import Run
from marsbench.studies.compiled import RANDOM, random_grid, trained_grid
from marsbench.training.checkpoints import Loaded, default_device


def compiled_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing."""
    trained = trained_grid(run.scale)
    raced = Sweep(run, trained).rows()
    # The questions come to random weights in the world's own tokens.
    tokenizer = Course(run, trained).baseline.tokenizer

    def load(stage: str, block_size: int, dtype: torch.dtype) -> Loaded:
        return Loaded(random_weights(stage, dtype), tokenizer, content_hash(RANDOM[stage]), None)

    return [*raced, *Sweep(run, random_grid(run.scale), load).rows()]


def random_weights(stage: str, dtype: torch.dtype) -> Any:
    """The model of a shape, the same whenever it is made, where trained ones decode too."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**RANDOM[stage]))
    return model.to(default_device(), dtype).eval()
