"""A gated adapter in the forward pass: low-rank maps on linear layers, and a vector on the embedding, for masks alone.

Attention is causal and no token ever sees a mask, so an adapter on masks changes nothing that the model says of tokens,
not even by rounding: verified decoding says what the model says without one. The window says which entries are masks.
In a lean decoder the maps lie beside its own layers (`linear.Site`); other models, and those in training, get hooks for
the time of a forward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.errors import UserError
from marsbench.forward.draft_head import DraftHead
from marsbench.forward.limits import vocabulary_of
from marsbench.forward.window import Window, kept


class LowRank(NamedTuple):
    """What is added to a linear layer's output, for input [..., in]: `input @ down.T @ up.T`."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r], the adapter's scale in it

    def change(self, values: Tensor) -> Tensor:
        return F.linear(F.linear(values, self.down.to(values)), self.up.to(values))


@dataclass(frozen=True, eq=False)
class Adapter:
    vector: Tensor  # [H], added to the mask's embedding
    maps: Mapping[str, LowRank]  # by the name of the linear layer in the model's decoder: "layers.0.mlp.up_proj"
    head: DraftHead | None = None  # what tells masks of the guesses before them

    def like(self, values: Tensor) -> "Adapter":
        maps = {name: LowRank(down.to(values), up.to(values)) for name, (down, up) in self.maps.items()}
        head = self.head and type(self.head)(*(tensor.to(values) for tensor in self.head))
        return Adapter(self.vector.to(values), maps, head)


class Adapted:
    """A model with the adapter that is active, to which nothing is written; `UserError` for one of other layers."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        decoder = model.get_decoder()
        width = decoder.config.hidden_size
        if len(adapter.vector) != width:
            raise _unfit("its embeddings are of another size")
        for name, (down, up) in adapter.maps.items():
            layer = _layer(decoder, name)
            size = getattr(layer, "out_features", len(up)), getattr(layer, "in_features", down.shape[1])
            if size != (len(up), down.shape[1]):
                raise _unfit(f"layer {name} is of another size")
        if adapter.head is not None and not adapter.head.fits(vocabulary_of(model), width):
            raise _unfit("its draft head is of another size")
        self.model, self.adapter = model, adapter

    def __getattr__(self, name: str) -> Any:
        if "model" not in self.__dict__:  # a copy that is being made is asked whether it has `__setstate__`
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)


def parted(model: Any) -> tuple[Any, Adapter | None]:
    """A model, and the adapter that is active on it, if one is."""
    return (model.model, model.adapter) if isinstance(model, Adapted) else (model, None)


def masks_of(window: Window) -> Tensor | None:
    """Which entries of a window are masks, bool [N, W]; None where it has none."""
    begin, (rows, width) = window.masks_begin, window.input_ids.shape
    if begin is None or (isinstance(begin, int) and begin >= width):
        return None
    if isinstance(begin, int):
        return _from(width, begin, rows, window.input_ids.device)
    return torch.arange(width, device=begin.device) >= begin.unsqueeze(1)


@kept
def _from(width: int, begin: int, rows: int, device: torch.device) -> Tensor:
    return (torch.arange(width, device=device) >= begin).repeat(rows, 1)


@contextmanager
def hooked(model: Any, adapter: Adapter, masked: Tensor | None) -> Iterator[None]:
    """Have an adapter act on a model's own modules in a `with` block, at entries `masked` bool [N, W]; None = all."""
    decoder = model.get_decoder()
    changed = [(decoder.get_input_embeddings(), _adding(lambda _: adapter.vector, masked))]
    changed += [(_layer(decoder, name), _adding(pair.change, masked, name)) for name, pair in adapter.maps.items()]
    with ExitStack() as hooks:
        for layer, hook in changed:
            hooks.enter_context(layer.register_forward_hook(hook))
        yield


def _layer(decoder: Any, name: str) -> nn.Module:
    try:
        layer: nn.Module = decoder.get_submodule(name)
    except AttributeError as error:
        raise _unfit(f"the model has no layer {name}") from error
    return layer


def _adding(change: Callable[[Tensor], Tensor], masked: Tensor | None, name: str = "") -> Callable[..., Tensor]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if masked is None:
            return output + change(inputs[0]).to(output)
        if output.numel() != masked.numel() * output.shape[-1]:
            raise _unfit(f"layer {name} does not map entry by entry")
        there = masked.to(output.device).view(*output.shape[:-1], 1)
        return torch.where(there, output + change(inputs[0]).to(output), output)

    return hook


def _unfit(why: str) -> UserError:
    return UserError(f"this adapter does not fit: {why}", fix="use the model that it was trained for")
