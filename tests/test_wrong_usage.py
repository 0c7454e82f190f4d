"""Wrong usages, one by one: each is refused with one message before anything is trained, written or lost."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marsbench.cli import app
from marsbench.rows.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent
ROWS = str(ROOT / "results" / "mini" / "ar_sft.jsonl")
SWEEP = str(ROOT / "results" / "mini" / "sweep.jsonl")
DECODE = ["decode", "--prompt-ids", "prompts.jsonl"]
SCORE = ["score", "--benchmark"]
DISTILL = ["distill", "--checkpoint", "ar_sft", "--prompts", "asked.jsonl", "--out", "chats.jsonl"]
TUNE = ["tune", "--scale", "micro", "--output", "."]
EVAL = ["eval", "--benchmark", "mini_gsm8k", "--limit", "2", "--scale", "micro", "--output", "."]
HERE = ["--scale", "micro", "--output", "."]


NO_LINES = {  # what a file may hold in place of lines of JSON
    "digits": b'{"prompt_ids": [%s]}\n' % (b"1" * 5000),
    "deep": b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "half": b'{"prompt": "half \\ud83d", "messages": [{"role": "user", "content": "\\udc00"}]}\n',
    "latin": b'{"prompt": "caf\xe9"}\n',
    "packed": gzip.compress(b'{"prompt": "One?"}\n'),
}


@pytest.fixture
def folder(micro_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files to get wrong, from which every command is typed."""
    (tmp_path / "data").mkdir()
    shutil.copytree(next(micro_checkpoints.glob("mars-b4-*")), tmp_path / "mars")
    shutil.copytree(next(micro_checkpoints.glob("ar_sft-*")), tmp_path / "ar_sft")
    shutil.copytree(tmp_path / "mars", tmp_path / "maskless")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / "mars" / name).read_text()
        (tmp_path / "maskless" / name).write_text(text.replace("<|mask|>", "<|spare|>").replace("mask_token", "spare"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    (tmp_path / "asked.jsonl").write_text('{"prompt": "One?"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt_ids": "five"}\n')
    (tmp_path / "answers.jsonl").write_text('{"doc_id": 0, "response": "4", "target": "of another benchmark"}\n')
    (tmp_path / "grid.yaml").write_text(
        "batch_sizes: [1]\nprompts: 6\nrepeats: 1\ncontenders:\n- {method: magic, stage: mars}\n"
    )
    (tmp_path / "few.yaml").write_text(
        "batch_sizes: [1]\nprompts: 7\nrepeats: 1\ncontenders:\n- {method: ar, stage: mars, name: ar}\n"
    )
    (tmp_path / "compiled.yaml").write_text(
        "batch_sizes: [1]\nprompts: 6\nrepeats: 1\ncontenders:\n- {method: ar, stage: mars, name: ar}\n"
        "- {method: mars, stage: mars, compiled: true}\n"
    )
    for name, content in NO_LINES.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARSBENCH_DATA", raising=False)

    def trained(*_: object, **__: object) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr("marsbench.training.trainer.train", trained)
    monkeypatch.setattr("marsbench.racing.course.step_times", trained)
    return tmp_path


WRONG: dict[str, tuple[list[str], str]] = {  # mistake -> (what is typed, a word that the message must hold)
    "eval: metric misspelt": ([*EVAL, "--metric", "entropi", "--threshold", "0.5"], "entropy"),
    "eval: threshold above 1": ([*EVAL, "--threshold", "1.5"], "between 0 and 1"),
    "eval: threshold for a method without": ([*EVAL, "--method", "ar", "--threshold", "0.9"], "takes no threshold"),
    "eval: no such method": ([*EVAL, "--method", "magic"], "mars-verified"),
    "eval: no such stage": ([*EVAL, "--stage", "marz"], "ar_sft"),
    "eval: no such benchmark": (["eval", "--benchmark", "trivia", *HERE], "mini_gsm8k"),
    "eval: one of two benchmarks unknown": ([*EVAL, "--benchmark", "trivia"], "mini_gsm8k"),
    "eval: no such layout": ([*EVAL, "--method", "mars-verified", "--layout", "circle"], "groups"),
    "eval: no such dtype": ([*EVAL, "--dtype", "int8"], "bfloat16"),
    "eval: masks that the stage never saw": ([*EVAL, "--stage", "ar_sft"], "trained with masks"),
    "eval: masks that the checkpoint never saw": ([*EVAL, "--checkpoint", "ar_sft"], "trained with masks"),
    "eval: a checkpoint without a mask token": ([*EVAL, "--checkpoint", "maskless"], "mask token"),
    "eval: no draft model": ([*EVAL, "--method", "speculative"], "draft"),
    "eval: no heads": ([*EVAL, "--method", "medusa"], "heads"),
    "eval: no such checkpoint": ([*EVAL, "--checkpoint", "./nowhere"], "no such checkpoint"),
    "eval: no such scale": ([*EVAL, "--scale", "huge"], "mini"),
    "eval: no such policy": ([*EVAL, "--existing", "perhaps"], "rerun"),
    "eval: no part of a whole": ([*EVAL, "--shard", "3/2"], "I/N"),
    "eval: window of nothing": ([*EVAL, "--method", "mars-verified", "--window", "0"], "--window"),
    "eval: no tokens": ([*EVAL, "--max-new-tokens", "0"], "--max-new-tokens"),
    "eval: no such data folder": ([*EVAL, "--data-dir", "nope"], "no such folder"),
    "eval: no such data": (["eval", "--benchmark", "gsm8k", "--data-dir", "data", *HERE], "no local copy"),
    "eval: a layout for a method without": ([*EVAL, "--layout", "linear"], "no layout"),
    "eval: a window for a method without": ([*EVAL, "--method", "ar", "--window", "3"], "no window"),
    "eval: drafts for a method without": ([*EVAL, "--draft-length", "3"], "no draft length"),
    "show: an option that neither method has": (["show", "--tree-width", "3", *HERE], "medusa"),
    "distill: an option that the method has not": ([*DISTILL, "--cache-block", "8"], "mars-block-cache"),
    "eval: a seed below 0": ([*EVAL, "--seed", "-1"], "--seed"),
    "eval: no prompt tokens": ([*EVAL, "--prefill-positions", "0"], "--prefill-positions"),
    "decode: no prompt tokens": (
        [*DECODE, "--model", "mars", "--out", "o.jsonl", "--prefill-positions", "0"],
        "--prefill-positions",
    ),
    "show: no question": (["show", "", *HERE], "empty"),
    "show: no tokens": (["show", "--window", "8", "--max-new-tokens", "0", *HERE], "--max-new"),
    "show: an image of no kind": (["show", "--image", "answer.doc", *HERE], "png"),
    "show: an image that is a folder": (["show", "--image", "data.png/", "--method", "magic", *HERE], "magic"),
    "decode: prompts overwritten": (
        [*DECODE, "--model", "mars", "--out", "prompts.jsonl"],
        "prompts",
    ),
    "decode: output is a folder": ([*DECODE, "--model", "mars", "--out", "data"], "folder"),
    "decode: no such prompts": (
        ["decode", "--prompt-ids", "nowhere.jsonl", "--model", "mars", "--out", "answers.jsonl"],
        "nowhere.jsonl",
    ),
    "decode: prompts as text": (["decode", "--model", "mars", "--prompt-ids", "broken.jsonl", "--out", "o"], "line 1"),
    "decode: no mask token": (
        [*DECODE, "--model", "maskless", "--out", "o.jsonl"],
        "--mask-id",
    ),
    "reproduce: no such table": (["reproduce", "table99", *HERE], "table2"),
    "reproduce: no such data folder": (["reproduce", "table2", "--data-dir", "nope", *HERE], "no such folder"),
    "reproduce: quick for no sweep": (["reproduce", "table2", "--quick", *HERE], "--quick"),
    "reproduce: no jobs": (["reproduce", "table2", "--jobs", "0", *HERE], "--jobs"),
    "reproduce: benchmarks that a table has not": (["reproduce", "table8", "--benchmarks", "mini_bbh", *HERE], "gsm8k"),
    "reproduce: a checkpoint for no stage": (["reproduce", "table2", "--checkpoint", "marz=mars", *HERE], "ar_sft"),
    "plan: a checkpoint for no stage": (["plan", "--checkpoint", "marz=foo"], "ar_sft"),
    "reproduce: a checkpoint that is not there": (
        ["reproduce", "table9", "--checkpoint", "mars=/nowhere", *HERE],
        "no such checkpoint",
    ),
    "plan: two plans": (["plan", "--sweep", "--table", "2"], "--sweep"),
    "plan: no such table": (["plan", "--table", "99"], "table2"),
    "sweep: an unknown method in the grid": (["sweep", "--grid", "grid.yaml", *HERE], "grid.yaml, contender 1"),
    "sweep: prompts that benchmarks cannot share": (["sweep", "--grid", "few.yaml", *HERE], "multiple of 6"),
    "sweep: a label that leads elsewhere": (["sweep", "--label", "../../elsewhere", *HERE], "--label"),
    "sweep: no such grid": (["sweep", "--grid", "nowhere.yaml", *HERE], "nowhere.yaml"),
    "sweep: compiled against eager": (["sweep", "--grid", "compiled.yaml", *HERE], "no compiled 'ar'"),
    "tune: a checkpoint without a mask token": ([*TUNE, "--checkpoint", "maskless", "--prompts", "6"], "mask token"),
    "tune: a stage without masks": ([*TUNE, "--stage", "ar_sft", "--prompts", "6"], "trained with masks"),
    "tune: prompts that benchmarks cannot share": ([*TUNE, "--prompts", "7"], "multiple of 6"),
    "train: no such stage": (["train", "nothing", *HERE], "ar_sft"),
    "train: chat data in the world": (["train", "mars", "--chat-data", "prompts.jsonl", *HERE], "of 0.5b, 135m, 7b"),
    "distill: no such prompts": ([*DISTILL, "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    "distill: token ids": ([*DISTILL, "--prompts", "prompts.jsonl"], "--column"),
    "distill: no such column": ([*DISTILL, "--column", "question"], "question"),
    "distill: prompts overwritten": ([*DISTILL, "--out", "asked.jsonl"], "prompts"),
    "distill: another file overwritten": ([*DISTILL, "--out", "answers.jsonl"], "another --out"),
    "distill: output is a folder": ([*DISTILL, "--out", "data"], "folder"),
    "distill: a method that may write otherwise": ([*DISTILL, "--method", "mars"], "mars-verified"),
    "distill: no such method": ([*DISTILL, "--method", "magic"], "mars-verified"),
    "distill: samples that are all the same": ([*DISTILL, "--samples", "2"], "--temperature"),
    "distill: a temperature below 0": ([*DISTILL, "--temperature", "-1"], "--temperature"),
    "distill: sampling by a greedy method": (
        [*DISTILL, "--method", "hf-generate", "--temperature", "1"],
        "greedy",
    ),
    "distill: rows for a method of one": (
        [*DISTILL, "--method", "hf-assisted", "--draft", "ar_sft", "--batch-size", "2"],
        "batch size of 1",
    ),
    "distill: masks that the checkpoint never saw": ([*DISTILL, "--method", "mars-verified"], "trained with masks"),
    "distill: no such checkpoint": ([*DISTILL, "--checkpoint", "./nowhere"], "no such checkpoint"),
    "distill: answers as long as the context": ([*DISTILL, "--max-new-tokens", "512"], "no room"),
    "distill: no such scale": (["distill", "--prompts", "asked.jsonl", "--out", "o.jsonl", "--scale", "huge"], "mini"),
    "results: a folder without rows": (["results", str(ROOT / "docs")], "no rows"),
    "results: no match to write": (["results", ROWS, "--where", "method=magic", "--out", "o.csv"], "no row"),
    "results: a field that there is not": (["results", ROWS, "--where", "colour=red"], "benchmark"),
    "results: output is a folder": (["results", ROWS, "--out", "data.csv/.."], "kind of file"),
    "results: two that share no cell": (["results", ROWS, "--against", SWEEP], "in common"),
    "score: answers of another benchmark": ([*SCORE, "mini_gsm8k", "--responses", "answers.jsonl"], "line 1"),
    "score: output is a folder": (
        [*SCORE, "mini_bbh", "--responses", "right.jsonl", "--out", "data"],
        "folder",
    ),
    "score: no such file": ([*SCORE, "mini_bbh", "--responses", "nowhere.jsonl"], "nowhere.jsonl"),
    "report: no such scale": (["report", "--scale", "nano", "--output", "data"], "mini"),
    "report: nothing measured": (["report", "--output", "data"], "reproduce table2"),
    "list: nothing of that name": (["list", "everything"], "stages"),
}  # fmt: skip


WRONG |= {
    f"{command[0]}: {name}": ([*command, f"{name}.jsonl"], "unpack" if name == "packed" else "line 1")
    for name in NO_LINES
    for command in (
        ["decode", "--model", "mars", "--out", "o.jsonl", "--prompt-ids"],
        ["distill", "--checkpoint", "ar_sft", "--out", "chats.jsonl", "--prompts"],
        ["score", "--benchmark", "mini_gsm8k", "--responses"],
        ["results"],
    )
}
WRONG["show: a question in Latin-1"] = (["show", "caf\udce9 is?", "--checkpoint", "mars", "--method", "ar"], "UTF-8")


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file with its content, locks left out."""
    return {
        str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".lock"
    }


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_usage_is_refused(mistake: str, folder: Path) -> None:
    """Guards against work before a refusal, tracebacks, exit codes other than 2, and files written or lost."""
    arguments, word = WRONG[mistake]
    (folder / "right.jsonl").write_text(json.dumps({"doc_id": 0, "response": "yes"}) + "\n")
    before = files_in(folder)
    done = CliRunner().invoke(app, arguments)
    said = done.stderr
    assert done.exit_code == 2, (done.exit_code, said, done.exception)
    assert word in said and "Traceback" not in said, said
    assert "fix:" in said or "Usage:" in said, "the program's own message, or that of the command line's parser"
    assert files_in(folder) == before


def test_what_cannot_be_measured_leaves_nothing_behind(folder: Path) -> None:
    """Guards against "not run" pages and an index that points to them, where a machine could measure nothing."""
    output = ["--output", "out", "--scale", "micro"]
    (folder / "empty").mkdir()
    done = CliRunner().invoke(app, ["reproduce", "table2", "--benchmarks", "real", "--data-dir", "empty", *output])
    assert done.exit_code == 3 and "could be measured" in done.stderr and "no local copy" in done.stderr
    workspace = Workspace(Path("out"), "micro")
    assert not workspace.reports.exists() and not workspace.store.exists()
