"""Asking and scoring: `eval`, `score` and `compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marsbench.commands.shared import (
    AskedBenchmark,
    BlockSize,
    Checkpoint,
    DataDir,
    DecodingMethod,
    Draft,
    ExistingPolicy,
    Limit,
    Metric,
    Output,
    OwnStage,
    Scale,
    Seed,
    Shard,
    UntrainedMasks,
    make_run,
)

if TYPE_CHECKING:
    from marsbench.evaluation.harness import Exam
    from marsbench.rows.kinds import EvaluationRow


def eval_(
    benchmark: Annotated[str, typer.Option(help="What to ask: see `marsbench list benchmarks`.")],
    checkpoint: Checkpoint = None,
    stage: OwnStage = "mars",
    method: DecodingMethod = "mars",
    threshold: Annotated[
        float | None, typer.Option(help="Confidence to accept a token; without it, one token per forward.")
    ] = None,
    metric: Metric = "probability",
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
    from marsbench.running.cells import Cells
    from marsbench.running.plans import Arm

    options = {"block_size": block_size, "metric": metric}
    options |= {"accept": "one"} if threshold is None else {"threshold": threshold}
    arm = Arm(stage, f"{stage} by {method}", stage, method, options, untrained_masks=untrained_masks)
    run = make_run(scale, output, existing, seed, limit=limit, shard=shard, data_dir=data_dir)
    row = Cells(run).single(arm, benchmark, checkpoint, draft)
    typer.echo(_summary(row))


def score(
    benchmark: AskedBenchmark,
    responses: Annotated[Path, typer.Option(help='JSON Lines, one {"doc_id": ..., "response": "..."} a line.')],
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Also write every question's scores here, as JSON Lines.")] = None,
) -> None:
    """Score logged responses without a model; the last line printed is one JSON document.

    A doc_id is a question's number, counted from 0 in the order of the benchmark's data (the subtasks of bbh in
    alphabetical order, one after the other), or SUBTASK/INDEX, or HumanEval/0. One subtask alone is a benchmark too:
    bbh_word_sorting. What `marsbench eval` logs in runs/SCALE/answers can be scored as it is.
    """
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


def compare(
    first: Annotated[Path, typer.Argument(help="Logged responses, as for `marsbench score`.")],
    second: Annotated[Path, typer.Argument(help="Responses to the same questions.")],
    benchmark: AskedBenchmark,
    data_dir: DataDir = None,
) -> None:
    """Test two logged runs against each other, question by question; the last line printed is one JSON document.

    For each of the benchmark's scores: the difference in points (first minus second) with its 95 % interval, how many
    questions only one of the two gets right, and the p-value of McNemar's exact test. Questions that only one file
    answers are counted and left out.
    """
    exam = _exam(benchmark, data_dir)
    from marsbench.evaluation.scoring import compare_files

    found = compare_files(exam, first, second)
    typer.echo(
        f"{benchmark}: {found.shared:,} questions in both files, {found.only_first:,} only in {first}, "
        f"{found.only_second:,} only in {second}",
        err=True,
    )
    typer.echo(json.dumps({"benchmark": benchmark, **found.summary()}))


def _exam(benchmark: str, data_dir: Path | None) -> Exam:
    """All questions of a benchmark."""
    from marsbench.quiet import quieten_libraries

    quieten_libraries()
    from marsbench.evaluation import benchmarks, harness

    return harness.prepare(benchmarks.benchmark(benchmark), data_dir)


def _summary(row: EvaluationRow) -> str:
    """What an evaluation found, in one line."""
    from marsbench.statistics.intervals import accuracy, tokens_per_forward

    share, speed = accuracy(row.correct), tokens_per_forward(row.emitted, row.forwards)
    return (
        f"{row.benchmark}: accuracy {100 * share.value:.1f} % (95 % interval {100 * share.interval.low:.1f} to "
        f"{100 * share.interval.high:.1f}), n = {share.n}; {speed.value:.2f} tokens per forward pass"
    )
