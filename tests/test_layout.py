"""Layouts: the prose of pages in Markdown, with slots for what rows say."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from marsbench.paths import PACKAGE
from marsbench.rendering import markdown
from marsbench.rendering.markdown import filled

LAYOUT = """# Speed at scale {scale}

- Fast: {fast}.
- Slow: {slow}.

A paragraph that is
wrapped, on {scale}.

It is {slow} slow.

{slow}

---
## A section

Its words.

{slow}

---
## Another

{fast}

{slow}

| a | b |
|---|---|
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(LAYOUT, encoding="utf-8")
    monkeypatch.setattr(markdown.resources, "files", lambda package: tmp_path)


@pytest.mark.usefixtures("written")
def test_what_has_nothing_to_say_is_left_out() -> None:
    """Guards against headings over nothing, half sentences, and paragraphs broken where the file wraps."""
    first, section, other = filled("any", "page.md", {"scale": "mini", "fast": "1 {slow}", "slow": ""})
    assert first == ("# Speed at scale mini\n\n- Fast: 1 {slow}.\n\nA paragraph that is wrapped, on mini."), (
        "what fills a slot is no layout"
    )
    assert section == ""
    assert other == "## Another\n\n1 {slow}\n\n| a | b |\n|---|---|"


@pytest.mark.usefixtures("written")
def test_a_slot_that_nobody_fills_is_refused() -> None:
    """Guards against a page that silently lacks what its layout asks for."""
    with pytest.raises(KeyError, match="slow"):
        filled("any", "page.md", {"scale": "mini", "fast": "1"})


def test_every_layout_has_slots_and_fits_a_line() -> None:
    """Guards against a layout with a stray brace, which nothing could fill, and lines that nobody can read."""
    files = [file for room in ("studies", "overview") for file in (PACKAGE / room).rglob("*.md")]
    assert len(files) > 6
    for file in files:
        text = file.read_text(encoding="utf-8")
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        assert names and all(name.isidentifier() for name in names), file
        assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|")), file
