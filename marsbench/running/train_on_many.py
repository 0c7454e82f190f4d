"""One training over several GPUs of this machine: `accelerate launch` starts this module once for each.

The processes share the work of every step (FSDP) and leave the checkpoint; whoever started them makes its row.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from marsbench.errors import UserError
from marsbench.executors.tasks import Task
from marsbench.paths import PACKAGE
from marsbench.progress import Reporter

_LAUNCH = PACKAGE / "presets" / "launch" / "fsdp.yaml"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal to get when the parent dies


def train_on_many(task: Task, processes: int, logs: Path) -> None:
    """Have so many processes carry out a training together, as the shipped FSDP configuration says.

    What they say goes to the log of this one. `UserError` where one has failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=logs, suffix=".task") as file:
        file.write(pickle.dumps(task))
        file.flush()
        how = ["--config_file", str(_LAUNCH), "--num_processes", str(processes), "--main_process_port", "0"]
        command = [sys.executable, "-m", "accelerate.commands.launch", *how, "-m", __name__, file.name]
        on_linux = sys.platform == "linux"
        done = subprocess.run(
            command, stderr=sys.stderr, stdout=sys.stderr, check=False,
            # Has Linux end it when this process is killed.
            preexec_fn=(lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)) if on_linux else None,
        )  # fmt: skip
    if done.returncode:
        raise UserError(
            f"a process of a training on {processes} GPUs ended with status {done.returncode}",
            fix="mend what the log says; the same command then goes on where it stopped",
        )


def is_launched() -> bool:
    """Whether this is one of the processes of a training that `accelerate launch` has started."""
    return "LOCAL_RANK" in os.environ


if __name__ == "__main__":  # one of several processes that carry out the task which a file holds
    launched: Task = pickle.loads(Path(sys.argv[1]).read_bytes())
    launched.run([], Reporter())
