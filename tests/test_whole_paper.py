"""The pages on the whole paper, from made-up rows of several seeds and scales; and the command that makes all pages."""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from math import isclose
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from made_up import PAGES, ROOT, answered, answers_of, publish, sweep_row
from scipy import stats
from tools import invoke

from marsbench.errors import UserError
from marsbench.findings.cells import latest_cells
from marsbench.findings.claims import ABSTRACT, Claim, Finding, judge_all
from marsbench.findings.collection import collect
from marsbench.findings.seeds import pooled
from marsbench.overview import reproduction
from marsbench.overview.front_door import BEGIN, END
from marsbench.overview.index import EXPLORE
from marsbench.overview.pages import whole_paper, write_whole_paper
from marsbench.overview.work import executor_of
from marsbench.paper import REFERENCE, Published, published
from marsbench.presets import preset
from marsbench.rendering.figures import line_on
from marsbench.rendering.sessions import SESSIONS, session_of
from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, SweepRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.studies import claims, items, queries, studies, studies_of_paper, study_of
from marsbench.studies.discrepancies import PLAN, effect
from marsbench.studies.study import Study, TablePage
from marsbench.studies.table2 import STUDY as TABLE2

QUESTIONS = 40
MATCHES = TABLE2.claims[0]  # MARS is at least as accurate as AR SFT, less two points
# What the paper numbers without a page of its own -> the page that holds it.
HELD_BY = {"table5": "speedup", "table6": "speedup", "figure3": "table8", "appendix-a": "table2"}


def rows_of_seeds(count: int) -> list[list[Row]]:
    return [[*answers_of(TABLE2, seed)] for seed in range(count)]


def test_seeds_are_pooled_question_by_question() -> None:
    """Guards against questions of one seed beside another's, averaged counts, and two seeds that count as three."""
    seeds = rows_of_seeds(3)
    together, *alone = (latest_cells(rows)["mars", "bbh"] for rows in (pooled(seeds), *seeds))
    for name, put_together in (("correct", mean), ("emitted", sum), ("forwards", sum)):
        each = zip(*[getattr(row, name) for row in alone], strict=True)
        assert getattr(together, name) == pytest.approx([put_together(values) for values in each])

    def change(row: Row) -> Row:
        assert isinstance(row, EvaluationRow)
        shorter = {"correct": row.correct[1:], "emitted": row.emitted[1:], "forwards": row.forwards[1:]}
        return {"mars": replace(row, status="skipped"), "base": replace(row, **shorter)}.get(row.arm, row)  # type: ignore[arg-type]

    cells = latest_cells(pooled([seeds[0], [change(row) for row in seeds[1]]]))
    assert {arm for arm, _ in cells} == {arm.name for arm in TABLE2.plan.lines} - {"mars", "base"}


def test_a_claim_over_seeds_by_hand(tmp_path: Path) -> None:
    """Guards against an interval without training noise or beyond 100 points, a lost verdict, a figure of one seed."""
    seeds = rows_of_seeds(3)
    shares = [100 * mean(latest_cells(rows)["mars", "bbh"].correct) for rows in seeds]
    assert (drawn := line_on(seeds, TABLE2.plan, "mars", ["bbh"])) and drawn[1].value == pytest.approx(mean(shares))
    figures = [TABLE2.draw(of, tmp_path)[0].read_bytes() for of in (seeds[:1], seeds)]
    assert figures[0] != figures[1]
    values = [finding.estimate.value for rows in seeds if (finding := MATCHES.of(rows)).estimate]
    together, questions = MATCHES.over(seeds), MATCHES.of(pooled(seeds))
    assert together.estimate and questions.estimate
    assert together.estimate.value == pytest.approx(mean(values))
    training = stats.t.ppf(0.975, 2) * stdev(values) / 3**0.5
    below = questions.estimate.value - questions.estimate.interval.low
    assert together.estimate.interval.low == pytest.approx(together.estimate.value - (below**2 + training**2) ** 0.5)
    assert together.seeds == 3 and together.p is not None
    assert together.verdict == MATCHES.bound.verdict(together.estimate.interval)
    even, uneven, far = (
        MATCHES.over([with_mars(seed, right) for seed, right in enumerate(rights)])
        for rights in ((20, 20, 20), (2, 20, 38), (QUESTIONS, QUESTIONS, QUESTIONS // 2))
    )
    assert even.verdict == "holds" and uneven.verdict == "open"
    assert far.estimate and far.estimate.interval.high == 100.0 and far.estimate.interval.low > -100.0


def with_mars(seed: int, right: int) -> list[Row]:
    """Rows of a seed in which MARS has so many questions of every benchmark right, and AR SFT none."""
    correct = {"mars": [1.0] * right + [0.0] * (QUESTIONS - right), "ar_sft": [0.0] * QUESTIONS}
    return [replace(row, correct=correct.get(row.arm, row.correct)) for row in answers_of(TABLE2, seed)]


def test_one_seed_is_judged_as_on_its_page() -> None:
    """Guards against another interval for a model that was trained once, and seeds compared on other benchmarks."""
    first, second = rows_of_seeds(2)
    alone = MATCHES.over([first])
    assert alone == replace(MATCHES.of(first), p=alone.p) and alone.seeds == 1
    assert MATCHES.over([]) == Finding(MATCHES) and MATCHES.over([[]]) == MATCHES.of([])
    partly = [row for row in second if isinstance(row, EvaluationRow) and row.benchmark != "mini_gpqa"]
    assert MATCHES.over([first, partly]) == MATCHES.over([partly, first]) == alone


def sweep(speeds: Mapping[int, Mapping[int, float]], target: float = 1.2, forwards: int = 3) -> list[Row]:
    """Batch size -> B_cache -> how many times as fast as `ar`; and a MARS target against an AR target."""
    rows: list[Row] = [
        sweep_row(f"cache {block}", "mars-block-cache", size, [1 / speed, 1.01 / speed], options={"cache_block": block})
        for size, of_size in speeds.items()
        for block, speed in of_size.items()
    ]
    first = min(speeds)
    return [
        *rows,
        *[sweep_row("mars-no-cache", "mars-no-cache", size, [2.0, 2.1]) for size in speeds],
        sweep_row("speculative, AR SFT by AR SFT", "speculative", first, [1.0, 1.0], row_forwards=[4, 4, 4, 5]),
        sweep_row("speculative, MARS by AR SFT", "mars-speculative", first, [1 / target, 1.01 / target],
                  row_forwards=[forwards] * 4),
        sweep_row("speculative, MARS by MARS", "mars-speculative", first, [1 / target / 1.1] * 2),
        sweep_row("mars, tau = 0.95", "mars", max(speeds), [1.0, 1.0], options={"threshold": 0.95}),
        sweep_row("mars, tau = 0.5", "mars", max(speeds), [0.8, 0.8], options={"threshold": 0.5}),
        sweep_row("mars, tau = one", "mars", max(speeds), [0.1, 0.1], options={}),
    ]  # fmt: skip


AS_PUBLISHED = {4: {4: 1.1, 32: 1.7}, 8: {4: 1.0, 32: 1.6}, 16: {4: 0.9, 32: 1.3}}
THE_OTHER_WAY = {4: {4: 0.8, 32: 0.5}, 8: {4: 0.8, 32: 0.6}, 16: {4: 0.9, 32: 0.8}}


def claim(words: str) -> Claim:
    (matching,) = [judged.claim for judged in judge_all(claims(), []) if words in judged.claim.text]
    return matching


@pytest.mark.parametrize(
    ("words", "value", "other"),
    [
        ("faster than AR with a KV cache", 1.7 / 1.005, "does not hold"),
        ("shrinks as the batch grows", 0.4 / 1.005, "does not hold"),
        ("favours a smaller B_cache", 0.9 / 1.3 - 1.1 / 1.7, "does not hold"),
        ("emits more tokens per target forward", 40 / 12 - 40 / 17, "does not hold"),
        ("With a MARS target, speculative decoding is faster", 1.2 / 1.005, "does not hold"),
        ("Under load", 1.25, "holds"),
    ],
)
def test_claims_on_a_sweep(words: str, value: float, other: str) -> None:
    """Guards against the wrong cells, ratios upside down, and claims that cannot fail."""
    finding = claim(words).of(sweep(AS_PUBLISHED))
    assert finding.verdict == "holds" and finding.estimate
    assert finding.estimate.value == pytest.approx(value, rel=0.01)
    assert claim(words).of(sweep(THE_OTHER_WAY, target=0.8, forwards=6)).verdict == other
    assert claim(words).of([]).verdict == "not run"


def test_races_of_several_seeds_are_summed() -> None:
    """Guards against laps that are averaged with those of other races, or a baseline of one seed for all."""
    row = sweep_row("cache 4", "mars-block-cache", 4, [1.0, 2.0], options={"cache_block": 4})
    slower = replace(row, seconds=[3.0, 2.0], baselines={"ar": {"seconds": [2.0, 3.0], "emitted": 80}})
    (summed,) = pooled([[row], [slower]])
    assert isinstance(summed, SweepRow)
    assert (summed.seconds, summed.emitted) == ([4.0, 4.0], [20] * 4)
    assert summed.baselines == {"ar": {"seconds": [3.0, 4.0], "emitted": 120}}
    assert pooled([[row], [replace(row, seconds=[1.0])]]) == pooled([[row], [replace(row, baselines={})]]) == []


def steps(ratio: float) -> list[Row]:
    seconds = {"ar": [1.0, 1.1, 0.9], "mars": [ratio, ratio * 1.1, ratio * 0.9]}
    return [StepCostRow("k", "done", "", "mini", seconds)]


def parameters(of_mars: int) -> list[Row]:
    sizes = {("ar_sft", None): 1000, ("mars", 4): of_mars}
    return [TrainingRow(s, "done", "", "mini", s, b, n, 1, 1, 1.0, 1.0) for (s, b), n in sizes.items()]


def test_claims_on_training() -> None:
    """Guards against a bound on one side only, one slow step that decides for all seeds, and a larger MARS."""
    verdicts = [claim("costs about twice").of(steps(ratio)).verdict for ratio in (2.0, 1.2, 3.0)]
    assert verdicts == ["holds", "does not hold", "does not hold"]
    assert [claim("adds no parameters").of(parameters(n)).verdict for n in (1000, 1001)] == ["holds", "does not hold"]
    mars = ([2.0, 2.0, 9.0], [2.0, 9.0, 2.0], [9.0, 2.0, 2.0])
    rows = [StepCostRow("k", "done", "", "mini", {"ar": [1.0] * 3, "mars": [*of_seed]}) for of_seed in mars]
    together = claim("costs about twice").over([[row] for row in rows])
    assert together.estimate and (together.estimate.value, together.estimate.n, together.seeds) == (2.0, 9, 3)


def index_of(root: Path) -> str:
    return next(text for path, text in whole_paper(root, "mini")[0].items() if path.name == "index.md")


def test_a_seed_counts_wherever_its_lines_were_measured(tmp_path: Path) -> None:
    """Guards against a "differs" from one training seed where other pages have more seeds of these lines."""
    table3 = next(page for page in PAGES if page.plan.key == "table3")
    for seed in range(3):
        publish(tmp_path, [*answers_of(table3, seed)], "table3", variant=f"seed{seed}" if seed else "")
    publish(tmp_path, [*answers_of(table3, 0)], "discrepancies")
    (collection,) = collect(tmp_path, "mini", queries())
    seeds = collection.shown_with("discrepancies", 0)
    effects = effect(seeds, "mars_no_sft_b4", "mars_no_sft_released_b4")
    assert effects and effects[0].seeds == 3
    assert {row.arm for row in seeds[1] if isinstance(row, EvaluationRow)} <= {arm.name for arm in PLAN.lines}
    assert list(collection.shown_with("discrepancies", 2)) == [2, 0, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.plan.key)
def test_only_the_papers_ablation_stands_beside_its_numbers(page: TablePage) -> None:
    """Guards against the clean ablation beside a published number that was made with the authors' 1/t weights."""
    ablations = [arm for arm in page.plan.lines if arm.published == "mars_no_sft"]
    assert {arm.stage for arm in ablations} <= {"mars_no_sft_released"}
    clean = {arm.name for arm in page.plan.lines if arm.stage == "mars_no_sft"}
    assert all(clean.isdisjoint(claim.lines) or claim.published("0.5b") is None for claim in page.claims)


def test_scales_of_tests_have_pages_of_their_own(tmp_path: Path) -> None:
    """Guards against rows of the tests' tiny models on the page of the paper's scales."""
    publish(tmp_path, [*answers_of(TABLE2)], "table2", scale="micro")
    micro, mini = (write_whole_paper(tmp_path, scale)[0] for scale in ("micro", "mini"))
    assert micro == tmp_path / "reports" / "micro" / "index.md" and mini == tmp_path / "reports" / "index.md"
    assert "(table2.md)" in micro.read_text() and "Scale micro" not in mini.read_text()
    assert "(table2.md)" not in mini.read_text()


def test_a_quick_sweep_stands_in_for_a_whole_one(tmp_path: Path) -> None:
    """Guards against Tables 5 and 6 called not run after a quick run, and a quick run that hides a full one."""
    publish(tmp_path, sweep(AS_PUBLISHED), "speedup", variant="quick")
    (collection,) = collect(tmp_path, "mini", queries())
    assert collection.links == {"speedup": "mini/quick/speedup.md"} and collection.of("speedup")
    publish(tmp_path, sweep(THE_OTHER_WAY), "speedup")
    (collection,) = collect(tmp_path, "mini", queries())
    assert collection.links == {"speedup": "speedup.md"}


@pytest.mark.parametrize("change", [lambda row: replace(row, correct=[], emitted=[], forwards=[], status="failed"),
                                    lambda row: replace(row, provenance={})])  # fmt: skip
def test_nothing_undefined_is_printed(change: Callable[[EvaluationRow], EvaluationRow], tmp_path: Path) -> None:
    """Guards against NaN, infinity, None or a crash, whatever is missing."""
    assert not re.search(r"\b(nan|inf|None)\b", index_of(tmp_path))
    publish(tmp_path, [change(row) for row in answers_of(TABLE2)], "table2")
    assert not re.search(r"\b(nan|inf|None)\b", index_of(tmp_path))


@pytest.mark.usefixtures("brief_training")
def test_the_whole_paper_with_one_command(reproduced: Path, tmp_path: Path) -> None:
    """Guards against a page that is left out, one failure that takes the others with it, and a silent failure."""
    output, trained = tmp_path, Path("runs", "micro", "checkpoints")
    shutil.copytree(reproduced / trained, output / trained)
    few = ["--benchmarks", "mini_bbh", "--limit", "1", "--quick"]  # Table 8 and Figure 6 do not ask mini_bbh
    done = invoke("reproduce", "all", "--scale", "micro", "--output", str(output), *few, code=2)
    assert "page 3 of" in done.output and "Table 8 asks none of mini_bbh" in done.output
    (named,) = re.findall(r"\d of \d+ pages could not be made: ([\w, ]+)", done.output)
    failed = set(named.split(", "))
    assert failed >= {"table8", "figure6"} and not failed & {"table2", "table3", "table4", "table9", "figure1"}
    for study in studies_of_paper():
        if study.key not in failed | {"speedup"}:
            workspace = Workspace(output, "micro", "mini_bbh-limit1")
            assert study.key in workspace.pages
            assert (workspace.reports / f"{study.page}.md").exists() or study.page == EXPLORE
    assert (Workspace(output, "micro", "quick-mini_bbh-limit1").reports / "speedup.md").exists()
    assert {path.name for path in (output / "reports" / "micro").glob("*.*")} == {"index.md", "explore.html"}


@pytest.mark.parametrize(("name", "page"), HELD_BY.items())
def test_what_the_paper_numbers_is_made_by_its_number(
    name: str, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a table or figure that cannot be asked for, or that makes another page."""
    keys = list[str]()

    def carry_out(wanted: Sequence[Study], *_: Any, **__: Any) -> dict[str, list[Row]]:
        keys.extend(study.key for study in wanted)
        if page == "speedup":
            return {page: [replace(row, scale="micro") for row in sweep(AS_PUBLISHED)]}
        (study,) = wanted
        return {page: [replace(answered(study.plans[0].lines[0], "gsm8k", [1.0], [2], [1]), scale="micro")]}

    monkeypatch.setattr(reproduction, "carry_out", carry_out)
    assert {item.key: study.key for study in studies().values() for item in study.holds} == HELD_BY
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    written = reproduction.reproduce_page(name, run, executor_of(run, jobs=1))
    assert {*keys} == {page} and written == tmp_path / "reports" / "micro" / f"{page}.md"


def test_the_registry_is_the_papers() -> None:
    """Guards against tables out of order or not found, claims left out, and a line with two meanings."""
    keys = [item.key for item in items()]
    tables = [f"table{number}" for number in (2, 3, 4, 5, 6, 8, 9)]
    figures = [f"figure{number}" for number in (1, 3, 6)]
    assert keys == [
        *tables, *figures, "appendix-a", "regime", "discrepancies", "gains", "lengths", "longer", "adapter",
        "alignment", "blocks", "curves", "map", "rivals", "breaks", "speedup", "serving", "real-model",
    ]  # fmt: skip
    assert [session.makes for session in SESSIONS.values()] == keys, "each has a session that README can show"
    assert [key for key in studies() if key in keys] == [key for key in keys if key in studies()]
    for key, study in studies().items():
        assert study.key == key and study.asks and study.name
        assert study.is_made or study.on
    for item in items():
        assert SESSIONS[session_of(item.key)].makes == item.key and SESSIONS[session_of(item.key)].words
    assert {name: study_of(name).key for name in (*HELD_BY, "table2")} == {**HELD_BY, "table2": "table2"}
    with pytest.raises(UserError, match="table99"):
        study_of("table99")
    sections = {item.section for item in items()}
    for study in studies().values():
        for claim in (*study.prose_claims, *study.claims):
            assert claim.page == study.key
            assert claim.section in sections or claim.section is ABSTRACT
            assert claim.name or claim.section is None, "pages find the paper's claims by their names"
    every = [arm for query in queries().values() for plan in query.plans for arm in plan.lines]
    kinds = {(arm.name, f"{arm.trained} {arm.draft} {arm.method} {sorted(arm.options.items())}") for arm in every}
    assert len(kinds) == len({name for name, _ in kinds})


def test_only_a_readme_with_the_marks_is_written(tmp_path: Path) -> None:
    """Guards against a user's own README overwritten, and one that changes when another scale is measured."""
    few = {"ar_sft.jsonl", "base.jsonl", "mars.jsonl", "pages.json"}
    (tmp_path / "results" / "mini").mkdir(parents=True)
    for name in few:
        shutil.copy(ROOT / "results" / "mini" / name, tmp_path / "results" / "mini" / name)
    readme = tmp_path / "README.md"
    assert readme not in whole_paper(tmp_path, "mini")[0]
    readme.write_text("# Mine\n")
    assert readme not in whole_paper(tmp_path, "mini")[0]
    readme.write_text(f"# Mine\n\n{BEGIN}\nstale numbers\n{END}\n\nThe rest.\n")
    assert readme not in whole_paper(tmp_path, "micro")[0]
    write_whole_paper(tmp_path, "mini")
    text = readme.read_text()
    assert text.startswith("# Mine\n") and text.endswith("\n\nThe rest.\n") and "stale numbers" not in text
    assert "5 seeds" not in text


ROWS_PER_TABLE = {"2": 63, "3": 77, "4": 84, "5": 81, "6": 15, "8": 252, "9": 24, "A": 4}
BENCHMARKS = {"ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval"}
METRICS = {
    *("accuracy", "accuracy_delta", "seconds", "speedup", "train_h200_hours"),
    *("tokens_per_forward", "tokens_per_second", "tokens_per_target_forward"),
}
# Table 9 states tokens per forward as averages only, so nothing can be averaged again.
AVERAGES_WITHOUT_PARTS = {("9", "ar_sft_5ep", 1.0), ("9", "jacobi", 1.07), ("9", "mars", 1.46)}

RAW_ROWS: list[dict[str, Any]] = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
ALL_ROWS = [row for table in ROWS_PER_TABLE for row in published(table)]


def test_every_published_number_is_there_once() -> None:
    """Guards against lost or doubled lines, two values of a cell, misspelt fields, and mistyped values."""
    assert Counter(row["table"] for row in RAW_ROWS) == ROWS_PER_TABLE
    assert len(RAW_ROWS) == len(ALL_ROWS) == len({astuple(replace(row, value=0.0)) for row in ALL_ROWS}) == 600
    for line, row in enumerate(RAW_ROWS, start=1):
        assert row.keys() <= {field.name for field in fields(Published)}, line
        assert row["scale"] in {"0.5b", "7b"}, line
        assert row["metric"] in METRICS, line
        assert row.get("benchmark") in BENCHMARKS | {"average"} or row["table"] == "A", line
        assert row.get("block_size") in {None, 4, 8, 16}, line
        assert row.get("threshold") in {None, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0}, line
        assert 0 <= row["value"] <= (100 if row["metric"] == "accuracy" else 1000), line
    groups: dict[tuple[Any, ...], dict[str | None, float]] = defaultdict(dict)
    for row in ALL_ROWS:
        groups[astuple(replace(row, value=0.0, benchmark=None))][row.benchmark] = row.value
    averaged = {cell: values for cell, values in groups.items() if "average" in values}
    assert len(averaged) == 38
    partless = {(cell[0], cell[2], values["average"]) for cell, values in averaged.items() if len(values) == 1}
    assert partless == AVERAGES_WITHOUT_PARTS
    for cell, values in averaged.items():
        if len(values) > 1:
            mean = sum(values[benchmark] for benchmark in BENCHMARKS) / len(BENCHMARKS)
            rounding = 0.005 if "tokens_per_forward" in cell else 0.05  # two printed decimals, or one
            assert isclose(mean, values["average"], abs_tol=rounding + 1e-9), cell


def test_filters_narrow_to_the_cell() -> None:
    """Guards against filters that are ignored, and a misspelt name that reads like "the paper has no such number"."""
    (cell,) = published("2", scale="0.5b", method="base", benchmark="ifeval")
    assert cell == Published("2", "0.5b", "base", "accuracy", 27.8, "ifeval", block_size=None, threshold=1.0)
    assert published("2", scale="0.5b", method="jacobi") == []
    with pytest.raises(UserError, match="choose one of: 2, 3, 4"):
        published("7")
    with pytest.raises(AttributeError, match="blocksize"):
        published("2", blocksize=4)
