"""Looking around before anything runs: `doctor`, `gpu-check` and `list`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands.shared import Start, print_table, starts
from marsbench.errors import check_known


@starts("scale", "data_dir", "output")
def doctor(start: Start) -> None:
    """Check this machine before a long run.

    Checks packages, device, other busy processes, memory, disk, output folder, benchmark data and task files, and says
    how to correct each problem. The exit status is 2 if a run would fail, else 0 (a run may then skip some cells).
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from marsbench.doctor import checks

    findings, table = checks(start.scale, start.output, start.data_dir), Table("check", "", "finding", box=None)
    for check in findings:
        color = {"ok": "green", "warn": "yellow", "fail": "red"}[check.ok]
        mend = f"\n[bold]fix:[/bold] {escape(check.fix)}" if check.ok != "ok" else ""
        table.add_row(check.name, f"[{color}]{check.ok}", escape(check.finding) + mend)
    Console().print(table)
    if any(check.ok == "fail" for check in findings):
        raise typer.Exit(2)


@starts("output")
def gpu_check(
    start: Start,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer questions, shorter answers, one batch size.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Small checks on the CPU; writes nothing.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Name of a check; repeatable [default: all].")] = None,
) -> None:
    """Check whether this GPU computes what a CPU does, how fast it is, and what fits.

    Right: methods answer as on the CPU, graphs equal eager steps, gradients are finite, trainings resume. Fast:
    attention, training, and steps compared with the time to read the weights. Fits: models of the paper's sizes.
    Rows go to results/gpu/, the page to reports/gpu.md. The exit status is 1 if a check fails.
    """
    from rich.console import Console

    from marsbench.gpu_check.checks import device_here, run_checks

    device = device_here(cpu=cpu)
    rows = run_checks(device, only or (), quick=quick, output=None if cpu else start.output, console=Console())
    if any(row.status != "done" or row.holds is False for row in rows):
        raise typer.Exit(1)


@starts("data_dir", "output")
def gpu_window(
    start: Start,
    minutes: Annotated[float, typer.Option(min=0.1, help="How many minutes to use the GPU.")] = 10.0,
    base: Annotated[Path | None, typer.Option(help="A real model's folder [default: smollm2-135m if fetched].")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A small trial of it on the CPU, in runs/tiny.")] = False,
) -> None:
    """Measure in a few minutes what a GPU can show, the most important first.

    It runs the checks, and measures the cost of a decoding step at 0.5B and 7B (random weights, and tokens per second
    with the paper's acceptance carried over) and training speed. With the weights of a real model, that model asks
    itself questions and answers them; AR SFT, MARS in both alignments and an adapter train on that and are asked
    benchmarks. After an interruption, the same command goes on. It downloads nothing. Rows go to results/gpu/, the page
    to reports/gpu.md, the rest to runs/gpu-window/.
    """
    from rich.console import Console

    from marsbench.gpu_check.checks import device_here
    from marsbench.gpu_check.window import Window, base_here, run_window

    output = start.output / "runs" / "tiny" if tiny else start.output
    window = Window(device_here(cpu=tiny), output, Console(), base or base_here(tiny), start.data_dir, tiny)
    if any(ended.status in ("failed", "timeout") for ended in run_window(window, minutes)):
        raise typer.Exit(1)


_LISTS = ("scales", "stages", "methods", "benchmarks", "tables")


def list_(what: Annotated[str, typer.Argument(help="scales, stages, methods, benchmarks or tables.")] = "all") -> None:
    """List scales, training stages, decoding methods, benchmarks and tables."""
    check_known("list", what, [*_LISTS, "all"])
    for name in _LISTS if what == "all" else [what]:
        print_table(*_listed(name))


def _listed(name: str) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    match name:
        case "scales":
            from marsbench.presets import preset, scales

            return name, ("name", "what"), [(each, preset(each).summary) for each in scales()]
        case "stages":
            from marsbench.training.stages import STAGES

            rows = [(each, stage.parent or "-", stage.summary) for each, stage in STAGES.items()]
            return name, ("name", "starts from", "what"), rows
        case "methods":
            from marsbench.methods import METHODS, NEEDS

            methods = [
                (
                    each, info.summary, info.exact, "yes" if info.lossless else "no",
                    ", ".join(NEEDS[need] for need in info.needs) or "-", "1" if info.one_row else "any",
                )
                for each, info in METHODS.items()
            ]  # fmt: skip
            return name, ("name", "what", "output equals", "lossless", "needs", "batch size"), methods
        case "benchmarks":
            from marsbench.evaluation.benchmarks import BENCHMARKS

            rows = [(each.name, each.paper_name, each.summary) for each in BENCHMARKS.values()]
            return name, ("name", "stands for", "what"), rows
    from marsbench.studies import items, studies

    tables = []
    for item in items():
        asked = ", ".join(item.plan.benchmarks) or "all six" if item.plan else "-"
        lines = str(len(item.plan.lines)) if item.plan else "-"
        tables.append((item.key, item.name, item.asks, lines, asked, f"marsbench reproduce {item.key}"))
    apart = ", ".join(study.key for study in studies().values() if not study.in_paper)
    tables.append(("all", "The whole paper", f"all of the above but {apart}", "", "", "marsbench reproduce all"))
    return "tables, figures and pages", ("name", "what", "asks", "lines", "benchmarks", "how"), tables
