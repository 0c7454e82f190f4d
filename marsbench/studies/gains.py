"""MARS beside its rivals, by tokens per forward pass; Table 9; how each rival was trained and set."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from marsbench.findings.between_lines import as_accurate, emits, emits_more
from marsbench.findings.cells import done_cells, latest_cells
from marsbench.findings.claims import Claim, Section
from marsbench.findings.in_words import with_interval
from marsbench.findings.sweep import ALLOWED_LOSS, SweepCells, over_prompts, races_in_words
from marsbench.line import Line
from marsbench.presets import Preset
from marsbench.racing.grid import COMPILED_AR, Grid
from marsbench.rendering.figures import SPEED_AXIS, Labelled, Seeds, labelled_figure, line_on, shared_benchmarks
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import Row, SweepRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Answers
from marsbench.studies import table2
from marsbench.studies.lines import AR_SFT, THRESHOLDS, headed, mars, mars_name, verified
from marsbench.studies.study import TablePage

# ---- a line that is calculated: MARS whose tau was chosen on other questions ----
#
# On the questions that chose it, the fastest setting looks faster than it is. So the even questions choose for the odd
# ones, and the odd ones for the even ones (cross-fitting).

AR_OF_MARS = "ar_of_mars"
CURVE = (AR_OF_MARS, *[mars_name("mars", 4, threshold) for threshold in THRESHOLDS])  # what tau is chosen from
CHOSEN = Line("mars_chosen", "MARS (B = 4, tau chosen on other questions)", "mars", "mars", {"window": 4})


def cross_fitted(settings: Sequence[Answers], allowed_loss: float) -> Answers:
    """Answer each question with the fastest setting of those that lose little on the other half of the questions.

    Settings are of one benchmark; the first is what accuracy is lost against, in percentage points. `ValueError` if
    there are fewer than two questions, or settings with unequally many answers.
    """
    counts = {len(values) for setting in settings for values in (setting.correct, setting.emitted, setting.forwards)}
    if len(counts) != 1 or min(counts) < 2:
        raise ValueError(f"nothing to choose from {len(settings)} settings with {sorted(counts)} answers")
    (n,) = counts
    by_even, by_odd = (fastest_within(settings, allowed_loss, range(first, n, 2)) for first in (0, 1))
    answers = [list(zip(each.correct, each.emitted, each.forwards, strict=True)) for each in settings]
    used = [answers[by_even if place % 2 else by_odd][place] for place in range(n)]
    return Answers(*map(list, zip(*used, strict=True)))


def fastest_within(settings: Sequence[Answers], allowed_loss: float, questions: Sequence[int]) -> int:
    """The index of the fastest setting that loses little against the first one, on `questions` (indices)."""

    def speed(place: int) -> float:
        emitted, forwards = settings[place].emitted, settings[place].forwards
        return sum(emitted[question] for question in questions) / sum(forwards[question] for question in questions)

    right = [sum(setting.correct[place] for place in questions) for setting in settings]
    allowed = [place for place, count in enumerate(right) if 100 * (right[0] - count) <= allowed_loss * len(questions)]
    return max(allowed, key=speed)


def with_choice(rows: Sequence[Row]) -> list[Row]:
    """The rows, and rows of the chosen line for benchmarks where all lines of `CURVE` have as many answers."""
    cells = latest_cells(rows)
    every, chosen = [done_cells(cells, name) for name in CURVE], []
    for name, row in every[0].items():
        with suppress(KeyError, ValueError):  # not all of them have it, or not as many answers
            answers = cross_fitted([done[name].answers for done in every], ALLOWED_LOSS)
            chosen.append(replace(row, **CHOSEN.row_fields, **vars(answers), others={}, finished=[]))
    return [*rows, *chosen]


def _medusa(stage: str, width: int) -> Line:
    words, shape = MEDUSAS[stage], "a chain" if width == 1 else "a tree"
    return Line(f"{stage}_{width}", f"Medusa{words}, {shape}", stage, "medusa", {"tree_width": width})


def _drafted(draft: str, words: str = "") -> Line:
    label, options = f"AR SFT, speculative decoding{words}", {"draft": draft, "draft_length": 4}
    return Line(f"ar_sft_by_{draft}", label, "ar_sft", "speculative", options)


MEDUSAS = {"medusa": "", "medusa_hard": " at the adapter's rate"}
_GROUPS, _LINEAR, _DRAFTED = verified("groups", 4), verified("linear", 5, 0.5), _drafted("draft_ar_sft")
_ADAPTED = replace(verified("groups", 4, stage="mars_gated"), optional=True)  # older rows lack it
_HEADED = headed("network", 4)
MEASURED = TablePlan(
    "gains",
    "Rivals that the paper did not test",
    (
        AR_SFT,
        Line(AR_OF_MARS, "MARS, AR decoding", "mars", "ar"),
        *[mars("mars", 4, threshold) for threshold in THRESHOLDS],
        _LINEAR,
        _GROUPS,
        verified("groups", 4, stage="mars_network"),
        Line("lookup", "MARS, prompt lookup", "mars", "prompt-lookup", {"draft_length": 4}),
        Line("jacobi_of_mars", "MARS, Jacobi decoding", "mars", "jacobi", {"window": 4}),
        *[_medusa(stage, width) for stage in MEDUSAS for width in (1, 3)],
        _DRAFTED,
        _ADAPTED,
        _HEADED,
    ),
    own="Where the gain comes from",
)
_AFTER = 1 + max(number for number, line in enumerate(MEASURED.lines) if line.name in CURVE)
PLAN = replace(MEASURED, lines=(*MEASURED.lines[:_AFTER], CHOSEN, *MEASURED.lines[_AFTER:]))  # with the calculated line
RIVALS = {
    "medusa_hard_3": "Medusa with a tree",
    "medusa_hard_1": "Medusa with a chain",
    _DRAFTED.name: "speculative decoding",
    "lookup": "prompt lookup",
    "jacobi_of_mars": "Jacobi decoding",
}


def _beats_rivals(line: Line, words: str, name: str, others: Iterable[str]) -> Claim:
    """A line emits more tokens per forward pass than the best rival; beside it, its lead over others."""
    best = next(iter(RIVALS))
    return emits_more(
        PLAN, line.name, best, f"{words} emits more tokens per forward pass than {RIVALS[best]}", name,
        beside=tuple((f"than {RIVALS[rival]}", emits_more(PLAN, line.name, rival)) for rival in others),
    )  # fmt: skip


def _draw(seeds: Seeds, plan: TablePlan, path_stem: Path) -> list[Path]:
    benchmarks = shared_benchmarks(seeds, plan)
    shown = {line.label: point[0] for line in plan.lines if (point := line_on(seeds, plan, line.name, benchmarks))}
    return labelled_figure([Labelled(SPEED_AXIS, {"": shown})], path_stem)


STUDY = TablePage(
    name="Gains",
    asks="does MARS emit more tokens per forward pass than other ways to draft?",
    order=2,
    in_paper=True,
    plan=MEASURED,
    table=PLAN,
    claims=(
        _beats_rivals(_GROUPS, "Verified MARS (groups)", "verified-rivals", [*RIVALS][1:]),
        _beats_rivals(_HEADED, "An adapter with a draft head", "headed-rivals", [_DRAFTED.name, "lookup"]),
    ),
    lines=(AR_SFT.name, AR_OF_MARS, CHOSEN.name, _GROUPS.name, _LINEAR.name, *RIVALS, _ADAPTED.name, _HEADED.name),
    figure="speed",
    caption="Tokens per forward pass, the mean of all benchmarks, with 95 % intervals",
    drawing=_draw,
    prepared=with_choice,
)

_MARS = mars_name("mars", 4, 0.95)
PLAN9 = TablePlan(
    "9",
    "MARS against Jacobi decoding",
    (
        AR_SFT,
        Line("jacobi", "AR SFT, Jacobi decoding", "ar_sft", "jacobi", {"window": 4}, "jacobi"),
        mars("mars", 4, 0.95),
    ),
)
TABLE9 = TablePage(
    asks="is MARS better than Jacobi decoding, which needs no training?",
    section=Section("Table 9", appendix="C"),
    on="gains",
    plan=PLAN9,
    claims=(
        emits(PLAN9, "jacobi", Bound(high=1.1), "Jacobi decoding gains almost nothing", "jacobi-slow"),
        emits_more(
            PLAN9, _MARS, "jacobi", "MARS emits more tokens per forward pass than Jacobi decoding", "beats-jacobi"
        ),
        as_accurate(PLAN9, _MARS, "jacobi", "MARS is about as accurate as Jacobi decoding", "level-with-jacobi"),
    ),
    deviations=(
        "Jacobi decoding is exact: its answers are those of AR decoding. Its window has 4 tokens; new ones are drawn "
        "at random from the prompt.",
    ),
)

# ---- every rival in the ways that we tried: other pages use the way that is best by the rival's own measure ----

_DIFFUSION, _SHIFTED, _NO_SFT = map(table2.PLAN.line, ("block_diffusion", "block_diffusion_shifted", "mars_no_sft"))
# The race: one request at a time, every contender compiled, four settings of each.
LIBRARY, _WORDS = "hf-generate", {"block_size": "window", "draft_length": "drafts", "tree_width": "tree of width"}
_RACED: dict[str, tuple[str, str, dict[str, Any], str, tuple[int, ...]]] = {  # stage, method, options, what varies
    "verified MARS": ("mars", "mars-verified", {"layout": "linear", "threshold": 0.5}, "block_size", (2, 3, 4, 5)),
    "an adapter with a draft head": (
        "mars_gated_network", "mars-verified", {"layout": "linear", "threshold": 0.5}, "block_size", (2, 3, 4, 5),
    ),
    "speculative decoding": ("ar_sft", "speculative", {"draft": "draft_ar_sft"}, "draft_length", (2, 3, 4, 5)),
    "Medusa": ("medusa_hard", "medusa", {}, "tree_width", (1, 2, 3, 4)),
    "Jacobi decoding": ("ar_sft", "jacobi", {}, "block_size", (2, 3, 4, 5)),
    "prompt lookup": ("ar_sft", "prompt-lookup", {}, "draft_length", (2, 3, 4, 6)),
}  # fmt: skip
_SETTINGS = [
    Line.named(f"{words}, {name} = {value}", stage, method, **options, **{name: value})
    for words, (stage, method, options, name, values) in _RACED.items()
    for value in values
]


def race_of(scale: Preset, page: str, ar: Line, tried: Sequence[Line], batch_sizes: tuple[int, ...]) -> list[Grid]:
    """Compiled lines beside `ar` and transformers' `generate`; at a scale for tests, few prompts, eager."""
    lines: tuple[Line, ...] = ar, ar.compiled_form(), *[line.compiled_form() for line in tried]
    prompts, repeats = 102, 3
    if scale.in_seconds:
        lines, prompts, repeats = (ar, *tried), 6, 2
    library = Line.named(LIBRARY, ar.stage, LIBRARY)
    return [Grid((*lines, library), batch_sizes, prompts, repeats, positions=0, page=page)]


def _chosen(race: SweepCells) -> dict[str, tuple[SweepRow, SweepRow]]:
    """For each method its fastest row, and a row whose halves of prompts use each other's fastest setting."""
    chosen = {}
    for words, (stage, method, _, _, values) in _RACED.items():
        tried = [row for row in race.at(1) if (row.stage, row.method) == (stage, method)]
        if len(tried) == len(values):
            best = max(tried, key=lambda row: sum(row.emitted) / sum(row.last_token))
            fitted = cross_fitted([Answers(row.correct, row.emitted, row.last_token) for row in tried], ALLOWED_LOSS)
            chosen[words] = best, replace(best, emitted=list(fitted.emitted), last_token=list(fitted.forwards))
    return chosen


def in_brief(rows: Sequence[Row]) -> str:
    """Verified MARS and its fastest rival over AR, each raced as the other, in a line; empty without a race."""
    race = SweepCells.of(rows)
    ar, chosen = race.done.get((COMPILED_AR, 1)), _chosen(race)
    speeds = {words: ratio for words, (_, mine) in chosen.items() if ar and (ratio := over_prompts(mine, ar))}
    if len(speeds) < len(_RACED):
        return ""
    ours, _, *rivals = _RACED
    best = max(rivals, key=lambda words: speeds[words].value)
    faster, slower = sorted((ours, best), key=lambda words: -speeds[words].value)
    first, second = (with_interval(speeds[words], 2) for words in (faster, slower))
    return (
        f"In the toy at batch 1, {faster} is {first} times as fast as AR decoding, {slower} {second} times "
        "(another race, compiled; each at the best of four settings, chosen on other prompts; intervals over prompts)."
    )


def _raced(rows: Sequence[Row]) -> str:
    """Tokens per second of each method over two baselines, at the setting that the other half chose."""
    race = SweepCells.of(rows)
    baselines = [row for name in (COMPILED_AR, LIBRARY) if (row := race.done.get((name, 1)))]
    if len(baselines) < 2:
        return ""
    lines = []
    for words, (best, mine) in _chosen(race).items():
        name = _RACED[words][3]
        ratios = [with_interval(ratio, 2) for other in baselines if (ratio := over_prompts(mine, other))]
        same = f"{best.same_as.get(COMPILED_AR, 0)} of {best.prompts}"
        lines.append([words, str(len(_RACED[words][4])), f"{_WORDS[name]} {best.options[name]}", *ratios, same])
    head = ["tokens/s", "settings", "best over all", "over compiled `ar`", "over `hf-generate`", "answers as AR SFT's"]
    return paragraphs(
        "We race one request at a time, with compiled steps and four settings of every method. For each half of the "
        "prompts, the setting counts that is fastest on the other half. Intervals are over prompts. Verified MARS "
        "gives the answers of the MARS checkpoint; all others give those of AR SFT.",
        table(head, lines, text=(0, 2)),
        f"*{races_in_words(race.rows)}*",
    )


TRIED = TablePage(
    asks="does every rival have its best setting?",
    order=3,
    on="gains",
    plan=TablePlan(
        "rivals",
        "How we trained and set each rival",
        (
            AR_SFT,
            _DIFFUSION,
            _DIFFUSION.of_another_stage("_4x", "four times the steps"),
            _SHIFTED,
            _NO_SFT,
            _NO_SFT.of_another_stage("_hard", "at the adapter's rate"),
            *[_medusa(stage, 3) for stage in MEDUSAS],
            _DRAFTED,
            _drafted("draft_ar_sft_hard", ", draft at the adapter's rate"),
        ),
        own="Rivals",
        seeds=(5,),  # no other page has it, so no verdict depends on the choice
    ),
    races=lambda scale: race_of(scale, "rivals", Line.named("ar", "ar_sft", "ar"), _SETTINGS, (1,)),
    more=(_raced,),
)
