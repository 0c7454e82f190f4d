"""A page to explore: accuracy by speed over any baseline, and answers side by side, in one file without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from marsbench.findings.cells import why_none
from marsbench.findings.collection import Collection
from marsbench.findings.sweep import SweepCells
from marsbench.line import Line
from marsbench.overview.index import EXPLORE
from marsbench.presets import preset
from marsbench.racing.grid import COMPILED_AR
from marsbench.rows.kinds import GenerationRow, Row, SweepRow
from marsbench.studies.figure1 import PLAN

SPEED, ANSWERS = "speedup", "figure1"  # keys of the studies whose rows it shows
_PAGES = {SPEED: "every contender with its intervals"}


def page_of(collection: Collection) -> str:
    """The page as HTML: a pure function of the rows of a scale, of each study those of the first training seed."""
    race, questions = (next(iter(collection.of(page)), []) for page in (SPEED, ANSWERS))
    found = {"race": _race(SweepCells.of(race)), "questions": _questions(questions)}
    template = (Path(__file__).parent / EXPLORE).read_text(encoding="utf-8")
    # Such JSON ends no <script> and opens no comment in it, whatever its texts say.
    data = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    return template.replace("{{about}}", _about(collection), 1).replace("{{rows}}", data, 1)


def _about(collection: Collection) -> str:
    """Which scale it is, how small its models are, and where the numbers stand in full; as HTML."""
    scale = preset(collection.scale)
    seeds = {min(by_seed) for page in _PAGES if (by_seed := collection.rows.get(page))}
    caveat = scale.caveat.rpartition("**")[2].strip()  # without what it is called above verdicts
    said = [f"Everything here is of scale {scale.scale} ({scale.summary}){': ' if caveat else '.'}{caveat}"]
    said += [f"Training seed {', '.join(map(str, sorted(seeds)))}."] if seeds else []
    links = [
        f'<a href="{escape(collection.links[page])}">{what[0].upper()}{what[1:]}</a>.'
        for page, what in _PAGES.items()
        if page in collection.links
    ]
    return " ".join([*map(escape, said), *links])


# ---- the race ----


def _race(sweep: SweepCells) -> dict[str, Any]:
    """The contenders, and for each batch size what each of them came to, relative to every one of them."""
    races = sweep.races
    found = {name: row for race in races.values() for name, row in race.items()}
    names = [name for name in sweep.names if name in found]
    return {
        "sizes": list(races),
        "contenders": [
            {"name": name, "compiled": found[name].compiled, "commands": _commands(found[name])} for name in names
        ],
        "usual": [names.index(name) for name in ("ar", COMPILED_AR) if name in names],
        "cells": [_cells([race.get(name) for name in names]) for race in races.values()],
    }


def _commands(row: SweepRow) -> list[str]:
    """How to decode like it, with a hole for the batch size: the scale's own checkpoint, and one of the reader's."""
    how = f"--batch-size {{size}} {Line.raced(row.contender, row.stage, row.method, **row.options).typed}"
    how += f" --dtype {row.dtype}" if row.dtype not in ("", "float32") else ""
    how += " --compile" if row.compiled else " --no-compile"
    own = f"marsbench eval --scale {row.scale} --stage {row.stage} --benchmark {row.benchmarks[0]} {how}"
    readers = "marsbench decode --model FOLDER --prompt-ids PROMPTS.jsonl --out ANSWERS.jsonl"
    readers += f" --adapter ADAPTER {how}" if row.is_adapted else f" {how}"
    if row.draft:
        own, readers = f'{own} --draft "$(marsbench train {row.draft} --scale {row.scale})"', f"{readers} --draft DRAFT"
    return [own, readers]


def _cells(rows: Sequence[SweepRow | None]) -> list[dict[str, Any] | None]:
    """One batch size: each contender's numbers, and its tokens per second over those of each; None = no numbers."""
    laps = [row.lap_speeds if row else [] for row in rows]
    return [
        {**_numbers(row), "over": [_ratio(own, others) for others in laps]} if row else None
        for row, own in zip(rows, laps, strict=True)
    ]


def _numbers(row: SweepRow) -> dict[str, Any]:
    percent = row.accuracy.times(100)
    accuracy = {"accuracy": round(percent.value, 1), "plusMinus": round(percent.interval.half_width, 1)}
    counts = {"prompts": row.prompts, "laps": len(row.seconds)}
    return {"perForward": round(row.tokens_per_forward, 2), **accuracy, **counts}


def _ratio(laps: Sequence[float], others: Sequence[float]) -> float | None:
    """The value of `speed_ratio`, which draws a thousand samples for an interval at every call, to two decimals."""
    same = laps and len(laps) == len(others)
    return round(median(one / other for one, other in zip(laps, others, strict=True)), 2) if same else None


# ---- the answers ----


def _questions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every question with its answers, in the order of the rows; of an answer given twice, the last."""
    found: dict[str, dict[str, GenerationRow]] = {}
    for row in rows:
        if isinstance(row, GenerationRow):
            found.setdefault(row.question, {})[row.arm] = row
    return [
        {"question": question, "answers": [_answer(line.label, answers.get(line.name)) for line in PLAN.lines]}
        for question, answers in found.items()
    ]


def _answer(label: str, row: GenerationRow | None) -> dict[str, Any]:
    if row is None or row.status != "done":
        return {"label": label, "why": why_none(row)}
    kept = {"texts": row.texts, "settledBy": row.settled_by, "forwards": row.forwards}
    return {"label": label, **kept, "cut": row.finish != "eos"}
