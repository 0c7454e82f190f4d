"""A model's own answers to given prompts, as chat data to train on: who has prompts and a model needs no other data."""
