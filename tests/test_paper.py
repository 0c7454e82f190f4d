"""The published numbers: complete, well-formed and consistent with themselves."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import astuple, fields, replace
from math import isclose
from typing import Any

import pytest

from marsbench.errors import UserError
from marsbench.paper import REFERENCE, Published, published

ROWS_PER_TABLE = {"2": 63, "3": 77, "4": 84, "5": 81, "6": 15, "8": 252, "9": 24, "A": 4}
BENCHMARKS = {"ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval"}
METRICS = {
    "accuracy",
    "accuracy_delta",
    "seconds",
    "speedup",
    "tokens_per_forward",
    "tokens_per_second",
    "tokens_per_target_forward",
    "train_h200_hours",
}
# Table 9 states tokens per forward as averages only, so nothing can be averaged again.
AVERAGES_WITHOUT_PARTS = {("9", "ar_sft_5ep", 1.0), ("9", "jacobi", 1.07), ("9", "mars", 1.46)}

RAW_ROWS: list[dict[str, Any]] = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
ALL_ROWS = [row for table in ROWS_PER_TABLE for row in published(table)]


def test_every_published_number_is_there_once() -> None:
    """Guards against lost or doubled lines, and a cell with two values, of which a report would print either."""
    assert Counter(row["table"] for row in RAW_ROWS) == ROWS_PER_TABLE
    assert len(RAW_ROWS) == len(ALL_ROWS) == len({astuple(replace(row, value=0.0)) for row in ALL_ROWS}) == 600


def test_rows_follow_the_schema() -> None:
    """Guards against misspelt fields and words, which a filter would silently not find."""
    for line, row in enumerate(RAW_ROWS, start=1):
        assert row.keys() <= {field.name for field in fields(Published)}, line
        assert row["scale"] in {"0.5b", "7b"}, line
        assert row["metric"] in METRICS, line
        assert row.get("benchmark") in BENCHMARKS | {"average"} or row["table"] == "A", line
        assert row.get("block_size") in {None, 4, 8, 16}, line
        assert row.get("threshold") in {None, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0}, line
        assert 0 <= row["value"] <= (100 if row["metric"] == "accuracy" else 1000), line


def test_averages_are_the_means_of_their_six_benchmarks() -> None:
    """Guards against a mistyped value: it would move the mean away from the printed average."""
    groups: dict[tuple[Any, ...], dict[str | None, float]] = defaultdict(dict)
    for row in ALL_ROWS:
        groups[astuple(replace(row, value=0.0, benchmark=None))][row.benchmark] = row.value
    averaged = {cell: values for cell, values in groups.items() if "average" in values}
    assert len(averaged) == 38
    partless = {(cell[0], cell[2], values["average"]) for cell, values in averaged.items() if len(values) == 1}
    assert partless == AVERAGES_WITHOUT_PARTS
    for cell, values in averaged.items():
        if len(values) > 1:
            mean = sum(values[benchmark] for benchmark in BENCHMARKS) / len(BENCHMARKS)
            rounding = 0.005 if "tokens_per_forward" in cell else 0.05  # two printed decimals, or one
            assert isclose(mean, values["average"], abs_tol=rounding + 1e-9), cell


@pytest.mark.parametrize("benchmark", sorted(BENCHMARKS))
def test_tables_agree_on_the_checkpoint_that_they_share(benchmark: str) -> None:
    """Guards against a value copied wrongly into one of the three tables that print the 0.5B AR SFT model."""
    cells = [
        row.value
        for table in ("2", "3", "9")
        for row in published(table, scale="0.5b", method="ar_sft_5ep", benchmark=benchmark, metric="accuracy")
    ]
    assert len(cells) == 3
    assert len(set(cells)) == 1


def test_filters_narrow_to_the_cell() -> None:
    """Guards against filters that are ignored or combined with `or`."""
    (cell,) = published("2", scale="0.5b", method="base", benchmark="ifeval")
    assert cell == Published("2", "0.5b", "base", "accuracy", 27.8, "ifeval", block_size=None, threshold=1.0)
    assert published("2", scale="0.5b", method="jacobi") == []


def test_unknown_names_are_errors() -> None:
    """Guards against a misspelt table or field that looks like 'the paper has no such number'."""
    with pytest.raises(UserError, match="choose one of: 2, 3, 4"):
        published("7")
    with pytest.raises(TypeError, match="blocksize"):
        published("2", blocksize=4)
