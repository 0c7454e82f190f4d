"""What tests share: the command line in this process, small models of random weights, packing for a while."""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner, Result

from marsbench.cli import app
from marsbench.forward.native import VARIABLE

GOLDEN = Path(__file__).parent / "golden"
Models = dict[str, PreTrainedModel]  # the golden checkpoints, by name
SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.5,
}  # fmt: skip
# Children are forked from a process that has imported everything: a new Python would take longer than its work.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["marsbench.overview.reproduction", "marsbench.studies.speedup", "marsbench.training.trainer"]
)
SMALLEST: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def invoke(*words: object, code: int = 0) -> Result:
    """The result of a command, which must end with the exit status `code`."""
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, (words, done.output[-2000:], done.exception)
    return done


def decode_by_command(folder: Path, prompts: Any, *options: object, method: str = "mars", code: int = 0) -> Result:
    """Decode prompts (a list, or the file's bytes) with the golden checkpoint; the output is `out.jsonl`."""
    source = folder / "in.jsonl"
    if isinstance(prompts, bytes):
        source.write_bytes(prompts)
    else:
        source.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts))
    ids = ["--eos-id", "2", "--pad-id", "0", "--mask-id", "3"]
    arguments = ["--model", GOLDEN / "mars", "--method", method, "--prompt-ids", source, "--max-new-tokens", "96"]
    return invoke("decode", *arguments, "--out", folder / "out.jsonl", *ids, *options, code=code)


def _type(words: list[str], log: str, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if words[0] != "lm_eval":
        app(words)
    else:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.tasks import TaskManager

        import marsbench.evaluation.lm_eval_model  # noqa: F401  torch came before lm_eval here

        # Tasks of the include path alone: it takes five seconds to find lm-eval's own thousands.
        TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
        sys.argv = words
        cli_evaluate()


def forked(*words: object, log: Path | str = os.devnull, **environment: object) -> Any:
    """A command, ours or lm_eval's, started in a process of its own; its output goes into a file."""
    variables = {name: str(value) for name, value in environment.items()}
    process = FORKED.Process(target=_type, args=([*map(str, words)], str(log), variables))
    process.start()
    return process


def in_company(log: Path, processes: int, *words: object) -> list[str]:
    """The output of each process of a command, started as `accelerate launch` does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": processes}
    logs = [log.with_suffix(f".{rank}") for rank in range(processes)]
    started = [forked(*words, log=file, RANK=rank, LOCAL_RANK=rank, **place) for rank, file in enumerate(logs)]
    ends = [(process.join(), process.exitcode)[1] for process in started]
    outputs = [file.read_text() for file in logs]
    assert not any(ends), outputs
    return outputs


def qwen2(seed: int | None = 0, **sizes: Any) -> Qwen2ForCausalLM:
    """A model of random weights; without a seed, the next random numbers."""
    if seed is not None:
        torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes)).eval()


def llama(seed: int | None = 0, **sizes: Any) -> LlamaForCausalLM:
    """A model of the other architecture that runs lean; its weights are random in the same way."""
    if seed is not None:
        torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).eval()


@contextmanager
def packing(on: bool) -> Iterator[None]:
    """Weights are packed, or not, within this context."""
    with patch.dict(os.environ, {VARIABLE: "1" if on else "0"}):
        yield
