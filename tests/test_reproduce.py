"""The main job at micro scale: end to end, killed at several moments, and the errors on the way."""

import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from made_up import ROOT, answered, lines_of, measured, plan_of, publish, stored
from test_work import comparable
from tools import forked, in_company, invoke
from transformers import AutoModelForCausalLM, AutoTokenizer

from marsbench import world
from marsbench.commands.shared import Start
from marsbench.errors import UserError
from marsbench.evaluation.lm_eval_model import MarsbenchLM
from marsbench.executors.tasks import Here
from marsbench.findings.cells import columns
from marsbench.findings.collection import collection_of
from marsbench.overview import reproduction
from marsbench.overview.pages import judged_collection, parts_at, whole_paper, write_page
from marsbench.overview.reproduction import reproduce_part
from marsbench.presets import DEFAULT_SCALE, preset, scales
from marsbench.progress import quieten_libraries
from marsbench.racing.grid import read_grid, shipped_grid
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import EvaluationRow, Row, TrainingRow
from marsbench.rows.workspace import Workspace, write_rows
from marsbench.running import cells
from marsbench.running.plans import TablePlan
from marsbench.running.run import Run
from marsbench.studies import queries, studies, studies_on, study_of
from marsbench.studies.lines import AR_SFT
from marsbench.training.stages import recipe
from marsbench.training.tokenizer import build_tokenizer

LITTLE_DATA = ROOT / "tests" / "data"
MICRO = ["reproduce", "table2", "--scale", "micro", "--output"]


def rows_of(output: Path) -> list[dict[str, object]]:
    """The published rows without what may differ between two runs of one seed: times and origins."""
    return comparable([row for row in Workspace(output, "micro").rows if isinstance(row, EvaluationRow | TrainingRow)])


def test_every_cell_and_plain_checkpoints_are_there(reproduced: Path) -> None:
    """Guards against a table with holes, and checkpoints only we can read, without mask token or chat template."""
    rows = rows_of(reproduced)
    cells = {(row["arm"], row["benchmark"]) for row in rows if "arm" in row}
    assert cells == {(arm.name, name) for arm in plan_of("table2").lines for name in preset("micro").benchmarks}
    trained = {(row["stage"], row["block_size"]) for row in rows if "arm" not in row}
    assert trained == set(plan_of("table2").stages)
    assert all(row["status"] == "done" for row in rows)
    assert (reproduced / "reports" / "micro" / "table2.md").exists()
    assert (reproduced / "reports" / "micro" / "figures" / "table2_differences.png").exists()
    folder = Workspace(reproduced, "micro").checkpoint(recipe(preset("micro"), "mars"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.mask_token == "<|mask|>" and model.config.vocab_size == len(tokenizer)
    built = build_tokenizer(preset("micro").world.vocabulary_size)
    for text in islice(world.corpus(1), 300):  # what the base model was trained on is what `AutoTokenizer` makes of it
        assert tokenizer(text).input_ids == built(text).input_ids
    turns = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turn = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert prompt == turn + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    record = json.loads((folder / "marsbench.json").read_text())
    assert record["recipe"]["stage"] == "mars" and record["provenance"]["versions"]["torch"]


ANSWERS = len(plan_of("table2").lines) * 6 * 8
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "while a state is written": lambda runs: any(runs.glob("checkpoints/block_diffusion-*.partial/checkpoint-*")),
    "in the last answers": lambda runs: (
        sum(len(file.read_bytes().splitlines()) for file in runs.glob("answers/*.jsonl")) >= ANSWERS - 20
    ),
}


def test_killed_at_any_moment_it_resumes_to_the_same_rows(reproduced: Path, tmp_path: Path) -> None:
    """Guards against lost work, double answers, and data or random numbers that differ after a resumption."""
    runs = Workspace(tmp_path, "micro").runs
    for trained in (reproduced / "runs" / "micro" / "checkpoints").iterdir():  # all but those that are trained again
        if not trained.name.startswith("block_diffusion-"):
            shutil.copytree(trained, runs / "checkpoints" / trained.name)
    for moment, reached in MOMENTS.items():
        process = forked(*MICRO, tmp_path, "--jobs", 1)
        while process.is_alive() and not reached(runs):
            time.sleep(0.01)
        assert process.is_alive(), f"it finished before it could be killed {moment}"
        process.kill()
        process.join()
    invoke(*MICRO, str(tmp_path))
    assert rows_of(tmp_path) == rows_of(reproduced)


def test_what_is_there_is_used(reproduced: Path, tmp_path: Path) -> None:
    """Guards against results that are computed again, and a name of a file that is not there."""
    output = shutil.copytree(reproduced, tmp_path / "copy")
    rows = Workspace(output, "micro").row_file
    before = rows.read_bytes()
    for _ in range(2):
        invoke("eval", "--benchmark", "mini_bbh", "--scale", "micro", "--output", output)
    after = rows.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == before.count(b"\n") + 1
    done = invoke("eval", "--benchmark", "mini_bbh", "--scale", "micro", "--output", output, "--shard", "1/2")
    assert Path(done.stdout.split("answers: ")[1].strip()).exists(), "a part has the whole, and its answers"


def test_bad_input_gets_one_clear_message(reproduced: Path, tmp_path: Path) -> None:
    """Guards against tracebacks, exit codes other than 2, and half-written files; test_cli.py has many more."""
    cut, data = tmp_path / "cut", tmp_path / "data"
    shutil.copytree(Workspace(reproduced, "micro").checkpoint(recipe(preset("micro"), "mars")), cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:5000])
    (data / "gsm8k").mkdir(parents=True)
    (data / "gsm8k" / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2')
    evaluate = ["eval", "--checkpoint", str(cut), "--output", str(tmp_path), "--scale", "micro", "--benchmark"]
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    for arguments, word in (
        ([*evaluate, "mini_gsm8k"], "cannot be loaded"),
        ([*evaluate, "gsm8k", "--data-dir", str(data)], "line 2"),
        ([*evaluate, "gpqa", "--data-dir", str(data)], "gpqa_main.jsonl"),
        ([*MICRO, "/proc/marsbench"], "written"),
    ):
        done = invoke(*arguments, code=2)
        assert word in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr, (word, done.stderr)
    assert {file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".lock"} == before


@pytest.mark.parametrize(
    ("arguments", "variant"),
    [({"seed": 0}, ""), ({"seed": 1}, "seed1"), ({"seed": 1, "benchmarks": "real", "limit": 8}, "real-limit8-seed1")],
)
def test_a_seed_has_folders_of_its_own(arguments: dict[str, Any], variant: str, tmp_path: Path) -> None:
    """Guards against a second seed that overwrites the rows and the page of the first."""
    workspace = Start("mini", output=tmp_path, **arguments).run().workspace
    assert workspace == Workspace(tmp_path, "mini", variant)
    assert workspace.store == tmp_path / "results" / "mini" / variant
    assert workspace.reports == tmp_path / "reports" / ("mini" if variant else "") / variant


def test_seeds_are_found_again(tmp_path: Path) -> None:
    """Guards against another variant taken for a seed, and seeds in the order of their names."""
    workspace = Workspace(tmp_path, "mini")
    for variant in ("", "seed10", "seed2", "limit8-seed3", "seedling", "quick"):
        replace(workspace, variant=variant).publish("table2", [])
    (tmp_path / "results" / "mini" / "seed5").mkdir()  # its rows chose between lines, and no page shows them
    assert [(seed, its.variant) for seed, its in workspace.seeds().items()] == [(0, ""), (2, "seed2"), (10, "seed10")]


@pytest.fixture(scope="module")
def little(reproduced: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Makes runs that go on from the uninterrupted run, with two questions of one benchmark."""
    output = tmp_path_factory.mktemp("other")
    shutil.copytree(reproduced / "runs", output / "runs")
    quieten_libraries()

    def run(*benchmarks: str) -> Run:
        return Run(preset("micro"), Workspace(output, "micro"), benchmarks=benchmarks or ("mini_gsm8k",), limit=2)

    return run


def test_tables_train_every_block_size_and_share_cells(little: Callable[..., Run], brief_training: None) -> None:
    """Guards against lines decoded by a checkpoint of another block size, and cells measured once per table."""
    run = little()
    rows = measured(run, plan_of("table4"))
    weights = {(row.stage, row.block_size): row.checkpoint for row in rows if isinstance(row, TrainingRow)}
    assert set(weights) == {("base", None), ("ar_sft", None), ("mars", 4), ("mars", 8), ("mars", 16)}
    cells = {row.arm: row for row in rows if isinstance(row, EvaluationRow)}
    for arm in plan_of("table4").lines:
        assert cells[arm.name].checkpoint == weights[arm.trained]
        assert cells[arm.name].options == arm.options and len(cells[arm.name].correct) == 2
    assert len(set(weights.values())) == 5
    before = set(run.row_file.rows())
    shared = replace(plan_of("table4").lines[1], name="other_name")
    again = measured(run, TablePlan("0", "shares a cell, and asks one question", (shared,)))
    assert set(run.row_file.rows()) == before, "nothing is measured twice"
    assert [row.arm for row in again if isinstance(row, EvaluationRow)] == ["other_name"]
    (row,) = measured(run, TablePlan("0", "asks one question", (shared,), questions=1))[-1:]
    assert isinstance(row, EvaluationRow) and len(row.correct) == 1


def test_results_of_earlier_commands_are_used_made_again_or_refused(little: Callable[..., Run]) -> None:
    """Guards against a rerun that takes an earlier row or answer, or makes its own twice; and a "fail" that goes on."""
    run, plan = little(), TablePlan("0", "one line", plan_of("table2").lines[:1])

    def answered(**how: Any) -> EvaluationRow:
        (row,) = [row for row in measured(replace(run, **how), plan) if isinstance(row, EvaluationRow)]
        return row

    first, rows = answered(), run.workspace.row_file
    log, count = run.workspace.answers(first.key), rows.read_text().count(first.key)
    log.write_text(log.read_text().replace('"emitted": ', '"emitted": 9'))  # no rerun may read it
    assert answered() == answered(existing="rerun", began=first.provenance["started"]) == first
    again = answered(existing="rerun", began="2999")
    assert again.emitted == first.emitted
    count += again != first  # a row as before, to its milliseconds, is kept
    assert rows.read_text().count(first.key) == count
    with pytest.raises(UserError, match="there is a result already"):
        answered(existing="fail", began="2999")


def test_a_cell_is_answered_once(little: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two commands that both answer a cell, and a log that holds each answer twice."""
    run, plan = little(), TablePlan("0", "one line", plan_of("table2").lines[:1])
    *_, first = measured(run, plan)
    rows, file = run.workspace.row_file.read_bytes(), run.workspace.row_file
    file.unlink()
    other = {run.workspace.answers(first.key).with_suffix(".jsonl.lock"): lambda: file.write_bytes(rows)}  # meanwhile
    monkeypatch.setattr(cells, "locked", lambda lock, **how: nullcontext(other[lock]()))
    assert measured(run, plan)[-1] == first and file.read_bytes() == rows


def test_pages_are_published_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two commands that publish into one store and lose each other's rows."""
    workspace, at_once = Workspace(tmp_path, "micro"), Workspace.publish
    monkeypatch.setattr(reproduction, "write_study", Mock())
    monkeypatch.setattr(Workspace, "publish", lambda *given: (time.sleep(0.2), at_once(*given)))
    made = {name: answered(plan_of(name).lines[-1], name, [1], [1], [1]) for name in ("table2", "table3")}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: reproduction._publish(study_of(name), [made[name]], workspace), made))
    assert workspace.pages == [*made] and len(workspace.rows) == 2


def test_checkpoints_of_earlier_commands_are_used_made_again_or_refused(output: Path, brief_training: None) -> None:
    """Guards against a rerun that keeps the checkpoint, or trains its parents again, and a "fail" that goes on."""

    def train(*how: str, code: int = 0) -> list[int]:
        done = invoke("train", "ar_sft", "--scale", "micro", "--output", output, *how, code=code)
        assert code == 0 or "there is a result already" in done.stderr
        weights = [next(output.glob(f"runs/micro/checkpoints/{stage}-*/*.safetensors")) for stage in ("ar_sft", "base")]
        return [file.stat().st_mtime_ns for file in weights]

    first = train()
    assert train() == train("--existing", "fail", code=2) == first
    again = train("--existing", "rerun")
    assert again[0] > first[0] and again[1] == first[1]


def test_parts_make_the_whole(little: Callable[..., Run]) -> None:
    """Guards against parts that overlap or make rows or pages, and a whole that asks or scores otherwise."""
    run = little("mini_gpqa")
    before = run.row_file.rows()
    for number in (1, 2):
        part = replace(run, shard=(number, 2))
        reproduce_part([study_of("table9")], part, Here(run.workspace.logs, run.reporter))
    assert run.row_file.rows() == before and not run.workspace.store.exists()
    for row in measured(run, plan_of("table9")):
        if isinstance(row, EvaluationRow):
            undivided, *parts = run.answer_logs(row.key)
            assert row.digests == [json.loads(file.read_text())["digest"] for file in parts] and not undivided.exists()
    with pytest.raises(UserError, match="mini_gpqa: part 3 of 9 has no question"):
        replace(run, shard=(3, 9)).exam("mini_gpqa")


def test_parts_race_all_contenders(little: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against contenders that no part races, or that two parts race."""
    grid, raced = read_grid(shipped_grid("micro"), quick=True), list[set[str]]()

    def rows(sweep: Sweep) -> list[Row]:
        raced.append({line.name for line in sweep._course.grid.contenders})
        return []

    monkeypatch.setattr(Sweep, "rows", rows)
    for number in (1, 2):
        part = replace(little(), benchmarks=(), limit=None, shard=(number, 2))
        reproduce_part([study_of("speedup")], part, Here(part.workspace.logs, part.reporter), quick=True)
    assert len(raced) == 2 * len(grid.batch_sizes)
    assert raced[0] | raced[-1] == {line.name for line in grid.contenders}
    assert raced[0] & raced[-1] == {"ar", "hf-generate"}


def test_a_table_asks_its_own_benchmarks_only(little: Callable[..., Run]) -> None:
    """Guards against benchmarks that the paper's table does not have, and against a table of nothing."""
    plan = replace(plan_of("table8"), lines=plan_of("table8").lines[:1])
    rows = measured(little("mini_bbh", "mini_humaneval"), plan)
    assert [row.benchmark for row in rows if isinstance(row, EvaluationRow)] == ["mini_humaneval"]
    with pytest.raises(UserError, match="Table 8 asks none of mini_bbh"):
        measured(little("mini_bbh"), plan)


def test_real_benchmarks_run_end_to_end(reproduced: Path, tmp_path: Path) -> None:
    """Guards against a benchmark that needs the hub although its data is here, and a table that fails at one gap."""
    shutil.copytree(reproduced / "runs", tmp_path / "runs")
    shutil.copytree(LITTLE_DATA, data := tmp_path / "data")
    shutil.rmtree(data / "gpqa")
    how = "--scale", "micro", "--benchmarks", "real", "--limit", 2, "--data-dir", data, "--jobs", 1
    invoke("reproduce", "table9", *how, "--output", tmp_path)
    cells = [row for row in Workspace(tmp_path, "micro", "real-limit2").rows if isinstance(row, EvaluationRow)]
    assert len(cells) == 6 * len(plan_of("table9").lines)
    for row in cells:
        if row.benchmark == "gpqa":
            assert row.status == "skipped" and "gpqa_main.jsonl" in row.reason
        else:
            assert row.status == "done" and all(len(scores) == 2 for scores in [row.correct, *row.others.values()])
    page = (tmp_path / "reports" / "micro" / "real-limit2" / "gains.md").read_text()
    assert "gpqa_main.jsonl" in page
    others = {(row.benchmark, score) for row in cells for score in row.others}
    assert {("humaneval", "plus"), ("bbh", "strict")} <= others
    assert not Workspace(tmp_path, "micro").pages, "a few questions replace no table"


def test_lm_eval_runs_our_model(reproduced: Path, tmp_path: Path) -> None:
    """Guards against a plug-in that lm-eval does not find, and against processes that answer twice or not at all."""
    finding = "import lm_eval, torch; from lm_eval.api.registry import model_registry as known"
    subprocess.run([sys.executable, "-c", f"{finding}; assert 'marsbench' in known"], check=True)
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    data = {"data_files": {"test": str(LITTLE_DATA / "gsm8k" / "test.jsonl")}}
    task = {"include": str(stock), "task": "gsm8k_here", "num_fewshot": 0}
    task |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": data}
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(task))
    checkpoint = next((reproduced / "runs" / "micro" / "checkpoints").glob("mars-b4-*"))
    how = f"pretrained={checkpoint},method=mars,threshold=0.5,block_size=4"
    in_company(
        tmp_path / "log", 2, "lm_eval", "--model", "marsbench", "--model_args", how, "--gen_kwargs", "max_gen_toks=24",
        "--include_path", tmp_path, "--tasks", "gsm8k_here", "--limit", "3", "--apply_chat_template",
        "--output_path", tmp_path / "out",
    )  # fmt: skip
    (written,) = (tmp_path / "out").rglob("results_*.json")
    tasks = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    alone = lm_eval.simple_evaluate(
        MarsbenchLM.create_from_arg_string(how), tasks=["gsm8k_here"], limit=3, gen_kwargs="max_gen_toks=24",
        apply_chat_template=True, task_manager=tasks, bootstrap_iters=0,
    )  # fmt: skip
    counts = []
    for processes, config in enumerate((alone["config"], json.loads(written.read_text())["config"]), 1):
        assert config["processes"] == processes
        counts.append((config["emitted_tokens"], config["forward_passes"]))
        assert config["tokens_per_forward"] == pytest.approx(counts[-1][0] / counts[-1][1])
    assert counts[0] == counts[1]


committed_rows = cache(judged_collection)
PAGES = dict.fromkeys(study.page for study in studies().values())
COMMITTED = {(DEFAULT_SCALE, name) for name in PAGES if name not in ("real-model", "explore")}


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("page", [name for name in PAGES if name != "explore"])
def test_committed_reports_are_what_their_rows_say(scale: str, page: str, tmp_path: Path) -> None:
    """Guards against a stale or hand-edited report; renew it with `nox -s report`."""
    committed = Workspace(ROOT, scale)
    if not {study.key for study in studies_on(page)} & {*committed.pages}:
        assert (scale, page) not in COMMITTED, "these rows are committed"
        pytest.skip(f"no rows of scale {scale} are committed")
    written = write_page(parts_at(page, committed, committed_rows(committed)), scale, tmp_path)[0]
    assert written.read_text() == (committed.reports / written.name).read_text(), stale(scale)


def stale(scale: str) -> str:
    """The command that renews a page which is not what its rows say."""
    return f"stale: run `nox -s report{'' if scale == DEFAULT_SCALE else f' -- --scale {scale}'}`"


def test_committed_pages_on_the_whole_paper_are_what_the_rows_say() -> None:
    """Guards against a README, an index or verdicts that lag behind the rows of any page, scale or seed."""
    pages, _ = whole_paper(ROOT, DEFAULT_SCALE)
    named = {page.relative_to(ROOT).as_posix() for page in pages}
    assert named == {"README.md", "reports/index.md", "reports/explore.html"}
    for page, text in pages.items():
        assert text == page.read_text(encoding="utf-8"), (page, stale(DEFAULT_SCALE))


def gsm8k(*correct: int, **more: Any) -> EvaluationRow:
    """AR SFT's answers to two questions."""
    return replace(answered(AR_SFT, "gsm8k", [*correct], [5, 5], [5, 5]), **more)


def test_a_page_takes_answers_to_its_own_questions_alone(tmp_path: Path) -> None:
    """Guards against a page whose verdicts are of questions that only another page has asked."""
    names = ["hard_gsm8k", "within_gsm8k"]
    workspace = publish(tmp_path, [gsm8k(1, 1, benchmark=name) for name in names], "table2")
    workspace.publish("lengths", workspace.rows)
    collection = collection_of(workspace, queries())
    for page, name in zip(("table2", "lengths"), names, strict=True):
        assert [row.benchmark for row in collection.of(page)[0] if isinstance(row, EvaluationRow)] == [name]


def test_a_page_that_chooses_has_rows_of_its_own_seed(tmp_path: Path) -> None:
    """Guards against a rival that is judged by the answers it was chosen by, and a choice by answers of other seeds."""
    workspace = publish(tmp_path, [gsm8k(1, 1)], "table2")
    workspace.publish("rivals", workspace.rows)
    write_rows(replace(workspace, variant="seed5").store, [gsm8k(0, 0)])
    by_page = collection_of(workspace, queries())
    assert [row.correct for row in by_page.of("rivals")[0] if isinstance(row, EvaluationRow)] == [[0, 0]]
    assert [row.correct for rows in by_page.of("table2") for row in rows if isinstance(row, EvaluationRow)] == [[1, 1]]


def test_a_line_is_shown_whole_or_not_at_all(tmp_path: Path) -> None:
    """Guards against half a line at one seed beside the whole line at another."""
    bbh = answered(AR_SFT, "bbh", [1, 1], [5, 5], [5, 5])
    workspace = publish(tmp_path, [gsm8k(1, 1), bbh], "table2")
    publish(tmp_path, [gsm8k(1, 1)], "table9", variant="seed1")
    assert len(collection_of(workspace, queries()).of("table2")) == 1
    publish(tmp_path, [bbh], "table9", variant="seed1")
    assert len(collection_of(workspace, queries()).of("table2")) == 2


def test_a_page_is_of_one_lineage() -> None:
    """Guards against a page that takes one line from one training of a recipe and the next from another."""
    sft = [TrainingRow("sft", "done", "", "mini", "ar_sft", None, 1, 1, 1, 1.0, 1.0, checkpoint=name) for name in "ab"]
    mars = [
        TrainingRow("mars", "done", "", "mini", "mars", 4, 1, 1, 1, 1.0, 1.0, checkpoint=f"mars of {name}", parent=name)
        for name in "ab"
    ]
    lines = {line.name: line for line in plan_of("table2").lines}
    cells = ("ar_sft", "a"), ("ar_sft", "b"), ("mars", "mars of a"), ("mars", "mars of b"), ("mars_95", "mars of a")
    answers = [
        replace(answered(lines[name], "gsm8k", [1, 1], [5, 5], [5, 5]), key=f"{name} {weights}", checkpoint=weights)
        for name, weights in cells
    ]
    query = queries()["table2"]
    unknown = TrainingRow("sft", "done", "", "mini", "ar_sft", None, 1, 1, 1, 1.0, 1.0)
    assert query.of([unknown]) == [unknown], "one without a checkpoint is no parent of its own"
    for rows in ([*sft, *mars, *answers], [*reversed([*sft, *mars, *answers])]):
        assert {row.checkpoint for row in query.of(rows)} == {"a", "mars of a"}, "it has most of the page's cells"
    newer = replace(sft[1], provenance={"started": "2026-11-27"})
    rows = [sft[0], newer, *mars, *answers[:4]]
    assert {row.checkpoint for row in query.of(rows)} == {"b", "mars of b"}, "of equal ones, the newer"


def test_tables_say_the_same_of_a_line_wherever_they_stand() -> None:
    """Guards against a mean over other seeds, or another rounding, beside the same words on another page."""
    cells_of = defaultdict[tuple[str, ...], dict[str, str]](dict)
    for name, study in studies().items():
        plan, page = study.plan, ROOT / "reports" / f"{name}.md"
        if isinstance(plan, TablePlan) and not plan.seeds and page.exists():
            lines = lines_of(page.read_text(encoding="utf-8"))
            head, _, *body = dropwhile(lambda line: "tokens/forward" not in line, lines)
            for label, *cells in takewhile(lambda line, head=head: len(line) == len(head) and line != head, body):
                for column, cell in filter(lambda pair: pair[1], zip(head[1:], cells, strict=False)):
                    cells_of[(str(plan.within_training), *columns(plan), label, column)][name] = cell
    shared = [values for values in cells_of.values() if len(values) > 1]
    assert len(shared) > 10 and not [values for values in shared if len({*values.values()}) > 1]


# Rows of a second training of a recipe that no page takes.
FROM_TWO_LINEAGES = {("mini", 0): 9}


@pytest.mark.parametrize(("scale", "seed"), [("mini", seed) for seed in range(6)] + [("135m", 0)])
def test_a_store_holds_what_pages_show(scale: str, seed: int) -> None:
    """Guards against rows that stand twice, and answers and trainings that no page finds."""
    rows = stored(scale, seed)
    assert len({row.id for row in rows}) == len(rows)
    taken = {row.id for study in studies().values() for row in study.query.of(rows)}
    lost = {row.id for row in rows if isinstance(row, EvaluationRow | TrainingRow)} - taken
    assert len(lost) <= FROM_TWO_LINEAGES.get((scale, seed), 0)
