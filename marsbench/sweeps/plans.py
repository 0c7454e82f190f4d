"""Which measurements a table is made of.

An *arm* is one line of a table: a trained stage, decoded by a method with its options. Every arm is measured on every
benchmark of the scale; one arm on one benchmark is a cell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from marsbench.errors import unknown_name

ONE_TOKEN: dict[str, Any] = {"accept": "one"}


@dataclass(frozen=True)
class Arm:
    """One line of a table.

    `name` is stable and never shown; `label` is shown. `options` go to the method as they are (`block_size`,
    `threshold`, `accept`, `metric`). `published` is the paper's name for the line, None for lines of our own.
    """

    name: str
    label: str
    stage: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    published: str | None = None
    untrained_masks: bool = False  # decode with masks although the checkpoint has never seen any


@dataclass(frozen=True)
class TablePlan:
    """A table of the paper: its number, its title and its arms in order."""

    number: str
    title: str
    arms: tuple[Arm, ...]

    @property
    def stages(self) -> list[str]:
        """The stages that the arms need, each once, in order."""
        return list(dict.fromkeys(arm.stage for arm in self.arms))


TABLES: dict[str, TablePlan] = {
    "table2": TablePlan(
        "2",
        "Accuracy when one token is generated per forward pass",
        (
            Arm("base", "Base", "base", "ar", {}, "base"),
            Arm("ar_sft", "AR SFT", "ar_sft", "ar", {}, "ar_sft_5ep"),
            Arm("ar_sft_2x", "AR SFT (compute-matched)", "ar_sft_2x", "ar", {}, "ar_sft_10ep"),
            Arm(
                "block_diffusion",
                "Block Diffusion (B = 4)",
                "block_diffusion",
                "block-diffusion",
                {"block_size": 4, **ONE_TOKEN},
                "block_diffusion",
            ),
            Arm(
                "mars_no_sft",
                "MARS w/o SFT loss (B = 4)",
                "mars_no_sft",
                "mars",
                {"block_size": 4, **ONE_TOKEN},
                "mars_no_sft",
            ),
            Arm("mars", "MARS (B = 4)", "mars", "mars", {"block_size": 4, **ONE_TOKEN}, "mars"),
            Arm(
                "untrained_masks",
                "AR SFT, mask decoding (B = 4, tau = .95)",
                "ar_sft",
                "mars",
                {"block_size": 4, "threshold": 0.95},
                untrained_masks=True,
            ),
            Arm(
                "untrained_masks_always",
                "AR SFT, mask decoding (B = 4, tau = 0)",
                "ar_sft",
                "mars",
                {"block_size": 4, "threshold": 0.0},
                untrained_masks=True,
            ),
            Arm("mars_95", "MARS (B = 4, tau = .95)", "mars", "mars", {"block_size": 4, "threshold": 0.95}),
        ),
    ),
}


def table_plan(name: str) -> TablePlan:
    """The plan of a table, or a `UserError` that names the tables there are."""
    if name not in TABLES:
        raise unknown_name("table", name, list(TABLES))
    return TABLES[name]
