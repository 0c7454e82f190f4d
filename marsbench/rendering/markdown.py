"""How reports write tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tabulate import tabulate

from marsbench.findings.in_words import one_line


def paragraphs(*parts: str) -> str:
    """Parts of a page, a blank line between them; what is empty is left out."""
    return "\n\n".join(filter(None, parts))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[int] = (0,)) -> str:
    """A Markdown table: the columns `text`, counted from 0, flush left, the others, numbers, flush right."""
    align = ["left" if column in text else "right" for column in range(len(head))]
    lines = [[_cell(value) for value in row] for row in rows]
    return tabulate(lines, headers=head, tablefmt="pipe", disable_numparse=True, colalign=align)


def _cell(value: str) -> str:
    return one_line(value).replace("|", "\\|")
