"""Numbers of the committed page of the regime, worked out again from the committed rows by json, numpy and scipy alone.

A slip in a statistic, in how seeds are pooled, or in which rows are read would have to be made twice to go unseen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import hypot, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "reports" / "regime.md"
BENCHMARKS = [f"hard_{name}" for name in ("ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval")]
Z = stats.norm.ppf(0.975)
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
Effect = tuple[float, float, float]  # value, lower and upper limit


def by_seed(wanted: Callable[[dict[str, Any]], bool]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each seed, wherever a page has them, the page of the regime before others."""
    results = ROOT / "results" / "mini"
    for folder in [results, *sorted(results.glob("seed*"))]:
        files = sorted(folder.glob("*.jsonl"), key=lambda file: file.stem != "regime")
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        yield [row for row in rows if row["status"] == "done" and wanted(row)]


def cells(arm: str, field: str) -> Any:
    """Seeds by benchmarks by questions, of the seeds that have them all."""
    found = []
    for rows in by_seed(lambda row: row.get("arm") == arm):
        of_seed = {row["benchmark"]: row[field] for row in reversed(rows)}
        if all(name in of_seed for name in BENCHMARKS):
            found.append([of_seed[name] for name in BENCHMARKS])
    return found


def with_seeds(value: float, below: float, above: float, seeds: Any) -> Effect:
    """The limits over seeds: squares added, Student's t over the seeds."""
    k, spread = len(seeds), 0.0
    if k > 1:
        spread = stats.t.ppf(0.975, k - 1) * np.std(seeds, ddof=1) / sqrt(k)
    return value, value - hypot(below, spread), value + hypot(above, spread)


def points(first: str, second: str | None) -> Effect:
    """One line's accuracy less another's, or less nothing: Bonett and Price on each benchmark, added by squares."""
    a = [np.array(seed, dtype=float) for seed in cells(first, "correct")]
    b = [np.array(seed, dtype=float) for seed in cells(second, "correct")] if second else [0 * seed for seed in a]
    gains = np.array([one - other for one, other in zip(a, b, strict=False)])
    value, below, above = [], [], []
    for pooled in gains.mean(axis=0):
        more = np.array([*pooled, 1.0, -1.0])
        half = Z * np.sqrt(more.var()) / sqrt(len(more))
        value.append(pooled.mean())
        below.append(pooled.mean() - max(more.mean() - half, -1.0))
        above.append(min(more.mean() + half, 1.0) - pooled.mean())
    n, seeds = len(BENCHMARKS), 100 * gains.mean(axis=(1, 2))
    return with_seeds(100 * np.mean(value), 100 * np.hypot.reduce(below) / n, 100 * np.hypot.reduce(above) / n, seeds)


def ratio(parts: Any, wholes: Any) -> tuple[float, float]:
    """A ratio of totals, and half its interval by the delta method."""
    value = parts.sum() / wholes.sum()
    rest = (parts - value * wholes) / wholes.mean()
    return value, Z * rest.std(ddof=1) / sqrt(len(rest))


def tokens(arm: str) -> Effect:
    """Tokens per forward pass, benchmarks weighing the same."""
    emitted, forwards = (np.array(cells(arm, field), dtype=float) for field in ("emitted", "forwards"))
    of_all = [ratio(e, f) for e, f in zip(emitted.sum(axis=0), forwards.sum(axis=0), strict=True)]
    half = np.hypot.reduce([half for _, half in of_all]) / len(of_all)
    seeds = (emitted.sum(axis=2) / forwards.sum(axis=2)).mean(axis=1)
    return with_seeds(np.mean([value for value, _ in of_all]), half, half, seeds)


def text_loss() -> Effect:
    """The loss on held-out text after AR SFT over that of the base."""
    seeds = [
        {row["stage"]: np.array(row["nats"]) for row in rows}
        for rows in by_seed(lambda row: row["kind"] == "text_loss")
    ]
    seeds = [one for one in seeds if one]
    value, half = ratio(sum(one["ar_sft"] for one in seeds), sum(one["base"] for one in seeds))
    return with_seeds(value, half, half, [one["ar_sft"].sum() / one["base"].sum() for one in seeds])


NUMBERS: dict[str, Callable[[], Effect]] = {
    "i": lambda: points("ar_sft", "ar_sft_of_short_base"),
    "ii": lambda: points("ar_sft_2x", "ar_sft"),
    "iii": lambda: points("ar_sft", None),
    "iv": text_loss,
    "v": lambda: tokens("untrained_masks"),
    "vi": lambda: points("ar_sft", "base"),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_the_page_is_found_again(number: str) -> None:
    """Guards against an interval that is not what the page says it is."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    (result,) = [cells[3] for cells in lines if len(cells) == 8 and cells[0] == number]
    said = re.findall(NUMBER, result.split("]")[0])
    for text, value in zip(said, NUMBERS[number](), strict=True):
        digits = len(text.partition(".")[2])
        assert float(text.replace(",", "")) == pytest.approx(value, abs=0.51 * 10**-digits)
