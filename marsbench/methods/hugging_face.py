"""What `transformers` itself offers, as reference points from outside our loop: `generate`, plain and assisted.

Greedy means greedy: whatever a checkpoint's `generation_config` asks for (a repetition penalty, tokens never to be
written, a kind of cache, ...) is left out, as our loop leaves it out. The models come out as they went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from marsbench.decoding.acceptance import no_threshold
from marsbench.decoding.generation import Meter, Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.methods.settings import generating_by


@dataclass(frozen=True)
class HfGenerate(OutsideMethod):
    """`model.generate(do_sample=False)` and nothing else, batches padded on the left."""

    name: ClassVar[str] = "hf-generate"

    def bar(self, threshold: float | None) -> float:
        """`generate` takes no threshold."""
        return no_threshold(self.name, threshold)

    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """One batch: per request its new tokens and how many came with each forward."""
        limit = max(request.max_new_tokens for request in requests)
        input_ids, attention_mask = _left_padded(requests, pad_id, model.device)
        with generating_by(model):
            output = model.generate(
                input_ids,
                attention_mask=attention_mask,
                stopping_criteria=StoppingCriteriaList([_Forwards(meter)] if meter else []),
                generation_config=_greedy(limit, eos_ids, pad_id),
            )
        continued = output[:, input_ids.shape[1] :].tolist()
        return [(tokens, [1] * len(tokens)) for tokens in continued]


@dataclass(frozen=True)
class HfAssisted(OutsideMethod):
    """`model.generate(assistant_model=...)`: transformers' own speculative decoding, one sequence at a time."""

    name: ClassVar[str] = "hf-assisted"
    one_row: ClassVar[bool] = True

    draft: Any
    draft_length: int = 4

    def bar(self, threshold: float | None) -> float:
        """Assisted generation takes no threshold."""
        return no_threshold(self.name, threshold)

    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """One request: its new tokens and how many came with each forward of the target."""
        (request,) = requests
        input_ids, attention_mask = _left_padded(requests, pad_id, model.device)
        rounds = _Forwards(meter)
        with generating_by(model), generating_by(self.draft, **self._drafting):
            output = model.generate(
                input_ids,
                attention_mask=attention_mask,
                assistant_model=self.draft,
                stopping_criteria=StoppingCriteriaList([rounds]),
                generation_config=_greedy(request.max_new_tokens, eos_ids, pad_id),
            )
        tokens = output[0, input_ids.shape[1] :].tolist()
        ends = [length - input_ids.shape[1] for length in rounds.lengths]
        counts = [end - before for before, end in zip([0, *ends], ends, strict=False)]
        return [(tokens, [count for count in counts if count > 0])]

    @property
    def _drafting(self) -> dict[str, Any]:
        """How the draft model drafts: as many tokens in every round, however sure it is of them."""
        return {
            "num_assistant_tokens": self.draft_length,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }


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


def _left_padded(requests: Sequence[Request], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts [N, P] padded on the left, and which of their tokens are real."""
    longest = max(len(request.prompt_ids) for request in requests)
    padded = [[pad_id] * (longest - len(request.prompt_ids)) + list(request.prompt_ids) for request in requests]
    real = [[0] * (longest - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in requests]
    return torch.tensor(padded, device=device), torch.tensor(real, device=device)


def _greedy(limit: int, eos_ids: list[int], pad_id: int) -> GenerationConfig:
    settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False}
    return GenerationConfig(**settings, eos_token_id=eos_ids, pad_token_id=pad_id)  # type: ignore[no-untyped-call]
