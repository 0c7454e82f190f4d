"""The page about a real model on two CPU cores: tokens per forward pass and speed of lossless drafting."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from marsbench.fetching.models import described, is_known
from marsbench.findings.between_lines import emits_more
from marsbench.findings.cells import Cells, columns, done_cells, latest_cells, latest_stages, same_answers
from marsbench.findings.in_words import with_interval
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import A_A, SweepCells, over_prompts, races_in_words, speed_of, speed_up
from marsbench.line import Line
from marsbench.methods import METHODS
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.racing.grid import Grid
from marsbench.rendering.figures import Labelled, Seeds, labelled_figure
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import Row, SweepRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import Estimate, ratio_of_totals
from marsbench.studies.lines import short
from marsbench.studies.mars_on_gpu import emitted
from marsbench.studies.study import Study

# ---- the lines, and the claims about them ----

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
    return _line(stage, f"verified, {layout} (W = {window})", "mars-verified", layout=layout, block_size=window)


def _with_lookup(stage: str, window: int, layout: str = "groups") -> Line:
    words = f"verified, {layout} (W = {window}) and prompt lookup"
    return _line(stage, words, "mars-lookup", layout=layout, block_size=window, **_LOOKUP)


AR, AR_OF_MARS, AR_OF_LONG_MARS = (_line(stage, "AR decoding", "ar") for stage in (BASE, MARS, LONG_MARS))
PROMPT_LOOKUP = _line(BASE, "prompt lookup", "prompt-lookup", **_LOOKUP)
GROUPS, SHIPPED_BOTH = _verified(ADAPTER, "groups", 4), _with_lookup(SHIPPED, 4, "linear")
SHIPPED_GROUPS, SHIPPED_LINEAR = (_verified(SHIPPED, layout, 4) for layout in ("groups", "linear"))
_FEW: dict[str, Any] = {"layout": "groups", "block_size": 4, "groups": 2}
PLAN = TablePlan(
    "real-model",
    "Lossless drafting on two CPU cores",
    (
        AR,
        PROMPT_LOOKUP,
        *(GROUPS, _verified(ADAPTER, "groups", 3), _verified(ADAPTER, "linear", 4)),
        *(_verified(LONG_ADAPTER, "groups", window) for window in (4, 3)),
        *(_verified(HEADED, "groups", 4), _line(HEADED, "verified, two groups (W = 4)", "mars-verified", **_FEW)),
        *(_with_lookup(HEADED, 3), _with_lookup(HEADED, 4), _verified(QUARTER, "groups", 4)),
        *(SHIPPED_GROUPS, _verified(SHIPPED, "groups", 8), SHIPPED_LINEAR, SHIPPED_BOTH),
        *(AR_OF_MARS, *[_verified(MARS, "groups", window) for window in (4, 3)]),
        *[_line(MARS, f"tau = {short(tau)}", "mars", block_size=4, threshold=tau) for tau in (0.95, 0.7)],
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
        "The shipped adapter, which has a draft head, drafts better than prompt lookup", "adapter-lookup",
        beside=(
            ("an adapter without a head", _more(GROUPS.name, PROMPT_LOOKUP.name)),
            ("shipped adapter and prompt lookup", _more(SHIPPED_BOTH.name, PROMPT_LOOKUP.name)),
        ),
    ),
)  # fmt: skip

_RACED = PROMPT_LOOKUP, SHIPPED_GROUPS, SHIPPED_LINEAR, _with_lookup(SHIPPED, 3, "linear"), SHIPPED_BOTH
# The raced lines in bf16, where rounding could decide between two tokens that are almost equal.
IN_BF16 = TablePlan(
    "real-model-bf16",
    "Lossless methods in bf16",
    tuple(replace(line, name=f"{line.name}_bfloat16", dtype="bfloat16") for line in (AR, *_RACED)),
    benchmarks=("ifeval", "gsm8k", "humaneval"),
    questions=34,
    own="Real model in bf16",
)
_TUNED = {MARS: AR_OF_MARS.name, LONG_MARS: AR_OF_LONG_MARS.name}
OWN_AR = {line.name: _TUNED.get(line.stage, AR.name) for line in PLAN.lines}  # line -> AR decoding of its own model
OWN_AR |= {line.name: IN_BF16.lines[0].name for line in IN_BF16.lines}

OUTSIDER = "llama.cpp"
OUTSIDERS = (  # of batch 1 alone; quantised weights make another model
    Line.named(OUTSIDER, BASE, "llama-cpp"),
    Line.named(f"{OUTSIDER}, prompt lookup", BASE, "llama-cpp-lookup", **_LOOKUP),
    *[Line.named(f"{OUTSIDER}, {kind}", BASE, "llama-cpp", quantised=kind) for kind in ("q8_0", "q4_1")],
)


def grid_at(scale: Preset, dtype: str, *, beside: bool = False) -> Grid:
    """A race of `ar` and lossless lines over many prompts; `beside`: a short one with `generate` and llama.cpp."""
    names = {"ar": "ar", **({"hf-generate": "hf-generate", A_A: "ar"} if beside else {})}
    baselines = [Line.named(name, BASE, method) for name, method in names.items()]
    small = scale.in_seconds
    return Grid(
        contenders=(*baselines, *[replace(line, name=line.label) for line in _RACED], *(OUTSIDERS if beside else ())),
        batch_sizes=(1, 4),
        prompts=(2 if small else 16) if beside else 4 if small else 48,
        repeats=2 if small else 3 if beside else 1,  # the watched lap has the time of every prompt
        benchmarks=tuple(PLAN.of(scale.benchmarks)),
        max_new_tokens=min(64 if beside else 128, scale.max_new_tokens),
        timeout_s=600,
        positions=0 if beside else 16 if small else 64,
        dtype=dtype,
        page=PLAN.key,
    )


GRID_NAMES = ("ar", *[line.label for line in _RACED])


FIGURE = "figures/real-model_speed"  # beside the page, less the extension


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells, (sweeps, others) = latest_cells(rows), _races(rows)
    engines = {dtype: _outsiders(race) for dtype, race in others.items()}
    each = {"raced": sweeps, "raced_beside": engines}.items()
    return {
        "in_part": _in_part(cells, sweeps),
        "base": _base(rows, cells),
        "answers": "\n".join([*_fastest(sweeps), *_lossless(cells)]),
        "figure": f"![Tokens per second by line, type of weights and batch size]({FIGURE}.png)" if sweeps else "",
        "clock": _clock(sweeps),
        **{name: races_in_words(row for race in races.values() for row in race.rows) for name, races in each},
        "beside": _clock(engines),
        "tokens": _tokens(cells, rows),
    }


def draw(seeds: Seeds, reports_dir: Path) -> list[Path]:
    """Draws absolute tokens per second, so that types of weights can be compared, too."""
    sweeps, _ = _races(seeds[0])
    series = defaultdict[str, dict[str, Estimate]](dict)
    for (name, size), row in [each for sweep in sweeps.values() for each in sweep.done.items() if each[0][0] != A_A]:
        speed = ratio_of_totals([sum(row.emitted)] * len(row.seconds), row.seconds)
        series[f"{row.dtype}, batch {size}"][name] = speed
    return labelled_figure([Labelled("tokens per second", series, level=0.0)], reports_dir / FIGURE) if series else []


def in_brief(rows: Sequence[Row]) -> str:
    """Its speeds at the smallest batch, a line of a list by type of weights; empty without a race."""
    said = []
    for dtype, sweep in _races(rows)[0].items():
        lookup, adapted = (_best_lossless(sweep, stages) for stages in ((BASE,), ADAPTED))
        if lookup and adapted:
            larger = [row for row in sweep.by_batch(adapted.contender) if row and row.batch_size > adapted.batch_size]
            ratios = [(row.batch_size, ratio) for row in larger if (ratio := speed_up(row))]
            at = "".join(f" ({ratio.value:.2f} at batch {size})" for size, ratio in ratios)
            said.append(
                f"Without MARS, but with SmolLM2-135M's answers unchanged, on two CPU cores, {dtype}: prompt lookup is "
                f"{_over_ar(sweep, lookup)} times as fast as AR decoding at batch 1, the fastest setting with "
                f"our adapter {_over_ar(sweep, adapted)}{at}; {adapted.prompts} prompts."
            )
    return "\n- ".join(said)


def _races(rows: Sequence[Row]) -> tuple[dict[str, SweepCells], dict[str, SweepCells]]:
    """By type of weights: the race with the most prompts, and the race beside other engines if that is another."""
    most, others = dict[str, SweepCells](), dict[str, SweepCells]()
    for (dtype, _), sweep in SweepCells.by_race(rows).items():
        (others if dtype in most else most)[dtype] = sweep
    return most, others


def _over_ar(sweep: SweepCells, row: SweepRow, *, ended: bool = False) -> str:
    """Its speed over `ar`, if possible with an interval over prompts; `ended`: only prompts that end by EOS."""
    ar, laps = sweep.done.get(("ar", row.batch_size)), speed_up(row)
    ratio = over_prompts(row, ar, ended=ended) if ar else None
    return with_interval(ratio, 2) if ratio else f"{laps.value:.2f}" if laps else "n/a"


def _in_part(cells: Cells, sweeps: Mapping[str, SweepCells]) -> str:
    lacking, in_bf16 = (
        [line.label for line in plan.lines if done_cells(cells, line.name).keys() < columns(plan).keys()]
        for plan in (PLAN, IN_BF16)
    )
    raced = [{name for name, _ in sweep.done} >= {*GRID_NAMES} for sweep in sweeps.values()]
    missing = [f"answers of {', '.join(lacking)}"] if lacking else []
    missing += ["answers in bfloat16"] if in_bf16 and "bfloat16" in sweeps else []
    missing += [] if raced and all(raced) else ["parts of the race" if raced else "the race"]
    return f"**In part.** Not measured yet: {'; '.join(missing)}." if missing else ""


def _base(rows: Sequence[Row], cells: Cells) -> str:
    """The base of the rows, and how many questions it answers right."""
    named = []
    for base in sorted({str(row.provenance["base"]) for row in rows if row.provenance.get("base")}):
        packed = described(base)[0].quantised if is_known(base) and base.endswith("-gguf") else ""
        how = f" with dequantised weights (from {packed})" if packed else ""
        named.append(f"`{base}`{how}")
    said = [f"The base is {', '.join(named)}."] if named else []
    if answers := [right for row in done_cells(cells, AR.name).values() for right in row.correct]:
        said.append(
            f"It answers {sum(answers):g} of {len(answers):,} questions of GSM8K and HumanEval right, so this part "
            "shows drafting speed only."
        )
    return " ".join(said)


def _fastest(sweeps: Mapping[str, SweepCells]) -> Iterator[str]:
    for dtype, sweep in sweeps.items():
        best = _best_lossless(sweep)
        if best is None or not (ar := sweep.done.get(("ar", best.batch_size))):
            continue
        cut = best.prompts - sum(best.finished)
        whole = f"; on the others it is {_over_ar(sweep, best, ended=True)}" if 2 * cut < best.prompts else ""
        yield (
            f"- In {dtype} at batch {best.batch_size}, the fastest line that gives exactly the base's tokens is "
            f"{best.contender}. It emits {best.tokens_per_second:.0f} tokens/s, `ar` {ar.tokens_per_second:.0f}. The "
            f"ratio is {_over_ar(sweep, best)} over {best.prompts} prompts. {cut} answers are cut at "
            f"{best.max_new_tokens} tokens{whole}."
        )


def _lossless(cells: Cells) -> Iterator[str]:
    """How many answers of lossless methods equal those of AR decoding."""
    for dtype, plan in (("float32", PLAN), ("bfloat16", IN_BF16)):
        names = [line.name for line in plan.lines if METHODS[line.method].lossless and line.name != OWN_AR[line.name]]
        done = [(done_cells(cells, name), done_cells(cells, OWN_AR[name])) for name in names]
        counted = [same_answers(mine, its) for mine, its in done if mine]
        if counted:
            same, asked = (sum(counts) for counts in zip(*counted, strict=True))
            yield f"- In {dtype}, {same:,} of {asked:,} answers of lossless methods equal those of AR decoding."


def _clock(sweeps: Mapping[str, SweepCells]) -> str:
    names = dict.fromkeys(name for sweep in sweeps.values() for name in sweep.names if name != A_A)
    heads = [f"{dtype}, {head}" for dtype, sweep in sweeps.items() for head in sweep.heads]
    of_name = {name: [(sweep, row) for sweep in sweeps.values() for row in sweep.by_batch(name)] for name in names}
    lines = [
        [name, *[f"{row.tokens_per_second:.0f} ({_over_ar(sweep, row)})" if row else "-" for sweep, row in cells]]
        for name, cells in of_name.items()
    ]
    return table(["tokens/s (over `ar`)", *heads], lines)


def _outsiders(sweep: SweepCells) -> SweepCells:
    best = _best_lossless(sweep)
    kept = [row for row in sweep.rows if row.method in ("ar", "hf-generate") or OUTSIDER in row.contender]
    return SweepCells([*kept, *[row for row in sweep.rows if best and row.contender == best.contender]])


def _tokens(cells: Cells, rows: Sequence[Row]) -> str:
    trained = {stage: row for stage, row in latest_stages(rows).items() if row.status == "done"}
    lines = []
    for line in PLAN.lines:
        if (done := done_cells(cells, line.name)) and line.method != "ar":
            tokens = [f"{row.tokens_per_forward.value:.2f}" for row in done.values()]
            whole = sum(sum(row.finished) for row in done.values())
            learned = f"{trained[line.trained].tokens:,}" if line.trained in trained else ""
            of_whole = f"{emitted(done, ended=True).value:.2f}" if whole else "-"  # one hardly trained ends no answer
            lines.append([line.label, *tokens, of_whole, str(whole), learned])
    head = ["tokens/forward", *columns(PLAN).values(), "answers that end by EOS", "their number", "tokens trained"]
    return table(head, lines)


def _best_lossless(sweep: SweepCells, stages: Collection[str] = (BASE, *ADAPTED)) -> SweepRow | None:
    """The fastest lossless row at the smallest batch whose tokens are the base's, without AR decoding itself."""
    rows = [row for row in sweep.at(min(sweep.batch_sizes)) if row.is_lossless and row.stage in stages]
    ours = [row for row in rows if row.method not in ("ar", "hf-generate") and OUTSIDER not in row.contender]
    return max(ours, key=speed_of, default=None)


STUDY = Study(
    asks="how fast is lossless drafting for a real model on a laptop?",
    order=7,
    plan=PLAN,
    # In fp32, where lossless lines are exact, and in bf16; each beside other engines, too.
    races=lambda scale: [
        grid_at(scale, dtype, beside=beside) for beside in (False, True) for dtype in ("float32", "bfloat16")
    ],
    also=(IN_BF16,),
    layout="real_model/page.md",
    slots=slots,
    figures=draw,
    claims=CLAIMS,
)
