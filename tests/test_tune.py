"""What `marsbench tune` recommends once it has raced its favourite."""

from __future__ import annotations

import pytest

from marsbench.line import Line
from marsbench.racing.tune import Advice, Setting
from marsbench.statistics.intervals import Estimate, Interval

AR = Setting(Line.raced("ar", "", "ar"), 1.0, 0.0, 1.0)
LINEAR = Setting(
    Line.raced("linear", "", "mars-verified", layout="linear", block_size=5, threshold=0.5),
    tokens_per_forward=2.0, points_lost=0.0, speed_up=1.4,
)  # fmt: skip


@pytest.mark.parametrize("raced", [1.3, 0.9])
def test_nothing_is_recommended_that_raced_slower_than_ar(raced: float) -> None:
    """Guards against advice that the tool has itself just disproved."""
    advice = Advice([LINEAR, AR], LINEAR, Estimate(raced, Interval(raced - 0.1, raced + 0.1), 3))
    said = advice.summary(4, 1.0)
    if raced > 1:
        assert advice.recommended is LINEAR
        assert "--method mars-verified --layout linear --window 5 --threshold 0.5" in said and "raced 1.30" in said
    else:
        assert advice.recommended is AR
        assert "--method ar" in said and "linear was expected to be 1.40 times as fast, and raced 0.90" in said
