"""Weights packed or not, for the time of a `with` block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from marsbench.forward.linear import VARIABLE, set_packing


@contextmanager
def packing(on: bool) -> Iterator[None]:
    """Have weights packed, or not, meanwhile."""
    with patch.dict(os.environ, {VARIABLE: ""}):
        set_packing(on)
        yield
