"""Claims as tests with a verdict.

A claim names the arms that it compares and the bound that the comparison must exceed. It is judged on the
benchmarks that all its arms were measured on, and says so where these are not all that the table asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from marsbench.findings.cells import BENCHMARKS, Cells, answers_of, columns, done_cells
from marsbench.findings.in_words import bracketed, signed_number
from marsbench.findings.published import published_average, published_values
from marsbench.rows.kinds import EvaluationRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.curves import curve_advantage, points_gap
from marsbench.statistics.decisions import MOST_SEEDS, MOST_TIMES, SIGNIFICANT, Needed
from marsbench.statistics.intervals import (
    Estimate,
    Interval,
    Verdict,
    above,
    below,
    gain_difference,
    mean_of_benchmarks,
    non_inferiority,
    paired_difference,
    speed_difference,
    superiority,
    tokens_per_forward,
)

POINTS, TOKENS, TIMES = "points", "tokens/forward", "times"  # the units of comparisons
_DIGITS = {POINTS: 1, TOKENS: 2, TIMES: 2}
_BOUNDS = (0.0, -1.0, -2.0)  # that differences in points are held against


@dataclass(frozen=True)
class Finding:
    """What a run says of a claim: an estimate and a verdict, or why there is none."""

    estimate: Estimate | None = None
    unit: str = POINTS  # of the estimate
    signed: bool = True  # whether the estimate is a difference
    benchmarks: tuple[str, ...] = ()  # those it is judged on
    asked: int = 0  # how many benchmarks it should be judged on
    verdict: Verdict = "not run"
    reason: str = ""  # why there is no estimate, where that needs a word
    seeds: int = 1  # training seeds behind it
    p: float | None = None  # of the verdict, see `decisions.p_value`
    needed: Needed | None = None  # what would decide it, where it is open
    after_holm: float | None = None  # its p among those of all claims tested; None for checks

    @property
    def found(self) -> str:
        """The estimate with its interval and unit, or why there is none."""
        if self.estimate is None:
            return self.reason or "n/a"
        digits, more = _DIGITS[self.unit], int(self.unit == POINTS and _at_a_bound(self.estimate.interval))
        value = number(self.estimate.value, self.unit, signed=self.signed, more=more)
        return f"{value} {bracketed(self.estimate.interval, digits + more, signed=self.signed)} {self.unit}"

    @property
    def decided(self) -> bool:
        """Whether the interval says yes or no."""
        return self.verdict in ("supported", "not supported")

    @property
    def stands(self) -> bool:
        """Whether a verdict survives Holm's correction."""
        return self.decided and self.after_holm is not None and self.after_holm < SIGNIFICANT

    @property
    def questions(self) -> str:
        """How many observations the estimate rests on; where not on all benchmarks, it says so."""
        if self.estimate is None:
            return "n/a"
        judged = len(self.benchmarks)
        return f"{self.estimate.n:,}" + ("" if judged == self.asked else f" ({judged} of {self.asked} benchmarks)")


def number(value: float, unit: str, *, signed: bool, more: int = 0) -> str:
    """A number with as many digits as its unit deserves, and some more; a difference with its sign."""
    digits = _DIGITS[unit] + more
    return signed_number(value, digits) if signed else f"{value:.{digits}f}"


def _at_a_bound(interval: Interval) -> bool:
    """Whether a limit in points would print as one of the bounds: a digit more says on which side it lies."""
    return any(round(limit, _DIGITS[POINTS]) in _BOUNDS for limit in (interval.low, interval.high))


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """What a claim says of its place in the paper."""

    in_abstract: bool = False  # whether the abstract makes it too
    check: bool = False  # whether it cannot come out otherwise unless something is broken


@dataclass(frozen=True)
class AccuracyClaim(_Placed):
    """Arm `first` is more accurate than arm `second`; with a margin, at least not `margin` points less so."""

    unit: ClassVar[str] = POINTS
    how: ClassVar[str] = ""  # how it is judged, where that needs a word of its own

    letter: str
    text: str
    first: str
    second: str
    margin: float | None = None

    def tested(self, plan: TablePlan) -> str:
        """The comparison and its bound in words."""
        return f"{self.compared(plan)} > {_bound(self.margin)}"

    def compared(self, plan: TablePlan) -> str:
        """The two arms in words."""
        return f"{label(plan, self.first)} minus {label(plan, self.second)}"

    def judge(self, cells: Cells, plan: TablePlan) -> Finding:
        """Compare the arms on the benchmarks that both were measured on."""
        first, second = done_cells(cells, self.first), done_cells(cells, self.second)
        shared = [name for name in first if name in second]
        if not shared:
            return Finding()
        try:
            difference = paired_difference(
                {name: first[name].correct for name in shared},
                {name: second[name].correct for name in shared},
            )
        except ValueError as error:
            return _not_comparable(error)
        estimate = Estimate(difference.points, difference.interval, difference.n)
        return Finding(
            estimate,
            benchmarks=tuple(shared),
            asked=len(columns(plan)),
            verdict=self.decide(estimate.interval),
        )

    def decide(self, interval: Interval) -> Verdict:
        """The verdict on an interval in points."""
        return superiority(interval) if self.margin is None else non_inferiority(interval, self.margin)

    def published(self, plan: TablePlan, scale: str) -> str | None:
        """What the paper's averages say."""
        return _published_difference(plan, self.first, self.second, scale, "accuracy", 1)


@dataclass(frozen=True)
class TokensClaim(_Placed):
    """An arm emits more than `bound` tokens per forward pass, or fewer, benchmarks weighing the same."""

    unit: ClassVar[str] = TOKENS

    letter: str
    text: str
    arm: str
    bound: float
    fewer: bool = False

    @property
    def how(self) -> str:
        """How it is judged, where that needs a word of its own."""
        return 'Where "<" is tested, "above" and "below" change places.' if self.fewer else ""

    def tested(self, plan: TablePlan) -> str:
        """The measurement and its bound in words."""
        return f"{self.compared(plan)} {'<' if self.fewer else '>'} {self.bound:g}"

    def compared(self, plan: TablePlan) -> str:
        """The measurement in words."""
        return f"tokens/forward of {label(plan, self.arm)}"

    def judge(self, cells: Cells, plan: TablePlan) -> Finding:
        """Average over the benchmarks that the arm was measured on."""
        done = done_cells(cells, self.arm)
        if not done:
            return Finding()
        mean = mean_of_benchmarks([tokens_per_forward(row.emitted, row.forwards) for row in done.values()])
        verdict = self.decide(mean.interval)
        return Finding(mean, TOKENS, False, tuple(done), len(columns(plan)), verdict=verdict)

    def decide(self, interval: Interval) -> Verdict:
        """The verdict on an interval in tokens per forward pass."""
        return below(interval, self.bound) if self.fewer else above(interval, self.bound)

    def published(self, plan: TablePlan, scale: str) -> str | None:
        """What the paper's average says."""
        value = published_average(plan, self.arm, scale, "tokens_per_forward")
        return None if value is None else f"{value:.2f}"


@dataclass(frozen=True)
class SpeedClaim(_Placed):
    """Arm `first` emits more tokens per forward pass than arm `second`."""

    unit: ClassVar[str] = TOKENS
    how: ClassVar[str] = (
        "Tokens per forward pass of two lines are compared on the same questions too, their difference with the normal "
        "interval of a difference of ratios."
    )

    letter: str
    text: str
    first: str
    second: str

    def tested(self, plan: TablePlan) -> str:
        """The comparison and its bound in words."""
        return f"{self.compared(plan)} > 0"

    def compared(self, plan: TablePlan) -> str:
        """The two arms in words."""
        return f"tokens/forward: {label(plan, self.first)} minus {label(plan, self.second)}"

    def judge(self, cells: Cells, plan: TablePlan) -> Finding:
        """Compare the arms on the benchmarks that both were measured on."""
        shared = _shared(cells, (self.first, self.second))
        if not shared:
            return Finding()
        try:
            mean = mean_of_benchmarks([speed_difference(answers_of(a), answers_of(b)) for a, b in shared.values()])
        except ValueError as error:
            return _not_comparable(error)
        return Finding(mean, TOKENS, True, tuple(shared), len(columns(plan)), verdict=self.decide(mean.interval))

    def decide(self, interval: Interval) -> Verdict:
        """The verdict on an interval in tokens per forward pass."""
        return above(interval, 0.0)

    def published(self, plan: TablePlan, scale: str) -> str | None:
        """What the paper's averages say."""
        return _published_difference(plan, self.first, self.second, scale, "tokens_per_forward", 2)


@dataclass(frozen=True)
class GainClaim(_Placed):
    """What one arm gains over another is more than what a third gains over a fourth."""

    unit: ClassVar[str] = POINTS
    how: ClassVar[str] = (
        "Two differences are compared question by question as well: the difference between them, with an interval made "
        "in the same way. Where lines answer next to nothing, a gain over them can grow no further."
    )

    letter: str
    text: str
    first: tuple[str, str]
    second: tuple[str, str]

    def tested(self, plan: TablePlan) -> str:
        """The comparison and its bound in words."""
        return f"{self.compared(plan)} > 0"

    def compared(self, plan: TablePlan) -> str:
        """The two differences in words."""
        first, second = (" minus ".join(label(plan, arm) for arm in pair) for pair in (self.first, self.second))
        return f"({first}) minus ({second})"

    def judge(self, cells: Cells, plan: TablePlan) -> Finding:
        """Compare the gains on the benchmarks that all four arms were measured on."""
        shared = _shared(cells, (*self.first, *self.second))
        if not shared:
            return Finding()
        try:
            gains = [gain_difference((a.correct, b.correct), (c.correct, d.correct)) for a, b, c, d in shared.values()]
        except ValueError as error:
            return _not_comparable(error)
        mean = _in_points(mean_of_benchmarks(gains))
        return Finding(mean, POINTS, True, tuple(shared), len(columns(plan)), verdict=self.decide(mean.interval))

    def decide(self, interval: Interval) -> Verdict:
        """The verdict on an interval in points."""
        return superiority(interval)

    def published(self, plan: TablePlan, scale: str) -> str | None:
        """What the paper's averages say."""
        averages = [published_average(plan, arm, scale, "accuracy") for arm in (*self.first, *self.second)]
        known = [value for value in averages if value is not None]
        if len(known) < len(averages):
            return None
        a, b, c, d = known
        return signed_number((a - b) - (c - d), 1)


@dataclass(frozen=True)
class CurveClaim(_Placed):
    """One curve of accuracy against tokens per forward pass lies above another, or at most `margin` points below.

    A curve is given by its arms, one for each threshold; `words` says in print what the two curves are.
    """

    unit: ClassVar[str] = POINTS
    how: ClassVar[str] = (
        "Two curves of accuracy against tokens/forward, straight between their points, are compared where they emit "
        "equally many tokens per forward pass: the mean difference over the tokens/forward that both reach, with a "
        "bootstrap interval over questions."
    )

    letter: str
    text: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    words: tuple[str, str]
    margin: float | None = None

    def tested(self, plan: TablePlan) -> str:
        """The comparison and its bound in words."""
        return f"{self.compared(plan)} > {_bound(self.margin)}"

    def compared(self, plan: TablePlan) -> str:
        """The two curves in words."""
        return f"{self.words[0]} minus {self.words[1]}, at equal tokens/forward"

    def judge(self, cells: Cells, plan: TablePlan) -> Finding:
        """Compare the curves on the benchmarks that all their arms were measured on."""
        shared = _shared(cells, (*self.first, *self.second))
        if not shared:
            return Finding()
        curves, border = [[answers_of(row) for row in rows] for rows in shared.values()], len(self.first)
        try:
            advantages = [curve_advantage(points[:border], points[border:]) for points in curves]
        except ValueError as error:
            return _not_comparable(error)
        mean = _in_points(mean_of_benchmarks(advantages))
        return Finding(mean, POINTS, True, tuple(shared), len(columns(plan)), verdict=self.decide(mean.interval))

    def decide(self, interval: Interval) -> Verdict:
        """The verdict on an interval in points."""
        return superiority(interval) if self.margin is None else non_inferiority(interval, self.margin)

    def published(self, plan: TablePlan, scale: str) -> str | None:
        """The same mean difference from the paper's numbers, benchmarks weighing the same."""
        gaps = []
        for benchmark in columns(plan):
            first, second = (_published_curve(plan, arms, scale, benchmark) for arms in (self.first, self.second))
            if first is None or second is None:
                return None
            gaps.append(points_gap(first, second))
        return signed_number(sum(gaps) / len(gaps), 1)


Claim = AccuracyClaim | TokensClaim | SpeedClaim | GainClaim | CurveClaim


def label(plan: TablePlan, arm: str) -> str:
    """The words that a plan shows for an arm."""
    return next(line.label for line in plan.arms if line.name == arm)


def _bound(margin: float | None) -> str:
    return "0" if margin is None else f"-{margin:g} (non-inferiority)"


def _shared(cells: Cells, arms: Sequence[str]) -> dict[str, list[EvaluationRow]]:
    """The arms' rows on each benchmark that all of them were measured on."""
    found = [done_cells(cells, arm) for arm in arms]
    return {name: [rows[name] for rows in found] for name in BENCHMARKS if all(name in rows for rows in found)}


def _in_points(share: Estimate) -> Estimate:
    """A difference of fractions in percentage points."""
    return Estimate(100 * share.value, Interval(100 * share.interval.low, 100 * share.interval.high), share.n)


def _not_comparable(error: ValueError) -> Finding:
    return Finding(reason=f"not comparable: {error}")


def _published_difference(plan: TablePlan, first: str, second: str, scale: str, metric: str, digits: int) -> str | None:
    averages = [published_average(plan, arm, scale, metric) for arm in (first, second)]
    known = [value for value in averages if value is not None]
    return signed_number(known[0] - known[1], digits) if len(known) == len(averages) else None


def _published_curve(
    plan: TablePlan, arms: Sequence[str], scale: str, benchmark: str
) -> list[tuple[float, float]] | None:
    """(tokens per forward pass, accuracy in %) of a curve's points in the paper; None unless it has them all."""
    points = []
    for arm in (arm for arm in plan.arms if arm.name in arms):
        speed = published_values(plan, arm, scale, "tokens_per_forward").get(benchmark)
        height = published_values(plan, arm, scale, "accuracy").get(benchmark)
        if speed is None or height is None:
            return None
        points.append((speed, height))
    return points


def counted(verdicts: Sequence[Verdict], checks: Sequence[Verdict] = ()) -> str:
    """How many claims are supported, and what of the others, and how many checks hold.

    As in "5 of 7 claims supported, 2 inconclusive; 3 of 3 checks hold".
    """
    count = Counter(verdicts)
    rest = [f"{count[verdict]} {verdict}" for verdict in ("not supported", "inconclusive", "not run") if count[verdict]]
    parts = [", ".join([f"{count['supported']} of {len(verdicts)} claims supported", *rest])] if verdicts else []
    if checks:
        parts.append(f"{Counter(checks)['supported']} of {len(checks)} checks hold")
    return "; ".join(parts)


def outcome(verdict: Verdict) -> str:
    """The verdict on a check in words of its own, so that nobody takes it for a finding."""
    return {"supported": "holds", "not supported": "fails", "inconclusive": "unclear"}.get(verdict, verdict)


def fallen(finding: Finding) -> str:
    """What to say behind a verdict that does not survive Holm's correction; empty for others."""
    lost = finding.after_holm is not None and finding.decided and not finding.stands
    return " (not after Holm's correction)" if lost else ""


def in_need(needed: Needed | None, counts: str = "questions") -> str:
    """What would decide an open claim, as in "9 seeds or 31,000 questions"; empty where it is decided.

    Args:
        needed: what the measured scatter says.
        counts: what its interval is drawn from.
    """
    if needed is None:
        return ""
    if needed.at_bound:
        return "no n would"
    if all(needed.both):
        return f"{needed.both[0]} seeds and {_rounded_up(needed.both[1])} {counts}"
    ways = [f"{needed.seeds} seeds"] if needed.seeds else []
    ways += [f"{_rounded_up(needed.questions)} {counts}"] if needed.questions else []
    return " or ".join(ways) or (f"> {MOST_SEEDS} seeds" if needed.scatter else f"> {MOST_TIMES:g} times the {counts}")


def _rounded_up(count: int) -> str:
    """A number with two digits that mean something: it is an extrapolation."""
    step = 10 ** max(0, len(str(count)) - 2)
    return f"{-(-count // step) * step:,}"
