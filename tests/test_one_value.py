"""One quantity has one value on all pages: where two pages measure the same, they read the same numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path

from marsbench.findings.cells import columns
from marsbench.running.plans import TablePlan
from marsbench.studies import studies

ROOT = Path(__file__).resolve().parent.parent
# Some pages are of trainings of their own, as they say, and no other page may take their rows.
PAGES = [name for name, study in studies().items() if not (study.plan and study.plan.seed)]


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
