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
from marsbench.studies.compiled.contenders import RANDOM, random_grid, trained_grid
from marsbench.training.checkpoints import Loaded


def compiled_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing."""
    trained = trained_grid(run.scale)
    raced = Sweep(run, trained).rows()
    tokenizer = Course(
        run, trained
    ).baseline.tokenizer  # the questions come to random weights in the world's own tokens

    def random_weights(stage: str, block_size: int, dtype: torch.dtype) -> Loaded:
        """The model of a shape, the same whenever it is made."""
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**RANDOM[stage]))
        return Loaded(model.to(dtype).eval(), tokenizer, content_hash(RANDOM[stage]), None)

    return [*raced, *Sweep(run, random_grid(run.scale), random_weights).rows()]
