"""A page to explore: races over any baseline, and answers side by side, in one file without a network."""

import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from marsbench.findings.cells import why_none
from marsbench.findings.collection import Collection
from marsbench.findings.sweep import ALLOWED_LOSS, SweepCells, over_prompts, speed_up
from marsbench.line import Line
from marsbench.overview.index import EXPLORE
from marsbench.presets import Preset, preset
from marsbench.rows.kinds import GenerationRow, Row, SweepRow
from marsbench.studies.figure1 import PLAN, is_right
from marsbench.studies.figure1 import questions as asked
from marsbench.world import Example

_RACES = {"speedup": "The page on speed", "real-model": "The page on the real model"}  # studies whose races it shows


def page_of(collections: Sequence[Collection]) -> str:
    """The page as HTML: a pure function of the rows of scales, of each study those of the first training seed."""
    races = [race for each in collections for race in _races(each)]
    first = collections[0]
    questions = _questions(next(iter(first.of(PLAN.key)), []), preset(first.scale))
    template = (Path(__file__).parent / f"{EXPLORE}.html").read_text(encoding="utf-8")
    # Such JSON ends no <script> and opens no comment in it, whatever its texts say.
    data = json.dumps({"races": races, "questions": questions}, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e")
    return template.replace("{{about}}", _about(collections), 1).replace("{{rows}}", data, 1)


def _about(collections: Sequence[Collection]) -> str:
    said = []
    for scale in [preset(each.scale) for each in collections]:
        caveat = scale.caveat.rpartition("**")[2].strip()  # without what it is called above verdicts
        said.append(f"Scale {scale.scale}: {scale.summary}{': ' if caveat else '.'}{caveat}")
    links = {page: each.links[page] for each in collections for page in _RACES if page in each.links}
    # A page's address ends in .md, which a browser shows as it is written; a site like GitHub renders it.
    shown = [f'<a href="{escape(link)}">{_RACES[page]}</a>' for page, link in links.items()]
    return " ".join([*map(escape, said), *([f"In full: {', '.join(shown)} (Markdown)."] if shown else [])])


def _races(collection: Collection) -> list[dict[str, Any]]:
    return [
        {
            "name": f"scale {collection.scale}, {dtype or 'float32'}, {prompts} prompts, training seed {seed}",
            **_race(sweep, preset(collection.scale)),
        }
        for page in _RACES
        for seed, rows in list(collection.rows.get(page, {}).items())[:1]
        for (dtype, prompts), sweep in SweepCells.by_race(rows).items()
        if sweep.done
    ]


def _race(sweep: SweepCells, scale: Preset) -> dict[str, Any]:
    sizes = [size for size in sweep.batch_sizes if sweep.at(size)]
    known = {row.contender: row for size in sizes for row in sweep.at(size)}
    rows = {name: known[name] for name in sweep.names if name in known}
    cells = []
    for size in sizes:
        here = [sweep.done.get((name, size)) for name in rows]
        laps = [row.lap_speeds if row else [] for row in here]
        over = [[_ratio(own, others) for others in laps] for own in laps]
        numbers = [{**_numbers(sweep, row), "over": of} if row else None for row, of in zip(here, over, strict=True)]
        cells.append(numbers)
    return {
        "sizes": sizes,
        "scores": scale.world is not None,  # a real model of this size answers next to none of its prompts right
        "contenders": [
            {  # colour and filter go by the kind: the method, and whether an adapter drafts
                "name": name, "kind": f"{row.method}, adapter" if row.is_adapted else row.method,
                "compiled": row.compiled, "commands": _commands(row),
            }
            for name, row in rows.items()
        ],
        "cells": cells,
    }  # fmt: skip


def _commands(row: SweepRow) -> list[str]:
    """How to decode like it, with a hole for the batch size: the scale's own checkpoint, and one of the reader's."""
    how = f"--batch-size {{size}} {Line.named(row.contender, row.stage, row.method, **row.options).typed}"
    how += f" --dtype {row.dtype}" if row.dtype not in ("", "float32") else ""
    how += " --compile" if row.compiled else " --no-compile"
    own = f"marsbench eval --scale {row.scale} --stage {row.stage} --benchmark {row.benchmarks[0]} {how}"
    readers = "marsbench decode --model FOLDER --prompt-ids PROMPTS.jsonl --out ANSWERS.jsonl"
    readers += f" --adapter ADAPTER {how}" if row.is_adapted else f" {how}"
    if row.draft:
        own, readers = f'{own} --draft "$(marsbench train {row.draft} --scale {row.scale})"', f"{readers} --draft DRAFT"
    return [own, readers]


def _numbers(sweep: SweepCells, row: SweepRow) -> dict[str, Any]:
    """`alike` is its speed over `ar` of its own kind, with its interval; `keeps` whether it loses next to nothing."""
    percent, cost, ar = row.accuracy.times(100), sweep.cost(row), sweep.done.get(("ar", row.batch_size))
    # Over laps, or over prompts where there is one lap alone; of a batch in one lap it is infinite.
    like = (over_prompts(row, ar) if ar and len(row.seconds) == 1 else None) or speed_up(row)
    limits = {"accuracy": percent.value, "low": percent.interval.low, "high": percent.interval.high}
    speeds = (like.value, like.interval.low, like.interval.high) if like else ()
    return {
        "perForward": round(row.tokens_per_forward, 2),
        **{name: round(value, 1) for name, value in limits.items()},
        "keeps": row.is_lossless or (cost is not None and cost.value <= ALLOWED_LOSS),
        "alike": [round(value, 2) for value in speeds if isfinite(value)] or None,
        **{"prompts": row.prompts, "laps": len(row.seconds)},
    }


def _ratio(laps: Sequence[float], others: Sequence[float]) -> float | None:
    """The value of `speed_ratio`, which draws a thousand samples for an interval at every call, to two decimals."""
    same = laps and len(laps) == len(others)
    return round(median(one / other for one, other in zip(laps, others, strict=True)), 2) if same else None


def _questions(rows: Sequence[Row], scale: Preset) -> list[dict[str, Any]]:
    """Every question with its answers, in the order of the rows; of an answer given twice, the last."""
    by_question = defaultdict[str, dict[str, GenerationRow]](dict)
    for row in rows:
        if isinstance(row, GenerationRow):
            by_question[row.question][row.arm] = row
    known = {example.prompt: example for example in asked(scale)}
    return [
        {
            "question": question,
            "reference": known[question].response if question in known else "",
            "answers": [_answer(line.label, answers.get(line.name), known.get(question)) for line in PLAN.lines],
        }
        for question, answers in by_question.items()
    ]


def _answer(label: str, row: GenerationRow | None, example: Example | None) -> dict[str, Any]:
    if row is None or row.status != "done":
        return {"label": label, "why": why_none(row)}
    kept = {"texts": row.texts, "settledBy": row.settled_by, "forwards": row.forwards}
    right = is_right(example, "".join(row.texts)) if example else None
    return {"label": label, **kept, "cut": row.finish != "eos", "right": right}
