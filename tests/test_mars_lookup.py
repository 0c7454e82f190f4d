"""Drafts from two sources: which goes first, what follows, and that neither changes a token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marsbench.decoding.generation import Layout
from marsbench.methods.mars_lookup import UNLIKELY, MarsLookup
from marsbench.methods.prompt_lookup import look_up

MASK = 3
# 7 8 9 stand twice before the end, the second time before 20 21; 5 6 stand before 30 31 32.
TEXT = [7, 8, 9, 10, 5, 6, 30, 31, 32, 7, 8, 9, 20, 21, 7, 8, 9]


def noted(method: MarsLookup, guesses: list[int], sure: float, end: int = 60) -> tuple[list[int], bool]:
    """The draft after TEXT, from the masks' guesses and their confidence, and whether masks follow it."""
    tokens = torch.zeros(1, 64, dtype=torch.long)
    tokens[0, : len(TEXT)] = torch.tensor(TEXT)
    rows, lengths = SimpleNamespace(end=torch.tensor([end])), torch.tensor([[len(TEXT)], [len(guesses)]])
    guessed = torch.tensor([guesses], dtype=torch.long)
    method._note(rows, tokens, lengths[0], guessed, lengths[1], torch.tensor([sure]))
    return [*rows.drafts[0, : int(rows.drafted)].tolist()], bool(rows.groups)


def joined(method: MarsLookup, guesses: list[int], sure: float, **how: Any) -> list[int]:
    return noted(method, guesses, sure, **how)[0]


@pytest.mark.parametrize("layout", ["groups", "linear"])
def test_who_is_likelier_right_goes_first(layout: Layout) -> None:
    """Guards against good guesses thrown away, bad ones in front, and masks forwarded needlessly or left out."""
    method = MarsLookup(MASK, window=3, draft_length=3, layout=layout)
    assert noted(method, [5, 6], UNLIKELY / 2) == ([20, 21, 7], False)
    assert noted(method, [], 0.0) == ([20, 21, 7], False)
    assert noted(method, [20, 21], 0.9) == ([20, 21, 7, 8, 9], True), "9 20 21 stood there before"
    assert noted(method, [50, 51], 0.9) == ([50, 51], True), "nothing is looked up after new words"


def test_long_and_late_matches_are_looked_up() -> None:
    """Guards against a short match after masks, drafts beyond the end or from a wrong place, and bounds off by one."""
    method = MarsLookup(MASK, window=3, draft_length=3, layout="linear")
    assert joined(method, [5, 6], 0.9) == [5, 6], "10 5 6 stood there, not 9 5 6"
    method = MarsLookup(MASK, window=3, draft_length=3)
    assert joined(method, [20, 21], 0.9, end=len(TEXT) + 4) == [20, 21, 7]
    assert joined(method, [20, 21], 0.9, end=len(TEXT) + 1) == []
    twice = torch.tensor([[5, 6, 7, 20, 9, 5, 6, 7, 21, 4, 7, 22, 5, 6, 7]])
    assert look_up(twice, torch.tensor([15]), 2, longest=3)[0].tolist() == [[21, 4]]
    tokens, length = torch.tensor([[5, 6, 7, 8, 6, 7, 0, 0]]), torch.tensor([6])
    counts = [look_up(tokens, length, 2, longest=3, shortest=shortest)[1].item() for shortest in (1, 2, 3)]
    assert counts == [2, 2, 0]
