"""What `transformers` itself offers, as reference points from outside our loop: `generate`, plain and assisted.

Greedy means greedy: what a checkpoint's `generation_config` asks for (a repetition penalty, ...) is left out, as our
loop leaves it out. The models come out as they went in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from marsbench.decoding.engine import OutsideMethod
from marsbench.decoding.generation import Meter, Request


@dataclass(frozen=True)
class HfGenerate(OutsideMethod):
    """`model.generate(do_sample=False)` and nothing else, batches padded on the left."""

    name = "hf-generate"

    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        with generating_by(model):
            continued = _generated(model, requests, eos_ids, pad_id, [_Forwards(meter)] if meter else [])
        return [(tokens, [1] * len(tokens)) for tokens in continued]


@dataclass(frozen=True)
class HfAssisted(OutsideMethod):
    """`model.generate(assistant_model=...)`: transformers' own speculative decoding, as many drafts in every round."""

    name = "hf-assisted"
    one_row = True

    draft: Any
    draft_length: int = 4

    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        rounds = _Forwards(meter)
        with generating_by(model), generating_by(  # in this order: a model may draft for itself
            self.draft, num_assistant_tokens=self.draft_length, num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        ):  # fmt: skip
            (tokens,) = _generated(model, requests, eos_ids, pad_id, [rounds], assistant_model=self.draft)
        ends = [length - len(requests[0].prompt_ids) for length in rounds.lengths]
        counts = [end - before for before, end in zip([0, *ends], ends, strict=False)]
        return [(tokens, [count for count in counts if count > 0])]


@contextmanager
def generating_by(model: Any, **settings: Any) -> Iterator[None]:
    """Within a `with` block, `model` has these settings: `generate` fills what it is not given from the model's."""
    own = model.generation_config
    model.generation_config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = own


def _generated(
    model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, watching: "list[_Forwards]", **more: Any
) -> list[list[int]]:
    """New tokens of every request, to the furthest limit of all, within `generating_by`."""
    longest = max(len(request.prompt_ids) for request in requests)
    padding = [longest - len(request.prompt_ids) for request in requests]
    padded = [[pad_id] * pads + list(request.prompt_ids) for pads, request in zip(padding, requests, strict=True)]
    greedy: dict[str, Any] = {"max_new_tokens": max(request.max_new_tokens for request in requests), "do_sample": False}
    heeded = None if any(request.ignore_eos for request in requests) else eos_ids
    output = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor([[0] * pads + [1] * (longest - pads) for pads in padding], device=model.device),
        stopping_criteria=StoppingCriteriaList(watching),
        generation_config=GenerationConfig(**greedy, eos_token_id=heeded, pad_token_id=pad_id),  # type: ignore[no-untyped-call]
        **more,
    )
    return list(output[:, longest:].tolist())


class _Forwards(StoppingCriteria):
    """Stops nothing; notes how long the sequence is after every forward of the model, and lets a meter know."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        if self._meter is not None:
            self._meter.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
