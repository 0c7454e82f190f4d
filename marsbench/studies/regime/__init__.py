"""The regime: criteria about AR training and about masks without MARS training; and a map of other regimes.

The map has MARS from a base trained long or short, fine-tuned gently or hard; the tables have one of its corners.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from marsbench.findings.between_lines import emits, emits_more, more_accurate
from marsbench.findings.cells import BENCHMARKS, PUBLISHED_SCALES, done_cells, latest_cells, published_average
from marsbench.findings.claims import Claim, Finding, Measured
from marsbench.findings.seeds import BySeed
from marsbench.line import Line
from marsbench.rendering.claims_in_words import tested
from marsbench.rendering.figures import Labelled, Seeds, labelled_figure, shared_benchmarks
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound, Verdict
from marsbench.statistics.intervals import Estimate, paired_difference
from marsbench.studies.lines import AR_SFT, BLOCK_SIZES, mars, mars_name
from marsbench.studies.study import Study, TablePage
from marsbench.studies.table2 import PLAN as TABLE2

OF_SHORT_BASE = Line("ar_sft_of_short_base", "AR SFT of a base trained 2/3 as long", "ar_sft_of_short_base", "ar")
TWICE, UNTRAINED_MASKS, MARS = (TABLE2.line(name) for name in ("ar_sft_2x", "untrained_masks", "mars_95"))
PLAN = TablePlan(
    "regime",
    "How near is training to the paper's?",
    (TABLE2.line("base"), AR_SFT, TWICE, OF_SHORT_BASE, UNTRAINED_MASKS, MARS),
    own="Regime",
)

ROOM_ON_EACH, ENOUGH = Bound(40.0, 97.0), 4
BETWEEN = f"between {ROOM_ON_EACH.low:g} and {ROOM_ON_EACH.high:g}"
# Accuracy in % of random answers in the right form. BBH has two puzzles of yes or no, and one of seven days.
CHANCE = {"bbh": 100 * (1 / 2 + 1 / 2 + 1 / 7) / 3, "mmlu_pro": 10.0, "gpqa": 25.0}


def _accuracy(rows: Sequence[Row], benchmarks: Sequence[str]) -> Measured:
    """AR SFT's accuracy in points on some benchmarks, as a difference to none right: so seeds can be pooled."""
    done = done_cells(latest_cells(rows), AR_SFT.name)
    asked = {name: done[name].correct for name in benchmarks if name in done}
    if len(asked) < len(benchmarks):
        return Measured()
    gain = paired_difference(asked, {name: [0.0] * len(correct) for name, correct in asked.items()})
    return Measured(gain, tuple(asked), len(benchmarks))


def on_each(seeds: BySeed) -> dict[str, Finding]:
    """AR SFT's accuracy on every benchmark, over all training seeds."""
    claims = {name: Claim(measure=partial(_accuracy, benchmarks=[name]), bound=ROOM_ON_EACH) for name in BENCHMARKS}
    return {name: claim.over(seeds.values()) for name, claim in claims.items()}


def room_on_enough(seeds: BySeed) -> tuple[str, Verdict]:
    """How many benchmarks have room to gain and to lose, in words, and whether these are enough."""
    verdicts = [finding.side for finding in on_each(seeds).values()]
    if "not run" in verdicts:
        return "n/a", "not run"
    sure, possible = verdicts.count("holds"), len(verdicts) - verdicts.count("does not hold")
    verdict: Verdict = "holds" if sure >= ENOUGH else "open" if possible >= ENOUGH else "does not hold"
    return f"{sure} surely, {possible} possibly", verdict


def above_chance(seeds: BySeed) -> tuple[str, Verdict]:
    """Which benchmarks may be at chance, in words, and whether there is none."""
    limits = {name: finding.estimate.interval for name, finding in on_each(seeds).items() if finding.estimate}
    if len(limits) < len(BENCHMARKS):
        return "n/a", "not run"
    near = [BENCHMARKS[name] for name, interval in limits.items() if interval.low <= CHANCE.get(name, 0.0)]
    below_chance = any(interval.high <= CHANCE.get(name, 0.0) for name, interval in limits.items())
    return ", ".join(near) or "none", "does not hold" if below_chance else "open" if near else "holds"


# Accuracies within a margin: two one-sided tests, by one interval. Lines of Table 2 have the paper's numbers there.
CRITERIA = (
    more_accurate(
        PLAN, AR_SFT.name, OF_SHORT_BASE.name, "Converged: with a base trained 2/3 as long, AR SFT is almost the same",
        bound=Bound(-1.5, 1.5),
    ),
    more_accurate(
        TABLE2, TWICE.name, AR_SFT.name, "Saturated: AR SFT trained twice as long on the same data is almost the same",
        bound=Bound(-1.0, 1.0),
    ),
    Claim(
        text="Room to gain and to lose: AR SFT's average accuracy",
        compared="average of AR SFT", bound=Bound(60.0, 95.0),
        measure=partial(_accuracy, benchmarks=list(BENCHMARKS)),
        published=lambda scale: published_average(TABLE2, AR_SFT.name, scale, "accuracy"),
    ),
    emits(
        PLAN, UNTRAINED_MASKS.name, Bound(high=1.05), "Masks are new: without MARS training they emit almost nothing"
    ),
    more_accurate(
        TABLE2, AR_SFT.name, "base", "Fine-tuning improves the base by at least 5 points", "taught",
        bound=Bound(low=5.0),
    ),
)  # fmt: skip


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    room = [
        [BENCHMARKS[name], finding.found, f"{CHANCE.get(name, 0.0):.1f}", finding.side]
        for name, finding in on_each(seeds).items()
    ]
    return {
        "tally": tally(seeds),
        "criteria": _criteria(seeds),
        "room": table(["", "AR SFT", "by chance", BETWEEN], room, text=(0, 3)),
    }


def tally(seeds: BySeed) -> str:
    """How many criteria hold, and the verdicts of the others."""
    judged = [criterion.over(seeds.values()).side for criterion in CRITERIA]
    verdicts = [*judged, room_on_enough(seeds)[1], above_chance(seeds)[1]]
    words = {"does not hold": "do not hold", "open": "are open", "not run": "did not run"}
    rest = [f"{verdicts.count(verdict)} {said}" for verdict, said in words.items() if verdict in verdicts]
    return ", ".join([f"{verdicts.count('holds')} of {len(verdicts)} checks hold", *rest])


def _criteria(seeds: BySeed) -> str:
    lines = []
    for criterion in CRITERIA:
        result, papers = criterion.over(seeds.values()), []
        for scale, name in PUBLISHED_SCALES.items():
            if (value := criterion.published(scale)) is not None:
                where = "" if criterion.bound.low <= value <= criterion.bound.high else ", outside the bound"
                papers.append(f"{criterion.number(value)} ({name}{where})")
        counts = ["n/a", "n/a"] if result.estimate is None else [f"{result.estimate.n:,}", str(result.seeds)]
        lines.append([criterion.text, tested(criterion), result.found, *counts, result.side, ", ".join(papers)])
    (enough, first), (near, second) = room_on_enough(seeds), above_chance(seeds)
    lines[3:3] = [  # they belong to the third
        ["... at least four benchmarks", f"{ENOUGH} or more {BETWEEN}", enough, "", "", first, ""],
        ["... none at chance", "benchmarks that may be at chance, by their interval", near, "", "", second, ""],
    ]
    head = ["criterion", "tested", "result", "questions or texts", "seeds", "outcome", "the paper"]
    return table(head, lines, text=(0, 1, 5, 6))


STUDY = Study(
    asks="is fine-tuning as gentle, and the base as well trained, as in the paper?",
    order=0,
    plan=PLAN,
    layout="regime/page.md",
    slots=_slots,
    claims=CRITERIA[-1:],
)

CORNERS = {  # ending of its stages -> its words
    "": "long base, gentle",
    "_of_short_base": "short base, gentle",
    "_hard_sft": "long base, hard",
    "_hard_sft_of_short_base": "short base, hard",
}
_SURE, _HARD = 0.95, "_hard_sft"
_ONE, _ABLATION = mars_name("mars", 4), mars_name("mars_no_sft", 4)
_B4, _B16 = mars_name("mars", 4, _SURE), mars_name("mars", 16, _SURE)
_LINES = AR_SFT, mars("mars", 4), *[mars("mars", size, _SURE) for size in BLOCK_SIZES], mars("mars_no_sft", 4)
MAP_PLAN = TablePlan(
    "map",
    "Where MARS pays",
    tuple(line.of_another_stage(ending, words) for ending, words in CORNERS.items() for line in _LINES),
    own="Map",
)


def _draw(seeds: Seeds, plan: TablePlan, path_stem: Path) -> list[Path]:
    """By corner: what MARS loses at one token, what its ablation loses, and tokens per forward pass by block size."""

    def by_corner(kind: Callable[..., Claim], *lines: str, **more: Any) -> dict[str, Estimate]:
        claims = {
            words: kind(MAP_PLAN, *[line + ending for line in lines], **more) for ending, words in CORNERS.items()
        }
        return {words: found for words, claim in claims.items() if (found := claim.over(seeds).estimate) is not None}

    alike: dict[str, Any] = {"bound": Bound(), "only": shared_benchmarks(seeds, plan)}
    speeds = {f"B = {size}": by_corner(emits, mars_name("mars", size, _SURE), **alike) for size in BLOCK_SIZES}
    panels = (
        Labelled("MARS minus AR SFT, points", {"": by_corner(more_accurate, _ONE, AR_SFT.name)}, level=0.0),
        Labelled("MARS minus w/o SFT loss, points", {"": by_corner(more_accurate, _ONE, _ABLATION)}, level=0.0),
        Labelled("tokens per forward pass at tau = .95", speeds),
    )
    return labelled_figure(panels, path_stem)


MAP = TablePage(
    asks="with which base, learning rate and block size does MARS pay?",
    order=3,
    on="regime",
    plan=MAP_PLAN,
    claims=(
        emits_more(
            MAP_PLAN, _B4 + _HARD, _B4, "Ten times the learning rate gives MARS more tokens per forward at tau = .95",
            "hard-emits",
            beside=(
                ("accuracy", more_accurate(MAP_PLAN, _B4 + _HARD, _B4)),
                ("accuracy of AR SFT", more_accurate(MAP_PLAN, AR_SFT.name + _HARD, AR_SFT.name)),
                ("tokens/forward of B = 16 over B = 4", emits_more(MAP_PLAN, _B16 + _HARD, _B4 + _HARD)),
            ),
        ),
    ),
    lines=tuple(name + ending for ending in CORNERS for name in (AR_SFT.name, _ONE, _B4)),
    figure="corners",
    caption=(
        "By corner: accuracy of MARS (B = 4) at one token minus AR SFT, and minus MARS w/o SFT loss; and tokens per "
        "forward pass of MARS at tau = .95, by block size"
    ),
    drawing=_draw,
)  # fmt: skip
