"""From a grid's contenders to who can race: their checkpoints, loaded once, or why a contender cannot be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from marsbench.compiled.graphs import Graphs, why_not
from marsbench.decoding.engine import Method
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.keys import content_hash
from marsbench.methods import METHODS
from marsbench.methods.fitting import fit
from marsbench.racing.grid import Contender
from marsbench.racing.race import Entrant
from marsbench.training.checkpoints import Loaded

Load = Callable[[str, int, torch.dtype], Loaded]  # stage, block size -> its model; `UserError` where there is none


class Entrants:
    """The contenders of one grid and their models; `backend` compiles the steps of those that are compiled."""

    def __init__(self, load: Load, dtype: torch.dtype, backend: str) -> None:
        self._load, self._dtype, self._backend = load, dtype, backend
        self._loaded: dict[tuple[str, int], Loaded] = {}
        # Graphs belong to one method: both are kept, so that what was compiled at one batch size serves at the
        # next, and at one threshold for all.
        self._compiled: dict[str, tuple[Method | OutsideMethod, Graphs]] = {}

    def _model(self, stage: str, block_size: int) -> Loaded:
        if (stage, block_size) not in self._loaded:
            self._loaded[stage, block_size] = self._load(stage, block_size, self._dtype)
        return self._loaded[stage, block_size]

    def target(self, contender: Contender) -> Loaded:
        return self._model(contender.stage, contender.trained_block_size)

    def draft(self, contender: Contender) -> Loaded | None:
        """The draft model, for a contender that has one."""
        return self._model(contender.draft, contender.trained_block_size) if contender.draft else None

    def entrant(self, contender: Contender, batch_size: int) -> Entrant:
        """A contender ready to race; `UserError` says why it cannot."""
        if METHODS[contender.method].one_row and batch_size > 1:
            raise UserError(f"{contender.method} decodes one sequence at a time", fix="race it at batch size 1")
        loaded = self.target(contender)
        method = fit(contender.method, loaded, draft=self.draft(contender), **contender.options)
        if not contender.compiled:
            return Entrant(contender.name, loaded.model, method, contender.threshold)
        if reason := why_not(loaded.model, method, self._backend):
            raise UserError(f"it cannot be compiled: {reason}", fix="race it without `compiled`")
        method, graphs = self._compiled.setdefault(_steps_of(contender), (method, Graphs(self._backend)))
        return Entrant(contender.name, loaded.model, method, contender.threshold, graphs.batch)

    def compiling(self, contender: Contender) -> dict[str, Any]:
        """What compiling a contender's steps has taken so far, as rows have it; nothing of one that is not compiled."""
        if not contender.compiled:
            return {}
        _, graphs = self._compiled[_steps_of(contender)]
        return {"graphs": len(graphs), "compile_seconds": round(graphs.compile_seconds, 3)}

    def why_not(self, contender: Contender, batch_size: int) -> str:
        """Why a contender cannot race, empty if it can."""
        try:
            self.entrant(contender, batch_size)
        except UserError as error:
            return error.reason
        return ""

    def weights(self, contender: Contender) -> dict[str, Any]:
        """The hashes of a contender's weights, as far as its checkpoints are there."""
        try:
            draft = self.draft(contender)
            return {"target": self.target(contender).weights, "draft": draft.weights if draft else None}
        except UserError:
            return {}

    def weight_bytes(self, contender: Contender) -> tuple[int, int]:
        """What the target model takes, and what it takes together with its heads and its draft model."""
        loaded, draft = self.target(contender), self.draft(contender)
        target = size_of(loaded.model)
        heads = size_of(loaded.heads) if loaded.heads is not None and contender.method == "medusa" else 0
        return target, target + heads + (size_of(draft.model) if draft else 0)


def _steps_of(contender: Contender) -> str:
    """What decides a contender's steps: everything but its name and its threshold."""
    return content_hash({**contender.keyed, "name": "", "threshold": None})


def size_of(module: Any) -> int:
    """Bytes of a module's parameters, shared ones counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
