"""The speed page: how fast, at what accuracy, against what; Tables 5 and 6; and where more load stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from marsbench.findings.cells import why_none
from marsbench.findings.claims import OURS
from marsbench.findings.in_words import plus_minus, with_interval
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import (
    A_A,
    ALLOWED_LOSS,
    SweepCells,
    baseline_of,
    in_words,
    over,
    printed_ratio,
    printed_speed_up,
    speed_up,
)
from marsbench.line import Line
from marsbench.presets import preset
from marsbench.racing.grid import COMPILED_AR, read_grid, shipped_grid
from marsbench.rendering.claims import bullet_by_size
from marsbench.rendering.markdown import table
from marsbench.rendering.page import laid_out
from marsbench.rows.kinds import Row, SweepRow
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import BATCH_SIZES, speculative
from marsbench.studies.speedup import figures
from marsbench.studies.speedup.claims import BESTS, TABLE5_SECTION, TABLE6_SECTION, decoded_by_the_sweep, speed_claims
from marsbench.studies.speedup.tables import knee_table, law_slots, table5, table6
from marsbench.studies.study import Item, Study
from marsbench.training.stages import STAGES

# The lines of the paper's Tables 5 and 6, which the sweep races by the clock.
CACHE_BLOCKS = (4, 8, 16, 32, 64, 128, 256)
_MARS = {"block_size": 4, "threshold": 0.95}
_RACED = {  # line of Table 5 -> its words, stage, method, options and the paper's name
    "ar": ("AR SFT, KV cache", "ar_sft", "ar", {}, "ar_kv"),
    "mars_no_cache": ("MARS, no cache", "mars", "mars-no-cache", _MARS, "mars_no_cache"),
    **{
        f"mars_cache{block}": (
            f"MARS, B_cache = {block}", "mars", "mars-block-cache", {**_MARS, "cache_block": block}, "mars_block_cache"
        )
        for block in CACHE_BLOCKS
    },
}  # fmt: skip
TABLE5 = TablePlan(
    "5",
    "Wall-clock speed with the block-level cache, by batch size",
    tuple(
        Line(f"{name}_x{size}", f"{words}, batch {size}", stage, method, {**options, "batch_size": size}, papers)
        for size in BATCH_SIZES
        for name, (words, stage, method, options, papers) in _RACED.items()
    ),
    benchmarks=("gsm8k",),
    questions=256,
)
TABLE6 = TablePlan(
    "6",
    "Speculative decoding with AR and MARS drafts and targets",
    (speculative("ar_sft", "draft_ar_sft"), speculative("mars", "draft_ar_sft"), speculative("mars", "draft_mars")),
    benchmarks=("gsm8k",),
    questions=256,
)
SMALL = " These are models of a million parameters or less; they test the mechanism and are not Qwen numbers."


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    sweep = SweepCells.of(rows)
    return {
        "answers": _answers(seeds, sweep.batch_sizes),
        "loss": f"{ALLOWED_LOSS:g}",
        "answer": _answer(sweep),
        "kinds": sweep.steps_in_words,
        "decoded": decoded_by_the_sweep([rows]),
        "stages": in_words(sweep.decoded),
        "medusa": _medusa(sweep),
        "small": SMALL if preset(scale).world else "",
        "contenders": _contenders(sweep),
        **table5(sweep.eager),  # without a cache, and with this one, steps have no fixed shape to be compiled
        **table6(sweep),
        **law_slots(sweep.eager),
        "knee": knee_table(sweep.eager),
        "checks": _checks(sweep),
    }


def _medusa(sweep: SweepCells) -> str:
    """How the heads were trained; empty where Medusa did not race."""
    stages = dict.fromkeys(row.stage for row in sweep.rows if row.method == "medusa")
    return f" Medusa's heads are those of {in_words(stages)}; [others were tried](rivals.md)." if stages else ""


def _answers(seeds: BySeed, sizes: Sequence[int]) -> str:
    """A sentence for each kind of contender: what it is at the smallest batch, and at the largest."""
    ends = {sizes[0], sizes[-1]} if sizes else {}
    told = [claim for claim in speed_claims() if claim.whose == OURS and claim.batch_size in ends]
    return "\n".join(bullet_by_size(list(same), seeds) for _, same in groupby(told, key=lambda claim: claim.name))


# ---------------------------------------------------------------------- the answer


def _answer(sweep: SweepCells) -> str:
    over_library = [printed_ratio(speed_up(row, "hf-generate"), "") for row in sweep.by_batch("ar")]
    lines = [["`ar` over `hf-generate`, both eager", *over_library]]
    if sweep.has_compiled:
        lines.append(["compiled `ar` over eager `ar`", *map(printed_speed_up, sweep.by_batch(COMPILED_AR))])
    for best in BESTS.values():
        found = [best.find(sweep, size) for size in sweep.batch_sizes]
        if best.shown and any(found):
            lines.append([f"{best.shown}, over `ar`", *[printed_ratio(sweep.over_faster_ar(row), "") for row in found]])
            lines.append(["setting", *[_setting(row) for row in found]])
            lines.append(["tokens/forward", *[f"{row.tokens_per_forward:.2f}" if row else "" for row in found]])
    lost = [sweep.cost(sweep.sure_mars(size)) for size in sweep.batch_sizes]
    shown = [with_interval(cost, 1, signed=True) if cost else "" for cost in lost]
    lines.append(["points that `mars` loses [95 %]", *shown])
    return table(["", *sweep.heads], lines)


def _setting(row: SweepRow | None) -> str:
    if row is None:
        return ""
    options = {"tau": row.options.get("threshold", "one"), "window": row.options.get("block_size")}
    words = [str(row.options["layout"])] if "layout" in row.options else []
    words += [f"{name} {value}" for name, value in options.items() if value is not None]
    head = ["draft head"] if STAGES[row.stage].head != "none" else []
    return ", ".join([*words, *head, "compiled" if row.compiled else "eager"])


# ---------------------------------------------------------------------- every contender


def _contenders(sweep: SweepCells) -> str:
    held_against: dict[str, list[str]] = {}  # baseline -> contenders
    for baseline, name in dict.fromkeys((baseline_of(row), row.contender) for row in sweep.rows):
        held_against.setdefault(baseline, []).append(name)
    tables = [_all_over(sweep, baseline == COMPILED_AR, names) for baseline, names in held_against.items()]
    failed = [row for row in sweep.rows if row.status != "done"]
    reasons = [f"- {row.contender}, batch {row.batch_size}: {why_none(row)}" for row in failed]
    return "\n\n".join([*tables, "\n".join(reasons)])


def _all_over(sweep: SweepCells, compiled: bool, names: Sequence[str]) -> str:
    like = "as compiled `ar`" if compiled else "as `ar`"
    lines = []
    for name in names:
        cells = sweep.by_batch(name)
        why = {row.batch_size: row.status for row in reversed(sweep.rows) if row.contender == name}
        speeds = [
            printed_speed_up(row) if row else why.get(size, "not run")
            for row, size in zip(cells, sweep.batch_sizes, strict=True)
        ]
        more = ["", "", ""]
        if first := next(filter(None, cells), None):  # what hardly depends on the batch size
            accuracy = plus_minus(first.accuracy, 1, factor=100)
            more = [f"{first.tokens_per_forward:.2f}", accuracy, _as_ar(sweep, first)]
        lines.append([name, *speeds, *more])
    return table([f"tokens/s {over(compiled)}", *sweep.heads, "tokens/forward", "accuracy", like], lines)


def _as_ar(sweep: SweepCells, row: SweepRow) -> str:
    """How many prompts get the tokens that AR decoding of the same model gives."""
    compiled = baseline_of(row) == COMPILED_AR  # in 16 bits, compiled steps round otherwise
    alike = [other for other in reversed(sweep.rows) if other.method == "ar" and other.compiled == compiled]
    stages = {_model_of(other.stage): other.contender for other in alike}
    same = row.same_as.get(stages.get(_model_of(row.stage), ""))
    promise = " (promised)" if row.is_lossless and same is not None and same < row.prompts else ""
    return "" if same is None else f"{same} of {row.prompts}{promise}"


def _model_of(name: str) -> str | None:
    """The stage whose weights a stage decodes with: Medusa's heads and adapters leave the model as it is."""
    return STAGES[name].parent if STAGES[name].objective in ("medusa", "gated") else name


def _checks(sweep: SweepCells) -> str:
    lines = []
    for size in sweep.batch_sizes:
        ratio = speed_up(sweep.done.get((A_A, size)))
        if ratio is not None:
            inside = ratio.interval.low <= 1 <= ratio.interval.high
            lines.append([str(size), printed_ratio(ratio), "yes" if inside else "no"])
    return table(["batch", "`ar, again` over `ar`", "contains 1"], lines)


STUDY = Study(
    key="speedup",
    name="Speed",
    asks="how fast, at what accuracy, against what, at which batch size?",
    place=4,
    grid=lambda scale, quick: read_grid(shipped_grid(scale.scale), quick=quick),
    sections=laid_out(__package__, slots),
    figures=figures.draw,
    claims=tuple(speed_claims()),
    remark=decoded_by_the_sweep,
    holds=(
        Item(
            key="table5",
            name="Table 5",
            asks="how fast by the clock is the block-level cache, by batch size?",
            anchor="#table-5-the-block-level-cache",
            section=TABLE5_SECTION,
            plan=TABLE5,
        ),
        Item(
            key="table6",
            name="Table 6",
            asks="does MARS help speculative decoding, as target and as draft?",
            anchor="#table-6-speculative-decoding",
            section=TABLE6_SECTION,
            plan=TABLE6,
        ),
    ),
)
