"""AR SFT and MARS, trained four times as long as for the tables: accuracy and a race. Seeds 0 to 2 are shipped."""

from collections.abc import Sequence
from functools import partial

from marsbench.findings.between_lines import as_accurate, emits, more_accurate
from marsbench.findings.claims import TIMES, Claim
from marsbench.findings.sweep import SweepCells, on_sweep, printed_ratio, races_in_words, speed_up
from marsbench.line import Line
from marsbench.racing.grid import COMPILED_AR
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.studies.gains import LIBRARY, race_of
from marsbench.studies.lines import AR_SFT, mars, mars_name, short, verified
from marsbench.studies.study import TablePage

_ENDING, _TAUS, _BATCHES = "_4x_data", (0.99, 0.95, 0.9, 0.8), (1, 4, 16)
_LINES = AR_SFT, *[mars("mars", 4, tau) for tau in (None, *_TAUS)]
PLAN = TablePlan(
    "longer",
    "AR SFT and MARS, trained four times as long",
    tuple(line.of_another_stage(_ENDING, "4 times as long") for line in _LINES),
    own="Longer",
)
_AR, _STAGE = f"ar_sft{_ENDING}", f"mars{_ENDING}"
_ONE, _SUREST, _SURE = (f"{mars_name('mars', 4, tau)}{_ENDING}" for tau in (None, *_TAUS[:2]))
_TRIED = (
    *[Line.named(f"tau = {short(tau)}", _STAGE, "mars", block_size=4, threshold=tau) for tau in _TAUS],
    Line.named("verified, linear (W = 4)", _STAGE, "mars-verified", **verified("linear", 4, 0.5).options),
)


def _raced(rows: Sequence[Row]) -> str:
    """Tokens per second over compiled `ar`, by batch size, and that of `ar` over transformers' own loop."""
    race, lines = SweepCells.of(rows), list[list[str]]()
    for line in _TRIED:
        cells = race.by_batch(line.compiled_form().name)
        if first := next(filter(None, cells), None):
            said = f"{first.tokens_per_forward:.2f}", f"{100 * first.accuracy.value:.1f}"
            lines.append([line.name, *[printed_ratio(speed_up(row), "") for row in cells], *said])
    if not lines:
        return ""
    over = [printed_ratio(speed_up(row, LIBRARY), "") for row in race.by_batch(COMPILED_AR)]
    return paragraphs(
        table(
            ["tokens/s over compiled `ar`", *race.heads, "tokens/forward", "right, %"],
            [*lines, [f"compiled `ar` over `{LIBRARY}`", *over, "", ""]],
        ),
        f"*{races_in_words(race.rows)} One training seed.*",
    )


# The claim's own number ("") and what stands beside it, by its words.
POINTS_AT, TOKENS_AT = ("", "at tau = .99", "at tau = .95"), ("tokens/forward at .99", "at .95")
FASTER = ("speed over AR at .95, batch 1", "batch 4", "batch 16")
_SPEED_AT_95 = partial(SweepCells.speed_up, name=f"tau = {short(_TAUS[1])}, compiled")  # of MARS over `ar`
_BESIDE = {
    POINTS_AT[1]: more_accurate(PLAN, _SUREST, _AR),
    POINTS_AT[2]: more_accurate(PLAN, _SURE, _AR),
    TOKENS_AT[0]: emits(PLAN, _SUREST, Bound()),
    TOKENS_AT[1]: emits(PLAN, _SURE, Bound()),
    **{
        words: Claim(measure=on_sweep(partial(_SPEED_AT_95, batch_size=size)), bound=Bound(), unit=TIMES)
        for words, size in zip(FASTER, _BATCHES, strict=True)
    },
}
STUDY = TablePage(
    asks="what do AR SFT and MARS come to with four times the training?",
    order=2,
    on="table2",
    plan=PLAN,
    claims=(
        as_accurate(
            PLAN, _ONE, _AR, "Trained 4 times as long, MARS at one token matches AR SFT", "longer-matches",
            ours=True, beside=tuple(_BESIDE.items()),
        ),
    ),
    races=lambda scale: race_of(scale, PLAN.key, Line.named("ar", _STAGE, "ar"), _TRIED, _BATCHES),
    more=(_raced,),
)  # fmt: skip
