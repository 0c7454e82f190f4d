"""The ragged KV cache: every row has its own length, nothing is ever rolled back or copied between steps.

Keys and values are written at each row's own slots; entries that turned out wrong are simply hidden by the next mask
and overwritten by the next write. It has the one method that models of transformers call, `update`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROWTH = 64  # slots; small steps waste little, and growing is rare


class RaggedCache:
    """Keys and values of all layers, stored [rows, slots, heads, head size]."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._flat_slots = torch.empty(0)
        self._rows = 0
        self._slots = 0
        self._capacity = 0

    def prepare(self, slots: Tensor) -> None:
        """Say where the next forward writes: integer [N, W], each entry's slot in its row."""
        self._rows, self._slots = slots.shape[0], int(slots.max()) + 1
        if self._slots > self._capacity:
            self._grow(-(-self._slots // _GROWTH) * _GROWTH)
        first = torch.arange(self._rows, device=slots.device).unsqueeze(1) * self._capacity
        self._flat_slots = (first + slots).flatten()

    @property
    def slots(self) -> int:
        """Slots per row that the next forward attends over."""
        return self._slots

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [N, heads, W, head size]; return all of its keys and values."""
        if layer_idx == len(self._layers):
            self._layers.append((self._allocate(keys), self._allocate(values)))
        stored = self._layers[layer_idx]
        for store, new in zip(stored, (keys, values), strict=True):
            entries = new.transpose(1, 2).flatten(0, 1)
            store.flatten(0, 1).index_copy_(0, self._flat_slots, entries)
        keys, values = (store[: self._rows, : self._slots].transpose(1, 2) for store in stored)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use (asked for by models that are given no position ids)."""
        return self._slots

    def move(self, sources: Tensor, holes: Tensor) -> None:
        """Copy whole rows `sources` [n] into rows `holes` [n], so that the rows in use stay together."""
        for store in (store for layer in self._layers for store in layer):
            store[holes] = store[sources]

    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(store.nbytes for layer in self._layers for store in layer)

    def _allocate(self, like: Tensor) -> Tensor:
        rows, heads, _, head_size = like.shape
        return like.new_zeros(rows, self._capacity, heads, head_size)

    def _grow(self, capacity: int) -> None:
        """Make room for more slots per row, keeping the rows in use."""
        self._capacity = capacity
        grown = []
        for layer in self._layers:
            bigger = [store.new_zeros(self._rows, capacity, *store.shape[2:]) for store in layer]
            for new, old in zip(bigger, layer, strict=True):
                new[:, : old.shape[1]] = old[: self._rows]
            grown.append((bigger[0], bigger[1]))
        self._layers = grown
