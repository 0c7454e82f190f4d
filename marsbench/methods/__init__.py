"""The decoding methods, one file each, and what each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from marsbench.decoding.engine import Method
from marsbench.decoding.generation import Metric
from marsbench.errors import UserError, unknown_name
from marsbench.methods.ar import Autoregressive
from marsbench.methods.block_diffusion import BlockDiffusion
from marsbench.methods.mars import Mars
from marsbench.methods.mars_no_cache import MarsNoCache


@dataclass(frozen=True)
class MethodInfo:
    """How a method is made and what to tell a user about it."""

    build: Callable[[int, int, Metric], Method]  # (mask id, block size, metric)
    summary: str
    exact: str  # what its output equals (fp32, greedy)
    needs_masks: bool  # needs a checkpoint whose tokenizer has a mask token


METHODS: dict[str, MethodInfo] = {
    "ar": MethodInfo(
        lambda mask_id, block_size, metric: Autoregressive(),
        "one token per forward, KV cache",
        "greedy decoding",
        False,
    ),
    "mars": MethodInfo(
        Mars,
        "sliding window of masks, KV cache",
        "`ar` when one token is accepted per forward",
        True,
    ),
    "mars-no-cache": MethodInfo(MarsNoCache, "`mars` that recomputes the prefix in every forward", "`mars`", True),
    "block-diffusion": MethodInfo(
        BlockDiffusion, "fills a block in any order, bidirectional attention in it", "-", True
    ),
}


def build_method(name: str, *, mask_id: int | None, block_size: int = 4, metric: Metric = "probability") -> Method:
    """A method by name.

    Args:
        name: one of `METHODS`.
        mask_id: the id of `<|mask|>`, None for a checkpoint without one.
        block_size: B, tokens predicted per forward at most.
        metric: the confidence metric that thresholds are compared with.

    Raises:
        UserError: unknown name, no mask token, or a block size below 1.
    """
    if name not in METHODS:
        raise unknown_name("method", name, list(METHODS))
    if block_size < 1:
        raise UserError(f"block size {block_size} is below 1", fix="give a block size of 1 or more, 4 in the paper")
    info = METHODS[name]
    if info.needs_masks and mask_id is None:
        raise UserError(
            f"method {name!r} needs a mask token and this checkpoint's tokenizer has none",
            fix="use a MARS checkpoint, give --mask-id, or choose --method ar",
        )
    return info.build(mask_id if mask_id is not None else -1, block_size, metric)
