"""What checks use: the device, a trained model from the package, and models of true size with random weights."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from marsbench import world
from marsbench.compiled.fixed import Steps
from marsbench.compiled.graphs import Graphs
from marsbench.decoding.engine import Batch, KindOfBatch, Method, OutsideMethod, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.files import PACKAGE
from marsbench.forward.window import without_cudnn_attention
from marsbench.line import renamed
from marsbench.methods import METHODS, Options, build_method
from marsbench.methods.carried import carried_over
from marsbench.racing.grid import Carried, draws_of
from marsbench.racing.race import Stopwatch
from marsbench.training import checkpoints
from marsbench.training.checkpoints import Loaded
from marsbench.training.data import chat_prompt
from marsbench.training.medusa import MedusaHeads

_BASES = PACKAGE / "presets" / "bases" / "mini"
BLOCK_SIZE = 4
_FEW = 3  # requests, of methods that decode one at a time
_THRESHOLD = 0.7  # of methods that take one: some tokens are accepted together, some are not
_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
_SHAPES: dict[str, tuple[int | bool, ...]] = {  # of Qwen2 models, by their scale
    "small": (1024, 64, 2, 128, 4, 2, True),
    "0.5b": (151_936, 896, 24, 4864, 14, 2, True),
    "7b": (152_064, 3584, 28, 18_944, 28, 4, False),
}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in what runs in a `with` block for longer; Windows, and threads, have no such limit."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    (outer, _), began = signal.getitimer(signal.ITIMER_REAL), time.monotonic()
    before = signal.signal(signal.SIGALRM, end)
    # Once more each second: what is raised in a destructor cannot be caught, and is lost.
    signal.setitimer(signal.ITIMER_REAL, min(seconds, outer or seconds), 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:  # a limit around this one
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer - (time.monotonic() - began)), 1)


class Tried(NamedTuple):
    name: str
    status: Literal["done", "timeout", "failed", "skipped"]
    reason: str
    seconds: float
    value: Any


def tried(name: str, work: Callable[[], Any], limit_s: float) -> Tried:
    ended, began = Tried(name, "done", "", 0.0, None), time.perf_counter()
    try:
        with at_most(limit_s):
            ended = ended._replace(value=work())
    except TimeoutError as error:
        ended = ended._replace(status="timeout", reason=str(error))
    except Exception as error:  # a driver's, a compiler's, a lack of memory
        ended = ended._replace(status="failed", reason=f"{type(error).__name__}: {error}"[:300])
    return ended._replace(seconds=round(time.perf_counter() - began, 3))


class Found(NamedTuple):
    holds: bool | None  # None where a check only measures
    facts: dict[str, Any]  # its numbers by name, units in names


@dataclass
class Bench:
    device: torch.device
    quick: bool = False
    say: Callable[[str], object] = lambda _: None  # told what is done at the moment

    def __post_init__(self) -> None:
        self.prompts, self.new_tokens = (6, 16) if self.quick else (24, 48)
        self.on_gpu = self.device.type == "cuda"
        self.called = torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"
        # The model that is timed: the paper's smaller one on a GPU, a stand-in on a CPU.
        self.size, self.half = ("0.5b", torch.bfloat16) if self.on_gpu else ("small", torch.float32)
        without_cudnn_attention()  # as training and decoding do: a check may call torch before either

    def trained(self, device: torch.device | None = None) -> Loaded:
        return checkpoints.load(_BASES / "base", device=str(device or self.device))

    @cached_property
    def requests(self) -> list[list[int]]:
        tokenizer = self.trained(torch.device("cpu")).tokenizer
        names = list(world.GENERATORS)
        drawn = [world.test_set(names[at % len(names)], self.prompts)[at] for at in range(self.prompts)]
        texts = [chat_prompt(tokenizer, chat.prompt) for chat in drawn]
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]

    def method(self, name: str, loaded: Loaded) -> Method | OutsideMethod:
        """A method with all that it needs; its heads are untrained, but they draft."""
        torch.manual_seed(1)
        model, draft = loaded.model, None
        heads = MedusaHeads(model.config.hidden_size).to(model.device, model.dtype)
        if "draft" in METHODS[name].needs:
            draft = checkpoints.load(_BASES / "draft_base", device=str(model.device)).model
        return build_method(name, Options(mask_id=loaded.mask_id, draft=draft, heads=heads))

    def answers(self, loaded: Loaded, name: str, kind: KindOfBatch = Batch, **ids: Any) -> list[list[int]]:
        """A method's answers to all requests in one batch; a method of one row answers a few, one at a time."""
        one_row = METHODS[name].one_row
        self.say(f"{name} on {loaded.model.device.type}{'' if kind is Batch else ', captured'}")
        method, threshold = self.method(name, loaded), _THRESHOLD if METHODS[name].takes_threshold else None
        prompts = self.requests[:_FEW] if one_row else self.requests
        requests = [Request(prompt, self.new_tokens, threshold) for prompt in prompts]
        settings = {"eos_id": loaded.tokenizer.eos_token_id, "pad_id": loaded.tokenizer.pad_token_id, **ids}
        rows = 1 if one_row else len(requests)
        return [made.tokens for made in decode(loaded.model, method, requests, batch_size=rows, kind=kind, **settings)]

    def captured(self) -> KindOfBatch:
        """Batches whose steps are graphs; on a CPU, the same steps of fixed shape operation by operation."""
        return partial(Batch, shapes=Graphs() if self.on_gpu else Steps())

    def random_model(self, size: str, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        shape: dict[str, Any] = dict(zip(_FIELDS, _SHAPES[size], strict=True))
        config = Qwen2Config(**shape, max_position_embeddings=4096)
        with self.device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]

    def timed(
        self, model: Any, name: str, *, rows: int, kind: KindOfBatch, options: Mapping[str, Any] | None = None,
        carried: Carried | None = None,
    ) -> "Timed":  # fmt: skip
        """Times one decode, after a warm-up of all its shapes; without options, MARS accepts all that it predicts."""
        self.say(f"{name}, {rows} at once{'' if kind is Batch else ', captured'}{', carried over' if carried else ''}")
        given = {"block_size": BLOCK_SIZE, **({"threshold": 0.0} if name == "mars" else {}), **(options or {})}
        threshold = given.pop("threshold", None)
        method: Any = build_method(name, Options(mask_id=3, **renamed(given)))
        if carried is not None:
            method = carried_over(method, draws_of(carried.rates), self.device)
        length, new = (16, self.new_tokens) if self.quick else (256, 64)
        new *= given["block_size"] if threshold == 0 else 1  # as many steps
        prompts = [[5 + (7 * place + row) % 500 for place in range(length)] for row in range(rows)]
        requests = [Request(prompt, new, threshold, ignore_eos=True) for prompt in prompts]
        for _ in range(2):
            watch = Stopwatch()
            done = decode(model, method, requests, eos_id=2, pad_id=0, batch_size=rows, meter=watch, kind=kind)
        steps = [after - before for before, after in zip(watch.stamps, watch.stamps[1:], strict=False)]
        tokens = sum(answer.emitted - 1 for answer in done)
        return Timed(steps, done, length, tokens / (watch.stamps[-1] - watch.stamps[0]))

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None

    def forget_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


class Timed(NamedTuple):
    """Seconds of every step but the first, and the answers."""

    steps: Sequence[float]
    done: Sequence[Generation]
    context: int = 0  # tokens of each prompt
    tokens_per_second: float = 0.0  # of all rows, after their first token
