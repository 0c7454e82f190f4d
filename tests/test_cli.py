"""The command line's manners: help, version, exit codes, and what `doctor` says."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from marsbench import __version__, doctor, paths
from marsbench.cli import app
from marsbench.doctor import Check
from marsbench.errors import UserError
from marsbench.evaluation.humaneval import LOCAL_FILE
from marsbench.presets import preset

LITTLE_DATA = Path(__file__).parent / "data"
cli = CliRunner()


def in_new_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def break_doctor(monkeypatch: pytest.MonkeyPatch, trouble: BaseException) -> None:
    def checks(*_: object) -> list[Check]:
        raise trouble

    monkeypatch.setattr(doctor, "checks", checks)


@pytest.fixture
def sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has all that doctor looks for, whatever the one under the test is like."""
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "marsbench")
    monkeypatch.delenv("MARSBENCH_DATA", raising=False)
    monkeypatch.setattr(doctor, "check_packages", lambda: iter([]))
    monkeypatch.setattr(doctor, "others_cores", lambda: 0.0)
    monkeypatch.setattr(doctor, "preset", lambda scale: replace(preset(scale), memory_gib=0, disk_gib=0))


def test_help_names_the_first_commands() -> None:
    """Guards against a top-level help that leaves a newcomer without a next step."""
    result = cli.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("marsbench doctor", "marsbench reproduce table2", "marsbench report"):
        assert command in result.stdout


def test_version() -> None:
    """Guards against a version that differs from the package's own."""
    result = cli.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"marsbench {__version__}\n")


def test_help_loads_nothing_heavy() -> None:
    """Guards against a top-level import that makes `--help` wait for PyTorch."""
    heavy = "import sys, marsbench.cli, marsbench.doctor; print({'torch', 'transformers'} & sys.modules.keys())"
    result = in_new_process("-c", heavy)
    assert result.stdout == "set()\n", result.stderr


def test_mistakes_leave_with_2_in_a_real_process() -> None:
    """Guards against errors that only the test runner turns into exit codes, and against tracebacks."""
    result = in_new_process("-m", "marsbench", "doctor", "--scale", "70b")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: unknown scale '70b'\n  fix:   choose one of: 0.5b, 135m, 7b, micro, mini\n"


@pytest.mark.parametrize("arguments", [["docter"], ["doctor", "--scalee", "mini"]])
def test_usage_errors_leave_with_2(arguments: list[str]) -> None:
    """Guards against a misspelt command or option that is taken for success or for a bug."""
    result = cli.invoke(app, arguments)
    assert result.exit_code == 2
    assert "No such" in result.stderr


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        (
            UserError("no such model", where="here", fix="name another"),
            2,
            "error: no such model\n  where: here\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "rows.jsonl"),
            2,
            "error: No space left on device\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "rows.jsonl"), 2, "error: Permission denied\n"),
        (ModuleNotFoundError("no", name="lm_eval.api"), 2, "error: lm_eval is not installed\n  fix:   pip install"),
        (KeyboardInterrupt(), 130, "interrupted: the same command resumes the run\n"),
    ],
)
def test_mendable_troubles_become_one_message(
    monkeypatch: pytest.MonkeyPatch, trouble: BaseException, code: int, said: str
) -> None:
    """Guards against tracebacks, and wrong exit codes, for what the user can mend."""
    break_doctor(monkeypatch, trouble)
    result = cli.invoke(app, ["doctor"])
    assert result.exit_code == code
    assert result.stderr.startswith(said)
    assert result.stdout == ""


@pytest.mark.parametrize(
    "bug",
    [
        ValueError("a bug"),
        ModuleNotFoundError("a bug", name="marsbench.nothing"),
        FileNotFoundError(errno.ENOENT, "a bug"),
    ],
)
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    """Guards against a catch-all that dresses bugs up as mistakes of the user."""
    break_doctor(monkeypatch, bug)
    result = cli.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.exception is bug


@pytest.mark.usefixtures("sound_machine")
def test_doctor_passes_a_sound_machine_and_leaves_no_trace(tmp_path: Path) -> None:
    """Guards against false alarms, and against an examination that creates the output folder."""
    result = cli.invoke(app, ["doctor", "--output", str(tmp_path / "new" / "results")])
    assert result.exit_code == 0, result.stdout
    assert "fix:" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]


@pytest.mark.usefixtures("sound_machine")
def test_doctor_fails_with_2_and_a_mend(tmp_path: Path) -> None:
    """Guards against a failing machine that passes, and against a finding without a way out."""
    (tmp_path / "a-file").touch()
    result = cli.invoke(app, ["doctor", "--output", str(tmp_path / "a-file" / "results")])
    assert result.exit_code == 2
    assert "cannot write to" in result.stdout
    assert "fix: choose another --output" in result.stdout


def test_doctor_works_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a doctor that dies of the disease it should find."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [check.ok for check in doctor.check_device("mini", 1)] == ["fail"]


def test_doctor_reports_packages_as_the_metadata_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a missing core package that only warns, and a missing extra that stops a run."""
    wanted = ["no-such-core", "no-such-eval; extra == 'eval'", "no-such-dev; extra == 'dev'", "pytest>=1"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    found = {check.name: check for check in doctor.check_packages()}
    assert {name: check.ok for name, check in found.items()} == {
        "no-such-core": "fail",
        "no-such-eval": "warn",
        "pytest": "ok",
    }
    assert found["no-such-eval"].fix == "pip install 'marsbench[eval]'"


def test_doctor_compares_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an outdated package that counts as present."""
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["pytest<1"])
    *_, check = doctor.check_packages()
    assert check.ok == "fail" and check.finding.endswith("needed pytest<1")


def test_doctor_compares_needs() -> None:
    """Guards against a comparison the wrong way round or in the wrong unit."""
    assert [*doctor.check_device("mini", 1e6)][-1].ok == "fail"
    assert [doctor.check_output(Path("."), needed).ok for needed in (1e9, 0)] == ["fail", "ok"]


def test_doctor_looks_at_one_gpu_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two half-empty GPUs taken for one that holds the model."""
    free = [10 * doctor.GIB, 20 * doctor.GIB, 5 * doctor.GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * doctor.GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    found = [[*doctor.check_device("mini", needed)][-1] for needed in (20, 21)]
    assert "20.0 GiB available" in found[0].finding and [check.ok for check in found] == ["ok", "fail"]


def test_doctor_says_where_data_will_come_from(tmp_path: Path) -> None:
    """Guards against a mistyped data folder that shows only hours later."""
    assert (doctor.check_data("mini", None).ok, doctor.check_data("7b", None).ok) == ("ok", "warn")
    # At scale mini, real benchmarks are asked on request only.
    assert [doctor.check_data(scale, tmp_path / "nowhere").ok for scale in ("mini", "7b")] == ["warn", "fail"]


def test_doctor_looks_for_the_data_of_each_benchmark(tmp_path: Path) -> None:
    """Guards against a gap in local data that shows only when its benchmark is asked, HumanEval+ and a subtask too."""
    data = tmp_path / "data"
    shutil.copytree(LITTLE_DATA, data)
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
    assert "folder-a is no folder" in cli.invoke(app, ["doctor", "--data-dir", str(tmp_path / "folder-a")]).stdout
    monkeypatch.setenv("MARSBENCH_DATA", str(tmp_path / "folder-b"))
    assert "folder-b is no folder" in cli.invoke(app, ["doctor"]).stdout


def test_task_files_are_found_in_checkouts_and_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a wheel that takes a stranger's `tasks` folder for ours, and a silent absence."""
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "marsbench")
    assert [check.ok for check in doctor.check_packages()] == ["fail"]
    (tmp_path / "tasks").mkdir()
    assert paths.tasks_dir() == tmp_path / "tasks"
    (tmp_path / "marsbench" / "_tasks").mkdir(parents=True)
    assert paths.tasks_dir() == tmp_path / "marsbench" / "_tasks"


@pytest.mark.parametrize(("used", "ok"), [(0.9, "warn"), (0.05, "ok"), (None, "ok")])
def test_doctor_says_whether_others_are_at_work(used: float | None, ok: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a race beside a forgotten program, and a false alarm on an idle or a silent machine."""
    monkeypatch.setattr(doctor, "others_cores", lambda: used)
    assert doctor.check_idle().ok == ok
