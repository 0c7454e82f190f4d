"""CONTRIBUTING's paths, followed by a newcomer in one copy of the package: the files that it names, and no others.

A scale stands elsewhere: `test_scales.py::test_a_scale_is_one_file`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marsbench import world

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

METHOD = '''
"""Drafts that stutter: the last token, again and again."""

from dataclasses import dataclass

from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.reading import room_for_drafts, verify
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
OPTION = """    times: int | None = option("How often the last token is drafted.", usual=2, least=1)

"""
ENTRY = """    "stutter": MethodInfo("stutter:Stutter", "drafts the last token", ("times",), lossless=True),
"""

GENERATOR = '''
"""mini_parity: whether a number is odd or even."""

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


COUNTER = """    "marsbench:answers_cut": "Answers that their limit has cut.",
"""
COUNTED = """                self.metrics.counters["marsbench:answers_cut"].inc(ending.finish == "length")
"""
# A client that gets two answers, one of them cut, and prints its metrics.
ANSWERED = """
from types import SimpleNamespace
from prometheus_client import generate_latest
from marsbench.serving.engine_client import EngineClient
from marsbench.serving.messages import Ending, Report, State
from marsbench.serving.messages import Settings
client = EngineClient(Settings("", "micro"), print)
for number, finish in enumerate(("eos", "length")):
    client._streams[number] = SimpleNamespace(job=SimpleNamespace(arrived=0.0), end=print, ending=None)
    client._take(Report(State(), ended=[(number, Ending(finish, 1, 1))]))
print(generate_latest(client.metrics.registry).decode())
"""
PAGE = '''"""Figure 7: a study that a test has written."""

from marsbench.findings.between_lines import more_accurate
from marsbench.findings.claims import Section
from marsbench.rendering.figures import differences_figure
from marsbench.line import Line
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import AR_SFT
from marsbench.studies.study import TablePage

LINES = (Line("base", "Base", "base", "ar"), AR_SFT)
PLAN = TablePlan("7", "What a test asks", LINES, benchmarks=("gsm8k",), figure=True)
STUDY = TablePage(
    plan=PLAN,
    asks="does one module suffice?",
    section=Section("Figure 7", (4, 7)),
    opening="Two lines that a test has made up.",
    claims=(more_accurate(PLAN, "ar_sft", "base", name="helps", text="Fine-tuning helps the test"),),
    figure="accuracy",
    caption="Accuracy of two lines",
    drawing=differences_figure("base", "ar_sft"),
)
'''
# What the worlds' training data says.
STREAMS = """[
    [item.response for item in __import__("itertools").islice(world.conversations(seed, world.difficulty(name)), 300)]
    + list(__import__("itertools").islice(world.corpus(seed, world.difficulty(name)), 300))
    for name in ("usual", "hard", "exam") for seed in (0, 1)
]"""
# Good answers to eight questions, in a file.
ANSWER = """open("right", "w").writelines(
    json.dumps({"doc_id": number, "response": item.response}) + chr(10)
    for number, item in enumerate(world.test_set("mini_parity", 8))
)"""
# Runs commands of ours, Python programs, and expressions about the world.
TYPING = """
import contextlib, io, json, sys
from rich.console import Console
from typer.testing import CliRunner
from marsbench import world
from marsbench.cli import app
Console._environ = {"COLUMNS": "300", "LINES": "50"}
outputs = []
for name, *words in map(json.loads, sys.argv[1:]):
    if name == "marsbench":
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        outputs.append(done.stdout)
    elif name == "python":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(words[0], {})
        outputs.append(printed.getvalue())
    else:
        outputs.append(eval(name))
print(json.dumps(outputs))
"""
MICRO = ["--scale", "micro"]


def insert(file: Path, before: str, text: str) -> None:
    """Put text before the only place where other text stands."""
    content = file.read_text(encoding="utf-8")
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before), encoding="utf-8")


def follow(copy: Path) -> None:
    """What CONTRIBUTING says, for a method, a mini benchmark, a page and a server metric."""
    package = copy / "marsbench"
    (package / "methods" / "stutter.py").write_text(METHOD.lstrip(), encoding="utf-8")
    insert(package / "methods" / "__init__.py", "    quantised: Literal", OPTION)
    insert(package / "methods" / "__init__.py", '    "hf-generate": MethodInfo(', ENTRY)
    (package / "world" / "parity.py").write_text(GENERATOR.lstrip(), encoding="utf-8")
    (copy / "tasks" / "mini_parity").mkdir()
    (copy / "tasks" / "mini_parity" / "mini_parity.yaml").write_text(TASK.lstrip(), encoding="utf-8")
    insert(package / "world" / "__init__.py", '    "mini_humaneval": humaneval.sample', BENCHMARK)
    before = "from marsbench.world.difficulty import"
    insert(package / "world" / "__init__.py", before, "from marsbench.world import parity\n")
    (package / "studies" / "figure7.py").write_text(PAGE)
    serving = package / "serving"
    insert(serving / "metrics.py", '    "marsbench:forwards": ', COUNTER)
    insert(serving / "engine_client.py", "                if ending.failure:", COUNTED)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, micro_checkpoints: Path) -> Path:
    """A checkout of the package and its task files in which all paths were followed, and what its commands read."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("marsbench", "tasks"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("noxfile.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    follow(copy)
    shutil.copytree(micro_checkpoints, copy / "runs" / "micro" / "checkpoints")
    prompts = json.loads((GOLDEN / "golden.json").read_text())["prompts"][:4]
    (copy / "in.jsonl").write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    (copy / "grid.yaml").write_text(
        "batch_sizes: [1]\nprompts: 6\nrepeats: 1\ncontenders:\n- {name: ar, method: ar, stage: mars}\n"
        "- {method: stutter, stage: mars, times: [1, 2]}\n"
    )
    wrong = "".join(json.dumps({"doc_id": number, "response": "I do not know."}) + "\n" for number in range(8))
    (copy / "wrong").write_text(wrong)
    return copy


@pytest.fixture(scope="module")
def outputs(copy: Path) -> dict[str, str]:
    """What the copy's commands print, run one after the other in one process."""
    decode = ["marsbench", "decode", "--model", str(GOLDEN / "ar"), "--prompt-ids", "in.jsonl", "--eos-id", "2"]
    score = ["marsbench", "score", "--benchmark", "mini_parity", "--responses"]
    ar_sft = str(next((copy / "runs" / "micro" / "checkpoints").glob("ar_sft-*")))
    settings = ["--checkpoint", ar_sft, "--method", "ar", "--limit", "2", *MICRO, "--output", "out"]
    commands = {
        "methods": ["marsbench", "list", "methods"],
        **{f"{command} --help": ["marsbench", command, "--help"] for command in ("decode", "eval", "show", "distill")},
        "ar": [*decode, "--method", "ar", "--out", "ar"],
        "stutter": [*decode, "--method", "stutter", "--times", "3", "--out", "stutter"],
        "sweep": ["marsbench", "plan", "--sweep", "--grid", "grid.yaml", *MICRO],
        "streams": [f"json.dumps({STREAMS})"],
        "benchmarks": ["marsbench", "list", "benchmarks"],
        "answer": [ANSWER],
        "right": [*score, "right"],
        "wrong": [*score, "wrong"],
        "eval": ["marsbench", "eval", "--benchmark", "mini_parity", *settings],
        "metrics": ["python", ANSWERED],
        "tables": ["marsbench", "list", "tables"],
        "plan": ["marsbench", "plan", "--table", "figure7", *MICRO],
        "reproduce": ["marsbench", "reproduce", "figure7", "--jobs", "1", *MICRO],
        "report": ["marsbench", "report", *MICRO],
    }
    where: dict[str, Any] = {"cwd": copy, "env": os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}}
    program = [sys.executable, "-c", TYPING, *map(json.dumps, commands.values())]
    done = subprocess.run(program, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
def test_a_method_is_two_files(copy: Path, outputs: dict[str, str]) -> None:
    """Guards against a method that needs a change in a third file before it decodes, is listed and tested."""
    assert "stutter" in outputs["methods"] and "stutter, times = 2" in outputs["sweep"]
    helps = [" ".join(text.split()) for name, text in outputs.items() if "--help" in name]
    assert len(helps) == 4 and all("--times" in text and "last token is drafted." in text for text in helps)
    plain, ours = ([json.loads(line) for line in (copy / name).read_text().splitlines()] for name in ("ar", "stutter"))
    assert [row["tokens"] for row in ours] == [row["tokens"] for row in plain]


@pytest.mark.slow
def test_a_mini_benchmark_is_three_files(outputs: dict[str, str]) -> None:
    """Guards against a benchmark that needs a change in a fourth file, or that changes what worlds train on."""
    assert json.loads(outputs["streams"]) == eval(STREAMS, {"world": world})
    assert "mini_parity" in outputs["benchmarks"] and "n = 2" in outputs["eval"]
    assert [json.loads(outputs[name].splitlines()[-1])["accuracy"] for name in ("right", "wrong")] == [100.0, 0.0]


def test_a_server_metric_is_two_files(outputs: dict[str, str]) -> None:
    """Guards against a metric that needs a change in a third file before `/metrics` shows it."""
    assert "# HELP marsbench:answers_cut_total Answers that their limit has cut." in outputs["metrics"]
    assert 'marsbench:answers_cut_total{model_name="micro"} 1.0' in outputs["metrics"]


def test_a_page_is_one_module(copy: Path, outputs: dict[str, str]) -> None:
    """Guards against a second place to enter a study in, which the next author forgets."""
    listed = subprocess.run([sys.executable, "-m", "nox", "-l"], cwd=copy, capture_output=True, text=True, check=True)
    assert "reproduce -> Reproduce any page by its name" in listed.stdout
    assert "does one module suffice?" in outputs["tables"] and "marsbench reproduce figure7" in outputs["tables"]
    assert "Figure 7 at scale micro: What a test asks" in outputs["plan"]
    assert "figure7.md" in outputs["reproduce"] and "figure7.md" in outputs["report"]
    pages = {name: (copy / "reports" / "micro" / f"{name}.md").read_text() for name in ("figure7", "index")}
    assert "Two lines that a test has made up." in pages["figure7"] and "does one module suffice?" in pages["index"]
    places = [pages["index"].index(f"| {name} ") for name in ("Figure 6", "Figure 7", "Appendix A")]
    assert places == sorted(places)
    assert "[Section 4.7](figure7.md)" in pages["index"] and "Fine-tuning helps the test" in pages["index"]
