"""Showing a generation with the tokens of one forward pass shaded together (the paper's Figure 1)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from marsbench import world
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.methods import METHODS
from marsbench.methods.fitting import default_ids, fit
from marsbench.training.checkpoints import Loaded
from marsbench.training.data import chat_prompt

# Two light shades that differ in brightness too, so that neither color vision nor a gray printer matters.
SHADES = ("#cfe3f5", "#f6c86b")
_COLUMNS = 88  # characters per line of the image
_CELL_WIDTH, _CELL_HEIGHT = 0.095, 0.24  # inches per character


@dataclass(frozen=True)
class Shown:
    """A generation as text: what each forward pass added, in the order of the text."""

    title: str
    forwards: int
    pieces: list[tuple[int, str]]  # (number of the forward, from 1, and its text)

    @property
    def summary(self) -> str:
        """The title and what the generation cost."""
        return f"{self.title}: {self.forwards} forward passes"


def sample_question() -> str:
    """The first held-out word problem of the world."""
    return world.test_set("mini_gsm8k", 1)[0].prompt


def answers(
    loaded: Loaded,
    question: str,
    methods: list[str],
    *,
    threshold: float,
    max_new_tokens: int,
    draft: Loaded | None,
    untrained_masks: bool,
    block_size: int,
) -> list[Shown]:
    """Answer one question by several methods."""
    tokenizer = loaded.tokenizer
    ids = tokenizer(chat_prompt(tokenizer, question), add_special_tokens=False).input_ids
    eos_id, pad_id = default_ids(loaded, None, None)
    found = []
    for name in methods:
        method = fit(name, loaded, draft=draft, untrained_masks=untrained_masks, block_size=block_size)
        bar = threshold if METHODS[name].takes_threshold else None
        request = Request(ids, max_new_tokens, bar)
        (generation,) = decode(loaded.model, method, [request], eos_id=eos_id, pad_id=pad_id, batch_size=1)
        found.append(shown(name if bar is None else f"{name}, tau = {bar:g}", generation, tokenizer))
    return found


def shown(title: str, generation: Generation, tokenizer: PreTrainedTokenizerBase) -> Shown:
    """Split a generation's text at the borders of its forward passes.

    A character that takes several tokens belongs to the forward that completed it.
    """
    text, parts = "", []
    for count, forward in enumerate(generation.settled_by[: len(generation.tokens)], 1):
        longer = str(tokenizer.decode(generation.tokens[:count])).rstrip("\N{REPLACEMENT CHARACTER}")
        parts.append((forward, longer[len(text) :]))
        text = longer
    merged = [(forward, "".join(part for _, part in group)) for forward, group in groupby(parts, lambda part: part[0])]
    speed = f"{generation.emitted} tokens, {generation.tokens_per_forward:.2f} per forward pass"
    return Shown(f"{title}: {speed}", generation.forwards, merged)


def shaded(generation: Shown, *, color: bool = True) -> Text:
    """For a terminal: shades that change with every forward, or bars between forwards where there is no color."""
    text = Text()
    for number, (_, piece) in enumerate(generation.pieces):
        if color:
            text.append(piece, style=f"black on {SHADES[number % 2]}")
        else:
            text.append(piece if number == 0 else f"|{piece}")
    return text


def draw(generations: list[Shown], file: Path) -> None:
    """Write the generations, one under the other, as an image; the ending of `file` chooses the format."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    blocks = [(generation.summary, _lines(generation.pieces)) for generation in generations]
    rows = sum(len(lines) + 2 for _, lines in blocks)
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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _lines(pieces: list[tuple[int, str]]) -> list[list[tuple[int, int, str]]]:
    """Wrap the pieces at `_COLUMNS`: lines of (column, shade, text)."""
    lines: list[list[tuple[int, int, str]]] = [[]]
    column = 0
    for number, (_, piece) in enumerate(pieces):
        for index, part in enumerate(piece.split("\n")):
            if index:
                lines.append([])
                column = 0
            while part:
                if column == _COLUMNS:
                    lines.append([])
                    column = 0
                fits = part[: _COLUMNS - column]
                lines[-1].append((column, number % 2, fits))
                column, part = column + len(fits), part[len(fits) :]
    return lines
