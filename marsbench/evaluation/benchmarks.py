"""The benchmark registry: which lm-eval task stands behind a name, and which of its numbers we report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from marsbench.errors import UserError, unknown_name
from marsbench.paths import tasks_dir


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `metric` and `filter` name the lm-eval number that is its accuracy."""

    name: str
    paper_name: str  # its column head in the paper
    summary: str
    metric: str = "exact_match"
    filter: str = "strict-match"


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "mini_ifeval",
            "IFEval",
            "format instructions a program can check",
            "prompt_level_strict_acc",
            "none",
        ),
        Benchmark("mini_bbh", "BBH", "three small reasoning puzzles, step by step"),
        Benchmark("mini_mmlu_pro", "MMLU-Pro", "invented facts, ten options"),
        Benchmark("mini_gpqa", "GPQA", "two-hop questions with arithmetic, four options"),
        Benchmark("mini_gsm8k", "GSM8K", "word problems of two or three steps"),
        Benchmark("mini_humaneval", "HumanEval", "small Python functions, run in the sandbox", filter="run"),
        Benchmark("gsm8k", "GSM8K", "the real GSM8K test set, zero-shot chain of thought"),
    )
}


def benchmark(name: str) -> Benchmark:
    """A benchmark by name, or a `UserError` that names those there are."""
    if name not in BENCHMARKS:
        raise unknown_name("benchmark", name, list(BENCHMARKS))
    return BENCHMARKS[name]


def load_task(name: str, data_dir: Path | None = None) -> Any:
    """The lm-eval task of a benchmark.

    A task file with a `stock` key changes one of lm-eval's own tasks; its data comes from the hub, or from `data_dir`
    where that is given. Any other file is a whole lm-eval task.
    """
    from lm_eval.tasks import TaskManager

    benchmark(name)
    file = tasks_dir() / name / f"{name}.yaml"
    if "\nstock:" not in file.read_text(encoding="utf-8"):
        return TaskManager(include_defaults=False).load(str(file))["tasks"][name]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / f"{name}.yaml"
        whole.write_text(
            _stock_task(name, yaml.safe_load(file.read_text(encoding="utf-8")), data_dir), encoding="utf-8"
        )
        return TaskManager(include_defaults=False).load(str(whole))["tasks"][name]


def _stock_task(name: str, ours: dict[str, Any], data_dir: Path | None) -> str:
    """The task file that includes a stock task of lm-eval's and changes it."""
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent / ours["stock"]
    text = yaml.safe_dump({"include": str(stock), "task": name, **ours["changes"]})
    if data_dir is None:
        return text
    files = {split: str(data_dir / file) for split, file in ours["files"].items()}
    text += yaml.safe_dump({"dataset_kwargs": {"files": files, "columns": ours["columns"]}})
    return text + f"custom_dataset: !function {__name__}.local_dataset\n"


def local_dataset(files: dict[str, str], columns: Sequence[str], **_: Any) -> dict[str, Any]:
    """A data set from local JSON Lines files, split by split, each line checked first (called by lm-eval)."""
    from datasets import Dataset

    return {split: Dataset.from_list(read_records(Path(file), columns)) for split, file in files.items()}


def read_records(file: Path, columns: Sequence[str], unique: str = "") -> list[dict[str, Any]]:
    """The objects of a JSON Lines file that has the given columns.

    Raises:
        UserError: no such file, nothing in it, a line that is no object with these columns, or two lines with the same
            value of the column `unique`; with file and line.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            "the data file cannot be read", where=str(file), fix="check --data-dir; see README, 'Local data'"
        ) from error
    records = [_record(line, columns, f"{file}, line {number}") for number, line in enumerate(lines, 1)]
    if not records:
        raise UserError("the data file is empty", where=str(file), fix="fetch it again")
    if unique:
        _refuse_duplicates(records, unique, file)
    return records


def _refuse_duplicates(records: Sequence[Mapping[str, Any]], column: str, file: Path) -> None:
    first_lines: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        first = first_lines.setdefault(str(record[column]), number)
        if first != number:
            raise UserError(
                f"{column} {record[column]} is on line {first} already",
                where=f"{file}, line {number}",
                fix="remove one of the two lines",
            )


def _record(line: bytes, columns: Sequence[str], where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"not a line of JSON in UTF-8: {error}", where=where, fix="mend or remove the line") from error
    missing = [column for column in columns if not isinstance(record, dict) or column not in record]
    if missing:
        raise UserError(f"no column {', '.join(missing)}", where=where, fix=f"every line needs {', '.join(columns)}")
    found: dict[str, Any] = record
    return found
