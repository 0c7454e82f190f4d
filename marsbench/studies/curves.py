"""Curves: AR SFT and MARS by training steps, from two bases and at two rates, and by the size of the model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from marsbench.findings.between_lines import emits, emits_more, more_accurate
from marsbench.findings.cells import BENCHMARKS, latest_stages
from marsbench.findings.in_words import machines, plus_minus
from marsbench.findings.seeds import BySeed
from marsbench.line import Line, TrainedStage
from marsbench.rendering.claims_in_words import counted, numbers_of
from marsbench.rendering.figures import Seeds, drawn_alike, error_bars, line_on, look, save
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.lines import AR_SFT, mars, mars_name, short
from marsbench.studies.study import Study

CURVES: dict[str, tuple[str, ...]] = {  # words -> the endings of its stages, by steps
    "shipped base, gentle rate": ("", "_2x_data", "_4x_data", "_8x_data"),
    "shipped base, ten times the rate": ("_hard_sft", "_hard_4x_data"),
    "base without conversations, gentle rate": ("_of_text_base", "_of_text_base_4x_data"),
    "base without conversations, ten times the rate": ("_of_text_base_hard", "_of_text_base_hard_4x_data"),
}
SIZES = "short bases, gentle rate"
SCALES_OWN = next(iter(CURVES))  # the recipe of the tables
_POINTS = {**CURVES, SIZES: ("_of_small_base", "_of_medium_base", "_of_large_base")}
_OF = dict(zip(CURVES, ("longest", "fast", "text_base", "both"), strict=True))  # what slots call their last points
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
    return [way for way in _WAYS if way != mars_name("mars", 4, _SUREST) or curve.startswith("shipped")]


def _lines() -> Iterator[Line]:
    yield from (Line(name, name, name, "ar", optional=True) for name in ("base", "text_base"))
    lines = AR_SFT, mars("mars", 4), *[mars("mars", 4, tau) for tau in (_SUREST, *_THRESHOLDS)]
    for words, endings in _POINTS.items():
        for ending in endings:
            yield from (line.of_another_stage(ending, words) for line in lines if line.name in _ways(words))


PLAN = TablePlan(
    "curves", "More training and other sizes", tuple(_lines()), questions=QUESTIONS, own="Curves", seeds=(6, 7, 8)
)


def _moves(seeds: Seeds, first: str, second: str) -> list[Estimate]:
    """The difference of AR SFT, and of MARS at one token, between two points of a curve, if measured."""
    claims = [more_accurate(PLAN, way + second, way + first) for way in (_AR, _ONE)]
    return [finding.estimate for claim in claims if (finding := claim.over(seeds)).estimate is not None]


def settled(seeds: Seeds, curve: str) -> str:
    """The steps after which accuracy at one token no longer changes significantly, for AR SFT and for MARS."""
    steps = _places(seeds, curve)
    known = [ending for ending in steps if len(_moves(seeds, ending, ending)) == len((_AR, _ONE))]
    if len(known) < 2:
        return "not measured"
    for place, ending in enumerate(known[:-1]):
        moves = [move for later in known[place + 1 :] for move in _moves(seeds, ending, later)]
        if all(move.interval.low <= 0 <= move.interval.high for move in moves):
            return f"{steps[ending]:,}"
    return f"more than {steps[known[-2]]:,}"


def _places(seeds: Seeds, curve: str) -> dict[str, int]:
    """Ending -> steps (for sizes: parameters), for the trained points of a curve; the first seed has all of them."""
    trained, stages = latest_stages(seeds[0]), {ending: TrainedStage.of(f"mars{ending}") for ending in _POINTS[curve]}
    points = {ending: trained[stage] for ending, stage in stages.items() if stage in trained}
    return {ending: row.parameters if curve == SIZES else row.steps for ending, row in points.items()}


def _slots(rows: Sequence[Row], scale: str, by_seed: BySeed) -> dict[str, str]:
    seeds = [*by_seed.values()]
    shown, said = {name: _FIGURES[name] for name in _drawn(seeds)}, numbers(seeds)
    return {
        **said,
        "outcomes": _outcomes(seeds, said),
        "figures": paragraphs(*[f"![Curves: {name}](figures/{PLAN.key}_{name}.png)" for name in shown]),
        "captions": " ".join(f"{caption}." for caption in shown.values()),
        "machines": machines([row for of_seed in seeds for row in of_seed]),
        "points": _table(seeds),
        "missing": _missing(seeds),
    }


def _outcomes(seeds: Seeds, said: Mapping[str, str]) -> str:
    """For each curve, at its last point: what AR SFT adds to its base, MARS to AR SFT; and the steps by the rule."""
    heads = "AR SFT minus its base", "MARS at one token minus AR SFT", "MARS at tau = .95 minus AR SFT"
    lines = [
        [curve, *[said[f"{of}_{slot}"] for slot in ("ar", "one", "level", "count")], settled(seeds, curve)]
        for curve, of in _OF.items()
        if _places(seeds, curve)
    ]
    return table(["last point of", *heads, "seeds", "steps by the rule"], lines)


def numbers(seeds: Seeds) -> dict[str, str]:
    """By slot of a layout: what more steps and a higher rate change, and what MARS costs at the last points."""
    places = {of: _places(seeds, curve) for curve, of in _OF.items()}
    ends = {of: [CURVES[curve][0], *places[of]][-1] for curve, of in _OF.items()}
    bases = {of: "text_base" if "without" in curve else "base" for curve, of in _OF.items()}
    steps, of_fast = places["longest"], places["fast"]
    first, last = [*steps, ""][0], ends["longest"]
    alike = [(each, own) for each in of_fast for own in steps if of_fast[each] == steps[own]]  # with as many steps
    fast, own = [("", ""), *alike][-1]
    pairs = {"size": (f"{_AR}_of_large_base", f"{_AR}_of_medium_base")}
    for slot, way in {"ar": _AR, "one": _ONE, "level": _PAPERS}.items():
        pairs |= {f"more_{slot}": (way + last, way + first), f"rate_{slot}": (way + fast, way + own)}
        pairs |= {f"{of}_{slot}": (way + end, bases[of] if way == _AR else _AR + end) for of, end in ends.items()}
    claims = [more_accurate(PLAN, *pair, name=slot) for slot, pair in pairs.items()]
    claims += [emits(PLAN, _PAPERS + end, Bound(), name=f"{of}_tokens") for of, end in ends.items()]
    claims.append(emits_more(PLAN, _PAPERS + fast, _PAPERS + own, name="rate_tokens"))
    # A point that is not there stands for the first one: a line is not compared with itself.
    known = [claim for claim in claims if len({*claim.lines}) == len(claim.lines)]
    findings = {claim.name: claim.over(seeds if claim in known else ()) for claim in claims}
    asked = {of: counted(findings[f"{of}_level"]).partition("; ") for of in ends}
    trained, at = dict(chain(*[of.items() for of in places.values()])), {"first": first, "rate": own, **ends}
    return {
        **numbers_of(findings.values()),
        **{f"{slot}_steps": f"{trained[end]:,}" if end in trained else "" for slot, end in at.items()},
        **{f"{of}_asked": questions for of, (questions, _, _) in asked.items()},
        **{f"{of}_seeds": said for of, (_, _, said) in asked.items()},
        **{f"{of}_count": f"{findings[f'{of}_level'].seeds}" for of in ends},
        "longest_times": f"{steps[last] // steps[first]}" if last else "",
        "steps_by_rule": settled(seeds, SCALES_OWN),
    }


def _points(seeds: Seeds, curve: str) -> dict[str, dict[int, tuple[Estimate, Estimate]]]:
    """Line without its ending -> steps or parameters -> tokens per forward pass and accuracy in %, if measured."""
    places, names = _places(seeds, curve).items(), list(BENCHMARKS)
    return {way: {x: at for ending, x in places if (at := line_on(seeds, PLAN, way + ending, names))} for way in _WAYS}


def _table(seeds: Seeds) -> str:
    lines = []
    for curve in _POINTS:
        points = _points(seeds, curve)
        for place in _places(seeds, curve).values():
            shown = []
            for way in _WAYS:
                speed, accuracy = points[way].get(place, (None, None))
                said = plus_minus(accuracy, 1) if accuracy else ""
                shown.append(said + (f"; {speed.value:.2f}" if speed and way in _SEVERAL else ""))
            lines.append([f"{curve}, {place:,} {'parameters' if curve == SIZES else 'steps'}", *shown])
    return table(["", *_WAYS.values()], lines)


def _missing(seeds: Seeds) -> str:
    least = {curve: min(len(_points(seeds, curve)[way]) for way in _ways(curve)) for curve in _POINTS}
    left = [curve for curve, count in least.items() if count < len(_POINTS[curve])]
    return f" **In part:** some points are not measured of: {'; '.join(left)}." if left else ""


_FIGURES = {
    "steps": "Accuracy (above) and tokens per forward pass (below) by training steps",
    "sizes": "The same by the number of parameters",
}


def _drawn(seeds: Seeds) -> dict[str, list[str]]:
    known = [curve for curve in _POINTS if _places(seeds, curve)]
    curves = {name: [curve for curve in known if (curve == SIZES) == (name == "sizes")] for name in _FIGURES}
    return {name: some for name, some in curves.items() if some}


def _figure(seeds: Seeds, curves: Sequence[str], path_stem: Path) -> list[Path]:
    with drawn_alike(max(5.0, 2.6 * len(curves)), 5.4) as figure:
        grid = figure.subplots(2, len(curves), squeeze=False, sharey="row", sharex="col")
        for (above, below), curve in zip(grid.T, curves, strict=True):
            for place, (way, points) in enumerate(_points(seeds, curve).items()):
                for axes, part in ((above, 1), (below, 0)):
                    values = [at[part] for at in points.values()] if part or way in _SEVERAL else []
                    axes.errorbar(
                        [*points][: len(values)], [value.value for value in values], label=_WAYS[way],
                        yerr=error_bars(values), linewidth=1.0, markersize=4.5, elinewidth=0.8, **look(place + 1),
                    )  # fmt: skip
                    axes.grid(color="0.9", linewidth=0.6)
                    axes.spines[["top", "right"]].set_visible(False)
            marks = [*_places(seeds, curve).values()]
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
    asks="would more training, another base or size change the tables?",
    order=3,
    on="regime",
    plan=PLAN,
    trained_before=True,
    slots=_slots,
    figures=lambda seeds, folder: [
        path
        for name, curves in _drawn(seeds).items()
        for path in _figure(seeds, curves, folder / f"figures/{PLAN.key}_{name}")
    ],
)
