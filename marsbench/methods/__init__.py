"""The decoding methods, and their registry: what each of them is, what it needs, and which options it takes.

A method is a class in a module of this package, and an entry of `METHODS`. The class is made of those of the `Options`
that its fields are called after. What a user can give, how it is explained, and what is refused comes from here: for
the command line, `generate`, lm-eval's arguments, grids and plans. All this is read without torch; only `build_method`
loads it, with the method itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from marsbench.decoding.acceptance import confidence_needed
from marsbench.decoding.generation import PREFILL_POSITIONS, Dtype, Layout, Metric
from marsbench.errors import UserError, check_known
from marsbench.line import EARLIER, Line, renamed
from marsbench.methods.options import option, options_of

if TYPE_CHECKING:
    from marsbench.decoding.engine import OutsideMethod
    from marsbench.decoding.step import Method

Need = Literal["masks", "draft", "heads"]
NEEDS: dict[Need, str] = {
    "masks": "a checkpoint trained with masks",
    "draft": "a draft model (--draft)",
    "heads": "Medusa heads (a `medusa` checkpoint)",
}


@dataclass(frozen=True)
class Options:
    """What a method may want to know, None if not given. Fields without a help are of the checkpoint."""

    mask_id: int | None = None  # the id of `<|mask|>`, None for a checkpoint without one
    draft: Any = None  # the draft model
    heads: Any = None  # Medusa heads
    shifted: bool = False  # whether the token before each mask of block diffusion predicts it
    window: int | None = option(
        "Maximum tokens that a forward accepts: B, or any number if drafts are verified.", usual=4, least=1
    )
    metric: Metric | None = option(
        "Confidence metric: probability, entropy or margin.", usual="probability", called="confidence metric"
    )
    layout: Layout | None = option("Layout of masks: groups (more tokens) or linear (cheaper).", usual="groups")
    groups: int | None = option(
        "K: maximum mask groups in a forward, at the likeliest ends of drafts [default: all].", least=1
    )
    head_top: int | None = option("Likeliest tokens from which a draft head chooses.", usual=64, least=2, most=2**20)
    cache_block: int | None = option("B_cache, in tokens.", usual=4, least=1)
    appended_masks: int | None = option("Masks after the text, at least B - 1 [default: B - 1].", least=0)
    draft_length: int | None = option("K: maximum tokens drafted (or looked up) per round.", usual=4, least=1)
    ngram: int | None = option("Length of the longest match looked up in the text so far.", usual=3, least=1)
    draft_method: Literal["ar", "mars"] | None = option("How the draft model decodes: ar or mars.", usual="ar")
    draft_threshold: float | None = option("Confidence threshold for drafts by mars.", usual=0.95, least=0, most=1)
    tree_width: int | None = option("Guesses of the first Medusa head; 1 is a chain.", usual=1, least=1)
    quantised: Literal["none", "q8_0", "q4_1"] | None = option(
        "Weights for llama.cpp: none (not quantised), q8_0 or q4_1.", usual="none"
    )


# What a user may give: all `Options` but those of the checkpoint. More tokens than that would fill memory, if they fit.
OPTIONS = {
    name: replace(known, most=known.most or 4096) if known.kind is int else known
    for name, known in options_of(Options).items()
}


@dataclass(frozen=True)
class MethodInfo:
    module: str  # its module in `marsbench.methods`, and its class there
    summary: str
    options: tuple[str, ...] = ()  # names of `OPTIONS` that it takes
    needs: tuple[Need, ...] = ()
    exact: str = "`ar`"  # what its output equals (fp32, greedy)
    lossless: bool = False  # equals AR decoding of the same checkpoint, whatever its options
    one_row: bool = False  # runs at batch size 1 only
    forwards_per_cycle: int = 1  # of the model, from drafts to what is right of them
    recomputes: bool = False  # every forward reads the whole sequence
    own_loop: bool = False  # another library's
    package: str = ""  # what has to be installed besides, as it is imported

    @property
    def needs_masks(self) -> bool:
        return "masks" in self.needs

    @property
    def takes_threshold(self) -> bool:
        return "metric" in self.options


_ONE = "`ar` when one token is accepted per forward"
METHODS: dict[str, MethodInfo] = {
    "ar": MethodInfo("ar:Autoregressive", "one token per forward, KV cache", exact="greedy decoding", lossless=True),
    "mars": MethodInfo(
        "mars:Mars", "sliding window of masks, KV cache", ("window", "metric", "head_top"), ("masks",), exact=_ONE
    ),
    "mars-no-cache": MethodInfo(
        "mars:MarsNoCache", "`mars` that recomputes the prefix in every forward",
        ("window", "metric", "appended_masks", "head_top"), ("masks",), exact="`mars`", recomputes=True,
    ),
    "mars-block-cache": MethodInfo(
        "mars:MarsBlockCache", "the paper's block-level cache, B_cache masks wide",
        ("cache_block", "metric", "head_top"), ("masks",), exact=_ONE,
    ),
    "mars-verified": MethodInfo(
        "mars_verified:MarsVerified", "masks draft, the model's own AR logits verify, in one forward",
        ("window", "metric", "layout", "groups", "head_top"), ("masks",), lossless=True,
    ),
    "mars-lookup": MethodInfo(
        "mars_lookup:MarsLookup", "`mars-verified` that also drafts what followed the same n-gram",
        ("window", "metric", "layout", "draft_length", "ngram", "head_top"), ("masks",), lossless=True,
    ),
    "uno": MethodInfo(
        "mars_verified:Uno", "masks draft in one forward, the next one verifies (UNO, arXiv 2609.04010)",
        ("window", "metric", "head_top"), ("masks",), lossless=True, forwards_per_cycle=2,
    ),
    "speculative": MethodInfo(
        "speculative:Speculative", "a small model drafts, the model verifies",
        ("draft_length", "draft_method", "draft_threshold", "window"), ("draft",), lossless=True,
    ),
    "mars-speculative": MethodInfo(
        "speculative:MarsSpeculative", "`speculative` whose verification goes on with masks",
        ("draft_length", "draft_method", "draft_threshold", "window", "metric", "head_top"), ("masks", "draft"),
        exact="`ar` without a threshold",
    ),
    "medusa": MethodInfo(
        "medusa:Medusa", "extra heads draft a chain or a tree, the model verifies", ("tree_width",), ("heads",),
        lossless=True,
    ),
    "jacobi": MethodInfo("jacobi:Jacobi", "fixed-point iteration over the next tokens", ("window",), lossless=True),
    "prompt-lookup": MethodInfo(
        "prompt_lookup:PromptLookup", "what followed the same n-gram before is the draft", ("draft_length", "ngram"),
        lossless=True,
    ),
    "block-diffusion": MethodInfo(
        "block_diffusion:BlockDiffusion", "fills a block in any order, bidirectional attention in it",
        ("window", "metric"), ("masks",), exact="-",
    ),
    "hf-generate": MethodInfo("hugging_face:HfGenerate", "transformers' own `generate`", lossless=True, own_loop=True),
    "hf-assisted": MethodInfo(
        "hugging_face:HfAssisted", "transformers' own `generate` with an assistant model", ("draft_length",),
        ("draft",), lossless=True, one_row=True, own_loop=True,
    ),
    "llama-cpp": MethodInfo(
        "llama_cpp:LlamaCpp", "llama.cpp's own loop over the same weights", ("quantised",),
        exact="`ar`, where they are not quantised", one_row=True, own_loop=True, package="llama_cpp",
    ),
    "llama-cpp-lookup": MethodInfo(
        "llama_cpp:LlamaCppLookup", "llama.cpp with its own prompt lookup", ("quantised", "draft_length", "ngram"),
        exact="`ar`, where they are not quantised", one_row=True, own_loop=True, package="llama_cpp",
    ),
}  # fmt: skip


def explained(name: str, default: str = "") -> str:
    """What a user is told of an option: what it is, whose, and its default, or what stands for it."""
    whose, usual = [method for method, info in METHODS.items() if name in info.options], OPTIONS[name].usual
    shown = default or ("" if usual is None else str(usual))
    return f"{OPTIONS[name].help} For {', '.join(whose)}." + (f" [default: {shown}]" if shown else "")


@dataclass(frozen=True)
class Decoding(Options):
    """How to decode, as a user says it: on the command line, in lm-eval's arguments and in a call of `generate`."""

    method: str = option("Decoding method: see `marsbench list methods`.", "mars")
    threshold: float | None = option(
        "Confidence to accept a token, or to draft one for verification; without it, mars accepts one per pass."
    )
    accept: Literal["one"] | None = option(
        "`one`: exactly one token per pass, for methods without verification.", called="way to accept"
    )
    draft: Any = option("Checkpoint of the draft model, for speculative, mars-speculative and hf-assisted.", kind=str)
    untrained_masks: bool = option("Use masks even if the checkpoint never saw any.", False)
    mask_id: int | None = option("Id of the mask token [default: the tokenizer's <|mask|>].", least=0)
    dtype: Dtype = option("Type of weights and caches: float32, bfloat16 or float16.", "float32")
    prefill_positions: int = option("Prompt tokens in one pass; fewer need less memory.", PREFILL_POSITIONS, least=1)
    compiled: bool | None = option(
        "Run each step as one graph: faster, with the same tokens (in 16 bits, up to rounding). Default on CUDA. A CPU "
        "compiles each shape (rows, lengths) in ten seconds and keeps it on disk; use it for long runs.",
        flags=("--compile/--no-compile",),
    )
    pack: bool = option(
        "On a CPU, copy weights in reading order: faster, with twice the memory.", True, flags=("--pack/--no-pack",)
    )

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> Decoding:
        """What was given by name; `UserError` for a name that is neither an option nor among the `others`."""
        known = [*others, *HOW]
        for name in set(given) - {*HOW, *EARLIER}:
            near = get_close_matches(name, known)
            fix = f"did you mean {' or '.join(near)}?" if near else f"choose among {', '.join(known)}"
            raise UserError(f"there is no option {name!r}", where=where, fix=fix)
        return cls(**renamed(given))

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name in ("mask_id", *OPTIONS) if (value := getattr(self, name)) is not None}

    def check(self) -> Decoding:
        """Refuse a way to decode that could not work, before anything is loaded for it; else returns itself."""
        check_known("method", self.method, METHODS)
        check_options(self)
        if self.accept and self.threshold is not None:
            raise UserError("--accept one and --threshold contradict each other", fix="leave one of them out")
        if self.accept and METHODS[self.method].lossless and self.method not in ("ar", "hf-generate"):
            raise UserError(f"method {self.method!r} accepts all verified drafts", fix="leave --accept out")
        metric: Metric | None = (self.metric or "probability") if METHODS[self.method].takes_threshold else None
        confidence_needed(self.threshold, metric, self.method)
        return self

    def check_heard(self, *methods: str) -> None:
        for name in self.given:
            if name in OPTIONS and not any(name in METHODS[method].options for method in methods):
                whose = [method for method, info in METHODS.items() if name in info.options]
                fix = f"leave {name.replace('_', '-')} out, or choose one of: {', '.join(whose)}"
                raise UserError(f"method {' or '.join(map(repr, methods))} has no {name.replace('_', ' ')}", fix=fix)

    def by(self, method: str) -> Decoding:
        if method not in METHODS:
            return replace(self, method=method)
        info = METHODS[method]
        strange: dict[str, Any] = dict.fromkeys(name for name in OPTIONS if name not in info.options)
        return replace(self, method=method, threshold=self.threshold if info.takes_threshold else None, **strange)

    @property
    def line(self) -> Line:
        line = Line.named(self.method, "", self.method, threshold=self.threshold, **self.given)
        return replace(line, untrained_masks=self.untrained_masks, compiled=self.compiled)


# All that a user may say of decoding.
HOW = {name: options_of(Decoding)[name] for name in Decoding.__annotations__} | OPTIONS


def check_options(options: Options) -> None:
    for name, known in HOW.items():
        if (value := getattr(options, name, None)) is not None:
            known.check(name, value)
    if options.groups is not None and options.layout == "linear":
        raise UserError("layout linear has one group of masks", fix="leave --groups out, or choose --layout groups")
    window, appended = options.window or OPTIONS["window"].usual, options.appended_masks
    if appended is not None and appended < window - 1:
        raise UserError(f"{appended} appended masks are too few for window {window}", fix=f"give {window - 1} or more")


def method_class(name: str) -> Any:
    module, _, made_by = METHODS[name].module.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), made_by)


def check_installed(name: str) -> None:
    if (package := METHODS[name].package) and find_spec(package) is None:
        raise UserError(f"method {name!r} needs the package {package}", fix="pip install 'marsbench[peers]'")


def build_method(name: str, options: Options) -> Method | OutsideMethod:
    """A method by name; `UserError` for an unknown one, for options out of range, and for what it needs and lacks."""
    check_known("method", name, METHODS)
    check_options(options)
    info = METHODS[name]
    wants_mask = info.needs_masks or ("draft" in info.needs and options.draft_method == "mars")
    needed = [
        (wants_mask, options.mask_id, "a mask token and this checkpoint's tokenizer has none",
         "use a MARS checkpoint or another method; where a token's id can be given (marsbench decode --mask-id, in "
         "Python mask_id=), give that of a mask"),
        ("draft" in info.needs, options.draft, "a draft model",
         "give one (--draft DIR, or draft=MODEL in Python): a smaller checkpoint with the same vocabulary, such as "
         "marsbench train draft_ar_sft makes"),
        ("heads" in info.needs, options.heads, "Medusa heads and this checkpoint has none",
         "use a checkpoint of stage medusa (marsbench train medusa)"),
    ]  # fmt: skip
    for is_needed, given, what, fix in needed:
        if is_needed and given is None:
            raise UserError(f"method {name!r} needs {what}", fix=fix)
    if not wants_mask:
        options = replace(options, mask_id=-1)
    chosen = method_class(name)
    taken = {field.name: getattr(options, field.name) for field in fields(chosen) if field.init}
    made: Method | OutsideMethod = chosen(**{name: value for name, value in taken.items() if value is not None})
    return made
