"""Serving: does lowering tau under load buy throughput, as the paper's abstract says, and what does it cost?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

from marsbench.findings.claims import TIMES, Claim, Measured
from marsbench.findings.in_words import bracketed
from marsbench.findings.seeds import BySeed
from marsbench.rendering.claims import answers
from marsbench.rendering.figures import COLOURS, MARKERS, drawn_alike, error_bars, new_figure, save
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.page import laid_out
from marsbench.rendering.sections import command, facts_section
from marsbench.rows.kinds import Row, ServingRow
from marsbench.running.plans import TrainedStage
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.serving import findings
from marsbench.studies.serving.findings import Cells, accuracy, goodput, over_repeats, tokens_per_second, typical
from marsbench.studies.serving.policies import (
    AR,
    AT_ONCE,
    EXACT,
    FAST,
    FEW,
    FIRST_TOKEN,
    FIXED,
    HIGH,
    LOSSLESS,
    LOSSY,
    LOWEST,
    PER_TOKEN,
    POLICIES,
    Policy,
)
from marsbench.studies.study import Study, measured_by, ours

GOODPUT, STEP = "figures/serving_goodput", "figures/serving_step"
UNDER_LOAD = (
    "The paper's abstract ends with a claim that it does not measure: under high request load a server can raise its "
    "throughput on the fly by lowering tau."
)
COST = "cost of a forward, in forwards of `ar`"
HOW_LOADS_ARE_READ = (
    "Times in ms at the 50th, 90th and 99th percentile, each the mean over laps; *tau* is the mean over answers of the "
    "lowest they were decoded with, 1 where they are those of `ar`; *lag* is by how much the load generator was late "
    "at the 99th percentile."
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> Iterable[str]:
    if not Cells.of(rows):
        return [f"# Serving at scale {scale}: nothing measured yet"]
    return laid_out(__name__, _slots)(rows, scale, seeds)


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells = Cells.of(rows)
    laps = [row for some in cells.values() for row in some]
    loads, full, last = cells.loads, cells.full, laps[-1]
    shown = [load for place, load in enumerate(loads) if place in (0, len(loads) // 2, len(loads) - 1)]
    found = [claim for claim in CLAIMS if claim.over(seeds.values()).estimate is not None]
    same, asked = cells.same_answers(LOSSLESS)
    few, carried, steps, lost = _few(cells), _carried(cells), _steps(cells), findings.lost(laps)
    unanswered = f"Of {sum(row.requests for row in laps):,} requests, {lost:,} were not answered." if lost else ""
    return {
        "asks": "does lowering tau buy throughput under load?" if full else "what do its users get?",
        "in_part": "" if loads else "**In part.** Not measured yet: requests that come by themselves, load by load.",
        "answers": "\n".join(filter(None, [answers(found, seeds), _right(cells)])),
        "few": few,
        "asked": f"{asked:,}" if few else "",
        "same": f"{same:,}" if few else "",
        "carried": carried,
        "in_flight": f"{full:g}" if carried else "",
        "figure": f"![Good answers per second by load]({GOODPUT}.png)" if loads else "",
        "by_load": paragraphs("## Load by load", HOW_LOADS_ARE_READ, _by_load(cells, shown)) if loads else "",
        "under_load": UNDER_LOAD if full else "",
        "tokens": str(last.max_new_tokens),
        "rows": str(last.rows),
        "load_of_one": f"{full or max(FEW):g}",
        "least": f"{min(row.took for row in laps):.1f}",
        "most": f"{max(row.took for row in laps):.1f}",
        "repeats": str(max(map(len, cells.values()))),
        "unanswered": unanswered,
        "verdict": _verdict(cells),
        "lowest": f"{LOWEST:g}",
        "target_first": f"{1000 * last.target_first_token:.0f}",
        "target_each": f"{1000 * last.target_per_token:.2f}",
        "times_first": f"{FIRST_TOKEN:.0f}",
        "times_each": f"{PER_TOKEN:.0f}",
        "other_loads": _by_load(cells, [load for load in loads if load not in shown]),
        "at_once": str(AT_ONCE),
        "http": _http(cells),
        "steps": steps,
        "step_figure": f"![Requests, tau and window over time]({STEP}.png)" if steps else "",
        "facts": facts_section(rows, command("serving-load", scale)),
    }


def _right(cells: Cells) -> str:
    fast, ar = (accuracy(cells.laps(policy, "together", cells.full)) for policy in (FAST, AR))
    if fast is None or ar is None:
        return ""
    return (
        f"- On a full server, {100 * fast:.0f} % of the answers at tau = {LOWEST:g} are right, of those by `ar` "
        f"{100 * ar:.0f} %."
    )


def tally(seeds: BySeed) -> str:
    """What a full server gains by a lower tau, or else what a user alone gains; of the first seed."""
    cells = Cells.of(next(iter(seeds.values())))
    found, alone = cells.ratio(FAST, EXACT, cells.full), cells.ratio(LOSSLESS, AR, 1.0)
    if found is not None:
        return f"{FAST.name} over {EXACT.name}, full server: {_said(found)} times the tokens/s"
    return "measured" if alone is None else f"{LOSSLESS.name} over ar, one request: {_said(alone)} times the tokens/s"


def _said(found: Estimate | None) -> str:
    if found is None:
        return "n/a"
    return f"{found.value:,.2f}" + (f" {bracketed(found.interval, 2)}" if found.n > 1 else "")


def _verdict(cells: Cells) -> str:
    found, words = [], "at least as good as every fixed policy at every load, within the interval of its laps"
    for policy in (LOSSLESS, LOSSY):
        compared = {
            f"{other.name} at load {load:g} ({_said(each)})": each.interval.high < 1
            for load, other in product(cells.loads, FIXED)
            if (each := cells.ratio(policy, other, load, "steady")) is not None
        }
        worse = "; ".join(name for name, is_behind in compared.items() if is_behind)
        if compared:
            found.append(f"Goodput of `{policy.name}` is {f'not {words}; behind {worse}' if worse else words}.")
    return paragraphs(*found)


# ---- claims ----


def _ratio(one: Policy, other: Policy, count: int, rows: Sequence[Row]) -> Measured:
    """With so many requests in flight; 0 is a full server."""
    cells = Cells.of(rows)
    return Measured(cells.ratio(one, other, count or cells.full))


_more = partial(Claim, bound=Bound(low=1.0), unit=TIMES, counts="repeats")
CLAIMS = (
    _more(
        measure=partial(_ratio, LOSSLESS, AR, 1),
        name="one-at-a-time",
        text="A user alone gets more tokens per second from a server that drafts and checks than by AR decoding",
        compared="tokens/s of a request alone, `adaptive, lossless` over `ar`",
    ),
    _more(
        measure=partial(_ratio, LOSSLESS, AR, 4),
        name="four-at-a-time",
        text="Each of four users gets more tokens per second from a server that drafts and checks than by AR decoding",
        compared="tokens/s of each of four requests, `adaptive, lossless` over `ar`",
    ),
    _more(
        measure=partial(_ratio, FAST, EXACT, 0),
        name="lower-tau",
        text="A full server carries more tokens per second at a lower tau",
        compared=f"tokens/s, tau = {FAST.asks['threshold']:g} over tau = {EXACT.asks['threshold']:g}",
    ),
    _more(
        measure=partial(_ratio, FAST, AR, 0),
        name="over-ar",
        text="A full server carries more tokens per second at a low tau than by AR decoding",
        compared=f"tokens/s, tau = {FAST.asks['threshold']:g} over `ar`",
    ),
)


# ---- tables ----


def _few(cells: Cells) -> str:
    lines = []
    for count, policy in product(FEW, (AR, LOSSLESS)):
        if rows := cells.laps(policy, "together", count):
            over = cells.ratio(policy, AR, count)
            beside = ["", ""] if policy == AR else [_said(over), _cost(rows, over)]
            lines.append([
                f"{count}", policy.name, _ms(rows, "first_token", 1, 2), _ms(rows, "per_token", 2, 2),
                _ms(rows, "whole", 0, 2), _rate(rows, findings.of_a_request), beside[0], _rate(rows),
                f"{findings.per_forward(rows):.2f}", beside[1],
            ])  # fmt: skip
    head = ["at a time", "", "first token", "per token", "whole answer", "a user's tokens/s", "over `ar`",
            "all users' tokens/s", "tokens/forward", COST]  # fmt: skip
    return table(head, lines, text=(1,)) if any(line[1] == LOSSLESS.name for line in lines) else ""


def _carried(cells: Cells) -> str:
    lines = []
    for policy, rows in cells.by_policy("together", cells.full):
        over = cells.ratio(policy, AR, cells.full)
        tokens = f"{findings.per_forward(rows):.2f}"
        lines.append([policy.name, _rate(rows), _said(over), tokens, _cost(rows, over), _share(rows)])
    return table(["a full server", "tokens/s", "over `ar`", "tokens/forward", COST, "right, %"], lines)


def _rate(rows: Sequence[ServingRow], measure: Callable[[ServingRow], float] = tokens_per_second) -> str:
    return f"{over_repeats(rows, measure).value:,.0f}"


def _cost(rows: Sequence[ServingRow], over: Estimate | None) -> str:
    """What a policy's forward costs in forwards of `ar`, by its tokens per forward and its speed over `ar`'s."""
    return f"{findings.per_forward(rows) / over.value:.2f}" if over is not None and over.value else "n/a"


def _share(rows: Sequence[ServingRow]) -> str:
    found = accuracy(rows)
    return "n/a" if found is None else f"{100 * found:.1f}"


def _http(cells: Cells) -> str:
    bare, served = (cells.laps(AR, shape, AT_ONCE) for shape in ("engine", "together"))
    if not (bare and served):
        return ""
    pairs = zip(bare, served, strict=False)
    part = typical([tokens_per_second(its) / tokens_per_second(alone) for alone, its in pairs])
    head = ["", "engine alone, tokens/s", "over HTTP, tokens/s", "of the engine's"]
    return table(head, [[AR.name, _rate(bare), _rate(served), _said(part)]])


def _by_load(cells: Cells, loads: Sequence[float]) -> str:
    head = ["", "first token", "per token", "whole answer", "good/s", "tokens/s", "tau", "right, %", "lag"]
    parts = []
    for load in loads:
        lines = [
            [
                policy.name, _ms(rows, "first_token"), _ms(rows, "per_token", 1), _ms(rows, "whole"),
                _said(over_repeats(rows, goodput)), _rate(rows), f"{findings.lowest_tau(rows):.2f}", _share(rows),
                _ms(rows, "lag", 1).split(" ")[-1],
            ]
            for policy, rows in cells.by_policy("steady", load)
        ]  # fmt: skip
        parts.append(f"### Load {load:g}\n\n{table(head, lines)}")
    return paragraphs(*parts)


def _ms(rows: Sequence[ServingRow], name: str, digits: int = 0, count: int = 3) -> str:
    """So many percentiles of some time, each the mean over laps; "n/a" where nobody was answered."""
    found = zip(*[values for row in rows if (values := getattr(row, name))], strict=True)
    return " / ".join(f"{1000 * fmean(each):.{digits}f}" for each in list(found)[:count]) or "n/a"


def _steps(cells: Cells) -> str:
    lines = [
        [
            policy.name, f"{goodput(row):.1f}", _ms([row], "whole"), f"{max(row.timeline['waiting']):g}",
            f"{findings.switches(row, 'relief')}", f"{min(row.timeline['tau']):.2f}",
        ]
        for policy, (row,) in cells.by_policy("step", HIGH)
    ]  # fmt: skip
    return table(["", "good/s", "whole answer, ms", "most waiting", "turns of tau", "lowest mean tau"], lines)


# ---- figures ----


def draw(rows: Sequence[Row], reports: Path) -> list[Path]:
    """Goodput by load, and a step in load over time."""
    cells = Cells.of(rows)
    with drawn_alike():
        by_load = _draw_loads(cells, reports / GOODPUT) if cells.loads else []
        return by_load + (_draw_steps(cells, reports / STEP) if cells.by_policy("step", HIGH) else [])


def _draw_loads(cells: Cells, stem: Path) -> list[Path]:
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for place, policy in enumerate(POLICIES):
        laps = {load: cells.laps(policy, "steady", load) for load in cells.loads}
        if found := {load: over_repeats(rows, goodput) for load, rows in laps.items() if rows}:
            axes.errorbar(
                list(found), [each.value for each in found.values()], yerr=error_bars([*found.values()], 1.0),
                capsize=2, label=policy.name, color=COLOURS[place], marker=MARKERS[place],
                linestyle="-" if policy.adapts else "--",
            )  # fmt: skip
    axes.set(xlabel="load, in what ar carries", ylabel="good answers per second", yscale="log")
    figure.legend(loc="outside right upper", frameon=False)
    return save(figure, stem)


def _draw_steps(cells: Cells, stem: Path) -> list[Path]:
    figure = new_figure(9.5, 7.0)
    grid = figure.subplots(4, 1, sharex=True)
    for axes, name in zip(grid, ("running", "waiting", "tau", "window"), strict=True):
        for policy, (row,) in cells.by_policy("step", HIGH):
            line = row.timeline
            axes.plot(line["at"], line[name], label=policy.name, color=COLOURS[POLICIES.index(policy)])
            for third in (1, 2):
                axes.axvline(row.seconds * third / 3, color="#bbbbbb", linewidth=0.8)
        axes.set_ylabel(name)
    grid[-1].set_xlabel("seconds")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return save(figure, stem)


STUDY = Study(
    key="serving",
    name="Serving under load",
    asks="what do users of a server get, and can it raise its throughput on the fly by lowering tau?",
    place=6,
    in_paper=False,
    timed=True,
    measure=measured_by("marsbench.studies.serving.measuring", "serving_rows"),
    stages=(TrainedStage("mars", 4),),
    sections=sections,
    figures=draw,
    tally=tally,
    claims=ours("serving", CLAIMS),
)
