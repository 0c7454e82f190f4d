"""Showing a generation with the tokens of one forward pass shaded together (the paper's Figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group
from rich.segment import Segment
from rich.text import Text

from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically

if TYPE_CHECKING:  # what is only drawn again needs no model
    from transformers import PreTrainedTokenizerBase

    from marsbench.answering import Answering
    from marsbench.decoding.generation import Generation

# Two light shades that differ in brightness too, so that neither color vision nor a gray printer matters.
SHADES = ("#dbe9f6", "#f0a830")
_COLUMNS, _CELL = 88, (0.07525, 0.16)  # of a picture; a character in inches, at 9 points


@dataclass(frozen=True)
class Shown:
    """A generation as text: what each forward pass added, in the order of the text."""

    summary: str
    pieces: list[tuple[int, str]]  # (number of the forward, from 1, and its text)


def answer(answering: Answering, question: str, max_new_tokens: int) -> Generation:
    from marsbench.decoding.generation import Request
    from marsbench.training.data import chat_prompt

    tokenizer = answering.loaded.tokenizer
    ids = tokenizer(chat_prompt(tokenizer, question), add_special_tokens=False).input_ids
    (generation,) = answering.decode([Request(ids, max_new_tokens, answering.threshold)])
    return generation


def token_texts(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text; a character that takes several tokens comes with the last of them."""
    text, parts = "", []
    for count in range(1, len(tokens) + 1):
        longer = str(tokenizer.decode(tokens[:count])).rstrip("\N{REPLACEMENT CHARACTER}")
        parts.append(longer[len(text) :])
        text = longer
    return parts


def shown(title: str, generation: Generation, tokenizer: PreTrainedTokenizerBase) -> Shown:
    """A generation's tokens as text, with those of one forward together."""
    settled_by, texts = generation.settled_by, token_texts(generation.tokens, tokenizer)
    parts = zip(settled_by, texts, strict=False)  # an EOS has no text
    pieces = [(forward, "".join(part for _, part in group)) for forward, group in groupby(parts, lambda part: part[0])]
    speed = f"{len(settled_by)} tokens, {len(settled_by) / generation.forwards:.2f} per forward pass"
    return Shown(f"{title}: {speed}: {generation.forwards} forward passes", pieces)


def shaded(generation: Shown, *, color: bool = True) -> Text:
    """For a terminal: shades that change with every forward, or bars between forwards where there is no color."""
    pieces = [piece for _, piece in generation.pieces]
    if not color:
        return Text("|".join(pieces))
    return Text.assemble(*((piece, f"black on {SHADES[number % 2]}") for number, piece in enumerate(pieces)))


def check_image(file: Path) -> None:
    """Refuse an image of another kind, or that cannot be written, before anything is decoded for it."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lower()[1:] not in kinds:
        fix = f"choose {', '.join(kinds)}"
        raise UserError(f"no image can be drawn with the ending {file.suffix!r}", where=str(file), fix=fix)
    check_can_be_written(file, "--image")


def draw(generations: Sequence[Shown], file: Path) -> None:
    """Write the generations, one under the other, as an image of the kind that the file's name says."""
    console = Console(record=True, width=_COLUMNS, file=StringIO())
    parts = [(Text(generation.summary, "bold"), shaded(generation), Text("\n")) for generation in generations]
    if file.suffix.lower() == ".svg":
        console.print(*chain(*parts), sep="\n")
        write_atomically(file, console.export_svg(title="marsbench show").encode())
    else:
        write_atomically(file, _picture(console.render_lines(Group(*chain(*parts)), pad=False), file.suffix[1:]))


def _picture(lines: Sequence[Sequence[Segment]], kind: str) -> bytes:
    """A terminal's lines as a picture of matplotlib's."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure, width, height = Figure((_COLUMNS * _CELL[0], len(lines) * _CELL[1])), 1 / _COLUMNS, 1 / len(lines)
    for row, line in enumerate(lines, 1):
        column = 0
        for text, style, _ in line:
            at = column * width, 1 - row * height
            if style and style.bgcolor:
                figure.add_artist(Rectangle(at, cell_len(text) * width, height, color=style.bgcolor.name, linewidth=0))
            weight = "bold" if style and style.bold else "normal"
            figure.text(*at, text, family="monospace", fontsize=9, weight=weight, va="bottom", parse_math=False)
            column += cell_len(text)
    content = BytesIO()
    figure.savefig(content, format=kind.lower(), dpi=150)
    return content.getvalue()
