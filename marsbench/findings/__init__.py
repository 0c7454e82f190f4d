"""Findings: what rows say. Cells are found, claims judged, training seeds put together; no page is made here."""
