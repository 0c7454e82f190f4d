"""The nox sessions of pages. This module imports only what nox's own environment has."""

from typing import NamedTuple


class Session(NamedTuple):
    """A nox session that makes a page; arguments after `--` go to its command."""

    makes: str  # the key of a study, or of what stands on its page
    words: str  # what `nox -l` says of it

    @property
    def command(self) -> tuple[str, ...]:
        return ("sweep",) if self.makes == "speedup" else ("reproduce", self.makes)


_NAMES = {"speedup": "speedup-sweep", "serving": "serving-load"}  # the others are called after what they make
# Those that README shows. `nox -s reproduce -- NAME` makes any page.
_WORDS = {
    "table2": "Table 2 of the paper: the quality of every recipe.",
    "table3": "Table 3 of the paper: what the SFT loss does.",
    "table4": "Table 4 of the paper: several tokens per forward, by block size.",
    "table5": "Table 5 of the paper: the block-level cache, by the clock.",
    "table6": "Table 6 of the paper: speculative decoding, by the clock.",
    "table8": "Table 8 of the paper: accuracy against speed.",
    "table9": "Table 9 of the paper: MARS against Jacobi decoding.",
    "figure1": "Figure 1 of the paper: an answer, forward pass by forward pass.",
    "figure3": "Figure 3 of the paper: accuracy against speed, on the page of Table 8.",
    "figure6": "Figure 6 of the paper: three metrics of confidence.",
    "appendix-a": "Appendix A of the paper: the cost of training, on the page of Table 2.",
    "regime": "Is training at a scale like the paper's? Checks of AR training alone.",
    "discrepancies": "Do the differences between paper and released code matter?",
    "gains": "MARS beside its rivals: tokens per forward pass.",
    "lengths": "Table 2 on questions no longer than in training.",
    "longer": "AR SFT and MARS, trained four times as long as for the tables; three seeds are shipped.",
    "adapter": "A gated adapter beside MARS: accuracy and tokens per forward pass.",
    "alignment": "Table 3 in the alignment of the paper's equations.",
    "blocks": "Block sizes and the SFT loss with four times the training, measured on existing checkpoints.",
    "curves": "More training and other sizes, measured on existing checkpoints.",
    "map": "Where MARS pays: two bases, two learning rates, three block sizes.",
    "rivals": "Every rival, trained in each way that we tried, on its own seed.",
    "breaks": "Which tokens thresholds change, and whether answers stay right.",
    "speedup": "Race thresholds, windows and methods at several batch sizes.",
    "serving": "A server under load, with several policies.",
    "real-model": "A real model's answers and speed, with and without an adapter.",
}
SESSIONS = {_NAMES.get(makes, f"reproduce-{makes}"): Session(makes, words) for makes, words in _WORDS.items()}


def session_of(key: str) -> str:
    """The arguments of `nox -s` that make a page or a part of one."""
    return next((name for name, session in SESSIONS.items() if session.makes == key), f"reproduce -- {key}")
