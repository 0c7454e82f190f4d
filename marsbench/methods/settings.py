"""A checkpoint's own settings of generation: what decoding leaves out, and how `generate` is kept from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

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


@contextmanager
def generating_by(model: Any, **settings: Any) -> Iterator[None]:
    """Within a `with` block, `model` has these settings of generation and no others; afterwards its own again.

    A configuration that is passed to `generate` is not enough: transformers fills what it leaves open from the model's.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = own


def left_out(model: Any) -> dict[str, Any]:
    """What a checkpoint asks for that would change greedy tokens; no method here does it.

    How to sample is not among it: that is the request's.
    """
    asked = {name: getattr(getattr(model, "generation_config", None), name, None) for name in CHANGES_TOKENS}
    return {name: value for name, value in asked.items() if value is not None and value not in CHANGES_TOKENS[name]}


def load_aloud(name: str, reporter: Reporter, **how: Any) -> Loaded:
    """`load` a user's checkpoint to decode with, and say once what decoding leaves out of its own settings."""
    loaded = load(name, **how)
    reporter.say_once(left_out_in_words(name, loaded.model))
    return loaded


def left_out_in_words(name: str, model: Any) -> str:
    """One line on what decoding leaves out of a checkpoint's wishes, empty where it has none."""
    wishes = [f"{wish} {value}" if isinstance(value, int | float) else wish for wish, value in left_out(model).items()]
    if not wishes:
        return ""
    return f"{name}: its generation_config asks for {', '.join(wishes)}; decoding by any method here leaves that out"
