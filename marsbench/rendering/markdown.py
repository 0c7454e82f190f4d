"""How reports write tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tabulate import tabulate

from marsbench.findings.in_words import one_line


def paragraphs(*parts: str) -> str:
    """Parts of a page, a blank line between them; what is empty is left out."""
    return "\n\n".join(filter(None, parts))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[int] = (0,)) -> str:
    """A Markdown table, empty without rows: the columns `text`, counted from 0, flush left, the others flush right."""
    if not rows:
        return ""
    align = ["left" if column in text else "right" for column in range(len(head))]
    lines = [[_cell(value) for value in row] for row in rows]
    return tabulate(lines, headers=head, tablefmt="pipe", disable_numparse=True, colalign=align)


def merged(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lines of a table, those with the same numbers as one: "AR; MARS, verified"."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in lines:
        has_numbers = any(character.isdigit() for cell in cells for character in cell)
        names.setdefault((*cells, *([] if has_numbers else [name])), []).append(name)
    return [["; ".join(found), *cells[: len(lines[0]) - 1]] for cells, found in names.items()]


def folded(*sections: str) -> str:
    """Sections, each behind its own heading until a reader opens it; what is empty is left out."""
    return paragraphs(*[
        f"<details>\n<summary>{text.partition(chr(10))[0].lstrip('# ')}</summary>\n\n{text}\n\n</details>"
        for text in sections
        if text
    ])  # fmt: skip


def _cell(value: str) -> str:
    return one_line(value).replace("|", "\\|")
