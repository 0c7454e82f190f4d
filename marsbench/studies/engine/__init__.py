"""The engine's page: which methods are lossless, what a forward covers, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import SweepCells
from marsbench.line import Line, checkpoints_of
from marsbench.methods import METHODS
from marsbench.presets import Preset
from marsbench.racing.grid import Grid
from marsbench.rendering.markdown import table
from marsbench.rendering.page import laid_out
from marsbench.rows.kinds import ExactnessRow, Row, SweepRow, TrainingRow
from marsbench.studies.study import Study, measured_by

_BATCH = 32  # prompts decoded at once where only tokens count


def _verified(layout: str, window: int, threshold: float | None = None) -> Line:
    pruned = {} if threshold is None else {"threshold": threshold}
    name = f"mars-verified, {layout}, window {window}" + (f", tau = {threshold:g}" if threshold is not None else "")
    return Line.raced(name, "mars", "mars-verified", layout=layout, block_size=window, **pruned)


AR = Line.raced("ar", "mars", "ar")
MARS = Line.raced("mars", "mars", "mars", block_size=4, threshold=0.95)
SPECULATIVE = Line.raced("speculative", "mars", "speculative", draft_length=4, draft="draft_ar_sft")
PROMPT_LOOKUP = Line.raced("prompt-lookup", "mars", "prompt-lookup", draft_length=4)
PROFILED = (AR, MARS, _verified("groups", 4), _verified("linear", 4, 0.5))
EXACT = (
    MARS,  # not lossless: what the verified ones are held against
    _verified("groups", 4),
    _verified("groups", 8),
    _verified("linear", 4, 0.5),
    SPECULATIVE,
    Line.raced(
        "speculative-mars-draft", "mars", "speculative", draft_length=4, draft_method="mars", draft="draft_mars"
    ),
    Line.raced("medusa-chain", "medusa", "medusa", tree_width=1),
    Line.raced("medusa-tree", "medusa", "medusa", tree_width=3),
    Line.raced("jacobi", "mars", "jacobi", block_size=4),
    PROMPT_LOOKUP,
    Line.raced("mars-speculative", "mars", "mars-speculative", draft_method="mars", threshold=0.95, draft="draft_mars"),
)


def profiled_grid(scale: Preset) -> Grid:
    """Where the time of a step goes, at two batch sizes; who is how fast is the sweep's to say."""
    sizes, prompts = ((1, 4), 12) if scale.in_seconds else ((1, 16), 48)
    return Grid(PROFILED, sizes, prompts=prompts, repeats=2, positions=0, profiled=True)


def exactness_grid(scale: Preset) -> Grid:
    """Every question, decoded once."""
    every = (scale.questions or 400) * len(scale.benchmarks)
    return Grid((AR, *EXACT), (_BATCH,), prompts=every, repeats=0, positions=0)


PARTS = "decoder", "LM head", "proposing", "accepting", "loop"  # of a step, as they are timed


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    raced = sorted(SweepCells.of(rows).done.values(), key=lambda row: row.batch_size)
    profiled = [row for row in raced if row.profile]
    exact = [row for row in rows if isinstance(row, ExactnessRow)]
    return {
        "answers": "\n".join(_answers(exact, profiled)),
        "dtype": exact[0].dtype if exact else "full precision",
        "exactness": _exactness(exact),
        "profiles": table(
            ["", *PARTS], [[_called(row), *[f"{_share(row, part):.0f}" for part in PARTS]] for row in profiled]
        ),
        "costs": table(
            ["", "positions", "cache, KiB"],
            [[_called(row), f"{row.positions_of_a_row:.1f}", f"{row.cache_bytes / 1024:,.0f}"] for row in raced],
        ),
        "heads": "\n".join(_heads(rows)),
    }


def _answers(exact: Sequence[ExactnessRow], profiled: Sequence[SweepRow]) -> Iterator[str]:
    lossless = [row for row in exact if METHODS[row.method].lossless]
    if lossless:
        same, asked = sum(row.same_as_ar for row in lossless), sum(row.prompts for row in lossless)
        yield f"- Of {asked:,} answers by lossless methods, {same:,} are those of `ar`, token for token."
    for size, rows in groupby(profiled, key=lambda row: row.batch_size):
        shares = [f"{row.contender} {_share(row, 'decoder', 'LM head'):.0f} %" for row in rows]
        yield f"- At batch {size}, the model itself takes this share of a step: {', '.join(shares)}."


def _share(row: SweepRow, *parts: str) -> float:
    """What some parts of a step take of its time, in %."""
    return 100 * sum(row.profile.get(part, 0.0) for part in parts) / sum(row.profile.values())


def _exactness(exact: Sequence[ExactnessRow]) -> str:
    lines = []
    for row in exact:
        options = ", ".join(f"{name} = {value}" for name, value in row.options.items())
        counts = f"{row.prompts:,}", f"{row.same_as_ar:,}", f"{row.emitted / row.row_forwards:.2f}"
        lines.append([row.method, options, row.stage, *counts])
    head = ["method", "options", "checkpoint", "prompts", "same tokens as `ar`", "tokens/forward"]
    return table(head, lines, text=(0, 1, 2))


def _called(row: SweepRow) -> str:
    return f"{row.contender}, batch {row.batch_size}"


def _heads(rows: Sequence[Row]) -> Iterator[str]:
    trained = {row.stage: row for row in rows if isinstance(row, TrainingRow)}
    if "medusa" in trained:
        measures = sorted(trained["medusa"].measures.items())
        found = ", ".join(f"{100 * share:.1f} %" for name, share in measures if name.startswith("head_"))
        heads = f"heads 1 to {len(measures)}, conversations they were not trained on"
        yield f"- Medusa heads name the right token ({heads}): {found}."
    if "mars" in trained and "draft_ar_sft" in trained:
        draft, target = trained["draft_ar_sft"].parameters, trained["mars"].parameters
        yield f"- The draft model has {draft:,} parameters, {100 * draft / target:.0f} % of the target's."


STUDY = Study(
    key="engine",
    name="Engine",
    asks="are the lossless methods exact, and where does a step's time go?",
    place=3,
    in_paper=False,
    measure=measured_by("marsbench.studies.engine.measuring", "engine_rows"),
    timed=True,
    stages=tuple(checkpoints_of((*PROFILED, *EXACT))),
    sections=laid_out(__package__, slots),
)
