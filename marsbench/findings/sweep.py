"""Reads a sweep: its cells by contender and batch size, with their speeds and accuracy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from marsbench.findings.claims import Measured
from marsbench.findings.in_words import machines, with_interval
from marsbench.racing.grid import COMPILED_AR
from marsbench.rows.kinds import Row, SweepRow
from marsbench.statistics.intervals import Estimate, median_ratio, paired_difference, percentiles, resamples

A_A = "ar, again"  # `ar` raced against itself under another name
_SURE = 0.95  # the threshold of the paper's Tables 4 and 5
ALLOWED_LOSS = 1.0  # points of accuracy that a setting may lose against `ar`


@dataclass(frozen=True)
class SweepCells:
    rows: Sequence[SweepRow]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "SweepCells":
        """The sweep among rows, with the last row of each cell; rows with carried acceptance are left out."""
        cells = {row.key: row for row in rows if isinstance(row, SweepRow) and "acceptance" not in row.options}
        return cls(list(cells.values()))

    @classmethod
    def by_race(cls, rows: Sequence[Row]) -> "dict[tuple[str, int], SweepCells]":
        """The sweeps among rows by type of weights and number of prompts: only answers to the same prompts compare.

        In the order of the rows, of each type the one of most prompts first.
        """
        dtypes = list(dict.fromkeys(row.dtype for row in rows if isinstance(row, SweepRow)))
        known = sorted(cls.of(rows).rows, key=lambda row: (dtypes.index(row.dtype), -row.prompts))
        return {race: cls(list(some)) for race, some in groupby(known, key=attrgetter("dtype", "prompts"))}

    @cached_property
    def done(self) -> dict[tuple[str, int], SweepRow]:
        """(contender, batch size) -> its row, as far as it has numbers."""
        return {(row.contender, row.batch_size): row for row in self.rows if row.status == "done"}

    @cached_property
    def eager(self) -> "SweepCells":
        return SweepCells([row for row in self.rows if not row.compiled])

    @property
    def heads(self) -> list[str]:
        return [f"batch {size}" for size in self.batch_sizes]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(row.contender for row in self.rows))

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({row.batch_size for row in self.rows})

    def by_batch(self, name: str) -> list[SweepRow | None]:
        """A contender's row at every batch size, None where it has no numbers."""
        return [self.done.get((name, size)) for size in self.batch_sizes]

    def at(self, batch_size: int, wanted: Callable[[SweepRow], bool] = lambda row: True) -> list[SweepRow]:
        return [row for (_, size), row in self.done.items() if size == batch_size and wanted(row)]

    def speed_up(self, name: str, batch_size: int, baseline: str | None = None) -> Estimate | None:
        return speed_up(self.done.get((name, batch_size)), baseline)

    def ratio(self, batch_size: int, name: str, baseline: str) -> Estimate | None:
        """Tokens per second of a contender over those of another; None where one of them has no numbers."""
        row, other = self.done.get((name, batch_size)), self.done.get((baseline, batch_size))
        return speed_ratio(row, other) if row and other else None

    def cost(self, row: SweepRow | None) -> Estimate | None:
        """What accuracy a contender loses against `ar`, in points; positive where it loses."""
        return gain(self.done.get(("ar", row.batch_size)), row) if row else None

    def sure_mars(self, batch_size: int) -> SweepRow | None:
        """`mars` at the paper's threshold, in its faster form, whatever accuracy it loses."""
        alike = self.at(batch_size, lambda row: row.method == "mars" and row.options.get("threshold") == _SURE)
        return max(alike, key=speed_of, default=None)

    def best_verified(self, batch_size: int, *, adapted: bool = False) -> SweepRow | None:
        """The fastest layout and window of `mars-verified`, of MARS or of an adapter, eager or compiled."""
        alike = self.at(batch_size, lambda row: (row.method, row.is_adapted) == ("mars-verified", adapted))
        return max(alike, key=speed_of, default=None)

    def over_ar_alike(self, row: SweepRow | None) -> Estimate | None:
        """Tokens per second of a contender over those of `ar` at its batch size, like over like.

        Where both forms of its steps were raced, eager and compiled, its faster form over the faster form of `ar`; what
        has one form alone over `ar` in that form. Of several other forms, the first of the grid counts.
        """
        ar = self.done.get(("ar", row.batch_size)) if row else None
        if ar is None or row is None:
            return None
        faster_forms = [max([each, *self.other_forms(each)[:1]], key=speed_of) for each in (row, ar)]
        return speed_ratio(*faster_forms) if self.other_forms(row) else speed_up(row)

    def other_forms(self, row: SweepRow) -> list[SweepRow]:
        """A contender with compiled steps in place of eager ones, or the other way, where that was raced."""
        alike = attrgetter("stage", "draft", "method", "options", "dtype")
        return self.at(row.batch_size, lambda other: other.compiled != row.compiled and alike(other) == alike(row))


def on_sweep(measure: Callable[[SweepCells], Estimate | None]) -> Callable[[Sequence[Row]], Measured]:
    """Makes a claim's measurement from a number of a sweep."""

    def measured(rows: Sequence[Row]) -> Measured:
        sweep = SweepCells.of(rows)
        estimate, first = measure(sweep), next(iter(sweep.done.values()), None)
        of_laps = estimate is not None and first is not None and estimate.n == len(first.seconds)
        return Measured(estimate, counts=f"laps of {first.prompts} prompts" if of_laps and first else "")

    return measured


def baseline_of(row: SweepRow) -> str:
    """The baseline of a contender: eager `ar`, or compiled `ar` if its own steps are compiled.

    The baseline of compiled `ar` is eager `ar`.
    """
    return COMPILED_AR if row.compiled and row.contender != COMPILED_AR else "ar"


def speed_up(row: SweepRow | None, baseline: str | None = None) -> Estimate | None:
    """Tokens per second over a baseline, lap by lap; unless named, over `ar` of the row's own kind (`baseline_of`)."""
    if row is None or row.status != "done" or (other := row.baselines.get(baseline or baseline_of(row))) is None:
        return None
    return median_ratio(
        [seconds * sum(row.emitted) for seconds in other["seconds"]],
        [seconds * other["emitted"] for seconds in row.seconds],
    )


def speed_ratio(row: SweepRow, other: SweepRow) -> Estimate | None:
    """Tokens per second of a contender over those of another, lap by lap, both relative to `ar` of their own race."""
    mine, theirs = row.lap_speeds, other.lap_speeds
    return median_ratio(mine, theirs) if mine and len(mine) == len(theirs) else None


def gain(row: SweepRow | None, other: SweepRow | None) -> Estimate | None:
    """What accuracy a contender gains over another one, in points; None where one of them has no numbers."""
    return paired_difference(row.by_benchmark, other.by_benchmark) if row and other else None


def agreement(*sweeps: SweepCells) -> dict[tuple[Any, ...], tuple[Estimate, Estimate]]:
    """What a cell is -> its speed-up in both of two sweeps; without `ar` itself, which is 1 in both."""
    what = attrgetter("grid", "dtype", "prompts", "contender", "batch_size")  # the last two name it within a race
    first, second = ({what(row): speed_up(row) for row in sweep.rows if row.status == "done"} for sweep in sweeps)
    return {cell: (one, two) for cell, one in first.items() if "ar" not in cell and one and (two := second.get(cell))}


def over_prompts(row: SweepRow, other: SweepRow, *, ended: bool = False) -> Estimate | None:
    """Tokens per second of a contender over those of another, of one request at a time, by the clock of one lap.

    The interval is a bootstrap over prompts, not laps. `ended`: of the prompts alone whose answers both end by EOS.
    """
    if row.batch_size != 1 or other.batch_size != 1 or not (row.last_token and other.last_token):
        return None
    counted = np.array(row.finished) * np.array(other.finished) == 1 if ended else np.full(len(row.emitted), True)
    if not (count := int(counted.sum())):
        return None
    drawn = resamples(count)
    both = [(np.array(each.emitted)[counted], np.array(each.last_token)[counted]) for each in (row, other)]
    mine, theirs = ((drawn @ tokens) / (drawn @ seconds) for tokens, seconds in both)
    value, beside = (tokens.sum() / seconds.sum() for tokens, seconds in both)
    return Estimate(float(value / beside), percentiles(mine / theirs), count)


def speed_of(row: SweepRow) -> float:
    """The speed-up over eager `ar`, which every contender of a race has; 0 without one."""
    ratio = speed_up(row, "ar")
    return ratio.value if ratio else 0.0


def races_in_words(rows: Iterable[SweepRow]) -> str:
    known = [row for row in rows if row.status == "done"]
    counts = {
        "prompts": {row.prompts for row in known},
        "tokens at most for each": {row.max_new_tokens for row in known},
        "laps": {len(row.seconds) for row in known},
        "threads": {row.provenance["threads"] for row in known if row.provenance.get("threads")},
    }
    words = {what: what.removesuffix("s") if values == {1} else what for what, values in counts.items() if values}
    said = [f"{' or '.join(map(str, sorted(counts[what])))} {word}" for what, word in words.items()]
    return f"Raced: {', '.join(said)}; {machines(known)}." if said else ""


def printed_ratio(ratio: Estimate | None, without: str = "no baseline") -> str:
    return with_interval(ratio, 2) if ratio else without
