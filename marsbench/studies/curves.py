"""Curves: AR SFT and MARS by training steps, from two bases and at two rates, and by the size of the model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from marsbench.findings.between_lines import emits, more_accurate
from marsbench.findings.cells import BENCHMARKS, Cells, latest_cells, latest_stages
from marsbench.findings.in_words import machines, plus_minus, with_interval
from marsbench.findings.seeds import BySeed
from marsbench.line import Line, TrainedStage
from marsbench.rendering.figures import drawn_alike, error_bars, line_on, look, new_figure, save
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import laid_out
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.lines import AR_SFT, mars, mars_name, short
from marsbench.studies.study import Study

SCALES_OWN = "shipped base, gentle rate"  # the recipe of the tables
CURVES: dict[str, tuple[str, ...]] = {  # words -> the endings of its stages, by steps
    SCALES_OWN: ("", "_2x_data", "_4x_data", "_8x_data"),
    "shipped base, ten times the rate": ("_hard_sft", "_hard_4x_data"),
    "base without conversations, gentle rate": ("_of_text_base", "_of_text_base_4x_data"),
    "base without conversations, ten times the rate": ("_of_text_base_hard", "_of_text_base_hard_4x_data"),
}
SIZES = "short bases of three sizes, gentle rate"
_TEACHING = "base without conversations, gentle rate"
_TAUGHT = CURVES[_TEACHING][0]
_POINTS = {**CURVES, SIZES: ("_of_small_base", "_of_medium_base", "_of_large_base")}
_BASES = {name: "text_base" if "without" in name else "base" for name in CURVES}  # what each curve begins with
_SUREST, *_THRESHOLDS = 0.99, 0.95, 0.9, 0.8  # the first for curves from the shipped base alone
_WAYS = {  # line without its ending -> its words
    "ar_sft": "AR SFT",
    mars_name("mars", 4): "MARS, one token",
    **{mars_name("mars", 4, tau): f"tau = {short(tau)}" for tau in (_SUREST, *_THRESHOLDS)},
}
_AR, _ONE, *_SEVERAL = _WAYS
_PAPERS = mars_name("mars", 4, 0.95)  # the line at the paper's threshold
QUESTIONS = 200  # of a benchmark: some 70 lines answer them


def _ways(curve: str) -> list[str]:
    surest = mars_name("mars", 4, _SUREST)
    return [way for way in _WAYS if way != surest or curve.startswith("shipped")]


def _lines() -> Iterator[Line]:
    yield from (Line(name, name, name, "ar", optional=True) for name in ("base", "text_base"))
    lines = AR_SFT, mars("mars", 4), *[mars("mars", 4, tau) for tau in (_SUREST, *_THRESHOLDS)]
    for words, endings in _POINTS.items():
        for ending in endings:
            yield from (line.of_another_stage(ending, words) for line in lines if line.name in _ways(words))


PLAN = TablePlan("curves", "More training and other sizes", tuple(_lines()), questions=QUESTIONS, own="Curves", seed=6)


def _moves(rows: Sequence[Row], first: str, second: str, ways: Sequence[str] = (_AR, _ONE)) -> list[Estimate]:
    """The difference of each line between two points of a curve, if measured: by default AR SFT and MARS."""
    claims = [more_accurate(PLAN, way + second, way + first) for way in ways]
    return [finding.estimate for claim in claims if (finding := claim.of(rows)).estimate is not None]


def settled(rows: Sequence[Row], curve: str) -> tuple[int | None, str]:
    """The steps after which accuracy at one token no longer changes significantly, and the same in words.

    They hold for every line: the first point after which neither AR SFT nor MARS differs significantly at any
    later point.
    """
    steps = _places(rows, curve)
    known = [ending for ending in steps if len(_moves(rows, ending, ending)) == len((_AR, _ONE))]
    if len(known) < 2:
        return None, "not measured"
    for place, ending in enumerate(known[:-1]):
        moves = [move for later in known[place + 1 :] for move in _moves(rows, ending, later)]
        if all(move.interval.low <= 0 <= move.interval.high for move in moves):
            return steps[ending], f"{steps[ending]:,} steps"
    return None, f"not reached: still changes at {steps[known[-1]]:,} steps"


def _places(rows: Sequence[Row], curve: str) -> dict[str, int]:
    """Ending -> steps (for sizes: parameters), for the trained points of a curve."""
    trained = latest_stages(rows)
    points = {ending: trained.get(TrainedStage.of(f"mars{ending}")) for ending in _POINTS[curve]}
    return {
        ending: row.parameters if curve == SIZES else row.steps for ending, row in points.items() if row is not None
    }


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells = latest_cells(rows)
    shown = {name: caption for name, caption in _FIGURES.items() if _drawn(rows, name)}
    asked = len(BENCHMARKS) * max((len(row.correct) for row in cells.values()), default=0)
    return {
        "answer": _answer(rows),
        "outcomes": _outcomes(rows),
        "figures": paragraphs(*[f"![{said}](figures/{PLAN.key}_{name}.png)" for name, said in shown.items()]),
        "captions": " ".join(f"{caption}." for caption in shown.values()),
        "asked": f"{asked:,}",
        "machines": machines(rows),
        "numbers": _numbers(rows, cells),
        "missing": _missing(cells),
    }


def _answer(rows: Sequence[Row]) -> str:
    """What more steps change, and what MARS costs on a base that AR SFT improves much; empty without rows."""
    steps, said = _places(rows, SCALES_OWN), list[str]()
    first, last = min(steps, key=steps.__getitem__, default=""), max(steps, key=steps.__getitem__, default="")
    if len(moves := _moves(rows, first, last, (_AR, _ONE, _PAPERS))) == 3 and first != last:
        ar, one, several = (with_interval(move, 1, signed=True) for move in moves)
        said.append(
            f"- From {steps[first]:,} steps (those of the tables) to {steps[last]:,}, AR SFT changes by {ar} points. "
            f"MARS changes by {one} at one token and by {several} at tau = .95."
        )
        at = longest(rows)
        said.append(
            f"- With {steps[last]:,} steps, MARS differs from AR SFT by {at['longest_one']} points at one token and by "
            f"{at['longest_level']} at tau = .95. There it emits {at['longest_tokens']} tokens per forward pass."
        )
    if (taught := more_accurate(PLAN, _AR + _TAUGHT, _BASES[_TEACHING]).of(rows)).estimate:
        one, several = (more_accurate(PLAN, way + _TAUGHT, _AR + _TAUGHT).of(rows).by for way in (_ONE, _PAPERS))
        said.append(
            f"- With a base without conversations, AR SFT scores {taught.by} than the base. MARS scores {one} than AR "
            f"SFT at one token, and {several} at tau = .95."
        )
    return "\n".join(said)


def _outcomes(rows: Sequence[Row]) -> str:
    """For each curve: what AR SFT adds to its base, the steps by the rule, and changes of accuracy."""
    lines = []
    for curve, base in _BASES.items():
        steps = _places(rows, curve)
        if not steps:
            continue
        first, last = next(iter(steps)), list(steps)[-1]
        taught = more_accurate(PLAN, _AR + first, base).of(rows).number
        moves = _moves(rows, first, last, (_AR, _ONE, _PAPERS)) if first != last else []
        moved = [with_interval(move, 1, signed=True) for move in moves] or [""] * 3
        lines.append([curve, taught, *_costs(rows, last), settled(rows, curve)[1], *moved])
    costs = [f"{words} minus AR SFT, last point" for words in ("MARS at one token", "MARS at tau = .95")]
    moved = [f"{words}, last minus first" for words in ("AR SFT", "MARS", "MARS at tau = .95")]
    return table(["points", "AR SFT minus its base", *costs, "steps by the rule", *moved], lines)


def _costs(rows: Sequence[Row], ending: str) -> list[str]:
    """MARS at one token and at tau = .95 minus AR SFT trained as long, in points."""
    return [more_accurate(PLAN, way + ending, _AR + ending).of(rows).number for way in (_ONE, _PAPERS)]


def in_brief(rows: Sequence[Row]) -> str:
    """Whether the tables train too few steps by the rule, and what MARS costs where AR SFT teaches; lines of a list."""
    steps, said = [*_places(rows, SCALES_OWN).values()], []
    if len(steps) > 1 and settled(rows, SCALES_OWN)[0] is None:
        said = [
            f"The toy's MARS is under-trained. It has {steps[0]:,} steps. By our rule even {steps[-1]:,} are too few, "
            "because accuracy at one token still moves."
        ]
    taught = more_accurate(PLAN, _AR + _TAUGHT, _BASES[_TEACHING]).of(rows)
    if taught.estimate is not None:
        one, several = _costs(rows, _TAUGHT)
        said.append(
            f"A toy base that has seen no conversations has more to gain: AR fine-tuning adds {taught.number} points. "
            f"Compared with that AR model, MARS changes accuracy by {one} points at one token, {several} at tau = .95 "
            "(one seed)."
        )
    return "\n- ".join(said)


def longest(rows: Sequence[Row]) -> dict[str, str]:
    """What the tables' recipe comes to with the most training that was measured, by slot of README's layout."""
    steps = _places(rows, SCALES_OWN)
    first, last = (next(iter(steps)), list(steps)[-1]) if steps else ("", "")
    claims = {
        "longest_one": more_accurate(PLAN, _ONE + last, _AR + last),
        "longest_level": more_accurate(PLAN, _PAPERS + last, _AR + last),
        "longest_tokens": emits(PLAN, _PAPERS + last, Bound()),
    }
    findings = {slot: claim.of(rows) for slot, claim in claims.items()}
    level, times = findings["longest_level"].estimate, steps[last] // steps[first] if steps else 1
    counts = {"longest_times": f"{times}", "longest_asked": f"{level.n if level else 0:,}"}
    return counts | {slot: finding.number for slot, finding in findings.items()}


def _points(rows: Sequence[Row], cells: Cells, curve: str) -> dict[str, dict[int, tuple[Estimate, Estimate]]]:
    """Line without its ending -> steps or parameters -> tokens per forward pass and accuracy, if measured."""
    places = _places(rows, curve).items()
    return {
        way: {x: at for ending, x in places if (at := line_on(cells, way + ending, list(BENCHMARKS)))} for way in _WAYS
    }


def _numbers(rows: Sequence[Row], cells: Cells) -> str:
    lines = []
    for curve in _POINTS:
        points = _points(rows, cells, curve)
        for place in _places(rows, curve).values():
            shown = []
            for way in _WAYS:
                speed, accuracy = points[way].get(place, (None, None))
                said = plus_minus(accuracy, 1, factor=100) if accuracy else ""
                shown.append(said + (f"; {speed.value:.2f}" if speed and way in _SEVERAL else ""))
            lines.append([f"{curve}, {place:,} {'parameters' if curve == SIZES else 'steps'}", *shown])
    return table(["", *_WAYS.values()], lines)


def _missing(cells: Cells) -> str:
    left = [
        curve
        for curve, endings in _POINTS.items()
        if any(line_on(cells, way + ending, list(BENCHMARKS)) is None for ending in endings for way in _ways(curve))
    ]
    return f" **In part:** some points are not measured of: {'; '.join(left)}." if left else ""


_FIGURES = {
    "steps": "Accuracy (above) and tokens per forward pass (below) by training steps",
    "sizes": "The same by the number of parameters",
}


def _drawn(rows: Sequence[Row], name: str) -> list[str]:
    return [curve for curve in _POINTS if (curve == SIZES) == (name == "sizes") and _places(rows, curve)]


def _draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    drawn = {name: curves for name in _FIGURES if (curves := _drawn(rows, name))}
    stem = f"figures/{PLAN.key}_"
    return [path for name, curves in drawn.items() for path in _figure(rows, curves, reports_dir / f"{stem}{name}")]


def _figure(rows: Sequence[Row], curves: Sequence[str], path_stem: Path) -> list[Path]:
    cells = latest_cells(rows)
    with drawn_alike():
        figure = new_figure(max(5.0, 2.6 * len(curves)), 5.4)
        grid = figure.subplots(2, len(curves), squeeze=False, sharey="row", sharex="col")
        for (above, below), curve in zip(grid.T, curves, strict=True):
            for place, (way, points) in enumerate(_points(rows, cells, curve).items()):
                for axes, part, factor in ((above, 1, 100.0), (below, 0, 1.0)):
                    values = [at[part] for at in points.values()] if part or way in _SEVERAL else []
                    axes.errorbar(
                        [*points][: len(values)], [factor * value.value for value in values], label=_WAYS[way],
                        yerr=error_bars(values, factor), linewidth=1.0, markersize=4.5, elinewidth=0.8,
                        **look(place + 1),
                    )  # fmt: skip
                    axes.grid(color="0.9", linewidth=0.6)
                    axes.spines[["top", "right"]].set_visible(False)
            marks = [*_places(rows, curve).values()]
            above.set_title(curve.replace(", ", ",\n"), fontsize=8)
            below.set_xscale("log", base=2)
            below.set_xlabel("parameters" if curve == SIZES else "training steps")
            below.set_xticks(marks, [f"{mark / 1e6:.2g} M" if curve == SIZES else f"{mark:,}" for mark in marks])
        grid[0, 0].set_ylabel("accuracy in %")
        grid[1, 0].set_ylabel("tokens per forward pass")
        entries = len(_WAYS) if len(curves) > 2 else 2
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=entries, frameon=False)
        return save(figure, path_stem)


STUDY = Study(
    asks="would more training, another base or another size change what the tables say?",
    place=3,
    in_paper=False,
    on="regime",
    plan=PLAN,
    trained_before=True,
    sections=laid_out(__package__, _slots, PLAN, "prose/curves.md"),
    figures=_draw,
)
