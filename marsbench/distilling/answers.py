"""Answers as they come: what is kept of each, and the file that an interrupted run goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from marsbench.distilling.chats import Spelling
from marsbench.errors import UserError
from marsbench.json_lines import Log
from marsbench.locks import LockedError, locked

Reason = Literal["cut", "empty", "lost"]  # why an answer is left out


@dataclass(frozen=True)
class Response:
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


class ResponseLog:
    """Every answer, on disk as soon as it is there, behind a first line that says how all of them came about."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Open a log, with the answers in it.

        Raises:
            UserError: it holds answers that came about otherwise, or lines that are none.
        """
        self._log = Log(
            file, lambda record: record if "settings" in record else Response(**record),
            what="a line that distill has written",
            mend="remove the line, and its prompt is answered again; without line 1, remove the file",
        )  # fmt: skip
        lines: list[Response | dict[str, Any]] = self._log.records()
        self._head = None if lines else {"settings": settings}
        if lines:
            self._check(lines[0]["settings"] if isinstance(lines[0], dict) else {}, settings)
        # By prompt and sample.
        self.answers = {(one.prompt, one.sample): one for one in lines if isinstance(one, Response)}

    def add(self, answer: Response) -> None:
        """Keep an answer; it is on disk when this returns."""
        if self._head is not None:
            self._log.append(self._head)
            self._head = None
        self._log.append(vars(answer))
        self.answers[answer.prompt, answer.sample] = answer

    def _check(self, theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Refuse to mix answers that came about in different ways."""
        other = [
            f"{name} {theirs.get(name)}, not {value}" for name, value in settings.items() if theirs.get(name) != value
        ]
        if other:
            raise UserError(
                f"the answers so far are of another run ({'; '.join(other)})",
                where=str(self._log.file),
                fix="type what was typed then, or choose another --out; removing this file gives its answers up",
            )


@contextmanager
def alone_with(file: Path) -> Iterator[None]:
    """Keeps a second command from answering the same prompts into the same file meanwhile."""
    try:
        with locked(file.with_name(f"{file.name}.lock"), patience_s=0.0):
            yield
    except LockedError as error:
        raise UserError(
            "another command is writing these answers", where=str(file), fix="wait for it, or choose another --out"
        ) from error
