"""Models that run through their own modules: hooks, adapters and quantised layers of theirs all do their work.

Between the modules' outputs and a model's logits lies what its class does itself. What is known of that is done here
too; what is not is refused by name, found out by a short comparison with the model's own forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from marsbench.errors import UserError
from marsbench.forward.adapter import hooked, masks_of, parted
from marsbench.forward.cache import RaggedCache
from marsbench.forward.draft_head import HeadInUse
from marsbench.forward.masks import additive_mask, sliding_mask
from marsbench.forward.window import Answer, Window

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ARGUMENTS = ("position_ids", "attention_mask", "past_key_values")
_MASKED = ("eager", "sdpa")  # implementations of attention that take a mask as we give it


class ModuleDecoder:
    """The model's own modules, fillers and all. They are asked for at every call: whatever they are by then, they run.

    Raises:
        UserError: a model whose attention or positions cannot be had through its modules.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        refuse_unknown(parted(model)[0])

    def __call__(self, cache: RaggedCache, window: Window, relative: Tensor) -> Answer:
        """Run a window; see `Decoder`."""
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        model, adapter = parted(self.model)
        masked = None if adapter is None else masks_of(window)
        with nullcontext() if adapter is None or masked is None else hooked(model, adapter, masked):
            hidden: Tensor = decoder(
                input_ids=window.input_ids,
                position_ids=window.position.clamp(min=0),
                attention_mask=_masks(decoder.config, window, relative, decoder.dtype),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        logits_of = _with_what_follows(head, decoder.config)
        if adapter is None or adapter.head is None:
            return Answer(hidden, logits_of)
        draft_head = type(adapter.head)(*(one.to(hidden) for one in adapter.head))
        return Answer(hidden, logits_of, HeadInUse(draft_head, decoder.get_input_embeddings(), logits_of, None))


def device_of(model: Any) -> torch.device:
    """The device on which a model takes its input: not where its weights lie, if they are fetched for every call."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)  # accelerate's
    runs_on = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])]
    return next((torch.device(one) for one in runs_on if one is not None), device)


def _masks(config: Any, window: Window, relative: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """The mask of every kind of layer; by its kind where there are several."""
    full, kinds = additive_mask(window.visible, relative, dtype), layer_kinds(config)
    if kinds == {_FULL}:
        return full
    sliding = sliding_mask(full, window, relative, config.sliding_window)
    return sliding if kinds == {_SLIDING} else {_FULL: full, _SLIDING: sliding}


def layer_kinds(config: Any) -> set[str]:
    """What kinds of layers a decoder has, by transformers' names for them."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds[: getattr(config, "num_hidden_layers", None)])
    return {_FULL if getattr(config, "sliding_window", None) is None else _SLIDING}


def _with_what_follows(head: Callable[[Tensor], Tensor], config: Any) -> Callable[[Tensor], Tensor]:
    """The LM head with what the model's class does to its logits."""
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)
    if divisor is None and factor is None and cap is None:
        return head

    def logits(hidden: Tensor) -> Tensor:
        found = head(hidden)
        found = found if divisor is None else found / divisor
        found = found if factor is None else found * factor
        return found if cap is None else torch.tanh(found / cap) * cap

    return logits


def refuse_unknown(model: Any) -> None:
    """Refuse what could not run a window of ours: not every entry may see what it should, or stand where it does.

    Raises:
        UserError: the model is of such a kind.
    """
    decoder = model.get_decoder()
    config = decoder.config
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise refused(model, "an encoder-decoder")
    kind: Any = type(decoder)
    missing = _not_taken(kind)
    if missing or getattr(config, "alibi", False):
        raise refused(model, f"a decoder that takes no {missing[0] if missing else 'position_ids'}")
    strange = sorted(layer_kinds(config) - {_FULL, _SLIDING})
    if strange:
        raise refused(model, f"layers of the kind {', '.join(strange)}")
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in _MASKED:
        raise UserError(
            f"attention {attention!r} takes no mask of our making",
            where=type(model).__name__,
            fix='load the model with attn_implementation="sdpa"',
        )


@lru_cache(maxsize=64)
def _not_taken(kind: type[nn.Module]) -> list[str]:
    """The arguments of ours that a class of decoders does not have."""
    takes = inspect.signature(kind.forward).parameters
    return [name for name in _ARGUMENTS if name not in takes]


def refused(model: Any, why: str) -> UserError:
    """The error for a model that this engine cannot run."""
    return UserError(
        f"{type(model).__name__} has {why}, which this engine does not know",
        where=str(getattr(model, "name_or_path", "")),
        fix="take a decoder with full or sliding-window attention and positions, such as Qwen2, Llama or Mistral",
    )
