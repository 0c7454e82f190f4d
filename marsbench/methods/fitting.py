"""Fitting a method to a checkpoint: what of the checkpoint the method takes, and whether they go together at all.

A checkpoint's own settings of generation are not taken; what they ask for is said.
"""

from typing import Any

import torch

from marsbench.decoding.engine import Method
from marsbench.decoding.generation import as_list
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.forward.adapter import Adapted
from marsbench.forward.decoder import decoder_of
from marsbench.forward.limits import check_masks, vocabulary_of
from marsbench.line import renamed
from marsbench.methods import METHODS, Options, build_method, check_installed
from marsbench.progress import Reporter
from marsbench.training.checkpoints import Loaded, load

# What would change tokens even where the most probable one is taken -> the values by which it does not.
CHANGES_TOKENS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "num_beams", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), ([],)),
    **dict.fromkeys(("max_time", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    "watermarking_config": (), "stop_strings": ([], ""), "sequence_bias": ({}, []), "token_healing": (False,),
}  # fmt: skip


def fit(
    name: str, loaded: Loaded, *, draft: Loaded | None = None, untrained_masks: bool = False, **options: Any
) -> Method | OutsideMethod:
    """The method `name` for a checkpoint.

    Args:
        name: one of `METHODS`.
        loaded: the checkpoint that decodes; its mask token and Medusa heads are used.
        draft: the draft model's checkpoint, for methods that want one.
        untrained_masks: use masks even if the checkpoint's training never showed it any.
        options: fields of `Options`.

    Raises:
        UserError: the method is unknown, its options are out of range, or the checkpoint lacks what it needs.
    """
    draft_model = draft.model if draft else None
    given = {"mask_id": loaded.mask_id, "heads": loaded.heads, "shifted": loaded.shifted, "draft": draft_model}
    method = build_method(name, Options(**(given | renamed(options))))
    check_installed(name)
    check_masks(loaded.model, method)
    if METHODS[name].needs_masks and not untrained_masks:
        _check_masks(name, loaded)
    if name == "block-diffusion" and isinstance(loaded.model, Adapted):
        what = "an adapter does not act on masks that stand among tokens, as those of block-diffusion do"
        raise UserError(what, fix="choose another method, or a block_diffusion checkpoint")
    if draft is not None and "draft" in METHODS[name].needs:
        _check_draft(loaded, draft)
        if options.get("draft_method") == "mars":
            _check_masks("mars", draft)
    return method


def remark_on_rounding(name: str, model: Any) -> str:
    """A remark on a verified method in 16 bits where rounding depends on the window; empty where it does not."""
    info, dtype = METHODS[name], model.dtype
    if dtype == torch.float32 or name == "ar" or not info.lossless or info.own_loop:
        return ""
    if getattr(decoder_of(model), "rounds_alike", False):
        return ""
    return (
        f"{str(dtype).removeprefix('torch.')}: on this machine the rounding of this model depends on what is computed "
        f"together, so near ties may end otherwise by {name} than by ar"
    )


def _check_masks(name: str, loaded: Loaded) -> None:
    if not loaded.knows_masks:
        what = f"method {name!r} needs a checkpoint trained with masks; this one is of stage {loaded.stage!r}"
        fix = "use a MARS checkpoint; marsbench eval, show and decode take --untrained-masks to go without"
        raise UserError(what, fix=fix)


def _check_draft(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model that speaks of other tokens than the target."""
    sizes = [vocabulary_of(loaded.model) for loaded in (target, draft)]
    same = sizes[0] == sizes[1]
    if target.own_tokenizer is not None and draft.own_tokenizer is not None:
        same = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    if not same:
        what = f"the draft model's vocabulary ({sizes[1]:,} entries) is not the model's ({sizes[0]:,} entries)"
        raise UserError(what, fix="choose a draft with the same tokenizer")


def default_ids(loaded: Loaded, eos_id: int | None = None, pad_id: int | None = None) -> tuple[list[int], int]:
    """What ends a text, and padding: as given, or as the checkpoint says; padding may be an EOS.

    A text ends at the tokenizer's EOS and at all those that the checkpoint's settings of generation name; the model's
    configuration is asked where neither names any.
    """
    tokenizer, settings, config = loaded.own_tokenizer, loaded.model.generation_config, loaded.model.config
    ids = [eos_id] if eos_id is not None else [*_ids(tokenizer, "eos"), *_ids(settings, "eos")] or _ids(config, "eos")
    if not ids:
        fix = "set eos_token_id in its generation_config.json; marsbench decode also takes --eos-id"
        raise UserError("this checkpoint does not name its EOS token", fix=fix)
    pads = [pad_id] if pad_id is not None else []
    pads += [token for source in (tokenizer, settings, config) for token in _ids(source, "pad")]
    return list(dict.fromkeys(ids)), [*pads, *ids][0]


def _ids(source: Any, name: str) -> list[int]:
    ids = getattr(source, f"{name}_token_id", None)
    return [] if ids is None else as_list(ids)


def load_aloud(name: str, reporter: Reporter, **how: Any) -> Loaded:
    """`load` a user's checkpoint to decode with, and say once what decoding leaves out of its own settings."""
    loaded = load(name, **how)
    reporter.say_once(left_out_in_words(name, loaded.model))
    return loaded


def left_out_in_words(name: str, model: Any) -> str:
    """One line on what a checkpoint asks for that would change greedy tokens, and no method here does; else empty.

    How to sample is not among it: that is the request's.
    """
    asked = {wish: getattr(getattr(model, "generation_config", None), wish, None) for wish in CHANGES_TOKENS}
    wishes = [
        f"{wish} {value}" if isinstance(value, int | float) else wish
        for wish, value in asked.items()
        if value is not None and value not in CHANGES_TOKENS[wish]
    ]
    if not wishes:
        return ""
    return f"{name}: its generation_config asks for {', '.join(wishes)}; decoding by any method here leaves that out"
