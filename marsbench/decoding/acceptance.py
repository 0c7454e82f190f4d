"""When is a guessed token good enough? The paper's three confidence metrics (Appendix D), vectorised, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from marsbench.decoding.generation import Metric
from marsbench.errors import UserError, unknown_name

if TYPE_CHECKING:  # whether a threshold is in its range can be asked without torch
    from torch import Tensor

METRICS: tuple[str, ...] = get_args(Metric)


def confidence(logits: Tensor, metric: Metric) -> Tensor:
    """How sure the model is by logits [..., V] of any dtype, fp32 [...]: the higher the surer.

    `probability` is of the top token, `margin` between the two top probabilities, `entropy` in nats, negated.
    """
    if metric == "probability" and _by_sums(logits):
        top = logits.amax(-1, keepdim=True).float()
        return (logits - top).exp_().sum(-1).reciprocal_()
    logits = logits.float()
    if metric == "probability":
        return logits.softmax(-1).amax(-1)
    if metric == "margin":
        top = logits.softmax(-1).topk(2, dim=-1).values
        return top[..., 0] - top[..., 1]
    log_probability = logits.log_softmax(-1)
    return (log_probability.exp() * log_probability).sum(-1)


def _by_sums(logits: Tensor) -> bool:
    """Whether a maximum and a sum of exponentials are sooner there than a softmax, which CUDA gives to one block."""
    return logits.is_cuda


def confidence_needed(threshold: float | None, metric: Metric | None, method: str = "") -> float:
    """The confidence that a threshold asks for: at least so much, or no more entropy; None can never be passed.

    `UserError` for a threshold out of range, and for any where there is no metric: such a `method` compares none.
    """
    if metric is not None and metric not in METRICS:
        raise unknown_name("confidence metric", metric, list(METRICS))
    if threshold is None:
        return float("inf")
    if metric is None:
        raise UserError(f"method {method!r} takes no threshold", fix="leave it out, or choose a MARS method")
    if not 0 <= threshold < float("inf") or (metric != "entropy" and threshold > 1):
        allowed = "of 0 nats or more" if metric == "entropy" else "between 0 and 1"
        raise UserError(f"threshold {threshold} is out of range for metric {metric!r}", fix=f"give a value {allowed}")
    return -threshold if metric == "entropy" else threshold


def passing_run(passes: Tensor) -> Tensor:
    """How many candidates pass from the left without a gap: bool [N, K] -> integer [N]."""
    return passes.int().cumprod(-1).sum(-1)


def leading_run(passes: Tensor) -> Tensor:
    """`passing_run` where the first candidate is accepted in any case (paper section 3.3), so at least 1."""
    return passing_run(passes[:, 1:]) + 1
