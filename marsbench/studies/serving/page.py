"""The page of serving: what a few users at a time get, what every policy carries, and the abstract's claim."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from marsbench.findings.claims import TIMES, Claim, Measured
from marsbench.findings.company import company_remark
from marsbench.findings.in_words import bracketed
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
    cells_of,
    full,
    goodput,
    lost,
    lowest_tau,
    of_a_request,
    over_repeats,
    per_forward,
    ratio,
    same_answers,
    switches,
    times,
    tokens_per_second,
)
from marsbench.studies.serving.policies import (
    AR,
    AT_ONCE,
    EXACT,
    FAST,
    FEW,
    FIRST_TOKEN,
    FIXED,
    LOSSLESS,
    LOSSY,
    LOWEST,
    PER_TOKEN,
    POLICIES,
)

UNDER_LOAD = (
    "The paper's abstract ends with a claim that it does not measure: under high request load a server can raise its "
    "throughput on the fly by lowering tau."
)
WHAT_IT_IS = (
    "`marsbench serve` answers the test questions over HTTP, streamed, {tokens} tokens each at most, in one batch of "
    "at most {rows} requests; all others wait in a queue. All policies ask one server, save those that adapt, which "
    "ask one that adapts, and all of them ask the same questions in the same order. Either as many requests as are "
    "said are in flight at any time, or they come by themselves, at the times of a Poisson process, the same for every "
    "policy, whatever became of earlier ones; every time counts from when a request was due. A load of 1 is what `ar` "
    "carries with {carried} in flight. A lap takes {least:.1f} to {most:.1f} s, and there are {repeats} of each; "
    "numbers are geometric means over laps, with 95 % intervals by Student's t on logarithms. {unanswered}"
)
TARGETS = (
    "An answer is good if its first token comes within {first:.0f} ms and the others within {each:.2f} ms each: "
    f"{FIRST_TOKEN:.0f} and {PER_TOKEN:.0f} times what a token of `ar` takes when nobody else is there. Goodput is "
    "good answers per second of arrivals."
)
THE_KNEE = (
    "{count:g} requests are in flight at any time, so the batch is always full: what is measured is what a policy "
    "carries. A forward over more positions costs more, so beyond saturation a policy buys tokens per forward over "
    "what its forward costs in forwards of `ar`, and no more; *cost of a forward* is what follows from the two columns "
    "before it."
)
WHAT_A_USER_GETS = (
    "So many requests are in flight at any time, and the next follows when one is answered. Times are in ms at the "
    "50th and 90th percentile, each the mean over laps; *a user's tokens/s* are those of all answers over the time "
    "that their users waited. A position costs little while few are computed, so this is where drafts pay. Of "
    "{asked:,} times that `adaptive, lossless` and `ar` were asked the same question in the same lap, {same:,} have "
    "the same answer, character for character."
)
HOW_POLICIES_DIFFER = (
    "`adaptive, lossless` asks for `mars-verified`: windows and pruning follow the load, its answers are those of "
    "`ar`. `adaptive, tau may fall` asks for the same and allows the controller to leave checking out while a target "
    f"is missed: to accept what passes tau, which it lowers notch by notch, down to {LOWEST:g}."
)
HOW_LOADS_ARE_READ = (
    "Times in ms at the 50th, 90th and 99th percentile, each the mean over laps; *tau* is the mean over answers of the "
    "lowest they were decoded with, 1 where they are those of `ar`; *lag* is by how much the load generator was late "
    "at the 99th percentile."
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    cells = cells_of(rows)
    laps = [row for some in cells.values() for row in some]
    if not laps:
        return [f"# Serving at scale {scale}: nothing measured yet"]
    asks = "does lowering tau buy throughput under load?" if full(cells) else "what do its users get?"
    loads = _loads(cells)
    shown = [load for place, load in enumerate(loads) if place in (0, len(loads) // 2, len(loads) - 1)]
    found = [claim for claim in CLAIMS if claim.over(seeds.values()).estimate is not None]
    return [
        f"# Serving at scale {scale}: {asks}",
        "" if loads else "**In part.** Not measured yet: requests that come by themselves, load by load.",
        paragraphs("\n".join(filter(None, [answers(found, seeds), _right(cells)]))),
        _few(cells),
        _carried(cells),
        f"![Good answers per second by load]({GOODPUT}.png)" if loads else "",
        _by_load(cells, shown),
        f"{UNDER_LOAD if full(cells) else ''} {_what_it_is(cells, laps)} {seeds_in_words(seeds)}".strip(),
        company_remark(laps),
        folded(
            paragraphs(
                _verdict(cells),
                HOW_POLICIES_DIFFER,
                TARGETS.format(first=1000 * laps[-1].target_first_token, each=1000 * laps[-1].target_per_token),
            ),
            _other_loads(cells, [load for load in loads if load not in shown]),
            _http(cells),
            _steps(cells),
            facts_section(rows, command("serving-load", scale)),
        ),
    ]


def _what_it_is(cells: Cells, laps: Sequence[ServingRow]) -> str:
    row, seconds = laps[0], [lap.took for lap in laps]
    carried = full(cells) or max(FEW)
    missed = lost(laps)
    unanswered = f"Of {sum(lap.requests for lap in laps):,} requests, {missed:,} were not answered." if missed else ""
    return WHAT_IT_IS.format(
        tokens=row.max_new_tokens, rows=row.rows, carried=f"{carried:g}", least=min(seconds), most=max(seconds),
        repeats=max(map(len, cells.values())), unanswered=unanswered,
    )  # fmt: skip


def _right(cells: Cells) -> str:
    known = [cells.get((policy.name, "together", full(cells))) for policy in (FAST, AR)]
    fast, ar = (accuracy(rows or []) for rows in known)
    if fast is None or ar is None:
        return ""
    return (
        f"- On a full server, {100 * fast:.0f} % of the answers at tau = {FAST.asks['threshold']:g} are right, of "
        f"those by `ar` {100 * ar:.0f} %."
    )


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    return draw_all(cells_of(rows), reports_dir)


def tally(seeds: BySeed) -> str:
    """What a full server gains by a lower tau, or else what a user alone gains; of the first seed."""
    cells = cells_of(next(iter(seeds.values())))
    found = _ratio(cells, FAST.name, EXACT.name, "together", full(cells), tokens_per_second)
    if found is not None:
        return f"{FAST.name} over {EXACT.name}, full server: {_said(found)} times the tokens/s"
    alone = _ratio(cells, LOSSLESS.name, AR.name, "together", 1.0, of_a_request)
    return "measured" if alone is None else f"{LOSSLESS.name} over ar, one request: {_said(alone)} times the tokens/s"


# ---- claims ----


def _full_server(policy: str, rows: Sequence[Row]) -> Measured:
    cells = cells_of(rows)
    return Measured(_ratio(cells, FAST.name, policy, "together", full(cells), tokens_per_second))


def _of_a_user(count: int, rows: Sequence[Row]) -> Measured:
    return Measured(_ratio(cells_of(rows), LOSSLESS.name, AR.name, "together", float(count), of_a_request))


_more = partial(Claim, bound=Bound(low=1.0), unit=TIMES, counts="repeats")
CLAIMS = (
    _more(
        measure=partial(_of_a_user, 1),
        name="one-at-a-time",
        text="A user alone gets more tokens per second from a server that drafts and checks than by AR decoding",
        compared="tokens/s of a request alone, `adaptive, lossless` over `ar`",
    ),
    _more(
        measure=partial(_of_a_user, 4),
        name="four-at-a-time",
        text="Each of four users gets more tokens per second from a server that drafts and checks than by AR decoding",
        compared="tokens/s of each of four requests, `adaptive, lossless` over `ar`",
    ),
    _more(
        measure=partial(_full_server, EXACT.name),
        name="lower-tau",
        text="A full server carries more tokens per second at a lower tau",
        compared=f"tokens/s, tau = {FAST.asks['threshold']:g} over tau = {EXACT.asks['threshold']:g}",
    ),
    _more(
        measure=partial(_full_server, AR.name),
        name="over-ar",
        text="A full server carries more tokens per second at a low tau than by AR decoding",
        compared=f"tokens/s, tau = {FAST.asks['threshold']:g} over `ar`",
    ),
)


def _ratio(cells: Cells, one: str, other: str, shape: str, load: float, measure: Measure) -> Estimate | None:
    if (one, shape, load) not in cells or (other, shape, load) not in cells:
        return None
    return ratio(cells[one, shape, load], cells[other, shape, load], measure)


def _said(found: Estimate | None, digits: int = 2) -> str:
    if found is None:
        return "n/a"
    return f"{found.value:,.{digits}f}" + (f" {bracketed(found.interval, digits)}" if found.n > 1 else "")


def _loads(cells: Cells) -> list[float]:
    return sorted({load for _, shape, load in cells if shape == "steady"})


def _verdict(cells: Cells) -> str:
    found = []
    for policy in (LOSSLESS, LOSSY):
        compared = [
            (other, load, each)
            for load in _loads(cells)
            for other in FIXED
            if (each := _ratio(cells, policy.name, other.name, "steady", load, goodput)) is not None
        ]
        worse = [f"{other.name} at load {load:g} ({_said(each)})" for other, load, each in compared
                 if each.interval.high < 1]  # fmt: skip
        words = "at least as good as every fixed policy at every load, within the interval of its laps"
        if compared:
            said = f"not {words}; behind {'; '.join(worse)}" if worse else words
            found.append(f"Goodput of `{policy.name}` is {said}.")
    return paragraphs("## The verdict", *found)


# ---- tables ----


def _few(cells: Cells) -> str:
    lines = []
    for count in map(float, FEW):
        for policy in (AR, LOSSLESS):
            if rows := cells.get((policy.name, "together", count)):
                over = _ratio(cells, policy.name, AR.name, "together", count, of_a_request)
                lines.append([
                    f"{count:g}", policy.name, _ms(rows, "first_token", 1, 2), _ms(rows, "per_token", 2, 2),
                    _ms(rows, "whole", 0, 2), f"{over_repeats(rows, of_a_request).value:,.0f}",
                    _said(over) if policy != AR else "", f"{over_repeats(rows, tokens_per_second).value:,.0f}",
                    f"{per_forward(rows):.2f}",
                ])  # fmt: skip
    if not any(line[1] == LOSSLESS.name for line in lines):
        return ""
    head = ["at a time", "", "first token", "per token", "whole answer", "a user's tokens/s", "over `ar`",
            "all users' tokens/s", "tokens/forward"]  # fmt: skip
    same, asked = same_answers(cells, LOSSLESS.name)
    return paragraphs(table(head, lines, text=(1,)), WHAT_A_USER_GETS.format(asked=asked, same=same))


def _carried(cells: Cells) -> str:
    count, lines = full(cells), []
    for policy in POLICIES:
        if rows := cells.get((policy.name, "together", count)):
            over = _ratio(cells, policy.name, AR.name, "together", count, tokens_per_second)
            tokens = per_forward(rows)
            cost = f"{tokens / over.value:.2f}" if over is not None and over.value else "n/a"
            carried = over_repeats(rows, tokens_per_second).value
            lines.append([policy.name, f"{carried:,.0f}", _said(over), f"{tokens:.2f}", cost, _share(rows)])
    if not count or not lines:
        return ""
    head = ["a full server", "tokens/s", "over `ar`", "tokens/forward", "cost of a forward, in forwards of `ar`"]
    return paragraphs(table([*head, "right, %"], lines), THE_KNEE.format(count=count))


def _share(rows: Sequence[ServingRow]) -> str:
    found = accuracy(rows)
    return "n/a" if found is None else f"{100 * found:.1f}"


def _http(cells: Cells) -> str:
    served, bare = (cells.get((AR.name, shape, float(AT_ONCE))) for shape in ("together", "engine"))
    if not served or not bare:
        return ""
    text = (
        f"The same requests, {AT_ONCE} at a time, by the engine alone and over HTTP, streamed token by token, in turn. "
        "The smaller the model, the more of a step is HTTP's: a model of a million parameters is the worst case."
    )
    speeds = [f"{over_repeats(rows, tokens_per_second).value:,.0f}" for rows in (bare, served)]
    head = ["", "engine alone, tokens/s", "over HTTP, tokens/s", "of the engine's"]
    lines = [[AR.name, *speeds, _said(ratio(served, bare, tokens_per_second))]]
    return paragraphs("## What HTTP costs", text, table(head, lines))


def _by_load(cells: Cells, loads: Sequence[float]) -> str:
    parts = [f"### Load {load:g}\n\n{_table(cells, load)}" for load in loads]
    return paragraphs("## Load by load", HOW_LOADS_ARE_READ, *parts) if parts else ""


def _other_loads(cells: Cells, loads: Sequence[float]) -> str:
    parts = [f"### Load {load:g}\n\n{_table(cells, load)}" for load in loads]
    return paragraphs("## Other loads", *parts) if parts else ""


def _table(cells: Cells, load: float) -> str:
    head = ["", "first token", "per token", "whole answer", "good/s", "tokens/s", "tau", "right, %", "lag"]
    lines = []
    for policy in POLICIES:
        if rows := cells.get((policy.name, "steady", load)):
            lines.append([
                policy.name, _ms(rows, "first_token"), _ms(rows, "per_token", 1), _ms(rows, "whole"),
                _said(over_repeats(rows, goodput)), f"{over_repeats(rows, tokens_per_second).value:,.0f}",
                f"{lowest_tau(rows):.2f}", _share(rows), _ms(rows, "lag", 1).split(" ")[-1],
            ])  # fmt: skip
    return table(head, lines)


def _ms(rows: Sequence[ServingRow], name: str, digits: int = 0, count: int = 3) -> str:
    return " / ".join(f"{1000 * one:.{digits}f}" for one in times(rows, name)[:count]) or "n/a"


def _steps(cells: Cells) -> str:
    lines = []
    for policy in POLICIES:
        for (name, shape, _), rows in cells.items():
            if (name, shape) == (policy.name, "step"):
                row = rows[-1]
                lines.append([
                    policy.name, f"{goodput(row):.1f}", _ms(rows, "whole"), f"{max(row.timeline['waiting']):g}",
                    f"{switches(row, 'relief')}", f"{min(row.timeline['tau']):.2f}",
                ])  # fmt: skip
    if not lines:
        return ""
    text = (
        "The load goes from 0.5 to 1.5 and back, a third of the time each, in one run. *Turns of tau* are those found "
        "by looking ten times a second: a controller lowers it by one notch at a time while a target is missed, and "
        "raises it, more slowly, when both are well met."
    )
    head = ["", "good/s", "whole answer, ms", "most waiting", "turns of tau", "lowest mean tau"]
    image = f"![Requests, tau and window over time]({STEP}.png)"
    return paragraphs("## A step in load", text, table(head, lines), image)
