"""Sweeps: which cells a table needs, how a cell is keyed and stored, and the runner that fills it in."""
