"""README's first screen: what was found, in plain sentences, a table and a picture, rendered between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.findings.claims import TIMES, Claim, Judged
from marsbench.findings.collection import Collection
from marsbench.findings.sweep import on_sweep, printed_ratio, speed_up
from marsbench.presets import DEFAULT_SCALE, preset
from marsbench.rendering.claims import bullet, tally
from marsbench.rendering.markdown import filled, table
from marsbench.statistics.decisions import Bound
from marsbench.studies.lines import BATCH_SIZES
from marsbench.studies.real_model import in_brief

BEGIN, END = "<!-- rendered by marsbench report: begin -->", "<!-- rendered by marsbench report: end -->"
SPEED, REAL = "speedup", "real-model"  # keys of studies
# Page and name of the claims that the first screen is about, in its order.
_HOLDS = (
    ("table2", "matches-ar-sft"), ("table2", "paper-matches-ar-sft"), ("table4", "several-tokens-b4"),
    ("table4", "level-b4"),
)  # fmt: skip
_STEP = "table2", "step-costs-twice"
_OVER_GENERATE = Claim(  # AR decoding over transformers' `generate`, both eager, one request at a time
    measure=on_sweep(lambda sweep: speed_up(sweep.eager.done.get(("ar", 1)), "hf-generate")),
    bound=Bound(low=1.0),
    unit=TIMES,
)
_SPEEDS = {  # names of our claims on the best settings -> what readers call them
    "best-verified": "Verified MARS: the very tokens of AR",
    "best-adapter": "The same from an adapter on AR SFT, which leaves its weights alone",
    "mars-95": "MARS at tau = .95, as in the paper, which loses accuracy",
}


def readme_of(root: Path, judged: Sequence[Judged], collections: Sequence[Collection]) -> dict[Path, str]:
    """README below a folder -> its text with what was found at the default scale; empty where it has no such marks."""
    file = root / "README.md"
    whole = next((each for each in collections if each.scale == DEFAULT_SCALE and SPEED in each.links), None)
    if whole is None or not file.is_file():
        return {}
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return {file: f"{before}{BEGIN}\n{front_door(judged, collections, whole)}\n{END}{after}"} if begin and end else {}


def front_door(judged: Sequence[Judged], collections: Sequence[Collection], whole: Collection) -> str:
    """The answers to what a reader asks first: a pure function of rows.

    `whole` is of the scale whose speeds are told.
    """
    found = {(entry.claim.page, entry.claim.name): entry for entry in judged}
    told = next(each for each in reversed(collections) if preset(each.scale).world and "table2" in each.rows)
    known = [finding for key in _HOLDS if (finding := found[key].findings[told.scale]).estimate]
    papers = [entry.findings[told.scale] for entry in judged if entry.claim.papers]
    slots = {
        "scale": told.scale,
        "summary": preset(told.scale).summary,
        "tally": tally([finding for finding in papers if finding.estimate]),
        "seeds": told.seeds_in_words,
        "holds": "\n".join(map(bullet, known)),
        "raced": whole.scale,
        "over_generate": printed_ratio(_OVER_GENERATE.over(whole.of(SPEED)).estimate, "not run"),
        "speeds": _table(judged, whole),
        "real": _real_model(collections),
        "step": found[_STEP].findings[whole.scale].found,
        "figures": (Path("reports") / Path(whole.links[SPEED]).parent / "figures").as_posix(),
    }
    return "".join(filled(__package__, "front_door.md", slots))


def _real_model(collections: Sequence[Collection]) -> str:
    """How fast the first scale is that has raced one; empty where none has."""
    for each in collections:
        if said := "".join(map(in_brief, each.of(REAL)[:1])):
            link = f"[scale {each.scale}]({(Path('reports') / each.links[REAL]).as_posix()})"
            return f"**On a real model?** {said} ({link}: {preset(each.scale).summary}.)"
    return ""


def _table(judged: Sequence[Judged], whole: Collection) -> str:
    """Speeds of the best settings over AR decoding, by batch size."""
    sizes = 1, *BATCH_SIZES
    lines = []
    for name, words in _SPEEDS.items():
        alike = [entry for entry in judged if (entry.claim.page, entry.claim.name) == (SPEED, name)]
        found = {entry.claim.batch_size: entry.findings[whole.scale].estimate for entry in alike}
        lines.append([words, *[printed_ratio(found.get(size), "not run") for size in sizes]])
    return table(["tokens/s over AR decoding", *[f"batch {size}" for size in sizes]], lines)
