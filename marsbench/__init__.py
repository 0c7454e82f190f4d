"""marsbench: train, decode, score and time MARS and its baselines, and compare with the paper's tables.

MARS (arXiv 2604.07023) fine-tunes a causal language model so that one forward pass can yield several tokens.
Importing this package loads nothing heavy; each room (`marsbench.training`, `marsbench.decoding`, ...) loads
what it needs.
"""

__version__ = "0.1.0"
