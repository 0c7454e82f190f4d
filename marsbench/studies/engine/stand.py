"""What every measurement of the engine stands on: the checkpoints, the prompts, and the keys of rows."""

from __future__ import annotations

from typing import Any

import torch

from marsbench import world
from marsbench.keys import content_hash, versions
from marsbench.racing.entrants import Entrants
from marsbench.racing.grid import Entry
from marsbench.racing.race import Contender
from marsbench.rows.kinds import Row
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.studies.engine.contenders import EXACT, RACE, Effort, effort_at
from marsbench.training.checkpoints import Loaded
from marsbench.training.data import chat_prompt
from marsbench.training.stages import lineage


class Stand:
    """One run's checkpoints, each loaded once; `backend` is what compiles the steps of those that are compiled."""

    def __init__(self, run: Run, effort: Effort | None = None, backend: str = "inductor") -> None:
        self.run, self.effort = run, effort or effort_at(run.scale)
        self._checkpoints = Checkpoints(run)
        self._entrants = Entrants(self._checkpoints, torch.float32, backend)

    def trainings(self) -> list[Row]:
        """The stages that the page needs, trained now if need be."""
        stages = dict.fromkeys(stage for entry in (*RACE, *EXACT) for stage in (entry.stage, entry.draft) if stage)
        names = dict.fromkeys(name for stage in stages for name in lineage(self.run.scale, stage))
        return [self._checkpoints.train(self._checkpoints.recipe(name, None)) for name in names]

    def target(self, entry: Entry) -> Loaded:
        """The checkpoint that an entry decodes."""
        return self._entrants.target(entry)

    def contender(self, entry: Entry) -> Contender:
        """An entry ready to decode."""
        return self._entrants.contender(entry, batch_size=1)

    def compiling(self, entry: Entry) -> dict[str, Any]:
        """What an entry's row says of its compiled steps."""
        return self._entrants.compiling(entry)

    def prompts(self, loaded: Loaded, count: int | None) -> list[list[int]]:
        """Prompts of all benchmarks in turn, as token ids; all the test questions if no count is given."""
        names, questions = self.run.scale.benchmarks, self.run.scale.questions or 400
        each = questions if count is None else count // len(names)
        texts = [[example.prompt for example in world.test_set(name, each)] for name in names]
        in_turn = [chat_prompt(loaded.tokenizer, text) for group in zip(*texts, strict=True) for text in group]
        return [list(ids) for ids in loaded.tokenizer(in_turn, add_special_tokens=False).input_ids]

    def key(self, kind: str, entry: Entry, more: dict[str, Any]) -> str:
        """The key of everything that decides a row's numbers."""
        return content_hash(
            {
                "kind": kind,
                "entry": entry.keyed,
                "weights": self.target(entry).weights,
                "draft": draft.weights if (draft := self._entrants.draft(entry)) else None,
                "max_new_tokens": self.run.scale.max_new_tokens,
                "versions": versions("decoding", "timing", "world"),
                **more,
            }
        )


def ids_of(loaded: Loaded) -> dict[str, Any]:
    """EOS and padding of a checkpoint."""
    return {"eos_id": loaded.tokenizer.eos_token_id, "pad_id": loaded.tokenizer.pad_token_id}
