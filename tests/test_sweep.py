"""The speed sweep at micro scale: undisturbed, killed at random moments, and its parts."""

import json
import random
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import yaml
from test_static import MASK, PAD, llama
from tools import forked, invoke
from transformers import PreTrainedModel
from typer.testing import CliRunner

from marsbench.answering import Answering
from marsbench.cli import app
from marsbench.compiled.fixed import Steps
from marsbench.decoding.acceptance_report import Acceptance
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.files import PACKAGE
from marsbench.findings.export import export, matching, merged
from marsbench.findings.sweep import SweepCells
from marsbench.line import Line
from marsbench.methods import METHODS, Options, build_method
from marsbench.methods.carried import carried_over
from marsbench.presets import preset, scales
from marsbench.racing import race as race_module
from marsbench.racing import sweep as sweep_module
from marsbench.racing.grid import Grid, carried_of, draws_of, read_grid, shipped_grid
from marsbench.racing.position_law import PositionLaw, Work, predicted_seconds
from marsbench.racing.race import Race, RoundLog, Stopwatch
from marsbench.racing.tune import Advice, Setting
from marsbench.rows.kinds import SweepRow, TrainingRow
from marsbench.rows.workspace import Workspace, read_rows, rows_text
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.training.checkpoints import Loaded

KILLS = 3
SMALL: dict[str, Any] = {
    **{"batch_sizes": [2], "prompts": 6, "repeats": 2, "positions": 0},
    "contenders": [
        {"name": "ar", "method": "ar", "stage": "mars"},
        {"name": "hf-generate", "method": "hf-generate", "stage": "mars"},
        {"method": "mars", "stage": "mars", "threshold": ["one", 0.2]},
    ],
}


def run_sweep(output: Path, *options: str) -> None:
    invoke("sweep", "--scale", "micro", "--output", str(output), *options)


def rows_in(output: Path, variant: str = "") -> list[SweepRow]:
    return [row for row in Workspace(output, "micro", variant).rows if isinstance(row, SweepRow)]


@pytest.fixture(scope="module")
def swept(micro_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of the shipped grid."""
    output = tmp_path_factory.mktemp("swept")
    shutil.copytree(micro_checkpoints, Workspace(output, "micro").runs / "checkpoints")
    run_sweep(output)
    return output


def with_checkpoints(swept: Path, output: Path) -> Path:
    """A folder that has the trained checkpoints and nothing else; the grid's file lies in it too."""
    shutil.copytree(Workspace(swept, "micro").runs / "checkpoints", Workspace(output, "micro").runs / "checkpoints")
    (output / "grid.yaml").write_text(yaml.safe_dump(SMALL))
    return output


def test_every_cell_has_numbers_that_agree_or_a_reason(swept: Path) -> None:
    """Guards against holes in the grid, speed in tokens that are not shown, and a speed-up bought with other tokens."""
    grid, rows = read_grid(shipped_grid("micro")), rows_in(swept)
    assert [(row.contender, row.batch_size) for row in rows] == [
        (entry.name, size) for size in grid.batch_sizes for entry in grid.contenders
    ]
    for row in rows:
        if row.method == "hf-assisted" and row.batch_size > 1:
            assert row.status == "skipped" and "one sequence at a time" in row.reason
        else:
            assert row.status == "done", row.reason
            assert len(row.seconds) == grid.repeats
            parts = {"loop", "decoder", "LM head", "proposing", "accepting"}
            assert row.profile.keys() == (set() if METHODS[row.method].own_loop or row.compiled else parts), row.method
            assert set(row.baselines) == {"ar", "hf-generate"}
            lines = [json.loads(line) for line in Workspace(swept, "micro").samples(row.key).read_text().splitlines()]
            logged = [len(line["tokens"]) + (line["eos_id"] is not None) for line in lines]
            assert row.emitted == logged == [sum(line["accepted"]) for line in lines]
            assert row.row_forwards == [len(line["accepted"]) for line in lines]
            assert row.correct == [line["correct"] for line in lines]
    lossless = [row for row in rows if METHODS[row.method].lossless and row.stage == "mars" and row.seconds]
    assert len(lossless) > 10
    for row in lossless:
        assert row.same_as["ar"] == row.prompts, row.contender


def test_races_are_made_once_and_again_where_asked(swept: Path, tmp_path: Path) -> None:
    """Guards against races run twice, a grid measured anew for one more line, no baselines, lost checkpoints."""
    output = with_checkpoints(swept, tmp_path)
    small, weights = ("--grid", str(output / "grid.yaml")), sorted(output.rglob("model.safetensors"))
    trained = [path.stat().st_mtime_ns for path in weights]
    run_sweep(output, *small)
    first = {row.contender: row for row in rows_in(output)}
    before = Workspace(output, "micro").row_file.read_bytes()
    run_sweep(output, *small)
    assert Workspace(output, "micro").row_file.read_bytes() == before
    more = {**SMALL, "contenders": [*SMALL["contenders"], {"method": "jacobi", "stage": "mars"}]}
    (output / "grid.yaml").write_text(yaml.safe_dump(more))
    run_sweep(output, *small)
    second = {row.contender: row for row in rows_in(output)}
    assert {name: second[name] for name in first} == first
    assert second["jacobi"].baselines["ar"]["seconds"] != first["ar"].baselines["ar"]["seconds"]
    Workspace(output, "micro").row_file.unlink()
    run_sweep(output, *small, "--label", "again")
    again = {row.contender: row for row in rows_in(output, "again")}
    assert {name: row.key for name, row in again.items()} == {name: row.key for name, row in second.items()}
    assert all(again[name].seconds != row.seconds for name, row in second.items())
    run_sweep(output, *small, "--shard", "2/2")
    assert [row.contender for row in rows_in(output, "part2-of-2")] == ["ar", "hf-generate", "mars, tau = 0.2"]
    assert [path.stat().st_mtime_ns for path in sorted(output.rglob("model.safetensors"))] == trained


def sweep_in_child(output: Path) -> Any:
    return forked("sweep", "--scale", "micro", "--output", output, "--grid", output / "grid.yaml")


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.jsonl"))


def comparable(row: SweepRow) -> SweepRow:
    """A row without what differs between two runs of one sweep."""
    tokens = {name: {"emitted": baseline["emitted"]} for name, baseline in row.baselines.items()}
    return replace(row, seconds=[], first_token=[], last_token=[], baselines=tokens, provenance={})


def test_killed_at_any_moment_it_loses_a_round_at_most(swept: Path, tmp_path: Path) -> None:
    """Guards against corrupt rows, lost cells, and a resumed race with other results than an undisturbed one."""
    output = with_checkpoints(swept, tmp_path)
    runs = Workspace(output, "micro").runs
    run_sweep(output, "--grid", str(output / "grid.yaml"))
    undisturbed = [comparable(row) for row in rows_in(output)]
    rng, kills, finished = random.Random(0), 0, 0
    while kills < KILLS or not finished:
        rows_before = b"" if not Workspace(output, "micro").row_file.exists() else _whole_lines(output)
        before = size_of(runs)
        process = sweep_in_child(output)
        while process.is_alive() and size_of(runs) == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.25))
        if kills < KILLS and process.is_alive():
            process.kill()
            kills += 1
        process.join()
        assert _whole_lines(output).startswith(rows_before), "a finished cell was lost"
        if process.exitcode == 0:
            assert [comparable(row) for row in rows_in(output)] == undisturbed
            finished += 1
            if kills < KILLS:  # once more from nothing
                for folder in ("races", "samples"):
                    shutil.rmtree(runs / folder)
                Workspace(output, "micro").row_file.unlink()


def _whole_lines(output: Path) -> bytes:
    file = Workspace(output, "micro").row_file
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def test_two_sweeps_in_one_folder(swept: Path, tmp_path: Path) -> None:
    """Guards against two sweeps that corrupt each other's rows, or both measure everything."""
    output = with_checkpoints(swept, tmp_path)
    for process in [sweep_in_child(output) for _ in range(2)]:
        process.join()
        assert process.exitcode == 0
    keys = [row.key for row in rows_in(output)]
    assert len(keys) == len(set(keys)) == 4
    assert Workspace(output, "micro").row_file.read_text().count(f'"kind": "{SweepRow.kind}"') == 4


class _Failing:
    """A method that fails in the first forward after the prompt's, or pauses before each."""

    name = "failing"

    def __init__(self, inner: Any, *, pause: float | None = None) -> None:
        self._inner, self._pause = inner, pause

    def confidence_needed(self, threshold: float | None) -> float:
        return float(self._inner.confidence_needed(threshold))

    def propose(self, rows: Any) -> Any:
        if self._pause is None:
            raise RuntimeError("out of ideas")
        time.sleep(self._pause)
        return self._inner.propose(rows)

    def accept(self, rows: Any, window: Any, answer: Any) -> Any:
        return self._inner.accept(rows, window, answer)


def a_race(model: PreTrainedModel, prompts: list[list[int]], **others: Any) -> Race:
    ar = build_method("ar", Options())
    loaded = Loaded(model, None, "", None)
    contenders = {name: Answering(loaded, method) for name, method in {"ar": ar, **others}.items()}
    return Race(contenders, prompts, batch_size=2, max_new_tokens=5, eos_id=-1, pad_id=0, laps=2, limit_s=0.5)


def test_who_fails_or_takes_too_long_drops_out(golden_models: dict[str, Any]) -> None:
    """Guards against a sweep that dies with one of its cells, or waits forever for a cell."""
    ar = build_method("ar", Options())
    others = {"broken": _Failing(ar), "slow": _Failing(ar, pause=0.2)}
    outcomes = a_race(golden_models["ar"], [[1, 2, 3]] * 4, **others).run(RoundLog())
    assert [outcomes[name].status for name in ("ar", "broken", "slow")] == ["done", "failed", "timeout"]
    assert "out of ideas" in outcomes["broken"].reason and "0.5 s" in outcomes["slow"].reason
    assert len(outcomes["ar"].seconds) == 2 and len(outcomes["ar"].generations) == 4


def test_a_race_goes_on_from_its_log(
    golden_models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rounds that are raced again, a cut last line, and the memory peak of another lap."""
    peaks = iter([5, 7])
    gpu = Mock(is_available=lambda: True, max_memory_allocated=lambda: next(peaks))
    monkeypatch.setattr(race_module, "torch", Mock(cuda=gpu))
    file = tmp_path / "race.jsonl"
    race = a_race(golden_models["ar"], [[1, 2, 3], [4, 5], [6, 7, 8]])
    first = race.run(RoundLog(file))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:4]) + lines[4][:-9])
    again = race.run(RoundLog(file))
    assert again["ar"].generations == first["ar"].generations
    assert again["ar"].meter == first["ar"].meter and first["ar"].meter.peak_bytes == 7
    assert gpu.reset_peak_memory_stats.call_count == 2
    assert file.read_bytes().splitlines(keepends=True)[:4] == lines[:4]


@pytest.mark.parametrize("name", [name for name, info in METHODS.items() if not info.needs and not info.package])
def test_a_meter_hears_every_forward(name: str, golden_models: dict[str, Any]) -> None:
    """Guards against latencies read from the stamp of another forward."""
    watch, requests = Stopwatch(), [Request([1, 2, 3], 6), Request([4, 5], 6)]
    method = build_method(name, Options())
    generations = decode(golden_models["ar"], method, requests, eos_id=-1, pad_id=0, batch_size=2, meter=watch)
    assert len(watch.stamps) == max(generation.forwards for generation in generations)


def test_step_times_are_of_their_own_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against step times of few positions that are taken for those of a grid that asks for more."""
    monkeypatch.setattr(sweep_module, "made_once", lambda *given: given[2].get("positions"))
    asked = (1024, "speedup"), (8, "speedup"), (64, "real-model")
    courses = [Mock(everywhere={}, grid=Grid((), (1,), 1, 1, positions=count, page=page)) for count, page in asked]
    assert [*map(sweep_module._step_times, courses)] == [None, 8, None]


def test_lists_stand_for_all_their_combinations(tmp_path: Path) -> None:
    """Guards against combinations left out, and against names that do not tell them apart."""
    four = {"method": "mars", "stage": "mars", "threshold": ["one", 0.9], "block_size": [4, 8]}
    grid = {**SMALL, "contenders": [SMALL["contenders"][0], four], "quick": {"prompts": 12}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    lists = read_grid(tmp_path / "grid.yaml")
    assert [(entry.name, entry.threshold, entry.options) for entry in lists.contenders[1:]] == [
        ("mars, tau = one, window = 4", None, {"block_size": 4}),
        ("mars, tau = one, window = 8", None, {"block_size": 8}),
        ("mars, tau = 0.9, window = 4", 0.9, {"threshold": 0.9, "block_size": 4}),
        ("mars, tau = 0.9, window = 8", 0.9, {"threshold": 0.9, "block_size": 8}),
    ]
    assert lists.prompts == 6 and read_grid(tmp_path / "grid.yaml", quick=True).prompts == 12


@pytest.mark.parametrize("scale", scales())
def test_shipped_grids_race_both_forms_of_what_may_win(scale: str) -> None:
    """Guards against a grid that fails on users' machines, a compiled contender without its eager form, long races."""
    grid, quick = (read_grid(shipped_grid(scale), quick=quick) for quick in (False, True))
    for entries in (grid.contenders, quick.contenders):
        assert {"ar", "hf-generate", "ar, again"} <= {entry.name for entry in entries}
    eager = [entry for entry in grid.contenders if not entry.compiled]
    for entry in (compiled := [entry for entry in grid.contenders if entry.compiled]):
        plain = entry.name.removesuffix(", compiled")
        assert replace(entry, name=plain, label=plain, compiled=False) in eager
    if scale in ("mini", "0.5b", "7b"):
        assert {entry.method for entry in compiled} == {"ar", "mars", "mars-verified", "prompt-lookup"}
    if scale == "mini":
        assert quick.contenders == tuple(eager), "quick compiles nothing"
    if scale in ("0.5b", "7b"):
        assert grid.seconds(preset(scale)) < 8 * 3600 and quick.seconds(preset(scale)) < 3 * 3600
        assert all(entry in quick.contenders for entry in compiled)


@pytest.mark.parametrize("scale", ["0.5b", "7b"])
def test_the_guide_says_what_a_run_on_a_gpu_costs(scale: str, wide_terminal: None) -> None:
    """Guards against hours in the guide that are not those of the plan."""
    guide = (PACKAGE.parent / "docs/gpus.md").read_text(encoding="utf-8")
    column = ["0.5b", "7b"].index(scale) + 1
    hours = {row[0].strip(" `"): float(row[column]) for row in map(parts_of, guide.splitlines()) if len(row) == 3}
    plans = {"reproduce table2": "--table 2", "sweep": "--sweep", "sweep --quick": "--sweep --quick"}
    for run, options in {**plans, "reproduce all": "--table all"}.items():
        done = CliRunner().invoke(app, ["plan", "--scale", scale, *options.split()])
        planned = re.search(r"it may be: ([\d.]+) hours", done.output)
        assert planned, done.output
        assert float(planned[1]) == hours[run]


def parts_of(line: str) -> list[str]:
    """The parts of a table's line whose second part is a number."""
    parts = line.strip("|").split("|")
    return parts if re.fullmatch(r" [\d.]+ ", parts[1] if len(parts) > 1 else "") else []


def broken(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


AR = SMALL["contenders"][0]
BAD_GRIDS: list[tuple[Any, str]] = [
    ([], "this is no grid: .*object"), (broken(contender=1), "contender: Unexpected"),
    (broken(contenders=5), "contenders: .*array"),
    ({name: value for name, value in SMALL.items() if name != "repeats"}, "repeats: .*required"),
    (broken(dtype="int9"), "dtype: "),
    (broken(quick={"prompts": 0}), "prompts: (.|\n)*quick"), (broken(contenders=[5]), "object(.|\n)*contender 1"),
    (broken(contenders=[{"method": "ar"}]), "stage: .*required(.|\n)*contender 1"),
    (broken(contenders=SMALL["contenders"][:1] * 2), "two contenders are called 'ar'"),
    (broken(contenders=SMALL["contenders"][1:]), "no contender is called 'ar'"),
    (broken(contenders=[AR, {"method": "mars", "stage": "mars", "compiled": True}]), "no compiled 'ar'"),
    (broken(contenders=[AR, AR | {"stage": "ar_sft", "compiled": True}]), "'ar, compiled' is not 'ar', compiled"),
    (broken(contenders=[AR, AR | {"name": "ar, compiled"}]), "'ar, compiled' is not 'ar', compiled"),
]  # fmt: skip


def with_mars(**settings: Any) -> dict[str, Any]:
    return broken(contenders=[*SMALL["contenders"][:1], {"method": "mars", "stage": "mars", **settings}])


BAD_CONTENDERS: list[tuple[dict[str, Any], str]] = [
    ({"method": "warp"}, "unknown method 'warp'"), ({"method": ["ar", 5]}, "method: "),
    ({"stage": "moon"}, "unknown stage 'moon'"), ({"draft": "moon"}, "unknown stage 'moon'"),
    ({"stage": ""}, "unknown stage ''"), ({"speed": 9}, "speed: Extra"),
    ({"tree_width": 3}, "'mars' has no tree width"),
    ({"block_size": 2**31, "acceptance": {"mean": 1.5}}, "window 2147483648 is out of range"),
    ({"threshold": 10**400}, "threshold"), ({"method": "ar", "threshold": 0.9}, "takes no threshold"),
    ({"threshold": []}, "the list of threshold is empty"), ({"threshold": [0.9, "often"]}, "threshold: "),
    ({"threshold": True}, "threshold: "), ({"threshold": float("nan")}, "threshold"), ({"threshold": 1.5}, "threshold"),
    ({"block_size": 0}, "window 0"), ({"block_size": [4, "five"]}, "window 'five'"), ({"name": 5}, "name: "),
    ({"compiled": "yes"}, "compiled: "), ({"trained_block_size": -4}, "trained_block_size: "),
]  # fmt: skip
BAD_GRIDS += [(with_mars(**settings), f"{message}(.|\n)*contender 2") for settings, message in BAD_CONTENDERS]
FINE = [("max_new_tokens", None), ("timeout_s", 1.5), ("timeout_s", 10**30), ("positions", 0)]
COUNTS = ("prompts", "repeats", "max_new_tokens", "timeout_s", "batch_sizes", "positions")
BAD_GRIDS += [
    (broken(**{name: [8, value] if name == "batch_sizes" else value}), f"{name}(.[0-9])?: ")
    for name in COUNTS
    for value in (0, -90, 1.5, True, "90", None, [90], {}, float("nan"), 10**30)
    if (name, value) not in FINE or value is True
]
NO_GRIDS = [
    yaml.safe_dump(SMALL) + "repeats: 9\n", "a: [", "a: " + "[" * 5000, f"prompts: {'1' * 5000}", "a: &a [*a]", "5", "",
    "\N{CJK UNIFIED IDEOGRAPH-9021}".encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "message"), BAD_GRIDS)
def test_a_bad_grid_is_named(grid: Any, message: str, tmp_path: Path) -> None:
    """Guards against a traceback, a misspelling seen after hours, contenders that vanish or get other settings."""
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(grid, sort_keys=False))
    with pytest.raises(UserError, match=message) as raised:
        read_grid(file)
    assert raised.value.where.startswith(str(file)) and raised.value.fix


@pytest.mark.parametrize("text", [*NO_GRIDS, None])
def test_a_file_that_is_no_grid_is_named(text: str | bytes | None, tmp_path: Path) -> None:
    """Guards against a traceback of the YAML library, and a setting that stands there twice and is dropped."""
    file = tmp_path / "grid.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match="'repeats' is given twice" if text == NO_GRIDS[0] else str(file)):
        read_grid(file)
    first = "contenders: [&ar {name: ar, method: ar, stage: mars}, {<<: *ar, name: again},"
    first += " {method: mars-verified, stage: mars, window: null, acceptance: {mean: 2}}]\n"
    file.write_text(yaml.safe_dump(broken(contenders=[])).replace("contenders: []\n", first))
    assert [entry.name for entry in read_grid(file).contenders] == ["ar", "again", "mars-verified"]


LAW = PositionLaw([1, 4, 16, 64], [1.0, 1.0, 2.0, 8.0])


def test_the_law_follows_rows_windows_and_batches() -> None:
    """Guards against rows that all count as the longest, a choice that ignores the batch, free large batches."""
    work = Work(emitted=10, row_forwards=[3, 1, 2], positions=3 * 4, prompt_positions=3 * 2)
    assert work.window == 4
    # Batch of two: the prompts (4 positions), then two steps of one row. Then one prompt (2 positions) and one step.
    assert predicted_seconds(LAW, work, 2) == pytest.approx((1 + 1 + 1) + (1 + 1))
    # All at once: the prompts (6 positions), a step of two rows (8 positions), a step of one.
    assert predicted_seconds(LAW, work, 3) == pytest.approx((1 + 1 / 6) + (1 + 1 / 3) + 1)
    narrow = Work(emitted=64, row_forwards=[9] * 8, positions=8 * 8 * 2, prompt_positions=8)
    wide = Work(emitted=64, row_forwards=[5] * 8, positions=8 * 4 * 8, prompt_positions=8)
    assert predicted_seconds(LAW, wide, 1) < predicted_seconds(LAW, narrow, 1)
    assert predicted_seconds(LAW, narrow, 8) < predicted_seconds(LAW, wide, 8)
    assert LAW.seconds_at(128) == pytest.approx(16)


def test_rows_are_merged_filtered_and_exported(swept: Path, tmp_path: Path) -> None:
    """Guards against exports that lose rows or fields, and against a failed row that hides a finished one."""
    file = Workspace(swept, "micro").store
    rows = [row for row in read_rows(file) if isinstance(row, SweepRow)]
    slow = [replace(row, seconds=[99 * lap for lap in row.seconds]) for row in rows]
    (tmp_path / "slow.jsonl").write_text(rows_text(slow))
    typed = "results", str(file), "--against", str(tmp_path / "slow.jsonl")
    assert re.search(r"\n0 of [1-9]\d* cells agree", invoke(*typed).output)
    others = [replace(row, key=f"longer {row.key}", grid="longer") for row in slow]
    (tmp_path / "slow.jsonl").write_text(rows_text([*rows, *others]))  # two races of the same contenders
    assert re.search(r"\n([1-9]\d*) of \1 cells agree", invoke(*typed).output)
    failed = replace(rows[0], status="failed", seconds=[], checkpoint="")
    twice = replace(next(row for row in read_rows(file) if isinstance(row, TrainingRow)), checkpoint="trained again")
    (tmp_path / "other.jsonl").write_text(rows_text([failed, twice]))
    stored = merged([file, tmp_path / "other.jsonl"])
    assert {row.key: row for row in stored}[rows[0].key] == rows[0]
    assert {row.checkpoint for row in stored if row.key == twice.key} > {twice.checkpoint}
    chosen = matching(stored, ["method=mars", "batch_size=4", "options.threshold=0.5"])
    assert [row.contender for row in chosen if isinstance(row, SweepRow)] == ["mars, tau = 0.5"]
    assert read_rows(export(stored, tmp_path / "rows.jsonl")) == stored
    table = pd.read_csv(export(stored, tmp_path / "rows.csv"))
    assert list(table["key"]) == [row.key for row in stored]
    assert json.loads(table[table["key"] == rows[0].key]["seconds"].iloc[0]) == rows[0].seconds
    stored += [*read_rows(PACKAGE.parent / "results" / "mini" / "ar_sft.jsonl")]
    columns = pd.read_parquet(export(stored, tmp_path / "rows.parquet"))
    assert list(columns["key"]) == [row.key for row in stored] and columns["batch_size"].dtype == "Int64"
    place = [row.key for row in stored].index(rows[0].key)
    assert json.loads(columns["seconds"][place]) == rows[0].seconds, "for other rows this is a number"
    assert list(columns["emitted"][place]) == rows[0].emitted
    for wrong in ("method", "speed=1"):
        with pytest.raises(UserError):
            matching(stored, [wrong])
    with pytest.raises(UserError, match="csv"):
        export(stored, tmp_path / "rows.xls")


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("plan --sweep --scale micro", "32 cells"),
        ("results STORE --where batch_size=4", "speculative"),
        ("results STORE --where method=mars --against STORE", "cells agree"),
        ("tune --scale micro --output OUTPUT --batch-size 2 --prompts 6 --positions 8", "at batch size 2"),
    ],
)
def test_commands_around_the_sweep(typed: str, text: str, swept: Path, wide_terminal: None) -> None:
    """Guards against commands that fail, since no other test runs them."""
    places = {"STORE": str(Workspace(swept, "micro").store), "OUTPUT": str(swept)}
    assert text in invoke(*[places.get(word, word) for word in typed.split()]).output


EAGER = Setting(Line.named("ar", "", "ar"), 1.0, 0.0, 1.0)
LINEAR = Setting(
    Line.named("linear", "", "mars-verified", layout="linear", block_size=5, threshold=0.5),
    tokens_per_forward=2.0, points_lost=0.0, speed_up=1.4,
)  # fmt: skip


@pytest.mark.parametrize("raced", [1.3, 0.9])
def test_nothing_is_recommended_that_raced_slower_than_ar(raced: float) -> None:
    """Guards against advice that a race has just disproved."""
    advice = Advice([LINEAR, EAGER], LINEAR, Estimate(raced, Interval(raced - 0.1, raced + 0.1), 3))
    text = advice.summary(4, 1.0)
    if raced > 1:
        assert "--method mars-verified --layout linear --window 5 --threshold 0.5" in text and "raced 1.30" in text
    else:
        assert "--method ar" in text and "linear was expected to be 1.40 times as fast, and raced 0.90" in text


@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize(
    ("name", "mean"), [("mars", 1.79), ("mars-verified", 2.6), ("mars-verified", 4.0), ("mars", 1.0)]
)
def test_a_step_settles_as_much_as_was_said(name: str, mean: float, fixed: bool) -> None:
    """Guards against random weights that accept nothing, or everything, where a grid gives the acceptance."""
    model, carried = llama(0), carried_of({"mean": mean}, 3)
    method = carried_over(build_method(name, Options(mask_id=MASK)), draws_of(carried.rates, 1), torch.device("cpu"))
    requests = [Request([4 + row, 5, 6], 300, 0.99 if name == "mars" else None, ignore_eos=True) for row in range(4)]
    kind = (lambda *rest, **more: Batch(*rest, shapes=Steps(), **more)) if fixed else Batch
    done = decode(model, method, requests, eos_id=-1, pad_id=PAD, kind=kind)
    emitted, forwards = sum(row.emitted for row in done), sum(row.forwards for row in done)
    assert 1 + sum(carried.rates) == pytest.approx(mean) and emitted / forwards == pytest.approx(mean, rel=0.06)
    assert decode(model, method, requests, eos_id=-1, pad_id=PAD, kind=kind) == done, "the draws have a seed"


def test_a_table_of_another_suite_is_read(tmp_path: Path) -> None:
    """Guards against tables that we cannot read, and tables that we write in another form."""
    file = tmp_path / "theirs.yaml"
    file.write_text("their-model:\n  thinking_on: {3: '2.5', 1: 1.4}\n")
    theirs = carried_of({"file": str(file)}, 1)
    assert theirs.rates == pytest.approx((0.4,)) and "theirs.yaml" in theirs.source
    file.write_text("mars-7b: {thinking_on: {3: 9.9}, thinking_off: {3: 2.4}}\n")
    assert sum(carried_of({"file": str(file)}, 3).rates) == pytest.approx(1.4)
    with pytest.raises(UserError, match="nothing for 2 drafts"):
        carried_of({"file": str(file)}, 2)
    file.write_text(Acceptance(10, 30, (7, 4, 3)).table("held-out: prompts"))
    assert sum(carried_of({"file": str(file)}, 3).rates) == pytest.approx(1.4), "our own table as well"


@pytest.mark.parametrize(
    ("acceptance", "why"),
    [
        ({"mean": 5}, "cannot give 5"), ({"mean": 0.5}, "cannot give"), ({"rates": [0.9, 0.95, 0.1]}, "no rates"),
        ({"rates": [0.9]}, "no rates of 3"), ({"mean": 2, "rates": [1]}, "not understood"), ("often", "not understood"),
        ({"published": "chess"}, "no tokens per forward of chess"), ({"file": "/nowhere.yaml"}, "not a table"),
        ({"mean": 2, "scale": "7b"}, "not understood"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(acceptance: Any, why: str) -> None:
    """Guards against a mistake in a grid that changes only the speed, and acceptance forced on any method."""
    with pytest.raises(UserError, match=why):
        carried_of(acceptance, 3)
    with pytest.raises(UserError, match="cannot be carried over to 'ar'"):
        carried_over(build_method("ar", Options()), [1], torch.device("cpu"))


def test_a_grid_says_it_and_rows_tell(tmp_path: Path) -> None:
    """Guards against a forced speed that is taken for a measured one, or for a trained checkpoint's."""
    grid = {
        "batch_sizes": [1], "prompts": 6, "repeats": 2,
        "contenders": [
            {"method": "ar", "stage": "mars", "name": "ar"},
            {"method": "mars", "stage": "mars", "threshold": 0.95, "acceptance": {"published": "gsm8k", "scale": "7b"}},
        ],
    }  # fmt: skip
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    plain, contender = read_grid(tmp_path / "grid.yaml").contenders
    assert sum(contender.carried) == pytest.approx(0.79) and not contender.of_method
    assert contender.shown["acceptance"] == "carried over from the paper's Table 4, gsm8k, 7b, B = 4, tau = 0.95"
    assert "acceptance" not in contender.typed and "carried" not in plain.keyed and "carried" in contender.keyed
    rows = [
        SweepRow(
            key, "done", "", "7b", contender=arm.name, stage="mars", draft="", method=arm.method, options=arm.shown,
            batch_size=1, benchmarks=[], prompts=0, max_new_tokens=9,
        )
        for key, arm in (("a", plain), ("b", contender))
    ]  # fmt: skip
    assert [row.key for row in SweepCells.of(rows).rows] == ["a"], "no claim uses carried rows"
