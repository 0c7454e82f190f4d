"""The registry of methods: what each of them is, what it needs, and which options it takes. Read without torch.

A method is a class in a module of its own, and an entry of `METHODS`. The class is made of those of the `Options` that
its fields are called after. What a user can give, how it is explained, and what is refused comes from here: for the
command line, `generate`, lm-eval's arguments, grids and plans alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
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


@dataclass(frozen=True)
class Option:
    """What a user is told of an option, and what it may be."""

    help: str
    kind: type = int
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    called: str = ""  # in messages, where its name does not say enough


def _about(help: str, **bounds: Any) -> dict[str, Option]:
    return {"option": Option(help, **bounds)}


@dataclass(frozen=True)
class Options:
    """Everything that a method may want to know; each takes what it needs.

    Fields without a help are of the checkpoint, not of the method: a command knows them from elsewhere.
    """

    mask_id: int | None = None  # the id of `<|mask|>`, None for a checkpoint without one
    draft: Any = None  # the draft model
    heads: Any = None  # Medusa heads
    block_size: int = field(
        default=4,
        metadata=_about(
            "Tokens that one forward pass settles at most: B of the training, but free for mars-verified, jacobi, and "
            "for mars-lookup, which has its --draft-length more.",
            least=1,
        ),
    )
    metric: Metric = field(
        default="probability",
        metadata=_about(
            "Confidence that thresholds are compared with: probability, entropy or margin.",
            kind=str, choices=METRICS, called="confidence metric",
        ),
    )  # fmt: skip
    layout: Layout = field(
        default="groups",
        metadata=_about(
            "Where masks stand: groups (more tokens) or linear (cheaper).", kind=str, choices=get_args(Layout)
        ),
    )
    cache_block: int = field(default=4, metadata=_about("B_cache, in tokens.", least=1))
    appended_masks: int | None = field(
        default=None,
        metadata=_about("Masks behind the text, B - 1 or more; more cost time alone [default: B - 1].", least=0),
    )
    draft_length: int = field(
        default=4,
        metadata=_about("K: tokens drafted per round at most; by mars-lookup, those from the text so far.", least=1),
    )
    ngram: int = field(
        default=3, metadata=_about("Tokens of the longest match that is looked up in the text so far.", least=1)
    )
    draft_method: str = field(
        default="ar", metadata=_about("How the draft model decodes: ar or mars.", kind=str, choices=("ar", "mars"))
    )
    draft_threshold: float = field(
        default=0.95, metadata=_about("Confidence that drafts by mars must pass.", kind=float, least=0, most=1)
    )
    tree_width: int = field(default=1, metadata=_about("Guesses of the first Medusa head; 1 is a chain.", least=1))

    @property
    def window(self) -> int:
        """`block_size`, as methods call it that are free to choose one."""
        return self.block_size


# What a user may give: all `Options` but those of the checkpoint.
OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(Options) if one.metadata}
DEFAULTS = Options()


@dataclass(frozen=True)
class MethodInfo:
    """What to tell a user about a method, and where it is."""

    place: str  # its module in `marsbench.methods`, and its class there
    summary: str
    exact: str  # what its output equals (fp32, greedy)
    options: tuple[str, ...] = ()  # names of `OPTIONS` that it takes
    needs: tuple[Need, ...] = ()
    lossless: bool = False  # equals AR decoding of the same checkpoint, whatever its options
    takes_threshold: bool = False
    one_row: bool = False  # runs at batch size 1 only

    @property
    def needs_masks(self) -> bool:
        """Whether the checkpoint must have seen masks in training."""
        return "masks" in self.needs


METHODS: dict[str, MethodInfo] = {
    "ar": MethodInfo("ar:Autoregressive", "one token per forward, KV cache", "greedy decoding", lossless=True),
    "mars": MethodInfo(
        "mars:Mars",
        "sliding window of masks, KV cache",
        "`ar` when one token is accepted per forward",
        ("block_size", "metric"),
        needs=("masks",),
        takes_threshold=True,
    ),
    "mars-no-cache": MethodInfo(
        "mars_no_cache:MarsNoCache",
        "`mars` that recomputes the prefix in every forward",
        "`mars`",
        ("block_size", "metric", "appended_masks"),
        needs=("masks",),
        takes_threshold=True,
    ),
    "mars-block-cache": MethodInfo(
        "mars_block_cache:MarsBlockCache",
        "the paper's block-level cache, B_cache masks wide",
        "`ar` when one token is accepted per forward",
        ("cache_block", "metric"),
        needs=("masks",),
        takes_threshold=True,
    ),
    "mars-verified": MethodInfo(
        "mars_verified:MarsVerified",
        "masks draft, the model's own AR logits verify, in one forward",
        "`ar`",
        ("block_size", "metric", "layout"),
        needs=("masks",),
        takes_threshold=True,
        lossless=True,
    ),
    "mars-lookup": MethodInfo(
        "mars_lookup:MarsLookup",
        "`mars-verified` that also drafts what followed the same n-gram",
        "`ar`",
        ("block_size", "metric", "layout", "draft_length", "ngram"),
        needs=("masks",),
        takes_threshold=True,
        lossless=True,
    ),
    "speculative": MethodInfo(
        "speculative:Speculative",
        "a small model drafts, the model verifies",
        "`ar`",
        ("draft_length", "draft_method", "draft_threshold", "block_size"),
        needs=("draft",),
        lossless=True,
    ),
    "mars-speculative": MethodInfo(
        "mars_speculative:MarsSpeculative",
        "`speculative` whose verification goes on with masks",
        "`ar` without a threshold",
        ("draft_length", "draft_method", "draft_threshold", "block_size", "metric"),
        needs=("masks", "draft"),
        takes_threshold=True,
    ),
    "medusa": MethodInfo(
        "medusa:Medusa",
        "extra heads draft a chain or a tree, the model verifies",
        "`ar`",
        ("tree_width",),
        needs=("heads",),
        lossless=True,
    ),
    "jacobi": MethodInfo(
        "jacobi:Jacobi", "fixed-point iteration over the next tokens", "`ar`", ("block_size",), lossless=True
    ),
    "prompt-lookup": MethodInfo(
        "prompt_lookup:PromptLookup",
        "what followed the same n-gram before is the draft",
        "`ar`",
        ("draft_length", "ngram"),
        lossless=True,
    ),
    "block-diffusion": MethodInfo(
        "block_diffusion:BlockDiffusion",
        "fills a block in any order, bidirectional attention in it",
        "-",
        ("block_size", "metric"),
        needs=("masks",),
        takes_threshold=True,
    ),
    "hf-generate": MethodInfo("hugging_face:HfGenerate", "transformers' own `generate`", "`ar`", lossless=True),
    "hf-assisted": MethodInfo(
        "hugging_face:HfAssisted",
        "transformers' own `generate` with an assistant model",
        "`ar`",
        ("draft_length",),
        needs=("draft",),
        lossless=True,
        one_row=True,
    ),
}


def explained(name: str, default: str = "") -> str:
    """What a user is told of an option: what it is, whose, and its default, or what stands for it."""
    whose, usual = [method for method, info in METHODS.items() if name in info.options], getattr(DEFAULTS, name)
    shown = default or ("" if usual is None else str(usual))
    return f"{OPTIONS[name].help} For {', '.join(whose)}." + (f" [default: {shown}]" if shown else "")


def check_options(name: str, options: Options) -> None:
    """Refuse a method that there is not, and options that no method could work with."""
    _check_name(name)
    for option, known in OPTIONS.items():
        if (value := getattr(options, option)) is not None or getattr(DEFAULTS, option) is not None:
            _check_value(option, known, value)
    if options.mask_id is not None:
        _check_value("mask_id", Option("", least=0), options.mask_id)
    needed, appended = options.block_size - 1, options.appended_masks
    if appended is not None and appended < needed:
        raise UserError(
            f"{appended} appended masks are too few for block size {options.block_size}", fix=f"give {needed} or more"
        )


def check_threshold(name: str, threshold: Any, metric: Metric = "probability") -> None:
    """Refuse a threshold that a method could not take, as decoding would, but before a model is loaded for it."""
    _check_name(name)
    if threshold is None:
        return
    _check_value("threshold", Option("", kind=float), threshold)
    if METHODS[name].takes_threshold:
        bar(threshold, metric)
    else:
        no_threshold(name, threshold)


def _check_name(name: str) -> None:
    if name not in METHODS:
        raise unknown_name("method", name, list(METHODS))


def _check_value(name: str, option: Option, value: Any) -> None:
    """Refuse a value of another kind, or out of the option's bounds."""
    words = option.called or name.replace("_", " ")
    if option.kind is str:
        if value not in option.choices:
            raise unknown_name(words, value, list(option.choices))
        return
    known, number, example = (Integral, "whole number", 4) if option.kind is int else (Real, "number", 0.95)
    if isinstance(value, bool) or not isinstance(value, known):
        raise UserError(f"{words} {value!r} is no {number}", fix=f"give one, as in {name}={example}")
    least, most, found = option.least, option.most, float(value)
    if most is not None and not (least or 0) <= found <= most:
        raise UserError(f"{words} {value} is out of range", fix=f"give a value from {least:g} to {most:g}")
    if least is not None and found < least:
        raise UserError(f"{words} {value} is below {least}", fix=f"give a {words} of {least} or more")
