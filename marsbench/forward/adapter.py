"""A gated adapter in the forward pass: low-rank maps on linear layers, and a vector on the embedding, for masks alone.

Attention is causal and no token ever sees a mask, so what an adapter does to masks cannot change what the model says of
tokens: not by rounding either, since their values are not touched. Verified decoding with an adapter therefore says
what the model says without one.

The window says which entries are masks; ids are not looked at. A lean decoder gathers those entries, maps them and adds
the result in place, with one product for maps that read the same values. In steps of fixed shape, where gathering would
take a shape that depends on values, all entries are mapped and those of masks are kept. Models that run through their
own modules get hooks for the time of a forward pass, and so do models in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.errors import UserError
from marsbench.forward.window import Window


class LowRank(NamedTuple):
    """What is added to a linear layer's output, for input [..., in]: `input @ down.T @ up.T`."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r], the adapter's scale in it


@dataclass(frozen=True, eq=False)
class Adapter:
    """What acts where the input is a mask."""

    vector: Tensor  # [H], added to the mask's embedding
    maps: Mapping[str, LowRank]  # by the name of the linear layer in the model's decoder: "layers.0.mlp.up_proj"

    def bytes(self) -> int:
        """Memory of its weights, in bytes."""
        return self.vector.nbytes + sum(one.nbytes for pair in self.maps.values() for one in pair)

    def like(self, values: Tensor) -> Adapter:
        """The same on the device of some values, in their type."""
        maps = {name: LowRank(down.to(values), up.to(values)) for name, (down, up) in self.maps.items()}
        return Adapter(self.vector.to(values), maps)


class Adapted:
    """A model with the adapter that is active; whatever else is asked of it, the model answers.

    Nothing is written to the model: several of these may share one.

    Raises:
        UserError: the adapter is not for a model with such layers.
    """

    def __init__(self, model: Any, adapter: Adapter) -> None:
        _check_fits(model, adapter)
        self.model, self.adapter = model, adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's own forward pass: of tokens."""
        return self.model(*inputs, **named)


def _check_fits(model: Any, adapter: Adapter) -> None:
    decoder = model.get_decoder()
    if len(adapter.vector) != model.get_input_embeddings().embedding_dim:
        raise _unfit("its embeddings are of another size")
    for name, (down, up) in adapter.maps.items():
        layer = _layer(decoder, name)
        size = getattr(layer, "out_features", len(up)), getattr(layer, "in_features", down.shape[1])
        if size != (len(up), down.shape[1]):
            raise _unfit(f"layer {name} is of another size")


def parted(model: Any) -> tuple[Any, Adapter | None]:
    """A model, and the adapter that is active on it, if one is."""
    return (model.model, model.adapter) if isinstance(model, Adapted) else (model, None)


def masks_of(window: Window) -> Tensor | None:
    """Which entries of a window are masks, bool [N, W]; None where it has none."""
    begin, (rows, width) = window.masks_begin, window.input_ids.shape
    if begin is None or (isinstance(begin, int) and begin >= width):
        return None
    entry = torch.arange(width, device=window.input_ids.device)
    return (entry >= begin).expand(rows, width) if isinstance(begin, int) else entry >= begin.unsqueeze(1)


# ---- in the lean decoder ----


class Site:
    """The maps of several linear layers that read the same values, as one."""

    def __init__(self, maps: Sequence[LowRank | None], sizes: Sequence[int], like: Tensor) -> None:
        """Maps of the layers in order, None for a layer without one, and each layer's output size."""
        given = [one for one in maps if one is not None]
        ups = [like.new_empty(size, 0) if one is None else one.up for one, size in zip(maps, sizes, strict=True)]
        self.down = torch.cat([one.down for one in given]) if given else None  # [R, in]
        self.up: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]  # [all outputs, R]

    def change(self, values: Tensor) -> Tensor:
        """What is added to the layers' outputs, side by side, [n, all outputs], for their input [n, in]."""
        assert self.down is not None, "a site without maps is left out"
        return F.linear(F.linear(values, self.down), self.up)


class LayerSites(NamedTuple):
    """The sites of one transformer layer."""

    attention: Site  # queries and keys, values
    out: Site
    mlp: Site  # gate, up
    down: Site


class MaskedEntries:
    """The entries of one window that are masks, and the adapter that acts there.

    Args:
        masked: bool [N, W]; with `real`, of whose entries only those are there.
        real: integer [M], the entries that are no fillers, or None.
        fixed: whether nothing may have a shape that depends on values.
    """

    def __init__(self, masked: Tensor, real: Tensor | None, *, fixed: bool) -> None:
        flat = masked.flatten() if real is None else masked.flatten()[real]
        self._fixed = fixed
        self._at = flat.unsqueeze(1) if fixed else flat.nonzero().squeeze(1)  # where they are, or which

    def shift(self, hidden: Tensor, vector: Tensor) -> Tensor:
        """Embeddings [M, H] with a vector [H] added to those of masks."""
        if self._fixed:
            return torch.where(self._at, hidden + vector, hidden)
        return hidden.index_add(0, self._at, vector.expand(len(self._at), -1))

    def add(self, site: Site, values: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The layers' outputs [M, ...] for input [M, in], a site's change added to those of masks, in place."""
        if site.down is None:
            return outputs
        sizes = [output.shape[1] for output in outputs]
        if self._fixed:
            parts = site.change(values).split_with_sizes(sizes, 1)
            return tuple(torch.where(self._at, out + part, out) for out, part in zip(outputs, parts, strict=True))
        parts = site.change(values.index_select(0, self._at)).split_with_sizes(sizes, 1)
        return tuple(out.index_add_(0, self._at, part) for out, part in zip(outputs, parts, strict=True))


# ---- through a model's own modules ----


@contextmanager
def hooked(model: Any, adapter: Adapter, masked: Tensor | None) -> Iterator[None]:
    """Have an adapter act on a model's own modules for the time of a `with` block.

    Args:
        model: a causal language model of transformers.
        adapter: its weights on the model's device.
        masked: bool [N, W], which entries of the input are masks; None = all.

    Raises:
        UserError: the model has no layer of a name, or one that does not map entry by entry.
    """
    decoder = model.get_decoder()
    places: list[tuple[nn.Module, Callable[..., Tensor]]] = [
        (decoder.get_input_embeddings(), _shifting(adapter.vector, masked)),
        *((_layer(decoder, name), _mapping(name, pair, masked)) for name, pair in adapter.maps.items()),
    ]
    handles = [module.register_forward_hook(hook) for module, hook in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer(decoder: Any, name: str) -> nn.Module:
    try:
        layer: nn.Module = decoder.get_submodule(name)
    except AttributeError as error:
        raise _unfit(f"the model has no layer {name}") from error
    return layer


def _shifting(vector: Tensor, masked: Tensor | None) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        return _where(masked, embedded + vector.to(embedded), embedded)

    return hook


def _mapping(name: str, pair: LowRank, masked: Tensor | None) -> Callable[..., Tensor]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        values = inputs[0]
        if masked is not None and output.numel() != masked.numel() * output.shape[-1]:
            raise _unfit(f"layer {name} does not map entry by entry")
        change = F.linear(F.linear(values, pair.down.to(values)), pair.up.to(values))
        return _where(masked, output + change, output)

    return hook


def _where(masked: Tensor | None, there: Tensor, elsewhere: Tensor) -> Tensor:
    if masked is None:
        return there
    return torch.where(masked.to(there.device).view(*there.shape[:-1], 1), there, elsewhere)


def _unfit(why: str) -> UserError:
    return UserError(f"this adapter does not fit: {why}", fix="take the model that it was trained for")
