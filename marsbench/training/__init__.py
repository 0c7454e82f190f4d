"""Training: attention patterns, losses, and the stages that turn a corpus into checkpoints."""
