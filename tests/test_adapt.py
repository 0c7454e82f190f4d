"""`marsbench adapt`: from a model and prompts to an adapter and a page, whatever interrupts it."""

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tools import forked, invoke

from marsbench import world
from marsbench.adapting import adapt
from marsbench.adapting.adapt import CONTENDERS, Adapting, Plan, Result, page_of
from marsbench.decoding.generation import Generation
from marsbench.methods import METHODS
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.training.checkpoints import load

HOURS = "0.02"


@pytest.fixture(scope="module")
def base(micro_checkpoints: Path) -> Path:
    return next(micro_checkpoints.glob("ar_sft-*"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = [question.prompt for name in ("mini_gsm8k", "mini_bbh") for question in world.test_set(name, 9)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


def arguments(base: Path, prompts: Path, out: Path, hours: str = HOURS) -> list[str]:
    return ["adapt", "--base", str(base), "--prompts", str(prompts), "--out", str(out), "--hours", hours]


def what_is_sure(page: str) -> list[list[str]]:
    """The page's table without what depends on the clock."""
    lines = [[text.strip() for text in line.split("|")] for line in page.splitlines() if line.startswith("|")]
    return [[*line[1:2], *line[3:5]] for line in lines]


def test_no_contender_may_lose_a_token() -> None:
    """Guards against a setting that is recommended for its speed and gives other tokens than the model."""
    assert all(METHODS[contender.method].lossless for contender in CONTENDERS)


@pytest.mark.slow
def test_killed_at_every_stage_it_ends_with_the_page_of_a_run_that_was_not(
    base: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against answers, steps or an adapter that are lost or half written, and a plan that changes midway."""
    monkeypatch.setattr(adapt, "LAPS", 2)  # no assertion is about speed
    monkeypatch.setattr(adapt, "_RACED_TOKENS", 24)
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    invoke(*arguments(base, prompts, unbroken))
    page = (unbroken / "README.md").read_text()
    assert [line[0] for line in what_is_sure(page)[2:]] == [contender.name for contender in CONTENDERS]
    plan = json.loads((unbroken / "plan.json").read_text())
    assert "Of {0} answers, {0} have the tokens of `ar`.".format(plan["held_out"] * len(CONTENDERS)) in page
    loaded = load(unbroken / "adapter")
    assert loaded.model.adapter.head is not None  # type: ignore[union-attr]
    assert loaded.acceptance and all(0 <= rate <= 1 for rate in loaded.acceptance), "for the table of windows"
    killed.mkdir()
    shutil.copy(unbroken / "plan.json", killed)  # what fits into the time is measured, and would differ
    for seen in ("answering by ar", "training base_gated_network", "racing on"):
        log = tmp_path / seen
        process = forked(*arguments(base, prompts, killed), log=log)
        while process.is_alive() and not (log.exists() and seen in log.read_text()):
            time.sleep(0.01)
        assert process.is_alive(), seen
        process.kill()
        process.join()
        assert not (killed / "README.md").exists()
    invoke(*arguments(base, prompts, killed))
    assert what_is_sure((killed / "README.md").read_text()) == what_is_sure(page)
    for name in ("answers.jsonl", "adapter/adapter_model.safetensors", "adapter/draft_head.safetensors"):
        assert (killed / name).read_bytes() == (unbroken / name).read_bytes(), name


def test_what_cannot_work_is_refused_before_any_work(base: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against an hour of answers to too few prompts, or by a model without a chat template."""
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "Who?"}\n')
    silent = tmp_path / "silent"
    shutil.copytree(base, silent)
    (silent / "chat_template.jinja").unlink()
    out = tmp_path / "out"
    for model, file, message in (
        (base, few, "1 prompts are too few"),
        (silent, prompts, "chat template"),
        (tmp_path / "none", prompts, "there is no such"),
    ):
        done = invoke(*arguments(model, file, out), code=2)
        assert message in done.stderr, done.stderr
        assert not out.exists()


def test_too_little_time_is_said_with_what_would_be_enough(
    base: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a useless training that takes all the time, and answers of an earlier try that take none."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.jsonl").write_text("left by an earlier try\n")
    monkeypatch.setattr(adapt, "training_speed", lambda *_: SimpleNamespace(seconds=[1.0]))
    done = invoke(*arguments(base, prompts, tmp_path / "out", "0.001"), code=2)
    assert "0.001 hours are too short" in done.stderr
    assert float(re.findall(r"--hours ([\d.]+)", done.stderr)[0]) > 0.001
    assert not (tmp_path / "out" / "plan.json").exists()


@pytest.mark.parametrize(
    ("speed", "same", "gap", "sentence"),
    [
        (1.5, 4, 0.0, "1.50 [1.50, 1.50] times as fast"), (0.9, 4, 0.0, "Nothing was faster than `ar`"),
        (1.5, 3, 0.25, "Of 8 answers, 7 have the tokens of `ar`. Where others part from it, the two tokens are 0.25"),
        (1.5, 3, 3.0, "**that is no near tie; please report it**."),
    ],
)  # fmt: skip
def test_the_page_says_what_was_found(speed: float, same: int, gap: float, sentence: str) -> None:
    """Guards against a page that recommends a slower setting, or does not report a wrong answer."""
    results = [
        Result(next(line for line in CONTENDERS if line.name == name), Estimate(x, Interval(x, x), 5), 2.0, count, gap)
        for name, x, count in (("ar", 1.0, 4), ("masks, linear, W = 3", speed, same))
    ]
    page = page_of("a-model", Path("out/adapter"), torch.bfloat16, Plan(24, 4, 50), results, [4, 3, 1])
    assert sentence in page and "up to 1 rows 4 tokens, up to 2 rows 3 tokens, above ar" in page
    assert ("--method mars-verified --layout linear --window 3" in page) == (speed > 1)


def test_the_gap_is_of_the_place_where_answers_part(base: Path) -> None:
    """Guards against a fault taken for a near tie, and an answer that ends where the other goes on."""
    loaded, other = load(base), Generation([5, 7, 9], [1, 2, 3], 3, "length")
    logits = loaded.model(torch.tensor([[3, 4, 5]])).logits[0, -1]
    for ar, token in ((Generation([5, 6, 9], [1, 2, 3], 3, "length"), 6), (Generation([5], [1, 2], 2, "eos", 2), 2)):
        gap = Adapting._gap(SimpleNamespace(_loaded=loaded), [3, 4], ar, other)  # type: ignore[arg-type]
        assert gap == pytest.approx(float((logits[token] - logits[7]).detach()), abs=1e-4)
