"""The lines of the page on a real model, what is claimed of them, and who races there."""

from dataclasses import replace
from functools import partial
from typing import Any

from marsbench.findings.between_lines import emits_more
from marsbench.line import Line
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.racing.grid import Grid
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import short

BASE, ADAPTER, MARS = "base", "base_gated", "base_mars"
LONG_ADAPTER, LONG_MARS, HEADED = "base_gated_4x", "base_mars_2x", "base_gated_network"
QUARTER = f"{HEADED}_quarter"
SHIPPED = f"{HEADED}-b8"  # the adapter that comes with the package, which was trained at B = 8
ADAPTED = ADAPTER, LONG_ADAPTER, QUARTER, HEADED  # whose verified tokens are the base's
_WORDS = {
    BASE: "Base",
    ADAPTER: "Base with an adapter",
    MARS: "MARS",
    LONG_ADAPTER: "Base with an adapter trained four times as long",
    LONG_MARS: "MARS trained twice as long",
    HEADED: "Base with an adapter and a draft head",
    QUARTER: "Base with an adapter and a draft head trained a quarter as long",
    SHIPPED: "Base with the shipped adapter",
}
_LOOKUP = {"draft_length": 4}


def _line(stage: str, words: str, method: str, **options: Any) -> Line:
    said = [options[name] for name in ("layout", "block_size", "groups", "threshold") if name in options]
    name = "_".join(map(str, [stage, method, *said]))  # "base_gated_mars-verified_groups_4"
    label, (plain, _, size) = f"{_WORDS[stage]}, {words}", stage.partition("-b")
    return Line(name, label, plain, method, options, block_size=int(size or DEFAULT_BLOCK_SIZE))


def _verified(stage: str, layout: str, window: int) -> Line:
    words = f"verified, {layout} (W = {window})"
    return _line(stage, words, "mars-verified", layout=layout, block_size=window)


def _with_lookup(stage: str, window: int, layout: str = "groups") -> Line:
    words = f"verified, {layout} (W = {window}) and prompt lookup"
    return _line(stage, words, "mars-lookup", layout=layout, block_size=window, **_LOOKUP)


AR, AR_OF_MARS, AR_OF_LONG_MARS = (_line(stage, "AR decoding", "ar") for stage in (BASE, MARS, LONG_MARS))
PROMPT_LOOKUP = _line(BASE, "prompt lookup", "prompt-lookup", **_LOOKUP)
GROUPS, HEADED_GROUPS = (_verified(stage, "groups", 4) for stage in (ADAPTER, HEADED))
SHIPPED_GROUPS, SHIPPED_LINEAR = (_verified(SHIPPED, layout, 4) for layout in ("groups", "linear"))
SHIPPED_BOTH, HEADED_BOTH = _with_lookup(SHIPPED, 4, "linear"), _with_lookup(HEADED, 3)
HEADED_FEW = _line(
    HEADED, "verified, two groups (W = 4)", "mars-verified", layout="groups", block_size=DEFAULT_BLOCK_SIZE, groups=2
)
PLAN = TablePlan(
    "real-model",
    "Lossless drafting on two CPU cores",
    (
        AR,
        PROMPT_LOOKUP,
        *(GROUPS, _verified(ADAPTER, "groups", 3), _verified(ADAPTER, "linear", 4)),
        *(_verified(LONG_ADAPTER, "groups", window) for window in (4, 3)),
        *(HEADED_GROUPS, HEADED_FEW, HEADED_BOTH, _with_lookup(HEADED, 4), _verified(QUARTER, "groups", 4)),
        *(SHIPPED_GROUPS, _verified(SHIPPED, "groups", 8), SHIPPED_LINEAR, SHIPPED_BOTH),
        *(AR_OF_MARS, *[_verified(MARS, "groups", window) for window in (4, 3)]),
        *[
            _line(MARS, f"tau = {short(tau)}", "mars", block_size=DEFAULT_BLOCK_SIZE, threshold=tau)
            for tau in (0.95, 0.7)
        ],
        *(AR_OF_LONG_MARS, _verified(LONG_MARS, "groups", 4)),
    ),
    benchmarks=("gsm8k", "humaneval"),
    questions=50,
    own="Real model",
)

_more = partial(emits_more, PLAN)
CLAIMS = (
    _more(
        SHIPPED_GROUPS.name, PROMPT_LOOKUP.name,
        "With a draft head, the shipped adapter's masks draft better than the text so far", "adapter-lookup",
        beside=(
            ("without a head", _more(GROUPS.name, PROMPT_LOOKUP.name)),
            ("both together", _more(SHIPPED_BOTH.name, PROMPT_LOOKUP.name)),
        ),
    ),
)  # fmt: skip

_RACED = PROMPT_LOOKUP, SHIPPED_GROUPS, SHIPPED_LINEAR, _with_lookup(SHIPPED, 3, "linear"), SHIPPED_BOTH
# Who races, answering in bf16, where near ties of two tokens could come out otherwise.
IN_BF16 = TablePlan(
    "real-model-bf16",
    "What is lossless stays so in bf16",
    tuple(replace(line, name=f"{line.name}_bfloat16", dtype="bfloat16") for line in (AR, *_RACED)),
    benchmarks=("ifeval", "gsm8k", "humaneval"),
    questions=34,
    own="Real model in bf16",
)
_TUNED = {MARS: AR_OF_MARS.name, LONG_MARS: AR_OF_LONG_MARS.name}
OWN_AR = {  # line -> AR decoding of its own model
    **{line.name: _TUNED.get(line.stage, AR.name) for line in PLAN.lines},
    **{line.name: IN_BF16.lines[0].name for line in IN_BF16.lines},
}

# ---- the race ----


OUTSIDER = "llama.cpp"
_OF_OUTSIDER: dict[str, tuple[str, dict[str, Any]]] = {  # of batch 1 alone; quantised weights make another model
    OUTSIDER: ("llama-cpp", {}),
    f"{OUTSIDER}, prompt lookup": ("llama-cpp-lookup", _LOOKUP),
    **{f"{OUTSIDER}, {kind}": ("llama-cpp", {"quantised": kind}) for kind in ("q8_0", "q4_1")},
}
OUTSIDERS = {name: Line.raced(name, BASE, method, **options) for name, (method, options) in _OF_OUTSIDER.items()}


def grid_at(scale: Preset, dtype: str, *, beside: bool = False) -> Grid:
    """A race of the base's `ar` and what is lossless, over many prompts whose answers may end.

    `beside`: a short one of the same beside `generate` and llama.cpp, which take longest.
    """
    names = {"ar": "ar", **({"hf-generate": "hf-generate", "ar, again": "ar"} if beside else {})}
    baselines = [Line.raced(name, BASE, method) for name, method in names.items()]
    small = scale.in_seconds
    ours = [replace(line, name=line.label) for line in _RACED]
    return Grid(
        contenders=(*baselines, *ours, *(OUTSIDERS.values() if beside else ())),
        batch_sizes=(1, 4),
        prompts=(2 if small else 16) if beside else 4 if small else 48,
        repeats=2 if small else 3 if beside else 1,  # the lap that is watched has every prompt's own time
        benchmarks=tuple(PLAN.of(scale.benchmarks)),
        max_new_tokens=min(64 if beside else 128, scale.max_new_tokens),
        timeout_s=600,
        positions=0 if beside else 16 if small else 64,
        dtype=dtype,
        page=PLAN.key,
    )


GRID_NAMES = ("ar", *[line.label for line in _RACED])
