"""Scoring: the benchmark registry, the code sandbox and paired statistics."""
