"""Makes `lm_eval --model marsbench` work, although lm-eval looks for no plug-ins.

PyTorch does: it calls every entry point of the group `torch.backends` when it is imported, and ours adds a name to
lm-eval's registry if lm-eval is starting. In a program, `import marsbench.evaluation.lm_eval_model` does the same.
"""

import sys
from contextlib import suppress

NAME, TARGET = "marsbench", "marsbench.evaluation.lm_eval_model:MarsbenchLM"


def register() -> None:
    if "lm_eval" not in sys.modules:
        return
    with suppress(Exception):  # whatever another version of lm-eval does, `import torch` must not fail for it
        import lm_eval.models  # noqa: F401  its own models first: it adds them only to an empty registry
        from lm_eval.api.registry import model_registry

        model_registry.register(NAME, target=TARGET)
