"""What every page says of where this run departs from the paper."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.world import modelled_on

MINI_DEVIATIONS: tuple[str, ...] = (
    "An embedded world of six generated benchmarks stands in for the six real ones.",
    "All mini benchmarks are 0-shot, BBH too (the paper: 3-shot).",
)
REAL_DEVIATIONS: tuple[str, ...] = (
    "GSM8K, BBH and GPQA are scored by reading the answer wherever it stands. lm-eval's stock filters (`strict`) drop "
    "the last character of an answer that no full stop follows, and BBH's stop string `Q` cuts answers such as `(Q)`.",
    "MMLU-Pro: an answer that names no option is wrong; MMLU-Pro's authors credit it with a random guess.",
    "IFEval's checker draws what a document leaves open (keys 1122 and 1129) from the document's key, GPQA's choices "
    "stand in an order drawn from the question: both change from run to run in the stock tasks.",
    "HumanEval is scored on EvalPlus's version of its tests, in a sandbox.",
    "Every method generates to EOS or the limit; stop strings cut the text afterwards.",
)
_TRAINED_HERE = "The model has about a million parameters and is trained from scratch on the spot; it is not Qwen2.5."
_SHIPPED = "The model has about a million parameters; it is fine-tuned from a base that is shipped, and not Qwen2.5."
SMALL_DEVIATIONS: tuple[str, ...] = (
    "SFT conversations are generated, not taken from Dolci-Instruct-SFT.",
    "Answers end at a limit below the paper's 256 tokens.",
)
NO_SFT_DEVIATION = (
    '"MARS w/o SFT loss" drops that loss and changes nothing else (`ar_weight = 0`); the authors\' released '
    "ablation also switches on 1/t weights. So the paper's number for it has no line of this page beside it; the page "
    "of Table 3 measures both ablations."
)
BOTH_ABLATIONS_DEVIATION = (
    '"MARS w/o SFT loss, as released" also weighs every sequence by 1/t for a random t, as the authors\' released '
    'ablation does; "MARS w/o SFT loss" drops that loss and changes nothing else (`ar_weight = 0`).'
)
COMMON_DEVIATIONS: tuple[str, ...] = (
    "Figures and folded tables are of one training seed: their intervals cover the draw of questions, not the "
    "luck of training.",
    "Tokens per forward pass are counted per answer, up to and with EOS; nothing after it counts.",
)


def deviations_section(rows: Sequence[Row], scale: str, own: Sequence[str]) -> str:
    """All known deviations behind rows of one scale; `own` are those of this page alone."""
    shown = preset(scale)
    model = _SHIPPED if shown.ready_checkpoint("base", None) else _TRAINED_HERE
    benchmarks = {row.benchmark for row in rows if isinstance(row, EvaluationRow)}
    mini = {name for name in benchmarks if modelled_on(name) != name}
    known = [
        *(MINI_DEVIATIONS if mini or not benchmarks else ()),
        *(REAL_DEVIATIONS if benchmarks - mini else ()),
        *((model, *SMALL_DEVIATIONS) if shown.world else ()),
        *own,
        *COMMON_DEVIATIONS,
    ]
    return "\n".join(["## Known deviations from the paper", "", *[f"- {sentence}" for sentence in known]])
