"""README, CONTRIBUTING, docs/ and reports/: their links lead somewhere, and their commands run."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import unquote

import pytest
import typer.main
from made_up import ROOT, nox_sessions

from marsbench.cli import app
from marsbench.evaluation.benchmarks import benchmarks
from marsbench.files import PACKAGE
from marsbench.methods import METHODS
from marsbench.presets import preset
from marsbench.studies import items
from marsbench.training.stages import stage

README = ROOT / "README.md"
GUIDES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]  # written by hand
LOCAL = re.compile(r"/reports/(micro|[^/]+/[^/]*seed\d+)/")  # pages that are not committed, of runs in this checkout
PAGES = [*GUIDES, *(page for page in sorted((ROOT / "reports").rglob("*.md")) if not LOCAL.search(page.as_posix()))]
BLOCK = re.compile(r"^ *(?P<fence>`{3,}|~{3,}) *(?P<language>[\w-]*)\n(?P<code>.*?)^ *(?P=fence) *$", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
PROGRAM: Any = typer.main.get_command(app)


@cache
def parted(page: Path) -> tuple[str, list[tuple[str, str]]]:
    """A page's prose, and its blocks of code with their languages."""
    text = page.read_text(encoding="utf-8")
    prose = BLOCK.sub("", text)
    assert not re.search(r"^ *(`{3}|~{3})", prose, re.MULTILINE), f"{page}: a block of code that is never closed"
    return prose, [(block["language"], dedent(block["code"])) for block in BLOCK.finditer(text)]


def test_the_readme_is_short() -> None:
    """Guards against a long README, marks that the renderer misses, and a search that finds no commands."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert re.findall(r"^<!-- rendered by marsbench report: (\w+) -->$", text, re.M) == ["begin", "end"]
    assert sum(len(typed(guide)) for guide in GUIDES) > 20


def test_contributing_names_what_the_code_has() -> None:
    """Guards against a room missing in its tree, and routes to a file, class or function that was moved or renamed."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"(?m)^  (\w+)/ ", text)) == sorted(at.parent.name for at in PACKAGE.glob("*/__init__.py"))
    code = {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    code[""] = "\n".join(code.values())  # of a class or a function() without a file
    spans = re.findall(r"`(?!tests/|marsbench/|MARSBENCH_)(?:([a-z_/]+\.py):?)?([\w.]*)(\(\))?`", text)
    named = [(at, part) for at, name, call in spans if at or call or name != name.lower() for part in name.split(".")]
    defined = "(?m)(?:def|class|as|import(?: .*,)?) {0}\\b|^ *{0}\\b.* = ".format
    known = [bool(re.search(defined(part), code.get(at, ""))) for at, part in named]
    assert len(known) > 40 and all(known), [name for name, there in zip(named, known, strict=True) if not there]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives a page's headings, of which the second with the same words is numbered."""
    names, seen = [], Counter[str]()
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", parted(page)[0], re.MULTILINE):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        plain = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.append(f"{plain}-{seen[plain]}" if seen[plain] else plain)
        seen[plain] += 1
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Guards against links and images to files that were moved, and anchors of headings that were renamed."""
    for link in LINK.findall(re.sub(r"(`+)(?:(?!\1).)+\1", "", parted(page)[0])):
        file, _, anchor = unquote(link).partition("#")
        target = (page.parent / file).resolve() if file else page
        if not re.match(r"[a-z][a-z+.-]*:", link):  # no http:, no mailto:
            assert target.exists() and (not anchor or anchor in anchors(target)), link


def simple_commands(command: str) -> Iterator[list[str]]:
    """The words of each simple command in a command line, loops and lists taken apart, comments left out."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            yield from [words] if words else []
            words = []
        elif words or not (word in ("do", "then", "else", "time") or re.match(r"\w+=", word)):
            words.append(word)


def marsbench_words(text: str) -> Iterator[list[str]]:
    """The arguments of marsbench in a command line: after `marsbench`, `-m marsbench` or `nox -s SESSION --`."""
    for words in simple_commands(text):
        if words[0] == "marsbench":
            yield words[1:]
        elif words[:2] == ["nox", "-s"] and len(words) > 2:
            command, *page = words[2].replace("speedup-sweep", "sweep").split("-", 1)
            if command in ("sweep", "report", "reproduce"):
                yield [command, *page, *(words[4:] if words[3:4] == ["--"] else [])]
        else:
            yield from (words[at + 2 :] for at, pair in enumerate(pairwise(words)) if pair == ("-m", "marsbench"))


def typed(guide: Path) -> list[list[str]]:
    """Every marsbench command in the console blocks of a guide, after a `$ ` and with its continuations."""
    blocks = [re.sub(r"\\\n(> )?", " ", code) for language, code in parted(guide)[1] if language == "console"]
    lines = re.findall(r"^\$ (.*(?:\n> .*)*)", "\n".join(blocks), re.MULTILINE)
    return [words for line in lines for words in marsbench_words(line.replace("\n> ", "\n"))]


def complaint(words: list[str]) -> str:
    """The error message of the command line for a command, "" if there is none."""
    try:
        with PROGRAM.make_context("marsbench", list(words)) as context:
            name, command, rest = PROGRAM.resolve_command(context, list(words))
            with command.make_context(name, rest, parent=context) as own:
                check_names({**own.params, "command": name})
    except Exception as error:  # a usage error of the click that typer brings along, or a `UserError`
        return "" if getattr(error, "exit_code", None) == 0 else repr(error)  # 0: it asks for help
    return ""


def check_names(values: dict[str, Any]) -> None:
    """Raise if a command's values name a scale, stage, method, benchmark or page that does not exist."""

    def names(name: str) -> list[str]:
        value = values.get(name) or []
        return value.split(",") if isinstance(value, str) else list(value)

    list(map(preset, names("scale")))
    list(map(stage, names("stage")))
    benchmarks([*names("benchmark"), *names("benchmarks")])
    pages = {page for page in names("what") if values["command"] == "reproduce"}
    assert not [*(pages - {"all", *[item.key for item in items()]}), *(set(names("method")) - METHODS.keys())]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_guide_tells_to_type_is_there(guide: Path) -> None:
    """Guards against commands, options and values that are refused, files and sessions that moved, broken code."""
    assert not {" ".join(words): message for words in typed(guide) if (message := complaint(words))}
    spans = re.findall(r"(?<!`)`((?:marsbench|nox -s|accelerate launch) [^`\n]+)`(?!`)", parted(guide)[0])
    for words in (words for span in spans for words in marsbench_words(span)):
        if words and not words[0].startswith("-"):
            known = {option for parameter in PROGRAM.commands[words[0]].params for option in parameter.opts}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}, words
    text = guide.read_text(encoding="utf-8")
    files = set(re.findall(r"(?<![\w/.])(?:marsbench|docs|tests|\.github)/[\w./-]+\.(?:ya?ml|py|md|jsonl)\b", text))
    assert not sorted(file for file in files if not (ROOT / file).exists() and "NAME" not in file)
    assert not {*re.findall(r"\bnox -s ([\w-]+)", text)} - nox_sessions()
    for language, code in parted(guide)[1]:
        if language == "python":
            compile(code, str(guide), "exec")
