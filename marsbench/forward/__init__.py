"""The forward pass that every method shares: a window of entries in, the model's answer out; the ragged KV cache."""
