"""Reading races: who was raced together at each batch size, and how much faster one was than another."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.rows.kinds import Row, SpeedRow
from marsbench.statistics.intervals import Estimate, median_ratio

Race = dict[str, SpeedRow]  # contender -> its row


def races_of(rows: Sequence[Row], kind: str = "") -> dict[int, Race]:
    """Batch size -> the last race at it whose name begins with `kind`."""
    found: dict[int, Race] = {}
    for row in rows:
        if isinstance(row, SpeedRow) and row.status == "done" and row.race.startswith(kind):
            known = found.setdefault(row.batch_size, {})
            if any(other.race != row.race for other in known.values()):
                known.clear()
            known[row.contender] = row
    return dict(sorted(found.items()))


def speed_ratio(race: Race, name: str, baseline: str) -> Estimate:
    """Tokens per second of one contender over those of another, repeat by repeat."""
    one, other = race[name], race[baseline]
    return median_ratio(
        [seconds * one.emitted for seconds in other.seconds], [seconds * other.emitted for seconds in one.seconds]
    )
