"""What kind of token a token is: which kinds a model says several of in one forward pass?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

DIGITS, SYMBOLS, CODE = "digits", "symbols", "code"
TEMPLATE, CONTENT, END = "template words", "content words", "end"
CLASSES = (DIGITS, SYMBOLS, CODE, TEMPLATE, CONTENT, END)
CODE_BENCHMARK = "humaneval"  # its answers are programs, and those of its mini counterpart


def token_class(text: str | None, *, code: bool, template: Collection[str]) -> str:
    """The class of a token.

    `text` is what it adds to the text, None for the end of the answer; `code` says whether that is a program.

    Returns:
        `end` for the end; a token with a letter in it is `code` in a program (a keyword or a name) and elsewhere a
        word, `template words` or `content words`; of the others, those with a digit are `digits`, and the rest
        (operators, punctuation, white space, parts of characters) are `symbols`.
    """
    if text is None:
        return END
    if any(character.isalpha() for character in text):
        return CODE if code else TEMPLATE if text.strip() in template else CONTENT
    return DIGITS if any(character.isdecimal() for character in text) else SYMBOLS


def template_words(answers: Sequence[Sequence[str]]) -> set[str]:
    """The words that answers to one benchmark have in common whatever was asked: those in half of them or more."""
    seen = Counter(
        word
        for texts in answers
        for word in {text.strip() for text in texts if any(character.isalpha() for character in text)}
    )
    return {word for word, count in seen.items() if 2 * count >= len(answers)}
