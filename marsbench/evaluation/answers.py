"""What task files call: readers of answers and checkers, stock ones repaired where they err; the world's questions."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from marsbench import world
from marsbench.errors import told_to_user
from marsbench.evaluation.local_data import Unavailable
from marsbench.evaluation.sandbox import Program, Reason, run_programs
from marsbench.world.ifeval import followed

Responses = Iterable[Sequence[str]]  # for every question its responses, as lm-eval's filters get them
Docs = Iterable[Mapping[str, Any]]


def cut_text(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    ends = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


def _each(change: Callable[[str], str]) -> Callable[[Responses, Docs], list[list[str]]]:
    def change_all(responses: Responses, docs: Docs) -> list[list[str]]:
        return [[change(text) for text in texts] for texts in responses]

    return change_all


# ---- BBH ------------------------------------------------------------------------------------------------------------

_ANSWER_IS = re.compile(r"(?<!this )(?<!that )answer is:?\s*(?=(.*))", re.IGNORECASE)  # not "this answer is right"
_STOCK = re.compile("(?<=the answer is )(.*)(?=.)")  # it takes the last character for a full stop
_AROUND = " \t.!?,;:…`*\"'"  # what writers put around an answer
_STOCK_STOPS = ("</s>", "Q", "\n\n")

cut_as_stock_bbh = _each(lambda text: cut_text(text, _STOCK_STOPS))


def last_answer(responses: Responses, docs: Docs) -> list[list[str]]:
    """What follows the last "answer is" on its line; without one, the last line; the right answer if stock reads it."""

    def read(text: str, target: str) -> str:
        if (stock := _STOCK.search(cut_text(text, _STOCK_STOPS))) and stock[0].strip() == target:
            return target
        answers, lines = _ANSWER_IS.findall(text), text.strip().splitlines()
        return str(answers[-1] if answers else lines[-1] if lines else "").strip(_AROUND)

    return [[read(text, doc["target"]) for text in texts] for texts, doc in zip(responses, docs, strict=True)]


# ---- MMLU-Pro -------------------------------------------------------------------------------------------------------

# From the surest rule to the last resort, as MMLU-Pro's authors extract answers.
_CHOICES = (
    re.compile(r"answer is \(?([A-J])\)?"),
    re.compile(r".*[aA]nswer:\s*([A-J])"),
    re.compile(r"\b([A-J])\b(?!.*\b[A-J]\b)", re.DOTALL),
)


@_each
def chosen_letter(text: str) -> str:
    """The option that the response settles on, empty if no rule finds one."""
    return next((match[1] for rule in _CHOICES if (match := rule.search(text))), "")


# ---- GPQA -----------------------------------------------------------------------------------------------------------


def shuffle_choices(dataset: Dataset) -> Dataset:
    """The stock task's choices and target, in an order drawn from the question itself instead of anew in every run."""
    from lm_eval.tasks.gpqa.cot_zeroshot.utils import preprocess

    def shuffled(doc: dict[str, Any]) -> dict[str, Any]:
        right = preprocess(doc["Correct Answer"])
        choices = [preprocess(doc[f"Incorrect Answer {number}"]) for number in (1, 2, 3)] + [right]
        random.Random(_seed(doc["Question"])).shuffle(choices)
        numbered = {f"choice{number}": choice for number, choice in enumerate(choices, 1)}
        return {**numbered, "choices": choices, "answer": f"({'ABCD'[choices.index(right)]})"}

    return dataset.map(shuffled)


def _seed(text: object) -> int:
    return int.from_bytes(hashlib.sha256(str(text).encode()).digest()[:8], "big")


# ---- IFEval ---------------------------------------------------------------------------------------------------------


def check_sentence_model(data_dir: Path | None) -> None:
    """Have NLTK find its English sentence model, beside local data too, for IFEval's checker; `Unavailable` without."""
    import nltk

    if data_dir is not None and str(data_dir / "nltk_data") not in nltk.data.path:
        nltk.data.path.append(str(data_dir / "nltk_data"))
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        what, where = "IFEval's checker needs NLTK's sentence model punkt_tab", ", ".join(nltk.data.path)
        fix = "run: python -m nltk.downloader punkt_tab; or put nltk_data/ into the folder of --data-dir"
        raise Unavailable(what, where=f"looked in {where}", fix=fix) from error


def check_instructions(file: Path, docs: Docs) -> None:
    """Refuse a line of IFEval's file whose instructions the stock checker does not take, before hours of decoding."""
    fix = "compare its instruction_id_list and kwargs, one for each instruction, with the published ones"
    for line, doc in enumerate(docs, 1):
        where = f"{file}, line {line}"
        with told_to_user("IFEval's checker does not take these instructions", Exception, where=where, fix=fix):
            if not len(doc["instruction_id_list"]) == len(doc["kwargs"]) > 0:
                raise ValueError(f"{len(doc['instruction_id_list'])} instructions, {len(doc['kwargs'])} kwargs")
            instructions_followed(doc, ["any answer"])


def instructions_followed(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """The stock checker's verdicts; what it draws at random is drawn from the document's key.

    Keys 1122 and 1129 leave a letter open, which the checker draws, and so may language detection.
    """
    import langdetect
    from lm_eval.tasks.ifeval.utils import process_results

    langdetect.DetectorFactory.seed = 0
    state = random.getstate()
    random.seed(_seed(doc["key"]))
    try:
        verdicts: dict[str, Any] = process_results(doc, results)
    finally:
        random.setstate(state)
    return verdicts


# ---- the world's benchmarks -----------------------------------------------------------------------------------------

_FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)  # a program is a response's first such block, or all of it
_ENDED: dict[tuple[str, str], Reason] = {}  # by response and checks: the verdicts on programs that ran to their end


class Questions(list[dict[str, str]]):
    """What lm-eval asks of a data set, in a list: it walks through all of it, twice a cell, however few it asks."""

    @property
    def features(self) -> dict[str, str]:
        return self[0]


def mini_questions(benchmark: str, size: int, difficulty: str = "usual", **_: Any) -> dict[str, Questions]:
    """The test set of a world's benchmark; `target` is the answer, or a program's verdict, and `checks` is JSON."""
    return {"test": Questions(
        {"prompt": each.prompt, "target": str(each.doc.get("target", "passed")), "checks": json.dumps(dict(each.doc))}
        for each in world.test_set(benchmark, size, level=world.difficulty(difficulty))
    )}  # fmt: skip


def rules_followed(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Whether the response follows every rule of its question."""
    rules = json.loads(doc["checks"])["rules"]
    return {"prompt_level_strict_acc": float(all(followed(rules, results[0]).values()))}


def run_code(responses: Responses, docs: Docs) -> list[list[Reason]]:
    """`passed`, or why not, for every response of every question (an lm-eval filter); all programs in one go.

    What this process has run to its end before, for another line of a table, keeps its verdict; a program that ran out
    of time or was killed, as on a busy machine, gets another chance.
    """
    asked = [[(text, doc["checks"]) for text in answer] for answer, doc in zip(responses, docs, strict=True)]
    fresh = list(dict.fromkeys(pair for pairs in asked for pair in pairs if pair not in _ENDED))
    programs = []
    for text, checks in fresh:
        fenced = _FENCED.search(text)
        programs.append(Program(fenced[1] if fenced else text, **json.loads(checks)))
    reasons = dict(zip(fresh, run_programs(programs), strict=True))
    _ENDED.update({pair: reason for pair, reason in reasons.items() if reason in ("passed", "failed")})
    return [[reasons.get(pair) or _ENDED[pair] for pair in pairs] for pairs in asked]
