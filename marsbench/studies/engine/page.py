"""The engine's page: which methods are lossless, what a forward covers, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from marsbench.findings.company import company_remark
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import Race, SweepCells, races_in_words
from marsbench.methods import METHODS
from marsbench.presets import Preset
from marsbench.racing.grid import Contender, Grid, checkpoints_of
from marsbench.rendering.markdown import folded, paragraphs, table
from marsbench.rendering.sections import command, facts_section, racing, seeds_in_words
from marsbench.rows.kinds import ExactnessRow, Row, TrainingRow
from marsbench.studies.study import Study, measured_by

_BATCH = 32  # prompts decoded at once where only tokens count


def _verified(layout: str, window: int, threshold: float | None = None) -> Contender:
    options = {"layout": layout, "block_size": window}
    name = f"mars-verified, {layout}, window {window}" + (f", tau = {threshold:g}" if threshold is not None else "")
    return Contender(name, "mars", "mars-verified", options, threshold)


AR = Contender("ar", "mars", "ar", {})
MARS = Contender("mars", "mars", "mars", {"block_size": 4}, 0.95)
SPECULATIVE = Contender("speculative", "mars", "speculative", {"draft_length": 4}, draft="draft_ar_sft")
PROMPT_LOOKUP = Contender("prompt-lookup", "mars", "prompt-lookup", {"draft_length": 4})
PROFILED = (AR, MARS, _verified("groups", 4), _verified("linear", 4, 0.5))
EXACT = (
    MARS,  # not lossless: what the verified ones are held against
    _verified("groups", 4),
    _verified("groups", 8),
    _verified("linear", 4, 0.5),
    SPECULATIVE,
    Contender(
        "speculative-mars-draft", "mars", "speculative", {"draft_length": 4, "draft_method": "mars"}, None, "draft_mars"
    ),
    Contender("medusa-chain", "medusa", "medusa", {"tree_width": 1}),
    Contender("medusa-tree", "medusa", "medusa", {"tree_width": 3}),
    Contender("jacobi", "mars", "jacobi", {"block_size": 4}),
    PROMPT_LOOKUP,
    Contender("mars-speculative", "mars", "mars-speculative", {"draft_method": "mars"}, 0.95, "draft_mars"),
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


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    races = SweepCells.of(rows).races
    raced = [row for race in races.values() for row in race.values()]
    return [
        f"# The engine at scale {scale}: lossless methods, and where the time goes",
        "\n".join(_answers(rows, races)),
        _exactness(rows),
        "One loop decodes by every method; what differs between the lines is the method alone. How fast each is, "
        f"[speed](speedup.md) says. {racing(scale)} {seeds_in_words(seeds)}",
        races_in_words(raced),
        company_remark(raced),
        folded(_profiles(races), _costs(races), _heads(rows), facts_section(rows, command("reproduce-engine", scale))),
    ]


def _answers(rows: Sequence[Row], races: dict[int, Race]) -> Iterator[str]:
    exact = [row for row in rows if isinstance(row, ExactnessRow) and METHODS[row.method].lossless]
    if exact:
        same, asked = sum(row.same_as_ar for row in exact), sum(row.prompts for row in exact)
        yield f"- Of {asked:,} answers by lossless methods, {same:,} are those of `ar`, token for token."
    for size, race in races.items():
        shares = [f"{name} {share['decoder'] + share['LM head']:.0f} %" for name, share in _shares(race).items()]
        if shares:
            yield f"- At batch {size}, the model itself takes this share of a step: {', '.join(shares)}."


def _shares(race: Race) -> dict[str, dict[str, float]]:
    """Contender -> part of a step -> its share of the time, in %."""
    profiles = {name: row.profile for name, row in race.items() if row.profile}
    return {
        name: {part: 100 * profile.get(part, 0.0) / sum(profile.values()) for part in PARTS}
        for name, profile in profiles.items()
    }


def _exactness(rows: Sequence[Row]) -> str:
    found = [row for row in rows if isinstance(row, ExactnessRow)]
    head = ["method", "options", "checkpoint", "prompts", "same tokens as `ar`", "tokens/forward"]
    lines = []
    for row in found:
        options = ", ".join(f"{name} = {value}" for name, value in row.options.items())
        counts = f"{row.prompts:,}", f"{row.same_as_ar:,}", f"{row.emitted / row.row_forwards:.2f}"
        lines.append([row.method, options, row.stage, *counts])
    text = (
        "Every test question of every benchmark, decoded greedily in " + (found[0].dtype if found else "full precision")
        + " and held against `ar` of the same checkpoint, token by token. `mars` and `mars-speculative` with a "
        "threshold commit what they have not verified; all others verify."
    )  # fmt: skip
    return paragraphs("## Is it lossless?", text, table(head, lines, text=(0, 1, 2)))


def _profiles(races: dict[int, Race]) -> str:
    lines = [
        [f"{name}, batch {size}", *[f"{share[part]:.0f}" for part in PARTS]]
        for size, race in races.items()
        for name, share in _shares(race).items()
    ]
    text = (
        "Shares of the time in %, in a run of its own with timers switched on. The decoder and the LM head are the "
        "model's; proposing and accepting are the method's; the loop is the rest: attention masks, cache places, "
        "committing tokens, and what the host does."
    )
    return paragraphs("## Where the time goes", text, table(["", *PARTS], lines))


def _costs(races: dict[int, Race]) -> str:
    text = (
        "Entries that one forward covers, per row of the batch, and the most that KV caches ever held. The cache has "
        "as many slots per row as the longest row needs at the time."
    )
    lines = [
        [f"{name}, batch {size}", f"{row.positions_of_a_row:.1f}", f"{row.cache_bytes / 1024:,.0f}"]
        for size, race in races.items()
        for name, row in race.items()
    ]
    held = table(["", "positions", "cache, KiB"], lines)
    return paragraphs("## What a forward covers, and what the cache holds", text, held)


def _heads(rows: Sequence[Row]) -> str:
    trained = {row.stage: row for row in rows if isinstance(row, TrainingRow)}
    lines = []
    if "medusa" in trained:
        measures = sorted(trained["medusa"].measures.items())
        found = ", ".join(f"{100 * share:.1f} %" for name, share in measures if name.startswith("head_"))
        heads = f"heads 1 to {len(measures)}, conversations they were not trained on"
        lines.append(f"- Medusa heads name the right token ({heads}): {found}.")
    if "mars" in trained and "draft_ar_sft" in trained:
        draft, target = trained["draft_ar_sft"].parameters, trained["mars"].parameters
        lines.append(f"- The draft model has {draft:,} parameters, {100 * draft / target:.0f} % of the target's.")
    return paragraphs("## What the drafting methods were given", "\n".join(lines)) if lines else ""


STUDY = Study(
    key="engine",
    name="Engine",
    asks="are the lossless methods exact, and where does a step's time go?",
    place=3,
    in_paper=False,
    measure=measured_by("marsbench.studies.engine.measuring", "engine_rows"),
    timed=True,
    stages=tuple(checkpoints_of((*PROFILED, *EXACT))),
    sections=sections,
)
