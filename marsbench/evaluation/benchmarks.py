"""The benchmark registry: which lm-eval tasks stand behind a name, and which of their numbers we report."""

import hashlib
import json
import re
import string
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import yaml

from marsbench import hub, world
from marsbench.errors import unknown_name
from marsbench.evaluation import local_data
from marsbench.files import tasks_dir
from marsbench.world.difficulty import HARD


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, as its task file says under `metadata`. The first of its `scores` is its accuracy."""

    name: str
    file: Path
    paper_name: str  # its column head in the paper
    summary: str
    scores: Mapping[str, tuple[str, str]]  # what lm-eval computes for every question: a metric, after a filter
    subtasks: tuple[str, ...]  # those that are asked, where several lm-eval tasks make it up
    max_new_tokens: int | None  # of an answer; None = the scale's
    files: Mapping[str, str]  # of a data folder, by split
    id_column: str | None

    @property
    def headline(self) -> str:
        return next(iter(self.scores))

    def answer_limit(self, of_scale: int) -> int:
        """How many new tokens an answer may have, asked at a scale whose own limit is `of_scale`."""
        return of_scale if self.max_new_tokens is None else self.max_new_tokens


class _Plain(yaml.SafeLoader):
    """Reads a task file without importing what it names."""


_Plain.add_constructor("!function", lambda loader, node: str(node.value))


def _file_of(name: str) -> Path:
    return tasks_dir() / name / f"{name}.yaml"


def _benchmark(name: str) -> Benchmark:
    whole = yaml.load(_file_of(name).read_text(encoding="utf-8"), _Plain)
    said, limit = whole["metadata"], whole.get("generation_kwargs", {}).get("max_gen_toks")
    return Benchmark(
        name, _file_of(name), said["paper_name"], said["summary"], said["scores"], tuple(said.get("subtasks", ())),
        limit, said.get("files", {}), said.get("id_column"),
    )  # fmt: skip


def _harder(usual: Benchmark, prefix: str, words: str) -> Benchmark:
    name = usual.name.replace("mini_", prefix)
    return replace(usual, name=name, file=_file_of(name), summary=f"{usual.summary}; {words}")


_MINI = tuple(map(_benchmark, world.GENERATORS))
_HARD = tuple(_harder(each, "hard_", "harder") for each in _MINI if each.name in dict(HARD.taught))
# Where `hard` ones ask one step more than training shows, the same shapes with as many steps as it shows.
_LONG = ("mini_gsm8k", "mini_humaneval")
_WITHIN = tuple(_harder(each, "within_", "harder, no longer than in training") for each in _MINI if each.name in _LONG)
_REAL = tuple(map(_benchmark, ("ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval")))

_GROUPED = {"mini": _MINI, "hard": _HARD, "within": _WITHIN, "real": _REAL}
BENCHMARKS: dict[str, Benchmark] = {each.name: each for some in _GROUPED.values() for each in some}
GROUPS: dict[str, tuple[str, ...]] = {name: tuple(each.name for each in some) for name, some in _GROUPED.items()}


def benchmark(name: str) -> Benchmark:
    """A benchmark, or one subtask of one (`bbh_word_sorting`), by name; a `UserError` names those there are."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    for family in BENCHMARKS.values():
        subtask = name.removeprefix(f"{family.name}_")
        if subtask != name and subtask in family.subtasks:
            return replace(family, name=name, subtasks=(subtask,))
    raise unknown_name("benchmark", name, list(BENCHMARKS))


def benchmarks(names: Iterable[str]) -> list[str]:
    """Benchmarks by name or by group (`mini`, `hard`, `within`, `real`), each once."""
    wanted = [each for name in names for each in GROUPS.get(name, (name,))]
    return [benchmark(name).name for name in dict.fromkeys(wanted)]


def load_tasks(chosen: Benchmark, data_dir: Path | None = None) -> dict[str, Any]:
    """The lm-eval tasks of a benchmark by lm-eval's name; `Unavailable` if data, or what scoring needs, is missing."""
    if chosen.name == "ifeval":  # what scoring needs must be there before hours of decoding
        from marsbench.evaluation.answers import check_instructions, check_sentence_model

        check_sentence_model(data_dir)
    elif chosen.name == "humaneval":
        from marsbench.evaluation.humaneval import load_problems

        load_problems(data_dir)
    family = chosen.file.stem
    parts = {f"{family}_{subtask}": subtask for subtask in chosen.subtasks} or {family: ""}
    tasks = {name: _load(chosen, name, subtask, data_dir) for name, subtask in parts.items()}
    if chosen.name == "ifeval" and data_dir is not None:
        check_instructions(data_dir / local_files(chosen)[0], tasks[family].eval_docs)
    return tasks


def local_files(chosen: Benchmark) -> list[str]:
    """The files below a data folder that a benchmark is read and scored from; none for a mini one."""
    templates = [string.Template(name) for name in chosen.files.values()]
    names = [each.safe_substitute(SUBTASK=subtask) for subtask in chosen.subtasks or ("",) for each in templates]
    if chosen.name == "humaneval":
        from marsbench.evaluation.humaneval import LOCAL_FILE

        names.append(LOCAL_FILE)
    return list(dict.fromkeys(names))  # subtasks may share a file


def _load(chosen: Benchmark, name: str, subtask: str, data_dir: Path | None) -> Any:
    """One lm-eval task; a file that names data files is a template, whose blanks are filled in first."""
    import lm_eval.tasks

    if not chosen.files:  # the world's own, always the same
        return _read_once(chosen.file, name)
    places = {"LM_EVAL": str(Path(lm_eval.tasks.__file__).parent), "SUBTASK": subtask}
    text = string.Template(chosen.file.read_text(encoding="utf-8")).safe_substitute(places)
    if data_dir is not None:
        text += yaml.safe_dump({"dataset_kwargs": {"data_dir": str(data_dir)}})
        text += f"custom_dataset: !function {local_data.__name__}.dataset\n"
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / f"{name}.yaml"
        whole.write_text(text, encoding="utf-8")
        if data_dir is not None:
            return _read_task(whole, name)
        try:
            with hub.from_cache_if_out_of_reach():
                return _read_task(whole, name)
        except Exception as error:  # the hub's libraries raise dozens of kinds
            if not isinstance(error, OSError) and not type(error).__module__.startswith(_OF_THE_HUB):
                raise
            silent = "it cannot be reached" if hub.out_of_reach() else str(error).strip().partition("\n")[0]
            what = f"the data of {chosen.name} cannot be loaded from the hub: {silent}"
            fix = f"check the network{_GATED.get(name, '')}, or give a local copy with --data-dir"
            raise local_data.Unavailable(what, fix=fix) from error


def _read_task(file: Path, name: str) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False).load(str(file))["tasks"][name]


_read_once = cache(_read_task)
# Whose errors mean that there is no network, no such data set, or no leave to read it.
_OF_THE_HUB = ("datasets", "huggingface_hub", "requests", "httpx")
_GATED = {"gpqa": ", accept GPQA's terms at https://huggingface.co/datasets/Idavidrein/gpqa and run `hf auth login`"}


def question_numbers(chosen: Benchmark, tasks: Mapping[str, Any]) -> dict[str, list[int]]:
    """The number of every question of each task: its row in the data, of several files one after the other."""
    column = chosen.id_column
    if column is not None and len(tasks) > 1:
        whole = next(iter(tasks.values()))
        rows = {identity: row for row, identity in enumerate(whole.dataset[whole.config.test_split][column])}
        return {name: [rows[identity] for identity in task.eval_docs[column]] for name, task in tasks.items()}
    numbers = count()
    return {name: list(islice(numbers, len(task.eval_docs))) for name, task in tasks.items()}


_ORIGIN = ("custom_dataset", "dataset_kwargs", "dataset_path", "dataset_name", "metadata")  # where questions come from


def fingerprint(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """What of tasks can change a score: prompts, filters, metrics, versions and a hash of the questions themselves."""
    facts = {}
    for name, task in tasks.items():
        config = {key: value for key, value in task.config.to_dict().items() if key not in _ORIGIN}
        text = json.dumps(config, default=lambda value: type(value).__name__)
        plain: dict[str, Any] = json.loads(re.sub(r" at 0x[0-9a-f]+", "", text))  # where functions lie in this process
        digest = hashlib.sha256()
        for doc in task.eval_docs:
            content = {column: value for column, value in doc.items() if column != local_data.DATA_DIR}
            digest.update(json.dumps(content, sort_keys=True, default=str).encode())
        version = (task.config.metadata or {}).get("version")
        facts[name] = plain | {"version": version, "questions": digest.hexdigest()[:16]}
    return facts
