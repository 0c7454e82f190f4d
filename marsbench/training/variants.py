"""What the MARS paper and its released code disagree about in training, as options of the MARS objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Alignment = Literal["released", "paper"]
BlocksFrom = Literal["sequence", "response"]


@dataclass(frozen=True)
class MarsVariant:
    """How a MARS stage trains where paper and code differ; the defaults are what the released MARS trainer does."""

    # What predicts the first token of a block: the last mask of the block before it (released), or the clean token
    # before it, as in AR (paper, equations 4 and 6). The others are predicted by the mask before them either way.
    alignment: Alignment = "released"
    # Where blocks are counted from: the first token of the sequence (released), or of each response (paper).
    blocks_from: BlocksFrom = "sequence"
    # Whether sequences are filled up to a multiple of B with labelled EOS, of which the paper says nothing.
    fills_with_eos: bool = True
    # Whether each sequence's loss counts 1/t times, as in the released "w/o SFT loss" trainer and nowhere else.
    weighs_by_timestep: bool = False


RELEASED = MarsVariant()
