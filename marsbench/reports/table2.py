"""Table 2: the accuracy of every training recipe when one token is generated per forward pass.

Three lines of our own stand below the paper's: mask decoding without MARS training, at a threshold and always, and
MARS with a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.evaluation.statistics import accuracy, mean_of_benchmarks, tokens_per_forward
from marsbench.paper import published
from marsbench.reports.cells import BENCHMARKS, Cells, done_cells, latest_cells
from marsbench.reports.claims import AccuracyClaim, Claim, TokensClaim
from marsbench.reports.figures import accuracy_figure
from marsbench.reports.markdown import one_line, plus_minus, signed_number, table
from marsbench.reports.sections import how_section, training_section
from marsbench.sweeps.plans import TABLES, Arm
from marsbench.sweeps.rows import EvaluationRow, Row

PLAN = TABLES["table2"]
SMALL_SCALES = ("micro", "tiny")
FIGURE = "figures/table2_accuracy"  # beside the page, less the extension
PUBLISHED_SCALES = {"0.5b": "Qwen2.5 0.5B", "7b": "Qwen2.5 7B"}

CLAIMS: tuple[Claim, ...] = (
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

DEVIATIONS: tuple[str, ...] = (
    "Block diffusion predicts every token in place, as BD3-LM does.",
    '"MARS w/o SFT loss" drops that loss and changes nothing else (`ar_weight = 0`); the authors\' released '
    "ablation also switches on 1/t weights.",
    "One training seed per recipe: intervals cover the draw of questions, not the luck of training.",
    "Tokens per forward pass are counted per answer, up to and with EOS; nothing after it counts.",
)
MINI_DEVIATIONS: tuple[str, ...] = (
    "An embedded world of six generated benchmarks stands in for the six real ones.",
    "All mini benchmarks are 0-shot, BBH too (the paper: 3-shot).",
)
REAL_DEVIATIONS: tuple[str, ...] = (
    "GSM8K, BBH and GPQA are scored by reading the answer wherever it stands. lm-eval's stock filters (`strict`) drop "
    "the last character of an answer that no full stop follows, and BBH's stop string `Q` cuts answers such as `(Q)`.",
    "MMLU-Pro: an answer that names no option is wrong; MMLU-Pro's authors credit it with a random guess.",
    "IFEval's checker draws what a document leaves open (keys 1122 and 1129) from the document's key, GPQA's choices "
    "stand in an order drawn from the question: both change from run to run in the stock tasks.",
    "HumanEval is scored on EvalPlus's version of its tests, in a sandbox.",
    "Every method generates to EOS or the limit; stop strings cut the text afterwards.",
)
SMALL_DEVIATIONS: tuple[str, ...] = (
    "The model has about a million parameters and is trained from scratch on the spot; it is not Qwen2.5.",
    "SFT conversations are generated, not taken from Dolci-Instruct-SFT.",
    "Answers end at a limit below the paper's 256 tokens.",
)

HOW_TO_READ_THE_CELLS = (
    "Accuracy in % ± half of the 95 % interval. Benchmarks weigh the same in the average and in "
    "tokens/forward. Lines with tau accept tokens from the left while their confidence reaches tau, the "
    "others exactly one token per forward pass."
)
HOW_CLAIMS_ARE_JUDGED = (
    "All lines answer the same questions, so two of them are compared question by question: the difference "
    "in points, benchmarks weighing the same, with its 95 % interval. A claim is *supported* if the whole "
    "interval lies above the tested bound, *not supported* if it lies below, else *inconclusive*. p is "
    "McNemar's, exact and two-sided, for a difference of 0, with questions weighing the same. Nothing is "
    "corrected for the number of claims, and every recipe was trained once: a verdict is about these "
    "checkpoints."
)


def render(rows: Sequence[Row], scale: str) -> str:
    """The report as Markdown: a pure function of the rows of that scale."""
    rows = [row for row in rows if row.scale == scale]
    cells = latest_cells(rows)
    sections = [
        _opening(scale),
        _measured(cells),
        _claims(cells),
        _published(),
        training_section(rows, PLAN),
        how_section(rows, PLAN, scale),
        _deviations(rows, scale),
    ]
    return "\n\n".join(sections) + "\n"


def draw(rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
    """Write the figure that the report shows, as PNG and SVG."""
    of_scale = [row for row in rows if row.scale == scale]
    return accuracy_figure(of_scale, PLAN, BENCHMARKS, reports_dir / FIGURE)


def _opening(scale: str) -> str:
    title = f"# Table {PLAN.number} at scale {scale}: {PLAN.title[0].lower()}{PLAN.title[1:]}"
    what = (
        "Every training recipe of the MARS paper's Table 2 (arXiv 2604.07023), trained, decoded greedily and "
        "scored by one program."
    )
    caveat = f" Results at scale {scale} test the mechanism; they are not Qwen numbers."
    return f"{title}\n\n{what}{caveat if scale in SMALL_SCALES else ''}"


def _measured(cells: Cells) -> str:
    head = ["", *BENCHMARKS.values(), "Average", "tokens/forward"]
    lines = [_question_counts(cells), *[[arm.label, *_arm_line(cells, arm)] for arm in PLAN.arms]]
    figure = f"![Accuracy per benchmark and line, with 95 % intervals]({FIGURE}.png)"
    parts = [
        "## Measured",
        HOW_TO_READ_THE_CELLS,
        table(head, lines),
        _reasons(cells),
        _other_scores(cells),
        _cut_answers(cells),
        figure,
    ]
    return "\n\n".join(part for part in parts if part)


def _question_counts(cells: Cells) -> list[str]:
    counts: dict[str, set[int]] = {name: set() for name in BENCHMARKS}
    for arm in PLAN.arms:
        for name, row in done_cells(cells, arm.name).items():
            counts[name].add(len(row.correct))
    return ["questions", *["/".join(map(str, sorted(found))) or "" for found in counts.values()], "", ""]


def _arm_line(cells: Cells, arm: Arm) -> list[str]:
    done = done_cells(cells, arm.name)
    numbers = [_cell(cells.get((arm.name, name))) for name in BENCHMARKS]
    if len(done) < len(BENCHMARKS):  # means over different benchmarks would not compare
        return [*numbers, "incomplete", "incomplete"]
    mean = mean_of_benchmarks([accuracy(row.correct) for row in done.values()])
    speed = mean_of_benchmarks([tokens_per_forward(row.emitted, row.forwards) for row in done.values()])
    return [*numbers, plus_minus(mean, 1, factor=100), plus_minus(speed, 2)]


def _cell(row: EvaluationRow | None) -> str:
    if row is None:
        return "not run"
    return plus_minus(accuracy(row.correct), 1, factor=100) if row.status == "done" else row.status


def _reasons(cells: Cells) -> str:
    """Why cells have no numbers; those that share a reason share a line."""
    arms: dict[tuple[str, str, str], list[str]] = {}  # status, reason, benchmark -> arms
    for name, head in BENCHMARKS.items():
        for arm in PLAN.arms:
            row = cells.get((arm.name, name))
            if row is not None and row.status != "done":
                arms.setdefault((row.status, one_line(row.reason), head), []).append(arm.label)
    benchmarks: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (status, reason, head), labels in arms.items():
        benchmarks.setdefault((status, reason, tuple(labels)), []).append(head)
    lines = [
        f"- {status}: {reason} ({', '.join(heads)}: {_all_or_some(labels)})"
        for (status, reason, labels), heads in benchmarks.items()
    ]
    return "\n".join(lines)


def _all_or_some(labels: Sequence[str]) -> str:
    return "every line" if len(labels) == len(PLAN.arms) else "; ".join(labels)


def _other_scores(cells: Cells) -> str:
    """What the benchmarks report beside their accuracy."""
    done = {arm.label: done_cells(cells, arm.name) for arm in PLAN.arms}
    known = dict.fromkeys((name, score) for found in done.values() for name in found for score in found[name].others)
    if not known:
        return ""
    heads = [f"{BENCHMARKS[name]} {score}" for name, score in known]
    lines = [[label, *[_other(found.get(name), score) for name, score in known]] for label, found in done.items()]
    lead = "Other scores of the same answers, in %; `strict` is lm-eval's stock number:"
    return f"{lead}\n\n{table(['', *heads], lines)}"


def _other(row: EvaluationRow | None, score: str) -> str:
    if row is None or score not in row.others:
        return ""
    parts = [part for value in row.others[score] for part in (value if isinstance(value, list) else [value])]
    return plus_minus(accuracy(parts), 1, factor=100)


def _cut_answers(cells: Cells) -> str:
    """The share of answers without an end, for the arms that have any."""
    lines = []
    for arm in PLAN.arms:
        done = done_cells(cells, arm.name)
        if any(0 in row.finished for row in done.values()):
            lines.append([arm.label, *[_cut_share(done.get(name)) for name in BENCHMARKS]])
    if not lines:
        return ""
    return "Answers cut at the token limit, in %:\n\n" + table(["", *BENCHMARKS.values()], lines)


def _cut_share(row: EvaluationRow | None) -> str:
    return f"{100 * row.finished.count(0) / len(row.finished):.1f}" if row else ""


def _claims(cells: Cells) -> str:
    head = ["", "claim", "tested", "result", "questions", "p (McNemar)", "verdict"]
    lines = []
    for claim in CLAIMS:
        finding = claim.judge(cells)
        row = [claim.letter, claim.text, claim.tested(PLAN)]
        lines.append([*row, finding.found, finding.questions, finding.p, finding.verdict])
    parts = ["## Claims of the paper's Table 2 and what this run says", HOW_CLAIMS_ARE_JUDGED]
    return "\n\n".join([*parts, table(head, lines, text=(0, 1, 2, 6)), _published_claims()])


def _published_claims() -> str:
    """The differences between the paper's own averages, for each comparison that its table allows."""
    names = {arm.name: arm.published for arm in PLAN.arms}
    compared: dict[str, list[str]] = {}
    for claim in CLAIMS:
        if isinstance(claim, AccuracyClaim) and names[claim.first] and names[claim.second]:
            pair = str(names[claim.first]), str(names[claim.second])
            differences = [_published_difference(*pair, scale) for scale in PUBLISHED_SCALES]
            compared[claim.letter] = [claim.letter, claim.compared(PLAN), *differences]
    head = ["", "difference of averages in points", *PUBLISHED_SCALES.values()]
    lead = "**Published:** what the paper's own averages say, from single runs and without intervals."
    return f"{lead}\n\n{table(head, list(compared.values()), text=(0, 1))}"


def _published_difference(first: str, second: str, scale: str) -> str:
    averages = [published("2", scale=scale, method=name, benchmark="average") for name in (first, second)]
    if not all(averages):
        return "n/a"
    return signed_number(averages[0][0].value - averages[1][0].value, 1)


def _published() -> str:
    heads = {**BENCHMARKS, "average": "Average"}
    lines = []
    for scale, model in PUBLISHED_SCALES.items():
        for arm in PLAN.arms:
            found = {row.benchmark: row.value for row in published("2", scale=scale, method=arm.published)}
            if arm.published and found:
                lines.append([model, arm.label, *[f"{found[name]:.1f}" for name in heads]])
    lead = (
        "**Published** by the authors (arXiv 2604.07023, Table 2), accuracy in %; nothing in this table was "
        "measured here."
    )
    return f"## The paper's numbers\n\n{lead}\n\n{table(['model', '', *heads.values()], lines, text=(0, 1))}"


def _deviations(rows: Sequence[Row], scale: str) -> str:
    benchmarks = {row.benchmark for row in rows if isinstance(row, EvaluationRow)}
    mini = {name for name in benchmarks if name.startswith("mini_")}
    known = [
        *(MINI_DEVIATIONS if mini or not benchmarks else ()),
        *(REAL_DEVIATIONS if benchmarks - mini else ()),
        *(SMALL_DEVIATIONS if scale in SMALL_SCALES else ()),
        *DEVIATIONS,
    ]
    return "\n".join(["## Known deviations from the paper", "", *[f"- {sentence}" for sentence in known]])
