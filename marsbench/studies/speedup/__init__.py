"""Speed: how fast, at what accuracy, against what, at which batch size; the paper's Tables 5 and 6 by the clock."""

from __future__ import annotations

from marsbench.presets import Preset
from marsbench.racing.grid import Grid, read_grid, shipped_grid
from marsbench.studies.speedup.claims import TABLE5_SECTION, TABLE6_SECTION, speed_claims
from marsbench.studies.speedup.lines import TABLE5, TABLE6
from marsbench.studies.speedup.measures import decoded_by_the_sweep
from marsbench.studies.speedup.page import draw, sections
from marsbench.studies.study import Item, Study


def _grid(scale: Preset, quick: bool) -> Grid:
    """The grid that comes with the scale."""
    return read_grid(shipped_grid(scale.scale), quick=quick)


STUDY = Study(
    key="speedup",
    name="Speed",
    asks="how fast, at what accuracy, against what, at which batch size?",
    place=4,
    grid=_grid,
    sections=sections,
    figures=draw,
    claims=tuple(speed_claims()),
    remark=decoded_by_the_sweep,
    holds=(
        Item(
            key="table5",
            name="Table 5",
            asks="how fast by the clock is the block-level cache, by batch size?",
            anchor="#table-5-the-block-level-cache",
            section=TABLE5_SECTION,
            plan=TABLE5,
        ),
        Item(
            key="table6",
            name="Table 6",
            asks="does MARS help speculative decoding, as target and as draft?",
            anchor="#table-6-speculative-decoding",
            section=TABLE6_SECTION,
            plan=TABLE6,
        ),
    ),
)
