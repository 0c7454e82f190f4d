"""What `marsbench plan` says: what a table or a sweep is made of, the graph of the work behind it.

Estimates, like those that they are made of; nothing is run, read or fetched.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from marsbench.evaluation.benchmarks import benchmark as benchmark_of
from marsbench.line import Line
from marsbench.overview.work import tasks_of
from marsbench.presets import Preset
from marsbench.progress import terminal_table
from marsbench.racing.grid import Grid
from marsbench.running.estimates import Training, decoding_s, questions_of, trainings
from marsbench.running.graph import Known, RunTask
from marsbench.running.plans import TablePlan
from marsbench.studies.study import Study

_WORKERS = 8, 64  # cores, GPUs: into how many pieces answers are cut


# ---- what a table or a sweep is made of -----------------------------------------------------------------------------


def plan_tables(plan: TablePlan, scale: Preset) -> list[Table | str]:
    """What a table will take: its lines, checkpoints and data, as tables and sentences for a terminal."""
    return [
        f"{plan.name} at scale {scale.scale}: {plan.title}",
        _lines_table(plan, scale),
        _training_table(plan, scale),
        _decoding_table(plan, scale),
        *_notes(plan, scale),
    ]


def _lines_table(plan: TablePlan, scale: Preset) -> Table:
    rows = []
    for line in plan.lines:
        options = {name: value for name, value in line.options.items() if name != "draft"}
        if draft := line.options.get("draft"):
            options["draft"] = draft if scale.world else f"{draft.removeprefix('draft_')} of 0.5b"
        rows.append((line.label, line.method, _in_words(options), _checkpoint(line, scale, ", trained")))
    return terminal_table("Lines", ("line", "method", "options", "checkpoint"), rows)


def _checkpoint(line: Line, scale: Preset, trained: str = "") -> str:
    """The checkpoint that a line decodes, in words."""
    if ready := scale.ready_checkpoint(*line.trained):
        return "shipped with marsbench" if scale.ships(ready) else ready
    return f"our own {line.stage}{trained}" if scale.tables_train else "none: skipped unless it is trained first"


def _in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "-"


def _training_table(plan: TablePlan, scale: Preset) -> Table | str:
    stages = trainings(plan, scale)
    if not stages:
        return "Nothing to train."
    data = scale.pretrained.chat_data if scale.pretrained else "the embedded world"
    known = [item.gpu_hours for item in stages if item.gpu_hours is not None]
    steps, tokens = sum(item.steps for item in stages), sum(item.tokens for item in stages)
    whole = Training("together", steps, tokens, sum(known) if known else None)
    rows = [
        (row.stage, f"{row.steps:,}", f"{row.tokens:,}", "-" if row.gpu_hours is None else f"{row.gpu_hours:,.0f}")
        for row in (*stages, whole)
    ]
    return terminal_table(f"Training on {data}, estimated", ("stage", "steps", "tokens", "H200 hours"), rows)


def _decoding_table(plan: TablePlan, scale: Preset) -> Table:
    """A row per benchmark, with every answer as long as it may be: all lines cost the same."""
    lines, benchmarks = len(plan.lines), plan.of(scale.benchmarks)
    title = f"Decoding {lines * len(benchmarks)} cells ({lines} lines x {len(benchmarks)} benchmarks), at most"
    whole, rows = 0, []
    for name in benchmarks:
        questions = questions_of(name, scale, plan.questions)
        tokens = questions * benchmark_of(name).answer_limit(scale.max_new_tokens)
        hours = decoding_s(tokens, scale) / 3600
        whole += lines * tokens
        rows.append((name, f"{questions:,}", f"{tokens:,}", f"{hours:.2f}", f"{lines * hours:.1f}"))
    rows.append(("together", "", f"{whole:,} in all lines", "", f"{decoding_s(whole, scale) / 3600:.1f}"))
    heads = ("benchmark", "questions", "tokens of one line", "hours of one line", "hours of all lines")
    return terminal_table(title, heads, rows)


def _notes(plan: TablePlan, scale: Preset) -> list[str]:
    reckoned = scale.assumptions
    notes = [
        f"Estimates, not measurements. Decoding: every answer {scale.max_new_tokens} tokens long, at "
        f"{reckoned.tokens_per_second:,.0f} tokens per second on one device; {reckoned.source}. Answers that end "
        "earlier and several tokens per forward pass make it shorter; so do lines that are skipped."
    ]
    if scale.pretrained and trainings(plan, scale):
        notes += [
            f"Training tokens: {reckoned.tokens_per_sequence} per sequence, without padding and noisy copies.",
            f"Data: {reckoned.sequences:,} conversations. H200 hours: the paper's for AR SFT and for MARS at this "
            "scale (Appendix A); twice AR SFT's for two passes, and MARS's for block diffusion, which has two streams "
            "too.",
            f"Training needs about {reckoned.training_memory_gib:g} GiB per device and "
            f"{reckoned.training_disk_gib:g} GiB of disk.",
        ]
    needs = f"Measuring needs {scale.memory_gib:g} GiB of free memory and {scale.disk_gib:g} GiB of disk."
    packing = (
        "On a CPU, large weights are packed for decoding, which takes as much memory again as they do: it is counted "
        "in, and left out where there is no room, or with --no-pack."
    )
    return [*notes, needs, *([packing] if scale.pretrained else [])]


def sweep_tables(grid: Grid, scale: Preset) -> list[Table | str]:
    """What a sweep will measure, and how much it decodes at most."""
    rows = [
        (line.name, line.method, _in_words(line.shown), _checkpoint(line, scale), line.options.get("draft", "-"))
        for line in grid.contenders
    ]
    heads = ("contender", "method", "options", "checkpoint", "draft")
    names, reckoned = grid.benchmarks or scale.benchmarks, scale.assumptions
    how = f"at {reckoned.tokens_per_second:,.0f} tokens per second ({reckoned.source})"
    if reckoned.steps_s is not None:
        ours, library = (1000 * reckoned.steps_s[name] for name in ("ours", "library"))
        how = f"at a token for a forward, {ours:.1f} ms each ({library:.0f} ms in a loop of another library)"
    cells = len(grid.contenders) * len(grid.batch_sizes)
    return [
        f"A sweep at scale {scale.scale}",
        terminal_table("Contenders, each at every batch size", heads, rows),
        f"{cells} cells: {len(grid.contenders)} contenders at batch sizes {', '.join(map(str, grid.batch_sizes))}.",
        f"{grid.prompts} prompts of {', '.join(names)}; one lap that is watched and {grid.repeats} that are timed.",
        f"At most {grid.tokens(scale):,} tokens, every answer as long as it may be: "
        f"{grid.seconds(scale) / 3600:.1f} hours {how}. An estimate, not a measurement.",
    ]


# ---- the work behind some studies -----------------------------------------------------------------------------------


def work_tables(studies: Sequence[Study], scale: Preset, *, gpus: int = 1) -> list[Table | str]:
    """The work from nothing, and what waits for what; a training takes so many GPUs."""
    tasks = tasks_of(studies, scale, Known(scale), workers=_WORKERS[scale.pretrained is not None], gpus=gpus)
    listed, groups, rows = {task.name: task.listed for task in tasks}, defaultdict[str, list[RunTask]](list), []
    for task in tasks:
        groups[task.listed].append(task)
    for title, some in groups.items():
        after = dict.fromkeys(listed[name] for task in some for name in task.after)
        shown = ", ".join(after) if len(after) <= 2 else f"{len(after)} of the above"
        rows.append((title, shown or "-", str(len(some)), _hours_of(some)))
    rows.append(("together", "", str(len(tasks)), _hours_of(tasks)))
    return [
        terminal_table("The work", ("what", "after", "pieces", "device hours"), rows),
        f"All of it from nothing, every answer as long as it may be: {_hours_of(tasks, 1)} hours of one device. An "
        "estimate, not a measurement.",
    ]


def _hours_of(tasks: Sequence[RunTask], digits: int = 2) -> str:
    return f"{sum(task.seconds * task.gpus for task in tasks) / 3600:,.{digits}f}"
