"""README, CONTRIBUTING, docs/ and reports/: what they point to is there, and what they tell to type runs."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
import typer.main
from made_up import nox_sessions

import marsbench
from marsbench.cli import app
from marsbench.evaluation.benchmarks import benchmarks
from marsbench.methods import METHODS
from marsbench.presets import preset
from marsbench.studies import items
from marsbench.training.stages import stage

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]  # written by hand
LOCAL = re.compile(r"/reports/(micro|[^/]+/[^/]*seed\d+)/")  # pages that are not committed, of whatever was run here
PAGES = [*GUIDES, *(page for page in sorted((ROOT / "reports").rglob("*.md")) if not LOCAL.search(page.as_posix()))]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w-]*)[^`]*$")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
SESSION_COMMANDS = {
    "speedup-sweep": ["sweep"],
    "report": ["report"],
    "reproduce": ["reproduce"],
}  # besides reproduce-NAME


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    line: int  # of its first line of code, from 1
    code: str


class Typed(NamedTuple):
    """A command line in a guide."""

    where: str
    words: list[str]


@cache
def parted(page: Path) -> tuple[str, list[Block]]:
    """A page's prose, with as many lines as the page, and its blocks of code."""
    prose, blocks, code = [], list[Block](), list[str]()
    opened: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence is None:
            prose.append(line)
            continue
        prose.append("")
        if opened is None:
            opened, start, code = fence, number + 1, []
        elif fence and fence["fence"].startswith(opened["fence"]) and not fence["language"]:
            blocks.append(Block(opened["language"], start, "\n".join(code)))
            opened = None
        else:
            code.append(line.removeprefix(opened["indent"]))
    assert opened is None, f"{page}: a block of code that is never closed"
    return "\n".join(prose), blocks


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(params=PAGES, ids=named)
def page(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(params=GUIDES, ids=named)
def guide(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


# ---- the README


def test_readme_fits_on_a_page() -> None:
    """Guards against a front door that grows back into a manual."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_contributing_shows_every_room_once() -> None:
    """Guards against a room that the tree forgets, repeats, or still shows after it is gone."""
    package = Path(marsbench.__file__).parent
    rooms = Counter(folder.parent.name for folder in package.glob("*/__init__.py"))
    (tree,) = (block.code for block in parted(ROOT / "CONTRIBUTING.md")[1] if block.code.startswith("marsbench/"))
    assert Counter(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == rooms


def test_readme_has_one_place_for_rendered_numbers() -> None:
    """Guards against markers that the renderer of the README's numbers would not find."""
    marks = re.findall(r"^<!-- rendered by marsbench report: (\w+) -->$", README.read_text(encoding="utf-8"), re.M)
    assert marks == ["begin", "end"]


# ---- links


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading, before duplicates are numbered."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().rstrip("#").strip())
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """All anchors of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+)$", parted(page)[0], re.MULTILINE):
        plain = slug(heading)
        numbered = plain
        while numbered in found:
            numbered = f"{plain}-{int(numbered.removeprefix(plain).lstrip('-') or 0) + 1}"
        found.append(numbered)
    return frozenset(found)


def test_links_lead_somewhere(page: Path) -> None:
    """Guards against links and images to files that were moved, and anchors of headings that were renamed."""
    prose = re.sub(r"(`+)(?:(?!\1).)+\1", "", parted(page)[0])
    broken = []
    for link in LINK.findall(prose):
        if re.match(r"[a-z][a-z+.-]*:", link):  # http:, mailto:
            continue
        file, _, anchor = unquote(link).partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


# ---- commands


def commands(code: str) -> Iterator[str]:
    """The commands of a console block: what follows a `$ `, with its continuations behind `> ` or a backslash."""
    command: str | None = None
    for line in code.splitlines():
        if command is not None and (line.startswith("> ") or command.endswith("\\")):
            command = f"{command.removesuffix(chr(92))}\n{line.removeprefix('> ')}"
            continue
        if command is not None:
            yield command
        command = line.removeprefix("$ ") if line.startswith("$ ") else None
    if command is not None:
        yield command


def simple_commands(command: str) -> Iterator[list[str]]:
    """The words of each simple command in a command line, loops and lists taken apart, comments left out."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        elif words or not (word in ("do", "then", "else", "time") or re.match(r"\w+=", word)):
            words.append(word)


def marsbench_words(words: Sequence[str]) -> list[str] | None:
    """What stands behind `marsbench`, `python -m marsbench` or `nox -s SESSION --`; None for other programs."""
    if words[:1] == ["marsbench"]:
        return list(words[1:])
    if words[:2] == ["nox", "-s"] and len(words) > 2:
        session, passed = words[2], list(words[4:]) if words[3:4] == ["--"] else []
        if session.startswith("reproduce-"):
            return ["reproduce", session.removeprefix("reproduce-"), *passed]
        return [*SESSION_COMMANDS[session], *passed] if session in SESSION_COMMANDS else None
    for place, pair in enumerate(pairwise(words)):
        if pair == ("-m", "marsbench"):
            return list(words[place + 2 :])
    return None


def typed(guide: Path) -> list[Typed]:
    """Every marsbench command in the console blocks of a guide."""
    return [
        Typed(" ".join(words), found)
        for block in parted(guide)[1]
        if block.language == "console"
        for command in commands(block.code)
        for words in simple_commands(command)
        if (found := marsbench_words(words)) is not None
    ]


def mentioned(guide: Path) -> list[Typed]:
    """Every marsbench command in the prose and the tables of a guide, whole or not."""
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", parted(guide)[0])
    return [
        Typed(span, found)
        for span in spans
        if span.startswith(("marsbench ", "nox -s ", "accelerate launch "))
        for words in simple_commands(span)
        if (found := marsbench_words(words)) is not None
    ]


def parse(words: list[str]) -> dict[str, Any]:
    """The values that a command would run with, and its name under `command`; raises if it cannot be parsed."""
    program: Any = typer.main.get_command(app)
    with program.make_context("marsbench", list(words)) as context:
        name, command, rest = program.resolve_command(context, list(words))
        with command.make_context(name, rest, parent=context) as own:
            return {**own.params, "command": name}


def complaint(words: list[str]) -> str:
    """What the command line says against a command, "" if nothing."""
    try:
        check_names(parse(words))
    except Exception as error:  # a usage error of whichever click typer brings along, or a `UserError`
        asks_for_help = getattr(error, "exit_code", None) == 0
        return "" if asks_for_help else f"{type(error).__name__}: {getattr(error, 'message', '') or error}"
    return ""


def check_names(values: dict[str, Any]) -> None:
    """Raise if a command's values name a scale, stage, method, benchmark or page that does not exist."""

    def given(name: str) -> list[str]:
        value = values.get(name) or []
        return value.split(",") if isinstance(value, str) else list(value)

    list(map(preset, given("scale")))
    list(map(stage, given("stage")))
    benchmarks([*given("benchmark"), *given("benchmarks")])
    pages = [page for page in given("what") if values["command"] == "reproduce"]
    unknown = [*(set(pages) - {"all", *[item.key for item in items()]}), *(set(given("method")) - METHODS.keys())]
    assert not unknown, unknown


def test_commands_parse(guide: Path) -> None:
    """Guards against guides that tell to type a command, an option or a value that the command line refuses."""
    wrong = {one.where: said for one in typed(guide) if (said := complaint(one.words))}
    assert not wrong


def test_mentioned_commands_have_their_options(guide: Path) -> None:
    """Guards against commands in prose and tables whose name or options the command line does not know."""
    program: Any = typer.main.get_command(app)
    wrong = []
    for where, words in mentioned(guide):
        if not words or words[0].startswith("-"):
            continue
        command = program.commands.get(words[0])
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
        given = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        if command is None or given - known:
            wrong.append(where)
    assert not wrong


def test_files_that_commands_take_are_there(guide: Path) -> None:
    """Guards against commands and prose that name a file of the package which was moved."""
    text = guide.read_text(encoding="utf-8")
    files = set(re.findall(r"(?<![\w/.])(?:marsbench|docs|tests|\.github)/[\w./-]+\.(?:ya?ml|py|md|jsonl)\b", text))
    assert not sorted(file for file in files if not (ROOT / file).exists() and "NAME" not in file)


def test_sessions_exist(guide: Path) -> None:
    """Guards against guides that name a nox session which was renamed."""
    named = set(re.findall(r"\bnox -s ([\w-]+)", guide.read_text(encoding="utf-8")))
    assert not named - nox_sessions()


# ---- Python


def test_python_examples_compile(guide: Path) -> None:
    """Guards against examples that are no Python."""
    for block in parted(guide)[1]:
        if block.language == "python":
            compile("\n" * (block.line - 1) + block.code, str(guide), "exec")
