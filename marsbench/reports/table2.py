"""Table 2: the accuracy of every training recipe when one token is generated per forward pass.

Three lines of our own stand below the paper's: mask decoding without MARS training, at a threshold and always, and
MARS with a threshold.
"""

from __future__ import annotations

from marsbench.reports.claims import AccuracyClaim, TokensClaim
from marsbench.reports.deviations import NO_SFT_DEVIATION
from marsbench.reports.figures import accuracy_figure
from marsbench.reports.page import Page
from marsbench.sweeps.plans import TABLES

CLAIMS = (
    AccuracyClaim("a", "MARS at one token per forward pass matches AR SFT", "mars", "ar_sft", margin=2.0),
    AccuracyClaim("a", "MARS at one token per forward pass exceeds AR SFT", "mars", "ar_sft"),
    AccuracyClaim("b", "More AR training does not explain it", "mars", "ar_sft_2x"),
    AccuracyClaim("c", "Block diffusion degrades the model", "ar_sft", "block_diffusion"),
    AccuracyClaim("d", "MARS without the SFT loss is worse", "mars", "mars_no_sft"),
    TokensClaim("e", "Reported elsewhere: it needs no training, untuned masks speed up too", "untrained_masks", 1.05),
    AccuracyClaim(
        "e", "Reported elsewhere: what untuned masks say is right", "untrained_masks_always", "ar_sft", margin=2.0
    ),
    TokensClaim("f", "Ours: MARS emits several tokens per forward pass", "mars_95", bound=1.0),
    AccuracyClaim("f", "Ours: these cost little accuracy", "mars_95", "mars", margin=2.0),
)

PAGE = Page(
    plan=TABLES["table2"],
    opening=(
        "Every training recipe of the MARS paper's Table 2 (arXiv 2604.07023), trained, decoded greedily and "
        "scored by one program."
    ),
    claims=CLAIMS,
    figure="accuracy",
    caption="Accuracy per benchmark and line, with 95 % intervals",
    drawing=accuracy_figure,
    deviations=("Block diffusion predicts every token in place, as BD3-LM does.", NO_SFT_DEVIATION),
)
