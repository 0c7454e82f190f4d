"""What the engine costs: every lossless method checked against AR, and methods raced at several batch sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marsbench import world
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.methods import METHODS
from marsbench.methods.fitting import fit
from marsbench.provenance import provenance
from marsbench.sweeps.grid import Entry
from marsbench.sweeps.race import Contender, Race, RoundLog, profile
from marsbench.sweeps.rows import ExactnessRow, Row, SpeedRow
from marsbench.sweeps.runner import Runner, content_hash, source_hash
from marsbench.training.checkpoints import Loaded
from marsbench.training.data import chat_prompt
from marsbench.training.stages import lineage, recipe

_EXACTNESS_BATCH = 32


@dataclass(frozen=True)
class Effort:
    """How much to race."""

    batch_sizes: tuple[int, ...]
    repeats: int
    prompts: int  # from all benchmarks alike; at least three batches

    def prompts_at(self, batch_size: int) -> int:
        """Prompts to race at a batch size."""
        return max(self.prompts, 3 * batch_size)


_EFFORT = Effort(batch_sizes=(1, 4, 8, 16, 32), repeats=7, prompts=48)
_LITTLE_EFFORT = Effort(batch_sizes=(1, 4), repeats=2, prompts=12)  # for tests


def _verified(layout: str, window: int, threshold: float | None = None) -> Entry:
    options = {"layout": layout, "block_size": window}
    name = f"mars-verified, {layout}, window {window}" + (f", tau = {threshold:g}" if threshold is not None else "")
    return Entry(name, "mars", "mars-verified", options, threshold)


RACE = (
    Entry("hf-generate", "mars", "hf-generate", {}),
    Entry("ar", "mars", "ar", {}),
    Entry("mars", "mars", "mars", {"block_size": 4}, 0.95),
    *[_verified("groups", window) for window in (2, 3, 4)],
    _verified("groups", 4, 0.3),
    _verified("linear", 2),
    *[_verified("linear", window, 0.5) for window in (3, 4, 5)],
    Entry("speculative", "mars", "speculative", {"draft_length": 4}, draft="draft_ar_sft"),
    Entry("prompt-lookup", "mars", "prompt-lookup", {"draft_length": 4}),
)
EXACT = (
    Entry("mars", "mars", "mars", {"block_size": 4}, 0.95),  # not lossless: what the verified ones are held against
    _verified("groups", 4),
    _verified("groups", 8),
    _verified("linear", 4, 0.5),
    Entry("speculative", "mars", "speculative", {"draft_length": 4}, draft="draft_ar_sft"),
    Entry(
        "speculative-mars-draft", "mars", "speculative", {"draft_length": 4, "draft_method": "mars"}, None, "draft_mars"
    ),
    Entry("medusa-chain", "medusa", "medusa", {"tree_width": 1}),
    Entry("medusa-tree", "medusa", "medusa", {"tree_width": 3}),
    Entry("jacobi", "mars", "jacobi", {"block_size": 4}),
    Entry("prompt-lookup", "mars", "prompt-lookup", {"draft_length": 4}),
    Entry("mars-speculative", "mars", "mars-speculative", {"draft_method": "mars"}, 0.95, "draft_mars"),
)


class EngineStudy:
    """The study at one scale, with a runner's checkpoints, rows and policy."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._scale = runner, runner.scale
        self._effort = _LITTLE_EFFORT if runner.scale.scale == "micro" else _EFFORT
        self._loaded: dict[str, Loaded] = {}

    def rows(self) -> list[Row]:
        """All rows: trainings, exactness, races."""
        entries = (*RACE, *EXACT)
        stages = dict.fromkeys(stage for entry in entries for stage in (entry.stage, entry.draft) if stage)
        names = dict.fromkeys(name for stage in stages for name in lineage(self._scale, stage))
        trained: list[Row] = [self._runner.train(recipe(self._scale, name, seed=self._runner.seed)) for name in names]
        exact = [self._exactness(entry) for entry in EXACT]
        raced = [row for batch_size in self._effort.batch_sizes for row in self._race(batch_size)]
        return [*trained, *exact, *raced]

    def _exactness(self, entry: Entry) -> ExactnessRow:
        """One method against AR on every prompt."""
        loaded = self._load(entry.stage)
        key = self._key("exactness", entry, loaded, {})
        row = self._runner.existing_row(key, ExactnessRow, f"exactness of {entry.name}")
        if row is not None:
            return row
        origin = provenance(seed=self._runner.seed)
        prompts = self._prompts(loaded, None)
        with self._runner.reporter.bar(f"{entry.name} against ar"):
            ours = self._decode(entry, prompts)
            theirs = self._decode(Entry("ar", entry.stage, "ar", {}), prompts)
        row = ExactnessRow(
            key=key,
            status="done",
            reason="",
            scale=self._scale.scale,
            stage=entry.stage,
            method=entry.method,
            options=entry.shown,
            prompts=len(prompts),
            same_as_ar=sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)),
            emitted=sum(generation.emitted for generation in ours),
            row_forwards=sum(generation.forwards for generation in ours),
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            checkpoint=loaded.weights,
            provenance=origin,
        )
        self._runner.keep(row)
        speed = row.emitted / row.row_forwards
        self._runner.reporter.say(f"{entry.name}: {row.same_as_ar} of {row.prompts} as ar, {speed:.2f} tokens/forward")
        return row

    def _race(self, batch_size: int) -> list[SpeedRow]:
        """All contenders at one batch size; a race is run whole or not at all."""
        loaded = self._load("mars")
        prompts = self._prompts(loaded, self._effort.prompts_at(batch_size))
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
        shared = {"batch_size": batch_size, "prompts": digest, "repeats": self._effort.repeats}
        keys = [self._key("speed", entry, loaded, shared) for entry in RACE]
        known = [
            self._runner.existing_row(key, SpeedRow, f"{entry.name}, batch size {batch_size}")
            for key, entry in zip(keys, RACE, strict=True)
        ]
        if all(row is not None for row in known):
            return [row for row in known if row is not None]
        origin = provenance(seed=self._runner.seed)
        contenders = [self._contender(entry) for entry in RACE]
        settings = {"batch_size": batch_size, "max_new_tokens": self._scale.max_new_tokens, **self._ids(loaded)}
        with self._runner.reporter.bar(f"racing at batch size {batch_size}") as bar:
            outcomes = Race(contenders, prompts, laps=self._effort.repeats, **settings).run(RoundLog(), bar.update)
            profiles = [
                {}
                if isinstance(one.method, OutsideMethod) or outcomes[one.name].status != "done"
                else profile(one, prompts, **settings)
                for one in contenders
            ]
        ar = outcomes["ar"]
        rows = []
        for key, entry, parts in zip(keys, RACE, profiles, strict=True):
            found = outcomes[entry.name]
            ours = [one.tokens for one in found.generations]
            rows.append(
                SpeedRow(
                    key=key,
                    status=found.status,
                    reason=found.reason,
                    scale=self._scale.scale,
                    race=f"engine, batch size {batch_size}, {origin['started']}",
                    contender=entry.name,
                    stage=entry.stage,
                    method=entry.method,
                    options=entry.shown,
                    batch_size=batch_size,
                    prompts=len(prompts),
                    prompts_hash=digest,
                    max_new_tokens=self._scale.max_new_tokens,
                    seconds=found.seconds,
                    emitted=found.emitted,
                    row_forwards=found.row_forwards,
                    forwards=found.meter.forwards,
                    positions=found.meter.positions,
                    cache_bytes=found.meter.cache_bytes,
                    same_as_ar=sum(a == b.tokens for a, b in zip(ours, ar.generations, strict=False)),
                    profile=parts,
                    checkpoint=loaded.weights,
                    provenance=origin,
                )
            )
        for row in rows:
            self._runner.keep(row)
        self._runner.reporter.say(f"raced {len(rows)} contenders at batch size {batch_size}")
        return rows

    def _load(self, stage: str) -> Loaded:
        if stage not in self._loaded:
            self._loaded[stage] = self._runner.load(stage, 4)
        return self._loaded[stage]

    def _contender(self, entry: Entry) -> Contender:
        loaded = self._load(entry.stage)
        draft = self._load(entry.draft) if entry.draft else None
        method = fit(entry.method, loaded, draft=draft, **entry.options)
        return Contender(entry.name, loaded.model, method, entry.threshold)

    def _decode(self, entry: Entry, prompts: Sequence[Sequence[int]]) -> list[Any]:
        contender = self._contender(entry)
        requests = [Request(prompt, self._scale.max_new_tokens, entry.threshold) for prompt in prompts]
        batch_size = 1 if METHODS[entry.method].one_row else _EXACTNESS_BATCH
        ids = self._ids(self._load(entry.stage))
        return decode(contender.model, contender.method, requests, batch_size=batch_size, **ids)

    def _prompts(self, loaded: Loaded, count: int | None) -> list[list[int]]:
        """Prompts of all benchmarks in turn, as token ids; all the test questions if no count is given."""
        names = self._scale.benchmarks
        questions = self._scale.questions or 400
        each = questions if count is None else count // len(names)
        texts = [[example.prompt for example in world.test_set(name, each)] for name in names]
        in_turn = [chat_prompt(loaded.tokenizer, text) for group in zip(*texts, strict=True) for text in group]
        return [list(ids) for ids in loaded.tokenizer(in_turn, add_special_tokens=False).input_ids]

    def _ids(self, loaded: Loaded) -> dict[str, Any]:
        return {"eos_id": loaded.tokenizer.eos_token_id, "pad_id": loaded.tokenizer.pad_token_id}

    def _key(self, kind: str, entry: Entry, loaded: Loaded, more: dict[str, Any]) -> str:
        draft = self._load(entry.draft).weights if entry.draft else None
        return content_hash(
            {
                "kind": kind,
                "entry": vars(entry),
                "weights": loaded.weights,
                "draft": draft,
                "max_new_tokens": self._scale.max_new_tokens,
                "source": source_hash("decoding", "methods", "world"),
                **more,
            }
        )
