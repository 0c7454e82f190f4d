"""README's first screen: rendered from the committed rows (see `test_reproduce.py`), and from nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from marsbench.overview.front_door import BEGIN, END
from marsbench.overview.pages import whole_paper, write_whole_paper

ROOT = Path(__file__).resolve().parent.parent


def test_the_first_screen_answers_what_a_reader_asks() -> None:
    """Guards against a first page without numbers, or with a table that no race stands behind."""
    shown = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    for what in ("the paper", "Shape of 7B", "Real model", "Toy", "**Not measured:**", "reckoned", "1,205 prompts"):
        assert what in shown
    assert "not run" not in shown and "n/a" not in shown and "broken" not in shown


def test_only_a_readme_with_the_marks_is_written(tmp_path: Path) -> None:
    """Guards against a user's own README overwritten, and one that changes when another scale is measured."""
    shutil.copytree(ROOT / "results" / "mini", tmp_path / "results" / "mini", ignore=shutil.ignore_patterns("seed*"))
    readme = tmp_path / "README.md"
    assert readme not in whole_paper(tmp_path, "mini")
    readme.write_text("# Mine\n")
    assert readme not in whole_paper(tmp_path, "mini")
    readme.write_text(f"# Mine\n\n{BEGIN}\nstale numbers\n{END}\n\nThe rest.\n")
    assert readme not in whole_paper(tmp_path, "micro")
    write_whole_paper(tmp_path, "mini")
    text = readme.read_text()
    assert text.startswith("# Mine\n") and text.endswith("\n\nThe rest.\n") and "stale numbers" not in text
    assert "5 seeds" not in text
