"""Measured rows: what their fields mean, how they are stored, and where a run keeps its things."""
