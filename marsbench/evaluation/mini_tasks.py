"""What the task files of the mini benchmarks call: the data, the instruction checker and the code runner."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from marsbench import world
from marsbench.evaluation.sandbox import Program, run_programs
from marsbench.world.ifeval import followed

_FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)


def dataset(benchmark: str, size: int, **_: Any) -> dict[str, Dataset]:
    """The test set of a mini benchmark; the columns beside `prompt` and `target` are JSON."""
    records = [
        {
            "prompt": example.prompt,
            "target": str(example.doc.get("target", "")),
            "checks": json.dumps(dict(example.doc)),
        }
        for example in world.test_set(benchmark, size)
    ]
    return {"test": Dataset.from_list(records)}


def rules_followed(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Whether the response follows every rule of its question."""
    rules = json.loads(doc["checks"])["rules"]
    return {"prompt_level_strict_acc": float(all(followed(rules, results[0]).values()))}


def run_code(responses: Iterable[Sequence[str]], docs: Iterable[Mapping[str, str]]) -> list[list[str]]:
    """`passed`, or why not, for every response of every question (an lm-eval filter); all programs in one go."""
    answers = [list(answer) for answer in responses]
    programs = [
        _program(text, json.loads(doc["checks"])) for answer, doc in zip(answers, docs, strict=True) for text in answer
    ]
    reasons = iter([verdict.reason for verdict in run_programs(programs)])
    return [[next(reasons) for _ in answer] for answer in answers]


def _program(response: str, checks: Mapping[str, Any]) -> Program:
    """The program in a response: its first fenced block, or all of it."""
    fenced = _FENCED.search(response)
    code = fenced[1] if fenced else response
    return Program(code, checks["entry_point"], checks["inputs"], checks["expected"])
