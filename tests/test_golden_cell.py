"""The golden cell: today's prompts, answers, scores and losses, held to recorded ones.

To change one of these numbers, add a line to the HISTORY of its kind in `marsbench/keys.py`; only then does
`python tests/test_golden_cell.py CHECKPOINTS` record them again, with a folder of `marsbench train`'s at scale micro.
It takes the questions whose closest decisions are clearest, so that other processors settle on the same tokens.
"""

import json
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, get_args

import pytest
import torch

from marsbench.answering import Answering, fit
from marsbench.decoding.generation import Generation
from marsbench.evaluation.benchmarks import benchmark
from marsbench.evaluation.harness import AnswerLog, Exam, answer, prepare
from marsbench.files import PACKAGE
from marsbench.keys import Work, content_hash, versions
from marsbench.presets import preset
from marsbench.training import records
from marsbench.training.checkpoints import Loaded, load
from marsbench.world import conversations, corpus, difficulty

CELL = Path(__file__).parent / "golden" / "cell.json"
BENCHMARKS, LIMIT = preset("mini").benchmarks, preset("mini").max_new_tokens
QUESTIONS = 8  # of each benchmark
CLOSE = 0.004  # between the logits of the two likeliest tokens; processors differ by some 0.0001


@cache
def base() -> Loaded:
    return load(str(PACKAGE / "presets/bases/mini/base"))


def answers(exam: Exam, method: str = "ar", kind: type[Answering] = Answering) -> dict[str, Any]:
    """The shipped base's answers to an exam: their tokens, hashed, how many, the forwards, and the first score."""
    with TemporaryDirectory() as folder:
        arguments = kind(base(), fit(method, base())), LIMIT, lambda *_: None
        scored = answer(exam, AnswerLog(Path(folder) / "log.jsonl"), *arguments)
    fields = {name: [getattr(logged, name) for logged in scored.answers] for name in ("digest", "emitted", "forwards")}
    return {**fields, "correct": scored.correct}


def questions_hash(name: str, level: str) -> str:
    """A hash of a level's first training and pretraining texts, and of a benchmark's first test questions."""
    questions = prepare(benchmark(name)).tasks[name].eval_docs[:100]
    shown = [islice(conversations(0, difficulty(level)), 100), islice(corpus(0, difficulty(level)), 100)]
    return content_hash([*map(str, questions), *(str(text) for texts in shown for text in texts)])


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(CELL.read_text(encoding="utf-8"))
    return recorded


def test_the_cell_is_of_todays_versions(cell: dict[str, Any]) -> None:
    """Guards against a new line of history for unchanged numbers, which would be measured again for nothing."""
    assert cell["versions"] == versions(*get_args(Work))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_answers_and_scores_are_those_recorded(name: str, cell: dict[str, Any]) -> None:
    """Guards against rows of old code that pass for those of new code: other prompts, tokens, forwards or scores."""
    exam = prepare(benchmark(name)).only(cell[name]["numbers"])
    assert answers(exam) == cell[name]["ar"]
    assert answers(exam, "prompt-lookup") == cell[name]["prompt-lookup"]


@pytest.mark.parametrize("name", [*BENCHMARKS, *preset("micro").benchmarks])
def test_the_world_asks_what_it_asked(name: str, cell: dict[str, Any]) -> None:
    """Guards against other questions under the same name."""
    assert questions_hash(name, "hard" if name in BENCHMARKS else "usual") == cell["world"][name]


@pytest.mark.parametrize("stage", ["base", "ar_sft", "mars", "medusa"])
def test_trainings_lose_what_they_lost(stage: str, cell: dict[str, Any], micro_checkpoints: Path) -> None:
    """Guards against other data, another order or rate, or another loss under an old checkpoint's key."""
    assert losses(stage, micro_checkpoints) == pytest.approx(cell["training"][stage], rel=1e-3)


def losses(stage: str, folder: Path) -> list[float]:
    (trained,) = (each for each in folder.iterdir() if each.name.startswith(f"{stage}-") and records.finished(each))
    record = records.finished(trained)
    assert record is not None
    return record.losses


class Watched(Answering):
    """Notes for each answer how close its closest decision was."""

    margins: ClassVar[list[float]] = []

    @torch.inference_mode()
    def decode(self, requests: Any, **settings: Any) -> list[Generation]:
        generations = super().decode(requests, **settings)
        for request, generation in zip(requests, generations, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *generation.tokens]])
            best = self.loaded.model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 :].topk(2).values
            self.margins.append(float((best[:, 0] - best[:, 1]).min()))
        return generations


def record(micro: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = {"versions": versions(*get_args(Work))}
    for name in BENCHMARKS:
        exam = prepare(benchmark(name)).first(60)
        Watched.margins.clear()
        answers(exam, kind=Watched)
        clear = sorted(zip(Watched.margins, exam.question_numbers(), strict=True))[-QUESTIONS:]
        assert clear[0][0] > CLOSE, clear
        exam = exam.only(number for _, number in clear)
        by_method = {method: answers(exam, method) for method in ("ar", "prompt-lookup")}
        recorded[name] = {"numbers": exam.question_numbers(), **by_method}
    levels = {**dict.fromkeys(BENCHMARKS, "hard"), **dict.fromkeys(preset("micro").benchmarks, "usual")}
    recorded["world"] = {name: questions_hash(name, level) for name, level in levels.items()}
    recorded["training"] = {stage: losses(stage, micro) for stage in ("base", "ar_sft", "mars", "medusa")}
    return recorded


if __name__ == "__main__":
    old, new = json.loads(CELL.read_text(encoding="utf-8")) if CELL.exists() else {}, record(Path(sys.argv[1]))
    if old and old != new and old["versions"] == new["versions"]:
        sys.exit("numbers have changed: add a line to the HISTORY of their kind in marsbench/keys.py first")
    CELL.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
