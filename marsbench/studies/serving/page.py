"""The page of serving: what every policy carries, what users wait for, and the verdict on the abstract's claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from marsbench.findings.claims import TIMES, Claim, Measured
from marsbench.findings.company import company_remark
from marsbench.findings.seeds import BySeed
from marsbench.rendering.claims import answers
from marsbench.rendering.markdown import folded, paragraphs, table
from marsbench.rendering.sections import command, facts_section, seeds_in_words
from marsbench.rows.kinds import Row, ServingRow
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.serving.figures import GOODPUT, STEP, draw_all
from marsbench.studies.serving.findings import (
    Cells,
    Measure,
    accuracy,
    answered,
    cells_of,
    end_to_end,
    first_token,
    goodput,
    lag,
    lowest_tau,
    makespan,
    over_repeats,
    per_forward,
    per_token,
    quantiles,
    ratio,
    rejected,
    switches,
    tokens_per_second,
)
from marsbench.studies.serving.policies import (
    AR,
    AT_ONCE,
    BARE,
    EXACT,
    FAST,
    FIRST_TOKEN,
    FIXED,
    LOSSLESS,
    LOSSY,
    LOWEST,
    PER_TOKEN,
    POLICIES,
)

WHAT_IT_IS = (
    "The paper's abstract ends with a claim that it does not measure: under high request load a server can raise its "
    "throughput on the fly by lowering tau. Here `marsbench serve` answers the test questions over HTTP, in one batch "
    "of at most {rows} requests with {queue} more in a queue; all policies ask one server, save those that adapt, "
    "which ask one that adapts. Requests come at the times of a Poisson process, the same times and questions for "
    "every policy, whatever became of earlier ones; every time counts from when a request was due. A load of 1 is what "
    "`ar` carries when it never runs dry."
)
TARGETS = (
    "An answer is good if its first token comes within {first:.0f} ms and the others within {each:.2f} ms each: "
    f"{FIRST_TOKEN:.0f} and {PER_TOKEN:.0f} times what a token of `ar` takes when nobody else is there. Goodput is "
    "good answers per second of arrivals."
)
THE_KNEE = (
    "All of {burst} requests come at once, so the batch is full and nobody waits for arrivals: what is measured is "
    "what a policy carries. A forward over more positions costs more, so beyond saturation a policy buys tokens per "
    "forward over what its forward costs in forwards of `ar`, and no more; *cost of a forward* is what follows from "
    "the two columns before it. Latency at low load is another matter: there a forward's positions cost little."
)
HOW_POLICIES_DIFFER = (
    "`adaptive, lossless` asks for `mars-verified`: windows and pruning follow the load, its answers are those of "
    "`ar`. `adaptive, tau may fall` asks for the same and allows the controller to leave checking out while a target "
    f"is missed: to accept what passes tau, which it lowers notch by notch, down to {LOWEST:g}."
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    cells = cells_of(rows)
    some = next((one for one in reversed(list(cells.values()))), [])
    if not some:
        return [f"# Serving at scale {scale}: nothing measured yet"]
    row = some[0]
    return [
        f"# Serving at scale {scale}: does lowering tau buy throughput under load?",
        paragraphs("\n".join(_answers(cells)), answers(CLAIMS, seeds)),
        f"![Good answers per second by load]({GOODPUT}.png)" if _loads(cells) else "",
        _carried(cells),
        f"{WHAT_IT_IS.format(rows=row.rows, queue=row.queue)} {seeds_in_words(seeds)}",
        company_remark(row for some in cells.values() for row in some),
        folded(
            paragraphs(
                _verdict(cells),
                HOW_POLICIES_DIFFER,
                TARGETS.format(first=1000 * row.target_first_token, each=1000 * row.target_per_token),
            ),
            _by_load(cells),
            _http(cells),
            _steps(cells),
            facts_section(rows, command("serving-load", scale)),
        ),
    ]


def _answers(cells: Cells) -> Iterator[str]:
    known = {name: rows for (name, shape, _), rows in cells.items() if shape == "burst"}
    if {FAST.name, AR.name} <= known.keys():
        yield (
            f"- On a full server, {100 * accuracy(known[FAST.name]):.0f} % of the answers at tau = "
            f"{FAST.asks['threshold']:g} are right, of those by `ar` {100 * accuracy(known[AR.name]):.0f} %."
        )
    laps = [row for rows in known.values() for row in rows]
    if laps:
        counts, seconds = [len(answered(row)) for row in laps], [makespan(row) for row in laps]
        yield (
            f"- Of {len(laps[0].questions)} requests that come at once, {min(counts)} to {max(counts)} are answered "
            f"and the others turned away, not the same ones by every policy; a lap takes {min(seconds):.2f} to "
            f"{max(seconds):.2f} s."
        )
    lowest = min(_loads(cells), default=None)
    alike = [cells.get((policy.name, "steady", lowest or 0.0)) for policy in (LOSSY, LOSSLESS)]
    if all(alike):
        lossy, lossless = (100 * accuracy(rows or []) for rows in alike)
        good = [over_repeats(rows or [], goodput).value for rows in alike]
        yield (
            f"- At load {lowest:g}, letting tau fall gives {good[0]:.0f} good answers per second where checking gives "
            f"{good[1]:.0f}, and {lossy:.0f} % right where checking has {lossless:.0f} %."
        )


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    return draw_all(cells_of(rows), reports_dir)


def tally(seeds: BySeed) -> str:
    """What lowering tau buys where the server is full; of the first seed, which the page shows."""
    cells = cells_of(next(iter(seeds.values())))
    found = _ratio(cells, FAST.name, EXACT.name, "burst", 0.0, tokens_per_second)
    if found is None:
        return "measured"
    return f"{FAST.name} over {EXACT.name}, full server: {_said(found)} times the tokens/s"


# ---- the verdict


def _full_server(policy: str, rows: Sequence[Row]) -> Measured:
    return Measured(_ratio(cells_of(rows), FAST.name, policy, "burst", 0.0, tokens_per_second))


_carries = partial(Claim, bound=Bound(low=1.0), unit=TIMES, counts="repeats")
CLAIMS = (
    _carries(
        measure=partial(_full_server, EXACT.name),
        name="lower-tau",
        text="A full server carries more tokens per second at a lower tau",
        compared=f"tokens/s, tau = {FAST.asks['threshold']:g} over tau = {EXACT.asks['threshold']:g}",
    ),
    _carries(
        measure=partial(_full_server, AR.name),
        name="over-ar",
        text="A full server carries more tokens per second at a low tau than by AR decoding",
        compared=f"tokens/s, tau = {FAST.asks['threshold']:g} over `ar`",
    ),
)


def _ratio(
    cells: Cells, one: str, other: str, shape: str, load: float, measure: Callable[[ServingRow], float]
) -> Estimate | None:
    if (one, shape, load) not in cells or (other, shape, load) not in cells:
        return None
    return ratio(cells[one, shape, load], cells[other, shape, load], measure)


def _said(found: Estimate | None) -> str:
    if found is None:
        return "n/a"
    if found.n < 2:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} [{found.interval.low:.2f}, {found.interval.high:.2f}]"


def _loads(cells: Cells) -> list[float]:
    return sorted({load for _, shape, load in cells if shape == "steady"})


def _verdict(cells: Cells) -> str:
    return paragraphs("## The verdict", *_adaptive(cells))


def _adaptive(cells: Cells) -> list[str]:
    found = []
    for policy in (LOSSLESS, LOSSY):
        worse = []
        for load in _loads(cells):
            for other in FIXED:
                each = _ratio(cells, policy.name, other.name, "steady", load, goodput)
                if each is not None and each.interval.high < 1:
                    worse.append(f"{other.name} at load {load:g} ({_said(each)})")
        words = "at least as good as every fixed policy at every load, within the interval of its repeats"
        said = f"not {words}; behind {'; '.join(worse)}" if worse else words
        if _loads(cells):
            found.append(f"Goodput of `{policy.name}` is {said}.")
    return found


# ---- tables


def _carried(cells: Cells) -> str:
    lines = []
    burst = 0
    for policy in POLICIES:
        rows = cells.get((policy.name, "burst", 0.0))
        if not rows:
            continue
        burst = len(rows[0].questions)
        over = _ratio(cells, policy.name, AR.name, "burst", 0.0, tokens_per_second)
        tokens = per_forward(rows)
        cost = f"{tokens / over.value:.2f}" if over is not None and over.value else "n/a"
        carried = over_repeats(rows, tokens_per_second)
        lines.append([
            policy.name, f"{carried.value:,.0f}", _said(over), f"{tokens:.2f}", cost, f"{100 * accuracy(rows):.1f}",
        ])  # fmt: skip
    if not lines:
        return ""
    head = [
        "",
        "tokens/s, mean",
        "over `ar`, median of ratios",
        "tokens/forward",
        "cost of a forward, in forwards of `ar`",
    ]
    return paragraphs(table([*head, "right, %"], lines), THE_KNEE.format(burst=burst))


def _http(cells: Cells) -> str:
    lines = []
    for policy in BARE:
        served, bare = (cells.get((policy.name, shape, 0.0)) for shape in ("http", "engine"))
        if served and bare:
            speeds = [f"{over_repeats(rows, tokens_per_second).value:,.0f}" for rows in (bare, served)]
            lines.append([policy.name, *speeds, _said(ratio(served, bare, tokens_per_second))])
    if not lines:
        return ""
    text = (
        f"The same requests, {AT_ONCE} at a time, by the engine alone and over HTTP, streamed token by token, in turn. "
        "The smaller the model, the more of a step is HTTP's: a model of a million parameters is the worst case."
    )
    head = ["", "engine alone, tokens/s", "over HTTP, tokens/s", "of the engine's"]
    return "\n\n".join(["## What HTTP costs", text, table(head, lines)])


def _by_load(cells: Cells) -> str:
    parts = [f"### Load {load:g}\n\n{_table(cells, load)}" for load in _loads(cells)]
    if not parts:
        return ""
    text = (
        "Times in ms at the 50th, 90th and 99th percentile, over all repeats; *tau* is the mean over answers of the "
        "lowest they were decoded with, 1 where they are those of `ar`; *lag* is by how much the load generator was "
        "late at the 99th percentile."
    )
    return "\n\n".join(["## Load by load", text, *parts])


def _table(cells: Cells, load: float) -> str:
    head = [
        "",
        "first token",
        "per token",
        "end to end",
        "good/s",
        "turned away, %",
        "tokens/s",
        "tau",
        "right, %",
        "lag",
    ]
    lines = []
    for policy in POLICIES:
        rows = cells.get((policy.name, "steady", load))
        if not rows:
            continue
        good = over_repeats(rows, goodput)
        late = quantiles(rows, lag)
        lines.append([
            policy.name, _ms(rows, first_token), _ms(rows, per_token, 1), _ms(rows, end_to_end), _said(good),
            f"{100 * rejected(rows):.1f}", f"{over_repeats(rows, tokens_per_second).value:,.0f}",
            f"{lowest_tau(rows):.2f}", f"{100 * accuracy(rows):.1f}",
            "n/a" if late is None else f"{1000 * late[2]:.1f}",
        ])  # fmt: skip
    return table(head, lines)


def _ms(rows: Sequence[ServingRow], measure: Measure, digits: int = 0) -> str:
    found = quantiles(rows, measure)
    return "n/a" if found is None else " / ".join(f"{1000 * one:.{digits}f}" for one in found)


def _steps(cells: Cells) -> str:
    lines = []
    for policy in POLICIES:
        for (name, shape, _), rows in cells.items():
            if (name, shape) == (policy.name, "step"):
                row = rows[-1]
                lines.append([
                    policy.name, f"{goodput(row):.1f}", _ms(rows, end_to_end), _most(row, "waiting"),
                    f"{switches(row, 'relief')}", f"{min(row.timeline['tau'], default=1.0):.2f}",
                ])  # fmt: skip
    if not lines:
        return ""
    text = (
        "The load goes from 0.5 to 1.5 and back, a third of the time each, in one run. *Turns of tau* are those found "
        "by looking ten times a second: a controller lowers it by one notch at a time while a target is missed, and "
        "raises it, more slowly, when both are well met."
    )
    head = ["", "good/s", "end to end, ms", "most waiting", "turns of tau", "lowest mean tau"]
    image = f"![Requests, tau and window over time]({STEP}.png)"
    return "\n\n".join(["## A step in load", text, table(head, lines), image])


def _most(row: ServingRow, name: str) -> str:
    return f"{max(row.timeline[name], default=0):g}"
