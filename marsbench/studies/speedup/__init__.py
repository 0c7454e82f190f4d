"""The speed page: how fast, at what accuracy, against what; Tables 5 and 6; and where more load stops paying."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from marsbench.findings.cells import why_none
from marsbench.findings.in_words import with_interval
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import A_A, ALLOWED_LOSS, SweepCells, baseline_of, printed_ratio, speed_of, speed_up
from marsbench.presets import preset
from marsbench.racing.grid import COMPILED_AR, read_grid, shipped_grid
from marsbench.racing.position_law import law_of
from marsbench.rendering.figures import Labelled, Seeds, labelled_figure
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import Row, StepTimeRow, SweepRow
from marsbench.statistics.intervals import Estimate
from marsbench.studies.speedup import speed_claims
from marsbench.studies.study import Item, Study
from marsbench.training.stages import STAGES


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    sweep, same = SweepCells.of(rows), ""
    if alike := same_as_sft(sweep):
        same = (
            "Verified MARS gives the AR tokens of the MARS checkpoint; "
            f"{alike[0]} of {alike[1]} answers equal those of AR SFT, the model before MARS training."
        )
    again = {size: ratio for size in sweep.batch_sizes if (ratio := sweep.speed_up(A_A, size))}
    fair = f"{', '.join(map(printed_ratio, again.values()))} at batch {', '.join(map(str, again))}"
    return {
        "answer": _answer(sweep),
        "decoded": _decoded(sweep),
        "same": same,
        "small": " These are toy models; their numbers are not Qwen's." if preset(scale).world else "",
        "contenders": _contenders(sweep),
        # Without a cache, and with this one, steps have no fixed shape to be compiled.
        **speed_claims.table5(sweep.eager),
        **speed_claims.table6(sweep),
        "steps": _steps(rows),
        "fair": f"The interval of `ar` over itself must contain 1: {fair}." if again else "",
    }


def _decoded(sweep: SweepCells) -> str:
    """A note if the sweep decodes another checkpoint than the tables."""
    stages = sorted({row.stage for row in sweep.rows if row.contender == "ar"})
    said = ", ".join(f"`{name}` ({STAGES[name].summary})" for name in stages)
    about = f"The claims on speed and speculative decoding use {said}; the tables use `mars`."
    return "" if stages in ([], ["mars"]) else about


def _answer(sweep: SweepCells) -> str:
    over_library = [printed_ratio(speed_up(row, "hf-generate"), "") for row in sweep.by_batch("ar")]
    lines = [["`ar` over `hf-generate`, both eager", *over_library]]
    if any(sweep.by_batch(COMPILED_AR)):
        lines.append(["compiled `ar` over eager `ar`", *map(printed_ratio, map(speed_up, sweep.by_batch(COMPILED_AR)))])
    for best in speed_claims.BESTS.values():
        rows = [best.find(sweep, size) for size in sweep.batch_sizes]
        if any(rows):
            lines.append([f"{best.shown}, over `ar`", *[printed_ratio(sweep.over_ar_alike(row), "") for row in rows]])
            lines.append(["tokens/forward", *[f"{row.tokens_per_forward:.2f}" if row else "" for row in rows]])
    lost = [sweep.cost(sweep.sure_mars(size)) for size in sweep.batch_sizes]
    shown = [with_interval(cost, 1, signed=True) if cost else "" for cost in lost]
    return table(["", *sweep.heads], [*lines, ["points that `mars` loses [95 %]", *shown]])


def _contenders(sweep: SweepCells) -> str:
    """The fastest setting of each method with its speed; those over compiled `ar` in a table of their own."""
    tables, best = dict[str, list[list[str]]](), _fastest_of_each(sweep)
    for baseline, name in dict.fromkeys((baseline_of(row), row.contender) for row in sweep.rows):
        cells, lines = sweep.by_batch(name), tables.setdefault(baseline, [])
        if name in best and (first := next(filter(None, cells), None)):
            speeds = [printed_ratio(speed_up(row)).partition(" ")[0] if row else "-" for row in cells]
            accuracy = f"{100 * first.accuracy.value:.1f}"
            lines.append([name, *speeds, f"{first.tokens_per_forward:.2f}", accuracy, _as_ar(sweep, first)])
    heads = [*sweep.heads, "tokens/forward", "right, %", "as its `ar`"]
    named = {"ar": "over `ar`", COMPILED_AR: "over compiled `ar`"}
    shown = [table([f"tokens/s {named[name]}", *heads], lines) for name, lines in tables.items()]
    failed = {row.contender: why_none(row) for row in sweep.rows if row.status != "done"}
    return paragraphs(*shown, "\n".join(f"- {name}: {why}" for name, why in failed.items()))


def _fastest_of_each(sweep: SweepCells) -> set[str]:
    """The contenders that are fastest at batch 1 among the settings of their method and form."""
    rows = sorted(sweep.at(min(sweep.batch_sizes, default=0)), key=speed_of)
    kinds = [(row.method, row.stage, row.compiled, row.options.get("cache_block")) for row in rows]
    return {row.contender for row in dict(zip(kinds, rows, strict=True)).values()}


def _as_ar(sweep: SweepCells, row: SweepRow) -> str:
    """How many prompts get the tokens that AR decoding of the same model gives."""

    def model_of(name: str) -> str | None:  # Medusa's heads and adapters leave the model as it is
        return STAGES[name].parent if STAGES[name].objective in ("medusa", "gated") else name

    compiled = baseline_of(row) == COMPILED_AR  # in 16 bits, compiled steps round otherwise
    alike = [other for other in reversed(sweep.rows) if other.method == "ar" and other.compiled == compiled]
    stages = {model_of(other.stage): other.contender for other in alike}
    same = row.same_as.get(stages.get(model_of(row.stage), ""))
    promise = " (promised)" if row.is_lossless and same is not None and same < row.prompts else ""
    return "" if same is None else f"{same} of {row.prompts}{promise}"


def same_as_sft(sweep: SweepCells) -> tuple[int, int] | None:
    """How many answers of MARS by AR decoding equal those of AR SFT, from which it trains, and of how many."""
    row = next((row for row in sweep.rows if row.contender == "ar" and speed_claims.AR_SFT in row.same_as), None)
    return (row.same_as[speed_claims.AR_SFT], row.prompts) if row else None


def _steps(rows: Sequence[Row]) -> str:
    """The cost of a step by its number of positions, timed outside the races."""
    times = next((row for row in reversed(rows) if isinstance(row, StepTimeRow)), None)
    if times is None:
        return ""
    law = law_of(times.rows, times.window, times.seconds)
    shown = [count for count in law.positions if count & (count - 1) == 0]
    costs = ["steps of `ar` for one row", *[f"{law.seconds_at(count) / law.seconds_at(1):.2f}" for count in shown]]
    return table(["positions in a step", *map(str, shown)], [costs])


def _draw(seeds: Seeds, reports_dir: Path) -> list[Path]:
    sweep = SweepCells.of(seeds[0])
    series = defaultdict[str, dict[str, Estimate]](dict)
    for size in sweep.batch_sizes:
        for name, row in _best_of_each_method(sweep, size).items():
            if ratio := sweep.over_ar_alike(row):
                form = "" if sweep.other_forms(row) else ", eager"
                series[f"batch {size}"][f"{name}{form}"] = ratio
    panel = Labelled("tokens per second over ar, like over like", series)
    return labelled_figure([panel], reports_dir / "figures/speedup_by_batch_size") if series else []


def _best_of_each_method(sweep: SweepCells, batch_size: int) -> dict[str, SweepRow]:
    """Of each method but `ar`, the fastest contender at a batch size that is lossless or loses little accuracy."""
    best: dict[str, SweepRow] = {}
    for row in sweep.at(batch_size, lambda row: row.method != "ar"):
        alone = row.method == "mars" and row.options.get("threshold") is None
        cost, kind = sweep.cost(row), ", adapter" if row.is_adapted else ", one token" if alone else ""
        name = f"{row.method}{kind}"
        if row.is_lossless or (cost is not None and cost.value <= ALLOWED_LOSS):
            best[name] = max(best.get(name, row), row, key=speed_of)
    return best


STUDY = Study(
    key="speedup",
    name="Speed",
    asks="how much faster than AR is MARS, and at what accuracy?",
    order=4,
    grid=lambda scale, quick: read_grid(shipped_grid(scale.scale), quick=quick),
    layout="speedup/page.md",
    slots=slots,
    figures=_draw,
    claims=tuple(speed_claims.speed_claims()),
    holds=(
        Item(
            key="table5", name="Table 5", asks="how fast is the block-level cache, by batch size?",
            anchor="#table-5-the-block-level-cache", section=speed_claims.TABLE5_SECTION,
        ),
        Item(
            key="table6", name="Table 6", asks="does MARS help speculative decoding, as target or draft?",
            anchor="#table-6-speculative-decoding", section=speed_claims.TABLE6_SECTION,
        ),
    ),
)  # fmt: skip
