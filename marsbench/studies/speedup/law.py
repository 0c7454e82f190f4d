"""The position law on the page of speed: what it predicts, what its choices lose, and where more load stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from marsbench.findings.in_words import with_interval
from marsbench.findings.sweep import (
    SweepCells,
    best_mars_at,
    best_verified_at,
    faster,
    printed_speed_up,
    speed_of,
    speed_up,
)
from marsbench.racing.position_law import PositionLaw, Work, fastest
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import StepTimeRow
from marsbench.statistics.intervals import Estimate, Interval


def law_slots(sweep: SweepCells) -> dict[str, str]:
    """What the page says of the law; all of it empty where no steps were timed."""
    if (law := sweep.law) is None or sweep.step_times is None:
        return dict.fromkeys(("steps", "spread", "chosen", "regret", "double"), "")
    shown = [count for count in law.positions if count & (count - 1) == 0]
    costs = ["ms per step", *[f"{1000 * law.seconds_at(count):.2f}" for count in shown]]
    regrets, double = _regrets(sweep, law), law.positions_at(2.0)
    return {
        "steps": table(["positions", *map(str, shown)], [costs]),
        "spread": _spread(sweep.step_times),
        "chosen": table(
            ["windows of", "batch", "by the law", "by the races", "regret, % [95 %]"],
            [[one.family, str(one.batch_size), one.chosen, one.best, with_interval(one.loss, 1)] for one in regrets],
            text=(0, 2, 3),
        ),
        "regret": _summary(regrets),
        "double": "" if double is None else f"{double:.0f}",
    }


def _spread(timed: StepTimeRow) -> str:
    found: dict[int, list[float]] = {}
    for rows, window, seconds in zip(timed.rows, timed.window, timed.seconds, strict=True):
        found.setdefault(rows * window, []).append(median(seconds))
    ratios = [max(times) / min(times) for times in found.values() if len(times) > 1]
    if not ratios:
        return ""
    return (
        f"Shapes with as many positions, such as 4 x 16 and 16 x 4, differ by a factor of {median(ratios):.2f} in the "
        f"median and {max(ratios):.2f} at most: that is how far the law is true."
    )


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


def _summary(regrets: Sequence[Regret]) -> str:
    losses = [one.loss.value for one in regrets]
    told_apart = sum(one.loss.interval.low > 0 for one in regrets)
    return (
        f"Mean regret {sum(losses) / max(len(losses), 1):.1f} %, largest {max(losses, default=0.0):.1f} %. In "
        f"{told_apart} of {len(regrets)} lines the interval, over laps, lies above 0: only there can the choice be "
        "told from the fastest."
    )


def knee_table(sweep: SweepCells) -> str:
    """Up to which batch size the best settings pay."""
    head = ["", "positions/token", *[f"batch {size}" for size in sweep.batch_sizes], "pays up to"]
    best = [find(sweep, size) for find in (best_mars_at, best_verified_at) for size in sweep.batch_sizes]
    names = dict.fromkeys(row.contender for row in best if row is not None)
    return table(head, [_knee_line(sweep, name) for name in names])


def _knee_line(sweep: SweepCells, name: str) -> list[str]:
    cells = {size: sweep.done.get((name, size)) for size in sweep.batch_sizes}
    paying = [size for size, row in cells.items() if (ratio := speed_up(row)) and ratio.interval.low > 1]
    first = next(row for row in cells.values() if row is not None)
    work = f"{first.positions / (sum(first.emitted) - first.prompts):.2f}" if first.forwards else "n/a"
    up_to = "never" if not paying else f"batch {max(paying)}{' at least' if max(paying) == max(cells) else ''}"
    return [name, work, *[printed_speed_up(row) for row in cells.values()], up_to]
