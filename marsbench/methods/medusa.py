"""Medusa (arXiv 2401.10774): extra heads on a frozen model draft a tree of continuations, the model verifies it."""

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.decoding.reading import room_for_drafts
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import drafts_of, last, pending, tree_window
from marsbench.forward.window import Answer, Window

Path = tuple[int, ...]  # the rank of each token on the way among its head's guesses


def tree_paths(heads: int, width: int) -> list[Path]:
    """All paths whose ranks (from 1) multiply to at most `width`: first guesses first, then by depth."""
    level: list[Path] = [()]
    paths: list[Path] = []
    for _ in range(heads):
        level = [
            (*path, rank) for path in level for rank in range(width) if prod(r + 1 for r in path) * (rank + 1) <= width
        ]
        paths += level
    return sorted(paths, key=lambda path: (any(path), len(path), path))


class _Nodes(NamedTuple):
    depth: tuple[int, ...]  # [M], 0 for a guess at the next token; also which head guesses it
    rank: tuple[int, ...]  # [M], which of the head's guesses it is
    parent: tuple[int, ...]  # [M], the entry of the node before it, counted from the last committed token at 0
    ancestors: tuple[tuple[bool, ...], ...]  # [M, M], which nodes are on a node's path, itself among them


def _nodes(heads: int, width: int) -> _Nodes:
    paths = tree_paths(heads, width)
    entry = {path: number for number, path in enumerate([(), *paths])}
    return _Nodes(
        tuple(len(path) - 1 for path in paths),
        tuple(path[-1] for path in paths),
        tuple(entry[path[:-1]] for path in paths),
        tuple(tuple(path[: len(above)] == above for above in paths) for path in paths),
    )


def _tree(nodes: _Nodes, device: torch.device) -> list[Tensor]:
    return [torch.tensor(numbers, device=device) for numbers in nodes]


_kept_tree = lru_cache(maxsize=None)(_tree)  # for good: recorded steps read it where it lies


@dataclass(frozen=True)
class Medusa(Method):
    name = "medusa"

    heads: nn.Module  # hidden states [..., H] -> [..., heads, H]
    tree_width: int = 1
    count: int = field(init=False)  # how many heads there are
    nodes: _Nodes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.heads))  # type: ignore[arg-type]
        object.__setattr__(self, "nodes", _nodes(self.count, self.tree_width))

    def most(self) -> Most:
        """The tree. What is right of it off the chain of first guesses is forwarded once more."""
        nodes = len(self.nodes.depth)
        return Most(pending=1 if self.tree_width == 1 else self.count + 1, drafted=nodes, behind=nodes)

    def propose(self, rows: Rows) -> Window:
        depth, _, _, ancestors = self._tree(rows)
        return tree_window(rows, depth, ancestors)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        depth, rank, *_ = self._tree(rows)
        ahead = F.pad(depth[: rows.extent.drafted] + 1, (1, 0))
        ids = rows.choose(answer.logits(slice(last(rows), None)), rows.length.unsqueeze(1) + ahead)
        path, steps, on_chain = self._right_path(rows, ids)
        accepted = Accepted.leading(rows, ids.gather(1, path), steps + 1, pending(rows) + on_chain)
        # The heads guess on from the last right entry of the way.
        states = self.heads(answer.states(last(rows) + path.gather(1, steps.unsqueeze(1)))).squeeze(1)  # [N, heads, H]
        best = answer.lm_head(states).topk(self.tree_width, dim=-1).indices  # [N, heads, width]
        rows.drafts = best[:, depth, rank]
        rows.drafted = room_for_drafts(rows, accepted).clamp(max=1) * len(depth)
        return accepted

    def _tree(self, rows: Rows) -> list[Tensor]:
        tree = _tree if torch.compiler.is_compiling() else _kept_tree
        return tree(self.nodes, rows.tokens.device)

    def _right_path(self, rows: Rows, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Follow right guesses: the entries on the way [N, heads + 1] (0 is the last committed token), how many steps
        of it are right [N], and how many of those lie on the chain of first guesses, whose entries stand together
        [N].
        """
        nodes = rows.extent.drafted
        parent = self._tree(rows)[2][:nodes]
        right = (drafts_of(rows) == ids[:, parent]) & (rows.drafted > 0).unsqueeze(1)
        here = torch.zeros_like(rows.length)
        way, steps, on_chain = [here], here, here
        for step in range(1, self.count + 1 if nodes else 1):
            follows = right & (parent == here.unsqueeze(1))
            goes_on = follows.any(1)
            here = torch.where(goes_on, follows.int().argmax(1) + 1, here)
            way.append(here)
            steps = steps + goes_on
            on_chain = on_chain + (goes_on & (here == step))
        return torch.stack(way, dim=1), steps, on_chain
