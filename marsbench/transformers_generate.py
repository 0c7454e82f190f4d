"""`model.generate(..., custom_generate=marsbench.generate, method="mars", threshold=0.95)` in transformers.

transformers prepares the inputs and the generation configuration as for its own methods, then calls `generate` below.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from marsbench import hub
from marsbench.answering import check_draft, remark_on_rounding
from marsbench.compiled.graphs import kind_of_batch, wants_graphs
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import PREFILL_POSITIONS, Request, seed_of
from marsbench.errors import UserError, integer
from marsbench.forward.adapter import Adapted
from marsbench.forward.limits import vocabulary_of
from marsbench.line import EARLIER, renamed
from marsbench.methods import METHODS, OPTIONS, Decoding, build_method
from marsbench.progress import Reporter
from marsbench.training.adapter_files import read_adapter
from marsbench.training.checkpoints import mask_of
from marsbench.training.medusa import MedusaHeads

# The options of decoding that a call may give.
_ASKED = ("method", "threshold", "draft", "mask_id", "prefill_positions", "compiled", *OPTIONS, *EARLIER)


def _signed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a signature name every option of decoding: what it does not name, transformers keeps to itself."""
    own = list(signature(function).parameters.values())
    named = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in _ASKED]
    function.__signature__ = Signature([*own[:-1], *named, own[-1]])  # type: ignore[attr-defined]
    return function


@_signed
def generate(
    model: PreTrainedModel,
    input_ids: Tensor, logits_processor: Iterable[Any] = (), stopping_criteria: Iterable[Any] = (),
    generation_config: GenerationConfig | None = None, *, sampling_seed: int = 0, adapter: str | Path | None = None,
    token_streamer: BaseStreamer | None = None, **others: Any,
) -> Tensor | GenerateDecoderOnlyOutput:  # fmt: skip
    """Continue prompts by any method of marsbench; see `marsbench list methods`.

    Of the generation configuration, the limit on new tokens, EOS, padding, `do_sample` with `temperature`, and
    `return_dict_in_generate` count. Whatever else would change the tokens (several beams, other logits processors,
    other stopping criteria, embeddings or a cache in place of ids, prompts that an adapter has learned) is refused.

    Args:
        model: passed by transformers, like the next four.
        input_ids: integer [N, P], padded on the left.
        logits_processor, stopping_criteria, generation_config: as transformers makes them.
        sampling_seed: seed of sampling; row i takes `sampling_seed` + i.
        adapter: folder of a gated adapter that was trained on this model; its own tokenizer knows the mask. Whether the
            weights in memory are still those it was trained on is not looked at. Not together with `compiled`.
        token_streamer: any streamer of transformers, for a single prompt. transformers keeps `streamer` to itself.
        others: the options of `marsbench decode --help`, such as `method`, `threshold` or `window`; `draft` is a model,
            `mask_id` by default that of the tokenizer beside the weights. What was compiled is kept as long as the
            model, and used again as long as the method and its options stay. And what transformers passes along, of
            which `attention_mask` is used.

    Returns prompts and new tokens, integer [N, P + new], padded on the right; `UserError` for what is not honoured.
    """
    config = generation_config or model.generation_config
    if config is None:
        raise UserError("there is no generation configuration", fix="call model.generate(custom_generate=...)")
    rules = [*logits_processor, *stopping_criteria]
    strange = [type(rule).__name__ for rule in rules if not isinstance(rule, _KNOWN)]
    strange += _asked_in_vain(config, input_ids, others, model)
    asked = renamed({name: others[name] for name in _ASKED if others.get(name) is not None})
    name = str(adapter or model.name_or_path or "")
    asked.setdefault("mask_id", _kept(model, "mask", name, lambda: mask_of(_tokenizer(name))))
    options = Decoding(**asked).check()
    options.check_heard(options.method)
    _check_call(", ".join(strange), options, adapter, len(input_ids) if token_streamer is not None else 0)
    if options.draft is not None and not METHODS[options.method].own_loop:
        both = model, options.draft
        names, sizes = [each.name_or_path or "" for each in both], [*map(vocabulary_of, both)]
        _kept(model, "draft", [names, sizes], lambda: check_draft(both, [*map(_tokenizer, names)]))
    has_heads, place = "heads" in METHODS[options.method].needs, Path(str(model.name_or_path))
    heads = MedusaHeads.load(place, dtype=model.dtype, device=model.device) if has_heads else None
    compiled = adapter is None and wants_graphs(model, options.compiled)
    make = partial(build_method, options.method, replace(options, heads=heads))
    kept = replace(options, threshold=None, prefill_positions=PREFILL_POSITIONS)  # no step depends on these
    chosen = _kept(model, "method", kept, make) if compiled else make()  # heads belong to the model
    running: Any = model
    if adapter is not None:
        folder = Path(adapter)
        written = [folder, *(file.stat().st_mtime_ns for file in folder.glob("*"))]
        running = Adapted(model, _kept(model, "adapter", written, lambda: read_adapter(folder, model)))
    kind, not_compiled = kind_of_batch(running, chosen, compiled)
    _REPORTER.say_once(not_compiled)
    _REPORTER.say_once(remark_on_rounding(options.method, running))
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())  # type: ignore[no-untyped-call]  # streamers expect the prompt first
    ends = [config.eos_token_id, *(rule.eos_token_id for rule in rules if isinstance(rule, EosTokenCriteria))]
    eos_ids = [token for end in ends if end is not None for token in torch.as_tensor(end).flatten().tolist()]
    pad_id = int(config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids), 0))
    requests = _requests(input_ids, others.get("attention_mask"), config, rules, options.threshold, sampling_seed)
    generations = decode(
        running, chosen, requests, eos_id=eos_ids, pad_id=pad_id, batch_size=len(input_ids), kind=kind,
        on_tokens=None if token_streamer is None else partial(_put, token_streamer),
        prefill_positions=options.prefill_positions,
    )  # fmt: skip
    if token_streamer is not None:
        token_streamer.end()  # type: ignore[no-untyped-call]
    ended = [
        torch.tensor(answer.tokens if answer.eos_id is None else [*answer.tokens, answer.eos_id])
        for answer in generations
    ]
    new = pad_sequence(ended, batch_first=True, padding_value=pad_id).to(input_ids)
    sequences = torch.cat([input_ids, new], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences  # type: ignore[arg-type]


_KNOWN = TemperatureLogitsWarper, MaxLengthCriteria, EosTokenCriteria
# What says, once, why steps cannot be compiled.
_REPORTER = Reporter()
# Model -> what its latest calls have made: of what, and that. Graphs belong to one method, so that is kept, too.
_KEPT: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Any, Any]]] = WeakKeyDictionary()


def _kept(model: PreTrainedModel, what: str, of: Any, make: Callable[[], Any]) -> Any:
    kept = _KEPT.setdefault(model, {})
    if what not in kept or kept[what][0] != of:
        kept[what] = of, make()
    return kept[what][1]


def _requests(
    input_ids: Tensor, attention_mask: Tensor | None, config: GenerationConfig, rules: Sequence[Any],
    threshold: float | None, seed: int,
) -> list[Request]:  # fmt: skip
    integer(seed, "sampling seed", fix="give one, as in sampling_seed=0")
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    limits = [int(config.max_length), *(rule.max_length for rule in rules if isinstance(rule, MaxLengthCriteria))]
    scales = [rule.temperature for rule in rules if isinstance(rule, TemperatureLogitsWarper)]
    temperature = math.prod(scales or [float(config.temperature or 1.0)]) if config.do_sample else 0.0
    new = min(limits) - input_ids.shape[1]
    prompts = [ids[kept.bool()].tolist() for ids, kept in zip(input_ids, real, strict=True)]
    return [Request(ids, new, threshold, temperature, seed_of(seed, row)) for row, ids in enumerate(prompts)]


def _put(streamer: BaseStreamer, index: int, tokens: list[int]) -> None:
    for token in tokens:
        streamer.put(torch.tensor([token]))  # type: ignore[no-untyped-call]


# What changes tokens, or is to come back, and becomes no logits processor and no stopping criterion.
_SETTINGS = ("assistant_ensemble_weight", "output_attentions", "output_hidden_states", "output_logits", "output_scores")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
_HOW_TO_RUN = ("use_cache", "logits_to_keep")  # of what transformers passes along: no token depends on it


def _asked_in_vain(
    config: GenerationConfig, input_ids: Tensor, others: dict[str, Any], model: PreTrainedModel
) -> Iterator[str]:
    """What a configuration, a caller, or peft (by learned prompts and hooks) ask for that would be left out."""
    if (mode := config.get_generation_mode()) not in _MODES:
        yield mode.value
    if (config.num_return_sequences or 1) > 1:
        yield "num_return_sequences"
    if config.cache_implementation == "quantized":
        yield "a quantized cache"
    yield from (name for name in _SETTINGS if getattr(config, name, None))
    mask, position, cache = (others.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    usual = (torch.ones_like(input_ids) if mask is None else mask.long()).cumsum(-1) - 1
    if mask is not None and mask.shape != input_ids.shape:
        yield "an attention_mask of another shape"
    elif mask is not None and not mask[:, -1:].all():
        yield "padding on the right"
    if position is not None and not torch.equal(position.clamp(min=0), usual.clamp(min=0)):
        yield "position_ids"
    if cache is not None and cache.get_seq_length():
        yield "past_key_values"
    known = {"attention_mask", "position_ids", "past_key_values", *_HOW_TO_RUN, *_ASKED}
    yield from (name for name, given in others.items() if name not in known and given is not None)
    prepares = "prepare_inputs_for_generation"
    own, of_class = vars(model).get(prepares), getattr(type(model), prepares, None)
    if own is not None and getattr(own, "__func__", own) is not of_class:
        yield f"the inputs that {getattr(own, '__qualname__', own)} prepares, such as learned prompts"
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    told: set[str] = set().union(*(hook.keywords for hook in hooks if isinstance(hook, partial)))
    told.update(*(hook.__code__.co_freevars for hook in hooks if isinstance(hook, FunctionType)))
    yield from sorted(told & {"adapter_names", "alora_offsets", "task_ids"})


def _check_call(strange: str, how: Decoding, adapter: Any, streamed: int) -> None:
    """Refuse `strange` rules, which would be left out, and what cannot be meant; `streamed` prompts are streamed."""
    refused = [
        (bool(strange), f"marsbench.generate does not apply {strange}",
         "switch it off (top_k=0, top_p=1.0, repetition_penalty=1.0, ...), cut the output afterwards, or leave "
         "custom_generate out"),
        (how.draft is not None and not hasattr(how.draft, "get_decoder"), "the draft is no model",
         "pass AutoModelForCausalLM.from_pretrained(...)"),
        (how.draft is not None and "draft" not in METHODS[how.method].needs,
         f"method {how.method!r} takes no draft", "leave draft out"),
        (how.compiled and adapter is not None, "graphs are kept with a model, not with an adapter",
         "leave compiled or adapter out"),
        (streamed > 1, "only a single prompt can be streamed", "stream one prompt at a time"),
        (streamed > 0 and METHODS[how.method].own_loop, f"method {how.method!r} streams nothing here",
         "call model.generate(streamer=...) without custom_generate"),
    ]  # fmt: skip
    for is_so, why, fix in refused:
        if is_so:
            raise UserError(why, fix=fix)


@lru_cache(maxsize=8)
def _tokenizer(name_or_path: str) -> Any:
    try:
        with nullcontext() if Path(name_or_path).is_dir() else hub.from_cache_if_out_of_reach():
            return AutoTokenizer.from_pretrained(name_or_path) if name_or_path else None
    except (OSError, ValueError):
        return None
