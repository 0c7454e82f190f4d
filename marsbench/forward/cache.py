"""The ragged KV cache: every row has its own length, nothing is ever rolled back or copied between steps.

Keys and values are written at each row's own slots; entries that turned out wrong are hidden by the next mask and
overwritten by the next write. Models of transformers call its method `update`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

_GROWTH = 64  # slots; small steps waste little, and growing is rare


class Parts(NamedTuple):
    number: int
    length: int  # slots of each


class RaggedCache:
    """Keys and values of all layers, stored [rows, slots, heads, head size].

    It holds as many slots per row as the longest row needs now, and gives back what rows that are gone have held. A
    layer is resized when it is next written, so that no more than one is there twice, and one that there is no memory
    for leaves the others as they are.
    """

    fixed = False  # whether it has a shape of its own that no forward may change
    parts: Parts | None = None  # of a row's slots, where keys and values lie beside each other

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._both: list[Tensor] = []  # the same, where they lie beside each other
        self.flat_slots = torch.empty(0)  # where the next forward writes, among the slots of all rows
        self._rows = 0
        self.total = 0  # slots of a row that the next forward looks at
        self._capacity = 0  # slots per row that every layer is to have

    def prepare(self, slots: Tensor, total: int) -> None:
        """Say where the next forward writes, integer [N, W]; the model attends over the slots below `total`."""
        self._rows, self.total = slots.shape[0], total
        if total >= self._capacity:
            self._capacity = _room(total)
        first = torch.arange(self._rows, device=slots.device).unsqueeze(1) * self._capacity
        self.flat_slots = (first + slots).flatten()

    def narrow(self, entries: Tensor) -> None:
        """Write only those `entries` [M] of the N * W that were prepared."""
        self.flat_slots = self.flat_slots[entries]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [N, heads, W, head size]; return all of its keys and values."""
        entries = (new.transpose(1, 2).flatten(0, 1) for new in (keys, values))
        keys, values = (stored.transpose(1, 2) for stored in self.write(layer_idx, *entries))
        return keys, values

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [M, heads, head size]; return all, [N, slots, heads, head size]."""
        stored = self.stores(layer, keys, keys.shape[1:])
        for store, new in zip(stored, (keys, values), strict=True):
            store.flatten(0, 1).index_copy_(0, self.flat_slots, new)
        keys, values = (store[: self._rows, : self.total] for store in stored)
        return keys, values

    def write_both(self, layer: int, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [M, 2, heads, head size], which lie beside each other; return all."""
        self._both[layer].flatten(0, 1).index_copy_(0, self.flat_slots, entries)
        return self._layers[layer]

    def stores(self, layer: int, like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Where a layer's keys and values lie, [rows, slots, *shape], on the device of `like` and of its type."""
        if layer == len(self._layers):
            keys, values = (like.new_zeros(self._rows, self._capacity, *shape) for _ in range(2))
            self._layers.append((keys, values))
        if self._layers[layer][0].shape[1] != self._capacity:
            self._resize(layer, self._rows)
        return self._layers[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use (asked for by models that are given no position ids)."""
        return self.total

    def move(self, sources: Tensor, holes: Tensor, rows: int, longest: int) -> None:
        for store in (store for layer in self._layers for store in layer):
            store[holes] = store[sources]
        self.keep(rows, longest)

    def keep(self, rows: int, longest: int) -> None:
        """The first `rows` rows stay, with `longest` slots at most; memory is given back if half of it is of no use."""
        self._rows = rows
        capacity = min(self._capacity, _room(longest + _GROWTH))
        held = max((len(keys) * keys.shape[1] for keys, _ in self._layers), default=0)
        if 2 * rows * capacity <= held:
            self._capacity = capacity
            with suppress(MemoryError, RuntimeError):  # no memory to move it: a layer stays till it is written
                for layer in range(len(self._layers)):
                    self._resize(layer, rows)

    def extend(self, *others: "RaggedCache") -> None:
        """Take the rows in use of other caches of the same model, behind the own ones; the others are left empty."""
        rows = self._rows + sum(other._rows for other in others)
        self._capacity = max(cache._capacity for cache in (self, *others))
        for layer in range(len(self._layers)):
            if rows > self._layers[layer][0].shape[0] or self._capacity != self._layers[layer][0].shape[1]:
                self._resize(layer, rows)
            first = self._rows
            for other in others:
                for mine, theirs in zip(self._layers[layer], other._layers.pop(0), strict=True):
                    mine[first : first + other._rows, : theirs.shape[1]] = theirs[: other._rows, : mine.shape[1]]
                first += other._rows
        self._rows = rows

    @property
    def dtype(self) -> torch.dtype | None:
        return self._layers[0][0].dtype if self._layers else None

    def bytes(self) -> int:
        return sum(store.nbytes for layer in self._layers for store in layer)

    def _resize(self, layer: int, rows: int) -> None:
        """Move a layer to stores of `rows` rows and as many slots as every layer is to have."""
        moved = []
        for old in self._layers[layer]:
            new = old.new_zeros(rows, self._capacity, *old.shape[2:])
            kept, slots = min(self._rows, rows, len(old)), min(old.shape[1], self._capacity)
            new[:kept, :slots] = old[:kept, :slots]
            moved.append(new)
        self._layers[layer] = (moved[0], moved[1])


def _room(slots: int) -> int:
    return -(-(slots + 1) // _GROWTH) * _GROWTH
