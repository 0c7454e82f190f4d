"""All rows of the engine's page: trainings, exactness, races."""

from __future__ import annotations

from marsbench.rows.kinds import Row
from marsbench.running.run import Run
from marsbench.studies.engine.contenders import EXACT
from marsbench.studies.engine.exactness import exactness
from marsbench.studies.engine.races import race
from marsbench.studies.engine.stand import Stand


def engine_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing."""
    stand = Stand(run)
    trained = stand.trainings()
    exact = [exactness(stand, entry) for entry in EXACT]
    raced = [row for batch_size in stand.effort.batch_sizes for row in race(stand, batch_size)]
    return [*trained, *exact, *raced]
