"""The pages on the whole paper, from made-up rows of several seeds and scales; and the command that makes all pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from made_up import PAGES, PROVENANCE, answered, sweep_row
from scipy import stats
from stored import publish
from typer.testing import CliRunner

from marsbench.cli import app
from marsbench.findings.cells import columns, latest_cells
from marsbench.findings.claims import Claim, Finding, judge_all
from marsbench.findings.collection import collect
from marsbench.findings.seeds import pooled
from marsbench.overview import reproduction
from marsbench.overview.pages import EXPLORE, whole_paper, write_whole_paper
from marsbench.overview.work import executor_of
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, SweepRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.studies import claims, pages, studies, studies_of_paper
from marsbench.studies.discrepancies import PLAN, effect
from marsbench.studies.study import Study, TablePage
from marsbench.studies.table2 import STUDY as TABLE2

QUESTIONS = 40
MATCHES = TABLE2.claims[0]  # MARS is at least as accurate as AR SFT, less two points
HELD_BY = {  # what the paper numbers without a page of its own -> the page that holds it
    "table5": "speedup",
    "table6": "speedup",
    "figure3": "table8",
    "appendix-a": "table2",
}


def evaluation_rows(page: TablePage, seed: int = 0) -> Iterator[EvaluationRow]:
    """Answers to the same questions, other answers for every seed."""
    generator = np.random.default_rng(seed)
    for benchmark in columns(page.plan):
        for arm in page.plan.lines:
            forwards = generator.integers(5, 40, QUESTIONS)
            correct, extra = generator.integers(0, 2, QUESTIONS), generator.integers(0, 9, QUESTIONS)
            yield answered(arm, benchmark, correct, forwards + extra, forwards, provenance=PROVENANCE)


def rows_of_seeds(count: int) -> list[list[Row]]:
    return [[*evaluation_rows(TABLE2, seed)] for seed in range(count)]


# ---- several seeds --------------------------------------------------------------------------------------------------


def test_seeds_are_pooled_question_by_question() -> None:
    """Guards against questions of one seed beside those of another, and against counts that are averaged."""
    seeds = rows_of_seeds(3)
    found = latest_cells(pooled(seeds))["mars", "bbh"]
    alone = [latest_cells(rows)["mars", "bbh"] for rows in seeds]
    assert found.correct == pytest.approx(
        [mean(values) for values in zip(*[row.correct for row in alone], strict=True)]
    )
    assert found.emitted == [sum(values) for values in zip(*[row.emitted for row in alone], strict=True)]
    assert found.forwards == [sum(values) for values in zip(*[row.forwards for row in alone], strict=True)]


def test_what_a_seed_lacks_is_not_pooled() -> None:
    """Guards against a cell of two seeds that passes for one of three."""
    first, second = rows_of_seeds(2)

    def change(row: Row) -> Row:
        assert isinstance(row, EvaluationRow)
        shorter = {"correct": row.correct[1:], "emitted": row.emitted[1:], "forwards": row.forwards[1:]}
        return {"mars": replace(row, status="skipped"), "base": replace(row, **shorter)}.get(row.arm, row)  # type: ignore[arg-type]

    cells = latest_cells(pooled([first, [change(row) for row in second]]))
    assert {arm for arm, _ in cells} == {arm.name for arm in TABLE2.plan.lines} - {"mars", "base"}


def test_a_claim_over_seeds_by_hand() -> None:
    """Guards against an interval without training noise, a value that is not the seeds' mean, and a lost verdict."""
    seeds = rows_of_seeds(3)
    values = [found.estimate.value for rows in seeds if (found := MATCHES.of(rows)).estimate]
    together, questions = MATCHES.over(seeds), MATCHES.of(pooled(seeds))
    assert together.estimate and questions.estimate
    assert together.estimate.value == pytest.approx(mean(values))
    training = stats.t.ppf(0.975, 2) * stdev(values) / 3**0.5
    below = questions.estimate.value - questions.estimate.interval.low
    assert together.estimate.interval.low == pytest.approx(together.estimate.value - (below**2 + training**2) ** 0.5)
    assert together.seeds == 3 and together.p is not None
    assert together.verdict == MATCHES.bound.verdict(together.estimate.interval)


def with_mars(seed: int, right: int) -> list[Row]:
    """Rows of a seed in which MARS has so many questions of every benchmark right, and AR SFT none."""
    correct = {"mars": [1.0] * right + [0.0] * (QUESTIONS - right), "ar_sft": [0.0] * QUESTIONS}
    return [replace(row, correct=correct.get(row.arm, row.correct)) for row in evaluation_rows(TABLE2, seed)]


def test_scatter_between_seeds_can_undo_a_verdict() -> None:
    """Guards against a verdict that is still that of the questions alone, an interval beyond what two accuracies can
    differ by, and one that is cut at the wrong end.
    """
    even, uneven, far = (
        MATCHES.over([with_mars(seed, right) for seed, right in enumerate(rights)])
        for rights in ((20, 20, 20), (2, 20, 38), (QUESTIONS, QUESTIONS, QUESTIONS // 2))
    )
    assert even.verdict == "holds" and uneven.verdict == "open"
    assert far.estimate and far.estimate.interval.high == 100.0 and far.estimate.interval.low > -100.0


def test_one_seed_is_judged_as_on_its_page() -> None:
    """Guards against a second kind of interval for what was trained once."""
    (rows,) = rows_of_seeds(1)
    assert MATCHES.over([rows]) == replace(MATCHES.of(rows), p=MATCHES.over([rows]).p)
    assert MATCHES.over([]) == Finding(MATCHES) and MATCHES.over([[]]) == MATCHES.of([])


def test_an_unfinished_seed_does_not_count() -> None:
    """Guards against seeds that are compared on different benchmarks."""
    first, second = rows_of_seeds(2)
    partly = [row for row in second if isinstance(row, EvaluationRow) and row.benchmark != "mini_gpqa"]
    alone = MATCHES.over([first])
    assert MATCHES.over([first, partly]) == MATCHES.over([partly, first]) == alone and alone.seeds == 1


# ---- claims on speed and training -----------------------------------------------------------------------------------


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


def paper_claims() -> list[Claim]:
    """Every claim, in the order in which pages show them."""
    return [one.claim for one in judge_all(claims(), [])]


def claim(words: str) -> Claim:
    (found,) = [one for one in paper_claims() if words in one.text]
    return found


@pytest.mark.parametrize(
    ("words", "value", "other"),
    [
        ("faster than AR with a KV cache", 1.7 / 1.005, "does not hold"),
        ("shrinks as the batch grows", 0.4 / 1.005, "does not hold"),
        ("favours a smaller B_cache", 0.9 / 1.3 - 1.1 / 1.7, "does not hold"),
        ("yields more tokens per target forward", 40 / 12 - 40 / 17, "does not hold"),
        ("A MARS target is faster", 1.2 / 1.005, "does not hold"),
        ("Under load", 1.25, "holds"),
    ],
)
def test_claims_on_a_sweep(words: str, value: float, other: str) -> None:
    """Guards against the wrong cells, ratios upside down, and claims that cannot fail."""
    found = claim(words).of(sweep(AS_PUBLISHED))
    assert found.verdict == "holds" and found.estimate
    assert found.estimate.value == pytest.approx(value, rel=0.01)
    assert claim(words).of(sweep(THE_OTHER_WAY, target=0.8, forwards=6)).verdict == other
    assert claim(words).of([]).verdict == "not run"


def test_races_of_several_seeds_are_summed() -> None:
    """Guards against laps that are averaged with those of other races, or a baseline of one seed for all."""
    row = sweep_row("cache 4", "mars-block-cache", 4, [1.0, 2.0], options={"cache_block": 4})
    slower = replace(row, seconds=[3.0, 2.0], baselines={"ar": {"seconds": [2.0, 3.0], "emitted": 80}})
    (found,) = pooled([[row], [slower]])
    assert isinstance(found, SweepRow)
    assert (found.seconds, found.emitted) == ([4.0, 4.0], [20] * 4)
    assert found.baselines == {"ar": {"seconds": [3.0, 4.0], "emitted": 120}}
    assert pooled([[row], [replace(row, seconds=[1.0])]]) == pooled([[row], [replace(row, baselines={})]]) == []


def steps(ratio: float) -> list[Row]:
    seconds = {"ar": [1.0, 1.1, 0.9], "mars": [ratio, ratio * 1.1, ratio * 0.9]}
    return [StepCostRow("k", "done", "", "mini", seconds)]


def parameters(of_mars: int) -> list[Row]:
    sizes = {("ar_sft", None): 1000, ("mars", 4): of_mars}
    return [TrainingRow(s, "done", "", "mini", s, b, n, 1, 1, 1.0, 1.0) for (s, b), n in sizes.items()]


def test_claims_on_training() -> None:
    """Guards against a bound on one side only, as far more than twice is not about twice; one slow step that sets the
    pace of all seeds, a value that none of them has; and a MARS with a parameter more that passes for the same model.
    """
    verdicts = [claim("costs about twice").of(steps(ratio)).verdict for ratio in (2.0, 1.2, 3.0)]
    assert verdicts == ["holds", "does not hold", "does not hold"]
    assert [claim("adds no parameters").of(parameters(n)).verdict for n in (1000, 1001)] == ["holds", "does not hold"]
    mars = ([2.0, 2.0, 9.0], [2.0, 9.0, 2.0], [9.0, 2.0, 2.0])
    found = [StepCostRow("k", "done", "", "mini", {"ar": [1.0] * 3, "mars": [*of_seed]}) for of_seed in mars]
    together = claim("costs about twice").over([[row] for row in found])
    assert together.estimate and (together.estimate.value, together.estimate.n, together.seeds) == (2.0, 9, 3)


# ---- the pages ------------------------------------------------------------------------------------------------------


def index_of(root: Path) -> str:
    return next(text for path, text in whole_paper(root, "mini").items() if path.name == "index.md")


def test_a_line_is_the_same_line_on_every_page() -> None:
    """Guards against rows that one page lends another and that are of something else."""
    found: dict[str, set[str]] = {}
    for plan in [plan for query in pages().values() for plan in query.plans]:
        for arm in plan.lines:
            found.setdefault(arm.name, set()).add(
                f"{arm.trained} {arm.draft} {arm.method} {sorted(arm.options.items())}"
            )
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}


def test_a_seed_counts_wherever_its_lines_were_measured(tmp_path: Path) -> None:
    """Guards against "differs" on a page that one training made, where other pages have more of the same lines."""
    table3 = next(page for page in PAGES if page.plan.key == "table3")
    for seed in range(3):
        publish(tmp_path, [*evaluation_rows(table3, seed)], "table3", variant=f"seed{seed}" if seed else "")
    publish(tmp_path, [*evaluation_rows(table3, 0)], "discrepancies")
    (collection,) = collect(tmp_path, "mini", pages())
    seeds = collection.shown_with("discrepancies", 0)
    pair = "mars_no_sft_b4", "mars_no_sft_released_b4"
    found = effect(seeds, *pair)
    assert found and found[0].seeds == 3
    assert {row.arm for row in seeds[1] if isinstance(row, EvaluationRow)} <= {arm.name for arm in PLAN.lines}
    assert list(collection.shown_with("discrepancies", 2)) == [2, 0, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.plan.key)
def test_only_the_papers_ablation_stands_beside_its_numbers(page: TablePage) -> None:
    """Guards against the clean ablation held against a number that the authors' 1/t weights made too."""
    ablations = [arm for arm in page.plan.lines if arm.published == "mars_no_sft"]
    assert {arm.stage for arm in ablations} <= {"mars_no_sft_released"}
    for one in page.claims:
        clean = {arm.name for arm in page.plan.lines if arm.stage == "mars_no_sft"}
        assert clean.isdisjoint(one.lines) or one.published("0.5b") is None


@pytest.mark.parametrize(("stage", "said"), [("mars", False), ("mars_2x", True)])
def test_pages_say_which_checkpoint_the_sweep_decodes(stage: str, said: bool, tmp_path: Path) -> None:
    """Guards against speeds of a model trained longer that pass for those of the tables' model."""
    publish(tmp_path, [replace(sweep_row("ar", "ar", 4, [1.0, 1.0]), stage=stage)], "speedup")
    assert (
        "speculative decoding are about `mars_2x` (MARS, trained twice as long as `mars`)" in index_of(tmp_path)
    ) == said


def test_scales_of_tests_have_pages_of_their_own(tmp_path: Path) -> None:
    """Guards against rows of models that know nothing on the page of the paper's scales."""
    publish(tmp_path, [*evaluation_rows(TABLE2)], "table2", scale="micro")
    micro, mini = (write_whole_paper(tmp_path, scale)[0] for scale in ("micro", "mini"))
    assert micro == tmp_path / "reports" / "micro" / "index.md" and mini == tmp_path / "reports" / "index.md"
    assert "(table2.md)" in micro.read_text() and "Scale micro" not in mini.read_text()
    assert "(table2.md)" not in mini.read_text()


def test_a_quick_sweep_stands_in_for_a_whole_one(tmp_path: Path) -> None:
    """Guards against Tables 5 and 6 called not run after a quick run, and a quick run that hides a whole one."""
    publish(tmp_path, sweep(AS_PUBLISHED), "speedup", variant="quick")
    (found,) = collect(tmp_path, "mini", pages())
    assert found.links == {"speedup": "mini/quick/speedup.md"} and found.of("speedup")
    publish(tmp_path, sweep(THE_OTHER_WAY), "speedup")
    (found,) = collect(tmp_path, "mini", pages())
    assert found.links == {"speedup": "speedup.md"}


@pytest.mark.parametrize("change", [lambda row: replace(row, correct=[], emitted=[], forwards=[], status="failed"),
                                    lambda row: replace(row, provenance={})])  # fmt: skip
def test_nothing_undefined_is_printed(change: Callable[[EvaluationRow], EvaluationRow], tmp_path: Path) -> None:
    """Guards against NaN, infinity, None or a crash, whatever is missing."""
    assert not re.search(r"\b(nan|inf|None)\b", index_of(tmp_path))
    publish(tmp_path, [change(row) for row in evaluation_rows(TABLE2)], "table2")
    assert not re.search(r"\b(nan|inf|None)\b", index_of(tmp_path))


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief_training")
def test_the_whole_paper_with_one_command(tmp_path: Path) -> None:
    """Guards against a page that is left out, one failure that takes the others with it, and a failure in silence."""
    few = ["--benchmarks", "mini_bbh", "--limit", "1", "--quick"]  # Table 8 and Figure 6 do not ask mini_bbh
    done = CliRunner().invoke(app, ["reproduce", "all", "--scale", "micro", "--output", str(tmp_path), *few])
    assert done.exit_code == 2, done.output
    assert "page 3 of" in done.output and "Table 8 asks none of mini_bbh" in done.output
    (named,) = re.findall(r"\d of \d+ pages could not be made: ([\w, ]+)", done.output)
    failed = set(named.split(", "))
    assert failed >= {"table8", "figure6"} and not failed & {"table2", "table3", "table4", "table9", "figure1"}
    for study in studies_of_paper():
        if study.key not in failed | {"speedup"}:
            workspace = Workspace(tmp_path, "micro", "mini_bbh-limit1")
            assert study.key in workspace.pages
            assert (workspace.reports / f"{study.page}.md").exists() or study.page == EXPLORE
    assert (Workspace(tmp_path, "micro", "quick-mini_bbh-limit1").reports / "speedup.md").exists()
    assert {path.name for path in (tmp_path / "reports" / "micro").glob("*.*")} == {"index.md", "explore.html"}


@pytest.mark.parametrize(("name", "page"), HELD_BY.items())
def test_what_the_paper_numbers_is_made_by_its_number(
    name: str, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a table or figure that nobody can ask for, or that makes another page."""
    made = list[str]()

    def carry_out(wanted: Sequence[Study], *_: Any, **__: Any) -> dict[str, list[Row]]:
        made.extend(study.key for study in wanted)
        if page == "speedup":
            return {page: [replace(row, scale="micro") for row in sweep(AS_PUBLISHED)]}
        (study,) = wanted
        return {page: [replace(answered(study.plans[0].lines[0], "gsm8k", [1.0], [2], [1]), scale="micro")]}

    monkeypatch.setattr(reproduction, "carry_out", carry_out)
    assert {item.key: study.key for study in studies().values() for item in study.holds} == HELD_BY
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    written = reproduction.reproduce_page(name, run, executor_of(run, jobs=1))
    assert {*made} == {page} and written == tmp_path / "reports" / "micro" / f"{page}.md"
