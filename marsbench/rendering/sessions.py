"""The nox sessions of pages. Nothing is imported here that nox's own environment may lack."""

from __future__ import annotations

from typing import NamedTuple


class Session(NamedTuple):
    """A nox session that makes a page; what stands after `--` goes to its command."""

    makes: str  # the key of a study, or of what stands on its page
    words: str  # what `nox -l` says of it
    sweeps: bool = False  # whether it runs `marsbench sweep`, not `marsbench reproduce`

    @property
    def command(self) -> tuple[str, ...]:
        return ("sweep",) if self.sweeps else ("reproduce", self.makes)


# Those that README shows, by name. `nox -s reproduce -- NAME` makes any page.
SESSIONS = {
    "reproduce-table2": Session("table2", "Table 2 of the paper: the quality of every recipe."),
    "reproduce-table3": Session("table3", "Table 3 of the paper: what the SFT loss does."),
    "reproduce-table4": Session("table4", "Table 4 of the paper: several tokens per forward, by block size."),
    "reproduce-table5": Session("table5", "Table 5 of the paper: the block-level cache, by the clock."),
    "reproduce-table6": Session("table6", "Table 6 of the paper: speculative decoding, by the clock."),
    "reproduce-table8": Session("table8", "Table 8 of the paper: accuracy against speed."),
    "reproduce-table9": Session("table9", "Table 9 of the paper: MARS against Jacobi decoding."),
    "reproduce-figure1": Session("figure1", "Figure 1 of the paper: an answer, forward pass by forward pass."),
    "reproduce-figure3": Session("figure3", "Figure 3 of the paper: accuracy against speed, on the page of Table 8."),
    "reproduce-figure6": Session("figure6", "Figure 6 of the paper: three metrics of confidence."),
    "reproduce-appendix-a": Session(
        "appendix-a", "Appendix A of the paper: the cost of training, on the page of Table 2."
    ),
    "reproduce-regime": Session("regime", "Is a scale in the paper's regime? Criteria by AR training alone."),
    "reproduce-discrepancies": Session(
        "discrepancies", "What difference it makes where paper and released code differ."
    ),
    "reproduce-gains": Session("gains", "Where the gain comes from: rivals at equal accuracy."),
    "reproduce-lengths": Session("lengths", "Questions no longer than those of training, asked of Table 2's lines."),
    "reproduce-adapter": Session("adapter", "A gated adapter beside MARS: accuracy and tokens per forward pass."),
    "reproduce-curves": Session("curves", "More training and other sizes, measured on the checkpoints that are there."),
    "reproduce-map": Session("map", "Where MARS pays: bases trained long or short, rates gentle or hard, block sizes."),
    "reproduce-rivals": Session("rivals", "Every rival in the ways that were tried for it, on a seed of its own."),
    "speedup-sweep": Session("speedup", "Race thresholds, windows and methods at several batch sizes.", sweeps=True),
    "serving-load": Session("serving", "Put a server under load by several policies."),
    "reproduce-real-model": Session("real-model", "A real model's answers and speed, with and without an adapter."),
}


def session_of(key: str) -> str:
    """What stands behind `nox -s` to make a page, or what stands on one."""
    return next((name for name, session in SESSIONS.items() if session.makes == key), f"reproduce -- {key}")
