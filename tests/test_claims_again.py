"""Numbers of the committed page of claims, worked out again from the committed rows by other means.

Only json, numpy and scipy are used, and nothing of the package that makes the page: a slip in a statistic, in how seeds
are pooled, or in which rows are read would have to be made twice, in two ways, to go unseen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from math import hypot, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import optimize, stats

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "mini"
BENCHMARKS = [f"hard_{name}" for name in ("ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval")]
Z = stats.norm.ppf(0.975)
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"

Row = dict[str, Any]


class Effect(NamedTuple):
    """A value, how far the limits of the pooled answers' interval lie below and above it, and each seed's value."""

    value: float
    below: float
    above: float
    seeds: Sequence[float]

    def limits(self) -> tuple[float, float]:
        """The interval over seeds, as the page describes it: by squares, with Student's t over the seeds."""
        k = len(self.seeds)
        student = stats.t.ppf(0.975, k - 1) * np.std(self.seeds, ddof=1) / sqrt(k) if k > 1 else 0.0
        return self.value - hypot(self.below, student), self.value + hypot(self.above, student)

    def p(self, bound: float) -> float:
        """The level at which the limit towards the bound lies on it."""
        k, side = len(self.seeds), self.below if self.value > bound else self.above
        spread = np.std(self.seeds, ddof=1) / sqrt(k)

        def missing(log_p: float) -> float:
            upper = 1 - 10**log_p / 2
            return float(hypot(stats.norm.ppf(upper) / Z * side, stats.t.ppf(upper, k - 1) * spread)) - abs(
                self.value - bound
            )

        return float(10 ** optimize.brentq(missing, -8, -1e-6))


# ---- the rows -------------------------------------------------------------------------------------------------------


@cache
def rows(page: str) -> list[list[Row]]:
    """The rows of a page, of each seed that has any."""
    folders = [RESULTS, *sorted(RESULTS.glob("seed*"))]
    files = [folder / f"{page}.jsonl" for folder in folders]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def cell(of_seed: list[Row], arm: str, benchmark: str) -> Row:
    found = [row for row in of_seed if row.get("arm") == arm and row.get("benchmark") == benchmark]
    assert found and found[-1]["status"] == "done", (arm, benchmark)
    return found[-1]


def answers(page: str, arm: str, benchmark: str) -> Any:
    """Right or wrong: seeds by questions."""
    return np.array([cell(of_seed, arm, benchmark)["correct"] for of_seed in rows(page)], dtype=float)


def points(page: str, signs: dict[str, int], largest: float = 1.0, benchmarks: Sequence[str] = BENCHMARKS) -> Effect:
    """A sum of lines' accuracies with signs, in points; Bonett and Price's interval on each benchmark."""
    values, below, above, by_seed = [], [], [], []
    for benchmark in benchmarks:
        gains = sum(sign * answers(page, arm, benchmark) for arm, sign in signs.items())
        pooled = gains.mean(axis=0)
        more = np.array([*pooled, largest, -largest])
        half = Z * np.sqrt(more.var()) / sqrt(len(more))
        values.append(pooled.mean())
        below.append(pooled.mean() - max(more.mean() - half, -largest))
        above.append(min(more.mean() + half, largest) - pooled.mean())
        by_seed.append(gains.mean(axis=1))
    return _mean(values, below, above, by_seed, 100)


def tokens(page: str, signs: dict[str, int]) -> Effect:
    """A sum of lines' tokens per forward pass with signs; the delta method on each benchmark."""
    values, half, by_seed = [], [], []
    for benchmark in BENCHMARKS:
        value, errors, seeds = 0.0, 0.0, 0.0
        for arm, sign in signs.items():
            found = [cell(of_seed, arm, benchmark) for of_seed in rows(page)]
            emitted, forwards = (np.array([row[name] for row in found], float) for name in ("emitted", "forwards"))
            ratio = emitted.sum() / forwards.sum()
            value += sign * ratio
            errors = errors + sign * (emitted - ratio * forwards).sum(0) / forwards.sum(0).mean()
            seeds = seeds + sign * emitted.sum(1) / forwards.sum(1)
        values.append(value)
        half.append(Z * np.std(errors, ddof=1) / sqrt(np.size(errors)))
        by_seed.append(seeds)
    return _mean(values, half, half, by_seed, 1)


def _mean(values: list[Any], below: list[Any], above: list[Any], by_seed: list[Any], unit: float) -> Effect:
    """Benchmarks weigh the same; their distances to the limits are added by squares."""
    count = len(values)
    parts = (float(np.linalg.norm(part)) / count for part in (below, above))
    return Effect(
        unit * float(np.mean(values)), *[unit * part for part in parts], (unit * np.mean(by_seed, axis=0)).tolist()
    )


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """The median of paired ratios with its percentile bootstrap."""
    ratios = np.array(numerators) / np.array(denominators)
    generator = np.random.default_rng(0)
    found = stats.bootstrap((ratios,), np.median, confidence_level=0.95, method="percentile", rng=generator)
    return float(np.median(ratios)), float(found.confidence_interval.low), float(found.confidence_interval.high)


def over_ar(method: str, batch_size: int) -> Effect:
    """Tokens per second over `ar`, lap by lap; laps of all seeds added up."""
    found = [
        next(
            row
            for row in of_seed
            if row["kind"] == "sweep" and row["method"] == method and row["batch_size"] == batch_size
            and row["status"] == "done" and not row.get("compiled")
        )
        for of_seed in rows("speedup")
    ]  # fmt: skip
    laps = [np.array([row["seconds"], row["baselines"]["ar"]["seconds"]]) for row in found]
    emitted = [(sum(row["emitted"]), row["baselines"]["ar"]["emitted"]) for row in found]

    def ratio(seconds: Any, counts: tuple[int, int]) -> tuple[float, float, float]:
        return median_ratio(seconds[1] * counts[0], seconds[0] * counts[1])

    value, low, high = ratio(sum(laps), (sum(mine for mine, _ in emitted), sum(ar for _, ar in emitted)))
    each = [ratio(seconds, counts)[0] for seconds, counts in zip(laps, emitted, strict=True)]
    return Effect(value, value - low, high - value, each)


def step_cost() -> Effect:
    """Seconds of a MARS step over those of an AR step, batch by batch."""
    timed = [[row for row in of_seed if row["kind"] == "step_cost"] for of_seed in rows("table2")]
    found = [of_seed[-1]["seconds"] for of_seed in timed if of_seed]
    joined = [[value for one in found for value in one[name]] for name in ("mars", "ar")]
    value, low, high = median_ratio(*joined)
    return Effect(value, value - low, high - value, [median_ratio(one["mars"], one["ar"])[0] for one in found])


# ---- the page -------------------------------------------------------------------------------------------------------


@cache
def lines() -> list[dict[str, str]]:
    """The lines of the tables with effects, by their heads."""
    found, head = [], []
    for line in (ROOT / "reports" / "claims.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if {"tested", "scale"} <= {*cells}:
            head = cells
        elif head and len(cells) == len(head) and cells[head.index("scale")] == "mini":
            found.append(dict(zip(head, cells, strict=True)))
    return found


def line_of(tested: str, page: str) -> dict[str, str]:
    (found,) = [line for line in lines() if line["tested"] == tested and line["page"].startswith(f"[{page}]")]
    return found


def agrees(text: str, value: float) -> bool:
    """Whether a printed number is this one, to its last digit."""
    digits = len(text.partition(".")[2])
    return float(text) == float(f"{value:.{digits}f}")


MARS_95, MARS_8_95 = "mars_b4_0.95", "mars_b8_0.95"
AS_RELEASED = "MARS w/o SFT loss, as released"
EFFECTS: dict[tuple[str, str], Callable[[], Effect]] = {
    ("MARS (B = 4) minus AR SFT > 0", "table2"): lambda: points("table2", {"mars": 1, "ar_sft": -1}),
    ("AR SFT minus Block Diffusion (B = 4) > 0", "table2"): lambda: points(
        "table2", {"ar_sft": 1, "block_diffusion": -1}
    ),
    ("tokens/forward of MARS (B = 4, tau = .95) > 1", "table4"): lambda: tokens("table2", {"mars_95": 1}),
    ("tokens/forward: MARS (B = 8, tau = .95) minus MARS (B = 4, tau = .95) > 0", "table4"): lambda: tokens(
        "table4", {MARS_8_95: 1, MARS_95: -1}
    ),
    (
        f"(MARS (B = 16) minus {AS_RELEASED} (B = 16)) minus (MARS (B = 4) minus {AS_RELEASED} (B = 4)) > 0", "table3",
    ): lambda: points(
        "table3",
        {"mars_b16": 1, "mars_no_sft_released_b16": -1, "mars_b4": -1, "mars_no_sft_released_b4": 1},
        largest=2.0,
    ),
    ("tokens/s of MARS without a cache over AR, batch 8 < 1", "speedup"): lambda: over_ar("mars-no-cache", 8),
    ("time of a MARS step over an AR step, from 1.5 to 2.5", "table2"): step_cost,
}  # fmt: skip


@pytest.mark.parametrize("place", EFFECTS, ids=lambda place: place[0][:60])
def test_effects_and_intervals_are_those_of_the_rows(place: tuple[str, str]) -> None:
    """Guards against a wrong effect or interval: of differences, tokens, gains of gains, speeds, costs of steps."""
    line, effect = line_of(*place), EFFECTS[place]()
    value, low, high = re.findall(NUMBER, line["effect [95 % interval]"])[:3]
    assert agrees(value, effect.value), (value, effect)
    for text, limit in zip((low, high), effect.limits(), strict=True):
        assert agrees(text, limit), (text, effect.limits())
    assert line["seeds"] == str(len(effect.seeds))


def test_a_difference_on_one_benchmark_is_that_of_its_rows() -> None:
    """Guards against the mean of all benchmarks in the column of each."""
    text = (ROOT / "reports" / "table2.md").read_text(encoding="utf-8").partition("## By benchmark")[2]
    (line,) = re.findall(r"^\| MARS \(B = 4\) minus AR SFT +\|(.*)\|$", text, re.MULTILINE)[:1]
    for benchmark, printed in zip(BENCHMARKS, line.split("|"), strict=True):
        effect = points("table2", {"mars": 1, "ar_sft": -1}, benchmarks=[benchmark])
        numbers = re.findall(NUMBER, printed)
        assert all(map(agrees, numbers, (effect.value, *effect.limits()))) and len(numbers) == 3, (benchmark, printed)


@pytest.mark.parametrize("bound", [0.0, -2.0])
def test_p_is_that_of_the_interval(bound: float) -> None:
    """Guards against a p of another test than the interval's, and one held against the wrong bound."""
    tested = "> 0" if bound == 0.0 else "> -2 (non-inferiority)"
    line = line_of(f"MARS (B = 4) minus AR SFT {tested}", "table2")
    p = points("table2", {"mars": 1, "ar_sft": -1}).p(0.0 if "significantly worse" in line["verdict"] else bound)
    assert line["p"] == f"{p:.2g}"


def test_p_after_holm_is_that_of_all_claims_tested() -> None:
    """Guards against checks among the tests, a wrong count of them, and a factor that is off by one."""
    tested = [line for line in lines() if line["p"]]
    assert all(not line["verdict"].startswith("check") for line in tested)
    text = (ROOT / "reports" / "claims.md").read_text(encoding="utf-8")
    assert f"{len(tested)} claims were tested" in text
    place = "MARS (B = 4) minus AR SFT > 0", "table2"
    p, line = EFFECTS[place]().p(0.0), line_of(*place)
    printed = sorted(float(one["p"].lstrip("< ")) for one in tested)
    rank = sum(other < float(line["p"]) for other in printed)  # those below have smaller products, or are checked next
    products = [(len(tested) - number) * other for number, other in enumerate(printed[:rank])]
    adjusted = max((len(tested) - rank) * p, *products)
    assert float(line["p after Holm"].lstrip("< ")) == pytest.approx(adjusted, rel=0.05)
    standing = [one for one in tested if one["verdict"] != "inconclusive"
                and float(one["p after Holm"].lstrip("< ")) < 0.05]  # fmt: skip
    assert f"{len(standing)} of these verdicts stand" in text


def test_seeds_that_would_decide_are_the_fewest() -> None:
    """Guards against a number of seeds that would not do, or that more than do."""
    line = line_of("MARS w/o SFT loss (B = 8) minus MARS w/o SFT loss, as released (B = 8) > 0", "table3")
    effect = points("table3", {"mars_no_sft_b8": 1, "mars_no_sft_released_b8": -1})
    said = re.match(r"(\d+) seeds$", line["would decide it"])
    assert said, "choose a claim that more seeds alone would decide"
    side = effect.below if effect.value > 0 else effect.above
    scatter = np.std(effect.seeds, ddof=1)
    halves = {k: hypot(side, stats.t.ppf(0.975, k - 1) * scatter / sqrt(k)) for k in range(3, 51)}
    assert int(said[1]) == next(k for k, half in halves.items() if half < abs(effect.value))


def test_questions_are_those_that_were_asked() -> None:
    """Guards against seeds that pass for more questions."""
    asked = sum(answers("table2", "mars", benchmark).shape[1] for benchmark in BENCHMARKS)
    assert line_of("MARS (B = 4) minus AR SFT > 0", "table2")["n"] == f"{asked:,}"
