"""All rows of the engine's page: trainings, every lossless method against AR on every prompt, profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from marsbench.decoding.generation import Generation, Request
from marsbench.keys import versions
from marsbench.line import Line
from marsbench.methods import METHODS
from marsbench.racing.course import Course
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import ExactnessRow, Row
from marsbench.running.run import Run, kept
from marsbench.studies.engine import AR, EXACT, exactness_grid, profiled_grid
from marsbench.training.checkpoints import Loaded


def engine_rows(run: Run) -> list[Row]:
    course = Course(run, exactness_grid(run.scale))
    trained = course.trainings()
    exact = [_exactness(course, contender) for contender in EXACT]
    rows: list[Row] = [*trained, *exact, *Sweep(run, profiled_grid(run.scale)).rows()]
    return list({row.key: row for row in rows}.values())


def _exactness(course: Course, contender: Line) -> ExactnessRow:
    """One method against AR of the same checkpoint on every prompt, token by token."""
    run, loaded = course.run, course.target(contender)
    content = {
        "kind": "exactness",
        "entry": contender.keyed,
        "max_new_tokens": course.max_new_tokens,
        "questions": course.questions.fingerprint(),
        "versions": versions("decoding"),
        **course.weights(contender),
    }
    make = partial(_compared, course, contender, loaded)
    return kept(run, ExactnessRow, content, f"exactness of {contender.name}", make)


def _compared(course: Course, contender: Line, loaded: Loaded) -> dict[str, Any]:
    run = course.run
    with run.reporter.bar(f"{contender.name} against ar"):
        ours, theirs = (_decoded(course, which) for which in (contender, replace(AR, stage=contender.stage)))
    same = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    emitted, forwards = sum(generation.emitted for generation in ours), sum(generation.forwards for generation in ours)
    run.reporter.say(f"{contender.name}: {same} of {len(ours)} as ar, {emitted / forwards:.2f} tokens/forward")
    return {
        "stage": contender.stage, "method": contender.method, "options": contender.shown, "prompts": len(ours),
        "same_as_ar": same, "emitted": emitted, "row_forwards": forwards, "dtype": course.grid.dtype,
        "checkpoint": loaded.weights,
    }  # fmt: skip


def _decoded(course: Course, contender: Line) -> Sequence[Generation]:
    (size,) = course.grid.batch_sizes
    batch_size = 1 if METHODS[contender.method].one_row else size
    requests = [Request(prompt, course.max_new_tokens, contender.threshold) for prompt in course.prompts.ids]
    return course.entrant(contender, batch_size).decode(requests, **course.ids)
