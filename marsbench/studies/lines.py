"""Lines that several studies share, with the paper's block sizes, thresholds and batch sizes."""

from typing import Any

from marsbench.line import Line
from marsbench.running.plans import AS_RELEASED

BLOCK_SIZES = (4, 8, 16)
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
TAUS = (None, *THRESHOLDS)  # None is one token per forward pass
BATCH_SIZES = (4, 8, 16)  # of Tables 5 and 6
ONE_TOKEN: dict[str, Any] = {"accept": "one"}  # a label for rows; without a threshold, one token is accepted
AR_SFT = Line("ar_sft", "AR SFT", "ar_sft", "ar", {}, "ar_sft_5ep")
# Stage -> its words, in Tables 3 and 8.
MARS_STAGES = {
    "mars_no_sft_released": f"MARS w/o SFT loss{AS_RELEASED}",
    "mars_no_sft": "MARS w/o SFT loss",
    "mars": "MARS",
}
ABLATIONS = tuple(name for name in MARS_STAGES if name != "mars")
# Stage -> its words, on the page of discrepancies.
MARS_VARIANTS = {
    "mars": "MARS",
    "mars_paper_alignment": "MARS, aligned as in the paper",
    "mars_response_blocks": "MARS, blocks counted from the response",
    "mars_no_eos_padding": "MARS, no labelled EOS filled in",
}
ALIGNED = {  # stage -> its words, on Table 3's page: in this alignment the mask loss has an AR term
    "mars_paper_alignment_no_sft": "MARS w/o SFT loss, aligned as in the paper",
    "mars_paper_alignment": MARS_VARIANTS["mars_paper_alignment"],
}
HEADED_MARS = {"mars_network": "MARS with a draft head"}  # stage -> its words, trained at B = 4


def mars(stage: str, block_size: int, threshold: float | None = None) -> Line:
    """MARS, an ablation or a variant of it, at one token per forward or with a threshold."""
    how, said = (ONE_TOKEN, "") if threshold is None else ({"threshold": threshold}, f", tau = {short(threshold)}")
    label = f"{(MARS_STAGES | MARS_VARIANTS | ALIGNED | HEADED_MARS)[stage]} (B = {block_size}{said})"
    papers = {"mars": "mars", "mars_no_sft_released": "mars_no_sft"}.get(stage)
    return Line(
        mars_name(stage, block_size, threshold), label, stage, "mars", {"window": block_size, **how}, papers,
        optional=stage in HEADED_MARS, block_size=block_size,
    )  # fmt: skip


def mars_name(stage: str, block_size: int, threshold: float | None = None) -> str:
    """The name of the line that decodes a MARS stage; without a threshold, one token per forward pass."""
    return f"{stage}_b{block_size}" + ("" if threshold is None else f"_{threshold:g}")


_VERIFIED = {  # stage -> what the names of its lossless lines begin with, and its words
    "mars": ("verified", "MARS"),
    "mars_network": ("mars_network", "MARS with a draft head,"),
    "mars_hard": ("hard", "MARS at the adapter's rate,"),
    "mars_gated": ("gated", "AR SFT with an adapter,"),  # which answers for the masks of AR SFT
    "mars_gated_2x": ("gated_2x", "AR SFT with an adapter trained twice as long,"),
    "mars_gated_wide": ("wide", "AR SFT with an adapter of three times the rank,"),
    "mars_gated_wide_2x": ("wide_2x", "AR SFT with one of three times the rank trained twice as long,"),
}


def verified(layout: str, window: int, threshold: float | None = None, stage: str = "mars") -> Line:
    """Lossless MARS in one of its layouts; the checkpoint is that of B = 4 for every window."""
    pruned = {} if threshold is None else {"threshold": threshold}
    name, words = _VERIFIED[stage]
    return Line(
        f"{name}_{layout}", f"{words} verified, {layout} (W = {window})", stage, "mars-verified",
        {"layout": layout, "window": window, **pruned},
        optional=stage in HEADED_MARS,
    )  # fmt: skip


HEADS = {"markov": "a table", "network": "a network"}  # kinds of draft heads, in words


def drafting(stage: str, words: str, window: int) -> Line:
    """AR SFT with an adapter that was trained for the window of groups that it decodes with."""
    return Line(
        f"{stage}_groups_{window}", f"AR SFT with {words}, verified, groups (W = {window})", stage, "mars-verified",
        {"layout": "groups", "window": window}, optional=True, block_size=window,
    )  # fmt: skip


def headed(kind: str, window: int) -> Line:
    """AR SFT with an adapter that has a draft head behind it."""
    return drafting(f"mars_gated_{kind}", f"an adapter and {HEADS[kind]} behind it", window)


def short(number: float) -> str:
    """A threshold as the paper writes it, without the zero in front."""
    return f"{number:g}".removeprefix("0")
