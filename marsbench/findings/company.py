"""What races were timed in company: beside other processes, which take cores, caches and turns away from them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from marsbench.neighbours import BUSY_CORES
from marsbench.rows.kinds import Row, ServingRow, SweepRow, TrainingSpeedRow


def company_of(row: Row) -> float | None:
    """The cores that others used in the median lap; None for rows that nobody timed so, or that do not say.

    The median, as a speed-up is a median over laps too: others in one lap of five hardly move it, and its interval
    shows them; in most laps they are part of the number.
    """
    used = getattr(row, "others_cores", ())  # of the kinds that are timed
    return median(used) if used and row.status == "done" else None


def company_remark(rows: Iterable[Row]) -> str:
    """What was timed beside other work, and how much of that there was; empty where nothing is known of any."""
    found: dict[str, list[float]] = {}
    for row in rows:
        used = company_of(row)
        if used is not None and used > BUSY_CORES:
            found.setdefault(_place(row), []).append(used)
    if not found:
        return ""
    ranges = {place: dict.fromkeys(f"{end(used):.2f}" for end in (min, max)) for place, used in found.items()}
    places = [f"{place}: {' to '.join(cores)} ({len(found[place])})" for place, cores in ranges.items()]
    return (
        "**Timed on a machine that was not idle.** The cores that other processes used, in the median lap, and of how "
        f"many cells: {'; '.join(places)}. These times are the scheduler's, too."
    )


def _place(row: Row) -> str:
    if isinstance(row, ServingRow):
        return row.shape
    if isinstance(row, TrainingSpeedRow):
        return "training"
    return f"batch {row.batch_size}" if isinstance(row, SweepRow) else "forward passes"
