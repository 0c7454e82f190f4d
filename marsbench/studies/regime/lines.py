"""What the page of the regime is made of: AR training from the base in three ways, masks that no training has shown."""

from __future__ import annotations

from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import AR_SFT
from marsbench.studies.table2 import PLAN as TABLE2

_OF_TABLE2 = {arm.name: arm for arm in TABLE2.arms}
OF_SHORT_BASE = Arm("ar_sft_of_short_base", "AR SFT of a base trained 2/3 as long", "ar_sft_of_short_base", "ar")
TWICE, UNTRAINED_MASKS, MARS = (_OF_TABLE2[name] for name in ("ar_sft_2x", "untrained_masks", "mars_95"))
PLAN = TablePlan(
    "regime",
    "Is fine-tuning where the paper's is?",
    (_OF_TABLE2["base"], AR_SFT, TWICE, OF_SHORT_BASE, UNTRAINED_MASKS, MARS),
    own="Regime",
)
