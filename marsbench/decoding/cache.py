"""The ragged KV cache: every row has its own length, nothing is ever rolled back or copied between steps.

Keys and values are written at each row's own slots; entries that turned out wrong are simply hidden by the next mask
and overwritten by the next write. It has the one method that models of transformers call, `update`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROWTH = 64  # slots; small steps waste little, and growing is rare


class RaggedCache:
    """Keys and values of all layers, stored [rows, slots, heads, head size].

    It holds as many slots per row as the longest row needs now, whatever the rows may yet grow to.
    """

    fixed = False  # whether it has a shape of its own that no forward may change

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._flat_slots = torch.empty(0)
        self._rows = 0
        self._slots = 0
        self._capacity = 0

    def prepare(self, slots: Tensor, total: int) -> None:
        """Say where the next forward writes: integer [N, W], each entry's slot in its row.

        The model attends over the slots below `total`; what is written to slot `total` is never seen.
        """
        self._rows, self._slots = slots.shape[0], total
        if total >= self._capacity:
            self._resize(self._rows, -(-(total + 1) // _GROWTH) * _GROWTH)
        first = torch.arange(self._rows, device=slots.device).unsqueeze(1) * self._capacity
        self._flat_slots = (first + slots).flatten()

    def narrow(self, entries: Tensor) -> None:
        """Write only those `entries` [M] of the N * W that were prepared."""
        self._flat_slots = self._flat_slots[entries]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [N, heads, W, head size]; return all of its keys and values."""
        entries = (new.transpose(1, 2).flatten(0, 1) for new in (keys, values))
        keys, values = (stored.transpose(1, 2) for stored in self.write(layer_idx, *entries))
        return keys, values

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [M, heads, head size]; return all, [N, slots, heads, head size]."""
        if layer == len(self._layers):
            self._layers.append((self._allocate(keys), self._allocate(values)))
        stored = self._layers[layer]
        for store, new in zip(stored, (keys, values), strict=True):
            store.flatten(0, 1).index_copy_(0, self._flat_slots, new)
        keys, values = (store[: self._rows, : self._slots] for store in stored)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use (asked for by models that are given no position ids)."""
        return self._slots

    def move(self, sources: Tensor, holes: Tensor, rows: int) -> None:
        """Copy whole rows `sources` [n] into rows `holes` [n]; the first `rows` rows stay in use."""
        for store in (store for layer in self._layers for store in layer):
            store[holes] = store[sources]
        self._rows = rows
        if self._layers and 0 < rows <= self._layers[0][0].shape[0] // 2:
            self._resize(rows, self._capacity)  # gives memory back

    def extend(self, other: RaggedCache) -> None:
        """Take over the rows in use of another cache of the same model, behind the own ones."""
        own, rows = self._rows, self._rows + other._rows
        self._resize(rows, max(self._capacity, other._capacity))
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for store, new in zip(mine, theirs, strict=True):
                store[own:, : new.shape[1]] = new[: other._rows]
        self._rows = rows

    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(store.nbytes for layer in self._layers for store in layer)

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, self._capacity, *like.shape[1:])

    def _resize(self, rows: int, capacity: int) -> None:
        """Move everything in use to stores of another size."""
        resized = []
        for layer in self._layers:
            fresh = [store.new_zeros(rows, capacity, *store.shape[2:]) for store in layer]
            for new, old in zip(fresh, layer, strict=True):
                kept = min(self._rows, rows)
                new[:kept, : old.shape[1]] = old[:kept]
            resized.append((fresh[0], fresh[1]))
        self._layers, self._capacity = resized, capacity
