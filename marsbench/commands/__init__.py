"""The commands, one module per group. Imported for every `--help`: what is heavy, a function imports itself."""

from collections.abc import Callable

from marsbench.commands import decoding, evaluating, looking, reproducing, training

# In the order of a user's journey, which is the order in `marsbench --help`.
COMMANDS: dict[str, Callable[..., None]] = {
    # Is this machine ready, and what is there?
    "doctor": looking.doctor,
    "gpu-check": looking.gpu_check,
    "gpu-window": looking.gpu_window,
    "list": looking.list_,
    # The paper's tables.
    "plan": reproducing.plan,
    "reproduce": reproducing.reproduce,
    "report": reproducing.report,
    # How fast, against what.
    "sweep": reproducing.sweep,
    "results": reproducing.results,
    "tune": reproducing.tune,
    # A checkpoint of one's own, and how good it is.
    "fetch": training.fetch,
    "adapt": training.adapt,
    "distill": training.distill,
    "train": training.train,
    "training-speed": training.training_speed,
    "eval": evaluating.eval_,
    "score": evaluating.score,
    "compare": evaluating.compare,
    # What it writes.
    "show": decoding.show,
    "decode": decoding.decode,
    # And for others to use.
    "serve": decoding.serve,
    "export": training.export,
}
