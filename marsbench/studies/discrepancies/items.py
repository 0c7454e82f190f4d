"""The discrepancies that a run can decide, one by one: what the paper says, what its code does, what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from marsbench.findings.seeds import BySeed
from marsbench.rendering.markdown import paragraphs
from marsbench.studies.discrepancies.effects import NOT_RUN, effects_table
from marsbench.studies.discrepancies.measured import cache_blocks, load, masks, scorers, stop_rules
from marsbench.studies.lines import ABLATIONS, mars_name


@dataclass(frozen=True)
class Item:
    """One discrepancy: what is said, what is done, and what a run found: pairs of lines compared, or something else."""

    number: str
    title: str
    paper: str
    code: str
    pairs: tuple[tuple[str, str], ...] = ()
    measured: Callable[[BySeed], str] | None = None  # tables of the first seed's rows, verdicts of all

    def section(self, seeds: BySeed) -> str:
        found = self.measured(seeds) if self.measured else effects_table(seeds, self.pairs)
        said = f"- Paper: {self.paper}\n- Released code: {self.code}"
        return paragraphs(f"## {self.number}: {self.title}", said, found or NOT_RUN)


def _against_mars(stage: str) -> tuple[tuple[str, str], ...]:
    """A way of training against the released one, at one token per forward pass and with a threshold."""
    return tuple((mars_name(stage, 4, tau), mars_name("mars", 4, tau)) for tau in (None, 0.95))


ITEMS = (
    Item(
        "D1",
        "what predicts the first token of a block",
        "the first position of a block sees clean tokens only, so that a share of the mask loss is an AR loss "
        "(equations 4 and 6).",
        "logits are shifted by one across the borders of blocks: the last mask of a block predicts the first token of "
        "the next, every label is predicted from one mask or more, and the mask loss holds no AR term.",
        _against_mars("mars_paper_alignment"),
    ),
    Item(
        "D2",
        'what "w/o SFT loss" leaves out',
        "one term of the loss.",
        "the term, and besides each sequence is weighed by 1/t for a random t, which the full trainer never does. "
        "Table 3's gap mixes both; [Table 3](table3.md) has the two ablations at every block size.",
        (
            *[(mars_name("mars_no_sft", 4, tau), mars_name("mars_no_sft_released", 4, tau)) for tau in (None, 0.95)],
            *[(mars_name("mars", 4), mars_name(name, 4)) for name in ABLATIONS],
        ),
    ),
    Item(
        "D3",
        "where blocks are counted from",
        "the start of the response.",
        "the start of the sequence: a block may hold the end of the prompt, unmasked.",
        _against_mars("mars_response_blocks"),
    ),
    Item(
        "D4",
        "EOS as filling",
        "nothing is said.",
        "sequences are filled up to a multiple of B with EOS, and these are labels: the model learns to repeat EOS. "
        "Tokens behind the first EOS are never counted here.",
        _against_mars("mars_no_eos_padding"),
    ),
    Item(
        "D5",
        "what B_cache is",
        "how often rows are brought level, with B masks in each forward.",
        "the number of masks as well, up to 256 of them: Table 5's axis is positions per forward under another name.",
        measured=cache_blocks,
    ),
    Item(
        "D7",
        'what "tau = 1.0" accepts',
        "tokens with a confidence of 1.0.",
        "exactly one token. Rounding makes some probabilities 1.0 exactly, which a literal threshold lets pass.",
        ((mars_name("mars", 4, 1.0), mars_name("mars", 4)),),
    ),
    Item(
        "D8",
        "two scorers for GSM8K",
        "Table 2 and Table 5 give the same model different accuracies.",
        "behind the one stands lm-eval's filter (the closing sentence), behind the other the answer's last number.",
        measured=scorers,
    ),
    Item(
        "D10",
        'what "MARS (no cache)" forwards',
        "the prefix and B masks.",
        "the prefix and all 256 masks, whatever B is. The tokens are the same. Here as many masks as an answer may "
        "have tokens.",
        measured=masks,
    ),
    Item(
        "D13",
        "when an answer stops",
        "nothing is said.",
        "AR stops at the task's stop strings; MARS goes on to EOS or the limit and is cut afterwards. Every method "
        "here goes on, so what a stop string would have saved can be counted.",
        measured=stop_rules,
    ),
    Item(
        "D14",
        "where more load stops paying",
        "under high load, throughput can be raised.",
        "not there. A forward of MARS costs more positions than it settles tokens.",
        measured=load,
    ),
)
