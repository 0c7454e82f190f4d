"""Where `Graphs` lay before compiled steps had a room of their own, for callers elsewhere that import it from here."""

from marsbench.compiled.graphs import Graphs

__all__ = ["Graphs"]
