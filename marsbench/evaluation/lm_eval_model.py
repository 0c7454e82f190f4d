"""The model that `lm_eval --model marsbench` runs: a checkpoint decoded by our engine on lm-eval's own tasks."""

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import gather, gather_object
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import handle_arg_string, simple_parse_args_string

from marsbench.answering import CHANGES_TOKENS, ROWS, Answering, load_aloud
from marsbench.decoding.generation import Generation, Request, seed_of
from marsbench.errors import UserError, integer, told_to_user
from marsbench.evaluation.answers import cut_text
from marsbench.evaluation.harness import GeneratingLM, cut_in_words, stops_of, without_beginning
from marsbench.forward.limits import context_length, room_for_prompt
from marsbench.forward.native import use_torch
from marsbench.lm_eval_plugin import register
from marsbench.methods import METHODS, Decoding
from marsbench.progress import Reporter, all_processes

_DEFAULT_LIMIT = 256  # new tokens where a task sets no limit, as in lm-eval's own models
_CUTS: dict[str, type] = {"top_k": int, "top_p": float, "min_p": float}
# Settings that no method here has -> the values by which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **CHANGES_TOKENS, **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("length_penalty", "typical_p", "num_return_sequences", "n"), (1,)), "early_stopping": (False,),
    "use_cache": (True, False),
}  # fmt: skip
_LEAVE_OUT = "leave it out of the task's generation_kwargs and of --gen_kwargs"


def _counted(keys: Iterable[Hashable]) -> list[int]:
    """How often each of the keys has come before."""
    seen = defaultdict[Hashable, Iterator[int]](count)
    return [next(seen[key]) for key in keys]


def _asked_for(settings: Mapping[str, Any], where: str) -> Request:
    """What lm-eval asks for, as a request without its prompt; `UserError` for what no method here does."""
    given = {name: value if name == "until" else _value(value) for name, value in settings.items() if value is not None}
    for name in ("top_k", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        if name in given:
            integer(given[name], name, where=where)
    usual = {"temperature": float(given.get("do_sample") is True)}
    with told_to_user("settings of generation cannot be read", TypeError, ValueError, where=where, fix=_LEAVE_OUT):
        read: dict[str, Any] = dict(normalize_gen_kwargs(usual | given, _DEFAULT_LIMIT))
        temperature, until, samples = float(read.pop("temperature")), read.pop("until"), read.pop("do_sample")
        cut = {name: kind(read.pop(name)) for name, kind in _CUTS.items() if name in read}
    chosen = {"max_new_tokens": read.pop("max_gen_toks"), "seed": read.pop("seed", 0)}
    wrong = [name for name, value in read.items() if value not in _NEUTRAL.get(name, ())]
    wrong += [] if isinstance(samples, bool) else ["do_sample"]
    wrong += [] if temperature >= 0 and not isinstance(given.get("temperature"), bool) else ["temperature"]
    wrong += [] if all(isinstance(stop, str) for stop in until) else ["until"]
    for name in wrong:
        raise UserError(f"no method here does {name}={settings[name]!r}", where=where, fix=_LEAVE_OUT)
    return Request((), **chosen, **({"temperature": temperature} | cut if samples and temperature else {}))


def _on_command_line() -> bool:
    """Whether this is `lm_eval ...` or `python -m lm_eval ...`, and not a program that calls lm-eval."""
    program = Path(sys.argv[0])
    return program.stem in ("lm_eval", "lm-eval") or program.parts[-2:] == ("lm_eval", "__main__.py")


@contextmanager
def _explained() -> Iterator[None]:
    """On lm-eval's command line, a mistake that the user can mend is one message and exit status 2, as on our own."""
    try:
        yield
    except UserError as error:
        if not _on_command_line():
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


class MarsbenchLM(GeneratingLM):
    """A checkpoint and a decoding method; every process of `accelerate launch` answers its share of the questions."""

    def __init__(
        self, pretrained: str | None = None, adapter: str | None = None, batch_size: int | str = ROWS,
        max_batch_size: int | None = None, device: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Load a checkpoint; `options` are fields of `Decoding`. Without CUDA, or in several processes, we choose."""
        super().__init__()
        options = {name: value for name, given in options.items() if (value := _value(given)) is not None}
        decoding = Decoding.of(options, "--model_args", ("pretrained", "adapter", "batch_size", "device"))
        if not pretrained:
            raise UserError("no checkpoint is named", fix="give --model_args pretrained=FOLDER_OR_HUB_NAME")
        method = decoding.check().method
        rows = ROWS if str(batch_size).startswith("auto") else _value(batch_size)
        rows = integer(rows, "batch size", least=1, fix="give 1 or more, or auto")
        if not decoding.pack:
            use_torch()
        self._processes = state = all_processes()
        self._rank, self._world_size = state.process_index, state.num_processes
        if state.num_processes > 1 or device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = state.device
        self._device = torch.device(device)
        how: dict[str, Any] = {"dtype": getattr(torch, decoding.dtype), "device": self._device}
        loaded = load_aloud(str(pretrained), Reporter(), **how, adapter=adapter)
        companion = load_aloud(decoding.draft, Reporter(), **how) if decoding.draft else None
        rows = 1 if METHODS[method].one_row else min(rows, max_batch_size or rows)
        self.tokenizer_name = str(loaded.tokenizer.name_or_path)
        self._answering = Answering.of_decoding(decoding, loaded, companion, Reporter(), rows)
        self._tokenizer = loaded.tokenizer
        self.batch_sizes = {"rows": rows}  # lm-eval writes and prints them beside its own idea
        self._emitted = self._forwards = 0

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    @_explained()
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """The model that lm-eval asks for, by `--model_args` and by options of its own; the former count more."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if _on_command_line() and given.get("batch_size") == 1:
            del given["batch_size"]  # the number is lm-eval's own default; what a user types there is text
        return cls(**(given | dict(arg_dict)))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        generations = self._answers(requests)
        # Added up over all processes; requests that only even out the processes do not count.
        copies = zip(requests, generations, _counted(map(id, requests)), strict=True)
        own = [generation for request, generation, copy in copies if copy < (request.repeats or 1)]
        counts = [sum(generation.emitted for generation in own), sum(generation.forwards for generation in own)]
        emitted, forwards = self.all_gather(torch.tensor([counts], device=self._device)).sum(0).tolist()
        self._emitted, self._forwards = self._emitted + emitted, self._forwards + forwards
        speed = f"{self._emitted / self._forwards:.2f} tokens per forward pass"
        counted = f"{self._emitted:,} tokens, {self._forwards:,} passes"
        Reporter().say(f"{self._answering.method.name}: {speed} ({counted})")
        texts = [self._answering.text(generation.tokens) for generation in generations]
        return [cut_text(text, stops_of(request)) for text, request in zip(texts, requests, strict=True)]

    @_explained()
    def _answers(self, requests: list[Instance]) -> list[Generation]:
        """Decode, with a bar; what is cut off prompts is said first."""
        todo, cuts = list[Request](), dict[str, list[tuple[int, int]]]()  # by task
        model, tokenizer = self._answering.loaded.model, self._answering.loaded.tokenizer
        draws = _counted((request.task_name, request.doc_id, request.idx) for request in requests)
        for request, draw in zip(requests, draws, strict=True):
            context, settings = request.args
            asked = _asked_for(settings, f"generation_kwargs of {request.task_name}")
            limit = min(asked.max_new_tokens, context_length(model) - 1)
            room = room_for_prompt(model, limit)
            begun = context.startswith(tokenizer.bos_token or context)  # by the chat template; else as lm-eval does
            ids, cut = without_beginning(tokenizer(context, add_special_tokens=not begun).input_ids, room)
            seed, threshold = seed_of(asked.seed, request.doc_id + (draw << 32)), self._answering.threshold
            todo.append(replace(asked, prompt_ids=ids, max_new_tokens=limit, threshold=threshold, seed=seed))
            cuts.setdefault(request.task_name, []).append((cut, room))
        for task, of_task in cuts.items():
            Reporter().say_once(cut_in_words(task, [cut for cut, _ in of_task], min(room for _, room in of_task)))
        return self._answering.decode_all(todo, Reporter(), "answering")

    def get_model_info(self) -> dict[str, Any]:
        return {
            "processes": self._world_size, "method": self._answering.method.name,
            "threshold": self._answering.threshold, "emitted_tokens": self._emitted, "forward_passes": self._forwards,
            "tokens_per_forward": self._emitted / self._forwards if self._forwards else None,
        }  # fmt: skip

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = gather(tensor)
        return whole

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered: list[Any] = gather_object([obj])
        return gathered if self._rank == dst else None

    def barrier(self) -> None:
        self._processes.wait_for_everyone()

    loglikelihood = loglikelihood_rolling = _explained()(GeneratingLM.loglikelihood)


def _value(given: Any) -> Any:
    """A value as lm-eval's command line would read it: text that says a number, yes or no, or nothing, is meant so."""
    return handle_arg_string(given) if isinstance(given, str) else given


register()  # for programs that imported torch before lm-eval
