"""Findings: what rows say. Cells are found, claims judged, training seeds put together; nothing is printed here."""
