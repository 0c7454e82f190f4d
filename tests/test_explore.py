"""The page to explore: what it embeds, and what a reader can do with it in a real browser."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up import page_rows
from test_serving_page import can_be_read, contrast, luminance
from typer.main import get_command

from marsbench.cli import app
from marsbench.commands.shared import check_for
from marsbench.findings.collection import Collection
from marsbench.findings.export import derived, export
from marsbench.findings.sweep import SweepCells, speed_ratio, speed_up
from marsbench.methods import Decoding
from marsbench.overview.explore import page_of
from marsbench.racing.grid import COMPILED_AR
from marsbench.rows.kinds import EvaluationRow, GenerationRow, Row, SweepRow
from marsbench.statistics.intervals import Estimate

LINKS = {"speedup": "speedup.md", "figure1": "figure1.md"}
TEXTS = ["Tom", " has", " 7", " apples"]
HOSTILE = 'a</script><script>alert("1")</script><!--<script>{{rows}}&amp;\u2028'


def answer(arm: str, settled_by: list[int], question: str = "How many apples?", finish: str = "eos") -> GenerationRow:
    return GenerationRow(
        key=arm + question, status="done", reason="", scale="mini", arm=arm, stage="mars", method=arm, options={},
        question=question, texts=TEXTS, settled_by=settled_by, forwards=settled_by[-1], finish=finish,
    )  # fmt: skip


ANSWERS = [
    answer("ar", [1, 2, 3, 4, 5]), answer("mars", [1, 1, 2, 2, 2]), answer("verified", [1, 2, 2, 3, 3]),
    answer("ar", [1, 2, 3, 4], "And pears?", "length"), answer("mars", [1, 1, 1, 2], "And pears?", "length"),
]  # fmt: skip


@pytest.fixture(scope="module")
def raced() -> list[Row]:
    return page_rows("speedup")


@pytest.fixture(scope="module")
def sweep(raced: list[Row]) -> SweepCells:
    return SweepCells.of(raced)


@pytest.fixture(scope="module")
def text(raced: list[Row]) -> str:
    return page_of(collected(raced, ANSWERS))


def collected(raced: list[Row], answers: list[GenerationRow]) -> list[Collection]:
    other = [replace(row, texts=["of another seed"]) for row in answers]
    return [Collection("mini", {"speedup": {0: raced}, "figure1": {0: answers, 1: other}}, LINKS)]


def embedded(page: str) -> Any:
    (rows,) = re.findall(r'<script type="application/json" id="rows">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(rows)


# ---- what it embeds -------------------------------------------------------------------------------------------------
def test_numbers_are_those_of_the_rows(text: str, sweep: SweepCells) -> None:
    """Guards against numbers beside another contender's name or batch size, other laps, and another baseline."""
    race = embedded(text)["races"][0]
    names = [contender["name"] for contender in race["contenders"]]
    assert race["sizes"] == sweep.batch_sizes and sorted(names) == sorted(sweep.names)
    for size, cells in zip(race["sizes"], race["cells"], strict=True):
        for name, cell in zip(names, cells, strict=True):
            row = sweep.done.get((name, size))
            assert (row is None) == (cell is None), "a contender that has not raced has no point"
            if row is None:
                continue
            percent, alike, cost = row.accuracy.times(100), speed_up(row), sweep.cost(row)
            over = speed_ratio(row, sweep.done[COMPILED_AR, size])
            assert alike and cost and over
            assert cell["over"][names.index(COMPILED_AR)] == round(over.value, 2)
            assert f"{cell['perForward']:.2f}" == f"{row.tokens_per_forward:.2f}"
            assert [cell[name] for name in ("accuracy", "low", "high")] == rounded(percent, 1)
            assert cell["alike"] == rounded(alike, 2) and cell["keeps"] == (row.is_lossless or cost.value <= 1.0)
            assert (cell["prompts"], cell["laps"]) == (row.prompts, len(row.seconds))


def rounded(estimate: Estimate, digits: int) -> list[float]:
    return [round(value, digits) for value in (estimate.value, estimate.interval.low, estimate.interval.high)]


def test_a_cell_without_numbers_is_empty(raced: list[Row]) -> None:
    """Guards against a contender that failed at one batch size and breaks the page or takes another's place."""
    rows = [row for row in raced if isinstance(row, SweepRow) and row.contender in ("ar", "jacobi", "medusa, tree = 1")]
    failed = [
        replace(row, status="failed", reason="no memory", seconds=[])
        if (row.contender, row.batch_size) == ("jacobi", 4) or row.batch_size == 8
        else row
        for row in rows
    ]
    race = embedded(page_of(collected([*failed], [])))["races"][0]
    assert [contender["name"] for contender in race["contenders"]] == ["ar", "medusa, tree = 1", "jacobi"]
    assert race["sizes"] == [1, 4, 16]
    assert [cell is None for cell in race["cells"][1]] == [False, False, True]
    assert race["cells"][1][1]["over"][2] is None and race["cells"][1][1]["over"][0] > 0


def test_commands_decode_like_their_rows(text: str, sweep: SweepCells) -> None:
    """Guards against a command that the command line refuses, or that decodes with other options than the row."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for contender in embedded(text)["races"][0]["contenders"]:
        row = sweep.done[contender["name"], sweep.batch_sizes[0]]
        for command in contender["commands"]:
            program, name, *typed = shlex.split(command.replace("{size}", "4"))
            arguments = commands[name].make_context(name, typed).params
            options = {"window" if name == "block_size" else name: value for name, value in row.options.items()}
            expected = {"threshold": None, **options, "method": row.method, "compiled": row.compiled, "batch_size": 4}
            assert program == "marsbench" and {key: arguments[key] for key in expected} == expected
            assert arguments.get("stage", row.stage) == row.stage and arguments["dtype"] == row.dtype
            draft, stage = arguments["draft"], arguments.get("stage")
            check_for(Decoding(method=row.method, threshold=arguments["threshold"], draft=draft), stage)


def test_answers_are_those_of_the_first_seed() -> None:
    """Guards against tokens shaded with another forward, lines left out, seeds mixed, and answers marked wrongly."""
    first, second = embedded(page_of(collected([], ANSWERS)))["questions"]
    assert (first["question"], second["question"]) == ("How many apples?", "And pears?")
    labels = ["one token per forward pass", "MARS (B = 4, tau = .95)", "verified MARS (groups of 4)"]
    assert [answer["label"] for answer in first["answers"]] == labels
    assert first["answers"][1] == {
        "label": labels[1], "texts": TEXTS, "settledBy": [1, 1, 2, 2, 2], "forwards": 2, "cut": False, "right": None,
    }  # fmt: skip
    assert second["answers"][1]["cut"] and second["answers"][2] == {"label": labels[2], "why": "not run"}
    skipped = replace(ANSWERS[0], status="skipped", reason="no\ncheckpoint", texts=[], settled_by=[])
    assert embedded(page_of(collected([], [skipped])))["questions"][0]["answers"][0]["why"] == "skipped: no checkpoint"
    rows = page_rows("figure1")
    questions = embedded(page_of([Collection("mini", {"figure1": {0: rows}}, {})]))["questions"]
    marks = [[answer["right"] for answer in question["answers"]] for question in questions]
    assert questions[0]["reference"].endswith("answer is 14.") and marks[0] == [False, False, False]
    (matter,) = [place for place, entry in enumerate(questions) if entry["question"].startswith("Some molecule")]
    assert marks[matter] == [True, False, True]  # the second answers: of glass
    assert [None, None, None] in marks and [True, True, True] in marks


def test_hostile_texts_stay_texts(raced: list[Row]) -> None:
    """Guards against an answer or a name that ends the script it is embedded in, or fills a hole of the template."""
    row = next(row for row in raced if isinstance(row, SweepRow))
    spoken = replace(ANSWERS[0], question=HOSTILE, texts=[HOSTILE] * 4)
    page = page_of(collected([replace(row, contender=HOSTILE, stage="ar_sft")], [spoken]))
    plain = page_of(collected([row], [ANSWERS[0]]))
    assert page.lower().count("script") - plain.lower().count("script") == 6 * HOSTILE.lower().count("script")
    assert page.count("<") == plain.count("<") and "\u2028" not in page
    rows = embedded(page)
    assert rows["questions"][0]["question"] == HOSTILE and rows["races"][0]["contenders"][0]["name"] == HOSTILE


def test_the_page_is_whole_in_itself(text: str, raced: list[Row]) -> None:
    """Guards against a page that needs a network, is too large for a mail, or changes each time it is written."""
    assert text == page_of(collected(raced, ANSWERS))
    assert len(text.encode()) < 500_000
    assert not re.findall(r"https?:|src=|url\(|@import|fetch\(|import\(", text)
    assert set(re.findall(r'href="([^"]*)"', text)) == {"data:,", LINKS["speedup"]}
    assert "Scale mini: " in text and "about a million parameters" in text and "{{" not in text


@pytest.mark.parametrize("scale", ["mini", "135m"])
def test_a_scale_without_rows_has_a_page(scale: str) -> None:
    """Guards against a crash where nothing was measured, and links to pages that are not there."""
    page = page_of([Collection(scale, {}, {})])
    assert embedded(page) == {"races": [], "questions": []}
    assert f"Scale {scale}: " in page and "<a " not in page


# ---- in a browser ---------------------------------------------------------------------------------------------------
def opened(browser: Any, page: str, folder: Path) -> None:
    (folder / "explore.html").write_text(page, encoding="utf-8")
    browser.get((folder / "explore.html").as_uri())


def points(browser: Any) -> dict[str, Any]:
    """The points that are drawn, by the names of their contenders."""
    drawn = browser.find_elements("css selector", "#chart .point")
    return {str(point.get_attribute("aria-label")).partition(": ")[0]: point for point in drawn}


def details(browser: Any) -> str:
    return str(browser.find_element("id", "said").text)


def choose(browser: Any, name: str, words: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", name)).select_by_visible_text(words)


def pareto(numbers: dict[str, tuple[float, float]]) -> set[str]:
    """The contenders that no other beats in speed and accuracy: from the fastest to the slowest, the more accurate."""
    front, best = {}, -1.0
    for speed in sorted({speed for speed, _ in numbers.values()}, reverse=True):
        right = max(accuracy for other, accuracy in numbers.values() if other == speed)
        if right > best:
            front[speed] = best = right
    return {name for name, (speed, accuracy) in numbers.items() if front.get(speed) == accuracy}


def test_a_race_can_be_explored(browser: Any, text: str, sweep: SweepCells, tmp_path: Path) -> None:
    """Guards against a chart stuck at one baseline, batch size or axis, with a wrong front, or without details."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, text, tmp_path)
    race = embedded(text)["races"][0]
    names = [contender["name"] for contender in race["contenders"]]
    assert set(points(browser)) == set(names)
    assert "over ar of the same kind" in browser.find_element("id", "across").text
    choose(browser, "baseline", "hf-generate")
    browser.find_element("id", "size").send_keys(Keys.END)
    size = sweep.batch_sizes[-1]
    assert browser.find_element("id", "size-value").text == str(size)
    row = sweep.done["jacobi", size]
    ratio = speed_ratio(row, sweep.done["hf-generate", size])
    browser.execute_script("arguments[0].focus()", points(browser)["jacobi"])
    assert ratio and f"{ratio.value:.2f} times the tokens/s of hf-generate; " in details(browser)
    assert f"accuracy {100 * row.accuracy.value:.1f} [" in details(browser)
    assert f"{row.prompts} prompts, {len(row.seconds)} laps, batch size {size}" in details(browser)
    assert f"--batch-size {size} --method jacobi --window 4" in details(browser)
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    name = str(browser.switch_to.active_element.get_attribute("aria-label")).partition(": ")[0]
    assert name != "jacobi" and details(browser).startswith(name)

    for axis, value in (("tokens per forward pass", "perForward"), ("tokens per second, over a baseline", "over")):
        choose(browser, "axis", axis)
        cells = {name: cell for name, cell in zip(names, race["cells"][-1], strict=True) if cell}
        across = {name: cell[value] if value == "perForward" else cell[value][1] for name, cell in cells.items()}
        assert names[1] == "hf-generate"
        kept = {name: cell for name, cell in cells.items() if cell["keeps"]}
        expected = pareto({name: (across[name], cell["accuracy"]) for name, cell in kept.items()})
        marked = {name for name, point in points(browser).items() if "front" in point.get_attribute("class").split()}
        assert marked == expected and {points(browser)[name].tag_name for name in marked} == {"path"}
        fastest = max(across, key=lambda name: across[name])
        ActionChains(browser).move_to_element(points(browser)[fastest]).perform()
        assert details(browser).startswith(fastest)
    assert browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_method_can_be_looked_at_alone(browser: Any, text: str, sweep: SweepCells, tmp_path: Path) -> None:
    """Guards against a filter that shows other methods, loses the front, or colours two methods alike."""
    opened(browser, text, tmp_path)
    choose(browser, "kind", "jacobi")
    assert set(points(browser)) == {row.contender for row in sweep.at(sweep.batch_sizes[0]) if row.method == "jacobi"}
    choose(browser, "kind", "all")
    style = {name: point.get_attribute("style") for name, point in points(browser).items()}
    assert style["jacobi"] != style["ar"] == style["ar, AR SFT"]
    assert len(browser.find_elements("css selector", "#legend span")) == len({*style.values()})
    assert browser.find_elements("css selector", "#chart .bar")


def test_a_model_whose_answers_are_not_scored_has_no_accuracy(browser: Any, tmp_path: Path) -> None:
    """Guards against a real model drawn with an accuracy that was not measured, and a front over other tokens."""
    rows = page_rows("real-model", "135m")
    page = page_of([*collected([], []), Collection("135m", {"real-model": {0: rows}}, {})])
    races = embedded(page)["races"]
    named = [tuple(race["name"].split(", ")[1:3]) for race in races]
    assert named == [(dtype, f"{prompts} prompts") for dtype, prompts in SweepCells.by_race(rows)]
    assert not any(race["scores"] for race in races)
    opened(browser, page, tmp_path)
    choose(browser, "model", races[1]["name"])
    front = browser.find_element("id", "front").text
    assert "tokens/forward)" in front and "%" not in front and "llama.cpp" not in front
    assert "accuracy" not in details(browser) and named[1][1] in details(browser)


def test_answers_stand_side_by_side(browser: Any, text: str, tmp_path: Path) -> None:
    """Guards against an answer under another question, one forward in two shades, and a page too wide for a phone."""
    opened(browser, text, tmp_path)
    choose(browser, "question", "1. How many apples?")
    columns = browser.find_elements("css selector", "#lines article")
    spans = [column.find_elements("tag name", "span") for column in columns]
    assert [[span.get_attribute("textContent") for span in line] for line in spans[1:]] == [
        ["Tom has", " 7 apples∎"], ["Tom", " has 7", " apples∎"],
    ]  # fmt: skip
    assert [span.get_attribute("class") for span in spans[2]] == ["f0", "f1", "f0"]
    titles = ["forward pass 1: 2 tokens", "forward pass 2: 3 tokens"]
    assert [span.get_attribute("title") for span in spans[1]] == titles
    assert [entry.text for entry in columns[1].find_elements("tag name", "dd")] == ["5", "2", "2.50"]
    choose(browser, "question", "2. And pears?")
    columns = browser.find_elements("css selector", "#lines article")
    assert browser.find_element("id", "question-text").text == "And pears?"
    assert "cut at the token limit" in columns[1].text and columns[2].text.endswith("not run")
    screen = {"width": 360, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        opened(browser, text, tmp_path)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        assert browser.execute_script("return document.getElementById('chart').viewBox.baseVal.width") < 360
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_texts_are_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    """Guards against markup in an answer that becomes part of the page, and an empty half of a page without a note."""
    spoken = replace(ANSWERS[0], question=HOSTILE, texts=[HOSTILE] * 4)
    opened(browser, page_of(collected([], [spoken])), tmp_path)
    assert browser.find_element("id", "question-text").get_attribute("textContent") == HOSTILE
    assert len(browser.find_elements("tag name", "script")) == 2
    expected = {"race": False, "no-race": True, "answers": True, "no-answers": False}
    assert {name: browser.find_element("id", name).is_displayed() for name in expected} == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(browser: Any, text: str, tmp_path: Path, scheme: str) -> None:
    """Guards against text or marks that vanish in one scheme, and shades that differ only in colour."""
    opened(browser, text, tmp_path)
    pairs = ("ink", "even"), ("ink", "odd"), ("accent", "page"), ("accent", "field")
    colours = can_be_read(browser, scheme, *pairs)
    assert contrast(colours["even"], colours["odd"]) >= 1.3 and luminance(colours["ink"]) != luminance(colours["page"])


def test_a_table_holds_what_the_rows_come_to(tmp_path: Path) -> None:
    """Guards against exports of raw laps only, a training with an accuracy, and a cell without one."""
    rows = page_rows("speedup")
    table = pd.read_csv(export(rows, tmp_path / "speed.csv"))
    for row, line in zip(rows, table.to_dict("records"), strict=True):
        if not isinstance(row, SweepRow) or row.status != "done":
            assert math.isnan(line["speed_up"])
            continue
        ratio = speed_up(row)
        assert ratio is not None and line["speed_up"] == pytest.approx(ratio.value)
        assert line["speed_up_low"] <= line["speed_up"] <= line["speed_up_high"]
        assert line["accuracy"] == pytest.approx(sum(row.correct) / len(row.correct))
        assert line["tokens_per_second"] == pytest.approx(sum(row.emitted) / sorted(row.seconds)[len(row.seconds) // 2])
    (row, *_) = [row for row in page_rows("table9") if isinstance(row, EvaluationRow)]
    share, tokens = sum(row.correct) / len(row.correct), sum(row.emitted) / sum(row.forwards)
    assert derived(row) == pytest.approx({"accuracy": share, "tokens_per_forward": tokens})
