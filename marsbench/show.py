"""Showing a generation with the tokens of one forward pass shaded together (the paper's Figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING

from rich.text import Text

from marsbench import world
from marsbench.errors import UserError
from marsbench.files import check_can_be_written

if TYPE_CHECKING:  # what is only drawn again needs no model
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from marsbench.answering import Answering
    from marsbench.decoding.generation import Generation

# Two light shades that differ in brightness too, so that neither color vision nor a gray printer matters.
SHADES = ("#dbe9f6", "#f0a830")
_COLUMNS = 88  # characters per line of the image
_WRAPPER = TextWrapper(
    _COLUMNS, expand_tabs=False, replace_whitespace=False, drop_whitespace=False, break_on_hyphens=False
)
_CELL_WIDTH, _CELL_HEIGHT = 0.095, 0.24  # inches per character


@dataclass(frozen=True)
class Shown:
    """A generation as text: what each forward pass added, in the order of the text."""

    title: str
    forwards: int
    pieces: list[tuple[int, str]]  # (number of the forward, from 1, and its text)

    @property
    def summary(self) -> str:
        return f"{self.title}: {self.forwards} forward passes"


def sample_question() -> str:
    return world.test_set("mini_gsm8k", 1)[0].prompt


def answer(answering: Answering, question: str, max_new_tokens: int) -> Generation:
    from marsbench.decoding.generation import Request
    from marsbench.training.data import chat_prompt

    tokenizer = answering.loaded.tokenizer
    ids = tokenizer(chat_prompt(tokenizer, question), add_special_tokens=False).input_ids
    (generation,) = answering.decode([Request(ids, max_new_tokens, answering.threshold)])
    return generation


def shown(title: str, generation: Generation, tokenizer: PreTrainedTokenizerBase) -> Shown:
    return merged(title, token_texts(generation.tokens, tokenizer), generation.settled_by, generation.forwards)


def token_texts(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text; a character that takes several tokens comes with the last of them."""
    text, parts = "", []
    for count in range(1, len(tokens) + 1):
        longer = str(tokenizer.decode(tokens[:count])).rstrip("\N{REPLACEMENT CHARACTER}")
        parts.append(longer[len(text) :])
        text = longer
    return parts


def merged(title: str, texts: Sequence[str], settled_by: Sequence[int], forwards: int) -> Shown:
    """Tokens as text with those of one forward together.

    `settled_by` says for each token, an emitted EOS among them, which forward settled it, from 1.
    """
    parts = zip(settled_by, texts, strict=False)  # an EOS has no text
    pieces = [(forward, "".join(part for _, part in group)) for forward, group in groupby(parts, lambda part: part[0])]
    speed = f"{len(settled_by)} tokens, {len(settled_by) / forwards:.2f} per forward pass"
    return Shown(f"{title}: {speed}", forwards, pieces)


def shaded(generation: Shown, *, color: bool = True) -> Text:
    """For a terminal: shades that change with every forward, or bars between forwards where there is no color."""
    pieces = [piece for _, piece in generation.pieces]
    if not color:
        return Text("|".join(pieces))
    return Text.assemble(*((piece, f"black on {SHADES[number % 2]}") for number, piece in enumerate(pieces)))


def draw(generations: list[Shown], file: Path) -> None:
    """Write the generations, one under the other, as an image; the ending of `file` chooses the format."""
    check_image(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing(generations).savefig(file, dpi=150)


def check_image(file: Path) -> None:
    """Refuse an image of a kind that cannot be drawn, or that cannot be written, before anything is decoded for it."""
    from matplotlib.figure import Figure

    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix.lower().removeprefix(".") not in kinds:
        what, fix = f"no image can be drawn with the ending {file.suffix!r}", f"choose among {', '.join(kinds)}"
        raise UserError(what, where=str(file), fix=fix)
    check_can_be_written(file, "--image")


def drawing(generations: Sequence[Shown]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    blocks = [(generation.summary, _lines(generation.pieces)) for generation in generations]
    rows = max(1, sum(len(lines) + 2 for _, lines in blocks))
    figure = Figure(figsize=(_COLUMNS * _CELL_WIDTH, rows * _CELL_HEIGHT))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, _COLUMNS + 1), ylim=(rows, 0))
    axes.axis("off")
    row = 1.0
    for title, lines in blocks:
        axes.text(0, row, title, fontsize=9, fontweight="bold", va="center")
        for line in lines:
            row += 1
            for column, shade, piece in line:
                axes.add_patch(Rectangle((column, row - 0.45), len(piece), 0.9, color=SHADES[shade], linewidth=0))
                for offset, character in enumerate(piece):
                    axes.text(column + offset + 0.5, row, character, fontsize=9, family="monospace", ha="center",
                              va="center", parse_math=False)  # fmt: skip
        row += 2
    return figure


def _lines(pieces: Sequence[tuple[int, str]]) -> list[list[tuple[int, int, str]]]:
    """Wrap the pieces between words: lines of (column, shade, text)."""
    shades = iter([number % 2 for number, (_, piece) in enumerate(pieces) for _ in piece])
    lines = []
    for paragraph in "".join(piece for _, piece in pieces).split("\n"):
        for line in _WRAPPER.wrap(paragraph) or [""]:
            runs = groupby(zip(range(len(line)), shades, strict=False), key=lambda at: at[1])  # no shade too many
            shaded = [(shade, [column for column, _ in run]) for shade, run in runs]
            lines.append([(columns[0], shade, line[columns[0] : columns[-1] + 1]) for shade, columns in shaded])
        next(shades, None)  # the line break's
    return lines
