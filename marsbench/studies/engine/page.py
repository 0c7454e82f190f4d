"""The engine's page: which methods are lossless, how fast the loop is, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.findings.company import company_remark
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import (
    Race,
    SweepCells,
    positions_of_a_row,
    printed_ratio,
    printed_speed_up,
    speed_of,
    speed_ratio,
    speed_up,
    tokens_per_forward_of,
)
from marsbench.rendering.figures import COLOURS, MARKERS, drawn_alike, error_bars, new_figure, save
from marsbench.rendering.markdown import table
from marsbench.rendering.sections import command, facts_section, seeds_in_words
from marsbench.rows.kinds import ExactnessRow, Row, SweepRow, TrainingRow
from marsbench.statistics.intervals import Estimate, Interval

FIGURE = "figures/engine_speed"  # beside the page, less the extension

HOW_RATIOS_ARE_MEASURED = (
    "All contenders decode the same prompts in one run, batch by batch in turn, the first of them changing every "
    "time, after an untimed pass. A number is the median over repeats of the ratio of tokens per second, tokens up "
    "to EOS only, with its bootstrap 95 % interval. Times of different runs are never compared."
)
HOW_EFFICIENCY_READS = (
    "Efficiency is the speed-up over `ar` divided by tokens per forward: how much of the algorithmic gain is left on "
    "the clock. 1 would mean that a forward over a window costs no more than one over a token. The best layout and "
    "window of `mars-verified` is the fastest of the race, which flatters it a little."
)
WHAT_WAS_TRIED = (
    "One read from the device per step: lengths, ends and window sizes travel together. Faster than asking for each.",
    "Logits only for the entries that a method asks for, in two steps where the second depends on the first "
    "(`mars-verified` needs the logits of one mask group of several). Faster in proportion to the vocabulary. Where "
    "masks stand in a line, their logits and the drafts' come in one step, fillers and all, as two calls cost more.",
    "Keys and values stay where they were written, hidden by the mask where they proved wrong: no copies, no rollback.",
    "Finished rows leave the batch and the last rows move into their places. Faster from batch size 4 on.",
    "Float masks, not boolean ones, which are converted anew in every layer; one table per window shape, looked up by "
    "where each slot lies relative to the row's window.",
    "All windows aligned at the last committed token, so that layouts are worked out once per shape and logits are "
    "slices. Aligning them at the first uncached token cost a gather per use and a mask per row.",
    "The layers of Qwen2 and Llama as fewer, larger operations: queries and keys rotated together, query heads folded "
    "into the query length instead of repeated keys, a norm in three operations. By far the largest gain for `ar`, "
    "whose steps are bound by the number of operations; fillers are left out of all of them.",
    "One projection for queries, keys and values and one for gate and up: three operations less per layer, and given "
    "up. Its weight is a copy, which goes stale, or the model's parameters become parts of it, which adapters, "
    "offloading and writers of checkpoints trip over. Cheaper norms and masks have won back the time.",
    "Weights stored transposed: no faster for small models. Weights that do not fit into a CPU's caches are then read "
    "twice as fast for one or two positions; but they are copies, too, and oneDNN reads them as fast as they lie, and "
    "faster for more positions. It does so from half a million elements on.",
    "An adapter's maps in bf16 as further columns of the layers' packed copies, queries, keys and values in one "
    "product, gate and up in another: a small product by oneDNN takes ten microseconds whatever its size, and four are "
    "left of nine in a layer. As further rows they would save as many and leave the sums. By fp32 products, which take "
    "half as long, the conversions take back what is won.",
    "Passive waiting of threads (`OMP_WAIT_POLICY=PASSIVE`): every operation that runs on several threads then pays "
    "for waking them. Much slower on an idle machine; it helps only beside other work.",
    "In `mars-verified`'s linear layout, after a wrong draft, going on with what the model had said behind it: hardly "
    "ever right, and the masks behind them saw wrong tokens again. A forward without drafts is better.",
    "The top probability from the maximum and the log-sum-exp of the logits, without writing the softmax out.",
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    """What stands on the page: tables of the rows, verdicts of all training seeds."""
    races = SweepCells.of(rows).races
    return [
        f"# The engine at scale {scale}: lossless methods, speed, and where the time goes",
        "One loop decodes by every method; what differs between the lines below is the method alone. `hf-generate` is "
        "the outside reference: transformers' own `generate`.",
        seeds_in_words(seeds),
        company_remark([row for race in races.values() for row in race.values()]),
        _exactness(rows),
        _targets(races),
        _all_speeds(races),
        f"![Speed-up over ar by batch size]({FIGURE}.png)",
        _costs(races),
        _profiles(races),
        _heads(rows),
        facts_section(rows, command("reproduce-engine", scale)),
    ]


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    """Write the figure that the report shows, as PNG and SVG."""
    races = SweepCells.of(rows).races
    best = {row.contender for race in races.values() if (row := _best_verified(race))}
    shown = [row for race in races.values() for row in race.values() if _stands_alone(row) or row.contender in best]
    names = list(dict.fromkeys(row.contender for row in shown))
    with drawn_alike():
        figure = new_figure(7.5, 4.6)
        axes = figure.subplots()
        for place, name in enumerate(names):
            found = {size: ratio for size, race in races.items() if (ratio := _over_ar(race, name))}
            axes.errorbar(
                list(found), [ratio.value for ratio in found.values()], yerr=error_bars([*found.values()], 1.0),
                label=name, capsize=2, color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
                linewidth=1,
            )  # fmt: skip
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="batch size", ylabel="tokens per second, relative to ar")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(races), [str(size) for size in races])
        if names:
            figure.legend(loc="outside right upper", frameon=False)
        return save(figure, reports_dir / FIGURE)


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
    """The lossless methods against AR, and MARS with a threshold for comparison."""
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
    """The loop against `generate`, and how much of the algorithmic gain is left."""
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
    return "\n\n".join(["## Speed", HOW_RATIOS_ARE_MEASURED, HOW_EFFICIENCY_READS, table(head, lines)])


def _efficiency(row: SweepRow) -> str:
    ratio, tokens = speed_up(row), tokens_per_forward_of(row)
    if ratio is None:
        return printed_ratio(None)
    limits = Interval(ratio.interval.low / tokens, ratio.interval.high / tokens)
    return printed_ratio(Estimate(ratio.value / tokens, limits, ratio.n))


def _setting(row: SweepRow) -> str:
    """The layout, window and threshold of `mars-verified`."""
    tau = f", tau = {row.options['threshold']:g}" if "threshold" in row.options else ""
    return f"{row.options['layout']}, window {row.options['block_size']}{tau}"


def _all_speeds(races: dict[int, Race]) -> str:
    head = ["tokens/s over `ar`", *[f"batch {size}" for size in races]]
    lines = [
        [name, *[printed_speed_up(race[name]) if name in race else "" for race in races.values()]]
        for name in _names(races)
    ]
    return "\n\n".join(["### Every contender", table(head, lines)])


def _costs(races: dict[int, Race]) -> str:
    """Positions per forward and memory."""
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
    return "\n\n".join(["### What a forward covers, and what the cache holds", text, table(head, lines)])


def _profiles(races: dict[int, Race]) -> str:
    """Shares of a run's time by part."""
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
    tried = "What was tried:\n\n" + "\n".join(f"- {note}" for note in WHAT_WAS_TRIED)
    return "\n\n".join(["## Where the time goes", text, table(["", *parts], lines), tried])


def _heads(rows: Sequence[Row]) -> str:
    """How often Medusa heads are right, and how large the draft model is."""
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
