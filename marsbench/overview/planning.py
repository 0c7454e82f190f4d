"""What `marsbench plan` says: the lines of a table or a race, and the work behind them with its estimated hours."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.table import Table

from marsbench.line import Line
from marsbench.overview.work import tasks_of
from marsbench.presets import Preset
from marsbench.progress import terminal_table
from marsbench.racing.grid import Grid
from marsbench.running.graph import Known, RunTask
from marsbench.running.plans import TablePlan, is_ours, questions_of
from marsbench.studies.study import Study


def plan_tables(plan: TablePlan, scale: Preset) -> list[Table | str]:
    """The lines of a table, what they are asked, and what its hours assume, as tables and sentences for a terminal."""
    asked = {name: questions_of(name, scale, plan.questions) for name in plan.of(scale.benchmarks)}
    reckoned = scale.assumptions
    said = [
        f"{len(plan.lines)} lines on {', '.join(f'{name} ({count:,} questions)' for name, count in asked.items())}.",
        f"Estimates, not measurements. Decoding: every answer {scale.max_new_tokens} tokens long, at "
        f"{reckoned.tokens_per_second:,.0f} tokens per second on one device; {reckoned.source}. Answers that end "
        "earlier and several tokens per forward pass make it shorter; so do lines that are skipped.",
    ]
    if scale.pretrained and any(is_ours(stage, scale) for stage in plan.stages):
        said += [
            f"Training on {reckoned.sequences:,} conversations of {scale.pretrained.chat_data}. H200 hours are the "
            "paper's for AR SFT and MARS (Appendix A); twice AR SFT's for two passes, and MARS's for block diffusion, "
            "which has two streams too.",
            f"Training needs about {reckoned.training_memory_gib:g} GiB per device and "
            f"{reckoned.training_disk_gib:g} GiB of disk.",
        ]
    said += [f"Measuring needs {scale.memory_gib:g} GiB of free memory and {scale.disk_gib:g} GiB of disk."]
    if scale.pretrained:
        said += ["On a CPU, that counts in as much memory again for packed weights, which --no-pack leaves out."]
    return [f"{plan.name} at scale {scale.scale}: {plan.title}", _lines_table("Lines", plan.lines, scale), *said]


def _lines_table(title: str, lines: Iterable[Line], scale: Preset) -> Table:
    rows = []
    for line in lines:
        options = ", ".join(f"{name} {value}" for name, value in line.shown.items())
        checkpoint = f"our own {line.stage}" if scale.tables_train else "none: skipped unless it is trained first"
        if ready := scale.ready_checkpoint(*line.trained):
            checkpoint = "shipped with marsbench" if scale.ships(ready) else ready
        rows.append((line.label, line.method, options or "-", checkpoint, line.options.get("draft", "-")))
    return terminal_table(title, ("line", "method", "options", "checkpoint", "draft"), rows)


def sweep_tables(grid: Grid, scale: Preset) -> list[Table | str]:
    names, reckoned = grid.benchmarks or scale.benchmarks, scale.assumptions
    how = f"at {reckoned.tokens_per_second:,.0f} tokens per second ({reckoned.source})"
    if reckoned.steps_s is not None:
        ours, library = (1000 * reckoned.steps_s[name] for name in ("ours", "library"))
        how = f"at a token for a forward, {ours:.1f} ms each ({library:.0f} ms in a loop of another library)"
    return [
        f"A sweep at scale {scale.scale}",
        _lines_table("Contenders, each at every batch size", grid.contenders, scale),
        f"{len(grid.contenders) * len(grid.batch_sizes)} cells: {len(grid.contenders)} contenders at batch sizes "
        f"{', '.join(map(str, grid.batch_sizes))}.",
        f"{grid.prompts} prompts of {', '.join(names)}; one lap that is watched and {grid.repeats} that are timed.",
        f"At most {grid.tokens(scale):,} tokens, every answer as long as it may be: "
        f"{grid.seconds(scale) / 3600:.1f} hours {how}. An estimate, not a measurement.",
    ]


def work_tables(studies: Sequence[Study], scale: Preset) -> list[Table | str]:
    """The work behind some studies from nothing, and what waits for what."""
    cores, gpus = 8, 64  # into how many pieces answers are cut
    tasks = tasks_of(studies, scale, Known(scale), workers=gpus if scale.pretrained else cores)
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
    return f"{sum(task.seconds for task in tasks) / 3600:,.{digits}f}"
