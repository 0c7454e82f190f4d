"""The registry of methods: what each of them is, what it needs, and which options make sense. Read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from marsbench.decoding.acceptance import METRICS, bar, no_threshold
from marsbench.decoding.generation import Layout, Metric
from marsbench.errors import UserError, unknown_name

Need = Literal["masks", "draft", "heads"]
NEEDS: dict[Need, str] = {
    "masks": "a checkpoint trained with masks",
    "draft": "a draft model (--draft)",
    "heads": "Medusa heads (a `medusa` checkpoint)",
}
DRAFT_METHODS = ("ar", "mars")
LAYOUTS: tuple[str, ...] = get_args(Layout)
_LEAST = {"block_size": 1, "cache_block": 1, "draft_length": 1, "tree_width": 1}  # that the options may be


@dataclass(frozen=True)
class Options:
    """Everything that a method may want to know; each takes what it needs.

    `block_size` is B where a method is trained for it, and the window where it is free to choose: at most so many
    tokens per forward.
    """

    mask_id: int | None = None  # the id of `<|mask|>`, None for a checkpoint without one
    block_size: int = 4
    metric: Metric = "probability"  # the confidence that thresholds are compared with
    cache_block: int = 4  # B_cache, in tokens
    appended_masks: int | None = None  # of `mars-no-cache`; None = B - 1
    layout: Layout = "groups"  # of `mars-verified` and `mars-lookup`
    draft: Any = None  # the draft model
    draft_length: int = 4  # K, tokens drafted per round at most
    draft_method: str = "ar"  # how the draft model decodes
    draft_threshold: float = 0.95  # confidence that a MARS draft's tokens must pass
    heads: Any = None  # Medusa heads
    tree_width: int = 1  # guesses of the first Medusa head; 1 = a chain


@dataclass(frozen=True)
class MethodInfo:
    """What to tell a user about a method; `building` says how it is made."""

    summary: str
    exact: str  # what its output equals (fp32, greedy)
    needs: tuple[Need, ...] = ()
    lossless: bool = False  # equals AR decoding of the same checkpoint, whatever its options
    takes_threshold: bool = False
    one_row: bool = False  # runs at batch size 1 only
    windowed: bool = False  # settles at most `Options.block_size` tokens per forward, or drafts one less by masks
    laid_out: bool = False  # has the layouts of `Options.layout`

    @property
    def needs_masks(self) -> bool:
        """Whether the checkpoint must have seen masks in training."""
        return "masks" in self.needs


METHODS: dict[str, MethodInfo] = {
    "ar": MethodInfo("one token per forward, KV cache", "greedy decoding", lossless=True),
    "mars": MethodInfo(
        "sliding window of masks, KV cache",
        "`ar` when one token is accepted per forward",
        ("masks",),
        takes_threshold=True,
        windowed=True,
    ),
    "mars-no-cache": MethodInfo(
        "`mars` that recomputes the prefix in every forward",
        "`mars`",
        ("masks",),
        takes_threshold=True,
        windowed=True,
    ),
    "mars-block-cache": MethodInfo(
        "the paper's block-level cache, B_cache masks wide",
        "`ar` when one token is accepted per forward",
        ("masks",),
        takes_threshold=True,
    ),
    "mars-verified": MethodInfo(
        "masks draft, the model's own AR logits verify, in one forward",
        "`ar`",
        ("masks",),
        takes_threshold=True,
        lossless=True,
        windowed=True,
        laid_out=True,
    ),
    "mars-lookup": MethodInfo(
        "`mars-verified` that also drafts what followed the same n-gram",
        "`ar`",
        ("masks",),
        takes_threshold=True,
        lossless=True,
        windowed=True,
        laid_out=True,
    ),
    "speculative": MethodInfo(
        "a small model drafts, the model verifies",
        "`ar`",
        ("draft",),
        lossless=True,
    ),
    "mars-speculative": MethodInfo(
        "`speculative` whose verification goes on with masks",
        "`ar` without a threshold",
        ("masks", "draft"),
        takes_threshold=True,
        windowed=True,
    ),
    "medusa": MethodInfo(
        "extra heads draft a chain or a tree, the model verifies",
        "`ar`",
        ("heads",),
        lossless=True,
    ),
    "jacobi": MethodInfo("fixed-point iteration over the next tokens", "`ar`", lossless=True, windowed=True),
    "prompt-lookup": MethodInfo(
        "what followed the same n-gram before is the draft",
        "`ar`",
        lossless=True,
    ),
    "block-diffusion": MethodInfo(
        "fills a block in any order, bidirectional attention in it",
        "-",
        ("masks",),
        takes_threshold=True,
        windowed=True,
    ),
    "hf-generate": MethodInfo("transformers' own `generate`", "`ar`", lossless=True),
    "hf-assisted": MethodInfo(
        "transformers' own `generate` with an assistant model",
        "`ar`",
        ("draft",),
        lossless=True,
        one_row=True,
    ),
}


def check_options(name: str, options: Options) -> None:
    """Refuse a method that there is not, and options that no method could work with."""
    _check_name(name)
    for option, minimum in _LEAST.items():
        _check_count(option, getattr(options, option), minimum)
    if options.appended_masks is not None:
        _check_appended_masks(options)
    if options.mask_id is not None:
        _check_count("mask_id", options.mask_id, 0)
    for option, kind, known in (
        ("metric", "confidence metric", METRICS),
        ("layout", "layout", LAYOUTS),
        ("draft_method", "draft method", DRAFT_METHODS),
    ):
        if getattr(options, option) not in known:
            raise unknown_name(kind, getattr(options, option), list(known))
    _check_number("draft_threshold", options.draft_threshold)
    if not 0 <= options.draft_threshold <= 1:
        raise UserError(f"draft threshold {options.draft_threshold} is out of range", fix="give a value from 0 to 1")


def check_threshold(name: str, threshold: Any, metric: Metric = "probability") -> None:
    """Refuse a threshold that a method could not take, as decoding would, but before a model is loaded for it."""
    _check_name(name)
    if threshold is None:
        return
    _check_number("threshold", threshold)
    if METHODS[name].takes_threshold:
        bar(threshold, metric)
    else:
        no_threshold(name, threshold)


def _check_name(name: str) -> None:
    if name not in METHODS:
        raise unknown_name("method", name, list(METHODS))


def _check_count(option: str, value: Any, minimum: int) -> None:
    """Refuse what is no whole number, and what is below the least that makes sense."""
    words = option.replace("_", " ")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{words} {value!r} is no whole number", fix=f"give one, as in {option}={max(minimum, 4)}")
    if value < minimum:
        raise UserError(f"{words} {value} is below {minimum}", fix=f"give a {words} of {minimum} or more")


def _check_number(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        words = option.replace("_", " ")
        raise UserError(f"{words} {value!r} is no number", fix=f"give one, as in {option}=0.95")


def _check_appended_masks(options: Options) -> None:
    """Refuse fewer masks than a block takes."""
    needed = options.block_size - 1
    _check_count("appended_masks", options.appended_masks, 0)
    if options.appended_masks is not None and options.appended_masks < needed:
        raise UserError(
            f"{options.appended_masks} appended masks are too few for block size {options.block_size}",
            fix=f"give {needed} or more",
        )
