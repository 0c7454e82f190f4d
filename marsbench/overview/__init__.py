"""What is about all studies together: the whole paper reproduced, the index, README's numbers."""

# What every process that works for a run imports: between them, all that takes seconds.
PRELOAD = (
    "marsbench.overview.work", "marsbench.racing.sweep", "marsbench.running.cells", "marsbench.training.trainer",
)  # fmt: skip
