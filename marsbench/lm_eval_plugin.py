"""Makes `lm_eval --model marsbench` work.

lm-eval has a registry of models but looks for no plug-ins. PyTorch does: it calls every entry point of the group
`torch.backends` when it is imported. Ours looks whether it is lm-eval that is starting, and only then adds a name to
lm-eval's registry; nothing is imported for it before the name is asked for. In a Python program that imports torch
first, `import marsbench.evaluation.lm_eval_model` does the same.
"""

import sys
from contextlib import suppress

NAME, TARGET = "marsbench", "marsbench.evaluation.lm_eval_model:MarsbenchLM"


def register() -> None:
    """Add the model to lm-eval's registry if lm-eval is what runs."""
    if "lm_eval" not in sys.modules:
        return
    with suppress(Exception):  # whatever another version of lm-eval does, `import torch` must not fail for it
        import lm_eval.models  # noqa: F401  its own models first: it adds them only to an empty registry
        from lm_eval.api.registry import model_registry

        model_registry.register(NAME, target=TARGET)
