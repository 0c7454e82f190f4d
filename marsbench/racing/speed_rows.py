"""What the rows of races and of timed steps say, whatever page they are for."""

from __future__ import annotations

from typing import Any

from marsbench.racing.race import Outcome
from marsbench.racing.step_time import StepTimes
from marsbench.rows.kinds import SpeedRow, StepTimeRow


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


def step_time_row(found: StepTimes, **said: Any) -> StepTimeRow:
    """The row of timed steps; `said` is what they do not know of themselves."""
    return StepTimeRow(
        status="done",
        reason="",
        context=found.context,
        rows=[shape.rows for shape in found.shapes],
        window=[shape.window for shape in found.shapes],
        seconds=found.seconds,
        copied_per_second=found.copied_per_second,
        others_cores=found.others_cores,
        **said,
    )
