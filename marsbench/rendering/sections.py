"""The sections of every report on trained checkpoints: title, training, how the page was made, known deviations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from marsbench.findings.cells import (
    AR_OBJECTIVE,
    MARS_OBJECTIVE,
    latest_cells,
    latest_stages,
    latest_step_cost,
    why_none,
)
from marsbench.findings.in_words import duration, with_interval
from marsbench.findings.seeds import BySeed
from marsbench.line import TrainedStage
from marsbench.paper import published
from marsbench.presets import DEFAULT_SCALE, option_for, preset
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sessions import session_of
from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, StepTimeRow, SweepRow, TrainingRow, TrainingSpeedRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import median_ratio
from marsbench.world import modelled_on

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
_TRAINED_HERE = "The model has about a million parameters and is trained from scratch on the spot; it is not Qwen2.5."
_SHIPPED = "The model has about a million parameters; it is fine-tuned from a base that is shipped, and not Qwen2.5."
SMALL_DEVIATIONS: tuple[str, ...] = (
    "SFT conversations are generated, not taken from Dolci-Instruct-SFT.",
    "Answers end at a limit below the paper's 256 tokens.",
)
NO_SFT_DEVIATION = (
    '"MARS w/o SFT loss" drops that loss and changes nothing else (`ar_weight = 0`); the authors\' released '
    "ablation also switches on 1/t weights. So the paper's number for it has no line of this page beside it; the page "
    "of Table 3 measures both ablations."
)
BOTH_ABLATIONS_DEVIATION = (
    '"MARS w/o SFT loss, as released" also weighs every sequence by 1/t for a random t, as the authors\' released '
    'ablation does; "MARS w/o SFT loss" drops that loss and changes nothing else (`ar_weight = 0`).'
)
COMMON_DEVIATIONS: tuple[str, ...] = (
    "Figures and folded tables are of one training seed: their intervals cover the draw of questions, not the "
    "luck of training.",
    "Tokens per forward pass are counted per answer, up to and with EOS; nothing after it counts.",
)


def deviations_section(rows: Sequence[Row], scale: str, own: Sequence[str]) -> str:
    """All known deviations behind rows of one scale; `own` are those of this page alone."""
    shown = preset(scale)
    model = _SHIPPED if shown.ready_checkpoint("base", None) else _TRAINED_HERE
    benchmarks = {row.benchmark for row in rows if isinstance(row, EvaluationRow)}
    mini = {name for name in benchmarks if modelled_on(name) != name}
    known = [
        *(MINI_DEVIATIONS if mini or not benchmarks else ()),
        *(REAL_DEVIATIONS if benchmarks - mini else ()),
        *((model, *SMALL_DEVIATIONS) if shown.world else ()),
        *own,
        *COMMON_DEVIATIONS,
    ]
    return "\n".join(["## Known deviations from the paper", "", *[f"- {sentence}" for sentence in known]])


def title(plan: TablePlan, scale: str) -> str:
    """What a page is called."""
    first = plan.title.split()[0]
    words = plan.title if first.isupper() else f"{plan.title[0].lower()}{plan.title[1:]}"  # "MARS" stays as it is
    return f"# {plan.name} at scale {scale}: {words}"


def about(scale: str, seeds: BySeed) -> str:
    """What a small scale's results are not, which training seeds the page is of, and how to read it."""
    caveat = f"Results at scale {scale} test the mechanism; they are not Qwen numbers." if preset(scale).world else ""
    return " ".join(filter(None, [caveat, seeds_in_words(seeds), reading(scale)]))


def reading(scale: str) -> str:
    """Where it stands how intervals, verdicts and p come about."""
    return _guide(scale, "How to read the numbers and verdicts", "reading-reports.md#intervals-and-verdicts")


def racing(scale: str) -> str:
    """Where it stands how contenders are timed."""
    return _guide(scale, "How a race is measured", "sweeps.md#how-a-race-is-measured")


def _guide(scale: str, words: str, place: str) -> str:
    return f"[{words}.]({'..' if scale == DEFAULT_SCALE else '../..'}/docs/{place})"


def seeds_in_words(seeds: BySeed) -> str:
    """Which training seed a page's tables show and which verdicts are of; empty where there is one seed."""
    if len(seeds) < 2:
        return ""
    shown, every = next(iter(seeds)), ", ".join(map(str, sorted(seeds)))
    return (
        f"Verdicts are of all training seeds that have what is compared, of {every}; figures and folded tables are of "
        f"training seed {shown}."
    )


def behind(rows: Sequence[Row], plan: TablePlan, scale: str, deviations: Sequence[str] = ()) -> dict[str, str]:
    """What stands last on a page on trained checkpoints: training, provenance, known deviations."""
    return {
        "training": training_section(rows, plan),
        "how": how_section(rows, plan, scale),
        "deviations": deviations_section(rows, scale, deviations),
    }


def training_section(rows: Sequence[Row], plan: TablePlan) -> str:
    """What each stage of the plan took, and what a MARS step costs where the plan asks for it."""
    trained = latest_stages(rows)
    head = ["stage", "block size", "steps", "tokens", "wall time", "final loss", "parameters"]
    stages = _stages(plan, trained)
    lines = [_training_line(stage, trained.get(stage)) for stage in stages]
    known = [(stage, trained[stage]) for stage in stages if stage in trained]
    reasons = [f"- {_in_words(stage, plan)}: {why_none(row)}" for stage, row in known if row.status != "done"]
    cost = _step_cost(latest_step_cost(rows)) if plan.step_cost else ""
    return paragraphs("## Training", table(head, lines), "\n".join(reasons), cost)


def _stages(plan: TablePlan, trained: Iterable[TrainedStage]) -> list[TrainedStage]:
    """The stages behind a table: those trained only to start another from, then the plan's."""
    return [*[stage for stage in trained if stage not in plan.stages], *plan.stages]


def _in_words(trained: TrainedStage, plan: TablePlan) -> str:
    """A stage, with its block size where the plan has it at several."""
    several = sum(other.stage == trained.stage for other in plan.stages) > 1
    return f"{trained.stage}, B = {trained.block_size}" if several else trained.stage


def _training_line(trained: TrainedStage, row: TrainingRow | None) -> list[str]:
    size = "" if trained.block_size is None else str(trained.block_size)
    if row is None or row.status != "done":
        return [trained.stage, size, "not run" if row is None else row.status, "", "", "", ""]
    loss = f"{row.loss:.3f}" if isfinite(row.loss) else "diverged"
    numbers = f"{row.steps:,}", f"{row.tokens:,}", duration(row.seconds), loss, f"{row.parameters:,}"
    return [trained.stage, size, *numbers]


def _step_cost(row: StepCostRow | None) -> str:
    """What a MARS step costs and must hold, in AR steps, beside what the paper's training hours come to."""
    hours = {(item.method, item.scale): item.value for item in published("A", metric="train_h200_hours")}
    ratios = sorted(hours["mars", scale] / hours["ar_sft", scale] for scale in ("0.5b", "7b"))
    paper = f"Published: {ratios[0]:.1f} and {ratios[1]:.1f} times, from the GPU hours of whole runs."
    if row is None or row.status != "done":
        return f"Cost of a MARS step: {why_none(row)}. {paper}"
    cost, memory = (median_ratio(of[MARS_OBJECTIVE], of[AR_OBJECTIVE]) for of in (row.seconds, row.memory))
    return (
        f"A MARS step costs {with_interval(cost, 2)} times an AR step: the median of "
        f"{cost.n} paired ratios on the same batches, with a bootstrap 95 % interval. {paper}"
        f" It holds {with_interval(memory, 2)} times the memory: weights, gradients, moments, "
        "and what the forward pass keeps for the backward pass, on the same batches."
    )


def how_section(rows: Sequence[Row], plan: TablePlan, scale: str) -> str:
    """Command, code, machine and time behind the rows that the report shows."""
    shown: list[Row] = [
        *latest_cells(rows).values(),
        *latest_stages(rows).values(),
        *[cost for cost in [latest_step_cost(rows)] if cost],
        *[row for row in rows if isinstance(row, SweepRow | StepTimeRow | TrainingSpeedRow)],
    ]
    limits = {"tokens per answer at most": _token_limits(rows)}
    seed = next((row.provenance.get("seed") for row in shown), 0)
    facts = facts_section(shown, command(session_of(plan.key), scale, seed or 0), limits)
    return paragraphs(facts, "Wall time by stage:", _wall_time(rows, plan))


def command(session: str, scale: str, seed: int = 0) -> str:
    """How a session makes its page at a scale, and at a training seed."""
    options = option_for(scale) + (f" -- --seed {seed}" if seed else "")
    first, *more = f"{session}{options}".split(" -- ")
    return f"`nox -s {' -- '.join([first, ' '.join(more)]) if more else first}`"


def facts_section(rows: Sequence[Row], how: str, more: Mapping[str, str] | None = None) -> str:
    """Command, code and machine behind rows; facts that are empty are left out."""
    known = [row.provenance for row in rows]
    dates = sorted(str(origin["started"]) for origin in known if origin.get("started"))
    facts = {
        "command": how,
        **{name: "; ".join(sorted({*map(read, known)} - {""})) for name, read in _FACTS.items()},
        "measured": " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "",
        **(more or {}),
    }
    lines = [[name, value] for name, value in facts.items() if value]
    return paragraphs("## How this was made", table(["", ""], lines, text=(0, 1)))


def _text(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda provenance: str(provenance[name]) if provenance.get(name) is not None else ""


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = str(provenance.get("commit") or "")[:12]
    return f"{commit} with uncommitted changes" if commit and provenance.get("dirty") else commit


def _hardware(provenance: Mapping[str, Any]) -> str:
    hardware = dict(provenance.get("hardware") or {})
    cores, memory = hardware.get("cores"), hardware.get("memory_gib")
    counts = f"{cores} cores" if cores else "", f"{memory:.0f} GiB memory" if memory else ""
    parts = [hardware.get("cpu"), *counts, hardware.get("gpu") or ("no GPU" if "gpu" in hardware else "")]
    return ", ".join(str(part) for part in parts if part)


_FACTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "commit": _commit,
    "what differed": _text("differs"),
    "seed": _text("seed"),
    "hardware": _hardware,
    "driver": lambda provenance: ", ".join(sorted({str(gpu["driver"]) for gpu in provenance.get("gpus") or ()})),
    "threads": _text("threads"),
    "waiting threads (`OMP_WAIT_POLICY`)": _text("wait_policy"),
    "platform": _text("platform"),
    "Python": _text("python"),
    "versions": lambda provenance: ", ".join(map(" ".join, sorted(dict(provenance.get("versions") or {}).items()))),
}


def _token_limits(rows: Iterable[Row]) -> str:
    """One number where all benchmarks have the same limit, else each benchmark's own."""
    done = [row for row in latest_cells(rows).values() if row.status == "done"]
    limits = sorted({(row.max_new_tokens, row.benchmark) for row in done})
    if len({limit for limit, _ in limits}) == 1:
        return str(limits[0][0])
    return ", ".join(f"{benchmark} {limit}" for limit, benchmark in limits)


def _wall_time(rows: Sequence[Row], plan: TablePlan) -> str:
    trained, cells = latest_stages(rows), latest_cells(rows)
    decoded_by = {line.name: line.trained for line in plan.lines}
    spent = {
        _in_words(stage, plan): (
            trained[stage].seconds if stage in trained else 0.0,
            sum(row.seconds for row in cells.values() if decoded_by.get(row.arm) == stage),
        )
        for stage in _stages(plan, trained)
    }
    spent["total"] = (sum(train for train, _ in spent.values()), sum(evaluate for _, evaluate in spent.values()))
    lines = [[name, *map(duration, (train, evaluate, train + evaluate))] for name, (train, evaluate) in spent.items()]
    return table(["stage", "training", "evaluation", "together"], lines)
