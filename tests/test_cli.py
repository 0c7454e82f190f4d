"""The command line: help, version, exit codes, refusals, and what `doctor` says."""

import atexit
import errno
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed
from made_up import ROOT, page_rows
from rich.console import Console
from tools import invoke

from marsbench import __version__, doctor, files, progress
from marsbench.errors import UserError
from marsbench.evaluation.humaneval import LOCAL_FILE
from marsbench.presets import preset
from marsbench.progress import Bar, all_processes, roughly
from marsbench.provenance import others_cores, provenance, warning
from marsbench.rendering.sections import busy_remark
from marsbench.rows.kinds import SweepRow
from marsbench.rows.workspace import Workspace


def in_new_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every need that doctor checks is met, also where the tests run on a small computer."""
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "marsbench")
    monkeypatch.delenv("MARSBENCH_DATA", raising=False)
    monkeypatch.setattr(doctor, "check_packages", lambda: iter([]))
    monkeypatch.setattr(doctor, "others_cores", lambda: 0.0)
    monkeypatch.setattr(doctor, "preset", lambda scale: replace(preset(scale), memory_gib=0, disk_gib=0))


def test_help_and_version() -> None:
    """Guards against help without a next step, and a version that differs from the package's own."""
    result = invoke("--help")
    for command in ("marsbench doctor", "marsbench reproduce table2", "marsbench report"):
        assert command in result.stdout
    assert invoke("--version").stdout == f"marsbench {__version__}\n"


def test_mistakes_leave_with_2_in_a_real_process() -> None:
    """Guards against errors that only the test runner turns into exit codes, and against tracebacks."""
    result = in_new_process("-m", "marsbench", "doctor", "--scale", "70b")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: unknown scale '70b'\n  fix:   choose one of: 0.5b, 135m, 7b, micro, mini\n"


@pytest.mark.parametrize(
    ("trouble", "code", "message"),
    [
        (UserError("no such model", where="here", fix="name another"), 2, "error: no such model\n  where: here\n"),
        (OSError(errno.ENOSPC, "No space left on device", "rows.jsonl"), 2, "error: No space left on device\n"),
        (PermissionError(errno.EACCES, "Permission denied", "rows.jsonl"), 2, "error: Permission denied\n"),
        (ModuleNotFoundError("no", name="lm_eval.api"), 2, "error: lm_eval is not installed\n  fix:   pip install"),
        (KeyboardInterrupt(), 130, "interrupted: the same command resumes the run\n"),
    ],
)
def test_mendable_troubles_become_one_message(
    monkeypatch: pytest.MonkeyPatch, trouble: BaseException, code: int, message: str
) -> None:
    """Guards against tracebacks, and wrong exit codes, for errors that the user can mend."""
    monkeypatch.setattr(doctor, "checks", Mock(side_effect=trouble))
    result = invoke("doctor", code=code)
    assert result.stderr.startswith(message)
    assert result.stdout == ""


@pytest.mark.parametrize(
    "bug",
    [ValueError("a bug"), ModuleNotFoundError("a bug", name="marsbench.nothing"), FileNotFoundError(errno.ENOENT, "!")],
)
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    """Guards against a catch-all that shows bugs as mistakes of the user."""
    monkeypatch.setattr(doctor, "checks", Mock(side_effect=bug))
    assert invoke("doctor", code=1).exception is bug


@pytest.mark.usefixtures("sound_machine")
def test_doctor_passes_a_sound_machine_and_leaves_no_trace(tmp_path: Path) -> None:
    """Guards against false alarms, a failing computer that passes, no advice, and an output folder that is created."""
    result = invoke("doctor", "--output", str(tmp_path / "new" / "results"))
    assert "fix:" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]
    (tmp_path / "a-file").touch()
    result = invoke("doctor", "--output", str(tmp_path / "a-file" / "results"), code=2)
    text = " ".join(result.stdout.split())
    assert "cannot be written" in text and "choose another --output" in text


def test_doctor_reports_packages_as_the_metadata_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a missing core package that only warns, an extra that stops a run, an old version, no torch."""
    wanted = ["no-such-core", "no-such-eval; extra == 'eval'", "no-such-dev; extra == 'dev'", "pytest>=1"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    checks = {check.name: check for check in doctor.check_packages()}
    verdicts = {name: check.ok for name, check in checks.items()}
    assert verdicts == {"no-such-core": "fail", "no-such-eval": "warn", "pytest": "ok"}
    assert checks["no-such-eval"].fix == "pip install 'marsbench[eval]'"
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["pytest<1"])
    *_, check = doctor.check_packages()
    assert check.ok == "fail" and check.finding.endswith("needed pytest<1")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [check.ok for check in doctor.check_device("mini", 1)] == ["fail"]


def test_doctor_compares_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reversed comparison, and two half-empty GPUs taken for a GPU that holds the model."""
    assert [*doctor.check_device("mini", 1e6)][-1].ok == "fail"
    assert [doctor.check_output(Path("."), needed).ok for needed in (1e9, 0)] == ["fail", "ok"]
    free = [10 * doctor.GIB, 20 * doctor.GIB, 5 * doctor.GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * doctor.GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    checks = [[*doctor.check_device("mini", needed)][-1] for needed in (20, 21)]
    assert "20.0 GiB available" in checks[0].finding and [check.ok for check in checks] == ["ok", "fail"]


def test_doctor_looks_for_the_data_of_each_benchmark(tmp_path: Path) -> None:
    """Guards against a wrong data folder or missing data, also HumanEval+ or a subtask, that shows hours later."""
    assert (doctor.check_data("mini", None).ok, doctor.check_data("7b", None).ok) == ("ok", "warn")
    # At scale mini, real benchmarks are used on request only.
    assert [doctor.check_data(scale, tmp_path / "nowhere").ok for scale in ("mini", "7b")] == ["warn", "fail"]
    data = tmp_path / "data"
    shutil.copytree(ROOT / "tests" / "data", data)
    assert doctor.check_data("mini", data).ok == "ok"
    gone = ("gpqa/gpqa_main.jsonl", "bbh/word_sorting.jsonl", LOCAL_FILE)
    for file in gone:
        (data / file).unlink()
    check = doctor.check_data("7b", data)
    assert check.ok == "warn" and all(f"{file} (" in check.finding for file in gone)
    assert check.finding.count("will be skipped") == len(gone)


@pytest.mark.usefixtures("sound_machine", "wide_terminal")
def test_doctor_takes_a_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against an option, or its variable, that doctor does not pass on."""
    assert "folder-a is no folder" in invoke("doctor", "--data-dir", tmp_path / "folder-a").stdout
    monkeypatch.setenv("MARSBENCH_DATA", str(tmp_path / "folder-b"))
    assert "folder-b is no folder" in invoke("doctor").stdout


def test_task_files_are_found_in_checkouts_and_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a wheel that takes another package's `tasks` folder for ours, and files silently missing."""
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "marsbench")
    assert [check.ok for check in doctor.check_packages()] == ["fail"]
    (tmp_path / "tasks").mkdir()
    assert files.tasks_dir() == tmp_path / "tasks"
    (tmp_path / "marsbench" / "_tasks").mkdir(parents=True)
    assert files.tasks_dir() == tmp_path / "marsbench" / "_tasks"


HEAVY = ("torch", "transformers", "datasets", "lm_eval", "scipy", "matplotlib", "pandas")
LIGHT = (
    "cli", "decoding.acceptance", "decoding.generation", "doctor", "evaluation.benchmarks", "evaluation.local_data",
    "hub", "methods", "paper", "presets", "statistics.intervals", "training.stages", "world",
)  # fmt: skip


def test_registries_are_read_without_what_is_heavy() -> None:
    """Guards against a `list` that waits seconds for PyTorch, scipy or datasets, which it does not need."""
    light = ", ".join(f"marsbench.{name}" for name in LIGHT)
    program = f"import sys, {light}; print([name for name in {HEAVY} if name in sys.modules])"
    done = in_new_process("-c", program)
    assert done.stdout == "[]\n", done.stderr


def test_lines_come_now_and_then_and_say_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a flooded log, an interrupted run's work taken for this run's speed, and a division by zero."""

    def log_of(*updates: tuple[float, int, str]) -> list[str]:
        clock, log = [0.0], StringIO()
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
        bar = Bar("racing [/x]", None, Console(file=log, width=80))
        for clock[0], done, note in updates:
            bar.update(done, 400, note)
        return log.getvalue().splitlines()

    assert log_of((0, 100, ""), (10, 105, ""), (30, 115, "loss 2"), (40, 120, ""), (60, 130, "")) == [
        "  racing [/x]: 115/400, about 10 min left, loss 2",  # 15 in 30 seconds, 285 to go
        "  racing [/x]: 130/400, about 9 min left",
    ]
    assert log_of((60, 25, "loss 2")) == ["  racing [/x]: 25/400, loss 2"]
    words = ["less than a minute", "about 1 min", "about 83 min", "about 2.5 hours"]
    assert list(map(roughly, (0, 60, 5000, 9000))) == words


def test_processes_part_before_python_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against threads that run on after all work is done, and abort Python one time in three."""
    at_the_end: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert all_processes() and torch.distributed.is_initialized()
    for part in at_the_end:
        part()
    assert not torch.distributed.is_initialized()


def test_a_busy_neighbour_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a race beside a forgotten program, a false alarm, and an error where the CPU's use is unknown."""
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # the program has started
        used = others_cores(0.3)
        process.kill()
    assert used is not None and used > 0.25
    assert "this machine is not idle" in warning(used) and warning(0.1) == warning(None) == ""
    for cores, ok in ((0.9, "warn"), (0.05, "ok"), (None, "ok")):
        monkeypatch.setattr(doctor, "others_cores", lambda cores=cores: cores)
        assert doctor.check_idle().ok == ok
    monkeypatch.setattr(psutil, "cpu_percent", Mock(side_effect=FileNotFoundError("/proc/stat")))
    assert others_cores(0.01) is None


@pytest.mark.parametrize(("laps", "used"), [([0.02, 0.05, 0.9], ""), ([0.02, 0.6, 0.9], "0.60"), ([], "0.30")])
def test_a_page_says_what_was_not_timed_alone(laps: list[float], used: str) -> None:
    """Guards against a speed-up measured beside a compiler and shown like any other, and a false alarm."""
    alone = next(row for row in page_rows("speedup") if isinstance(row, SweepRow) and row.seconds)
    busy: dict[str, Any] = {"others_cores": laps, "provenance": {**alone.provenance, "others_cores": 0.3}}
    remark = busy_remark([replace(alone, others_cores=[]), replace(alone, **busy)])
    assert f"up to {used} cores" in remark if used else not remark


def test_rows_say_how_threads_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times of spinning and of sleeping threads that seem to come from one setting."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert provenance(seed=0)["wait_policy"] == "the library's own"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert provenance(seed=0)["wait_policy"] == "the library's own, GOMP_SPINCOUNT=1000"


ROWS = str(ROOT / "results" / "mini" / "ar_sft.jsonl")
DECODE = ["decode", "--prompt-ids", "prompts.jsonl"]
SCORE = ["score", "--benchmark"]
DISTILL = ["distill", "--checkpoint", "ar_sft", "--prompts", "questions.jsonl", "--out", "chats.jsonl"]
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


@pytest.fixture(scope="module")
def wrongly(micro_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for wrong commands; no command may change any of them."""
    tmp_path = tmp_path_factory.mktemp("wrongly")
    (tmp_path / "data").mkdir()
    shutil.copytree(next(micro_checkpoints.glob("mars-b4-*")), tmp_path / "mars")
    shutil.copytree(next(micro_checkpoints.glob("ar_sft-*")), tmp_path / "ar_sft")
    shutil.copytree(tmp_path / "mars", tmp_path / "maskless")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / "mars" / name).read_text()
        (tmp_path / "maskless" / name).write_text(text.replace("<|mask|>", "<|spare|>").replace("mask_token", "spare"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    (tmp_path / "questions.jsonl").write_text('{"prompt": "One?"}\n')
    (tmp_path / "answers.jsonl").write_text('{"doc_id": 0, "response": "4", "target": "of another benchmark"}\n')
    ar = "{method: ar, stage: mars, name: ar}"
    compared = f"{ar}\n- {{method: mars, stage: mars, compiled: true}}"
    grids = {"grid": (6, "{method: magic, stage: mars}"), "few": (7, ar), "compiled": (6, compared)}
    for name, (prompts, contenders) in grids.items():
        text = f"batch_sizes: [1]\nprompts: {prompts}\nrepeats: 1\ncontenders:\n- {contenders}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    for name, content in NO_LINES.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    (tmp_path / "right.jsonl").write_text(json.dumps({"doc_id": 0, "response": "yes"}) + "\n")
    return tmp_path


@pytest.fixture
def folder(wrongly: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of these files, in which every command runs."""
    monkeypatch.chdir(wrongly)
    monkeypatch.delenv("MARSBENCH_DATA", raising=False)
    trained = Mock(side_effect=AssertionError("something was trained"))
    monkeypatch.setattr("marsbench.training.trainer.train", trained)
    monkeypatch.setattr("marsbench.racing.course.step_times", trained)
    return wrongly


WRONG: dict[str, tuple[list[str], str]] = {  # mistake -> (what is typed, a word that the message must hold)
    "eval: threshold for a method without": ([*EVAL, "--method", "ar", "--threshold", "0.9"], "takes no threshold"),
    "no such command": (["docter"], "No such"),
    "doctor: no such option": (["doctor", "--scalee", "mini"], "No such"),
    "eval: no such method": ([*EVAL, "--method", "magic"], "mars-verified"),
    "eval: no such stage": ([*EVAL, "--stage", "marz"], "ar_sft"),
    "eval: one of two benchmarks unknown": ([*EVAL, "--benchmark", "trivia"], "mini_gsm8k"),
    "eval: masks that the stage never saw": ([*EVAL, "--stage", "ar_sft"], "trained with masks"),
    "eval: masks that the checkpoint never saw": ([*EVAL, "--checkpoint", "ar_sft"], "trained with masks"),
    "eval: a checkpoint without a mask token": ([*EVAL, "--checkpoint", "maskless"], "mask token"),
    "eval: no draft model": ([*EVAL, "--method", "speculative"], "draft"),
    "eval: no heads": ([*EVAL, "--method", "medusa"], "heads"),
    "eval: no such checkpoint": ([*EVAL, "--checkpoint", "./nowhere"], "no such checkpoint"),
    "eval: no such policy": ([*EVAL, "--existing", "perhaps"], "rerun"),
    "eval: a part of no whole": ([*EVAL, "--shard", "5/4"], "from 1/N to N/N"),
    "eval: no such scale": ([*EVAL, "--scale", "huge"], "mini"),
    "eval: window of nothing": ([*EVAL, "--method", "mars-verified", "--window", "0"], "--window"),
    "eval: no tokens": ([*EVAL, "--max-new-tokens", "0"], "--max-new-tokens"),
    "eval: no such data folder": ([*EVAL, "--data-dir", "nope"], "no such folder"),
    "eval: no such data": (["eval", "--benchmark", "gsm8k", "--data-dir", "data", *HERE], "no local copy"),
    "eval: a window for a method without": ([*EVAL, "--method", "ar", "--window", "3"], "no window"),
    "show: an option that neither method has": (["show", "--tree-width", "3", *HERE], "medusa"),
    "distill: an option that the method has not": ([*DISTILL, "--cache-block", "8"], "mars-block-cache"),
    "eval: a seed below 0": ([*EVAL, "--seed", "-1"], "--seed"),
    "eval: no prompt tokens": ([*EVAL, "--prefill-positions", "0"], "--prefill-positions"),
    "show: no question": (["show", "", *HERE], "empty"),
    "show: no tokens": (["show", "--window", "8", "--max-new-tokens", "0", *HERE], "--max-new"),
    "show: an image of no kind": (["show", "--image", "answer.doc", *HERE], "svg"),
    "show: an image that is a folder": (["show", "--image", "data.svg/", "--method", "magic", *HERE], "magic"),
    "decode: no such prompts": ([*DECODE[:2], "nowhere.jsonl", "--model", "mars", "--out", "o.jsonl"], "nowhere.jsonl"),
    "decode: no mask token": ([*DECODE, "--model", "maskless", "--out", "o.jsonl"], "--mask-id"),
    "decode: a tree": ([*DECODE, "--model", "mars", "--out", "o", "--method", "ar", "--tree-width", "3"], "medusa"),
    "reproduce: no such table": (["reproduce", "table99", *HERE], "table2"),
    "reproduce: quick for no sweep": (["reproduce", "table2", "--quick", *HERE], "--quick"),
    "reproduce: a part of a page without any": (["reproduce", "figure1", "--shard", "1/2", *HERE], "divides questions"),
    "reproduce: GPUs for the toy": (["reproduce", "table2", "--gpus-per-training", "2", *HERE], "choose a scale of"),
    "reproduce: no jobs": (["reproduce", "table2", "--jobs", "0", *HERE], "--jobs"),
    "reproduce: benchmarks that a table has not": (["reproduce", "table8", "--benchmarks", "mini_bbh", *HERE], "gsm8k"),
    "reproduce: a race of five benchmarks": (
        ["reproduce", "table5", "--benchmarks", "mini_bbh,mini_ifeval,mini_gpqa,mini_gsm8k,mini_humaneval", *HERE],
        "cannot share"),
    "reproduce: a checkpoint for no stage": (["reproduce", "table2", "--checkpoint", "marz=mars", *HERE], "ar_sft"),
    "reproduce: no such checkpoint": (["reproduce", "table9", "--checkpoint", "mars=/nowhere", *HERE], "no such check"),
    "plan: two plans": (["plan", "--sweep", "--table", "2"], "--sweep"),
    "plan: a grid for no sweep": (["plan", "--grid", "grid.yaml"], "--sweep"),
    "plan: no such table": (["plan", "--table", "99"], "table2"),
    "sweep: an unknown method in the grid": (["sweep", "--grid", "grid.yaml", *HERE], "grid.yaml, contender 1"),
    "sweep: prompts that benchmarks cannot share": (["sweep", "--grid", "few.yaml", *HERE], "multiple of 6"),
    "sweep: a label that leads elsewhere": (["sweep", "--label", "../../elsewhere", *HERE], "--label"),
    "sweep: a label of no folder of its own": (["sweep", "--label", ".", *HERE], "--label"),
    "sweep: a label that seems a training seed": (["sweep", "--label", "seed1", *HERE], "no folder of its own"),
    "sweep: no such grid": (["sweep", "--grid", "nowhere.yaml", *HERE], "nowhere.yaml"),
    "sweep: compiled against eager": (["sweep", "--grid", "compiled.yaml", *HERE], "no compiled 'ar'"),
    "tune: a stage without masks": ([*TUNE, "--stage", "ar_sft", "--prompts", "6"], "trained with masks"),
    "tune: prompts that benchmarks cannot share": ([*TUNE, "--prompts", "7"], "multiple of 6"),
    "train: no such stage": (["train", "nothing", *HERE], "ar_sft"),
    "train: a block of far too many": (["train", "mars", "--block-size", "99999999", *HERE], "--block-size"),
    "adapt: time without end": (["adapt", *DISTILL[3:], "--base", "ar_sft", "--hours", "inf"], "--hours"),
    "train: chat data in the world": (["train", "mars", "--chat-data", "prompts.jsonl", *HERE], "of 0.5b, 135m, 7b"),
    "fetch: no such model": (["fetch", "smollm2-9000b"], "smollm2-135m"),
    "distill: no such prompts": ([*DISTILL, "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    "distill: token ids": ([*DISTILL, "--prompts", "prompts.jsonl"], "--column"),
    "distill: no such column": ([*DISTILL, "--column", "question"], "question"),
    "distill: prompts overwritten": ([*DISTILL, "--out", "questions.jsonl"], "overwrite"),
    "distill: a method that may write otherwise": ([*DISTILL, "--method", "mars"], "mars-verified"),
    "distill: a temperature below 0": ([*DISTILL, "--temperature", "-1"], "--temperature"),
    "distill: several greedy answers": ([*DISTILL, "--samples", "2"], "--temperature"),
    "distill: sampling by a greedy method": ([*DISTILL, "--method", "hf-generate", "--temperature", "1"], "greedy"),
    "distill: rows for a method of one": (
        [*DISTILL, "--method", "hf-assisted", "--draft", "ar_sft", "--batch-size", "2"], "batch size of 1"),
    "distill: masks that the checkpoint never saw": ([*DISTILL, "--method", "mars-verified"], "trained with masks"),
    "results: a folder without rows": (["results", str(ROOT / "docs")], "no rows"),
    "results: no match to write": (["results", ROWS, "--where", "method=magic", "--out", "o.csv"], "no row"),
    "results: a field that there is not": (["results", ROWS, "--where", "colour=red"], "benchmark"),
    "results: two that share no cell": (["results", ROWS, "--against", ROWS], "in common"),
    "results: nothing to write": (["results", ROWS, "--against", ROWS, "--out", "o.csv"], "only prints"),
    "results: output is a folder": (["results", ROWS, "--out", "data.csv/.."], "kind of file"),
    "score: answers of another benchmark": ([*SCORE, "mini_gsm8k", "--responses", "answers.jsonl"], "line 1"),
    "score: output is a folder": ([*SCORE, "mini_bbh", "--responses", "right.jsonl", "--out", "data"], "folder"),
    "score: answers overwritten": ([*SCORE, "mini_bbh", "--responses", "right.jsonl", "--out", "right.jsonl"], "over"),
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


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file but locks, with its size and the time of its last change."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock")
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_usage_is_refused(mistake: str, folder: Path) -> None:
    """Guards against work before a refusal, tracebacks, exit codes other than 2, and files written or lost."""
    arguments, word = WRONG[mistake]
    before = files_in(folder)
    errors = invoke(*arguments, code=2).stderr
    assert word in errors and "Traceback" not in errors, errors
    assert "fix:" in errors or "Usage:" in errors, "the program's own message, or that of the command line's parser"
    assert files_in(folder) == before


def test_what_cannot_be_measured_leaves_nothing_behind(folder: Path) -> None:
    """Guards against "not run" pages and an index that points to them, where nothing could be measured."""
    output = ["--output", "out", "--scale", "micro"]
    (folder / "empty").mkdir()
    done = invoke("reproduce", "table2", "--benchmarks", "real", "--data-dir", "empty", *output, code=3)
    assert "could be measured" in done.stderr and "no local copy" in done.stderr
    workspace = Workspace(Path("out"), "micro")
    assert not workspace.reports.exists() and not workspace.store.exists()
