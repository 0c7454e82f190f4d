"""A walk for practitioners: their model and prompts in, an adapter with its settings out."""
