"""A line of the page on where the gain comes from that is worked out: MARS whose tau was chosen on other questions.

The fastest of several settings looks faster, and less costly, on the questions that it was chosen on than on others:
some of what made it win is luck. So the even questions choose for the odd ones and the odd ones for the even ones
(cross-fitting), and every answer that counts comes from a setting that this very question had no say in.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from marsbench.findings.cells import BENCHMARKS, latest_cells
from marsbench.findings.sweep import ALLOWED_LOSS
from marsbench.line import Line
from marsbench.rows.kinds import Row
from marsbench.statistics.intervals import Answers
from marsbench.studies.lines import THRESHOLDS, mars_name

AR_OF_MARS = "ar_of_mars"
CURVE = (AR_OF_MARS, *[mars_name("mars", 4, threshold) for threshold in THRESHOLDS])  # what tau is chosen from
CHOSEN = Line("mars_chosen", "MARS (B = 4, tau chosen on other questions)", "mars", "mars", {"block_size": 4})


def cross_fitted(settings: Sequence[Answers], allowed_loss: float) -> Answers:
    """Answer every question with the fastest setting, among those that lose little on the other half of the questions.

    Settings are of one benchmark; the first is what accuracy is lost against, in percentage points.

    Raises:
        ValueError: if there are fewer than two questions, or settings with unequally many answers.
    """
    counts = {len(values) for setting in settings for values in (setting.correct, setting.emitted, setting.forwards)}
    if len(counts) != 1 or min(counts) < 2:
        raise ValueError(f"nothing to choose from {len(settings)} settings with {sorted(counts)} answers")
    (n,) = counts
    by_even, by_odd = (fastest_within(settings, allowed_loss, range(first, n, 2)) for first in (0, 1))
    used = [settings[by_even if place % 2 else by_odd] for place in range(n)]
    found = [
        (setting.correct[place], setting.emitted[place], setting.forwards[place]) for place, setting in enumerate(used)
    ]
    return Answers(*map(list, zip(*found, strict=True)))


def fastest_within(settings: Sequence[Answers], allowed_loss: float, questions: Sequence[int]) -> int:
    """The place of the setting with most tokens per forward pass among those that lose little on some questions.

    `questions` are their places in the benchmark. The first setting is the reference, which loses nothing, so there
    always is an answer.
    """

    def speed(place: int) -> float:
        emitted, forwards = settings[place].emitted, settings[place].forwards
        return sum(emitted[question] for question in questions) / sum(forwards[question] for question in questions)

    right = [sum(setting.correct[place] for place in questions) for setting in settings]
    allowed = [place for place, count in enumerate(right) if 100 * (right[0] - count) <= allowed_loss * len(questions)]
    return max(allowed, key=speed)


def with_choice(rows: Sequence[Row]) -> list[Row]:
    """The rows, and those of the line whose thresholds were chosen on other questions, as if it had been measured.

    It has a row on the benchmarks of which all lines of `CURVE` answered the same questions.
    """
    cells = latest_cells(rows)
    line: dict[str, Any] = {"arm": CHOSEN.name, "method": CHOSEN.method, "options": CHOSEN.options}
    chosen = []
    for name in BENCHMARKS:
        settings = [row for of in CURVE if (row := cells.get((of, name))) is not None and row.status == "done"]
        counts = {len(row.correct) for row in settings}
        if len(settings) == len(CURVE) and len(counts) == 1 and min(counts) >= 2:
            answers = cross_fitted([row.answers for row in settings], ALLOWED_LOSS)
            chosen.append(replace(settings[0], **line, **vars(answers), others={}, finished=[]))
    return [*rows, *chosen]
