"""Decoding: the one loop, the ragged KV cache and the acceptance rules that every method shares."""
