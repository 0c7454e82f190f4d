"""Lines that a server writes down on the side, and that never end it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20  # of a log, before it is moved aside and begun anew


class Log:
    """JSON Lines behind those that a file has. What cannot be written is said once, and nothing more is written then.

    A file that has grown too long gets the name with `.1` behind it, in place of the one before. Every file begins
    with what `head` says.
    """

    def __init__(self, file: Path | None, say: Callable[[str], object], head: Callable[[], Any] | None = None) -> None:
        self._file, self._say, self._head = file, say, head
        self._stream = file.open("a", encoding="utf-8") if file else None
        self._bytes = file.stat().st_size if file else 0
        self._begin()

    def write(self, line: Any) -> None:
        """Add a line."""
        if self._stream is None or self._file is None:
            return
        text = json.dumps(line, default=vars) + "\n"
        try:
            self._stream.write(text)
            self._stream.flush()
            self._bytes += len(text)
            if self._bytes > MOST_BYTES and self._file.is_file():
                self._stream.close()
                self._file.replace(self._file.with_name(f"{self._file.name}.1"))
                self._stream, self._bytes = self._file.open("a", encoding="utf-8"), 0
                self._begin()
        except OSError as error:
            with suppress(OSError):  # where it is said may be full too
                self._say(f"warning: nothing more is written to {self._file}: {error.strerror or error}")
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def _begin(self) -> None:
        if self._head is not None:
            self.write(self._head())
