"""A short comparison of a model's logits by our windows with those of its own forward pass.

Whatever a model's class does that its parts do not show (a scale on its logits, a prompt that an adapter puts before
ours, a hook on the whole) shows here, before anything wrong is decoded.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from marsbench.errors import UserError
from marsbench.forward.cache import RaggedCache
from marsbench.forward.modules import ModuleDecoder, device_of, refused
from marsbench.forward.window import Window

_SHORTEST, _LONGEST = 16, 64  # tokens of the made-up prompt
_LATER = 5  # of them, how many come in the second window
_PASSED: WeakKeyDictionary[Any, object] = WeakKeyDictionary()  # model -> the state in which it passed


def check_by_forward(model: Any) -> None:
    """Hold our logits to the model's own, once for every model and whatever is hung on it as a whole.

    Raises:
        UserError: they differ by more than rounding.
    """
    if not callable(model):
        return
    own = getattr(model, "__dict__", {})
    hooks = [key for name in ("_forward_hooks", "_forward_pre_hooks") for key in own.get(name, ())]
    state = (type(model.get_decoder()), id(own.get("forward")), *hooks)
    try:
        passed = _PASSED.get(model)
    except TypeError:  # a wrapper that cannot be referred to weakly
        _compare(model)
        return
    if passed != state:
        _compare(model)
        _PASSED[model] = state


@torch.inference_mode()
def _compare(model: Any) -> None:
    long = _length(model)
    ids = _made_up(model, long)
    rows = [ids[0], ids[1, : long - 3]]
    theirs = [model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float() for row in rows]
    try:
        ours = _by_windows(ModuleDecoder(model), ids)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise refused(model, f"a forward pass that fails on our windows ({type(error).__name__}: {error})") from error
    size = torch.cat(theirs).square().mean().sqrt()
    off = torch.cat([(a - b).square().mean(-1).sqrt() for a, b in zip(ours, theirs, strict=True)]) / size
    if not off.mean() <= torch.finfo(model.get_decoder().dtype).eps ** 0.5:
        hint = " (its dropout is on: call model.eval())" if getattr(model, "training", False) else ""
        raise refused(model, f"something between its parts{hint}: its logits are {off.mean():.0%} off what they make")


def _length(model: Any) -> int:
    """Tokens to compare: more than a small sliding window holds."""
    config = model.get_decoder().config
    reach = getattr(config, "sliding_window", None) or 0
    return min(max(_SHORTEST, reach + 8), _LONGEST, getattr(config, "max_position_embeddings", None) or _LONGEST)


def _made_up(model: Any, length: int) -> Tensor:
    """Two rows of ids, [2, length], on the device of the model's embeddings."""
    embeddings = model.get_input_embeddings()
    places = torch.arange(2 * length, device=device_of(model)).view(2, length)
    ids: Tensor = 1 + (places * 7919 + 4) % (embeddings.num_embeddings - 1)
    return ids


def _by_windows(decoder: ModuleDecoder, ids: Tensor) -> list[Tensor]:
    """Logits of the first row, and of the second up to its third last token, in two windows with fillers."""
    cache, found, long = RaggedCache(), [], ids.shape[1]
    for width, ends in ((long - _LATER, (long - _LATER, long - _LATER - 2)), (_LATER, (long, long - 3))):
        end = torch.tensor(ends, device=ids.device)
        begin, offset = end - width, torch.arange(ends[0], device=ids.device)
        places = begin.unsqueeze(1) + offset[:width]
        cache.prepare(torch.where(places < 0, len(offset), places), len(offset))
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        window = Window(ids.gather(1, places.clamp(min=0)), places, begin, len(offset), causal)
        found.append(decoder(cache, window, (offset - begin.unsqueeze(1)).clamp(-1, width)).logits(slice(None)))
    first, second = (logits.float() for logits in found)
    # The second row's first window begins with two fillers, and its second one with one.
    return [torch.cat([first[0], second[0]]), torch.cat([first[1, 2:], second[1, 1:]])]
