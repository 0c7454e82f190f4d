"""Locks on files: who waits knows for whom, and nobody waits for ever for a machine that is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from marsbench import locks
from marsbench.errors import UserError
from marsbench.locks import locked
from marsbench.rows.workspace import Workspace


def refuse(number: int) -> Any:
    """A system whose file locks say so, whatever is asked."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return flock


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    """Guards against a command that hangs without a word."""
    file, told = tmp_path / "new" / "lock", list[str]()
    with locked(file) as waited:
        assert not waited
        us = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(UserError, match=us) as raised, locked(file, patience_s=0.1, say=told.append):
            pass
        assert raised.value.where == str(file) and told == [us]
    with locked(file) as waited:
        assert not waited


def test_a_lost_machine_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file that stands for a lock and stays behind with its holder, where there is no flock."""
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOSYS))
    monkeypatch.setattr(locks, "_LOST_S", 0.2)
    file = tmp_path / "lock"
    with locked(file):
        assert file.exists()
    file.write_text("7\nelsewhere\n")
    with pytest.raises(UserError, match="process 7 on elsewhere"), locked(file):
        pass


def test_a_file_system_that_cannot_lock_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback from the first row, after the first training."""
    Workspace(tmp_path, "micro").check_writable()
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    with pytest.raises(UserError, match="cannot be locked here") as raised:
        Workspace(tmp_path, "micro").check_writable()
    assert raised.value.where.endswith("rows.jsonl.lock")
