"""The decoding methods, and their registry: what each of them is, what it needs, and which options it takes.

A method is a class in a module of this room, and an entry of `METHODS`. The class is made of those of the `Options`
that its fields are called after. What a user can give, how it is explained, and what is refused comes from here: for
the command line, `generate`, lm-eval's arguments, grids and plans alike. All this is read without torch; only
`build_method` loads it, with the method itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from marsbench.decoding.acceptance import bar
from marsbench.decoding.generation import DTYPES, Layout, Metric
from marsbench.errors import UserError, integer, unknown_name

if TYPE_CHECKING:
    from marsbench.decoding.outside import OutsideMethod
    from marsbench.decoding.step import Method

Need = Literal["masks", "draft", "heads"]
NEEDS: dict[Need, str] = {
    "masks": "a checkpoint trained with masks",
    "draft": "a draft model (--draft)",
    "heads": "Medusa heads (a `medusa` checkpoint)",
}


@dataclass(frozen=True)
class Option:
    """What a user is told of an option and what it may be, said where the field of a dataclass is; so is its default.

    threshold: Annotated[float, Option("Confidence to accept a token.", least=0, most=1)] = 0.95
    """

    help: str
    least: float | None = None
    most: float | None = None
    called: str = ""  # in messages, where its name does not say enough
    kind: Any = None  # the field's type, without None
    choices: tuple[str, ...] = ()  # of a `Literal`


def options_of(of: type) -> dict[str, Option]:
    """The fields of a dataclass that are options, by name."""
    hints = get_type_hints(of, include_extras=True)
    return {
        name: replace(option, **_kind(hint.__origin__))
        for name, hint in hints.items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, Option)
    }


def _kind(hint: Any) -> dict[str, Any]:
    """What values a hint allows."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    if get_origin(kinds[0]) is Literal:
        return {"kind": str, "choices": get_args(kinds[0])}
    return {"kind": get_origin(kinds[0]) or kinds[0]}


@dataclass(frozen=True)
class Options:
    """Everything that a method may want to know; each takes what it needs.

    Fields without a help are of the checkpoint, not of the method: a command knows them from elsewhere.
    """

    mask_id: int | None = None  # the id of `<|mask|>`, None for a checkpoint without one
    draft: Any = None  # the draft model
    heads: Any = None  # Medusa heads
    shifted: bool = False  # whether the token before each mask of block diffusion predicts it
    block_size: Annotated[
        int,
        Option(
            "Tokens that one forward pass settles at most: B of the training, but free for mars-verified, jacobi, and "
            "for mars-lookup, which has its --draft-length more.",
            least=1,
        ),
    ] = 4
    metric: Annotated[
        Metric,
        Option(
            "Confidence that thresholds are compared with: probability, entropy or margin.", called="confidence metric"
        ),
    ] = "probability"
    layout: Annotated[Layout, Option("Where masks stand: groups (more tokens) or linear (cheaper).")] = "groups"
    groups: Annotated[
        int | None,
        Option(
            "K: groups of masks in a forward at most, behind the drafts that most likely come last; a forward whose "
            "drafts end elsewhere drafts nothing [default: all].",
            least=1,
        ),
    ] = None
    head_top: Annotated[
        int,
        Option("Likeliest tokens of each mask that the draft head of an adapter chooses from.", least=2, most=2**20),
    ] = 64
    cache_block: Annotated[int, Option("B_cache, in tokens.", least=1)] = 4
    appended_masks: Annotated[
        int | None, Option("Masks behind the text, B - 1 or more; more cost time alone [default: B - 1].", least=0)
    ] = None
    draft_length: Annotated[
        int, Option("K: tokens drafted per round at most; by mars-lookup, those from the text so far.", least=1)
    ] = 4
    ngram: Annotated[int, Option("Tokens of the longest match that is looked up in the text so far.", least=1)] = 3
    lookup_bar: Annotated[
        float | None,
        Option(
            "How often what was looked up behind masks' guesses must have held lately in the answer for more to be "
            "[default: it always is].",
            least=0,
            most=1,
        ),
    ] = None
    draft_method: Annotated[Literal["ar", "mars"], Option("How the draft model decodes: ar or mars.")] = "ar"
    draft_threshold: Annotated[float, Option("Confidence that drafts by mars must pass.", least=0, most=1)] = 0.95
    tree_width: Annotated[int, Option("Guesses of the first Medusa head; 1 is a chain.", least=1)] = 1
    quantised: Annotated[
        Literal["none", "q8_0", "q4_1"], Option("How llama.cpp gets the weights: as they are, q8_0 or q4_1.")
    ] = "none"

    @property
    def window(self) -> int:
        """What users, grids and rows call `block_size`, by its name in methods: B is of training, and of diffusion."""
        return self.block_size


# What a user may give: all `Options` but those of the checkpoint. More tokens than that would fill memory, if they fit.
OPTIONS = {
    name: replace(option, most=option.most or 4096) if option.kind is int else option
    for name, option in options_of(Options).items()
}
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
    one_row: bool = False  # runs at batch size 1 only
    forwards_per_cycle: int = 1  # of the model, from drafts to what is right of them
    recomputes: bool = False  # every forward reads the whole sequence
    own_loop: bool = False  # another library's
    package: str = ""  # what has to be installed besides, as it is imported

    @property
    def needs_masks(self) -> bool:
        """Whether the checkpoint must have seen masks in training."""
        return "masks" in self.needs

    @property
    def takes_threshold(self) -> bool:
        """Whether it compares confidences with one."""
        return "metric" in self.options


METHODS: dict[str, MethodInfo] = {
    "ar": MethodInfo("ar:Autoregressive", "one token per forward, KV cache", "greedy decoding", lossless=True),
    "mars": MethodInfo(
        "mars:Mars", "sliding window of masks, KV cache", "`ar` when one token is accepted per forward",
        ("block_size", "metric", "head_top"), needs=("masks",),
    ),
    "mars-no-cache": MethodInfo(
        "mars:MarsNoCache", "`mars` that recomputes the prefix in every forward", "`mars`",
        ("block_size", "metric", "appended_masks", "head_top"), needs=("masks",), recomputes=True,
    ),
    "mars-block-cache": MethodInfo(
        "mars:MarsBlockCache", "the paper's block-level cache, B_cache masks wide",
        "`ar` when one token is accepted per forward", ("cache_block", "metric", "head_top"), needs=("masks",),
    ),
    "mars-verified": MethodInfo(
        "mars_verified:MarsVerified", "masks draft, the model's own AR logits verify, in one forward", "`ar`",
        ("block_size", "metric", "layout", "groups", "head_top"), needs=("masks",), lossless=True,
    ),
    "mars-lookup": MethodInfo(
        "mars_lookup:MarsLookup", "`mars-verified` that also drafts what followed the same n-gram", "`ar`",
        ("block_size", "metric", "layout", "draft_length", "ngram", "lookup_bar", "head_top"), needs=("masks",),
        lossless=True,
    ),
    "uno": MethodInfo(
        "uno:Uno", "masks draft in one forward, the next one verifies (UNO, arXiv 2609.04010)", "`ar`",
        ("block_size", "metric", "head_top"), needs=("masks",), lossless=True, forwards_per_cycle=2,
    ),
    "speculative": MethodInfo(
        "speculative:Speculative", "a small model drafts, the model verifies", "`ar`",
        ("draft_length", "draft_method", "draft_threshold", "block_size"), needs=("draft",), lossless=True,
    ),
    "mars-speculative": MethodInfo(
        "speculative:MarsSpeculative", "`speculative` whose verification goes on with masks",
        "`ar` without a threshold",
        ("draft_length", "draft_method", "draft_threshold", "block_size", "metric", "head_top"),
        needs=("masks", "draft"),
    ),
    "medusa": MethodInfo(
        "medusa:Medusa", "extra heads draft a chain or a tree, the model verifies", "`ar`", ("tree_width",),
        needs=("heads",), lossless=True,
    ),
    "jacobi": MethodInfo(
        "jacobi:Jacobi", "fixed-point iteration over the next tokens", "`ar`", ("block_size",), lossless=True
    ),
    "prompt-lookup": MethodInfo(
        "prompt_lookup:PromptLookup", "what followed the same n-gram before is the draft", "`ar`",
        ("draft_length", "ngram"), lossless=True,
    ),
    "block-diffusion": MethodInfo(
        "block_diffusion:BlockDiffusion", "fills a block in any order, bidirectional attention in it", "-",
        ("block_size", "metric"), needs=("masks",),
    ),
    "hf-generate": MethodInfo(
        "hugging_face:HfGenerate", "transformers' own `generate`", "`ar`", lossless=True, own_loop=True
    ),
    "hf-assisted": MethodInfo(
        "hugging_face:HfAssisted", "transformers' own `generate` with an assistant model", "`ar`", ("draft_length",),
        needs=("draft",), lossless=True, one_row=True, own_loop=True,
    ),
    "llama-cpp": MethodInfo(
        "llama_cpp:LlamaCpp", "llama.cpp's own loop over the same weights", "`ar`, where they are not quantised",
        ("quantised",), one_row=True, own_loop=True, package="llama_cpp",
    ),
    "llama-cpp-lookup": MethodInfo(
        "llama_cpp:LlamaCppLookup", "llama.cpp with its own prompt lookup", "`ar`, where they are not quantised",
        ("quantised", "draft_length", "ngram"), one_row=True, own_loop=True, package="llama_cpp",
    ),
}  # fmt: skip


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
        _check_value("mask_id", Option("", least=0, kind=int), options.mask_id)
    if options.groups is not None and options.layout == "linear":
        raise UserError("layout linear has one group of masks", fix="leave --groups out, or choose --layout groups")
    needed, appended = options.block_size - 1, options.appended_masks
    if appended is not None and appended < needed:
        raise UserError(
            f"{appended} appended masks are too few for block size {options.block_size}", fix=f"give {needed} or more"
        )


def check_heard(names: Iterable[str], methods: Sequence[str], word: Callable[[str], str] = str) -> None:
    """Refuse options that no method here would hear of; `word` is what a user calls one."""
    for option in names:
        if not any(option in METHODS[method].options for method in methods):
            whose = ", ".join(name for name, info in METHODS.items() if option in info.options)
            what = f"method {' or '.join(map(repr, methods))} has no {word(option).replace('_', ' ')}"
            raise UserError(what, fix=f"leave it out, or choose one of: {whose}")


def check_how(
    method: str, options: Options, *, threshold: Any = None, accept: str | None = None, dtype: str = "float32",
    untrained_masks: Any = False, compiled: Any = None,
) -> None:  # fmt: skip
    """Refuse a way to decode that could not work, whoever asks for it, before anything is loaded for it.

    A command, lm-eval's arguments and a program's call of `generate` name these alike.
    """
    _check_name(method)
    if accept is not None:
        _check_accept(method, accept, threshold)
    check_options(method, options)
    check_threshold(method, threshold, options.metric)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    for name, given in (("untrained_masks", untrained_masks), ("compiled", compiled)):
        if not isinstance(given, bool) and (name, given) != ("compiled", None):
            raise UserError(f"{name}={given!r} is neither true nor false", fix="give one of the two")


def _check_accept(method: str, accept: str, threshold: float | None) -> None:
    """Refuse `accept` other than "one", and "one" where it contradicts a threshold or the method."""
    if accept != "one":
        raise unknown_name("way to accept", accept, ["one"])
    if threshold is not None:
        raise UserError("--accept one and --threshold contradict each other", fix="leave one of them out")
    if METHODS[method].lossless and method not in ("ar", "hf-generate"):
        raise UserError(
            f"method {method!r} accepts whatever it verifies", fix="leave --accept out, or choose --method ar"
        )


def check_threshold(name: str, threshold: Any, metric: Metric = "probability") -> None:
    """Refuse a threshold that a method could not take, as decoding would, but before a model is loaded for it."""
    _check_name(name)
    if threshold is None:
        return
    _check_value("threshold", Option("", kind=float), threshold)
    bar(threshold, metric if METHODS[name].takes_threshold else None, name)


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
    if option.kind is int:
        integer(value, words, least=option.least, most=option.most)
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{words} {value!r} is no number", fix=f"give one, as in {name}=0.95")
    least, most, number = option.least, option.most, cast("float", value)
    if least is not None and most is not None and not least <= number <= most:
        raise UserError(f"{words} {value} is out of range", fix=f"give a value from {least:g} to {most:g}")


def method_class(name: str) -> Any:
    """The class of a method."""
    module, _, made_by = METHODS[name].place.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), made_by)


def check_installed(name: str) -> None:
    """Refuse a method whose package is missing, with a `UserError`."""
    if (package := METHODS[name].package) and find_spec(package) is None:
        raise UserError(f"method {name!r} needs the package {package}", fix="pip install 'marsbench[peers]'")


def build_method(name: str, options: Options) -> Method | OutsideMethod:
    """A method by name; `UserError` for an unknown one, for options out of range, and for what it needs and lacks.

    A class is made of the options that its fields are called after.
    """
    check_options(name, options)
    info = METHODS[name]
    wants_mask = info.needs_masks or ("draft" in info.needs and options.draft_method == "mars")
    if wants_mask and options.mask_id is None:
        raise UserError(
            f"method {name!r} needs a mask token and this checkpoint's tokenizer has none",
            fix="use a MARS checkpoint or another method; where a token's id can be given (marsbench decode --mask-id, "
            "in Python mask_id=), give that of a mask",
        )
    if "draft" in info.needs and options.draft is None:
        raise UserError(
            f"method {name!r} needs a draft model",
            fix="give one (--draft DIR, or draft=MODEL in Python): a smaller checkpoint with the same vocabulary, "
            "such as marsbench train draft_ar_sft makes",
        )
    if "heads" in info.needs and options.heads is None:
        raise UserError(
            f"method {name!r} needs Medusa heads and this checkpoint has none",
            fix="use a checkpoint of stage medusa (marsbench train medusa)",
        )
    if not wants_mask:
        options = replace(options, mask_id=-1)
    chosen = method_class(name)
    taken = {field.name: getattr(options, field.name) for field in fields(chosen) if field.init}
    made: Method | OutsideMethod = chosen(**taken)
    return made
