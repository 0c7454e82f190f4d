"""Serving: does lowering tau under load buy throughput, as the paper's abstract says, and what does it cost?"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from statistics import fmean

from marsbench.findings.claims import TIMES, Claim, Measured
from marsbench.findings.in_words import bracketed
from marsbench.findings.seeds import BySeed
from marsbench.line import TrainedStage
from marsbench.rendering.claims_in_words import page_claims
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import laid_out
from marsbench.rows.kinds import Row, ServingRow
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.serving import findings, policies
from marsbench.studies.serving.findings import Cells, accuracy, goodput, over_repeats, tokens_per_second, typical
from marsbench.studies.serving.policies import AR, AT_ONCE, BY_ROWS, FAST, FEW, Policy
from marsbench.studies.study import Study, measured_by

_COST = "cost of a forward, in forwards of `ar`"


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells = Cells.of(rows)
    laps = [*chain.from_iterable(cells.values())]
    full, last, lost = cells.full, laps[-1], findings.lost(laps)
    same, asked = cells.same_answers()
    return {
        "asks": "does lowering tau buy throughput under load?" if full else "what do its users get?",
        "answers": paragraphs(page_claims(STUDY.claims, seeds, scale), _right(cells)),
        "few": _few(cells),
        "same": f"`mars-verified` gave `ar`'s answer {same:,} times of {asked:,}." if asked else "",
        "carried": _carried(cells),
        "loads": _by_load(cells),
        "tokens": str(last.max_new_tokens),
        "rows": str(last.rows),
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


def _right(cells: Cells) -> str:
    fast, ar = (accuracy(cells.laps(policy.name, "together", cells.full)) for policy in (FAST, AR))
    if fast is None or ar is None:
        return ""
    return (
        f"- On a full server, {100 * fast:.0f} % of the answers at tau = {policies.LOWEST:g} are right, of those by "
        f"`ar` {100 * ar:.0f} %."
    )


def _said(ratio: Estimate | None) -> str:
    if ratio is None:
        return "n/a"
    return f"{ratio.value:,.2f}" + (f" {bracketed(ratio.interval, 2)}" if ratio.n > 1 else "")


# ---- claims ----


def _ratio(one: Policy, other: Policy, count: int, rows: Sequence[Row]) -> Measured:
    """With so many requests in flight; 0 is a full server."""
    cells = Cells.of(rows)
    return Measured(cells.ratio(one.name, other.name, count or cells.full))


_more = partial(Claim, bound=Bound(low=1.0), unit=TIMES)
CLAIMS = (
    _more(
        measure=partial(_ratio, BY_ROWS, AR, 1),
        name="one-at-a-time",
        text="A user alone gets more tokens per second from a server that drafts and checks than by AR decoding",
        beside=(
            ("each of four users", _more(measure=partial(_ratio, BY_ROWS, AR, 4))),
            (f"a full server at tau = {FAST.asks['threshold']:g}", _more(measure=partial(_ratio, FAST, AR, 0))),
        ),
    ),
)


# ---- tables ----


def _few(cells: Cells) -> str:
    lines = []
    for count, policy in product(FEW, (AR, BY_ROWS)):
        if rows := cells.laps(policy.name, "together", count):
            over = None if policy == AR else cells.ratio(policy.name, AR.name, count)
            lines.append([
                f"{count}", policy.name, _ms(rows, "first_token", 1, 2), _ms(rows, "per_token", 2, 2),
                _ms(rows, "whole", 0, 2), _rate(rows, findings.of_a_request), "" if over is None else _said(over),
                _rate(rows), f"{findings.per_forward(rows):.2f}",
            ])  # fmt: skip
    head = ["at a time", "", "first token", "per token", "whole answer", "a user's tokens/s", "over `ar`",
            "all users' tokens/s", "tokens/forward"]  # fmt: skip
    return table(head, lines, text=(1,))


def _carried(cells: Cells) -> str:
    if not cells.full:
        return ""
    lines = []
    for policy, rows in cells.by_policy("together", cells.full):
        over = cells.ratio(policy.name, AR.name, cells.full)
        tokens = findings.per_forward(rows)
        cost = f"{tokens / over.value:.2f}" if over is not None and over.value else "n/a"
        lines.append([policy.name, _rate(rows), _said(over), f"{tokens:.2f}", cost, _share(rows)])
    return paragraphs(
        table(["a full server", "tokens/s", "over `ar`", "tokens/forward", _COST, "right, %"], lines),
        f"{cells.full:g} requests are in flight at any time, so the batch is always full. A forward over more "
        "positions costs more: a policy buys tokens per forward over what its forward costs in forwards of `ar`, and "
        "no more; *cost of a forward* follows from the two columns before it.",
    )


def _rate(rows: Sequence[ServingRow], measure: Callable[[ServingRow], float] = tokens_per_second) -> str:
    return f"{over_repeats(rows, measure).value:,.0f}"


def _share(rows: Sequence[ServingRow]) -> str:
    share = accuracy(rows)
    return "n/a" if share is None else f"{100 * share:.1f}"


def _http(cells: Cells) -> str:
    bare, served = (cells.laps(AR.name, shape, AT_ONCE) for shape in ("engine", "together"))
    if not (bare and served):
        return ""
    pairs = zip(bare, served, strict=False)
    part = typical([tokens_per_second(its) / tokens_per_second(alone) for alone, its in pairs])
    head = ["", "engine alone, tokens/s", "over HTTP, tokens/s", "of the engine's"]
    return table(head, [[AR.name, _rate(bare), _rate(served), _said(part)]])


def _by_load(cells: Cells) -> str:
    head = ["load", "", "first token", "per token", "whole answer", "good/s", "tokens/s", "right, %", "lag"]
    lines = [
        [
            f"{load:g}", policy.name, _ms(rows, "first_token"), _ms(rows, "per_token", 1), _ms(rows, "whole"),
            _said(over_repeats(rows, goodput)), _rate(rows), _share(rows), _ms(rows, "lag", 1).split(" ")[-1],
        ]
        for load in cells.loads
        for policy, rows in cells.by_policy("steady", load)
    ]  # fmt: skip
    return table(head, lines, text=(1,))


def _ms(rows: Sequence[ServingRow], name: str, digits: int = 0, count: int = 3) -> str:
    """So many percentiles of some time, each the mean over laps; "n/a" where no request was answered."""
    percentiles = zip(*[values for row in rows if (values := getattr(row, name))], strict=True)
    return " / ".join(f"{1000 * fmean(each):.{digits}f}" for each in list(percentiles)[:count]) or "n/a"


STUDY = Study(
    key="serving",
    name="Serving under load",
    asks="what do users of a server get, and can it raise its throughput on the fly by lowering tau?",
    place=6,
    in_paper=False,
    timed=True,
    measure=measured_by("marsbench.studies.serving.measuring", "serving_rows"),
    kinds=(ServingRow,),
    stages=(TrainedStage("mars", 4),),
    sections=laid_out(__package__, _slots),
    claims=CLAIMS,
)
