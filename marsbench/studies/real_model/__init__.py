"""The page on a real model on two CPU cores: what lossless drafting gives there, by tokens and by the clock."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marsbench.fetching.models import described, is_known
from marsbench.findings.cells import Cells, columns, done_cells, latest_cells, latest_stages, same_answers
from marsbench.findings.in_words import with_interval
from marsbench.findings.query import RACED
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import A_A, SweepCells, over_prompts, races_in_words, speed_of, speed_up
from marsbench.methods import METHODS
from marsbench.rendering.claims_in_words import page_claims
from marsbench.rendering.figures import Labelled, labelled_figure
from marsbench.rendering.markdown import table
from marsbench.rendering.sections import laid_out
from marsbench.rows.kinds import Row, SweepRow
from marsbench.statistics.intervals import ratio_of_totals
from marsbench.studies.real_model import lossless_lines as arms
from marsbench.studies.real_model.lossless_lines import CLAIMS, IN_BF16, OUTSIDER, OWN_AR, PLAN
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run

FIGURE = "figures/real-model_speed"  # beside the page, less the extension


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells, (sweeps, others) = latest_cells(rows), _races(rows)
    engines = {dtype: _outsiders(race) for dtype, race in others.items()}
    return {
        "in_part": _in_part(cells, sweeps),
        "base": _base(rows, cells),
        "claims": page_claims(STUDY.claims, seeds, scale),
        "answers": "\n".join([*_fastest(sweeps), *_lossless(cells)]),
        "figure": f"![Tokens per second by line, type of weights and batch size]({FIGURE}.png)" if sweeps else "",
        "clock": _clock(sweeps),
        "raced": _raced(sweeps),
        "beside": f"{_clock(engines)}\n\n*{_raced(engines)}*" if engines else "",
        "tokens": _tokens(cells, rows),
    }


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    """Tokens per second themselves, so that types of weights compare too."""
    sweeps, _ = _races(rows)
    series = {
        f"{dtype}, batch {size}": {
            row.contender: ratio_of_totals([sum(row.emitted)] * len(row.seconds), row.seconds)
            for row in sweep.at(size)
            if row.contender != A_A
        }
        for dtype, sweep in sweeps.items()
        for size in sweep.batch_sizes
    }
    return labelled_figure([Labelled("tokens per second", series, level=0.0)], reports_dir / FIGURE) if series else []


def in_brief(rows: Sequence[Row]) -> str:
    """Its speeds at the smallest batch in a sentence, for pages on the whole paper; empty without a race."""
    said = []
    for dtype, sweep in _races(rows)[0].items():
        lookup, adapted = (_best_lossless(sweep, stages) for stages in ((arms.BASE,), arms.ADAPTED))
        if lookup and adapted:
            more = [size for size in sweep.batch_sizes if size > adapted.batch_size]
            beside = [row for size in more if (row := sweep.done.get((adapted.contender, size)))]
            ratios = {row.batch_size: ratio for row in beside if (ratio := speed_up(row))}
            at = "".join(f", at batch {size} {ratio.value:.2f}" for size, ratio in ratios.items())
            said.append(
                f"in {dtype} prompt lookup is {_over_ar(sweep, lookup)} and our adapter with it "
                f"{_over_ar(sweep, adapted)} times as fast as `ar` at batch 1{at} ({adapted.prompts} prompts)"
            )
    return f"Lossless, on the untouched model and two CPU cores: {'; '.join(said)}." if said else ""


def _races(rows: Sequence[Row]) -> tuple[dict[str, SweepCells], dict[str, SweepCells]]:
    """The race of the most prompts, and the one beside other engines where that is another, by type of weights."""
    most, others = dict[str, SweepCells](), dict[str, SweepCells]()
    for (dtype, _), sweep in SweepCells.by_race(rows).items():
        (others if dtype in most else most)[dtype] = sweep
    return most, others


def _raced(sweeps: Mapping[str, SweepCells]) -> str:
    return races_in_words(row for sweep in sweeps.values() for row in sweep.rows)


def _over_ar(sweep: SweepCells, row: SweepRow, *, ended: bool = False) -> str:
    """Its speed over `ar`, with an interval over prompts where prompts were answered one by one.

    `ended`: over the prompts whose answers end by EOS alone.
    """
    ar = sweep.done.get(("ar", row.batch_size))
    ratio = over_prompts(row, ar, ended=ended) if ar else None
    laps = speed_up(row)
    return with_interval(ratio, 2) if ratio else f"{laps.value:.2f}" if laps else "n/a"


def _in_part(cells: Cells, sweeps: Mapping[str, SweepCells]) -> str:
    lacking, short = (
        [line.label for line in plan.lines if done_cells(cells, line.name).keys() < columns(plan).keys()]
        for plan in (PLAN, IN_BF16)
    )
    raced = [{name for name, _ in sweep.done} for sweep in sweeps.values()]
    missing = [f"answers of {', '.join(lacking)}"] if lacking else []
    missing += ["answers in bfloat16"] if short and "bfloat16" in sweeps else []
    if not raced or not all(names >= {*arms.GRID_NAMES} for names in raced):
        missing.append("parts of the race" if any(raced) else "the race")
    return f"**In part.** Not measured yet: {'; '.join(missing)}." if missing else ""


def _base(rows: Sequence[Row], cells: Cells) -> str:
    """Which of the packaged models the rows are of, where they are of one, and what it gets right."""
    bases = sorted({str(row.provenance["base"]) for row in rows if row.provenance.get("base")})
    how = {
        base: f", whose weights were quantised ({described(base)[0].quantised}) and are dequantised here"
        for base in bases
        if is_known(base) and base.endswith("-gguf")
    }
    named = ", ".join(f"`{base}`{how.get(base, '')}" for base in bases)
    said = [f"The base is {named}."] if bases else []
    if answers := [right for row in done_cells(cells, arms.AR.name).values() for right in row.correct]:
        said.append(
            f"It answers {sum(answers):g} of {len(answers):,} questions of GSM8K and HumanEval right, so this part is "
            "about drafting speed only."
        )
    return " ".join(said)


def _fastest(sweeps: Mapping[str, SweepCells]) -> Iterator[str]:
    for dtype, sweep in sweeps.items():
        best = _best_lossless(sweep)
        if best is None or not (ar := sweep.done.get(("ar", best.batch_size))):
            continue
        cut = best.prompts - sum(best.finished)
        whole = f"; over the others alone {_over_ar(sweep, best, ended=True)}" if 2 * cut < best.prompts else ""
        yield (
            f"- In {dtype} at batch {best.batch_size}, the fastest line that gives the base's very tokens is "
            f"{best.contender}: {best.tokens_per_second:.0f} tokens/s, {_over_ar(sweep, best)} times as fast as `ar` "
            f"({ar.tokens_per_second:.0f}). {best.prompts} prompts, {cut} of them cut at {best.max_new_tokens} "
            f"tokens{whole}."
        )


def _lossless(cells: Cells) -> Iterator[str]:
    """How many answers are those of AR decoding, of those that are promised to be."""
    for dtype, plan in (("float32", PLAN), ("bfloat16", IN_BF16)):
        counted = [
            same_answers(done, done_cells(cells, OWN_AR[line.name]))
            for line in plan.lines
            if METHODS[line.method].lossless
            and line.name != OWN_AR[line.name]
            and (done := done_cells(cells, line.name))
        ]
        if counted:
            same, asked = (sum(counts) for counts in zip(*counted, strict=True))
            yield f"- In {dtype}, of {asked:,} answers that a method promises to be those of AR decoding, {same:,} are."


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
            whole = [sum(row.finished) for row in done.values()]
            tokens = [f"{row.tokens_per_forward.value:.2f}" for row in done.values()]
            emitted = sum(e for row in done.values() for e, end in zip(row.emitted, row.finished, strict=True) if end)
            passes = sum(f for row in done.values() for f, end in zip(row.forwards, row.finished, strict=True) if end)
            learned = f"{trained[line.trained].tokens:,}" if line.trained in trained else ""
            of_whole = f"{emitted / passes:.2f}" if passes else "-"  # a model hardly trained ends no answer
            lines.append([line.label, *tokens, of_whole, str(sum(whole)), learned])
    return table(
        ["tokens/forward", *columns(PLAN).values(), "of answers that end", "how many", "tokens trained"], lines
    )


def _best_lossless(sweep: SweepCells, stages: Collection[str] = (arms.BASE, *arms.ADAPTED)) -> SweepRow | None:
    """The fastest at the smallest batch whose tokens are promised to be the base's; AR decoding itself left out."""
    rows = [row for row in sweep.at(min(sweep.batch_sizes)) if row.is_lossless and row.stage in stages]
    ours = [row for row in rows if row.method not in ("ar", "hf-generate") and OUTSIDER not in row.contender]
    return max(ours, key=speed_of, default=None)


def _measured(run: "Run") -> list[Row]:
    """A race in fp32, which keeps every promise to the token, and in bf16 where the machine computes in it."""
    from marsbench.racing.sweep import Sweep

    dtypes = [dtype for dtype in ("float32", "bfloat16") if run.computes_in(dtype)]
    grids = [arms.grid_at(run.scale, dtype, beside=beside) for beside in (False, True) for dtype in dtypes]
    return [row for grid in grids for row in Sweep(run, grid).rows()]


STUDY = Study(
    asks="what does MARS do for a model that people use, on hardware that everybody has?",
    place=7,
    in_paper=False,
    plan=PLAN,
    measure=_measured,
    kinds=RACED,
    also=(IN_BF16,),
    timed=True,
    sections=laid_out(__package__, slots, PLAN),
    figures=draw,
    claims=CLAIMS,
)
