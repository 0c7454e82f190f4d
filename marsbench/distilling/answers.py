"""Answers as they come: what is kept of each, and the file that an interrupted run goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from marsbench.distilling.chats import Spelling
from marsbench.errors import UserError
from marsbench.files import append_line, whole_lines

Reason = Literal["cut", "empty", "lost"]  # why an answer is left out


@dataclass(frozen=True)
class Answer:
    """One answer to one prompt."""

    prompt: int  # which one, from 0
    sample: int  # which of the answers to it, from 0
    text: str
    tokens: int  # an EOS counted once
    ended: bool  # with EOS, not at the limit
    spelling: Spelling

    def left_out(self, *, keep_cut: bool) -> Reason | None:
        """Why this answer is nothing to learn from, None where it is."""
        if not self.ended and not keep_cut:
            return "cut"
        if not self.text.strip():
            return "empty"
        return "lost" if self.spelling == "lost" else None


class AnswerLog:
    """Every answer, on disk as soon as it is there, behind a first line that says how all of them came about."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Open a log, with the answers in it.

        Raises:
            UserError: it holds answers that came about otherwise, or lines that are none.
        """
        self._file = file
        self.answers: dict[tuple[int, int], Answer] = {}  # by prompt and sample
        lines = whole_lines(file)
        if lines:
            self._check(lines[0], settings)
        for number, line in enumerate(lines[1:], 2):
            self._take(_object(line, file, number), number)
        if file.exists():
            os.truncate(file, sum(len(line) + 1 for line in lines))  # an interruption may have cut the last line short
        self._head = None if lines else json.dumps({"settings": settings})

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is on disk when this returns."""
        if self._head is not None:
            append_line(self._file, self._head)
            self._head = None
        append_line(self._file, json.dumps(vars(answer)))
        self.answers[answer.prompt, answer.sample] = answer

    def _check(self, line: bytes, settings: Mapping[str, Any]) -> None:
        """Refuse to mix answers that came about in different ways."""
        theirs = _object(line, self._file, 1).get("settings", {})
        other = [
            f"{name} {theirs.get(name)}, not {value}" for name, value in settings.items() if theirs.get(name) != value
        ]
        if other:
            raise UserError(
                f"the answers so far are of another run ({'; '.join(other)})",
                where=str(self._file),
                fix="type what was typed then, or choose another --out; removing this file gives its answers up",
            )

    def _take(self, fields: Any, number: int) -> None:
        try:
            answer = Answer(**fields)
        except TypeError as error:
            raise _no_answer(self._file, number) from error
        self.answers[answer.prompt, answer.sample] = answer


def _object(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise _no_answer(file, number) from error
    if not isinstance(found, dict):
        raise _no_answer(file, number)
    return found


def _no_answer(file: Path, number: int) -> UserError:
    return UserError(
        "not a line that distill has written", where=f"{file}, line {number}",
        fix="remove the line, and its prompt is answered again; without line 1, remove the file",
    )  # fmt: skip


@contextmanager
def alone_with(file: Path) -> Iterator[None]:
    """Keeps a second command from answering the same prompts into the same file meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{file}.lock", timeout=0):
            yield
    except Timeout as error:
        raise UserError(
            "another command is writing these answers", where=str(file), fix="wait for it, or choose another --out"
        ) from error
