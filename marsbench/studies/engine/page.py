"""The engine's page: which methods are lossless, how fast the loop is, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from marsbench.findings.company import company_remark
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import (
    Race,
    SweepCells,
    positions_of_a_row,
    printed_ratio,
    printed_speed_up,
    races_in_words,
    speed_of,
    speed_ratio,
    speed_up,
    tokens_per_forward_of,
)
from marsbench.methods import METHODS
from marsbench.rendering.figures import by_batch_figure
from marsbench.rendering.markdown import folded, table
from marsbench.rendering.sections import command, facts_section, racing, seeds_in_words
from marsbench.rows.kinds import ExactnessRow, Row, SweepRow, TrainingRow
from marsbench.statistics.intervals import Estimate, Interval

FIGURE = "figures/engine_speed"  # beside the page, less the extension

HOW_EFFICIENCY_READS = (
    "Efficiency is the speed-up over `ar` divided by tokens per forward: how much of the algorithmic gain is left on "
    "the clock. 1 would mean that a forward over a window costs no more than one over a token. The best layout and "
    "window of `mars-verified` is the fastest of the race, which flatters it a little."
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    races = SweepCells.of(rows).races
    return [
        f"# The engine at scale {scale}: lossless methods, speed, and where the time goes",
        "\n".join(_answers(rows, races)),
        f"![Speed-up over ar by batch size]({FIGURE}.png)",
        _targets(races),
        "One loop decodes by every method; what differs between the lines is the method alone. `hf-generate` is "
        f"transformers' own `generate`. {HOW_EFFICIENCY_READS} {racing(scale)} {seeds_in_words(seeds)}",
        races_in_words(row for race in races.values() for row in race.values()),
        company_remark([row for race in races.values() for row in race.values()]),
        folded(
            _exactness(rows),
            _all_speeds(races),
            _costs(races),
            _profiles(races),
            _heads(rows),
            facts_section(rows, command("reproduce-engine", scale)),
        ),
    ]


def _answers(rows: Sequence[Row], races: dict[int, Race]) -> Iterator[str]:
    exact = [row for row in rows if isinstance(row, ExactnessRow) and METHODS[row.method].lossless]
    if exact:
        same, asked = sum(row.same_as_ar for row in exact), sum(row.prompts for row in exact)
        yield f"- Of {asked:,} answers by lossless methods, {same:,} are those of `ar`, token for token."
    for size in [size for size in races if size in (min(races), max(races))]:
        race, best = races[size], _best_verified(races[size])
        if best is not None and {"ar", "hf-generate", "mars"} <= race.keys():
            yield (
                f"- At batch {size}, all eager, `mars` at tau = .95 is {printed_speed_up(race['mars'])} times as fast "
                f"as `ar`, the fastest `mars-verified` ({_setting(best)}) {printed_speed_up(best)} times, and `ar` "
                f"{printed_ratio(speed_ratio(race['ar'], race['hf-generate']))} times as fast as `hf-generate`."
            )


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    races = SweepCells.of(rows).races
    best = {row.contender for race in races.values() if (row := _best_verified(race))}
    shown = [row for race in races.values() for row in race.values() if _stands_alone(row) or row.contender in best]
    series = {
        name: {size: ratio for size, race in races.items() if (ratio := _over_ar(race, name))}
        for name in dict.fromkeys(row.contender for row in shown)
    }
    return by_batch_figure(series, "tokens per second, relative to ar", reports_dir / FIGURE)


def _stands_alone(row: SweepRow) -> bool:
    """Whether a contender has a line in the figure without being the best of several."""
    return row.method not in ("ar", "mars-verified")


def _names(races: dict[int, Race]) -> list[str]:
    return list(dict.fromkeys(name for race in races.values() for name in race))


def _over_ar(race: Race, name: str) -> Estimate | None:
    return speed_ratio(race[name], race["ar"]) if {name, "ar"} <= race.keys() else None


def _best_verified(race: Race) -> SweepRow | None:
    """The layout and window of `mars-verified` that is fastest in a race."""
    return max((row for row in race.values() if row.method == "mars-verified"), key=speed_of, default=None)


def _exactness(rows: Sequence[Row]) -> str:
    found = [row for row in rows if isinstance(row, ExactnessRow)]
    head = ["method", "options", "checkpoint", "prompts", "same tokens as `ar`", "tokens/forward"]
    lines = [
        [
            row.method,
            ", ".join(f"{name} = {value}" for name, value in row.options.items()),
            row.stage,
            f"{row.prompts:,}",
            f"{row.same_as_ar:,}",
            f"{row.emitted / row.row_forwards:.2f}",
        ]
        for row in found
    ]
    text = (
        "Every test question of every benchmark, decoded greedily in " + (found[0].dtype if found else "full precision")
        + " and held against `ar` of the same checkpoint, token by token. `mars` and `mars-speculative` with a "
        "threshold commit what they have not verified; all others verify."
    )  # fmt: skip
    return "\n\n".join(["## Is it lossless?", text, table(head, lines, text=(0, 1, 2))])


def _targets(races: dict[int, Race]) -> str:
    whole = {size: race for size, race in races.items() if {"ar", "hf-generate", "mars"} <= race.keys()}
    head = ["", *[f"batch {size}" for size in whole]]
    lines = [
        [
            "`ar` over `hf-generate`",
            *[printed_ratio(speed_ratio(race["ar"], race["hf-generate"])) for race in whole.values()],
        ]
    ]
    best = [_best_verified(race) for race in whole.values()]
    for title, rows in (
        ("`mars`, tau = .95", [race["mars"] for race in whole.values()]),
        ("`mars-verified`, best", best),
    ):
        lines.append([f"{title}: speed-up over `ar`", *[printed_speed_up(row) for row in rows]])
        lines.append(
            [f"{title}: tokens/forward", *[f"{tokens_per_forward_of(row):.2f}" if row else "" for row in rows]]
        )
        lines.append([f"{title}: efficiency", *[_efficiency(row) if row else "" for row in rows]])
    lines.append(["best layout and window", *[_setting(row) if row else "" for row in best]])
    return table(head, lines)


def _efficiency(row: SweepRow) -> str:
    ratio, tokens = speed_up(row), tokens_per_forward_of(row)
    if ratio is None:
        return printed_ratio(None)
    limits = Interval(ratio.interval.low / tokens, ratio.interval.high / tokens)
    return printed_ratio(Estimate(ratio.value / tokens, limits, ratio.n))


def _setting(row: SweepRow) -> str:
    tau = f", tau = {row.options['threshold']:g}" if "threshold" in row.options else ""
    return f"{row.options['layout']}, window {row.options['block_size']}{tau}"


def _all_speeds(races: dict[int, Race]) -> str:
    head = ["tokens/s over `ar`", *[f"batch {size}" for size in races]]
    lines = [
        [name, *[printed_speed_up(race[name]) if name in race else "" for race in races.values()]]
        for name in _names(races)
    ]
    return "\n\n".join(["## Every contender", table(head, lines)])


def _costs(races: dict[int, Race]) -> str:
    text = (
        "Entries that one forward covers, per row of the batch, and the most that KV caches ever held, a draft model's "
        "included. The cache has as many slots per row as the longest row needs at the time."
    )
    sizes = [size for size in races if size in (min(races), max(races))]
    head = ["", *[f"positions, batch {size}" for size in sizes], *[f"cache, batch {size}, KiB" for size in sizes]]
    lines = []
    for name in _names(races):
        of_sizes = [races[size][name] for size in sizes if name in races[size]]
        if of_sizes and all(row.forwards for row in of_sizes):
            cache = [f"{row.cache_bytes / 1024:,.0f}" for row in of_sizes]
            lines.append([name, *[f"{positions_of_a_row(row):.1f}" for row in of_sizes], *cache])
    return "\n\n".join(["## What a forward covers, and what the cache holds", text, table(head, lines)])


def _profiles(races: dict[int, Race]) -> str:
    parts = ["decoder", "LM head", "proposing", "accepting", "loop"]
    lines = []
    for size in [size for size in races if size in (min(races), max(races))]:
        for row in (races[size].get("ar"), races[size].get("mars"), _best_verified(races[size])):
            if row is not None and row.profile:
                shares = [f"{100 * row.profile.get(part, 0.0) / sum(row.profile.values()):.0f}" for part in parts]
                lines.append([f"{row.contender}, batch {size}", *shares])
    text = (
        "Shares of the time in %, in a run of its own with timers switched on. The decoder and the LM head are the "
        "model's; proposing and accepting are the method's; the loop is the rest: attention masks, cache places, "
        "committing tokens, and what the host does."
    )
    return "\n\n".join(["## Where the time goes", text, table(["", *parts], lines)])


def _heads(rows: Sequence[Row]) -> str:
    trained = {row.stage: row for row in rows if isinstance(row, TrainingRow)}
    lines = []
    if "medusa" in trained:
        measures = sorted(trained["medusa"].measures.items())
        found = ", ".join(f"{100 * share:.1f} %" for name, share in measures if name.startswith("head_"))
        lines.append(f"- Medusa heads name the right token (heads 1 to {len(measures)}, conversations they were not "
                     f"trained on): {found}.")  # fmt: skip
    if "mars" in trained and "draft_ar_sft" in trained:
        draft, target = trained["draft_ar_sft"].parameters, trained["mars"].parameters
        lines.append(f"- The draft model has {draft:,} parameters, {100 * draft / target:.0f} % of the target's.")
    return "\n\n".join(["## What the drafting methods were given", "\n".join(lines)]) if lines else ""
