"""The embedded world: deterministic, split cleanly, and its own answers score."""

import random
from itertools import islice

import pytest

from marsbench import world
from marsbench.evaluation.answers import mini_questions
from marsbench.evaluation.benchmarks import benchmark
from marsbench.evaluation.harness import Exam, LoggedAnswer, Scored, evaluate, prepare
from marsbench.world import USUAL
from marsbench.world.difficulty import DIFFICULTIES, HARD, Difficulty
from marsbench.world.ifeval import followed
from marsbench.world.language import is_test, say

MINI = list(world.GENERATORS)
SIZE = 400
LEVELS = pytest.mark.parametrize("level", DIFFICULTIES.values(), ids=list(DIFFICULTIES))


@pytest.mark.parametrize("name", MINI)
def test_worlds_differ_in_level_and_wording(name: str) -> None:
    """Guards against a difficulty that a generator ignores, and a single wording, whose tokens are predictable."""
    usual, hard = (list(islice(world.draw(name, "train", 1, level), 300)) for level in (USUAL, HARD))
    if name == "mini_mmlu_pro":  # its answers are as long, but name more countries
        few, many = (len({example.content.split()[1] for example in examples}) for examples in (usual, hard))
        assert many > 1.2 * few
    else:
        assert sum(len(example.response) for example in hard) > 1.15 * sum(len(example.response) for example in usual)
    for text in ("response", "prompt"):
        assert len({getattr(example, text).split()[0] for example in usual}) > 1 or name == "mini_humaneval"


@LEVELS
@pytest.mark.parametrize("name", MINI)
def test_no_test_prompt_is_trained_on(name: str, level: Difficulty) -> None:
    """Guards against train and test sharing a problem, where the world tells it from its wording."""
    held_out = world.test_set(name, SIZE, level=level)
    assert len({example.prompt for example in held_out}) == SIZE
    trained = list(islice(world.draw(name, "train", 0, level), 1_000))
    assert not {example.prompt for example in held_out} & {example.prompt for example in trained}
    assert all(is_test(example.content) for example in held_out)
    assert not any(is_test(example.content) for example in trained)


def test_the_corpus_holds_no_test_prompt() -> None:
    """Guards against pretraining on the test questions."""
    held_out = {example.prompt.strip() for name in MINI for example in world.test_set(name, SIZE)}
    for text in islice(world.corpus(3), 2_000):
        lines = text.split("\n")
        assert not held_out & {"\n".join(lines[:count]).strip() for count in range(1, len(lines) + 1)}


def test_say_and_names_and_contents() -> None:
    """Guards against brackets left in a text, instructions any list follows, and harder questions in another column."""
    texts = {say(random.Random(seed), "[A|B]{n}[|!]", n=1) for seed in range(50)}
    assert texts == {"A1", "A1!", "B1", "B1!"}
    rules = {"count": 3, "topic": "animals", "without": "cow", "without_letter": "g", "first": "cat"}
    assert all(followed(rules, "cat, duck, lion").values())
    broken_rules = {"cat, cow, lion": "without", "cat, dog, lion": "without_letter", "duck, cat, lion": "first"}
    for response, broken in broken_rules.items():
        assert [rule for rule, kept in followed(rules, response).items() if not kept] == [broken]
    assert [world.modelled_on(name) for name in ("mini_gsm8k", "hard_gsm8k", "within_gsm8k", "gsm8k")] == ["gsm8k"] * 4


def score(exam: Exam, answers: list[str]) -> Scored:
    """Score prepared answers through the benchmark's own task."""
    return evaluate(exam, {number: LoggedAnswer(number, text) for number, text in enumerate(answers)})


OF_EXAMS = ("mini_gsm8k", "mini_humaneval")  # their `hard` tasks ask questions of level `exam`


def task_of(name: str, level: Difficulty) -> str:
    """The task that asks a benchmark's questions at a level, or that scores its answers."""
    return name if level is USUAL else name.replace("mini", "hard")


@LEVELS
@pytest.mark.parametrize("name", MINI)
def test_reference_answers_score_and_others_do_not(name: str, level: Difficulty) -> None:
    """Guards against a scorer that refuses good answers or takes any, and tasks with other or too few questions."""
    if level is HARD and name in OF_EXAMS:
        pytest.skip("this level is only trained on")
    examples = world.test_set(name, SIZE, level=level)[:24]
    assert len(mini_questions(name, SIZE)["test"]) >= 200
    exam = prepare(benchmark(task_of(name, level))).first(24)
    (task,) = exam.tasks.values()
    prompts = [task.doc_to_text(doc) for doc in task.test_docs()]
    assert prompts == [example.prompt for example in world.test_set(name, SIZE, level=level)]
    assert score(exam, [example.response for example in examples]).correct == [1.0] * 24
    assert sum(score(exam, ["I do not know."] * 24).correct) == 0
    swapped = [example.response for example in examples[1:] + examples[:1]]
    assert sum(score(exam, swapped).correct) < 16


def test_gsm8k_has_a_second_scorer_that_takes_the_last_number() -> None:
    """Guards against two scorers that are the same: they differ where an answer does not end as the prompt wants."""
    target = world.test_set("mini_gsm8k", SIZE)[0].doc["target"]
    responses = [f"The answer is {target}.", f"So {target}", f"The answer is {target}. That is 1000 less."]
    exam = prepare(benchmark("mini_gsm8k")).first(1)
    results = [evaluate(exam, {0: LoggedAnswer(0, text)}).scores for text in responses]
    assert [scores["strict"] + scores["flexible"] for scores in results] == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
