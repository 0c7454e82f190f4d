"""The page of discrepancies: where the paper and its released code differ, and what each difference comes to here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marsbench.findings.between_lines import more_accurate
from marsbench.findings.cells import latest_cells
from marsbench.findings.company import company_remark
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import SweepCells
from marsbench.presets import preset
from marsbench.rendering.claims import plainly
from marsbench.rendering.markdown import folded, paragraphs
from marsbench.rendering.measured import accuracy_table, reasons
from marsbench.rendering.sections import about, behind, racing, title
from marsbench.rows.kinds import Row
from marsbench.studies.discrepancies import measured
from marsbench.studies.discrepancies.measured import (
    DIFFERS,
    NOT_RUN,
    PLAN,
    SAME,
    cache_grid,
    effect,
    effects_table,
    masks_grid,
    verdict,
)
from marsbench.studies.lines import ABLATIONS, mars_name
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run

OPENING = (
    "The MARS paper (arXiv 2604.07023) and the code that its authors released do not always say the same, and some "
    "published numbers mix two changes. Here each difference that a run can decide is measured by itself; none of it "
    "is an accusation."
)
HOW_TO_READ = (
    "Differences are between lines that answered the same questions, benchmarks weighing the same, with their 95 % "
    f'intervals. "{DIFFERS}" means that the interval leaves 0 out, "{SAME}" that it does not: the interval says how '
    "large a difference may have gone unseen. A verdict is of all training seeds that have both lines, on whatever "
    "page they were measured; with one seed the interval covers the draw of questions alone, and the verdict is about "
    "these two checkpoints. Nothing is corrected for the number of comparisons."
)
ELSEWHERE = (
    "- Tokens per forward (D6): the authors' counters include tokens accepted behind EOS, and add up rows. Counted per "
    "row here, up to and with EOS, by every method.",
    "- A slow AR baseline (D9), and times of one run without warm-up (D11). Contenders here decode in turn, after "
    "warm-up; `ar` is held against transformers' `generate`: see [speed](speedup.md) and [engine](engine.md).",
    "- Gains of speculative decoding that are not of the method (D12). Tokens per target forward and time per round "
    "stand apart in Table 6, on the page of [speed](speedup.md).",
    "- Numbers that differ between abstract, tables and limitations (D15, D16). The tables are cited.",
    "- Confidence in the model's own precision in some samplers (D17). Always worked out in fp32.",
    "- Single runs without intervals (D18). Every number here has an interval, every comparison is paired.",
)


@dataclass(frozen=True)
class Discrepancy:
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


DISCREPANCIES = (
    Discrepancy(
        "D1",
        "what predicts the first token of a block",
        "the first position of a block sees clean tokens only, so that a share of the mask loss is an AR loss "
        "(equations 4 and 6).",
        "logits are shifted by one across the borders of blocks: the last mask of a block predicts the first token of "
        "the next, every label is predicted from one mask or more, and the mask loss holds no AR term.",
        _against_mars("mars_paper_alignment"),
    ),
    Discrepancy(
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
    Discrepancy(
        "D3",
        "where blocks are counted from",
        "the start of the response.",
        "the start of the sequence: a block may hold the end of the prompt, unmasked.",
        _against_mars("mars_response_blocks"),
    ),
    Discrepancy(
        "D4",
        "EOS as filling",
        "nothing is said.",
        "sequences are filled up to a multiple of B with EOS, and these are labels: the model learns to repeat EOS. "
        "Tokens behind the first EOS are never counted here.",
        _against_mars("mars_no_eos_padding"),
    ),
    Discrepancy(
        "D5",
        "what B_cache is",
        "how often rows are brought level, with B masks in each forward.",
        "the number of masks as well, up to 256 of them: Table 5's axis is positions per forward under another name.",
        measured=measured.cache_blocks,
    ),
    Discrepancy(
        "D7",
        'what "tau = 1.0" accepts',
        "tokens with a confidence of 1.0.",
        "exactly one token. Rounding makes some probabilities 1.0 exactly, which a literal threshold lets pass.",
        ((mars_name("mars", 4, 1.0), mars_name("mars", 4)),),
    ),
    Discrepancy(
        "D8",
        "two scorers for GSM8K",
        "Table 2 and Table 5 give the same model different accuracies.",
        "behind the one stands lm-eval's filter (the closing sentence), behind the other the answer's last number.",
        measured=measured.scorers,
    ),
    Discrepancy(
        "D10",
        'what "MARS (no cache)" forwards',
        "the prefix and B masks.",
        "the prefix and all 256 masks, whatever B is. The tokens are the same. Here as many masks as an answer may "
        "have tokens.",
        measured=measured.masks,
    ),
    Discrepancy(
        "D13",
        "when an answer stops",
        "nothing is said.",
        "AR stops at the task's stop strings; MARS goes on to EOS or the limit and is cut afterwards. Every method "
        "here goes on, so what a stop string would have saved can be counted.",
        measured=measured.stop_rules,
    ),
    Discrepancy(
        "D14",
        "where more load stops paying",
        "under high load, throughput can be raised.",
        "not there. A forward of MARS costs more positions than it settles tokens.",
        measured=measured.load,
    ),
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    cells, sweep = latest_cells(rows), SweepCells.of(rows)
    return [
        title(PLAN, scale),
        "\n".join([f"- {tally(seeds)}.", *_answers(seeds)]),
        effects_table(seeds, [pair for item in DISCREPANCIES for pair in item.pairs]),
        f"{HOW_TO_READ} {racing(scale)} {about(OPENING, scale, seeds)}",
        preset(scale).caveat,
        company_remark(sweep.rows),
        folded(
            *[item.section(seeds) for item in DISCREPANCIES],
            paragraphs("## Settled by how things are measured here, or on other pages", "\n".join(ELSEWHERE)),
            paragraphs("## Every line", accuracy_table(cells, PLAN), reasons(cells, PLAN)),
        ),
        behind(rows, PLAN, scale),
    ]


def tally(seeds: BySeed) -> str:
    """How many of the compared lines differ, and how many of these comparisons are of one training seed."""
    found = [measured for item in DISCREPANCIES for pair in item.pairs if (measured := effect(seeds, *pair))]
    differ, alone = sum(verdict(*one) != SAME for one in found), sum(accuracy.seeds == 1 for accuracy, _ in found)
    return f"{differ} of {len(found)} comparisons of lines differ ({alone} of one training seed alone)"


def _answers(seeds: BySeed) -> Iterator[str]:
    for item in [item for item in DISCREPANCIES if item.pairs][:4]:
        if found := effect(seeds, *item.pairs[0]):
            yield f"- {item.number}, {item.title}: {plainly(more_accurate(PLAN, *item.pairs[0]), found[0])}."


def _rows(run: Run) -> list[Row]:
    """Trainings, then cells of accuracy, then two small races, in which no shard takes part."""
    from marsbench.racing.sweep import Sweep
    from marsbench.running.tables import Table

    rows = Table(run, PLAN).rows()
    if not run.is_whole:
        return rows
    for grid in (cache_grid(run.scale), masks_grid(run.scale)):
        rows += Sweep(run, grid).rows()
    return list({row.key: row for row in rows}.values())  # the races need checkpoints that the table has trained


STUDY = Study(
    key="discrepancies",
    name="Discrepancies",
    asks="where paper and released code differ: does it matter?",
    place=1,
    plan=PLAN,
    measure=_rows,
    timed=True,
    sections=sections,
    tally=tally,
)
