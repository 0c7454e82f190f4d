"""Which tokens a threshold changes: the first difference of two answers, and what the page counts."""

from collections import Counter

import pytest
from made_up import answered, lines_of

from marsbench.decoding.generation import Generation
from marsbench.rows.kinds import BreakRow, Row
from marsbench.studies import breaks
from marsbench.studies.breaks import DIGITS, EARLIER, ELSEWHERE, END, KINDS, LATER, MARKS, PLAN, WORDS

EOS = 0
KIND = {EOS: END, 1: WORDS, 2: WORDS, 3: DIGITS, 4: MARKS, 5: DIGITS}


@pytest.mark.parametrize(
    ("tokens", "changed", "near"),
    [
        ([1, 2, 3, 4, 5, EOS], "", ""),
        ([1, 3, 4, 5, EOS], WORDS, LATER),  # it skips a word
        ([1, 2, 3, 4, EOS], DIGITS, LATER),  # the end comes early
        ([1, 2, 2, 4, 5, EOS], DIGITS, EARLIER),
        ([1, 2, 3, 1, 5, EOS], MARKS, EARLIER),  # from three places before
        ([1, 5, 3, 4, 5, EOS], WORDS, LATER),  # from three places behind
        ([5, 2, 3, 4, 5, EOS], WORDS, ELSEWHERE),  # four are too far
        ([1, 2, 3, 4, 5, 1], END, ELSEWHERE),
    ],
)
def test_the_first_change_is_found(tokens: list[int], changed: str, near: str) -> None:
    """Guards against an EOS that does not count (its number may be 0), a later change that does, a wrong distance."""
    single = Generation.of([1, 2, 3, 4, 5, EOS], [*range(6)], 6, "eos")
    several = Generation.of(tokens, [0, 0, 0, 1, 1, 1][: len(tokens)], 2, "length" if tokens[-1] else "eos")
    assert [*map(breaks.kind_of, (" so", "17", " 3", ".", "\n"))] == [WORDS, DIGITS, DIGITS, MARKS, MARKS]
    drafts, *change = breaks.compared(single, several, KIND.__getitem__)
    assert change == [changed, near]
    assert drafts == Counter(KIND[token] for place, token in enumerate(tokens) if place in (1, 2, 4, 5))


def test_the_page_counts_all_seeds() -> None:
    """Guards against changes of one seed alone, swapped flips, and rates over the wrong drafts."""
    line, name = PLAN.lines[2], "mini_gsm8k"
    drafts = {kind: [100, 100] for kind in KINDS}
    seeds: dict[int, list[Row]] = {
        seed: [
            answered(PLAN.lines[0], "gsm8k", [1, 0, 1], [9] * 3, [9] * 3),
            answered(line, "gsm8k", right, [9] * 3, [3] * 3),
            BreakRow(
                f"{seed}", "done", "", "mini", line.name, line.stage, line.method, line.options, benchmark=name,
                drafts=drafts, changed=["", WORDS], near=["", near],
            ),
        ]
        for seed, (right, near) in enumerate([([0, 0, 0], LATER), ([0, 1, 1], EARLIER)])
    }  # fmt: skip
    text = breaks.STUDY.render(seeds[0], "mini", seeds)
    assert "At tau = .95, 2 of 4 answers change: 3 are now wrong, and 1 now right." in text
    assert ["tau = .95", "2", "3", "1", "1", "1", "0", "5.0", "0.0", "0.0", "0.0"] in lines_of(text)
