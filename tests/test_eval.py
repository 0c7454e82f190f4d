"""`marsbench eval`: what tune recommends can be asked, several benchmarks at once, and nothing is cut in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from marsbench.cli import app
from marsbench.rows.kinds import EvaluationRow
from marsbench.rows.store import RowStore
from marsbench.rows.workspace import Workspace

DATA = Path(__file__).parent / "data"


@pytest.fixture
def output(output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with trained checkpoints, in which nothing may be trained any more."""

    def trained(*_: object) -> None:
        raise AssertionError("a checkpoint was trained")

    monkeypatch.setattr("marsbench.training.trainer.train", trained)
    return output


def evaluate(output: Path, *arguments: str) -> Result:
    done = CliRunner().invoke(app, ["eval", *arguments, "--scale", "micro", "--limit", "3", "--output", str(output)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    return done


def rows_in(output: Path) -> list[EvaluationRow]:
    rows = RowStore(Workspace(output, "micro").row_file).rows().values()
    return [row for row in rows if isinstance(row, EvaluationRow)]


def test_the_window_is_not_the_block_size_of_the_checkpoint(output: Path) -> None:
    """Guards against a B = 5 that is trained for minutes because a window of 5 was asked for."""
    verified = ["--method", "mars-verified", "--layout", "linear", "--window", "5", "--threshold", "0.5"]
    evaluate(output, "--benchmark", "mini_gsm8k", *verified)
    evaluate(output, "--benchmark", "mini_gsm8k", "--stage", "ar_sft", "--method", "jacobi", "--window", "6")
    (first, second) = [row.options for row in rows_in(output)]
    assert (first["block_size"], first["layout"], second["block_size"]) == (5, "linear", 6)


def test_a_line_says_the_options_that_its_method_takes(output: Path) -> None:
    """Guards against an option that does not reach the method, and a row that tells of one that means nothing."""
    evaluate(output, "--benchmark", "mini_gsm8k", "--method", "prompt-lookup", "--draft-length", "2", "--ngram", "1")
    evaluate(output, "--benchmark", "mini_gsm8k", "--method", "mars-block-cache", "--cache-block", "8")
    assert [row.options for row in rows_in(output)] == [
        {"draft_length": 2, "ngram": 1},
        {"cache_block": 8, "metric": "probability", "head_top": 64, "accept": "one"},
    ]


def test_several_benchmarks_as_one_document(output: Path) -> None:
    """Guards against a second benchmark that replaces the first, and numbers that a program cannot read."""
    settings = ["--dtype", "bfloat16", "--batch-size", "2", "--max-new-tokens", "7", "--prefill-positions", "32"]
    done = evaluate(output, "--benchmark", "mini_bbh", "--benchmark", "mini_gsm8k", *settings, "--json")
    found = json.loads(done.stdout)
    assert [one["benchmark"] for one in found] == ["mini_bbh", "mini_gsm8k"]
    for one, row in zip(found, rows_in(output), strict=True):
        assert (one["n"], one["dtype"], one["max_new_tokens"]) == (3, "bfloat16", 7)
        assert (row.dtype, row.max_new_tokens) == ("bfloat16", 7)
        assert one["cut_answers"] == row.finished.count(0)
        assert len(Path(one["answers"]).read_text().splitlines()) == 3, "the answers are where it says"


def test_other_settings_are_other_cells(output: Path) -> None:
    """Guards against an answer in one precision, or cut at one length, that passes for another's."""
    for settings in ([], ["--dtype", "bfloat16"], ["--max-new-tokens", "9"], ["--batch-size", "1"]):
        evaluate(output, "--benchmark", "mini_gsm8k", "--method", "ar", *settings)
    assert len({row.key for row in rows_in(output)}) == 4


def test_a_line_is_called_after_its_checkpoint(output: Path) -> None:
    """Guards against "mars by ar" for somebody's own model."""
    folder = next((output / "runs" / "micro" / "checkpoints").glob("ar_sft-*"))
    evaluate(output, "--benchmark", "mini_gsm8k", "--checkpoint", str(folder), "--method", "ar")
    assert [row.arm for row in rows_in(output)] == [folder.name]


def test_what_is_cut_is_said(output: Path) -> None:
    """Guards against real answers cut at a small scale's limit, and prompts without their beginnings, in silence."""
    done = evaluate(output, "--benchmark", "bbh_word_sorting", "--method", "ar", "--data-dir", str(DATA))
    (row,) = rows_in(output)
    assert row.max_new_tokens == 256, "the benchmark's limit, not the scale's 32"
    assert len(row.prompt_cut) == len(row.correct) and any(row.prompt_cut)
    assert f"{sum(map(bool, row.prompt_cut))} of {len(row.correct)} prompts" in done.stdout
    done = evaluate(output, "--benchmark", "mini_gsm8k", "--stage", "base", "--method", "ar", "--max-new-tokens", "2")
    assert "3 of 3 answers were cut at 2 tokens" in done.stdout
