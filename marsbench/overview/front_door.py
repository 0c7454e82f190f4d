"""README's first screen: what was found, in three sentences, a table and a picture, rendered between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from marsbench.findings.claims import TIMES, Claim, Finding, Judged, Measured
from marsbench.findings.collection import Collection
from marsbench.findings.in_words import bracketed
from marsbench.findings.sweep import SweepCells, speed_up
from marsbench.overview.index import remarks
from marsbench.presets import DEFAULT_SCALE, preset
from marsbench.rendering.claims import corrected, fallen, sentence, tally
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import Row
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate

BEGIN, END = "<!-- rendered by marsbench report: begin -->", "<!-- rendered by marsbench report: end -->"
PICTURE = "speedup_by_batch_size.png"  # the sweep's
SPEED = "speedup"  # key of the sweep's study
# Page and name of the claims that the first screen is about.
_HOLDS = ("table2", "matches-ar-sft"), ("table4", "level-b4"), ("table2", "beats-more-ar")
_SEVERAL, _STEP = ("table4", "several-tokens-b4"), ("table2", "step-costs-twice")
_SPEEDS = {  # names of our claims on the best settings -> what readers call them
    "best-verified": "verified MARS (the very tokens of AR)",
    "best-mars": "MARS at its fastest tau that lost at most 1 point on the prompts raced",
}


def readme_of(root: Path, judged: Sequence[Judged], collections: Sequence[Collection]) -> dict[Path, str]:
    """README below a folder -> its text with what was found at the default scale; empty where it has no such marks."""
    file = root / "README.md"
    whole = next((one for one in collections if one.scale == DEFAULT_SCALE and SPEED in one.links), None)
    if whole is None or not file.is_file():
        return {}
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return {file: f"{before}{BEGIN}\n{front_door(judged, whole)}\n{END}{after}"} if begin and end else {}


def front_door(judged: Sequence[Judged], collection: Collection) -> str:
    """The answers of one scale to what a reader asks first: a pure function of rows."""
    found = {(one.claim.page, one.claim.name): one for one in judged}
    scale, speeds = collection.scale, _speeds(judged, collection.scale)
    lines = [
        f"- **Does MARS hold up?** {_verdicts([found[key] for key in _HOLDS], scale)} At tau = .95 it emits "
        f"{found[_SEVERAL].findings[scale].found}. In all: "
        f"{tally([one for one in judged if one.claim.papers], scale)}. {corrected(judged, scale)}",
        f"- **How fast, against a strong baseline?** {_fastest(speeds)} That AR decoding is itself "
        f"{_in_brief(_over_generate(collection, 1))} times as fast as transformers' `generate`.",
        f"- **What about my model?** A training step of MARS costs {found[_STEP].findings[scale].found} an AR step's; "
        "no parameter is added. [docs/your-own-model.md](docs/your-own-model.md) has the commands.",
    ]
    notes = [*remarks(collection), collection.seeds_in_words]
    if len(collection.seeds) > 1:
        notes.append("Numbers here, and every verdict, are of all of them; tables on the pages are of seed 0.")
    picture = f"![Speed over AR decoding by batch size]({_figures(collection)}/{PICTURE})"
    return paragraphs("\n".join(lines), preset(scale).caveat, _table(speeds), " ".join(filter(None, notes)), picture)


def _verdicts(judged: Sequence[Judged], scale: str) -> str:
    """What the paper claims first of all, with the verdict on each."""
    found = [(sentence(one.claim), one.findings[scale]) for one in judged]
    parts = [f'"{text}" is **{one.verdict}**{fallen(one)}: {one.found}' for text, one in found]
    return f"{'; '.join(parts)}."


Speeds = Mapping[str, Mapping[int, Finding]]  # what readers call a setting -> batch size -> its speed over `ar`


def _speeds(judged: Sequence[Judged], scale: str) -> Speeds:
    """The best settings' speeds over AR decoding, by batch size."""
    return {
        words: {
            one.claim.batch_size: one.findings[scale]
            for one in judged
            if (one.claim.page, one.claim.name) == (SPEED, name) and one.claim.batch_size is not None
        }
        for name, words in _SPEEDS.items()
    }


def _fastest(speeds: Speeds) -> str:
    """The best settings at the smallest batch size, in a sentence."""
    smallest = min(size for by_size in speeds.values() for size in by_size)
    parts = [f"{words} {_in_brief(by_size[smallest].estimate)} times" for words, by_size in speeds.items()]
    return f"At batch size {smallest}, over AR decoding: {', '.join(parts)}."


def _table(speeds: Speeds) -> str:
    sizes = sorted({size for by_size in speeds.values() for size in by_size})
    head = ["tokens/s over AR decoding of the same checkpoint", *[f"batch {size}" for size in sizes]]
    lines = [
        [f"{words[0].upper()}{words[1:]}", *[_in_brief(by_size[size].estimate) for size in sizes]]
        for words, by_size in speeds.items()
    ]
    return table(head, lines)


def _over_generate(collection: Collection, batch_size: int) -> Estimate | None:
    """Tokens per second of `ar` over those of transformers' `generate`, all training seeds together."""

    def measure(rows: Sequence[Row]) -> Measured:
        row = SweepCells.of(rows).eager.done.get(("ar", batch_size))
        return Measured(speed_up(row, "hf-generate") if row else None)

    return Claim(measure=measure, bound=Bound(low=1.0), unit=TIMES).over(collection.of(SPEED)).estimate


def _in_brief(estimate: Estimate | None) -> str:
    """A ratio with its interval."""
    return f"{estimate.value:.2f} {bracketed(estimate.interval, 2)}" if estimate else "not run"


def _figures(collection: Collection) -> str:
    """The way from README to the sweep's figures."""
    return (Path("reports") / Path(collection.links[SPEED]).parent / "figures").as_posix()
