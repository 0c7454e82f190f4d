"""The six real benchmarks: lm-eval's own prompts, scorers that take right answers and no others, and clear refusals."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.filters.extraction import RegexFilter
from tools import GOLDEN, Result, invoke
from transformers import AutoModelForCausalLM

from marsbench.answering import Answering
from marsbench.errors import UserError
from marsbench.evaluation import answers, harness, local_data
from marsbench.evaluation.benchmarks import GROUPS, _Plain, benchmark, benchmarks, fingerprint, load_tasks
from marsbench.evaluation.harness import AnswerLog, Exam, LoggedAnswer, Scored, cut_in_words, evaluate, prepare
from marsbench.forward.limits import room_for_prompt
from marsbench.methods import Options, build_method
from marsbench.rows.kinds import EvaluationRow
from marsbench.rows.workspace import RowFile, Workspace
from marsbench.training.checkpoints import Loaded
from marsbench.training.tokenizer import build_tokenizer

LITTLE = Path(__file__).parent / "data"  # a few rows of each benchmark
# Everything, where MARSBENCH_DATA names a folder of whole benchmarks; else the few rows.
DATA = Path(os.environ.get("MARSBENCH_DATA", LITTLE))
TEXTUAL = ("gsm8k", "bbh", "mmlu_pro", "gpqa")  # benchmarks whose answer is in the text


def data_of(name: str) -> Path:
    """Where a benchmark's data lies; GPQA is never copied, so its rows are always the made-up ones."""
    return LITTLE if name == "gpqa" else DATA


@pytest.fixture(scope="module", params=TEXTUAL)
def exam(request: pytest.FixtureRequest) -> Exam:
    return prepare(benchmark(request.param), data_of(request.param))


def targets(exam: Exam) -> dict[int, str]:
    """Question number -> what the task expects."""
    return {
        number: str(task.doc_to_target(doc))
        for name, task in exam.tasks.items()
        for number, doc in zip(exam.numbers[name], task.eval_docs, strict=True)
    }


def scores(exam: Exam, say: Callable[[str], str]) -> dict[str, float]:
    """The share of right answers by each score, if the model answers `say(target)`."""
    responses = {number: LoggedAnswer(number, say(target)) for number, target in targets(exam).items()}
    return {name: sum(values) / len(values) for name, values in evaluate(exam, responses).scores.items()}


STOCK = {
    "gsm8k": "gsm8k/gsm8k-cot.yaml", "bbh": "bbh/cot_fewshot/{}.yaml", "mmlu_pro": "mmlu_pro/mmlu_pro_{}.yaml",
    "ifeval": "ifeval/ifeval.yaml", "humaneval": "humaneval/humaneval_instruct.yaml",
}  # fmt: skip


@pytest.fixture
def code_metric_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """lm-eval's HumanEval task fetches a metric as soon as it is read; its prompts do not need it."""
    import evaluate as metrics

    monkeypatch.setattr(metrics, "load", lambda name: SimpleNamespace(compute=lambda **_: [0.0]))
    yield
    sys.modules.pop("lm_eval.tasks.humaneval.utils", None)


def stock_prompts(name: str, task: str, subtask: str, shots: int, folder: Path) -> list[str]:
    """The prompts of lm-eval's own task on the local data."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    settings = yaml.load(benchmark(name).file.read_text(), _Plain)["metadata"]
    stock = Path(lm_eval.tasks.__file__).parent / STOCK[name].format(subtask)
    files = {split: file.replace("$SUBTASK", subtask) for split, file in settings["files"].items()}
    arguments = {"data_dir": str(DATA), "files": files, "columns": settings["columns"]}
    text = yaml.safe_dump({"include": str(stock), "task": task, "num_fewshot": shots, "dataset_kwargs": arguments})
    file = folder / f"{task}.yaml"
    file.write_text(text + f"custom_dataset: !function {local_data.__name__}.dataset\n")
    return prompts(TaskManager(include_defaults=False).load(str(file))["tasks"][task])


def prompts(task: Any) -> list[str]:
    """The prompts of a task, turn by turn, as a chat template gets them."""

    def chat(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return json.dumps([history, add_generation_prompt])

    task.build_all_requests(apply_chat_template=True, chat_template=chat)
    return [instance.args[0] for instance in task.instances]


@pytest.mark.parametrize("name", GROUPS["real"])
@pytest.mark.usefixtures("code_metric_offline")
def test_prompts_are_those_of_lm_eval(name: str, tmp_path: Path) -> None:
    """Guards against a prompt that differs from lm-eval's in a byte, lm-eval's own token limit, and sampling."""
    shots = 3 if name == "bbh" else 0
    for task_name, task in load_tasks(benchmark(name), data_of(name)).items():
        subtask = task_name.removeprefix(f"{name}_")
        if name in STOCK:
            assert prompts(task) == stock_prompts(name, task_name, subtask, shots, tmp_path), task_name
        assert task.config.generation_kwargs["max_gen_toks"] == 256
        assert task.config.generation_kwargs["do_sample"] is False


GOOD = {
    "a sentence": lambda target: f"Let me think.\n\nSo the answer is {target}.",
    "no full stop": lambda target: f"Let me think step by step. The answer is {target}",
}


@settings(max_examples=100)
@given(
    target=st.sampled_from(["(A)", "yes", "-5", "] ) >", "quick red fox", "No"]),
    before=st.sampled_from(["", "Let me think.\n", "The answer is not plain.\n", "I see.\n\n", "An answer is due. "]),
    end=st.sampled_from(["", *".!?;,:…~)]* "]),
    after=st.sampled_from(["", "\nI am sure that this answer is right.", "\n\nThe answer is 7.", "\nQ: and?", " Bye."]),
)
def test_flexible_reads_what_strict_reads(target: str, before: str, end: str, after: str) -> None:
    """Guards against a BBH headline below its strict score, and answers lost because of a sign after them."""
    texts, docs = [[f"{before}So the answer is {target}{end}{after}"]], [{"target": target}]
    strict = RegexFilter("(?<=the answer is )(.*)(?=.)").apply(answers.cut_as_stock_bbh(texts, docs), docs)
    plain = end not in ("~", ")", "]") and after in ("", "\nI am sure that this answer is right.", "\nQ: and?")
    if strict == [[target]] or plain:
        assert answers.last_answer(texts, docs) == [[target]]


@pytest.mark.parametrize("wording", GOOD)
def test_right_answers_score(wording: str, exam: Exam) -> None:
    """Guards against lm-eval's filters that lose a last digit, a closing bracket, or everything after a Q."""
    first = exam.benchmark.headline
    assert scores(exam, GOOD[wording])[first] == 1.0


def test_wrong_answers_do_not_score_and_strict_is_lm_evals(exam: Exam) -> None:
    """Guards against a scorer that accepts any answer, and repairs that change the published strict score."""
    letters = "ABCDEFGHIJKLMNOPQRS"

    def wrong(target: str) -> str:
        letter = target.strip("()")
        if letter in letters:
            return target.replace(letter, letters[(letters.index(letter) + 1) % 4])
        return f"{target}1" if target[-1].isdigit() else f"not {target}"

    assert set(scores(exam, lambda target: f"So the answer is {wrong(target)}.").values()) == {0.0}
    assert set(scores(exam, lambda target: "").values()) == {0.0}
    if exam.benchmark.name == "bbh":  # stock cuts at "Q", and wants a full stop
        strict = scores(exam, lambda target: f"So the answer is {target}.")["strict"]
        assert strict == pytest.approx(1 - sum("Q" in target for target in targets(exam).values()) / len(targets(exam)))
    if exam.benchmark.name == "gsm8k":
        assert scores(exam, lambda target: f"The answer is {target}.") == {"flexible": 1.0, "strict": 1.0}
        assert scores(exam, lambda target: f"It is {target}.")["strict"] == 0.0


def test_answers_score_alike_every_time() -> None:
    """Guards against points for naming no option, letters drawn at random, and right options that move or never do."""
    exam = prepare(benchmark("mmlu_pro_math"), LITTLE)
    assert set(scores(exam, lambda target: "it cannot be known").values()) == {0.0}
    exam = prepare(benchmark("ifeval"), DATA)
    responses = {number: LoggedAnswer(number, f"Zebra quiz, {number}! " * 3) for number in exam.question_numbers()}
    results = [evaluate(exam, responses).scores for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert all(len(parts) > 0 for parts in results[0]["strict, per instruction"])
    first, again = (load_tasks(benchmark("gpqa"), LITTLE)["gpqa"].eval_docs for _ in range(2))
    assert first["answer"] == again["answer"]
    assert len(set(first["answer"])) > 1
    for doc in first:
        right = doc[f"choice{'ABCD'.index(doc['answer'][1]) + 1}"]
        assert right == doc["Correct Answer"]


def test_limits_take_parts_of_the_whole() -> None:
    """Guards against a limit that takes one subtask only, a small scale's answer limit, and guessed names."""
    exam = prepare(benchmark("bbh"), LITTLE).first(30)
    assert sorted(len(places) for places in exam.places.values()) == [1] * 24 + [2] * 3
    exam = prepare(benchmark("mmlu_pro"), LITTLE)
    rows = [json.loads(line) for line in (LITTLE / "mmlu_pro" / "test.jsonl").read_text().splitlines()]
    assert targets(exam) == {number: row["answer"] for number, row in enumerate(rows)}
    assert benchmarks(["real"]) == ["ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval"]
    assert benchmark("bbh_word_sorting").subtasks == ("word_sorting",)
    for unknown in ("bbh_nothing", "gsm8k_", "mars"):
        with pytest.raises(UserError, match="unknown benchmark"):
            benchmark(unknown)
    assert {benchmark(name).answer_limit(96) for name in (*GROUPS["real"], "bbh_word_sorting")} == {256}
    assert {benchmark(name).answer_limit(96) for name in GROUPS["mini"]} == {96}


def test_where_things_lie_does_not_matter(tmp_path: Path) -> None:
    """Guards against answers no process finds, cells measured again for a moved folder or kept for new questions."""
    assert " at 0x" not in json.dumps(fingerprint(load_tasks(benchmark("mmlu_pro_math"), LITTLE)))
    original = fingerprint(load_tasks(benchmark("gsm8k"), LITTLE))
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    text = (LITTLE / "gsm8k" / "test.jsonl").read_text()
    (folder / "test.jsonl").write_text(text)
    assert fingerprint(load_tasks(benchmark("gsm8k"), tmp_path)) == original
    (tmp_path / "other" / "gsm8k").mkdir(parents=True)
    (tmp_path / "other" / "gsm8k" / "test.jsonl").write_text(text.replace("ducks", "geese"))
    assert fingerprint(load_tasks(benchmark("gsm8k"), tmp_path / "other")) != original


DATA_LINE, ANSWER_LINE = '{"question": "1 + 1?", "answer": "#### 2"}\n', '{"doc_id": 0, "response": "x"}\n'
DAMAGE = {  # questions and responses, and what the refusal says
    "missing column": ('{"question": "1 + 1?"}\n', ANSWER_LINE, "test.jsonl, line 1"),
    "truncated last line": (DATA_LINE + '{"question": "2', ANSWER_LINE, "test.jsonl, line 2"),
    "a number for a text": ('{"question": "1 + 1?", "answer": 2}\n', ANSWER_LINE, "test.jsonl, line 1"),
    "nothing for a text": ('{"question": null, "answer": "2"}\n', ANSWER_LINE, "test.jsonl, line 1"),
    "unknown question": (DATA_LINE, '{"doc_id": 99, "response": "x"}\n', "99"),
    "answered twice": (DATA_LINE, 2 * ANSWER_LINE, "r.jsonl, line 2"),
    "no text": (DATA_LINE, '{"doc_id": 0, "response": 5}\n', "r.jsonl, line 1"),
    "no response": (DATA_LINE, '{"doc_id": 0}\n', "response"),
    "cut short": (DATA_LINE, '{"doc_id": 0, "resp', "r.jsonl, line 1"), "nothing": (DATA_LINE, "", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_questions_and_responses_are_refused(damage: str, tmp_path: Path) -> None:
    """Guards against a traceback, or even a score, where lines are damaged or left out in silence."""
    questions, responses, word = DAMAGE[damage]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(questions)
    (tmp_path / "r.jsonl").write_text(responses)
    done = score("gsm8k", tmp_path / "r.jsonl", "--data-dir", tmp_path, code=2)
    assert word in done.output and "fix:" in done.output


def test_data_that_is_doubled_or_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a question counted twice, a table that fails at a gap, unwanted downloads, older logs not read."""
    monkeypatch.setattr("nltk.data.path", ["/nowhere"])
    with pytest.raises(local_data.Unavailable, match="punkt_tab"):
        answers.check_sentence_model(LITTLE / "gsm8k")
    (tmp_path / "ifeval").mkdir()
    line = (LITTLE / "ifeval" / "train.jsonl").read_text().splitlines()[0] + "\n"
    (tmp_path / "ifeval" / "train.jsonl").write_text(2 * line)
    with pytest.raises(UserError, match="stands in line 1 already"):
        local_data.dataset(str(tmp_path), {"train": "ifeval/train.jsonl"}, {"key": "number"}, id_column="key")
    with pytest.raises(local_data.Unavailable, match="no local copy"):
        prepare(benchmark("gpqa"), tmp_path)
    (tmp_path / "log.jsonl").write_text(json.dumps({"doc_id": 0, "response": "four", "emitted": 2}) + "\n")
    assert AnswerLog(tmp_path / "log.jsonl").answers[0].prompt_cut == 0


KINDS_OF_VALUES = [5, 0.5, True, None, "five", ["five"], [5], {"five": 5}, [], {}, 2**70, [[1], ["a"]]]


@given(st.lists(st.sampled_from(KINDS_OF_VALUES), min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_columns_that_are_not_read_may_hold_anything(values: list[Any]) -> None:
    """Guards against a traceback about a column of mixed types that no task reads."""
    lines = [{"question": "1 + 1?", "answer": "#### 2", "more": value} for value in values]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        questions = local_data.dataset(folder, {"test": "test.jsonl"}, {"question": "text", "answer": "text"})["test"]
    assert questions["answer"] == ["#### 2"] * len(values)


@pytest.mark.parametrize("value", [5, ["five"], {"five": 5}])
def test_settings_of_other_types_are_named(value: Any, tmp_path: Path) -> None:
    """Guards against pyarrow's traceback where instructions give one setting as a text and as a number."""
    lines = [json.dumps({"kwargs": [{"words": each}]}) for each in ("ten", None, value)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError) as raised:
        local_data.dataset(str(tmp_path), {"train": "train.jsonl"}, {"kwargs": "settings"})
    assert raised.value.where.startswith(str(tmp_path / "train.jsonl")) and raised.value.fix


@pytest.mark.parametrize(("names", "settings"), [
    (["foo:bar"], [{}]), (["punctuation:no_comma"], []), ([], []), (["punctuation:no_comma"], [{"num_words": 5}]),
    (["length_constraints:number_words"], [{"num_words": 5, "relation": "about"}]),
    (["language:response_language"], [{"language": "xx"}]),
    (["keywords:forbidden_words"], [{"forbidden_words": ["("]}]), (["startend:end_checker"], [{"end_phrase": 5}]),
])  # fmt: skip
def test_instructions_that_the_checker_does_not_take_are_named(names: Any, settings: Any, tmp_path: Path) -> None:
    """Guards against a traceback of lm-eval's checker after hours of decoding."""
    file = tmp_path / "ifeval" / "train.jsonl"
    first, second, *_ = map(json.loads, (LITTLE / "ifeval" / "train.jsonl").read_text().splitlines())
    second |= {"instruction_id_list": names, "kwargs": settings}
    file.parent.mkdir()
    file.write_text(json.dumps(first) + "\n" + json.dumps(second))
    (tmp_path / "nltk_data").symlink_to(LITTLE / "nltk_data")
    with pytest.raises(UserError, match=r"checker does not take|instruction_id_list: ") as raised:
        prepare(benchmark("ifeval"), tmp_path)
    assert raised.value.where == f"{file}, line 2" and raised.value.fix


def score(name: str, responses: Path, *more: object, code: int = 0) -> Result:
    return invoke("score", "--benchmark", name, "--responses", responses, "--data-dir", LITTLE, *more, code=code)


def write(file: Path, responses: dict[Any, str]) -> Path:
    lines = [json.dumps({"doc_id": name, "response": text}) for name, text in responses.items()]
    file.write_text("".join(line + "\n" for line in lines))
    return file


def test_score_and_compare_print_one_document(tmp_path: Path) -> None:
    """Guards against scores no script can read, comparing different questions, and logs refused without targets."""
    exam = prepare(benchmark("bbh"), LITTLE)
    right = [f"So the answer is {target}." for _, target in sorted(targets(exam).items())]
    by_name = write(tmp_path / "b.jsonl", {"boolean_expressions/0": right[0], "word_sorting/1": right[-1], 3: "none"})
    done = score("bbh", by_name, "--out", tmp_path / "out.jsonl")
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["n"], document["questions"], document["score"]) == (3, 54, "flexible")
    assert document["accuracy"] == pytest.approx(200 / 3)
    assert document["subtasks"]["word_sorting"]["accuracy"] == 100.0
    verdicts = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(verdict["doc_id"], verdict["flexible"]) for verdict in verdicts] == [(0, 1.0), (3, 0.0), (53, 1.0)]
    exam = prepare(benchmark("gsm8k"), LITTLE)
    right = {number: f"The answer is {target}." for number, target in targets(exam).items()}
    first = write(tmp_path / "a.jsonl", dict(reversed(right.items())))
    second = write(tmp_path / "b.jsonl", {number: text for number, text in right.items() if number} | {1: "no idea"})
    done = invoke("compare", first, second, "--benchmark", "gsm8k", "--data-dir", LITTLE)
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["questions"], document["answered_only_in_first"], document["answered_only_in_second"]) == (3, 1, 0)
    flexible = document["scores"]["flexible"]
    assert (flexible["n"], flexible["right_only_in_first"], flexible["right_only_in_second"]) == (3, 1, 0)
    lines = [{"doc_id": 0, "response": "The answer is 18."}, {"doc_id": 1, "response": "It is 3.", "target": ""}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    score("gsm8k", tmp_path / "r.jsonl")


@pytest.mark.parametrize("name", ["gsm8k", *GROUPS["mini"]])
def test_logged_answers_score_as_the_run_did(name: str, tmp_path: Path) -> None:
    """Guards against a log that cannot be scored again, or is taken for another benchmark's."""
    log, exam = AnswerLog(tmp_path / "log.jsonl"), prepare(benchmark(name), LITTLE).first(4)
    for number in exam.question_numbers():
        target = targets(exam)[number]
        response = f"The answer is {target}.\nQ: and 5?" if number % 2 else "It is 0."
        log.add(LoggedAnswer(number, response, 12, 7, True, target))
    run = evaluate(exam, log.answers)
    again = json.loads(score(name, tmp_path / "log.jsonl").stdout.splitlines()[-1])
    assert again["accuracy"] == 100 * sum(run.correct) / len(run.correct) == (50.0 if name == "gsm8k" else ANY)


@pytest.mark.parametrize("command", ["score", "compare"])
def test_answers_to_another_benchmark_are_refused(command: str, tmp_path: Path) -> None:
    """Guards against logs of gsm8k scored as mini_gsm8k: an accuracy of 0, where nothing was compared."""
    real, mini = prepare(benchmark("gsm8k"), LITTLE), prepare(benchmark("mini_gsm8k"))
    expected = targets(mini)
    assert expected[1] != targets(real)[1]
    right, log = AnswerLog(tmp_path / "right.jsonl"), AnswerLog(tmp_path / "log.jsonl")
    for answer_log in (right, log):
        answer_log.add(LoggedAnswer(0, "18", 3, 2, True, expected[0]))  # two benchmarks may agree on one question
    log.add(LoggedAnswer(1, "3", 3, 2, True, targets(real)[1]))
    files = {"score": ["--responses", "log.jsonl"], "compare": ["right.jsonl", "log.jsonl"]}[command]
    files = [str(tmp_path / word) if word.endswith("jsonl") else word for word in files]
    done = invoke(command, "--benchmark", "mini_gsm8k", *files, code=2)
    assert f"{tmp_path / 'log.jsonl'}, line 2" in done.output and "here mini_gsm8k expects" in done.output


CONTEXT, LIMIT = 128, 4


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A checkpoint with a short context."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "ar", dtype=torch.float32).eval()
    model.config.max_position_embeddings = CONTEXT
    return Loaded(model, build_tokenizer(512, texts=500), "weights", None)


def ask(loaded: Loaded, log: AnswerLog, limit: int = LIMIT) -> Scored:
    """Two questions of BBH, whose prompts with their three examples are long."""
    exam = prepare(benchmark("bbh"), LITTLE).first(2)
    method = build_method("ar", Options())
    return harness.answer(exam, log, Answering(loaded, method, batch_size=2), limit, lambda *_: None)


def test_prompts_that_lost_their_beginning_are_counted(loaded: Loaded, tmp_path: Path) -> None:
    """Guards against prompts cut without a word, a count that is lost, and a cut at the wrong end."""
    file, room = tmp_path / "log.jsonl", room_for_prompt(loaded.model, LIMIT)
    for limit in (CONTEXT, CONTEXT + 5):
        with pytest.raises(UserError, match="no room for a prompt"):
            ask(loaded, AnswerLog(file), limit)
    cuts = [answer.prompt_cut for answer in ask(loaded, AnswerLog(file)).answers]
    assert room == CONTEXT - LIMIT and min(cuts) > 0
    file.write_text(file.read_text().splitlines(keepends=True)[0])  # interrupted after the first answer
    assert [answer.prompt_cut for answer in ask(loaded, AnswerLog(file)).answers] == cuts
    assert "bbh: 2 of 2 prompts lost their beginnings" in cut_in_words("bbh", cuts, room)


def test_cut_prompts_are_said_in_one_line() -> None:
    """Guards against a vague warning, one where nothing was cut, and a question cut in place of its examples."""
    assert cut_in_words("bbh", [0, 947, 0, 1], 416) == (
        "bbh: 2 of 4 prompts lost their beginnings; the context leaves 416 tokens for a prompt, and the longest has "
        "1,363"
    )
    assert cut_in_words("bbh", [0, 0], 416) == cut_in_words("bbh", [], 416) == ""
    assert harness.without_beginning([1, 2, 3, 4], 3) == ([2, 3, 4], 1)
    assert harness.without_beginning([1, 2, 3], 3) == ([1, 2, 3], 0)


@pytest.fixture
def output(output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with trained checkpoints, in which nothing may be trained any more."""

    def trained(*_: object) -> None:
        raise AssertionError("a checkpoint was trained")

    monkeypatch.setattr("marsbench.training.trainer.train", trained)
    return output


def evaluated(output: Path, *arguments: str) -> Result:
    return invoke("eval", *arguments, "--scale", "micro", "--limit", "3", "--output", output)


def rows_in(output: Path) -> list[EvaluationRow]:
    rows = RowFile(Workspace(output, "micro").row_file).rows().values()
    return [row for row in rows if isinstance(row, EvaluationRow)]


OPTIONS_OF_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("mars-verified --layout linear --window 5 --threshold 0.5", {"block_size": 5, "layout": "linear"}),
    ("jacobi --stage ar_sft --window 6", {"block_size": 6}), ("ar", {}),
    ("prompt-lookup --draft-length 2 --ngram 1", {"draft_length": 2, "ngram": 1}),
    ("mars-block-cache --cache-block 8", {"cache_block": 8, "metric": "probability", "head_top": 64, "accept": "one"}),
]  # fmt: skip


def test_a_line_says_the_options_that_its_method_takes(output: Path) -> None:
    """Guards against an option that does not reach the method, and a training at B = 5 because of a window."""
    for words, _ in OPTIONS_OF_ROWS:
        evaluated(output, "--benchmark", "mini_gsm8k", "--method", *words.split())
    for row, (_, options) in zip(rows_in(output), OPTIONS_OF_ROWS, strict=True):
        assert row.options.items() >= options.items()
        assert "verified" in row.method or row.options == options


def test_several_benchmarks_as_one_document(output: Path) -> None:
    """Guards against a second benchmark that replaces the first, and numbers that a program cannot read."""
    settings = ["--dtype", "bfloat16", "--batch-size", "2", "--max-new-tokens", "7", "--prefill-positions", "32"]
    done = evaluated(output, "--benchmark", "mini_bbh", "--benchmark", "mini_gsm8k", *settings, "--json")
    results = json.loads(done.stdout)
    assert [result["benchmark"] for result in results] == ["mini_bbh", "mini_gsm8k"]
    for result, row in zip(results, rows_in(output), strict=True):
        assert (result["n"], result["dtype"], result["max_new_tokens"]) == (3, "bfloat16", 7)
        assert (row.dtype, row.max_new_tokens) == ("bfloat16", 7)
        assert result["cut_answers"] == row.finished.count(0)
        assert len(Path(result["answers"]).read_text().splitlines()) == 3, "the answers are where it says"


def test_other_settings_are_other_cells(output: Path) -> None:
    """Guards against answers of one precision or length limit that pass for others, and a row named "mars by ar"."""
    folder = next((output / "runs" / "micro" / "checkpoints").glob("ar_sft-*"))
    for chosen in ([], ["--dtype", "bfloat16"], ["--max-new-tokens", "9"], ["--batch-size", "1"]):
        evaluated(output, "--benchmark", "mini_gsm8k", "--method", "ar", "--checkpoint", str(folder), *chosen)
    assert len({row.key for row in rows_in(output)}) == 4
    assert {row.arm for row in rows_in(output)} == {folder.name}


def test_what_is_cut_is_said(output: Path) -> None:
    """Guards against real answers cut at a small scale's limit, and prompts cut without a word."""
    done = evaluated(output, "--benchmark", "bbh_word_sorting", "--method", "ar", "--data-dir", str(LITTLE))
    (row,) = rows_in(output)
    assert row.max_new_tokens == 256, "the benchmark's limit, not the scale's 32"
    assert len(row.prompt_cut) == len(row.correct) and any(row.prompt_cut)
    assert f"{sum(map(bool, row.prompt_cut))} of {len(row.correct)} prompts" in done.stdout
    done = evaluated(output, "--benchmark", "mini_gsm8k", "--stage", "base", "--method", "ar", "--max-new-tokens", "2")
    assert "3 of 3 answers were cut at 2 tokens" in done.stdout
