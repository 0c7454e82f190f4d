"""Claims as tests with a verdict.

A claim names the arms that it compares and the bound that the comparison must exceed. It is judged on the
benchmarks that all its arms were measured on, and says so where these are not all six.
"""

from __future__ import annotations

from dataclasses import dataclass

from marsbench.evaluation.statistics import (
    Verdict,
    above,
    mean_of_benchmarks,
    non_inferiority,
    paired_difference,
    superiority,
    tokens_per_forward,
)
from marsbench.reports.cells import BENCHMARKS, Cells, done_cells
from marsbench.reports.markdown import bracketed, p_value, signed_number
from marsbench.sweeps.plans import TablePlan


@dataclass(frozen=True)
class Finding:
    """What a run says of a claim; all but the verdict as text to print."""

    found: str = "n/a"
    questions: str = "n/a"
    p: str = "n/a"
    verdict: Verdict = "not run"


@dataclass(frozen=True)
class AccuracyClaim:
    """Arm `first` is more accurate than arm `second`; with a margin, at least not `margin` points less so."""

    letter: str
    text: str
    first: str
    second: str
    margin: float | None = None

    def tested(self, plan: TablePlan) -> str:
        """The comparison and its bound in words."""
        bound = "0" if self.margin is None else f"-{self.margin:g} (non-inferiority)"
        return f"{self.compared(plan)} > {bound}"

    def compared(self, plan: TablePlan) -> str:
        """The two arms in words."""
        return f"{label(plan, self.first)} minus {label(plan, self.second)}"

    def judge(self, cells: Cells) -> Finding:
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
            return Finding(found=f"not comparable: {error}")
        verdict = superiority(difference) if self.margin is None else non_inferiority(difference, self.margin)
        interval = bracketed(difference.interval, 1, signed=True)
        return Finding(
            f"{signed_number(difference.points, 1)} {interval} points",
            _questions(difference.n, len(shared)),
            p_value(difference.p_value),
            verdict,
        )


@dataclass(frozen=True)
class TokensClaim:
    """An arm emits more than `bound` tokens per forward pass, benchmarks weighing the same."""

    letter: str
    text: str
    arm: str
    bound: float

    def tested(self, plan: TablePlan) -> str:
        """The measurement and its bound in words."""
        return f"tokens/forward of {label(plan, self.arm)} > {self.bound:g}"

    def judge(self, cells: Cells) -> Finding:
        """Average over the benchmarks that the arm was measured on."""
        done = done_cells(cells, self.arm)
        if not done:
            return Finding()
        mean = mean_of_benchmarks([tokens_per_forward(row.emitted, row.forwards) for row in done.values()])
        found = f"{mean.value:.2f} {bracketed(mean.interval, 2)} tokens/forward"
        return Finding(found, _questions(mean.n, len(done)), verdict=above(mean.interval, self.bound))


Claim = AccuracyClaim | TokensClaim


def label(plan: TablePlan, arm: str) -> str:
    """The words that a plan shows for an arm."""
    return next(line.label for line in plan.arms if line.name == arm)


def _questions(n: int, benchmarks: int) -> str:
    short = "" if benchmarks == len(BENCHMARKS) else f" ({benchmarks} of {len(BENCHMARKS)} benchmarks)"
    return f"{n:,}{short}"
