"""From a grid's entries to contenders: their checkpoints, loaded once, or why an entry cannot be measured."""

from __future__ import annotations

from typing import Any

import torch

from marsbench.compiled.graphs import Graphs, why_not
from marsbench.decoding.engine import Method
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.methods import METHODS
from marsbench.methods.fitting import fit
from marsbench.racing.grid import Entry
from marsbench.racing.race import Contender
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import explained
from marsbench.training.checkpoints import Loaded


class Entrants:
    """The entries of one sweep and their models; `backend` compiles the steps of those that are compiled."""

    def __init__(self, checkpoints: Checkpoints, dtype: torch.dtype, backend: str = "inductor") -> None:
        self._checkpoints, self._dtype, self._backend = checkpoints, dtype, backend
        self._loaded: dict[tuple[str, int], Loaded] = {}
        # Graphs belong to one method: both are kept, so that what was compiled at one batch size serves at the next.
        self._compiled: dict[str, tuple[Method | OutsideMethod, Graphs]] = {}

    def load(self, stage: str, block_size: int) -> Loaded:
        """A stage's checkpoint; `UserError` where there is none and training one would take days."""
        if (stage, block_size) not in self._loaded:
            if reason := self._checkpoints.missing(stage, block_size):
                raise UserError(reason)
            self._loaded[stage, block_size] = self._checkpoints.load(stage, block_size, self._dtype)
        return self._loaded[stage, block_size]

    def target(self, entry: Entry) -> Loaded:
        """The checkpoint that decodes."""
        return self.load(entry.stage, entry.trained_block_size)

    def draft(self, entry: Entry) -> Loaded | None:
        """The draft model, for an entry that has one."""
        return self.load(entry.draft, entry.trained_block_size) if entry.draft else None

    def contender(self, entry: Entry, batch_size: int) -> Contender:
        """An entry ready to race; `UserError` says why it cannot."""
        if METHODS[entry.method].one_row and batch_size > 1:
            raise UserError(f"{entry.method} decodes one sequence at a time", fix="race it at batch size 1")
        loaded = self.target(entry)
        method = fit(entry.method, loaded, draft=self.draft(entry), **entry.options)
        if not entry.compiled:
            return Contender(entry.name, loaded.model, method, entry.threshold)
        if reason := why_not(loaded.model, method):
            raise UserError(f"it cannot be compiled: {reason}", fix="race it without `compiled`")
        method, graphs = self._compiled.setdefault(entry.name, (method, Graphs(self._backend)))
        return Contender(entry.name, loaded.model, method, entry.threshold, graphs.batch)

    def compiling(self, entry: Entry) -> dict[str, Any]:
        """What compiling a contender's steps has taken so far, as rows have it; nothing of one that is not compiled."""
        if entry.name not in self._compiled:
            return {}
        _, graphs = self._compiled[entry.name]
        return {"graphs": len(graphs), "compile_seconds": round(graphs.compile_seconds, 3)}

    def why_not(self, entry: Entry, batch_size: int) -> str:
        """Why an entry cannot race, empty if it can."""
        try:
            self.contender(entry, batch_size)
        except UserError as error:
            return explained(error)
        return ""

    def weights(self, entry: Entry) -> dict[str, Any]:
        """The hashes of an entry's weights, as far as its checkpoints are there."""
        try:
            draft = self.draft(entry)
            return {"target": self.target(entry).weights, "draft": draft.weights if draft else None}
        except UserError:
            return {}

    def weight_bytes(self, entry: Entry) -> tuple[int, int]:
        """What the target model takes, and what it takes together with its heads and its draft model."""
        loaded, draft = self.target(entry), self.draft(entry)
        target = size_of(loaded.model)
        heads = size_of(loaded.heads) if loaded.heads is not None and entry.method == "medusa" else 0
        return target, target + heads + (size_of(draft.model) if draft else 0)


def size_of(module: Any) -> int:
    """Bytes of a module's parameters, shared ones counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
