"""marsbench: train, decode, score and time MARS and its baselines, and compare with the paper's tables.

MARS (arXiv 2604.07023) fine-tunes a causal language model so that one forward pass can yield several tokens.
Importing this package loads nothing heavy; each room (`marsbench.training`, `marsbench.decoding`, ...) loads
what it needs.
"""

import os
from typing import TYPE_CHECKING, Any

# Who tells torch to use AVX2 alone means oneDNN, too: with AMX in one and not in the other, torch's attention in bf16
# ends in an error ("pack_vnni2 is only supported when avx512 is supported").
if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

if TYPE_CHECKING:
    from marsbench.transformers_generate import generate

__all__ = ["__version__", "generate"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`marsbench.generate`, loaded when it is first asked for."""
    if name == "generate":
        from marsbench.transformers_generate import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
