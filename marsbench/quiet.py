"""Keeps the chatter of libraries off the terminal, where a progress bar is to be read."""

from __future__ import annotations

import logging
import os
import warnings

_COMPILING = ("dynamo", "inductor")  # the parts of torch that compile steps


def quieten_libraries() -> None:
    """Only warnings that a user can act on remain; call it before transformers and lm-eval are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_LOGS", ",".join(f"-{name}" for name in _COMPILING))  # torch sets levels when it comes
    compiling = [f"torch._{name}" for name in _COMPILING]
    for name in ("lm_eval", "lm-eval", "transformers", "datasets", "accelerate", "httpx", *compiling):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lm_eval|transformers|datasets|accelerate|torch)\b")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    from datasets import disable_progress_bars

    disable_progress_bars()
