"""Findings: what rows mean: cells, judged claims, training seeds put together. It makes no page."""
