"""Rows for other tools: columns that a reader can use as they are."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from stored import page_rows

from marsbench.findings.export import derived, export
from marsbench.findings.sweep import speed_up
from marsbench.rows.kinds import EvaluationRow, SweepRow, TrainingRow

RESULTS = Path(__file__).resolve().parent.parent / "results" / "mini"


def test_a_table_holds_what_the_rows_come_to(tmp_path: Path) -> None:
    """Guards against exports of raw laps alone, from which every reader works out speed-ups of his own."""
    rows = page_rows("speedup")
    table = pd.read_csv(export(rows, tmp_path / "speed.csv"))
    for row, line in zip(rows, table.to_dict("records"), strict=True):
        if not isinstance(row, SweepRow) or row.status != "done":
            assert math.isnan(line["speed_up"])
            continue
        ratio = speed_up(row)
        assert ratio is not None and line["speed_up"] == pytest.approx(ratio.value)
        assert line["speed_up_low"] <= line["speed_up"] <= line["speed_up_high"]
        assert line["accuracy"] == pytest.approx(sum(row.correct) / len(row.correct))
        assert line["tokens_per_second"] == pytest.approx(sum(row.emitted) / sorted(row.seconds)[len(row.seconds) // 2])


def test_every_kind_of_row_has_its_columns_or_none() -> None:
    """Guards against a training that seems to have an accuracy, and a cell without one."""
    for row in page_rows("table9"):
        found = derived(row)
        if isinstance(row, TrainingRow):
            assert found == {}
        if isinstance(row, EvaluationRow):
            assert found["accuracy"] == pytest.approx(sum(row.correct) / len(row.correct))
            assert found["tokens_per_forward"] == pytest.approx(sum(row.emitted) / sum(row.forwards))
