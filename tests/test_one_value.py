"""One quantity has one value on all pages: where two pages measure the same, they read the same numbers."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path

from marsbench.findings.cells import columns
from marsbench.rows.kinds import EvaluationRow, Row, SweepRow
from marsbench.rows.store import read_rows
from marsbench.running.plans import TablePlan
from marsbench.studies import studies

ROOT = Path(__file__).resolve().parent.parent
# Some pages are of trainings of their own, as they say, and no other page may take their rows.
PAGES = [name for name, study in studies().items() if not (study.plan and study.plan.apart)]


@cache
def _rows() -> list[tuple[str, Row]]:
    """The finished rows behind every page of scale mini, all seeds'."""
    files = [file for name in PAGES for file in sorted((ROOT / "results" / "mini").glob(f"**/{name}.jsonl"))]
    return [(str(file), row) for file in files for row in read_rows(file) if row.status == "done"]


def _same(row: Row) -> Hashable | None:
    """What two rows have in common that measure the same."""
    if isinstance(row, EvaluationRow):
        return (
            row.provenance["seed"], row.stage, row.method, json.dumps(row.options, sort_keys=True), row.benchmark,
            row.dtype,
        )  # fmt: skip
    if isinstance(row, SweepRow) and not row.profile:  # of those, pages show shares of the time alone
        return row.contender, row.batch_size, row.prompts_hash, row.checkpoint
    return None


def _numbers(row: Row) -> object:
    return (row.correct, row.emitted, row.forwards) if isinstance(row, EvaluationRow) else vars(row).get("seconds")


def test_rows_that_measure_the_same_are_the_same() -> None:
    """Guards against a line that was answered, or raced, twice, so that two pages say two numbers of it."""
    found = defaultdict[Hashable, dict[str, str]](dict)
    for file, row in _rows():
        if (what := _same(row)) is not None:
            found[what][file] = json.dumps(_numbers(row))
    shared = {what: values for what, values in found.items() if len(values) > 1}
    assert len(shared) > 100
    assert not [(what, [*values]) for what, values in shared.items() if len({*values.values()}) > 1]


def _first_table(page: Path) -> Iterator[tuple[str, str, str]]:
    """Line, column and what stands there, of a page's first table of tokens per forward pass."""
    is_head = re.compile(r"^\|.*\| *tokens/forward \|")
    begun = dropwhile(lambda line: not is_head.match(line), page.read_text(encoding="utf-8").splitlines())
    lines = takewhile(lambda line: line.startswith("|"), begun)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for label, *cells in table[2:]:
        yield from ((label, head, cell) for head, cell in zip(table[0][1:], cells, strict=False) if cell)


def test_tables_that_pages_begin_with_say_the_same_of_a_line() -> None:
    """Guards against a mean over other seeds, or another rounding, beside the same words on another page."""
    found = defaultdict[tuple[str, ...], dict[str, str]](dict)
    for name in PAGES:
        plan, page = studies()[name].plan, ROOT / "reports" / f"{name}.md"
        if isinstance(plan, TablePlan) and page.exists():
            for label, head, cell in _first_table(page):
                found[(str(plan.within_training), *columns(plan), label, head)][name] = cell
    shared = {what: values for what, values in found.items() if len(values) > 1}
    assert len(shared) > 10
    assert not [(what[-2:], values) for what, values in shared.items() if len({*values.values()}) > 1]


def test_the_first_screen_has_the_speeds_of_the_page_on_speed() -> None:
    """Guards against a first screen that shows a speed of another race."""
    speed = (ROOT / "reports" / "speedup.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (verified,) = [line for line in readme if line.startswith("| Toy: verified MARS")]
    found = re.findall(r"[\d.]+ \[[\d.]+, [\d.]+\]", verified)
    assert len(found) == 4 and all(number in speed for number in found)
