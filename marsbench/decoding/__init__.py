"""Decoding: the one loop that every method shares, the rows in flight, and the acceptance rules."""
