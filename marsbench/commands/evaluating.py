"""Asking and scoring: `eval`, `score` and `compare`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marsbench.commands import shared
from marsbench.methods import METHODS, OPTIONS, Decoding

if TYPE_CHECKING:
    from marsbench.evaluation.harness import Exam
    from marsbench.rows.kinds import EvaluationRow


@shared.decodes()
@shared.starts(
    "whose", "adapter", "stage", "block_size", "limit", "shard", "data_dir", "scale", "seed", "existing", "output"
)
def eval_(
    start: shared.Start,
    decoding: Decoding,
    benchmark: Annotated[list[str], typer.Option(help="Benchmark; repeatable: see `marsbench list benchmarks`.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Prompts at once [default: the scale's].")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Token limit [default: the benchmark's].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Ask a checkpoint one or more benchmarks. Prints accuracy with its interval, and tokens per forward.

    Each answer is logged at once, in the file that the command prints. Rows go to runs/SCALE/rows.jsonl.
    """
    from marsbench.evaluation.benchmarks import benchmarks

    names, typed, decoding = benchmarks(benchmark), decoding, shared.at(decoding, start.block_size)
    shared.check_for(decoding, start.trained_stage)
    typed.check_heard(decoding.method)
    run = start.run()
    run.scale = replace(run.scale, batch_size=batch_size or run.scale.batch_size)
    run.max_new_tokens, run.compiled = max_new_tokens, decoding.compiled
    run.prefill_positions = decoding.prefill_positions
    shared.use_packing(decoding.pack)
    from marsbench.line import Line
    from marsbench.rows.workspace import full_disk_explained
    from marsbench.running.cells import CellRunner
    from marsbench.running.plans import PlannedCell

    who, method = Path(start.adapter or start.whose or start.own_stage).name, decoding.method
    line = Line(
        who, f"{who} by {method}", start.own_stage, method, _told(decoding), untrained_masks=decoding.untrained_masks,
        block_size=start.block_size,
    )  # fmt: skip
    for name in names:  # what cannot be asked is found out before anything is trained
        run.exam(name)
    results = []
    with full_disk_explained(run.workspace.runs):
        draft, loaded = shared.load_draft(decoding, run.reporter), start.loaded(run, decoding.dtype)
        cells = CellRunner(run)
        for name in names:
            row = cells.row(PlannedCell(line, name, None), loaded, draft)
            logs = [*run.answer_logs(row.key), run.workspace.answers(row.key)]  # of parts, or of the whole
            results.append(_as_plain(row, next(filter(Path.exists, logs), logs[0])))
            if not as_json:
                typer.echo("\n".join(_in_words(results[-1])))
    if as_json:
        typer.echo(json.dumps(results, indent=1))


def _told(decoding: Decoding) -> dict[str, Any]:
    """What the line of an evaluation says of its method: the options that it takes, and how it accepts tokens."""
    info, given = METHODS[decoding.method], decoding.given
    told = {name: value for name in info.options if (value := given.get(name, OPTIONS[name].usual)) is not None}
    if decoding.threshold is not None:
        return {**told, "threshold": decoding.threshold}
    return {**told, "accept": "one"} if info.takes_threshold and not info.lossless else told


def score(
    benchmark: shared.AskedBenchmark,
    responses: Annotated[Path, typer.Option(help='JSON Lines, one {"doc_id": ..., "response": "..."} a line.')],
    data_dir: shared.DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Also write the scores of each question: JSON Lines.")] = None,
) -> None:
    """Score logged answers without a model. The last line printed is one JSON document.

    A doc_id is SUBTASK/INDEX, HumanEval/0, or the question's number, counted from 0 in the order of the data (the
    subtasks of bbh one after the other, in alphabetical order). A subtask is a benchmark too: bbh_word_sorting. The
    command also reads the files that `marsbench eval` writes.
    """
    from marsbench.files import check_target, write_atomically

    if out is not None:
        check_target(responses, out)
    exam = _exam(benchmark, data_dir)
    from marsbench.evaluation.scoring import score_file, summary, verdicts

    scored = score_file(exam, responses)
    if out is not None:
        write_atomically(out, "".join(json.dumps(verdict) + "\n" for verdict in verdicts(scored)).encode())
    result = summary(scored)
    said = f"{benchmark}: {result['accuracy']:.1f} % ({result['score']}), {result['n']:,} of {result['questions']:,}"
    typer.echo(f"{said} questions answered", err=True)
    typer.echo(json.dumps(result))


def compare(
    first: Annotated[Path, typer.Argument(help="Logged answers, as for `marsbench score`.")],
    second: Annotated[Path, typer.Argument(help="Answers to the same questions.")],
    benchmark: shared.AskedBenchmark,
    data_dir: shared.DataDir = None,
) -> None:
    """Compare two logged runs, question by question. The last line printed is one JSON document.

    For each score it has the difference in points (first minus second) with its 95 % interval, how many questions only
    one run gets right, and McNemar's exact p-value. Questions that only one file answers are left out.
    """
    exam = _exam(benchmark, data_dir)
    from marsbench.evaluation.scoring import compare_files

    result = compare_files(exam, first, second)
    typer.echo(
        f"{benchmark}: {result['questions']:,} questions in both files, {result['answered_only_in_first']:,} only in "
        f"{first}, {result['answered_only_in_second']:,} only in {second}",
        err=True,
    )
    typer.echo(json.dumps(result))


def _exam(benchmark: str, data_dir: Path | None) -> "Exam":
    from marsbench.evaluation import benchmarks, harness

    return harness.prepare(benchmarks.benchmark(benchmark), data_dir)


def _in_words(result: dict[str, Any]) -> list[str]:
    (low, high), limit = result["interval"], result["max_new_tokens"]
    lines = [
        f"{result['benchmark']}: accuracy {result['accuracy']:.1f} % (95 % interval {low:.1f} to {high:.1f}), "
        f"n = {result['n']}; {result['tokens_per_forward']:.2f} tokens per forward pass"
    ]
    if cut := result["cut_answers"]:
        lines.append(f"  {cut:,} of {result['n']:,} answers were cut at {limit} tokens, without an end")
    if cut := result["cut_prompts"]:
        lines.append(f"  {cut:,} of {result['n']:,} prompts did not fit into the context and lost their beginnings")
    return [*lines, f"  answers: {result['answers']}"]


def _as_plain(row: "EvaluationRow", answers: Path) -> dict[str, Any]:
    from marsbench.evaluation.scoring import in_percent

    share, speed = in_percent(row.accuracy), row.tokens_per_forward
    return {
        "benchmark": row.benchmark, "checkpoint": row.arm, "weights": row.checkpoint, "method": row.method,
        "options": dict(row.options), "score": row.metric, **share, "tokens_per_forward": speed.value,
        "tokens_per_forward_interval": [speed.interval.low, speed.interval.high], "max_new_tokens": row.max_new_tokens,
        "cut_answers": row.finished.count(0), "cut_prompts": sum(cut > 0 for cut in row.prompt_cut), "dtype": row.dtype,
        "answers": str(answers),
    }  # fmt: skip
