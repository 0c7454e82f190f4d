"""Several training seeds put together: rows that stand for all of them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, SweepRow, TrainingRow

BySeed = Mapping[int, Sequence[Row]]  # training seed -> the rows of a page; the seed that the page shows comes first


class SeedRows(dict[int, Sequence[Row]]):
    """Rows by seed, with the findings of all claims of their scale."""

    def __init__(self, rows: BySeed, judged: Sequence[Any]) -> None:
        super().__init__(rows)
        self.judged: Mapping[Hashable, Any] = {finding.claim.measure: finding for finding in judged}  # no two share one


def pooled(seeds: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows that stand for several seeds: accuracies averaged per question, counts and laps' times summed.

    Training steps stand side by side. What not all have measured alike is left out.
    """

    def place(row: Row) -> Hashable:
        return row.kind, *[getattr(row, field) for field in _PLACES[type(row)]]

    by_place = [{place(row): row for row in rows if type(row) in _PLACES} for rows in seeds]
    pooled_rows = list[Row]()
    for each in by_place[0]:
        rows = [row for places in by_place if (row := places.get(each)) is not None and row.status == "done"]
        if len(rows) == len(by_place):
            fields = _TOGETHER.get(type(rows[0]), {})
            with suppress(KeyError, ValueError):  # a name that not all of them have, lists of unequal length
                together = {name: put([vars(row)[name] for row in rows]) for name, put in fields.items()}
                pooled_rows.append(replace(rows[0], **together))
    return pooled_rows


def _sums(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [*map(sum, zip(*lists, strict=True))]


def _means(lists: Sequence[Sequence[Any]]) -> list[float]:
    return [total / len(lists) for total in _sums(lists)]


def _baselines(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_name = {name: [seed[name] for seed in seeds] for name in seeds[0]}
    return {
        name: {"seconds": _sums([seed["seconds"] for seed in known]), "emitted": sum(seed["emitted"] for seed in known)}
        for name, known in by_name.items()
    }


def _joined(seeds: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [value for seed in seeds for value in seed[name]] for name in seeds[0]}


_PLACES: dict[type[Row], tuple[str, ...]] = {  # what the rows of several seeds have in common
    EvaluationRow: ("arm", "benchmark"),
    SweepRow: ("contender", "batch_size"),
    TrainingRow: ("stage", "block_size"),
    StepCostRow: (),
}
_TOGETHER: dict[type[Row], dict[str, Callable[[Any], Any]]] = {
    EvaluationRow: {"correct": _means, "emitted": _sums, "forwards": _sums, "others": lambda seeds: {}},
    SweepRow: {
        **dict.fromkeys(("emitted", "row_forwards", "seconds"), _sums),
        **{"correct": _means, "baselines": _baselines},
    },
    StepCostRow: {"seconds": _joined, "memory": _joined},
}
