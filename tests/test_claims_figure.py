"""The figure of the page of claims, on made-up claims: what is drawn, where, and what is said beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from marsbench.findings.claims import (
    ABSTRACT,
    POINTS,
    TIMES,
    TOKENS,
    Claim,
    Finding,
    Judged,
    Measured,
    Section,
    judge_all,
)
from marsbench.findings.collection import Collection
from marsbench.overview import claims_figure, claims_page
from marsbench.overview.claims_figure import Comparison, agreement, comparisons
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, Interval
from marsbench.studies import studies

MEASURED = "measured at scale mini, 95 % interval"
MINI = Collection("mini", {}, {})


def claim(text: str, section: Section | None, unit: str = POINTS, signed: bool = True, **published: float) -> Claim:
    """A claim of which the paper says `small` of its 0.5B model and `large` of its 7B model."""
    said = {"0.5b": published.get("small"), "7b": published.get("large")}
    return Claim(
        item="table2",
        page="table2",
        name=text,
        text=text,
        compared="one minus other",
        unit=unit,
        signed=signed,
        measure=lambda rows: Measured(),
        bound=Bound(low=0.0),
        published=lambda scale: said[scale],
        section=section,
    )


TABLE2, TABLE4, TABLE5 = (
    Section(f"Table {number}", place) for number, place in ((2, (4, 2)), (4, (4, 4)), (5, (4, 10)))
)
CLAIMS = [
    claim("ours", None, small=-0.7),
    claim("faster", TABLE5, TIMES, False, large=1.71),
    claim("better", TABLE2, small=1.7, large=1.5),
    claim("shrinks", TABLE5, TIMES, large=0.37),
    claim("nothing published", TABLE2),
    claim("slower", TABLE5, TIMES, False, large=0.23),
    claim("in an appendix", Section("Table 8", appendix="B"), small=17.2),
    claim("several tokens", TABLE4, TOKENS, False, small=1.46),
    claim("worse", TABLE2, small=5.9),
    claim("nothing either", ABSTRACT),
]


def judged(claims: Sequence[Claim], low: float = 0.5, value: float = 1.0, high: float = 1.5) -> list[Judged]:
    """Claims in the order of the page, each with the same effect."""
    found = Measured(Estimate(value, Interval(low, high), 10))
    return [Judged(one.claim, {"mini": Finding(one.claim, found)}) for one in judge_all(claims, [])]


def drawn(claims: Sequence[Judged], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Axes]:
    """The panels of the figure."""
    figures: list[Figure] = []

    def save(figure: Figure, path_stem: Path) -> list[Path]:
        figures.append(figure)
        return [path_stem]

    monkeypatch.setattr(claims_figure, "save", save)
    assert claims_figure.draw(claims, [MINI], tmp_path) == [tmp_path / "figures" / "claims_mini"]
    return figures[0].axes


def rows_of(panel: Axes) -> list[str]:
    return [label.get_text() for label in panel.get_yticklabels()]


def test_every_claim_with_a_published_number_is_drawn_once_in_the_order_of_the_paper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against claims that are lost, drawn twice, under another section, or with nothing to be held against.

    And against points, ratios and differences of ratios on one axis.
    """
    panels = drawn(judged(CLAIMS), monkeypatch, tmp_path)
    assert [(panel.get_xlabel().partition(" (")[0], rows_of(panel)) for panel in panels] == [
        (
            "difference in points",
            [
                "Section 4.2: Table 2",
                "2  better",
                "4  worse",
                "Appendix B: Table 8",
                "9  in an appendix",
                "Not the paper's: ours, and reported elsewhere",
                "10  ours",
            ],
        ),
        ("tokens/forward", ["Section 4.4: Table 4", "5  several tokens"]),
        ("times", ["Section 4.10: Table 5", "6  faster", "8  slower"]),
        ("difference in times", ["Section 4.10: Table 5", "7  shrinks"]),
    ]


def marks(panel: Axes) -> dict[str, list[tuple[float, int]]]:
    """What the legend calls a marker -> (value, row) of each."""
    handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    lines: dict[str, Any] = {name: getattr(one, "lines", [one])[0] for name, one in handles.items()}
    return {name: [(float(x), round(float(y))) for x, y in line.get_xydata()] for name, line in lines.items()}


def test_markers_stand_where_the_numbers_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a published number of the other model, or in another claim's row, or an interval left out."""
    points = drawn(judged(CLAIMS), monkeypatch, tmp_path)[0]
    assert marks(points) == {
        MEASURED: [(1.0, 1), (1.0, 2), (1.0, 4), (1.0, 6)],
        "published, Qwen2.5 0.5B": [(1.7, 1), (5.9, 2), (17.2, 4), (-0.7, 6)],
        "published, Qwen2.5 7B": [(1.5, 1)],
    }
    (bars,) = [one for one in points.collections if len(one.get_paths()) == 4]
    assert [[float(x) for x, _ in path.vertices] for path in bars.get_paths()] == [[0.5, 1.5]] * 4


def test_what_was_not_measured_shows_what_was_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a claim that goes missing with its rows, and an unbounded interval that spoils the axis."""
    found = judged(CLAIMS)
    found = [Judged(one.claim, {"mini": Finding(one.claim)}) if one.claim.text == "better" else one for one in found]
    unbounded = Measured(Estimate(1.0, Interval(-inf, inf), 1))
    found = [
        Judged(one.claim, {"mini": Finding(one.claim, unbounded)}) if one.claim.text == "faster" else one
        for one in found
    ]
    panels = drawn(found, monkeypatch, tmp_path)
    assert "2  better" in rows_of(panels[0])
    assert marks(panels[0])[MEASURED] == [(1.0, 2), (1.0, 4), (1.0, 6)]
    assert panels[2].get_xlim()[1] < 3


def test_labels_do_not_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against words of the paper's claims too long for their rows, or pushed out of the picture."""
    claims = [one for study in studies().values() for one in study.claims]
    panels = drawn(judged(claims), monkeypatch, tmp_path)
    figure = panels[0].get_figure()
    assert isinstance(figure, Figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    labels = [label.get_window_extent(canvas.get_renderer()) for panel in panels for label in panel.get_yticklabels()]
    assert len(labels) > 50 and all(label.x0 >= 0 for label in labels)
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(labels))


def compared(published: dict[str, float], low: float, value: float, high: float, *, signed: bool = True) -> Comparison:
    one = replace(CLAIMS[0], signed=signed)
    return Comparison(1, one, "mini", Estimate(value, Interval(low, high), 10), published)


@pytest.mark.parametrize(
    ("one", "same", "opposed", "held"),
    [
        (compared({"0.5b": 1.7}, 0.5, 1.0, 2.0), True, False, True),
        (compared({"0.5b": 1.7}, 1.8, 2.0, 2.5), True, False, False),
        (compared({"0.5b": 1.7}, -3.9, -1.2, 1.6), False, False, False),
        (compared({"0.5b": 1.7}, -7.7, -4.1, -0.6), False, True, False),
        (compared({"0.5b": 0.0}, -7.7, -4.1, -0.6), False, False, False),
        (compared({"0.5b": -0.1, "7b": 1.0}, -2.0, -1.0, 0.5), True, False, True),
        (compared({"7b": 0.9}, 0.6, 0.63, 0.7, signed=False), True, False, False),
        (compared({"7b": 0.9}, 1.1, 1.2, 1.3, signed=False), False, True, False),
        (compared({"7b": 0.9}, -inf, 0.8, inf, signed=False), True, False, False),
    ],
)
def test_agreement_by_hand(one: Comparison, same: bool, opposed: bool, held: bool) -> None:
    """Guards against ratios held against 0, the larger model where the smaller has a number, and empty intervals."""
    assert (one.same_sign, one.surely_opposed, one.holds_published) == (same, opposed, held)


def test_a_scale_is_held_against_its_own_model() -> None:
    """Guards against numbers of Qwen2.5 7B that are compared with the paper's of 0.5B."""
    (found,) = comparisons([Judged(CLAIMS[2], {"7b": Finding(CLAIMS[2])})], "7b")
    assert found.nearest == 1.5 and not (found.same_sign or found.surely_opposed or found.holds_published)


def test_the_sentence_counts_what_is_drawn() -> None:
    """Guards against counts of other claims than the figure's, and missing measurements that pass for disagreement."""
    found = comparisons(judged(CLAIMS, 0.5, 1.2, 2.0), "mini")
    assert agreement(found, "mini") == (
        "Scale mini: of 8 claims with a published number, all were measured; in 6 of them the sign agrees, in 1 the "
        "whole interval has the other sign, and in 3 the interval holds the published value."
    )
    missing = [Judged(one.claim, {"mini": Finding(one.claim)}) for one in judged(CLAIMS[:3])]
    sentence = agreement(comparisons(missing, "mini"), "mini")
    assert "of 3 claims with a published number, 0 were measured; in 0 of them" in sentence


def test_the_page_shows_the_figure_that_is_written(tmp_path: Path) -> None:
    """Guards against a broken image, numbers that are not the page's, and bytes that differ from run to run."""
    found = judged(CLAIMS)
    page = claims_page.render(found, [MINI])
    first, again = (claims_figure.draw(found, [MINI], tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["claims_mini.png", "claims_mini.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    (link,) = re.findall(r"!\[[^\]]{20,}\]\((\S+)\)", page)
    assert (tmp_path / "a" / link).is_file()
    assert agreement(comparisons(found, "mini"), "mini") in page
    assert re.search(r"## Section 4\.2: Table 2\n[^#]*\| +4 \| worse ", page.replace("|   # |", ""))


def test_claims_that_say_the_same_are_told_apart_on_the_page_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against two lines of the page that read the same, and comparisons that fill up the figure."""
    found = judged([*CLAIMS, replace(CLAIMS[8], compared="one minus a third")])
    page = claims_page.render(found, [MINI])
    for compared in ("one minus other", "one minus a third"):
        assert re.search(rf"\| +\d \| worse: {compared} +\|", page)
    labels = rows_of(drawn(found, monkeypatch, tmp_path)[0])
    assert labels[2:4] == ["4  worse", "5  worse"]


def test_a_scale_without_rows_has_no_figure(tmp_path: Path) -> None:
    """Guards against a picture of published numbers alone, and a heading with nothing below it."""
    found = [Judged(one.claim, {"mini": Finding(one.claim)}) for one in judged(CLAIMS)]
    assert claims_figure.draw(found, [MINI], tmp_path) == []
    assert "published one" not in claims_page.render(found, [MINI]) and not any(tmp_path.iterdir())
