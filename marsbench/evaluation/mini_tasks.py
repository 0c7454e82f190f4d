"""What the task files of the world's benchmarks call: the data, the instruction checker and the code runner."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from marsbench import world
from marsbench.evaluation.sandbox import Program, Reason, run_programs
from marsbench.world.ifeval import followed

PASSED: Reason = "passed"
_FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
_ENDED: dict[tuple[str, str], Reason] = {}  # by response and checks: the verdicts on programs that ran to their end


def dataset(benchmark: str, size: int, difficulty: str = "usual", **_: Any) -> dict[str, Dataset]:
    """The test set of a world's benchmark; `target` is the answer, or a program's verdict, and `checks` is JSON."""
    records = [
        {
            "prompt": example.prompt,
            "target": str(example.doc.get("target", PASSED)),
            "checks": json.dumps(dict(example.doc)),
        }
        for example in world.test_set(benchmark, size, level=world.difficulty(difficulty))
    ]
    return {"test": Dataset.from_list(records)}


def rules_followed(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Whether the response follows every rule of its question."""
    rules = json.loads(doc["checks"])["rules"]
    return {"prompt_level_strict_acc": float(all(followed(rules, results[0]).values()))}


def run_code(responses: Iterable[Sequence[str]], docs: Iterable[Mapping[str, str]]) -> list[list[Reason]]:
    """`passed`, or why not, for every response of every question (an lm-eval filter); all programs in one go.

    What this process has run to its end before, for another line of a table, keeps its verdict; a program that ran out
    of time or was killed, as on a busy machine, gets another chance.
    """
    asked = [[(text, doc["checks"]) for text in answer] for answer, doc in zip(responses, docs, strict=True)]
    fresh = list(dict.fromkeys(pair for pairs in asked for pair in pairs if pair not in _ENDED))
    verdicts = run_programs([_program(text, json.loads(checks)) for text, checks in fresh])
    found = dict(zip(fresh, verdicts, strict=True))
    _ENDED.update({pair: reason for pair, reason in found.items() if reason in ("passed", "failed")})
    return [[found.get(pair) or _ENDED[pair] for pair in pairs] for pairs in asked]


def _program(response: str, checks: Mapping[str, Any]) -> Program:
    """The program in a response: its first fenced block, or all of it."""
    fenced = _FENCED.search(response)
    code = fenced[1] if fenced else response
    return Program(code, checks["entry_point"], checks["inputs"], checks["expected"])
