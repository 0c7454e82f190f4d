"""What a race's row says of a contender, whatever page it is for."""

from __future__ import annotations

from typing import Any

from marsbench.racing.race import Outcome
from marsbench.rows.kinds import SpeedRow


def speed_row(found: Outcome, ar: Outcome, **said: Any) -> SpeedRow:
    """The row of a contender that was raced together with `ar`; `said` is what its outcome does not know."""
    ours, theirs = ([one.tokens for one in outcome.generations] for outcome in (found, ar))
    return SpeedRow(
        status=found.status,
        reason=found.reason,
        seconds=found.seconds,
        others_cores=found.others_cores,
        emitted=found.emitted,
        row_forwards=found.row_forwards,
        forwards=found.meter.forwards,
        positions=found.meter.positions,
        cache_bytes=found.meter.cache_bytes,
        same_as_ar=sum(mine == one for mine, one in zip(ours, theirs, strict=False)),
        **said,
    )
