"""The sections of reports: title, how the page was made, known deviations; and what layouts have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import races_in_words
from marsbench.presets import DEFAULT_SCALE, option_for, preset
from marsbench.provenance import BUSY_CORES
from marsbench.rendering.markdown import filled, paragraphs, table
from marsbench.rendering.sessions import session_of
from marsbench.rows.kinds import EvaluationRow, Row, SweepRow
from marsbench.running.plans import TablePlan
from marsbench.world import modelled_on

ABLATIONS_DEVIATION = (
    '"MARS w/o SFT loss" only drops this loss. "As released" (Table 3) also multiplies the loss of each sequence by '
    "1/t, for a random t, as the authors do."
)


def deviations(rows: Sequence[Row], scale: str, own: Sequence[str], *, common: bool = True) -> str:
    """How rows of one scale differ from the paper; `own` differences are of this part of a page alone."""
    real = any(modelled_on(row.benchmark) == row.benchmark for row in rows if isinstance(row, EvaluationRow))
    small, scored, every = filled(__package__, "deviations.md", {})
    shared = [small if preset(scale).world else "", scored if real else "", every] if common else []
    known = [f"- {sentence}" for sentence in (*shared, *own) if sentence]
    return "\n".join(["## Known deviations from the paper", "", *known]) if known else ""


def title(plan: TablePlan, scale: str) -> str:
    first = plan.title.split()[0]
    words = plan.title if first.isupper() else f"{plan.title[0].lower()}{plan.title[1:]}"  # "MARS" stays as it is
    return f"# {plan.name} at scale {scale}: {words}"


def about(scale: str, seeds: BySeed) -> str:
    """The caveat of toy models, the training seeds of the page, and where to read about its numbers."""
    toy = "These are toy models: they test the mechanism, and their numbers are not Qwen's."
    return " ".join(filter(None, [toy if preset(scale).world else "", seeds_in_words(seeds), reading(scale)]))


def reading(scale: str) -> str:
    return f"[How to read the numbers and verdicts.]({_docs(scale)}/reading-reports.md#intervals-and-verdicts)"


def words(scale: str) -> str:
    return f"[What the words mean.]({_docs(scale)}/reading-reports.md#words)"


def _docs(scale: str) -> str:
    return "../docs" if scale == DEFAULT_SCALE else "../../docs"


def seeds_in_words(seeds: BySeed) -> str:
    """Which training seeds a page uses; empty for one seed."""
    every = ", ".join(map(str, sorted(seeds)))
    known = f"Numbers and verdicts use every training seed that has rows for them (of seeds {every})."
    return known if len(seeds) > 1 else ""


def command(key: str, scale: str) -> str:
    first, *more = f"{session_of(key)}{option_for(scale)}".split(" -- ")
    return f"`nox -s {' -- '.join([first, ' '.join(more)]) if more else first}`"


def facts_section(rows: Sequence[Row], how: str) -> str:
    """Command, code and machine behind rows; facts that are empty are left out."""
    known = [row.provenance for row in rows]
    dates = sorted(str(origin["started"]) for origin in known if origin.get("started"))
    dirty, facts = sum(bool(origin.get("dirty")) for origin in known), {"command": how}
    for name, read in _FACTS.items():
        said = [origin.get(read) if isinstance(read, str) else read(origin) for origin in known]
        values = sorted({str(value) for value in said if value is not None} - {""})
        facts[name] = "; ".join(values) if len(values) <= 3 else f"{values[0]} and {len(values) - 1} others"
    packages = {" ".join(package) for origin in known for package in (origin.get("versions") or {}).items()}
    facts["versions"] = ", ".join(sorted(packages))
    facts["rows from uncommitted changes"] = f"{dirty} of {len(known)}" if dirty else ""
    facts["measured"] = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""
    lines = [[name, value] for name, value in facts.items() if value]
    return paragraphs("## How this was made", table(["", ""], lines, text=(0, 1)))


def _hardware(provenance: Mapping[str, Any]) -> str:
    hardware = dict(provenance.get("hardware") or {})
    cores, memory = hardware.get("cores"), hardware.get("memory_gib")
    counts = f"{cores} cores" if cores else "", f"{memory:.0f} GiB memory" if memory else ""
    parts = [hardware.get("cpu"), *counts, hardware.get("gpu") or ("no GPU" if "gpu" in hardware else "")]
    return ", ".join(filter(None, parts))


_FACTS: dict[str, str | Callable[[Mapping[str, Any]], str]] = {  # words -> a field of provenance, or what reads it
    "commit": lambda provenance: str(provenance.get("commit") or "")[:12],
    "what differed": "differs",
    "seed": "seed",
    "hardware": _hardware,
    "driver": lambda provenance: ", ".join(sorted({str(gpu["driver"]) for gpu in provenance.get("gpus") or ()})),
    "threads": "threads",
    "waiting threads (`OMP_WAIT_POLICY`)": "wait_policy",
    "platform": "platform",
    "Python": "python",
}


def common_slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    """What the layout of any page may have."""
    return {
        **{"scale": scale, "words": words(scale), "about": about(scale, seeds)},
        "racing": f"[How a race is measured.]({_docs(scale)}/sweeps.md#how-a-race-is-measured)",
        "seeds": seeds_in_words(seeds),
        "raced": races_in_words(row for row in rows if isinstance(row, SweepRow)),
        "company": busy_remark(rows),
    }


def busy_remark(rows: Iterable[Row]) -> str:
    """A remark if other processes used the machine while rows were timed; else empty."""
    # Older rows have a number per lap. Their median counts, because a speed-up is a median over laps.
    laps = [getattr(row, "others_cores", []) or [row.provenance.get("others_cores") or 0.0] for row in rows]
    used = max(map(median, laps), default=0.0)
    remark = f"**Timed on a machine that was not idle:** other processes used up to {used:.2f} cores."
    return remark if used > BUSY_CORES else ""
