"""CONTRIBUTING's paths, followed by a newcomer in a copy of the package: the files that it names, and no others.

Two of the five stand elsewhere: a page in `test_studies.py::test_a_study_is_one_module`, a scale in
`test_scales.py::test_a_scale_is_one_file`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marsbench import world

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
Run = Callable[..., list[str]]

METHOD = '''
"""Drafts that stutter: the last token, again and again."""

from __future__ import annotations

from dataclasses import dataclass

from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.verification import room_for_drafts, verify
from marsbench.decoding.windows import linear_window
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Stutter(Method):
    """The last token `times` times, verified."""

    name = "stutter"

    times: int = 2

    def most(self) -> Most:
        return Most(pending=1, drafted=self.times, behind=self.times)

    def propose(self, rows: Rows) -> Window:
        return linear_window(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        accepted = verify(rows, answer)
        rows.drafts = accepted.ids.gather(1, (accepted.advance - 1).unsqueeze(1)).repeat(1, self.times)
        rows.drafted = room_for_drafts(rows, accepted).clamp(max=self.times)
        return accepted
'''
OPTION = """    times: Annotated[int, Option("How often the last token is drafted.", least=1)] = 2

"""
ENTRY = """    "stutter": MethodInfo("stutter:Stutter", "drafts what was said", "`ar`", ("times",), lossless=True),
"""

GENERATOR = '''
"""mini_parity: whether a number is odd or even."""

from __future__ import annotations

import random

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say


def sample(rng: random.Random, level: Difficulty) -> Example:
    """Draw one number."""
    number = rng.randint(0, 10 ** (4 if level.name == "usual" else 6))
    target = ("even", "odd")[number % 2]
    prompt = say(rng, "[Is|Say whether] {n} [is |]even or odd?", n=number)
    return Example(prompt, f"So the answer is {target}.", f"parity {number}", {"target": target})
'''
TASK = r"""
# The embedded world's stand-in for nothing yet.
include: ../mini_common.yaml
task: mini_parity
custom_dataset: !function marsbench.evaluation.answers.mini_questions
dataset_kwargs: {benchmark: mini_parity, size: 400}
filter_list:
  - name: strict-match
    filter:
      - function: regex
        regex_pattern: 'So the answer is (\w+)\.'
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
  paper_name: Parity
  summary: numbers, odd or even
  scores:
    strict: [exact_match, strict-match]
"""
BENCHMARK = """    "mini_parity": parity.sample,
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout of the package and its task files, which may be changed."""
    for name in ("marsbench", "tasks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def run(copy: Path) -> Run:
    """Types commands one after the other in the copy, in one process; what each of them prints."""

    def running(*commands: list[str]) -> list[str]:
        where: dict[str, Any] = {"cwd": copy, "env": os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "200"}}
        program = [sys.executable, "-c", TYPING, *map(json.dumps, commands)]
        done = subprocess.run(program, capture_output=True, text=True, check=False, **where)
        assert done.returncode == 0, done.stdout + done.stderr
        return [str(one) for one in json.loads(done.stdout.splitlines()[-1])]

    return running


# What is typed: a command of ours, a program of Python, or an expression about the world.
TYPING = """
import contextlib, io, json, sys
from typer.testing import CliRunner
from marsbench import world
from marsbench.cli import app
said = []
for name, *given in map(json.loads, sys.argv[1:]):
    if name == "marsbench":
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, (given, done.output, done.exception)
        said.append(done.stdout)
    elif name == "python":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(given[0], {})
        said.append(printed.getvalue())
    else:
        said.append(eval(name))
print(json.dumps(said))
"""


def insert(file: Path, before: str, text: str) -> None:
    """Put text before the one place where other text stands."""
    whole = file.read_text(encoding="utf-8")
    assert whole.count(before) == 1
    file.write_text(whole.replace(before, text + before), encoding="utf-8")


@pytest.mark.slow
def test_a_method_is_two_files(copy: Path, run: Run) -> None:
    """Guards against a method that has to be made known in a third place, before it decodes, is listed and tested."""
    (copy / "marsbench" / "methods" / "stutter.py").write_text(METHOD.lstrip(), encoding="utf-8")
    registry = copy / "marsbench" / "methods" / "__init__.py"
    insert(registry, "    @property\n    def window", OPTION)
    insert(registry, '    "hf-generate": MethodInfo(', ENTRY)

    prompts = json.loads((GOLDEN / "golden.json").read_text())["prompts"][:4]
    (copy / "in.jsonl").write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    (copy / "grid.yaml").write_text(
        "batch_sizes: [1]\nprompts: 6\nrepeats: 1\ncontenders:\n- {name: ar, method: ar, stage: mars}\n"
        "- {method: stutter, stage: mars, times: [1, 2]}\n"
    )
    decode = ["marsbench", "decode", "--model", str(GOLDEN / "ar"), "--prompt-ids", "in.jsonl", "--eos-id", "2"]
    listed, *helps, _, _, planned = run(
        ["marsbench", "list", "methods"],
        *(["marsbench", command, "--help"] for command in ("decode", "eval", "show", "distill")),
        [*decode, "--method", "ar", "--out", "ar"],
        [*decode, "--method", "stutter", "--times", "3", "--out", "stutter"],
        ["marsbench", "plan", "--sweep", "--grid", "grid.yaml", "--scale", "micro"],
    )
    assert "stutter" in listed and "stutter, times = 2" in planned
    assert all("--times" in said and "How often the last token is drafted." in " ".join(said.split()) for said in helps)
    plain, ours = ([json.loads(line) for line in (copy / name).read_text().splitlines()] for name in ("ar", "stutter"))
    assert [row["tokens"] for row in ours] == [row["tokens"] for row in plain]


# What worlds say in training.
STREAMS = """[
    [one.response for one in __import__("itertools").islice(world.conversations(seed, world.difficulty(name)), 300)]
    + list(__import__("itertools").islice(world.corpus(seed, world.difficulty(name)), 300))
    for name in ("usual", "hard", "exam") for seed in (0, 1)
]"""


# Good answers to eight questions, in a file.
ANSWER = """open("right", "w").writelines(
    json.dumps({"doc_id": number, "response": one.response}) + chr(10)
    for number, one in enumerate(world.test_set("mini_parity", 8))
)"""


@pytest.mark.slow
def test_a_mini_benchmark_is_three_files(copy: Path, run: Run, micro_checkpoints: Path) -> None:
    """Guards against a benchmark that has to be made known in a fourth place, or that changes what worlds train on."""
    before = eval(STREAMS, {"world": world})
    (copy / "marsbench" / "world" / "parity.py").write_text(GENERATOR.lstrip(), encoding="utf-8")
    (copy / "tasks" / "mini_parity").mkdir()
    (copy / "tasks" / "mini_parity" / "mini_parity.yaml").write_text(TASK.lstrip(), encoding="utf-8")
    registry = copy / "marsbench" / "world" / "__init__.py"
    insert(registry, '    "mini_humaneval": humaneval.sample', BENCHMARK)
    insert(registry, "from marsbench.world.difficulty import", "from marsbench.world import parity\n")

    responses = "".join(json.dumps({"doc_id": number, "response": "I do not know."}) + "\n" for number in range(8))
    (copy / "wrong").write_text(responses)
    score = ["marsbench", "score", "--benchmark", "mini_parity", "--responses"]
    folder = str(next(micro_checkpoints.glob("ar_sft-*")))
    asked = ["--checkpoint", folder, "--method", "ar", "--limit", "2", "--scale", "micro", "--output", "out"]
    after, listed, _, right, wrong, found = run(
        [f"json.dumps({STREAMS})"],
        ["marsbench", "list", "benchmarks"],
        [ANSWER],
        [*score, "right"],
        [*score, "wrong"],
        ["marsbench", "eval", "--benchmark", "mini_parity", *asked],
    )
    assert json.loads(after) == before
    assert "mini_parity" in listed and "n = 2" in found
    assert [json.loads(said.splitlines()[-1])["accuracy"] for said in (right, wrong)] == [100.0, 0.0]


COUNTER = """    "marsbench:answers_cut": "Answers that their limit has cut.",
"""
COUNTED = """        self.metrics.counted["marsbench:answers_cut"] += ending.finish == "length"
"""
# A client that two answers come to, one of them cut, and what it tells of them.
ANSWERED = """
from types import SimpleNamespace
from marsbench.serving.engine_client import EngineClient
from marsbench.serving.messages import Ending
from marsbench.serving.settings import Settings
client = EngineClient(Settings("", "micro"), print)
for finish in ("eos", "length"):
    client._note_end(SimpleNamespace(job=SimpleNamespace(arrived=0.0)), Ending(finish, 1, 1, None, (1, 1)), 1.0)
print(client.metrics.page().decode())
"""


def test_a_server_metric_is_two_files(copy: Path, run: Run) -> None:
    """Guards against a metric that has to be made known in a third place, before `/metrics` tells it."""
    serving = copy / "marsbench" / "serving"
    insert(serving / "metrics.py", '    "marsbench:forwards": ', COUNTER)
    insert(serving / "engine_client.py", "        self.metrics.whole.observe(now - stream.job.arrived)\n", COUNTED)
    (told,) = run(["python", ANSWERED])
    assert "# HELP marsbench:answers_cut_total Answers that their limit has cut." in told
    assert 'marsbench:answers_cut_total{model_name="micro"} 1.0' in told
