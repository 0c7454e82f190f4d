"""The checks of a GPU, tried on the CPU: each runs, and each fails where what it looks for is broken."""

import copy
import io
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from rich.console import Console
from tools import invoke
from torch import Tensor

from marsbench.cli import app
from marsbench.decoding.engine import Batch
from marsbench.gpu_check import bench as benches
from marsbench.gpu_check import checks
from marsbench.gpu_check import window as windows
from marsbench.gpu_check.bench import Bench, Found, Timed, at_most
from marsbench.gpu_check.checks import run_checks
from marsbench.gpu_check.page import gpu_rows, page_of
from marsbench.gpu_check.window import Stage, Window, base_here, run_window, stages

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


def holds(name: str) -> bool | None:
    """Whether a check holds on the CPU."""
    return checks.CHECKS[name](Bench(CPU, quick=True)).holds


@pytest.mark.slow
def test_every_check_holds_on_the_cpu_and_makes_a_row(tmp_path: Path) -> None:
    """Guards against a check that fails for a GPU's first user by its own fault, and against minutes on a CPU."""
    began = time.process_time()
    rows = run_checks(CPU, (), quick=True, output=tmp_path, console=Console(quiet=True))
    assert [row.check for row in rows] == list(checks.CHECKS)
    assert [row.reason for row in rows if row.status != "done" or row.holds is False] == []
    assert time.process_time() - began < 120
    assert gpu_rows(tmp_path)[0] == rows
    assert (tmp_path / "reports/gpu.md").read_text(encoding="utf-8") == page_of(tmp_path)


@pytest.mark.gpu
def test_every_check_holds_on_a_gpu() -> None:
    """Guards against a release that no GPU has run."""
    rows = run_checks(torch.device("cuda"), (), quick=True, output=None, console=Console(quiet=True))
    assert [(row.check, row.reason) for row in rows if row.status != "done" or row.holds is False] == []


def test_answers_that_differ_from_the_cpus_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a device whose kernels answer differently while the check says that it is fit."""
    right = Bench.answers

    def wrong(self: Bench, loaded: Any, name: str, *more: Any, **ids: Any) -> list[list[int]]:
        answers = right(self, loaded, name, *more, **ids)
        return [[*answers[0], 7], *answers[1:]] if name == "mars-verified" else answers

    monkeypatch.setattr(Bench, "answers", wrong)
    monkeypatch.setattr(checks, "METHODS", {name: checks.METHODS[name] for name in ("ar", "mars-verified")})
    assert holds("methods-agree") is False


@pytest.mark.parametrize("kept", ["model", "eos_id"])
def test_graphs_that_keep_what_is_gone_are_seen(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against graphs of replaced weights, or of the first batch's EOS, that the check passes."""
    monkeypatch.setattr(checks, "METHODS", {"ar": checks.METHODS["ar"]})
    first: dict[str, Any] = {}

    def stale(model: Any, method: Any, *, eos_id: Any, **settings: Any) -> Batch:
        if not first:
            first.update(model=copy.deepcopy(model), eos_id=eos_id)
        now = {"model": model, "eos_id": eos_id, kept: first[kept]}
        return Batch(now["model"], method, eos_id=now["eos_id"], **settings)

    monkeypatch.setattr(Bench, "captured", lambda self: stale)
    facts = checks.CHECKS["graphs-agree"](Bench(CPU, quick=True))
    assert facts.holds is False
    assert facts.facts["other weights" if kept == "model" else "another EOS"] < facts.facts["ar"] == 6


def test_products_that_are_rounded_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against TF32 in place of fp32, and a check that fails where a user has asked for TF32."""
    assert holds("products-in-full") is True

    class Rounding(torch.Tensor):
        """Single numbers whose products are of ten bits or fewer."""

        def __matmul__(self, other: Any) -> Any:
            plain = self.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
            return plain[0] @ plain[1] if self.dtype == torch.float64 else (plain[0].half() @ plain[1].half()).float()

    right = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *arguments, **more: right(*arguments, **more).as_subclass(Rounding))
    assert holds("products-in-full") is False
    monkeypatch.setattr(checks, "float32_products", lambda: "high")
    assert holds("products-in-full") is None


class Nan(torch.autograd.Function):
    """Itself, with a gradient that is no number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("nan")


@pytest.mark.parametrize(
    ("check", "broken"), [("gradients-finite", Nan.apply), ("training-step", lambda total: total * float("inf"))]
)
def test_losses_and_gradients_that_are_not_finite_are_seen(
    check: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against attention whose backward pass gives NaN, and a training step that has lost its numbers."""
    right = checks.mars_loss

    def wrong(*arguments: Any, **more: Any) -> Any:
        loss = right(*arguments, **more)
        return type(loss)(broken(loss.total), loss.mask, loss.ar)

    monkeypatch.setattr(checks, "mars_loss", wrong)
    assert holds(check) is False


def test_a_training_that_resumes_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a resumed training that ends with other losses."""
    right, calls = checks.train, list[int]()

    def other(chosen: Any, folder: Path, *more: Any) -> Any:
        calls.append(1)
        return right(replace(chosen, seed=len(calls) // 3), folder, *more)

    monkeypatch.setattr(checks, "train", other)
    assert holds("training-resumes") is False


def test_kernels_that_are_planned_anew_for_every_length_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against attention that takes milliseconds at every new key length."""
    right, met = checks.F.scaled_dot_product_attention, set[int]()

    def planning(query: Tensor, keys: Tensor, *more: Any) -> Tensor:
        if keys.shape[2] not in met:
            met.add(keys.shape[2])
            time.sleep(0.01)
        return right(query, keys, *more)

    monkeypatch.setattr(checks.F, "scaled_dot_product_attention", planning)
    assert holds("attention-in-place") is False


def test_a_check_has_a_limit_and_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a check that says nothing for minutes, and against one that keeps the others from running."""

    def endless(bench: Bench) -> Found:
        bench.say("waiting")
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(checks, "CHECKS", {"endless": endless, "next": lambda bench: Found(None, {})})
    monkeypatch.setattr(checks, "_LIMIT_S", 0.1)
    console = Console(file=io.StringIO(), width=120)
    first, second = run_checks(CPU, (), quick=True, output=None, console=console)
    assert (first.status, first.reason, second.status) == ("timeout", "more than 0.1 s", "done")
    assert "endless: waiting" in console.file.getvalue()


def test_methods_are_compared_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a check of all methods that decodes batch by batch, for minutes on a GPU."""
    rows: list[int] = []
    right = benches.decode
    monkeypatch.setattr(benches, "decode", lambda *a, **more: rows.append(more["batch_size"]) or right(*a, **more))
    monkeypatch.setattr(checks, "METHODS", {name: checks.METHODS[name] for name in ("ar", "mars", "hf-assisted")})
    assert holds("methods-agree") is True
    assert sorted(rows) == [1, 1, 6, 6, 6, 6, 6]


def test_a_lack_of_memory_is_a_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one check's error that ends the command, and hides the results of the others."""
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(benches.Bench, "random_model", full)
    names = ["decoding-fits", "attention-in-place"]
    fits, fast = run_checks(CPU, names, quick=True, output=None, console=Console(quiet=True))
    assert (fits.status, fast.status) == ("failed", "done")
    assert "out of memory" in fits.reason


def test_models_and_graphs_that_gain_nothing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a memory check passed without a token, and captured steps that take as long as eager ones."""
    nothing = SimpleNamespace(emitted=0)
    monkeypatch.setattr(Bench, "timed", lambda *_, **more: Timed([0.001], [nothing]))
    assert holds("decoding-fits") is False
    monkeypatch.setattr(Bench, "timed", lambda *_, **more: Timed([0.001, 0.001], []))
    bench = Bench(CPU, quick=True)
    bench.on_gpu = True
    assert checks.CHECKS["steps-near-the-floor"](bench).holds is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("typed", "message"), [((), "no GPU"), (("--cpu", "--only", "graphs"), "graphs")])
def test_what_cannot_be_checked_is_refused(typed: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """Guards against a traceback, or a page about a CPU, without a GPU, and a mistyped name that checks nothing."""
    assert message in invoke("gpu-check", "--output", tmp_path, *typed, code=2).output
    assert not list(tmp_path.iterdir())


def test_the_committed_page_is_what_its_rows_say() -> None:
    """Guards against a page that lags behind its rows, and a computation that is wrong."""
    page = (ROOT / "reports/gpu.md").read_text(encoding="utf-8")
    assert page == page_of(ROOT), "stale: run `nox -s report`"
    (on_gsm8k,) = [line for line in page.splitlines() if line.startswith("| GSM8K") and "1.79" in line]
    assert [cell.strip() for cell in on_gsm8k.strip("|").split("|")][2:] == ["1.61", "1.62", "1.61", "1.56", "0.65"]


@pytest.fixture
def tiny(tmp_path: Path) -> Window:
    """A window on the CPU."""
    return Window(CPU, tmp_path, Console(file=io.StringIO(), width=200), base_here(True), tiny=True)


def test_a_tiny_window_walks_through_all_of_it(tiny: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stage that fails only in a GPU's ten minutes, and a command that does not exist."""
    typed: list[tuple[str, ...]] = []
    monkeypatch.setattr(windows, "command", lambda *words: typed.append(words) or "FOLDER")
    ended = run_window(tiny, 20)
    assert [result[:3] for result in ended] == [(stage.name, "done", "") for stage in stages(tiny)]
    checked, steps = gpu_rows(tiny.output)
    assert {row.method for row in steps} == {"ar", "mars", "mars-verified"} and len({row.key for row in steps}) == 7
    (forced,) = [row for row in steps if "acceptance" in row.options]
    assert forced.options["acceptance"].startswith("carried over from the paper's Table 4")
    assert forced.tokens_per_second > 0 and len(checked) == 2 and (tiny.output / "reports/gpu.md").exists()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, *words in typed:
        assert commands[name].make_context(name, list(words)).params
    assert [words[0] for words in typed].count("train") == 6
    assert run_window(tiny, 20) == [], "what is done is not done again"
    windows.time_steps(tiny, "small")
    assert len(gpu_rows(tiny.output)[1]) == len(steps), "newer rows take the place of older ones"


def test_a_stage_that_hangs_or_fails_leaves_the_others_their_time(
    tiny: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ten minutes that are spent on one stage, or lost with it."""
    seen: list[str] = []
    several = [
        Stage("hangs", 0.2, lambda window: time.sleep(60)),
        Stage("breaks", 9, Mock(side_effect=RuntimeError("no such kernel"))),
        Stage("runs", 9, lambda window: seen.append("runs")),
        Stage("real", 9, lambda window: seen.append("real"), True),
    ]  # fmt: skip
    monkeypatch.setattr(windows, "stages", lambda window: several)
    tiny.base = None
    assert [result.status for result in run_window(tiny, 1)] == ["timeout", "failed", "done", "skipped"]
    assert seen == ["runs"]
    assert [result[:2] for result in run_window(tiny, 0)] == [(name, "skipped") for name in ("hangs", "breaks", "real")]


def test_a_limit_within_a_limit_keeps_both() -> None:
    """Guards against a check's own limit that takes away its stage's."""
    began = time.monotonic()
    with pytest.raises(TimeoutError), at_most(0.3):
        with at_most(9):
            pass
        time.sleep(5)
    with pytest.raises(TimeoutError), at_most(0.2), at_most(9):
        time.sleep(5)
    assert time.monotonic() - began < 3
