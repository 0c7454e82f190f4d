"""The model that `lm_eval --model marsbench` runs: a checkpoint decoded by our engine on lm-eval's own tasks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import simple_parse_args_string

from marsbench.compiled.graphs import kind_of_batch
from marsbench.decoding.engine import context_length, decode
from marsbench.decoding.generation import PREFILL_POSITIONS, Generation, Request
from marsbench.errors import UserError, unknown_name
from marsbench.evaluation import lm_eval_arguments as arguments
from marsbench.evaluation.answers import cut_text
from marsbench.evaluation.harness import chat_text, cut_in_words, room_for_prompt, without_beginning
from marsbench.lm_eval_plugin import register
from marsbench.methods import METHODS
from marsbench.methods.fitting import default_ids, fit
from marsbench.methods.settings import load_aloud
from marsbench.progress import Reporter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_LIMIT = 256  # new tokens where a task sets no limit, as in lm-eval's own models


class MarsbenchLM(LM):  # type: ignore[misc]
    """A checkpoint and a decoding method; every process of `accelerate launch` answers its share of the questions.

    lm-eval gives stop strings as text: rows run to EOS or the limit, and the text is cut afterwards.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        method: str = "mars",
        threshold: float | None = None,
        accept: str | None = None,
        adapter: str | None = None,
        draft: str | None = None,
        untrained_masks: bool = False,
        dtype: str = "float32",
        batch_size: int | str = arguments.DEFAULT_ROWS,
        max_batch_size: int | None = None,
        prefill_positions: int | str = PREFILL_POSITIONS,
        compiled: bool | str = False,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Load a checkpoint.

        `batch_size` is of rows (`auto` is 16), `prefill_positions` of prompt tokens in one forward, at most. lm-eval
        says `device` cuda unless told otherwise, so without CUDA, or with several processes, each takes its own.
        `options` are fields of `marsbench.methods.Options`.

        Raises:
            UserError: an option that there is not or that is out of range, before anything is loaded, or a checkpoint
                that the method does not go with.
        """
        super().__init__()
        own = [name for name in inspect.signature(type(self)).parameters if name != "options"]
        arguments.check_names(options, own)
        threshold, untrained_masks = arguments.value(threshold), arguments.value(untrained_masks)
        options = {name: arguments.value(given) for name, given in options.items()}
        switches = {"untrained_masks": untrained_masks, "compiled": arguments.value(compiled)}
        arguments.check_values(pretrained, method, accept, threshold, switches, options)
        rows = arguments.rows(batch_size)
        self._prefill_positions = arguments.count(prefill_positions, "prefill positions {!r} are no number of tokens")
        if dtype not in _DTYPES:
            raise unknown_name("dtype", dtype, list(_DTYPES))
        state = PartialState(cpu=not torch.accelerator.is_available())
        self._rank, self._world_size = state.process_index, state.num_processes
        self._device = _device(device, state)
        how: dict[str, Any] = {"dtype": _DTYPES[dtype], "device": self._device}
        self._loaded = load_aloud(str(pretrained), Reporter(), **how, adapter=adapter)
        companion = load_aloud(draft, Reporter(), **how) if draft else None
        self._method = fit(method, self._loaded, draft=companion, untrained_masks=untrained_masks, **options)
        self._kind, not_compiled = kind_of_batch(self._loaded.model, self._method, switches["compiled"])
        Reporter().say_once(not_compiled)
        self._threshold = threshold
        self._batch_size = 1 if METHODS[method].one_row else min(rows, max_batch_size or rows)
        self.batch_sizes = {"rows": self._batch_size}  # lm-eval writes and prints them beside its own idea
        self._emitted = self._forwards = 0

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> MarsbenchLM:
        """The model that lm-eval asks for in one string; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> MarsbenchLM:
        """The model that lm-eval asks for, by `--model_args` and by options of its own; the former count more."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if arguments.on_command_line() and not arguments.asks_for_rows(sys.argv[1:]):
            given.pop("batch_size", None)  # lm-eval's default of 1, which nobody has asked for
        with arguments.explained():
            return cls(**(given | dict(arg_dict)))

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keys its request cache by."""
        return str(self._loaded.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the checkpoint's own template writes it."""
        return chat_text(self._loaded.tokenizer, chat_history, add_generation_prompt)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The model's answers, each cut at the first of its task's stop strings."""
        with arguments.explained():
            generations = self._answers(requests)
        self._count(requests, generations)
        Reporter().say(
            f"{self._method.name}: {self._emitted / self._forwards:.2f} tokens per forward pass "
            f"({self._emitted:,} tokens, {self._forwards:,} passes)"
        )
        decode_ids = self._loaded.tokenizer.decode
        texts = [str(decode_ids(generation.tokens, skip_special_tokens=True)) for generation in generations]
        return [
            cut_text(text, _stops(request.args[1].get("until"))) for text, request in zip(texts, requests, strict=True)
        ]

    def _answers(self, requests: list[Instance]) -> list[Generation]:
        """Decode, with a bar; what is cut off prompts is said first."""
        eos_id, pad_id = default_ids(self._loaded)
        todo, cuts = zip(*[self._request(request) for request in requests], strict=True) if requests else ((), ())
        self._say_cuts(requests, todo, cuts)
        with Reporter().bar("answering") as bar:
            done = 0

            def finished(index: int, generation: Generation) -> None:
                nonlocal done
                done += 1
                bar.update(done, len(todo))

            return decode(
                self._loaded.model,
                self._method,
                todo,
                eos_id=eos_id,
                pad_id=pad_id,
                batch_size=self._batch_size,
                prefill_positions=self._prefill_positions,
                kind=self._kind,
                on_finished=finished,
            )

    def _request(self, request: Instance) -> tuple[Request, int]:
        context, settings = request.args
        limit = int(settings.get("max_gen_toks", settings.get("max_new_tokens", _DEFAULT_LIMIT)))
        limit = min(limit, context_length(self._loaded.model) - 1)
        ids, cut = without_beginning(
            self._loaded.tokenizer(context, add_special_tokens=False).input_ids,
            room_for_prompt(self._loaded.model, limit),
        )
        temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
        return Request(ids, limit, self._threshold, temperature=temperature, seed=request.doc_id), cut

    def _say_cuts(self, requests: Sequence[Instance], todo: Sequence[Request], cuts: Sequence[int]) -> None:
        """Say of every task how many of its prompts lose their beginning."""
        for task in dict.fromkeys(request.task_name for request in requests):
            own = [number for number, request in enumerate(requests) if request.task_name == task]
            room = min(room_for_prompt(self._loaded.model, todo[number].max_new_tokens) for number in own)
            if words := cut_in_words(task, [cuts[number] for number in own], room):
                Reporter().say(words)

    def _count(self, requests: list[Instance], generations: list[Generation]) -> None:
        """Add up tokens and forwards over all processes; requests that only even out the processes do not count."""
        own = {id(request): generation for request, generation in zip(requests, generations, strict=True)}.values()
        counts = [sum(one.emitted for one in own), sum(one.forwards for one in own)]
        total = self.all_gather(torch.tensor([counts], device=self._device)).sum(0)
        self._emitted += int(total[0])
        self._forwards += int(total[1])

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into the results beside the scores."""
        return {
            "processes": self._world_size,
            "method": self._method.name,
            "threshold": self._threshold,
            "emitted_tokens": self._emitted,
            "forward_passes": self._forwards,
            "tokens_per_forward": self._emitted / self._forwards if self._forwards else None,
        }

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes one after the other."""
        whole: torch.Tensor = gather(tensor)
        return whole

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes, at process `dst`."""
        gathered: list[Any] = gather_object([obj])
        return gathered if self._rank == dst else None

    def barrier(self) -> None:
        PartialState().wait_for_everyone()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Only generation is of interest here."""
        with arguments.explained():
            raise UserError(
                "marsbench answers generation tasks only; this task asks for log-likelihoods",
                fix="choose a task whose output is generated, such as gsm8k",
            )

    loglikelihood_rolling = loglikelihood


def _device(wanted: str | None, state: PartialState) -> torch.device:
    if state.num_processes > 1 or wanted is None or (wanted.startswith("cuda") and not torch.cuda.is_available()):
        return torch.device(state.device)
    return torch.device(wanted)


def _stops(until: Any) -> list[str]:
    return [until] if isinstance(until, str) else list(until or [])


register()  # for programs that imported torch before lm-eval
