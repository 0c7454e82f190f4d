"""The paper's Tables 5 and 6, rebuilt from a sweep, beside the paper's own numbers; and the position law.

Of the law: what it predicts, what its choices lose, and where more load stops paying.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from marsbench.findings.in_words import signed_number, with_interval
from marsbench.findings.sweep import SweepCells, faster, over, printed_speed_up, speed_of, speed_up
from marsbench.paper import published
from marsbench.racing.grid import called
from marsbench.racing.position_law import PositionLaw, Work, fastest
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import StepTimeRow, SweepRow
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.studies.lines import BATCH_SIZES

PAPERS_SCALE = "7b"  # of its Tables 5 and 6


def table5(sweep: SweepCells) -> dict[str, str]:
    """What was measured, and what was published; both empty where nothing was measured."""
    cached = {int(row.options["cache_block"]): row.contender for row in sweep.rows if row.method == "mars-block-cache"}
    if not cached:
        return {"table5": "", "published5": ""}
    without = next((row.contender for row in sweep.rows if row.method == "mars-no-cache"), "")
    names = [without, *[cached[block] for block in sorted(cached)]]
    lines, accuracies = [], list[str]()
    for size in sweep.batch_sizes:
        cells = [sweep.done.get((name, size)) for name in names]
        lines.append([str(size), *[printed_speed_up(row) if row else "not run" for row in cells]])
        lines.append(["positions/forward", *[f"{row.positions_per_forward:.0f}" if row else "" for row in cells]])
        accuracies = [f"{100 * row.accuracy.value:.1f}" if row else "" for row in cells]
    lines.append(["accuracy in %", *accuracies])  # of the largest batch
    papers = {size: {**published5(size, "mars-no-cache"), **published5(size)} for size in BATCH_SIZES}
    shown = [[str(size), *[f"{speed:g}" for speed in speeds.values()]] for size, speeds in papers.items()]
    return {
        "table5": table(_by_block(sorted(cached)), lines),
        "published5": table(_by_block([block for block in papers[BATCH_SIZES[0]] if block]), shown),
    }


def _by_block(blocks: Iterable[int]) -> list[str]:
    """The heads of its columns."""
    return ["batch", "no cache", *[f"B_cache {block}" for block in blocks]]


def published5(batch_size: int, method: str = "mars-block-cache", scale: str = PAPERS_SCALE) -> dict[int, float]:
    """B_cache, 0 for none, -> the paper's speed-up."""
    name = method.replace("-", "_")
    rows = published("5", scale=scale, method=name, batch_size=batch_size, metric="speedup")
    return {row.cache_block or 0: row.value for row in rows}


AR_SFT = "ar, AR SFT"  # `ar` on the checkpoint that MARS goes on from


class Pairing(NamedTuple):
    """A line of Table 6: a target by a draft."""

    words: str
    draft: str  # the paper's name of it
    target: str

    def row(self, sweep: SweepCells, batch_size: int, *, compiled: bool = False) -> SweepRow | None:
        name = f"speculative, {self.words}"
        return sweep.done.get((called(name, compiled), batch_size))

    def published(self, scale: str = PAPERS_SCALE) -> dict[str, float]:
        """Metric -> the paper's number."""
        rows = published("6", scale=scale, draft=self.draft, target=self.target)
        return {row.metric: row.value for row in rows}


AR_BY_AR = Pairing("AR SFT by AR SFT", "ar_sft_0.5b", "ar_sft_7b")
MARS_BY_AR = Pairing("MARS by AR SFT", "ar_sft_0.5b", "mars_7b_b4")
MARS_BY_MARS = Pairing("MARS by MARS", "mars_0.5b_b4", "mars_7b_b4")
TABLE6 = (AR_BY_AR, MARS_BY_AR, MARS_BY_MARS)


def table6(sweep: SweepCells) -> dict[str, str]:
    """The same of Table 6, with a table per batch size, eager and compiled."""
    parts = []
    for size in sweep.batch_sizes:
        for compiled in (False, True):
            known = [(line, row) for line in TABLE6 if (row := line.row(sweep, size, compiled=compiled))]
            if known:
                lines = [_table6_line(sweep, line, row, known[0][1]) for line, row in known]
                head = ["", "tokens/target forward", "ms/round", f"tokens/s {over(compiled)}"]
                head += ["over AR SFT by AR SFT", "points gained [95 %]"]
                parts += [f"Batch size {size}{', compiled' if compiled else ''}:", table(head, lines)]
    return {"table6": paragraphs(*parts), "published6": _published6() if parts else ""}


def _table6_line(sweep: SweepCells, line: Pairing, row: SweepRow, first: SweepRow) -> list[str]:
    gained = sweep.gain(row, sweep.done.get((AR_SFT, row.batch_size)))
    return [
        line.words,
        f"{row.tokens_per_forward:.2f}",
        f"{row.ms_per_forward:.2f}",
        printed_speed_up(row),
        f"{row.tokens_per_second / first.tokens_per_second:.2f}",
        with_interval(gained, 1, signed=True) if gained else "",
    ]


def _published6() -> str:
    head = ["", "tokens/target forward", "ms/round (derived)", "tokens/s", "over AR SFT by AR SFT", "points gained"]
    lines = []
    for line in TABLE6:
        found = line.published()
        tokens, speed = found["tokens_per_target_forward"], found["tokens_per_second"]
        numbers = [f"{tokens:g}", f"{1000 * tokens / speed:.0f}", f"{speed:g}", f"{found['speedup']:g}"]
        lines.append([line.words, *numbers, signed_number(found["accuracy_delta"], 1)])
    return table(head, lines)


# ---- the position law ----


def law_slots(sweep: SweepCells) -> dict[str, str]:
    """What the page says of the law; all of it empty where no steps were timed."""
    factors, losses = ("median_factor", "most_factor"), ("mean_regret", "most_regret", "told_apart", "regrets")
    if (law := sweep.law) is None or sweep.step_times is None:
        return dict.fromkeys(("steps", "chosen", "double", *factors, *losses), "")
    shown = [count for count in law.positions if count & (count - 1) == 0]
    costs = ["ms per step", *[f"{1000 * law.seconds_at(count):.2f}" for count in shown]]
    regrets, double = _regrets(sweep, law), law.positions_at(2.0)
    lost = [each.loss.value for each in regrets]
    told_apart = sum(each.loss.interval.low > 0 for each in regrets)
    numbers = f"{sum(lost) / max(len(lost), 1):.1f}", f"{max(lost, default=0.0):.1f}", str(told_apart), str(len(lost))
    lines = [
        [each.family, str(each.batch_size), each.chosen, each.best, with_interval(each.loss, 1)] for each in regrets
    ]
    return {
        "steps": table(["positions", *map(str, shown)], [costs]),
        "chosen": table(
            ["windows of", "batch", "by the law", "by the races", "regret, % [95 %]"], lines, text=(0, 2, 3)
        ),
        "double": "" if double is None else f"{double:.0f}",
        **dict(zip(factors, _factors(sweep.step_times), strict=True)),
        **dict(zip(losses, numbers, strict=True)),
    }


def _factors(timed: StepTimeRow) -> tuple[str, str]:
    """By what factor the times of shapes with as many positions differ, in the median and at most."""
    found: dict[int, list[float]] = {}
    for rows, window, seconds in zip(timed.rows, timed.window, timed.seconds, strict=True):
        found.setdefault(rows * window, []).append(median(seconds))
    ratios = [max(times) / min(times) for times in found.values() if len(times) > 1]
    return (f"{median(ratios):.2f}", f"{max(ratios):.2f}") if ratios else ("", "")


def families(sweep: SweepCells) -> dict[str, list[str]]:
    """Contenders that differ in their window alone, and all windows and layouts of `mars-verified` together.

    Those with an adapter are families of their own: what they accept is another model's.
    """
    found: dict[str, list[str]] = {}
    for name in sweep.names:
        row = next(row for row in sweep.rows if row.contender == name)
        if row.method == "mars-block-cache":
            found.setdefault("mars-block-cache", []).append(name)
        if row.method == "mars-verified":
            verified = "mars-verified with an adapter" if row.is_adapted else "mars-verified"
            found.setdefault(f"{verified}, {row.options.get('layout', 'groups')}", []).append(name)
            found.setdefault(f"{verified}, either layout", []).append(name)
    return {family: names for family, names in found.items() if len(names) > 1}


class Regret(NamedTuple):
    """What the law's choice among the windows of a family loses at a batch size."""

    family: str
    batch_size: int
    chosen: str
    best: str  # by the races
    loss: Estimate  # % of the best one's speed


def _regrets(sweep: SweepCells, law: PositionLaw) -> list[Regret]:
    found = []
    for family, names in families(sweep).items():
        known = {name: row for name in names if (row := sweep.done.get((name, sweep.batch_sizes[0])))}
        for size in sweep.batch_sizes:
            measured = {name: row for name in known if (row := sweep.done.get((name, size)))}
            if measured:
                chosen = fastest(law, {name: Work.of(known[name]) for name in measured}, size)
                best = max(measured, key=lambda name: speed_of(measured[name]))
                if kept := faster(measured[chosen], measured[best]):
                    limits = Interval(1 - kept.interval.high, 1 - kept.interval.low)
                    loss = Estimate(1 - kept.value, limits, kept.n).times(100)
                    found.append(Regret(family, size, chosen, best, loss))
    return found


def knee_table(sweep: SweepCells) -> str:
    """Up to which batch size the best settings pay."""
    head = ["", "positions/token", *sweep.heads, "pays up to"]
    best = [find(size) for find in (sweep.best_mars, sweep.best_verified) for size in sweep.batch_sizes]
    names = dict.fromkeys(row.contender for row in best if row is not None)
    return table(head, [_knee_line(sweep, name) for name in names])


def _knee_line(sweep: SweepCells, name: str) -> list[str]:
    cells = dict(zip(sweep.batch_sizes, sweep.by_batch(name), strict=True))
    paying = [size for size, row in cells.items() if (ratio := speed_up(row)) and ratio.interval.low > 1]
    first = next(row for row in cells.values() if row is not None)
    work = f"{first.positions / (sum(first.emitted) - first.prompts):.2f}" if first.forwards else "n/a"
    up_to = "never" if not paying else f"batch {max(paying)}{' at least' if max(paying) == max(cells) else ''}"
    return [name, work, *[printed_speed_up(row) for row in cells.values()], up_to]
