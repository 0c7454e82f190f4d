"""The page on a real model: its answers, how many tokens a forward gives, who agrees with whom, and the clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from marsbench.fetching.models import described, is_known
from marsbench.findings.cells import Cells, columns, done_cells, latest_cells, latest_stages
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import (
    A_A,
    SweepCells,
    printed_ratio,
    printed_speed_up,
    speed_of,
    speed_ratio,
    speed_up,
)
from marsbench.methods import METHODS
from marsbench.racing.position_law import position_law
from marsbench.rendering.claims import claims_section, plainly
from marsbench.rendering.claims import tally as claims_tally
from marsbench.rendering.figures import Labelled, labelled_figure
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.measured import measured_section, speed_cell, speed_table
from marsbench.rendering.page import laid_out
from marsbench.rows.kinds import EvaluationRow, Row, StepTimeRow, SweepRow, TrainingRow, TrainingSpeedRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.curves import after_training
from marsbench.statistics.intervals import mean_of_benchmarks
from marsbench.studies.real_model import lines as entered
from marsbench.studies.real_model.lines import CLAIMS, IN_BF16, OUTSIDER, OWN_AR, PLAN
from marsbench.studies.study import Study, ours

if TYPE_CHECKING:
    from marsbench.running.run import Run

FIGURE = "figures/real-model_speed"  # beside the page, less the extension
HOW_LINES_DECODE = (
    "Verified lines promise the tokens of AR decoding of their own checkpoint, those with an adapter the untouched "
    "base's; prompt lookup drafts what followed the last tokens earlier in the text; together with masks it goes on "
    "behind their guesses, and drafts alone, in a forward without masks, where they are unsure. Lines with tau accept "
    "what masks say while their confidence reaches tau."
)
HOW_AGREEMENT_IS_COUNTED = (
    "Answers with the very tokens of AR decoding of the same checkpoint, of those asked; `base` counts those with the "
    "tokens of the base, which nobody has trained."
)
HOW_TRAINING_IS_TIMED = (
    "How fast each objective trains on the machine by itself, from the base, each in a process of its own that nothing "
    "runs beside: the median over steps, the slowest and the fastest, and the most memory that the process ever held."
)
_STEPS = 8  # of each stage's training, to be timed
FAR = 2_000_000  # tokens of training, to which the curve is drawn on
DEVIATIONS = (
    "Trainings are of minutes, on the model's own answers to training prompts: docs/your-own-model.md has the commands "
    "that distil, train and measure. The first questions of each benchmark are asked, and few are raced.",
    "Of the adapters only the one with a draft head races; the others are shown by their tokens per forward pass.",
)


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells, sweeps = latest_cells(rows), SweepCells.by_dtype(rows)
    speeds = {row.stage: row for row in rows if isinstance(row, TrainingSpeedRow)}.values()
    trained = {stage.stage: row for stage, row in latest_stages(rows).items() if row.status == "done"}
    figure = f"![Tokens per second over ar by line, type of weights and batch size]({FIGURE}.png)"
    answered = speed_table(cells, PLAN), _agreement(cells, PLAN)
    in_bf16 = _agreement(cells, IN_BF16)
    return {
        "in_part": _in_part(cells, sweeps),
        "base": _base(rows, cells),
        "answers": "\n".join([*_fastest(sweeps), *_outsider(sweeps), *_answers(cells, seeds)]),
        "figure": figure if sweeps else "",
        "brief": _clock_in_brief(sweeps),
        "kinds": SweepCells.of(rows).steps_in_words,
        "races": paragraphs(*[_race(*named) for named in sweeps.items()]),
        "few_groups": _few_groups(sweeps),
        "claims": claims_section(seeds, PLAN, CLAIMS, scale),
        "measured": measured_section(cells, PLAN, seeds, HOW_LINES_DECODE, *answered),
        "in_bf16": in_bf16 and paragraphs(speed_table(cells, IN_BF16), in_bf16),
        "curve": _by_tokens_trained(cells, trained),
        **_law(cells, trained),
        **_adapter_size(trained),
        "timed": _training_speed(speeds),
    }


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    sweeps = SweepCells.by_dtype(rows)
    series = {
        f"{dtype}, batch {size}": {
            row.contender: ratio for row in sweep.at(size) if row.contender != A_A and (ratio := speed_up(row))
        }
        for dtype, sweep in sweeps.items()
        for size in sweep.batch_sizes
    }
    return labelled_figure([Labelled("tokens per second over ar", series)], reports_dir / FIGURE) if series else []


def tally(seeds: BySeed) -> str:
    """The verdicts, and the best lossless setting by the clock at the smallest batch size."""
    said = [claims_tally([claim.over(seeds.values()) for claim in CLAIMS])]
    for dtype, sweep in SweepCells.by_dtype(next(iter(seeds.values()))).items():
        if best := _best_lossless(sweep):
            said.append(f"fastest lossless in {dtype}, batch {best.batch_size}: {printed_speed_up(best)} `ar`")
    return "; ".join(said)


def in_brief(rows: Sequence[Row]) -> str:
    """Its speeds at the smallest batch in a sentence, for pages on the whole paper; empty without a race."""
    said = []
    for dtype, sweep in SweepCells.by_dtype(rows).items():
        size = min(sweep.batch_sizes)
        lookup, adapted = (_best_lossless(sweep, stages) for stages in ((entered.BASE,), entered.ADAPTED))
        if lookup and adapted:
            said.append(
                f"in {dtype} the best line with an adapter is {printed_speed_up(adapted)} times as fast as `ar`, "
                f"and prompt lookup alone {printed_speed_up(lookup)} times"
            )
            if outsider := sweep.done.get((OUTSIDER, size)):
                ratio = printed_ratio(speed_ratio(max(lookup, adapted, key=speed_of), outsider))
                said.append(f"the faster of the two is {ratio} times as fast as llama.cpp with the same weights")
    return f"At batch {size}, lossless: {'; '.join(said)}." if said else ""


def _in_part(cells: Cells, sweeps: Mapping[str, SweepCells]) -> str:
    lacking, short = (
        [line.label for line in plan.lines if done_cells(cells, line.name).keys() < columns(plan).keys()]
        for plan in (PLAN, IN_BF16)
    )
    raced = [{name for name, _ in sweep.done} for sweep in sweeps.values()]
    missing = [f"answers of {', '.join(lacking)}"] if lacking else []
    missing += ["answers in bfloat16"] if short and "bfloat16" in sweeps else []
    if not raced or not all(names >= {*entered.grid_names()} for names in raced):
        missing.append("parts of the race" if any(raced) else "the race")
    return f"**In part.** Not measured yet: {'; '.join(missing)}." if missing else ""


def _base(rows: Sequence[Row], cells: Cells) -> str:
    """Which of the packaged models the rows are of, where they are of one, and what it gets right."""
    bases = sorted({str(row.provenance["base"]) for row in rows if row.provenance.get("base")})
    how = {
        base: f", whose weights were quantised ({described(base)[0].quantised}) and are dequantised here"
        for base in bases
        if is_known(base) and base.endswith("-gguf")
    }
    named = ", ".join(f"`{base}`{how.get(base, '')}" for base in bases)
    said = [f"The base is {named}."] if bases else []
    if answers := [right for row in done_cells(cells, entered.AR.name).values() for right in row.correct]:
        right = f"{sum(answers):g} of {len(answers):,} questions"
        said.append(f"It answers {right} right, so accuracy says little here.")
    return " ".join(said)


# ---- the answer ----


def _fastest(sweeps: Mapping[str, SweepCells]) -> Iterator[str]:
    for dtype, sweep in sweeps.items():
        best = _best_lossless(sweep)
        if best is not None and (ar := sweep.done.get(("ar", best.batch_size))):
            yield (
                f"- In {dtype} at batch {best.batch_size}, the fastest line that gives the base's very tokens is "
                f"{best.contender}: {printed_speed_up(best)} times as fast as `ar`, which is "
                f"{printed_ratio(speed_up(ar, 'hf-generate'))} times as fast as `hf-generate`."
            )


def _outsider(sweeps: Mapping[str, SweepCells]) -> Iterator[str]:
    """llama.cpp beside `ar` and the fastest lossless line, in the types of weights that it raced in."""
    said = []
    for dtype, sweep in sweeps.items():
        best = _best_lossless(sweep)
        if best is not None and (plain := sweep.done.get((OUTSIDER, best.batch_size))):
            others = sweep.at(
                best.batch_size, lambda row: row.contender.startswith(OUTSIDER) and "quantised" in row.options
            )
            smaller = [f"{printed_speed_up(row)} with weights in {row.options['quantised']}" for row in others]
            times = ", ".join([f"{printed_speed_up(plain)} times as fast as `ar`", *smaller])
            said.append(
                f"in {dtype} {times}; the fastest lossless line is "
                f"{printed_ratio(speed_ratio(best, plain))} times as fast as it"
            )
    if said:
        yield f"- llama.cpp with the same weights is {'. It is '.join(said)}."


def _answers(cells: Cells, seeds: BySeed) -> Iterator[str]:
    """What drafts best, and whether what is lossless is so in bf16 too."""
    for claim in CLAIMS:
        if claim.lines == entered.ANSWERED and (found := claim.over(seeds.values())).estimate is not None:
            yield f"- {plainly(found)}."
    if said := _promised(cells, IN_BF16):
        yield f"- In bfloat16 as well a verified answer is the base's: {said[0].lower()}{said[1:]}."


_LEFT_OUT = {A_A, *entered.OUTSIDERS} - {OUTSIDER}  # of the first table; they stand by the clock


def _clock_in_brief(sweeps: Mapping[str, SweepCells]) -> str:
    names = dict.fromkeys(name for sweep in sweeps.values() for name in sweep.names if name not in _LEFT_OUT)
    heads = [f"{dtype}, {head}" for dtype, sweep in sweeps.items() for head in sweep.heads]
    found = {name: [row for sweep in sweeps.values() for row in sweep.by_batch(name)] for name in names}
    lines = [[name, *[printed_speed_up(row) if row else "-" for row in rows]] for name, rows in found.items()]
    return table(["tokens/s over `ar`", *heads], lines)


# ---- answers ----


def _agreement(cells: Cells, plan: TablePlan) -> str:
    """Who says what AR decoding of the same checkpoint says, and who says what the base says, the plan's first line."""
    base, *others = plan.lines
    lines, names = [], columns(plan)
    for line in others:
        found, own = done_cells(cells, line.name), done_cells(cells, OWN_AR[line.name])
        if found:
            shown = ["" if line.name == OWN_AR[line.name] else _counted(*_same(found, own, [name])) for name in names]
            lines.append([line.label, *shown, _counted(*_same(found, done_cells(cells, base.name), names))])
    if not (said := _promised(cells, plan)):
        return ""
    return paragraphs(f"{HOW_AGREEMENT_IS_COUNTED} {said}.", table(["", *names.values(), "base"], lines))


def _promised(cells: Cells, plan: TablePlan) -> str:
    """How many answers are those of AR decoding, of those that are promised to be; empty without any."""
    found = [
        _same(done, done_cells(cells, OWN_AR[line.name]), columns(plan))
        for line in plan.lines
        if METHODS[line.method].lossless and line.name != OWN_AR[line.name] and (done := done_cells(cells, line.name))
    ]
    same, asked = (sum(counts) for counts in zip(*found, strict=True)) if found else (0, 0)
    said = f"Of {asked:,} answers that a method promises to be those of AR decoding, {same:,} are"
    return said if found else ""


def _same(
    one: Mapping[str, EvaluationRow], other: Mapping[str, EvaluationRow], names: Iterable[str]
) -> tuple[int, int]:
    """How many answers of two lines on some benchmarks have the same tokens, and how many are known of both."""
    pairs = [(one[name].digests, other[name].digests) for name in names if name in one and name in other]
    known = [(a, b) for first, second in pairs if first and second for a, b in zip(first, second, strict=True)]
    return sum(a == b for a, b in known), len(known)


def _counted(same: int, known: int) -> str:
    return f"{same:,} of {known:,}" if known else "n/a"


# ---- what longer training buys ----


def _by_tokens_trained(cells: Cells, trained: Mapping[str, TrainingRow]) -> str:
    """Tokens per forward pass, verified in groups of four, by the tokens that the masks were trained on."""
    lines = [
        [f"`{line.stage}`", f"{row.tokens:,}", *[speed_cell(done.get(name)) for name in columns(PLAN)]]
        for line in entered.CURVE
        if (row := trained.get(line.stage)) and (done := done_cells(cells, line.name))
    ]
    return table(["", "tokens trained", *columns(PLAN).values()], lines)


def _law(cells: Cells, trained: Mapping[str, TrainingRow]) -> dict[str, str]:
    """Where training on would lead the lines with a draft head; all of it empty without two trainings of them."""
    stages = [(row.tokens, line) for line in entered.HEADED_CURVE if (row := trained.get(line.stage))]
    found = {tokens: done_cells(cells, line.name) for tokens, line in stages}
    curve = {tokens: done for tokens, done in found.items() if done.keys() >= columns(PLAN).keys()}
    if len(curve) < 2:
        return dict.fromkeys(("doubling", "far_tokens", "far"), "")
    points = [{tokens: done[name].answers for tokens, done in curve.items()} for name in columns(PLAN)]
    now, doubled, far = (
        mean_of_benchmarks([after_training(of_one, tokens) for of_one in points])
        for tokens in (max(curve), 2 * max(curve), FAR)
    )
    doubling = f"{doubled.value - now.value:.2f}"
    return {"doubling": doubling, "far_tokens": f"{FAR:,}", "far": printed_ratio(far)}


def _adapter_size(trained: Mapping[str, TrainingRow]) -> dict[str, str]:
    """What an adapter takes on the disk; it is kept in fp32."""
    if not trained.keys() >= {entered.ADAPTER, entered.MARS}:
        return {"mebibytes": "", "share": ""}
    own, whole = (trained[stage].parameters for stage in (entered.ADAPTER, entered.MARS))
    return {"mebibytes": f"{4 * own / 2**20:.0f}", "share": f"{100 * own / whole:.1f}"}


def _training_speed(speeds: Iterable[TrainingSpeedRow]) -> str:
    lines = []
    for row in speeds:
        rates = sorted(tokens / seconds for tokens, seconds in zip(row.tokens, row.seconds, strict=True))
        peak = "unknown" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
        lines.append(
            [f"`{row.stage}`", f"{median(rates):,.0f}", f"{rates[0]:,.0f} to {rates[-1]:,.0f}", peak, str(len(rates))]
        )
    head = ["", "tokens/s", "of a step", "peak, GiB", "steps timed"]
    return paragraphs(HOW_TRAINING_IS_TIMED, table(head, lines)) if lines else ""


# ---- the clock ----


def _race(dtype: str, sweep: SweepCells) -> str:
    """Speed-ups by batch size, tokens per forward, and how near to the memory's speed each comes."""
    read = sweep.step_times.read if sweep.step_times else 0.0
    head = [text for size in sweep.heads for text in (size, "tokens/forward", "as the base's `ar`", "roofline, %")]
    lines = [[name, *[text for row in sweep.by_batch(name) for text in _raced(row, read)]] for name in sweep.names]
    return paragraphs(f"### In {dtype}", table(["", *head], lines), _a_step(sweep.step_times))


def _a_step(row: StepTimeRow | None) -> str:
    """How near a step of AR decoding comes to the memory's speed without prompts, and what more positions cost."""
    if row is None or not row.weight_bytes:
        return ""
    law = position_law(row)
    alone = law.seconds_at(1)
    share = 100 * row.weight_bytes / alone / row.read
    costs = [f"{law.seconds_at(count) / alone:.2f} times as long over {count}" for count in (4, 8, 16)]
    return (
        f"A step of `ar` for one row, prompts left out, takes {1e3 * alone:.1f} ms: its weights are read at "
        f"{share:.0f} % of the {row.read / 1e9:.0f} GB/s that reading moves. A step takes {', '.join(costs)} positions."
    )


def _few_groups(sweeps: Mapping[str, SweepCells]) -> str:
    """What it buys to forward two groups of masks, not one behind every draft, over the better of all and one."""
    said = []
    for dtype, sweep in sweeps.items():
        few, *others = (
            sweep.done.get((line.label, min(sweep.batch_sizes))) for line in (entered.HEADED_FEW, *entered.AROUND_FEW)
        )
        if few is not None and (known := [row for row in others if row is not None]):
            said.append(f"{printed_ratio(speed_ratio(few, max(known, key=speed_of)))} in {dtype}")
    return " and ".join(said)


def _raced(row: SweepRow | None, read: float) -> list[str]:
    if row is None:
        return ["not run", "", "", ""]
    traffic = row.weights_read_per_second
    return [
        printed_speed_up(row),
        f"{row.tokens_per_forward:.2f}",
        f"{row.same_as['ar']} of {row.prompts}" if "ar" in row.same_as else "",
        f"{100 * traffic / read:.0f}" if traffic and read else "n/a",
    ]


def _best_lossless(sweep: SweepCells, stages: Collection[str] = (entered.BASE, *entered.ADAPTED)) -> SweepRow | None:
    """The fastest at the smallest batch whose tokens are promised to be the base's; AR decoding itself left out."""
    found = [row for row in sweep.at(min(sweep.batch_sizes)) if row.is_lossless and row.stage in stages]
    return max([row for row in found if row.method not in ("ar", "hf-generate")], key=speed_of, default=None)


def _races_and_speeds(run: Run) -> list[Row]:
    """A race in fp32, which keeps every promise to the token, and in bf16 where the machine computes in it."""
    import torch

    from marsbench.forward.fastest import reads_bf16
    from marsbench.racing.sweep import Sweep
    from marsbench.running.cells import Table
    from marsbench.running.training_cost import training_speed_rows

    in_bf16 = torch.cuda.is_available() or reads_bf16()
    answered = Table(run, IN_BF16).rows() if in_bf16 else []
    dtypes = ["float32", *(["bfloat16"] if in_bf16 else [])]
    raced = [row for dtype in dtypes for row in Sweep(run, entered.grid_at(run.scale, dtype)).rows()]
    return [*answered, *raced, *(training_speed_rows(run, _STEPS) if run.scale.pretrained else [])]


STUDY = Study(
    key="real-model",
    name="Real model",
    asks="what does MARS do for a model that people use, on hardware that everybody has?",
    place=7,
    in_paper=False,
    plan=PLAN,
    measure=_races_and_speeds,
    timed=True,
    sections=laid_out(__package__, slots, PLAN, DEVIATIONS),
    figures=draw,
    tally=tally,
    claims=ours("real-model", CLAIMS),
)
