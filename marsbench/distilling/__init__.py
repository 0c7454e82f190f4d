"""A model's own answers to given prompts, as chat data to train on: prompts and a model are all it takes."""
