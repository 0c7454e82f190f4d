"""Serving: does lowering tau raise throughput under load, as the paper's abstract says, and what does it cost?"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, product
from math import exp, inf, log
from pkgutil import resolve_name
from statistics import fmean

from marsbench.findings.claims import TIMES, Claim, Measured
from marsbench.findings.in_words import bracketed
from marsbench.findings.seeds import BySeed
from marsbench.line import TrainedStage
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import Row, ServingRow
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, Interval, reach
from marsbench.studies.serving import policies
from marsbench.studies.serving.policies import AR, AT_ONCE, BY_ROWS, FAST, FEW, POLICIES, VERIFIED, Policy
from marsbench.studies.study import Study


class LoadCells(dict[tuple[str, str, float], list[ServingRow]]):
    """A policy's name, a shape and a load -> the laps of that cell, repeat by repeat."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "LoadCells":
        """The laps of the page's policies; if a lap was measured twice, the last one counts."""
        laps: dict[tuple[str, str, float], dict[int, ServingRow]] = {}
        for row in rows:
            if isinstance(row, ServingRow) and row.status == "done" and row.policy in {each.name for each in POLICIES}:
                laps.setdefault((row.policy, row.shape, row.load), {})[row.repeat] = row
        return cls({key: [repeats[number] for number in sorted(repeats)] for key, repeats in laps.items()})

    @property
    def full(self) -> float:
        """How many requests in flight fill the server: the largest number measured, if more than a few; else 0."""
        most = max((load for name, shape, load in self if (name, shape) == (AR.name, "together")), default=0.0)
        return most if most > max(FEW) else 0.0

    def laps(self, policy: Policy, shape: str, load: float) -> list[ServingRow]:
        return self.get((policy.name, shape, load), [])

    def by_policy(self, shape: str, load: float) -> list[tuple[Policy, list[ServingRow]]]:
        return [(policy, laps) for policy in POLICIES if (laps := self.laps(policy, shape, load))]

    def ratio(self, one: Policy, other: Policy, load: float) -> Estimate | None:
        """One policy's speed over another's, repeat by repeat on the same requests; None without laps or speed.

        It is of requests in flight: what a user gets where there are a few, and else what all of them get together.
        """
        measure = of_a_request if load in FEW else tokens_per_second
        laps = zip(self.laps(one, "together", load), self.laps(other, "together", load), strict=False)
        pairs = [(measure(mine), measure(its)) for mine, its in laps]
        return typical([mine / its for mine, its in pairs]) if pairs and all(its for _, its in pairs) else None

    def same_answers(self) -> tuple[int, int]:
        """How many questions `mars-verified` answered as `ar` did in the same lap, and how many were asked of both."""
        both = [
            pair
            for (name, shape, load), laps in self.items()
            if name in (VERIFIED.name, BY_ROWS.name)
            for mine, its in zip(laps, self.laps(AR, shape, load), strict=False)
            for pair in zip(mine.answers, its.answers, strict=False)
            if all(pair)
        ]
        return sum(mine == its for mine, its in both), len(both)


def tokens_per_second(row: ServingRow) -> float:
    """Tokens of answers over the time until the last of them."""
    return row.emitted / max(row.took, 1e-9)


def of_a_request(row: ServingRow) -> float:
    """Tokens per second that a user gets: those of answers over the time that their users waited."""
    return row.emitted / max(row.waited, 1e-9)


def per_forward(rows: Sequence[ServingRow]) -> float:
    return sum(row.emitted for row in rows) / max(sum(row.forwards for row in rows), 1)


def typical(values: Sequence[float]) -> Estimate:
    """The geometric mean of numbers, with Student's 95 % interval on their logarithms; 0 where one of them is 0."""
    if min(values) <= 0:
        return Estimate(0.0, Interval(0.0, inf), len(values))
    logs = [log(value) for value in values]
    mean, half = fmean(logs), reach(0.0, logs) if len(logs) > 1 else inf
    return Estimate(exp(mean), Interval(exp(mean - half), exp(mean + half)), len(logs))


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells = LoadCells.of(rows)
    laps = [*chain.from_iterable(cells.values())]
    full, last, lost = cells.full, laps[-1], sum(row.requests - row.answered for row in laps)
    same, asked = cells.same_answers()
    return {
        "asks": "Does lowering tau raise throughput under load?" if full else "What do users of a server get?",
        "right_fast": _share(cells.laps(FAST, "together", full)),
        "right_ar": _share(cells.laps(AR, "together", full)),
        "few": _few(cells),
        "same": f"`mars-verified` gave the answer of `ar` to {same:,} of {asked:,} requests." if asked else "",
        "carried": _carried(cells),
        "loads": _by_load(cells),
        "tokens": str(last.max_new_tokens),
        "rows": str(last.rows),
        "full": f"{full:g}" if full else "",
        "load_of_one": f"{full or max(FEW):g}",
        "least": f"{min(row.took for row in laps):.1f}",
        "most": f"{max(row.took for row in laps):.1f}",
        "repeats": str(max(map(len, cells.values()))),
        "unanswered": f"Of {sum(row.requests for row in laps):,} requests, {lost:,} were not answered." if lost else "",
        "target_first": f"{1000 * last.target_first_token:.0f}",
        "target_each": f"{1000 * last.target_per_token:.2f}",
        "times_first": f"{policies.FIRST_TOKEN:.0f}",
        "times_each": f"{policies.PER_TOKEN:.0f}",
        "at_once": str(AT_ONCE),
        "http": _http(cells),
    }


def _said(ratio: Estimate | None) -> str:
    if ratio is None:
        return "n/a"
    return f"{ratio.value:,.2f}" + (f" {bracketed(ratio.interval, 2)}" if ratio.n > 1 else "")


def _ratio(one: Policy, other: Policy, count: int, rows: Sequence[Row]) -> Measured:
    """A ratio of speeds with this many requests in flight; 0 is a full server."""
    cells = LoadCells.of(rows)
    return Measured(cells.ratio(one, other, count or cells.full))


_more = partial(Claim, bound=Bound(low=1.0), unit=TIMES)
CLAIMS = (
    _more(
        measure=partial(_ratio, BY_ROWS, AR, 1),
        name="one-at-a-time",
        text="For a single user, a server that drafts and checks gives more tokens per second than AR decoding",
        beside=(
            ("each of four users", _more(measure=partial(_ratio, BY_ROWS, AR, 4))),
            (f"a full server at tau = {FAST.asks['threshold']:g}", _more(measure=partial(_ratio, FAST, AR, 0))),
        ),
    ),
)


def _few(cells: LoadCells) -> str:
    lines = []
    for count, policy in product(FEW, (AR, BY_ROWS)):
        if rows := cells.laps(policy, "together", count):
            over = None if policy == AR else cells.ratio(policy, AR, count)
            lines.append([
                f"{count}", policy.name, _ms(rows, "first_token", 1, 2), _ms(rows, "per_token", 2, 2),
                _ms(rows, "whole", 0, 2), _rate(rows, of_a_request), "" if over is None else _said(over),
                _rate(rows), f"{per_forward(rows):.2f}",
            ])  # fmt: skip
    head = ["at a time", "", "first token", "per token", "whole answer", "a user's tokens/s", "over `ar`",
            "all users' tokens/s", "tokens/forward"]  # fmt: skip
    return table(head, lines, text=(1,))


def _carried(cells: LoadCells) -> str:
    lines = []
    for policy, rows in cells.by_policy("together", cells.full):
        over, tokens = cells.ratio(policy, AR, cells.full), per_forward(rows)
        cost = f"{tokens / over.value:.2f}" if over is not None and over.value else "n/a"
        lines.append([policy.name, _rate(rows), _said(over), f"{tokens:.2f}", cost, _share(rows)])
    cost = "cost of a forward, in forwards of `ar`"
    return table(["a full server", "tokens/s", "over `ar`", "tokens/forward", cost, "right, %"], lines)


def _rate(rows: Sequence[ServingRow], measure: Callable[[ServingRow], float] = tokens_per_second) -> str:
    return f"{typical([*map(measure, rows)]).value:,.0f}"


def _share(rows: Sequence[ServingRow]) -> str:
    """The part of the answers that are right, in %; empty where they were not scored."""
    marked = [row for row in rows if row.right is not None and row.answered]
    right, answered = sum(row.right or 0 for row in marked), sum(row.answered for row in marked)
    return f"{100 * right / answered:.1f}" if marked else ""


def _http(cells: LoadCells) -> str:
    bare, served = (cells.laps(AR, shape, AT_ONCE) for shape in ("engine", "together"))
    if not (bare and served):
        return ""
    pairs = zip(bare, served, strict=False)
    part = typical([tokens_per_second(its) / tokens_per_second(alone) for alone, its in pairs])
    head = ["", "engine alone, tokens/s", "over HTTP, tokens/s", "of the engine's"]
    return table(head, [[AR.name, _rate(bare), _rate(served), _said(part)]])


def _by_load(cells: LoadCells) -> str:
    head = ["load", "", "first token", "per token", "whole answer", "good/s", "tokens/s", "right, %", "lag"]
    lines = [
        [
            f"{load:g}", policy.name, _ms(rows, "first_token"), _ms(rows, "per_token", 1), _ms(rows, "whole"),
            _said(typical([row.good / row.seconds for row in rows])), _rate(rows), _share(rows),
            _ms(rows, "lag", 1).split(" ")[-1],
        ]
        for load in sorted({load for _, shape, load in cells if shape == "steady"})
        for policy, rows in cells.by_policy("steady", load)
    ]  # fmt: skip
    return table(head, lines, text=(1,))


def _ms(rows: Sequence[ServingRow], name: str, digits: int = 0, count: int = 3) -> str:
    """The first percentiles of a time, each the mean over laps; "n/a" if no request was answered."""
    percentiles = zip(*[values for row in rows if (values := getattr(row, name))], strict=True)
    return " / ".join(f"{1000 * fmean(each):.{digits}f}" for each in list(percentiles)[:count]) or "n/a"


STUDY = Study(
    key="serving",
    name="Serving under load",
    asks="what do users of a server get, and does a low tau help?",
    order=6,
    timed=True,
    measure=lambda run: resolve_name("marsbench.studies.serving.measuring:serving_rows")(run),
    kinds=(ServingRow,),
    stages=(TrainedStage("mars", 4),),
    layout="serving/page.md",
    slots=_slots,
    claims=CLAIMS,
)
