"""What a sweep writes down: the row of every cell, and the log of what it generated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marsbench.decoding.generation import Generation
from marsbench.errors import UserError
from marsbench.files import write_atomically
from marsbench.forward.linear import packing_in_words
from marsbench.keys import content_hash
from marsbench.provenance import provenance
from marsbench.racing.course import Cell, Course
from marsbench.racing.grid import BASELINES
from marsbench.racing.race import Outcome
from marsbench.rows.kinds import SweepRow


def sweep_row(course: Course, cell: Cell, found: Outcome, outcomes: Mapping[str, Outcome]) -> SweepRow:
    """The row of a cell, its samples written first; `outcomes` are those of its race."""
    contender = cell.contender
    identity: dict[str, Any] = {
        "key": cell.key,
        "status": found.status,
        "reason": found.reason,
        "scale": course.run.scale.scale,
        "contender": contender.name,
        "stage": contender.stage,
        "draft": contender.draft or "",
        "method": contender.method,
        "options": contender.shown,
        "compiled": contender.compiled,
        "batch_size": cell.batch_size,
        "benchmarks": course.questions.benchmarks,
        "prompts": len(course.prompts.ids),
        "prompts_hash": content_hash(course.prompts.ids),
        "prompt_cut": course.prompts.cuts if any(course.prompts.cuts) else [],
        "max_new_tokens": course.max_new_tokens,
        "dtype": course.grid.dtype,
        "provenance": {**provenance(seed=course.run.seed), **_origin(course, cell), **packing_in_words()},
    }
    measured = _measured(course, cell, found, outcomes) if found.status == "done" else {}
    return SweepRow(**identity, **measured)


def _origin(course: Course, cell: Cell) -> dict[str, str]:
    try:
        return course.entrants.target(cell.contender).origin
    except UserError:
        return {}


def _measured(course: Course, cell: Cell, found: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    generations, responses = found.generations, course.responses(found)
    correct = course.questions.score(responses)
    target, together = course.entrants.weight_bytes(cell.contender)
    return {
        "seconds": [round(seconds, 6) for seconds in found.seconds],
        "baselines": _baselines(outcomes),
        "correct": correct,
        "emitted": [one.emitted for one in generations],
        "row_forwards": [one.forwards for one in generations],
        "finished": [int(one.finish == "eos") for one in generations],
        "first_token": found.first_token,
        "last_token": found.last_token,
        "forwards": found.meter.forwards,
        "positions": found.meter.positions,
        "prompt_forwards": found.meter.prompt_forwards,
        "prompt_positions": found.meter.prompt_positions,
        "cache_bytes": found.meter.cache_bytes,
        "target_bytes": target,
        "weight_bytes": together,
        "peak_bytes": found.peak_bytes,
        "others_cores": found.others_cores,
        "same_as": _same_as(course, found, outcomes),
        "samples": _log_samples(course, cell.key, generations, responses, correct),
        "race": content_hash(sorted(outcomes)),
        "checkpoint": course.entrants.target(cell.contender).weights,
        "profile": course.profile(cell),
        **course.entrants.compiling(cell.contender),
    }


def _baselines(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    found = {name: outcomes[name] for name in BASELINES if name in outcomes and outcomes[name].status == "done"}
    return {
        name: {"seconds": [round(seconds, 6) for seconds in one.seconds], "emitted": one.emitted}
        for name, one in found.items()
    }


def _same_as(course: Course, found: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """Each contender that decodes by `ar` -> prompts that it and this one give the same tokens."""
    tokens = [one.tokens for one in found.generations]
    references = [contender.name for contender in course.grid.contenders if contender.method == "ar"]
    return {
        name: sum(mine == theirs.tokens for mine, theirs in zip(tokens, outcomes[name].generations, strict=True))
        for name in references
        if name in outcomes and outcomes[name].status == "done"
    }


def _log_samples(
    course: Course, key: str, generations: Sequence[Generation], responses: Sequence[str], correct: Sequence[float]
) -> str:
    """Write down what was generated; returns the hash of that file."""
    lines = [
        {
            "benchmark": question.benchmark,
            "doc_id": question.doc_id,
            "response": response,
            "correct": right,
            "tokens": one.tokens,
            "eos_id": one.eos_id,
            "accepted": one.accepted,
        }
        for question, response, right, one in zip(
            course.questions.questions, responses, correct, generations, strict=True
        )
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = write_atomically(course.run.workspace.samples(key), content)
    logged = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for one, line in zip(generations, logged, strict=True):
        in_log = len(line["tokens"]) + (line["eos_id"] is not None)
        if not sum(line["accepted"]) == one.emitted == in_log:
            raise RuntimeError(f"{sum(line['accepted'])} accepted, {one.emitted} emitted, {in_log} logged tokens")
    return hashlib.sha256(content).hexdigest()
