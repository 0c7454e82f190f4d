"""How numbers are written: intervals, signs and digits."""

from collections.abc import Iterable
from math import isfinite

from marsbench.rows.kinds import Row
from marsbench.statistics.intervals import Estimate, Interval


def one_line(text: str) -> str:
    """Text of any shape, such as an error message, on a single line."""
    return " ".join(text.split())


def plus_minus(estimate: Estimate, digits: int) -> str:
    """The value and half of its interval, as in "88.3 ± 3.6"."""
    value, half = f"{estimate.value:.{digits}f}", estimate.interval.half_width
    return f"{value} ± {half:.{digits}f}" if isfinite(half) else value


def bracketed(interval: Interval, digits: int, *, signed: bool = False) -> str:
    """An interval by its limits, as in "[-0.4, +2.8]"; "(no interval)" where it is unbounded."""
    if not isfinite(interval.half_width):
        return "(no interval)"
    low, high = (number(limit, digits, signed=signed) for limit in (interval.low, interval.high))
    return f"[{low}, {high}]"


def with_interval(estimate: Estimate, digits: int, *, signed: bool = False) -> str:
    """A value with its interval, as in "+1.2 [-0.4, +2.8]"."""
    value = number(estimate.value, digits, signed=signed)
    return f"{value} {bracketed(estimate.interval, digits, signed=signed)}"


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """A number, with its sign if wanted, as in "+1.2"; what rounds to zero has no minus."""
    text = f"{round(value, digits) + 0.0:+.{digits}f}"
    return text if signed else text.removeprefix("+")


def p_value(value: float | None) -> str:
    """A p value with two significant digits, so that readers can correct it by hand; "n/a" without one."""
    if value is None:
        return "n/a"
    text = f"{value:.2g}"
    if text == "0.05":  # four digits show on which side of .05 it lies
        return f"{value:.4f}"
    return "< 0.0001" if value < 0.0001 else text


def machines(rows: Iterable[Row]) -> str:
    """On which machines rows were measured, as in "AMD EPYC, 2 cores"."""
    known = [dict(row.provenance.get("hardware") or {}) for row in rows]
    parts = [(its.get("gpu") or its.get("cpu"), f"{its['cores']} cores" if its.get("cores") else "") for its in known]
    return " and ".join(dict.fromkeys(", ".join(filter(None, some)) for some in parts if any(some)))
