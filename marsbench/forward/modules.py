"""Models that run through their own modules: hooks, adapters and quantised layers of theirs all do their work.

What a model's class does itself, between the modules' outputs and the logits, is done here too as far as it is known;
what is not is refused by name, found out by a short comparison with the model's own forward pass.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from marsbench.errors import UserError
from marsbench.forward.adapter import hooked, masks_of, parted
from marsbench.forward.cache import RaggedCache
from marsbench.forward.draft_head import HeadInUse
from marsbench.forward.limits import context_length, vocabulary_of
from marsbench.forward.window import Answer, Window, additive_mask, sliding_mask

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ARGUMENTS = ("position_ids", "attention_mask", "past_key_values")
_MASKED = ("eager", "sdpa")  # implementations of attention that take a mask as we give it


class ModuleDecoder:
    """The model's own modules, fillers and all; `UserError` where its attention or positions cannot be had so."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model, _ = parted(model)
        self._last = context_length(model) - 1
        config = model.get_decoder().config
        # What could not run a window of ours: not every entry may see what it should, or stand where it does.
        if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
            raise _refused(model, "an encoder-decoder")
        takes = inspect.signature(type(model.get_decoder()).forward).parameters
        missing = [name for name in _ARGUMENTS if name not in takes]
        if missing or getattr(config, "alibi", False):
            raise _refused(model, f"a decoder that takes no {missing[0] if missing else 'position_ids'}")
        if strange := sorted(layer_kinds(config) - {_FULL, _SLIDING}):
            raise _refused(model, f"layers of the kind {', '.join(strange)}")
        attention = getattr(config, "_attn_implementation", None)
        if attention is not None and attention not in _MASKED:
            raise UserError(f"attention {attention!r} takes no mask of ours", fix='give attn_implementation="sdpa"')

    def __call__(self, cache: RaggedCache, window: Window, relative: Tensor) -> Answer:
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        model, adapter = parted(self.model)
        masked = None if adapter is None else masks_of(window)
        # Guesses behind the context's end count for nothing; their positions would scale all others anew.
        position, masks = window.position.clamp(0, self._last), _masks(decoder.config, window, relative, decoder.dtype)
        told = {"input_ids": window.input_ids, "position_ids": position, "attention_mask": masks}
        with nullcontext() if adapter is None or masked is None else hooked(model, adapter, masked):
            hidden: Tensor = decoder(**told, past_key_values=cache, use_cache=True).last_hidden_state
        logits_of = _with_what_follows(head, decoder.config)
        if adapter is None or adapter.head is None:
            return Answer(hidden, logits_of)
        draft_head = type(adapter.head)(*(tensor.to(hidden) for tensor in adapter.head))
        return Answer(hidden, logits_of, HeadInUse(draft_head, decoder.get_input_embeddings(), logits_of, None))


def device_of(model: Any) -> torch.device:
    """The device on which a model takes its input: not where its weights lie, if they are fetched for every call."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)  # accelerate's
    runs_on = [getattr(part, "execution_device", None) for part in getattr(hook, "hooks", [hook])]
    return next((torch.device(name) for name in runs_on if name is not None), device)


def _masks(config: Any, window: Window, relative: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    full, kinds = additive_mask(window.visible, relative, dtype), layer_kinds(config)
    if kinds == {_FULL}:
        return full
    sliding = sliding_mask(full, window, relative, config.sliding_window)
    return sliding if kinds == {_SLIDING} else {_FULL: full, _SLIDING: sliding}


def layer_kinds(config: Any) -> set[str]:
    if kinds := getattr(config, "layer_types", None):
        return set(kinds[: getattr(config, "num_hidden_layers", None)])
    return {_FULL if getattr(config, "sliding_window", None) is None else _SLIDING}


def _with_what_follows(head: Callable[[Tensor], Tensor], config: Any) -> Callable[[Tensor], Tensor]:
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        out = head(hidden)
        out = out if divisor is None else out / divisor
        out = out if factor is None else out * factor
        return out if cap is None else torch.tanh(out / cap) * cap

    return logits


def _refused(model: Any, why: str) -> UserError:
    what = f"{type(model).__name__} has {why}, which this engine does not know"
    fix = "take a decoder with full or sliding-window attention and positions, such as Qwen2, Llama or Mistral"
    return UserError(what, where=str(getattr(model, "name_or_path", "")), fix=fix)


_SHORTEST, _LONGEST = 16, 64  # tokens of the made-up prompt
_LATER = 5  # of them, how many come in the second window
_PASSED: WeakSet[Any] = WeakSet()  # models


@torch.inference_mode()
def check_by_forward(model: Any) -> None:
    """Hold our logits to those of a model's own forward pass, once for every model; `UserError` where they differ."""
    if not callable(model) or model in _PASSED:
        return
    config = model.get_decoder().config
    reach = getattr(config, "sliding_window", None) or 0
    long = min(max(_SHORTEST, reach + 8), _LONGEST, context_length(model))  # more than a small sliding window holds
    places = torch.arange(2 * long, device=device_of(model)).view(2, long)
    ids: Tensor = 1 + (places * 7919 + 4) % (vocabulary_of(model) - 1)
    rows = [ids[0], ids[1, : long - 3]]
    theirs = [model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float() for row in rows]
    try:
        ours = _by_windows(ModuleDecoder(model), ids)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _refused(model, f"a forward pass that fails on our windows ({type(error).__name__}: {error})") from error
    size = torch.cat(theirs).square().mean().sqrt()
    off = torch.cat([(a - b).square().mean(-1).sqrt() for a, b in zip(ours, theirs, strict=True)]) / size
    if not off.mean() <= torch.finfo(model.get_decoder().dtype).eps ** 0.5:
        hint = " (its dropout is on: call model.eval())" if getattr(model, "training", False) else ""
        raise _refused(model, f"something between its parts{hint}: its logits are {off.mean():.0%} off what they make")
    with suppress(TypeError):  # a wrapper that cannot be referred to weakly
        _PASSED.add(model)


def _by_windows(decoder: ModuleDecoder, ids: Tensor) -> list[Tensor]:
    """Logits of the first row, and of the second up to its third last token, in two windows with fillers."""
    cache, of_windows, long = RaggedCache(), [], ids.shape[1]
    for width, ends in ((long - _LATER, (long - _LATER, long - _LATER - 2)), (_LATER, (long, long - 3))):
        end = torch.tensor(ends, device=ids.device)
        begin, offset = end - width, torch.arange(ends[0], device=ids.device)
        places = begin.unsqueeze(1) + offset[:width]
        cache.prepare(torch.where(places < 0, len(offset), places), len(offset))
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        window = Window(ids.gather(1, places.clamp(min=0)), places, begin, len(offset), causal)
        of_windows.append(decoder(cache, window, (offset - begin.unsqueeze(1)).clamp(-1, width)).logits(slice(None)))
    first, second = (logits.float() for logits in of_windows)
    # The second row's first window begins with two fillers, and its second one with one.
    return [torch.cat([first[0], second[0]]), torch.cat([first[1, 2:], second[1, 1:]])]
