"""Pages whose prose stands in Markdown files, with slots in braces for what rows say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources

from marsbench.findings.seeds import BySeed
from marsbench.rendering.markdown import folded, paragraphs
from marsbench.rendering.page import Sections
from marsbench.rendering.sections import about, racing, seeds_in_words
from marsbench.rows.kinds import Row

Slots = Callable[[Sequence[Row], str, BySeed], Mapping[str, str]]  # of a page's rows: what stands in its slots
_SLOT = re.compile(r"\{(\w+)\}")


def laid_out(package: str, slots: Slots) -> Sections:
    """The sections of a page whose layout is `page.md` of a package; those behind the first are folded."""

    def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
        common = {"scale": scale, "racing": racing(scale), "seeds": seeds_in_words(seeds), "about": about(scale, seeds)}
        first, *more = filled(package, "page.md", {**common, **slots(rows, scale, seeds)})
        return [first, folded(*more)]

    return sections


def filled(package: str, name: str, slots: Mapping[str, str]) -> list[str]:
    """The parts of a layout, which a line `---` parts, with their slots filled.

    A line of a list, or a paragraph, whose slots are all empty is left out. So is a section (a part that begins with a
    heading `##`) where some slots are paragraphs by themselves and all of these are empty. The lines of a paragraph
    become one.
    """
    text = (resources.files(package) / name).read_text(encoding="utf-8")
    return [_part(part, slots) for part in text.split("\n---\n")]


def _part(part: str, slots: Mapping[str, str]) -> str:
    blocks = [re.sub(r"\n(?!- |\|)", " ", block) for block in part.strip().split("\n\n")]
    alone = [slots[block[1:-1]] for block in blocks if _SLOT.fullmatch(block)]
    if blocks[0].startswith("## ") and alone and not any(alone):
        return ""
    return paragraphs(*["\n".join(_lines(block, slots)) for block in blocks])


def _lines(block: str, slots: Mapping[str, str]) -> Iterator[str]:
    for line in block.split("\n"):
        names = _SLOT.findall(line)
        if not names or any(slots[name] for name in names):
            yield line.format_map(slots).strip()
