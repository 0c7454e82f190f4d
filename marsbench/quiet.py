"""Keeps the chatter of libraries off the terminal, where a progress bar is to be read."""

from __future__ import annotations

import logging
import os
import sys
import warnings

_COMPILING = ("dynamo", "inductor")  # the parts of torch that compile steps


def quieten_libraries() -> None:
    """Only warnings that a user can act on remain; what is imported afterwards hears of it by the environment."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # and transformers' with them
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", ",".join(f"-{name}" for name in _COMPILING))  # torch sets levels when it comes
    compiling = [f"torch._{name}" for name in _COMPILING]
    for name in ("lm_eval", "lm-eval", "transformers", "datasets", "accelerate", "httpx", *compiling):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lm_eval|transformers|datasets|accelerate|torch)\b")
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.disable_progress_bar()
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
