"""How reports write tables, and layouts: Markdown files whose slots in braces are filled from rows."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources

from tabulate import tabulate

from marsbench.findings.in_words import one_line

_SLOT = re.compile(r"\{(\w+)\}")
_SPARE = re.compile(r"(?<=\S) +(?= \S|\*$)", re.MULTILINE)  # spaces that an empty slot of a sentence leaves behind


def paragraphs(*parts: str) -> str:
    """The parts of a page that are not empty, with a blank line between them."""
    return "\n\n".join(filter(None, parts))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[int] = (0,)) -> str:
    """A Markdown table, empty without rows: the columns `text`, counted from 0, flush left, the others flush right."""
    if not rows:
        return ""
    align = ["left" if column in text else "right" for column in range(len(head))]
    lines = [[one_line(value).replace("|", "\\|") for value in row] for row in rows]
    return tabulate(lines, headers=head, tablefmt="pipe", disable_numparse=True, colalign=align)


def merged(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lines of a table, those with the same numbers as one: "AR; MARS, verified"."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in lines:
        has_numbers = any(character.isdigit() for cell in cells for character in cell)
        names.setdefault((*cells, *([] if has_numbers else [name])), []).append(name)
    return [["; ".join(labels), *cells[: len(lines[0]) - 1]] for cells, labels in names.items()]


def folded(*sections: str) -> str:
    """Sections that a reader opens by their headings; empty ones are left out."""
    return paragraphs(*[
        f"<details>\n<summary>{text.partition(chr(10))[0].lstrip('# ')}</summary>\n\n{text}\n\n</details>"
        for text in sections
        if text
    ])  # fmt: skip


def filled(package: str, name: str, slots: Mapping[str, str]) -> list[str]:
    """The parts of a layout, which a line `---` parts, with their slots filled; the lines of a paragraph become one.

    A line of a list, or a paragraph, whose slots are all empty is left out. So is a section (a part that begins with a
    heading `##`) where some slots are paragraphs by themselves and all of these are empty.
    """
    text, parts = (resources.files(package) / name).read_text(encoding="utf-8"), []
    for part in text.split("\n---\n"):
        blocks = [re.sub(r"\n(?!- |\|)", " ", block) for block in part.strip().split("\n\n")]
        alone = [slots[block[1:-1]] for block in blocks if _SLOT.fullmatch(block)]
        empty = blocks[0].startswith("## ") and alone and not any(alone)
        parts.append("" if empty else paragraphs(*["\n".join(_lines(block, slots)) for block in blocks]))
    return parts


def _lines(block: str, slots: Mapping[str, str]) -> Iterator[str]:
    for line in block.split("\n"):
        names = _SLOT.findall(line)
        if not names or any(slots[name] for name in names):
            text = line.format_map(slots).strip()
            yield text if _SLOT.fullmatch(line) else _SPARE.sub("", text)
