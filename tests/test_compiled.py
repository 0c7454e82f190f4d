"""Compiled steps where users meet them: commands, lm-eval, transformers, grids and the page of speed."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import yaml
from made_up import sweep_row
from test_static import MASK, llama
from tools import decode_by_command, invoke
from transformers import PreTrainedModel

import marsbench
from marsbench.answering import Answering
from marsbench.compiled import graphs
from marsbench.compiled.graphs import Graphs, kind_of_batch
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.evaluation.lm_eval_model import MarsbenchLM
from marsbench.findings.sweep import SweepCells, speed_up
from marsbench.line import Line
from marsbench.methods import Options, build_method
from marsbench.presets import preset
from marsbench.racing import course
from marsbench.racing.course import Course
from marsbench.racing.grid import BASELINES, Grid, read_grid
from marsbench.racing.race import Race, RoundLog
from marsbench.rows.kinds import SweepRow
from marsbench.rows.workspace import Workspace, read_rows
from marsbench.running.cells import CellRunner
from marsbench.running.plans import PlannedCell
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded

NO_COMPILER = "not compiled: there is no C++ compiler"
Steps = list[Callable[..., Any]]
BOTH = [False, True]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps that were compiled: torch would take seconds for each, so here they stay eager."""
    compiled: Steps = []

    def as_it_is(step: Callable[..., Any], backend: str) -> Callable[..., Any]:
        compiled.append(step)
        return step

    monkeypatch.setattr(graphs, "_compiled", as_it_is)
    monkeypatch.setattr(graphs, "cpp_compiler", lambda: "g++")
    return compiled


def decoded(folder: Path, prompts: list[list[int]], *options: str) -> tuple[bytes, str]:
    """The file that `marsbench decode` writes, and its messages."""
    done = decode_by_command(folder, prompts, "--max-new-tokens", "24", *options)
    return (folder / "out.jsonl").read_bytes(), done.stderr


def test_decode_compiles_and_writes_the_same(steps: Steps, golden: dict[str, Any], tmp_path: Path) -> None:
    """Guards against an option that compiles nothing, or changes a token."""
    prompts = golden["prompts"][:4]
    eager, _ = decoded(tmp_path, prompts, "--threshold", "0.7")
    assert not steps
    compiled, messages = decoded(tmp_path, prompts, "--threshold", "0.7", "--compile")
    assert steps and compiled == eager and "not compiled" not in messages


def test_what_cannot_be_compiled_is_decoded_eagerly(
    golden: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a failure, or silence, where eager steps would work."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    prompts = golden["prompts"][:2]
    eager, _ = decoded(tmp_path, prompts)
    compiled, messages = decoded(tmp_path, prompts, "--compile")
    assert compiled == eager and messages.count(NO_COMPILER) == 1
    messages = decoded(tmp_path, prompts, "--compile", "--method", "block-diffusion")[1]
    assert "not compiled: the windows of method 'block-diffusion' have no fixed shape" in messages


def test_compiling_makes_no_other_cell(steps: Steps, output: Path) -> None:
    """Guards against cells measured again for a flag that changes no number; in 16 bits it may change numbers."""
    arguments = ["eval", "--benchmark", "mini_gsm8k", "--limit", "2", "--scale", "micro", "--output", str(output)]
    invoke(*arguments, "--compile")
    assert steps
    cells = CellRunner(Run(preset("micro"), Workspace(output, "micro")))
    cell = PlannedCell(Line.named("ar", "mars", "ar"), "mini_bbh", 1)
    exact, half = ({cells._key(cell, "", None, dtype, how) for how in BOTH} for dtype in ("float32", "bfloat16"))
    assert (len(exact), len(half)) == (1, 2)


def test_lm_eval_is_told_in_text(
    steps: Steps, micro_checkpoints: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against "false" that counts as true because it is text."""
    folder = str(next(micro_checkpoints.glob("ar_sft-*")))
    assert MarsbenchLM(folder, method="ar", compiled="false")._answering.kind is Batch
    assert MarsbenchLM(folder, method="ar", compiled="true")._answering.kind is not Batch
    assert "not compiled" not in capsys.readouterr().err
    monkeypatch.setattr(graphs, "cpp_compiler", lambda: None)
    MarsbenchLM(folder, method="ar", compiled=True)
    assert NO_COMPILER in capsys.readouterr().err


@pytest.mark.parametrize("method", ["ar", "mars", "speculative"])
def test_generate_keeps_what_it_has_compiled(
    method: str, steps: Steps, golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against seconds of compiling at every call."""
    prompt = {"input_ids": torch.tensor(golden["prompts"][:1]), "attention_mask": None}
    options: dict[str, Any] = {"method": method, "mask_id": 3, "eos_token_id": 2, "pad_token_id": 0}
    options |= {"draft": golden_models["ar"]} if method == "speculative" else {}
    call = golden_models["mars"].generate
    counts, calls = [], []
    for compiled in (False, True, True):
        calls.append(call(**prompt, max_new_tokens=9, custom_generate=marsbench.generate, compiled=compiled, **options))
        counts.append(len(steps))
    assert counts[0] == 0 < counts[1] == counts[2]
    assert all(torch.equal(tokens, calls[0]) for tokens in calls)
    with pytest.raises(UserError, match="neither true nor false"):
        call(**prompt, max_new_tokens=9, custom_generate=marsbench.generate, compiled="no", **options)


def test_graphs_go_with_their_model(steps: Steps) -> None:
    """Guards against models that stay in memory with their compiled steps."""
    model, method = llama(0), build_method("mars", Options(mask_id=MASK))
    kind, reason = kind_of_batch(model, method, True)
    assert not reason and kind_of_batch(model, method, True)[0] == kind
    decode(model, method, [Request([4, 5], 9, 0.3)], eos_id=-1, pad_id=0, kind=kind)
    gone = ref(model)
    del model, kind
    gc.collect()
    assert steps and gone() is None


AR: dict[str, Any] = {"name": "ar", "method": "ar", "stage": "mars", "compiled": BOTH}


def grid_file(folder: Path, *contenders: dict[str, Any]) -> Path:
    grid = {"batch_sizes": [2], "prompts": 6, "repeats": 2, "positions": 0, "contenders": list(contenders)}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    return folder / "grid.yaml"


def test_a_grid_says_who_is_compiled(tmp_path: Path) -> None:
    """Guards against compiled contenders that have the names of eager ones."""
    mars = {"method": "mars", "stage": "mars", "threshold": [0.9, 0.5], "compiled": True}
    grid = read_grid(grid_file(tmp_path, AR, mars))
    assert [(entry.name, entry.compiled) for entry in grid.contenders] == [
        ("ar", False), ("ar, compiled", True), ("mars, tau = 0.9, compiled", True), ("mars, tau = 0.5, compiled", True),
    ]  # fmt: skip
    assert grid.contenders[2].shown == {"threshold": 0.9} and "ar, compiled" in BASELINES


def test_a_race_knows_what_is_recorded_from_what_is_compiled(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a row of compiled steps that is taken for a row of recorded steps."""
    contender, run = Line.named("ar", "mars", "ar").compiled_form(), Run(preset("micro"), Workspace(output, "micro"))
    keys = set()
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(course, "default_device", lambda device=device: device)
        grid = Grid((replace(contender, compiled=False, name="ar"), contender), (1,), 6, 2)
        keys.add(Course(run, grid).cells(1)[1].key)
    assert len(keys) == 2


def test_nothing_is_compiled_in_a_lap(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against compiling that counts as latency, as a lap's time, or towards a lap's limit."""
    model, ar = llama(0), build_method("ar", Options())
    eager = Answering(Loaded(model, None, "", None), ar)
    contenders = {"ar": eager, "ar, compiled": replace(eager, kind=Graphs().batch)}
    prompts = [[4] * length for length in (2, 3, 70, 5, 150, 6)]
    race = Race(contenders, prompts, batch_size=2, max_new_tokens=5, eos_id=-1, pad_id=0, laps=2)
    counts, turn = [], Race._turn

    def counted(self: Race, *arguments: Any) -> Any:
        counts.append(len(steps))
        return turn(self, *arguments)

    monkeypatch.setattr(Race, "_turn", counted)
    outcomes = race.run(RoundLog())
    assert len(steps) >= 3 and set(counts) == {len(steps)}
    assert [outcome.status for outcome in outcomes.values()] == ["done", "done"]
    assert outcomes["ar"].generations == outcomes["ar, compiled"].generations


def test_a_grid_names_what_compiles(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a backend that is ignored, or needs a compiler that it does not use, and a key shared by all."""
    monkeypatch.setattr(graphs, "cpp_compiler", lambda: None)
    taken: list[str] = []
    monkeypatch.setattr(graphs, "_compiled", lambda step, backend: taken.append(backend) or step)
    file = grid_file(output, AR)
    plain = file.read_text()
    for backend in ("eager", "aot_eager"):
        file.write_text(f"{plain}backend: {backend}\n")
        invoke("sweep", "--scale", "micro", "--output", str(output), "--grid", str(file))
    rows = read_rows(Workspace(output, "micro").row_file)
    compiled = [row for row in rows if isinstance(row, SweepRow) and row.compiled]
    assert len(compiled) == len({row.key for row in compiled}) == 2 == len({*taken}), "each backend has a key"
    assert all(row.status == "done" and row.graphs and row.same_as["ar"] == row.prompts for row in compiled)


def test_a_sweep_races_compiled_against_compiled(steps: Steps, output: Path) -> None:
    """Guards against compiled cells without their baseline, compiled anew at every size, or silently missing."""
    contenders = [
        AR,
        {"method": "mars", "stage": "mars", "threshold": [0.2, 0.5], "compiled": BOTH},
        {"method": "mars-block-cache", "stage": "mars", "compiled": True},
    ]
    arguments = ["--scale", "micro", "--output", str(output), "--grid", str(grid_file(output, *contenders))]
    invoke("sweep", *arguments)
    rows = [row for row in Workspace(output, "micro").rows if isinstance(row, SweepRow)]
    cells = {row.contender: row for row in rows}
    skipped = cells.pop("mars-block-cache, compiled")
    assert skipped.status == "skipped" and "cannot be compiled: the windows" in skipped.reason
    assert steps and all(set(row.baselines) == {"ar", "ar, compiled"} for row in cells.values())
    forms = [cells[f"mars, tau = {tau}, compiled"] for tau in (0.2, 0.5)]
    assert [row.emitted for row in forms] == [cells[f"mars, tau = {tau}"].emitted for tau in (0.2, 0.5)]
    compiled_once = cells["ar, compiled"].graphs + forms[0].graphs
    assert forms[0].graphs == forms[1].graphs > 0 and len(steps) == compiled_once, "thresholds share steps"
    page = (Workspace(output, "micro").reports / "speedup.md").read_text()
    assert "over compiled `ar`" in page


def row_of(name: str, method: str, speed: float, *, compiled: bool = False, **options: Any) -> SweepRow:
    """A cell at batch size 4, `speed` times as fast as eager `ar`; compiled `ar` is twice as fast as eager `ar`."""
    baselines = {name: {"seconds": [each] * 2, "emitted": 40} for name, each in (("ar", 1.0), ("ar, compiled", 0.5))}
    return sweep_row(name, method, 4, [1 / speed] * 2, options=options, compiled=compiled, baselines=baselines)


LINE6 = "speculative, AR SFT by AR SFT"
EAGER_ROWS = [
    row_of("ar", "ar", 1.0),
    row_of("mars", "mars", 1.5, threshold=0.95),
    row_of("cache 4", "mars-block-cache", 1.2, cache_block=4),
    row_of(LINE6, "speculative", 0.9),
]
COMPILED_ROWS = [
    row_of("ar, compiled", "ar", 2.0, compiled=True),
    row_of("mars, compiled", "mars", 5.0, threshold=0.95, compiled=True),
    row_of(f"{LINE6}, compiled", "speculative", 2.2, compiled=True),
]


def test_rows_are_held_against_the_ar_of_their_kind() -> None:
    """Guards against a speed-up that is the compiler's, over the slower baseline, or of the slower form."""
    sweep = SweepCells.of([*EAGER_ROWS, *COMPILED_ROWS])
    ratios = [ratio.value for row in (*EAGER_ROWS[:2], *COMPILED_ROWS) if (ratio := speed_up(row))]
    assert ratios == pytest.approx([1.0, 1.5, 2.0, 2.5, 1.1])
    assert list(sweep.eager.done) == list(SweepCells.of(EAGER_ROWS).done)
    slow, again = row_of("slow, compiled", "jacobi", 0.8, compiled=True), row_of("ar, again", "ar", 1.01)
    sweep = SweepCells.of([*EAGER_ROWS, *COMPILED_ROWS, row_of("slow", "jacobi", 1.2), slow, again])
    over = [sweep.over_ar_alike(sweep.done[name, 4]) for name in ("mars", "mars, compiled", "ar", "slow", "cache 4")]
    assert [ratio.value for ratio in over if ratio] == pytest.approx([2.5, 2.5, 1.0, 0.6, 1.2])
    alone = SweepCells.of([*EAGER_ROWS[1:]])
    assert alone.over_ar_alike(EAGER_ROWS[1]) is None, "`ar` is not in the race"
    ratio = SweepCells.of(EAGER_ROWS).over_ar_alike(EAGER_ROWS[1])
    assert ratio is not None and ratio.value == pytest.approx(1.5)
