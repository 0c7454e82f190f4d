"""Measured rows: what their fields mean, how they are stored, where a run keeps its things, how rows are exported."""
