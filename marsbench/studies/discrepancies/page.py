"""The page of discrepancies: where the paper and its released code differ, and what each difference comes to here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from marsbench.studies.discrepancies.effects import DIFFERS, SAME, effect, effects_table, verdict
from marsbench.studies.discrepancies.items import ITEMS
from marsbench.studies.discrepancies.lines import PLAN

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
ELSEWHERE = {
    "Tokens per forward (D6): the authors' counters include tokens accepted behind EOS, and add up rows.": (
        "Counted per row here, up to and with EOS, by every method."
    ),
    "A slow AR baseline (D9), and times of one run without warm-up (D11).": (
        "Contenders here decode in turn, after warm-up; `ar` is held against transformers' `generate`: see "
        "[speed](speedup.md) and [engine](engine.md)."
    ),
    "Gains of speculative decoding that are not of the method (D12).": (
        "Tokens per target forward and time per round stand apart in Table 6, on the page of [speed](speedup.md)."
    ),
    "Numbers that differ between abstract, tables and limitations (D15, D16).": "The tables are cited.",
    "Confidence in the model's own precision in some samplers (D17).": "Always worked out in fp32.",
    "Single runs without intervals (D18).": "Every number here has an interval, every comparison is paired.",
}


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    cells, sweep = latest_cells(rows), SweepCells.of(rows)
    return [
        title(PLAN, scale),
        "\n".join([f"- {tally(seeds)}.", *_answers(seeds)]),
        effects_table(seeds, [pair for item in ITEMS for pair in item.pairs]),
        f"{HOW_TO_READ} {racing(scale)} {about(OPENING, scale, seeds)}",
        preset(scale).caveat,
        company_remark(sweep.rows),
        folded(
            *[item.section(seeds) for item in ITEMS],
            _elsewhere(),
            paragraphs("## Every line", accuracy_table(cells, PLAN), reasons(cells, PLAN)),
        ),
        behind(rows, PLAN, scale),
    ]


def tally(seeds: BySeed) -> str:
    """How many of the compared lines differ, and how many of these comparisons are of one training seed."""
    found = [measured for item in ITEMS for pair in item.pairs if (measured := effect(seeds, *pair))]
    differ, alone = sum(verdict(*one) != SAME for one in found), sum(accuracy.seeds == 1 for accuracy, _ in found)
    return f"{differ} of {len(found)} comparisons of lines differ ({alone} of one training seed alone)"


def _answers(seeds: BySeed) -> Iterator[str]:
    for item in [item for item in ITEMS if item.pairs][:4]:
        if found := effect(seeds, *item.pairs[0]):
            yield f"- {item.number}, {item.title}: {plainly(more_accurate(PLAN, *item.pairs[0]), found[0])}."


def _elsewhere() -> str:
    lines = [f"- {what} {answer}" for what, answer in ELSEWHERE.items()]
    return paragraphs("## Settled by how things are measured here, or on other pages", "\n".join(lines))
