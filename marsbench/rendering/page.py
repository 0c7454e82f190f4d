"""Pages whose prose is a layout, with slots for what rows say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import races_in_words
from marsbench.provenance import BUSY_CORES
from marsbench.rendering.markdown import filled, folded
from marsbench.rendering.sections import about, command, facts_section, racing, seeds_in_words, title
from marsbench.rendering.sessions import session_of
from marsbench.rows.kinds import Row, SweepRow
from marsbench.running.plans import TablePlan

# What stands on a page: of one scale's rows, the scale, and the rows of all training seeds, which verdicts are of.
Sections = Callable[[Sequence[Row], str, BySeed], Iterable[str]]
Slots = Callable[[Sequence[Row], str, BySeed], Mapping[str, str]]  # of the same: what stands in a layout's slots


def laid_out(package: str, slots: Slots, plan: TablePlan | None = None, layout: str = "page.md") -> Sections:
    """The sections of a page whose layout lies in a package; those behind a line `---` are folded.

    `slots` are those of this page alone; what its lines are, if it has any, says the `plan`.
    """
    session = session_of(plan.key if plan else package.rpartition(".")[2])

    def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
        common = {
            **{"scale": scale, "racing": racing(scale), "seeds": seeds_in_words(seeds), "about": about(scale, seeds)},
            "raced": races_in_words(row for row in rows if isinstance(row, SweepRow)),
            "company": busy_remark(rows),
            "facts": facts_section(rows, command(session, scale)),
            **({"title": title(plan, scale)} if plan else {}),
        }
        first, *more = filled(package, layout, {**common, **slots(rows, scale, seeds)})
        return [first, folded(*more)]

    return sections


def busy_remark(rows: Iterable[Row]) -> str:
    """A remark where other processes used the machine while rows were timed; empty where none did."""
    # Rows of earlier versions tell it lap by lap; of these the median counts, as a speed-up is a median over laps.
    laps = [getattr(row, "others_cores", []) or [row.provenance.get("others_cores") or 0.0] for row in rows]
    used = max(map(median, laps), default=0.0)
    if used <= BUSY_CORES:
        return ""
    return f"**Timed on a machine that was not idle:** other processes used up to {used:.2f} cores."
