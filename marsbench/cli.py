"""The command line. A command only translates: it loads its room when called, so that `--help` is instant.

Exit codes: 0 all went well, 1 a bug (with its traceback), 2 a mistake that the user can mend (with one
message that says how), 130 interrupted.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from marsbench import __version__
from marsbench.errors import UserError, unknown_name

if TYPE_CHECKING:
    from marsbench.evaluation.harness import Exam
    from marsbench.sweeps.rows import EvaluationRow
    from marsbench.sweeps.runner import Runner

# Troubles of the machine that the user can mend, and how; any other OSError is a bug.
MENDS = {
    errno.ENOSPC: "free some space, or write to another disk; the same command then goes on where it stopped",
    errno.EACCES: "change the permissions, or choose another folder",
}


class MendableErrorsGroup(TyperGroup):
    """Gives an error that the user can mend as one message and an exit code; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _exit(f"error: {error}", 2) from error
        except OSError as error:
            if error.errno not in MENDS:
                raise
            trouble = UserError(str(error.strerror), where=error.filename or "", fix=MENDS[error.errno])
            raise _exit(f"error: {trouble}", 2) from error
        except KeyboardInterrupt as interrupt:
            raise _exit("interrupted: the same command resumes the run", 130) from interrupt


def _exit(message: str, code: int) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(code)


app = typer.Typer(
    cls=MendableErrorsGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"marsbench {__version__}")
        raise typer.Exit


@app.callback()
def marsbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Is MARS real, how fast is it against a strong baseline, and what would it do for my model?

    marsbench trains MARS checkpoints (arXiv 2604.07023: several tokens per forward pass from one ordinary
    language model), decodes with MARS and with its rivals in one loop, scores and times them with one ruler,
    and sets the outcome beside the paper's tables.

    Three commands to begin with:

    - `marsbench doctor`: is this machine ready?
    - `marsbench reproduce table2`: measure the paper's main table, on a laptop with a tiny model
    - `marsbench report`: render the pages in reports/ again from the measured rows
    """


# Options that several commands share.
Scale = Annotated[str, typer.Option(help="Model, data and budgets: see `marsbench list scales`.")]
Output = Annotated[Path, typer.Option(help="Folder for runs/, results/ and reports/.")]
ExistingPolicy = Annotated[str, typer.Option(help="What is there already: reuse it, rerun it, or fail.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights and training data.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N questions of each benchmark.")]
Shard = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Answer only the Ith of N parts; without it, their answers are put together."),
]
DataDir = Annotated[Path | None, typer.Option(envvar="MARSBENCH_DATA", help="Local copy of the benchmark data.")]
BlockSize = Annotated[int, typer.Option(help="B: tokens predicted per forward pass at most.")]
UntrainedMasks = Annotated[
    bool, typer.Option("--untrained-masks", help="Use masks even if the checkpoint never saw any.")
]
Draft = Annotated[str | None, typer.Option(help="Draft model's checkpoint folder, for speculative methods.")]

TrainAll = Annotated[bool, typer.Option("--train", help="Train every stage, even where a published checkpoint exists.")]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(help="STAGE=FOLDER_OR_HUB_NAME: use this checkpoint for a stage; may be given several times."),
]


@app.command()
def doctor(
    scale: Scale = "tiny",
    output: Output = Path("."),
) -> None:
    """Check this machine before a long run.

    Looks at Python, packages, device, memory, disk, output folder, benchmark data, code sandbox and task
    files, and says for each trouble how to mend it. Exits with 2 if a run would fail, with 0 if it would at
    most be narrower.
    """
    from rich.console import Console

    from marsbench.doctor import checks, findings_table

    found = checks(scale, output)
    Console().print(findings_table(found))
    if any(check.ok == "fail" for check in found):
        raise typer.Exit(2)


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(help="scales, stages, methods, benchmarks, tables, or all.")] = "all",
) -> None:
    """Show what there is: scales, training stages, decoding methods, benchmarks and tables."""
    from rich.console import Console

    from marsbench.listing import listing

    for table in listing(what):
        Console().print(table)


@app.command()
def train(
    stage: Annotated[str, typer.Argument(help="What to train: see `marsbench list stages`.")],
    scale: Scale = "tiny",
    block_size: BlockSize = 4,
    base: Annotated[
        str | None, typer.Option(help="Pretrained checkpoint to start from, folder or hub name (0.5b, 7b).")
    ] = None,
    chat_data: Annotated[
        str | None, typer.Option(help="Conversations, JSON Lines file or hub data set with `messages` (0.5b, 7b).")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of every stage, in place of the scale's budget.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step, over all devices, in place of the scale's.")
    ] = None,
    seed: Seed = 0,
    existing: ExistingPolicy = "reuse",
    output: Output = Path("."),
) -> None:
    """Train one stage and whatever it starts from; prints the checkpoint's folder.

    An interrupted training goes on where it stopped when the same command is given again. To use several
    devices: `accelerate launch -m marsbench train mars --scale ...`; ready-made `--config_file`s lie in
    marsbench/presets/launch. The batch of a step stays the same, however many devices share it.
    """
    from marsbench.progress import is_first_process
    from marsbench.training.stages import recipe

    runner = _runner(scale, output, existing, seed)
    runner.scale = runner.scale.adapted(base=base, chat_data=chat_data, steps=max_steps, batch_size=batch_size)
    chosen = recipe(runner.scale, stage, block_size=block_size, seed=seed)
    runner.train(chosen)
    if is_first_process():
        typer.echo(runner.workspace.checkpoint(chosen))


@app.command(name="eval")
def eval_(
    benchmark: Annotated[str, typer.Option(help="What to ask: see `marsbench list benchmarks`.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; without it, the scale's own --stage.")
    ] = None,
    stage: Annotated[str, typer.Option(help="Stage of the scale's own checkpoint, trained if missing.")] = "mars",
    method: Annotated[str, typer.Option(help="How to decode: see `marsbench list methods`.")] = "mars",
    threshold: Annotated[
        float | None, typer.Option(help="Confidence to accept a token; without it, one token per forward.")
    ] = None,
    metric: Annotated[str, typer.Option(help="Confidence: probability, entropy or margin.")] = "probability",
    block_size: BlockSize = 4,
    untrained_masks: UntrainedMasks = False,
    draft: Draft = None,
    data_dir: DataDir = None,
    limit: Limit = None,
    shard: Shard = None,
    scale: Scale = "tiny",
    seed: Seed = 0,
    existing: ExistingPolicy = "reuse",
    output: Output = Path("."),
) -> None:
    """Ask one checkpoint one benchmark; prints accuracy with its interval, and tokens per forward.

    Answers are logged in runs/SCALE/answers as they come, and the row is added to runs/SCALE/rows.jsonl.
    """
    from marsbench.sweeps.plans import Arm

    options = {"block_size": block_size, "metric": metric}
    options |= {"accept": "one"} if threshold is None else {"threshold": threshold}
    arm = Arm(stage, f"{stage} by {method}", stage, method, options, untrained_masks=untrained_masks)
    runner = _runner(scale, output, existing, seed, limit=limit, shard=_shard(shard), data_dir=data_dir)
    row = runner.single(arm, benchmark, checkpoint, draft)
    typer.echo(_summary(row))


@app.command()
def score(
    benchmark: Annotated[str, typer.Option(help="What was asked: see `marsbench list benchmarks`.")],
    responses: Annotated[Path, typer.Option(help='JSON Lines, one {"doc_id": ..., "response": "..."} a line.')],
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Also write every question's scores here, as JSON Lines.")] = None,
) -> None:
    """Score logged responses without a model; the last line printed is one JSON document.

    A doc_id is a question's number, counted from 0 in the order of the benchmark's data (the subtasks of bbh in
    alphabetical order, one after the other), or SUBTASK/INDEX, or HumanEval/0. One subtask alone is a benchmark too:
    bbh_word_sorting. What `marsbench eval` logs in runs/SCALE/answers can be scored as it is.
    """
    import json

    exam = _exam(benchmark, data_dir)
    from marsbench.evaluation.scoring import score_file
    from marsbench.files import write_atomically

    scored = score_file(exam, responses)
    if out is not None:
        write_atomically(out, "".join(json.dumps(verdict) + "\n" for verdict in scored.verdicts()).encode())
    summary = scored.summary()
    typer.echo(
        f"{benchmark}: {summary['accuracy']:.1f} % ({summary['score']}), {summary['n']:,} of "
        f"{summary['questions']:,} questions answered",
        err=True,
    )
    typer.echo(json.dumps(summary))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Logged responses, as for `marsbench score`.")],
    second: Annotated[Path, typer.Argument(help="Responses to the same questions.")],
    benchmark: Annotated[str, typer.Option(help="What was asked: see `marsbench list benchmarks`.")],
    data_dir: DataDir = None,
) -> None:
    """Test two logged runs against each other, question by question; the last line printed is one JSON document.

    For each of the benchmark's scores: the difference in points (first minus second) with its 95 % interval, how many
    questions only one of the two gets right, and the p-value of McNemar's exact test. Questions that only one file
    answers are counted and left out.
    """
    import json

    exam = _exam(benchmark, data_dir)
    from marsbench.evaluation.scoring import compare_files

    found = compare_files(exam, first, second)
    typer.echo(
        f"{benchmark}: {found.shared:,} questions in both files, {found.only_first:,} only in {first}, "
        f"{found.only_second:,} only in {second}",
        err=True,
    )
    typer.echo(json.dumps({"benchmark": benchmark, **found.summary()}))


@app.command()
def decode(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub name.")],
    prompt_ids: Annotated[Path, typer.Option(help='JSON Lines, one {"prompt_ids": [...]} a line.')],
    out: Annotated[Path, typer.Option(help="Where the continuations go, one line per prompt, in the same order.")],
    method: Annotated[str, typer.Option(help="How to decode: see `marsbench list methods`.")] = "mars",
    block_size: Annotated[int, typer.Option(help="B, or the window of methods free to choose one.")] = 4,
    threshold: Annotated[
        float | None, typer.Option(help="Confidence to accept (or draft) a token; without it, mars takes one per pass.")
    ] = None,
    accept: Annotated[str | None, typer.Option(help="`one`: exactly one token per forward pass.")] = None,
    metric: Annotated[str, typer.Option(help="Confidence: probability, entropy or margin.")] = "probability",
    cache_block: Annotated[int, typer.Option(help="B_cache of mars-block-cache, in tokens.")] = 4,
    layout: Annotated[str, typer.Option(help="Masks of mars-verified: groups (more tokens) or linear (cheaper).")] = (
        "groups"
    ),
    draft: Draft = None,
    draft_length: Annotated[int, typer.Option(help="K: tokens drafted per round at most.")] = 4,
    draft_method: Annotated[str, typer.Option(help="How the draft model decodes: ar or mars.")] = "ar",
    draft_threshold: Annotated[float, typer.Option(help="Confidence that a MARS draft's tokens must pass.")] = 0.95,
    tree_width: Annotated[int, typer.Option(help="Guesses of the first Medusa head; 1 is a chain.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Limit of every continuation; an EOS counts.")] = 256,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows decoded at once; by default 16.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling; prompt i takes seed + i.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    eos_id: Annotated[int | None, typer.Option(help="EOS; by default the checkpoint's.")] = None,
    pad_id: Annotated[int | None, typer.Option(help="Padding; by default the checkpoint's, else EOS.")] = None,
    mask_id: Annotated[int | None, typer.Option(help="Mask token; by default the tokenizer's <|mask|>.")] = None,
    untrained_masks: UntrainedMasks = False,
) -> None:
    """Continue prompts given as token ids.

    Every line of the output has the tokens up to and without EOS, the forward passes of the model, the tokens accepted
    by each of them (an EOS counted once) and what ended it: eos or length. The file appears whole or not at all.
    """
    from marsbench.quiet import quieten_libraries

    quieten_libraries()
    from marsbench.decode_file import decode_file, read_prompts
    from marsbench.decoding.generation import Request
    from marsbench.methods import METHODS
    from marsbench.methods.fitting import check_accept, default_ids, fit
    from marsbench.progress import Reporter
    from marsbench.training.checkpoints import load

    check_accept(method, accept, threshold)
    prompts = read_prompts(prompt_ids)
    device, number_type = _device(), _dtype(dtype)
    loaded = load(model, dtype=number_type, device=device, needs_tokenizer=False)
    companion = load(draft, dtype=number_type, device=device, needs_tokenizer=False) if draft else None
    eos, pad = default_ids(loaded, eos_id, pad_id)
    options = {"block_size": block_size, "metric": metric, "cache_block": cache_block, "layout": layout}
    options |= {"draft_length": draft_length, "draft_method": draft_method, "draft_threshold": draft_threshold}
    options |= {"tree_width": tree_width} | ({} if mask_id is None else {"mask_id": mask_id})
    chosen = fit(method, loaded, draft=companion, untrained_masks=untrained_masks, **options)
    requests = [
        Request(ids, max_new_tokens, threshold, temperature=temperature, seed=seed + number)
        for number, ids in enumerate(prompts)
    ]
    rows = batch_size or (1 if METHODS[method].one_row else 16)
    decode_file(
        loaded.model, chosen, requests, prompt_ids, out,
        eos_id=eos, pad_id=pad, batch_size=rows, reporter=Reporter(),
    )  # fmt: skip
    typer.echo(f"wrote {out}")


@app.command()
def show(
    prompt: Annotated[str | None, typer.Argument(help="A user's question; by default one of mini_gsm8k.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; without it, the scale's own --stage.")
    ] = None,
    stage: Annotated[str, typer.Option(help="Stage of the scale's own checkpoint, trained if missing.")] = "mars",
    method: Annotated[
        list[str] | None, typer.Option(help="How to decode, several times to compare; by default ar and mars.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Confidence for methods that take one.")] = 0.95,
    block_size: BlockSize = 4,
    draft: Draft = None,
    max_new_tokens: Annotated[int, typer.Option(help="Limit of the answer.")] = 96,
    untrained_masks: UntrainedMasks = False,
    image: Annotated[Path | None, typer.Option(help="Also draw it: FILE.png, .svg or .pdf.")] = None,
    scale: Scale = "tiny",
    seed: Seed = 0,
    output: Output = Path("."),
) -> None:
    """Print an answer with the tokens of one forward pass shaded together (the paper's Figure 1)."""
    runner = _runner(scale, output, "reuse", seed)
    from rich.console import Console

    from marsbench.show import answers, draw, sample_question, shaded
    from marsbench.training.checkpoints import load

    question = prompt or sample_question()
    found = answers(
        load(checkpoint, device=_device()) if checkpoint else runner.load(stage, block_size),
        question,
        method or ["ar", "mars"],
        threshold=threshold,
        max_new_tokens=max_new_tokens,
        draft=load(draft, device=_device()) if draft else None,
        untrained_masks=untrained_masks,
        block_size=block_size,
    )
    console = Console(soft_wrap=True)
    border = "each forward pass in a shade of its own" if console.is_terminal else "forward passes parted by |"
    console.print(f"{question}\n({border})", highlight=False, markup=False)
    for answer in found:
        console.print(f"\n{answer.summary}", style="bold", highlight=False)
        console.print(shaded(answer, color=console.is_terminal))
    if image:
        draw(found, image)
        typer.echo(f"wrote {image}")


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help="table2 (see `marsbench list tables`), or engine.")],
    scale: Scale = "tiny",
    seed: Seed = 0,
    benchmarks: Annotated[
        str | None, typer.Option(help="Instead of the scale's own: names, `mini` or `real`, with commas between.")
    ] = None,
    limit: Limit = None,
    shard: Shard = None,
    existing: ExistingPolicy = "reuse",
    data_dir: DataDir = None,
    train_all: TrainAll = False,
    checkpoint: Checkpoints = None,
    output: Output = Path("."),
) -> None:
    """Measure one of the paper's tables, or what our engine costs, and write the page.

    Trains what is missing, measures what is missing, then writes the rows to results/ and the page with its
    figures to reports/. Interrupted at any moment, the same command goes on where it stopped. With --benchmarks or
    --limit, rows and page go to folders of their own, as in reports/tiny/real-limit8/. `marsbench plan` says
    beforehand what it will take.
    """
    part = _shard(shard)
    runner = _runner(
        scale, output, existing, seed, benchmarks=benchmarks, limit=limit, shard=part, data_dir=data_dir
    )  # fmt: skip
    runner.scale = runner.scale.with_checkpoints(checkpoint or [], train_all=train_all)
    from marsbench.files import write_atomically
    from marsbench.reports import REPORTS, write_report
    from marsbench.sweeps.engine_study import EngineStudy
    from marsbench.sweeps.plans import table_plan
    from marsbench.sweeps.store import rows_text

    if what not in REPORTS:
        raise unknown_name("thing to reproduce", what, list(REPORTS))
    rows = EngineStudy(runner).rows() if what == "engine" else runner.table(table_plan(what))
    if part != (1, 1):
        typer.echo(f"answered part {shard}; when all parts are, the same command without --shard writes the page")
        return
    write_atomically(runner.workspace.results(what), rows_text(rows).encode())
    pages = write_report(what, rows, scale, runner.workspace.reports)
    typer.echo(f"the page: {pages[0]}")


@app.command()
def plan(
    table: Annotated[str, typer.Option(help="Its number in the paper: see `marsbench list tables`.")] = "2",
    scale: Scale = "tiny",
    train_all: TrainAll = False,
    checkpoint: Checkpoints = None,
) -> None:
    """Say what reproducing a table would take, without running anything or asking a hub.

    Lists the lines of the table with their checkpoints and data, and estimates tokens and hours of training and
    decoding, with the assumptions behind them.
    """
    from rich.console import Console

    from marsbench.presets import preset
    from marsbench.sweeps.estimates import plan_tables
    from marsbench.sweeps.plans import table_plan

    chosen = preset(scale).with_checkpoints(checkpoint or [], train_all=train_all)
    for part in plan_tables(table_plan(table if table.startswith("table") else f"table{table}"), chosen):
        Console().print(part, highlight=False)


@app.command()
def report(
    scale: Scale = "tiny",
    output: Output = Path("."),
) -> None:
    """Render every page of a scale again from its rows in results/."""
    from marsbench.reports import REPORTS, write_report
    from marsbench.sweeps.store import read_rows
    from marsbench.sweeps.workspace import Workspace

    whole = Workspace(output, scale)
    measured = [(one, name) for one in whole.variants() for name in REPORTS if one.results(name).exists()]
    if not measured:
        raise UserError(
            "there are no rows", where=str(whole.results("table2").parent),
            fix="measure them: marsbench reproduce table2",
        )  # fmt: skip
    for workspace, name in measured:
        rows = read_rows(workspace.results(name))
        typer.echo(f"wrote {write_report(name, rows, scale, workspace.reports)[0]}")


def _runner(
    scale: str, output: Path, existing: str, seed: int, *, benchmarks: str | None = None, limit: int | None = None,
    shard: tuple[int, int] = (1, 1), data_dir: Path | None = None,
) -> Runner:  # fmt: skip
    """The runner of a scale, with the machine's noise kept off the terminal."""
    from marsbench.presets import preset
    from marsbench.quiet import quieten_libraries

    chosen = preset(scale)
    quieten_libraries()
    from marsbench.evaluation.benchmarks import benchmarks as named
    from marsbench.sweeps.runner import Runner
    from marsbench.sweeps.store import existing_policy
    from marsbench.sweeps.workspace import Workspace

    names = [name.strip() for name in benchmarks.split(",")] if benchmarks else []
    variant = "-".join([*names, *([f"limit{limit}"] if limit else [])])
    workspace = Workspace(output, scale, variant)
    return Runner(chosen, workspace, existing_policy(existing), seed, named(names), limit, shard, data_dir)


def _exam(benchmark: str, data_dir: Path | None) -> Exam:
    """All questions of a benchmark."""
    from marsbench.quiet import quieten_libraries

    quieten_libraries()
    from marsbench.evaluation import benchmarks, harness

    return harness.prepare(benchmarks.benchmark(benchmark), data_dir)


def _shard(text: str | None) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    first, _, last = (text or "1/1").partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--shard {text} is no part of a whole", fix="give it as I/N, from 1/N to N/N")
    return int(first), int(last)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(name: str) -> Any:
    """The torch type of that name."""
    import torch

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in types:
        raise unknown_name("dtype", name, list(types))
    return types[name]


def _summary(row: EvaluationRow) -> str:
    """What an evaluation found, in one line."""
    from marsbench.evaluation.statistics import accuracy, tokens_per_forward

    share, speed = accuracy(row.correct), tokens_per_forward(row.emitted, row.forwards)
    return (
        f"{row.benchmark}: accuracy {100 * share.value:.1f} % (95 % interval {100 * share.interval.low:.1f} to "
        f"{100 * share.interval.high:.1f}), n = {share.n}; {speed.value:.2f} tokens per forward pass"
    )


def main() -> None:
    """The console script `marsbench`."""
    app(prog_name="marsbench")
