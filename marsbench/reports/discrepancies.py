"""The page of discrepancies: where the paper and its released code differ, and what each difference comes to here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marsbench.reports.cells import Cells, answers_of, done_cells, latest_cells
from marsbench.reports.deviations import deviations_section
from marsbench.reports.markdown import bracketed, p_value, signed_number, table
from marsbench.reports.measured import accuracy_table, reasons
from marsbench.reports.sections import how_section, opening_section, training_section
from marsbench.reports.sweep import Sweep, positions_per_forward, speed_up, tokens_per_forward_of
from marsbench.statistics.intervals import (
    Interval,
    PairedDifference,
    mean_of_benchmarks,
    median_ratio,
    paired_difference,
    speed_difference,
)
from marsbench.sweeps.discrepancies import ALL_MASKS, BLOCKS, NO_CACHE, PLAN, WINDOW
from marsbench.sweeps.plans import ABLATIONS, Arm, mars_name
from marsbench.sweeps.rows import EvaluationRow, Row, SweepRow

STRICT, FLEXIBLE = "strict", "flexible"  # GSM8K's two scores
# The lines whose answers are scored twice and looked through for stop strings.
LOOKED_AT = ("base", "ar_sft", mars_name("mars", 4), mars_name("mars", 4, 0.95))
DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"

OPENING = (
    "The MARS paper (arXiv 2604.07023) and the code that its authors released do not always say the same, and some "
    "published numbers mix two changes. Here each difference that a run can decide is measured by itself; none of it "
    "is an accusation."
)
HOW_TO_READ = (
    "Differences are between lines that answered the same questions, benchmarks weighing the same, with their 95 % "
    f'intervals. "{DIFFERS}" means that the interval leaves 0 out, "{SAME}" that it does not: the interval says how '
    "large a difference may have gone unseen. p is McNemar's. Nothing is corrected for the number of comparisons."
)
HOW_RACES_ARE_MEASURED = (
    "Contenders decode the same prompts in one race, batch by batch in turn, after a lap that is only watched. A ratio "
    "of speeds is the median over laps, with its bootstrap 95 % interval."
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


@dataclass(frozen=True)
class Item:
    """One discrepancy: what is said, what is done, and what a run found: pairs of lines compared, or something else."""

    number: str
    title: str
    paper: str
    code: str
    pairs: tuple[tuple[str, str], ...] = ()
    measured: Callable[[Cells, Sweep], str] | None = None

    def section(self, cells: Cells, sweep: Sweep) -> str:
        """The item in full."""
        found = self.measured(cells, sweep) if self.measured else _effects(cells, self.pairs)
        said = f"- Paper: {self.paper}\n- Released code: {self.code}"
        return "\n\n".join([f"## {self.number}: {self.title}", said, found or NOT_RUN])


# ---------------------------------------------------------------------- two lines compared


@dataclass(frozen=True)
class Effect:
    """What a line has over another on the same questions."""

    accuracy: PairedDifference
    tokens: float  # per forward pass
    tokens_interval: Interval

    @property
    def verdict(self) -> str:
        """Which of the two differ."""
        found = {"accuracy": self.accuracy.interval, "tokens/forward": self.tokens_interval}
        names = [name for name, interval in found.items() if not interval.low <= 0 <= interval.high]
        return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def effect(cells: Cells, first: str, second: str) -> Effect | None:
    """Line `first` minus line `second`, on the benchmarks that both were measured on; None if there are none."""
    mine, theirs = done_cells(cells, first), done_cells(cells, second)
    shared = [name for name in mine if name in theirs]
    if not shared:
        return None
    accuracy = paired_difference(
        {name: mine[name].correct for name in shared}, {name: theirs[name].correct for name in shared}
    )
    tokens = mean_of_benchmarks([speed_difference(answers_of(mine[name]), answers_of(theirs[name])) for name in shared])
    return Effect(accuracy, tokens.value, tokens.interval)


def _effects(cells: Cells, pairs: Sequence[tuple[str, str]]) -> str:
    """A table of differences between pairs of lines."""
    head = ["", "accuracy, points", "p", "tokens/forward", "questions", "verdict"]
    return table(head, [_effect_line(cells, *pair) for pair in pairs], text=(0, 5))


def _effect_line(cells: Cells, first: str, second: str) -> list[str]:
    words = f"{_arm(first).label} minus {_arm(second).label}"
    found = effect(cells, first, second)
    if found is None:
        return [words, "", "", "", "", NOT_RUN]
    return [
        words,
        _signed(found.accuracy.points, found.accuracy.interval, 1),
        p_value(found.accuracy.p_value),
        _signed(found.tokens, found.tokens_interval, 2),
        f"{found.accuracy.n:,}",
        found.verdict,
    ]


def _signed(value: float, interval: Interval, digits: int) -> str:
    return f"{signed_number(value, digits)} {bracketed(interval, digits, signed=True)}"


def _arm(name: str) -> Arm:
    return next(arm for arm in PLAN.arms if arm.name == name)


def _against_mars(stage: str) -> tuple[tuple[str, str], ...]:
    """A way of training against the released one, at one token per forward pass and with a threshold."""
    return tuple((mars_name(stage, 4, tau), mars_name("mars", 4, tau)) for tau in (None, 0.95))


# ---------------------------------------------------------------------- scorers and stop rules


def _scorers(cells: Cells, sweep: Sweep) -> str:
    """GSM8K by its two scores, on the same answers."""
    rows = {_arm(name).label: done_cells(cells, name).get("gsm8k") for name in LOOKED_AT}
    lines = [[label, *_scores(row)] for label, row in rows.items() if row is not None]
    known = [line for line in lines if len(line) > 1]
    head = ["GSM8K, in %", "lm-eval's filter", "last number", "last number minus filter, points", "p", "verdict"]
    return table(head, known, text=(0, 5)) if known else ""


def _scores(row: EvaluationRow) -> list[str]:
    """Both scores of one line, and how they differ; nothing where one is missing."""
    scores = {row.metric: row.correct, **row.others}
    if STRICT not in scores or FLEXIBLE not in scores:
        return []
    difference = paired_difference({"gsm8k": scores[FLEXIBLE]}, {"gsm8k": scores[STRICT]})
    shares = [f"{100 * sum(scores[name]) / len(scores[name]):.1f}" for name in (STRICT, FLEXIBLE)]
    verdict = SAME if difference.interval.low <= 0 <= difference.interval.high else DIFFERS
    return [*shares, _signed(difference.points, difference.interval, 1), p_value(difference.p_value), verdict]


def _stop_rules(cells: Cells, sweep: Sweep) -> str:
    """How many tokens a stop string would have saved."""
    lines = []
    for name in LOOKED_AT:
        rows = [row for row in done_cells(cells, name).values() if row.past_stop]
        if rows:
            emitted, past = (sum(sum(getattr(row, name)) for row in rows) for name in ("emitted", "past_stop"))
            answers = [count for row in rows for count in row.past_stop]
            ended = [value for row in rows for value in row.finished]
            lines.append(
                [_arm(name).label, _percent(sum(ended), len(ended)), f"{sum(map(bool, answers)):,} of {len(answers):,}",
                 _percent(past, emitted), DIFFERS if past else SAME]
            )  # fmt: skip
    head = ["", "ended by EOS, %", "answers with a stop string before", "tokens behind it, % of all", "verdict"]
    return table(head, lines, text=(0, 4)) if lines else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}"


# ---------------------------------------------------------------------- races


def _cache_blocks(cells: Cells, sweep: Sweep) -> str:
    """What B_cache does to positions, tokens per forward and speed."""
    names = [name for name in sweep.names if name == WINDOW or name.startswith(BLOCKS)]
    sizes = sorted({size for name, size in sweep.done if name in names})
    if not sizes:
        return ""
    head = ["", *[f"batch {size}" for size in sizes]]
    lines = []
    for name in names:
        rows = [sweep.done.get((name, size)) for size in sizes]
        lines += [
            [f"{name}: speed over `ar`", *[_over_ar(row) for row in rows]],
            ["positions/forward", *[f"{positions_per_forward(row) or 0:.0f}" if row else "" for row in rows]],
            ["tokens/forward", *[f"{tokens_per_forward_of(row):.2f}" if row else "" for row in rows]],
        ]
    lead = (
        f"`{WINDOW}` keeps what it has accepted after every forward; rows never wait for each other, and "
        f"B_cache, as the paper explains it, has no place. `{BLOCKS}` does as the code does: B_cache masks at once. "
        f"{HOW_RACES_ARE_MEASURED}"
    )
    return "\n\n".join([lead, table(head, lines)])


def _over_ar(row: SweepRow | None) -> str:
    found = speed_up(row) if row else None
    return f"{found.value:.2f} {bracketed(found.interval, 2)}" if found else NOT_RUN


def _masks(cells: Cells, sweep: Sweep) -> str:
    """B - 1 masks against all that may be generated."""
    head = ["batch", "positions/forward, B - 1 masks", "all masks", "speed of all masks over B - 1", "verdict"]
    lines = []
    for size in sweep.batch_sizes:
        few, every = sweep.done.get((NO_CACHE, size)), sweep.done.get((ALL_MASKS, size))
        if few and every:
            ratio = median_ratio(
                [seconds * sum(every.emitted) for seconds in few.seconds],
                [seconds * sum(few.emitted) for seconds in every.seconds],
            )
            verdict = SAME if ratio.interval.low <= 1 <= ratio.interval.high else DIFFERS
            positions = [f"{positions_per_forward(row) or 0:.0f}" for row in (few, every)]
            lines.append([str(size), *positions, f"{ratio.value:.2f} {bracketed(ratio.interval, 2)}", verdict])
    return "\n\n".join([HOW_RACES_ARE_MEASURED, table(head, lines, text=(0, 4))]) if lines else ""


def _load(cells: Cells, sweep: Sweep) -> str:
    """Speed-up over AR as load grows, and where it ends."""
    rows = [row for size in sweep.batch_sizes if (row := sweep.done.get((WINDOW, size)))]
    found = [(row.batch_size, positions_per_forward(row), speed_up(row)) for row in rows]
    lines, knee = [], None
    for size, positions, ratio in found:
        if ratio is not None:
            lines.append([str(size), f"{positions or 0:.0f}", f"{ratio.value:.2f} {bracketed(ratio.interval, 2)}"])
            knee = size if knee is None and ratio.interval.low <= 1 else knee
    if not lines:
        return ""
    largest = lines[-1][0]
    said = (
        f"MARS (tau = .95) is faster than `ar` at every batch size measured, up to {largest}."
        if knee is None
        else f"From batch size {knee} on, MARS (tau = .95) is not shown to be faster than `ar`."
    )
    why = (
        "A forward of MARS covers several positions for each that it settles; once a forward takes as long as its "
        "positions ask for, not as its launch, no threshold can win. The page of [speed](speedup.md) has the law."
    )
    return "\n\n".join([table(["batch", "positions/forward", "speed over `ar`"], lines), f"{said} {why}"])


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
        measured=_cache_blocks,
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
        measured=_scorers,
    ),
    Item(
        "D10",
        'what "MARS (no cache)" forwards',
        "the prefix and B masks.",
        "the prefix and all 256 masks, whatever B is. The tokens are the same. Here as many masks as an answer may "
        "have tokens.",
        measured=_masks,
    ),
    Item(
        "D13",
        "when an answer stops",
        "nothing is said.",
        "AR stops at the task's stop strings; MARS goes on to EOS or the limit and is cut afterwards. Every method "
        "here goes on, so what a stop string would have saved can be counted.",
        measured=_stop_rules,
    ),
    Item(
        "D14",
        "where more load stops paying",
        "under high load, throughput can be raised.",
        "not there. A forward of MARS costs more positions than it settles tokens.",
        measured=_load,
    ),
)


def render(rows: Sequence[Row], scale: str) -> str:
    """The page as Markdown: a pure function of the rows of that scale."""
    rows = [row for row in rows if row.scale == scale]
    cells, sweep = latest_cells(rows), Sweep.of(rows)
    sections = [
        opening_section(PLAN, scale, OPENING),
        HOW_TO_READ,
        *[item.section(cells, sweep) for item in ITEMS],
        _elsewhere(),
        "## Every line\n\n" + accuracy_table(cells, PLAN),
        reasons(cells, PLAN),
        training_section(rows, PLAN),
        how_section(rows, PLAN, scale),
        deviations_section(rows, scale, ()),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def tally(rows: Sequence[Row]) -> str:
    """How many of the compared lines differ."""
    cells = latest_cells(rows)
    found = [measured for item in ITEMS for pair in item.pairs if (measured := effect(cells, *pair))]
    differ = sum(one.verdict != SAME for one in found)
    return f"{differ} of {len(found)} comparisons of lines differ"


def draw(rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
    """The page has no figure."""
    return []


def _elsewhere() -> str:
    lines = [f"- {what} {answer}" for what, answer in ELSEWHERE.items()]
    return "\n\n".join(["## Settled by how things are measured here, or on other pages", "\n".join(lines)])
