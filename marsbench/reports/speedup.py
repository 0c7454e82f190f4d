"""The speed page: how fast, at what accuracy, against what; Tables 5 and 6; and where more load stops paying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from marsbench.paper import Published, published
from marsbench.reports import speedup_figures
from marsbench.reports.markdown import bracketed, one_line, plus_minus, signed_number, table
from marsbench.reports.sections import facts_section
from marsbench.reports.sweep import (
    ALLOWED_LOSS,
    Sweep,
    accuracy_of,
    first_token_ms,
    is_lossless,
    ms_per_forward,
    per_token_ms,
    positions_per_forward,
    speed_up,
    tokens_per_forward_of,
    tokens_per_second,
    weights_read_per_second,
)
from marsbench.statistics.intervals import Estimate
from marsbench.sweeps.position_law import Work, fastest
from marsbench.sweeps.rows import Row, SweepRow
from marsbench.training.stages import STAGES

A_A = "ar, again"

HOW_IT_IS_MEASURED = (
    "All contenders of a batch size decode the same prompts in one race, batch by batch in turn, in an order that "
    "changes with every batch and lap. A first lap is watched: it gives tokens, accuracy, work and latency. The laps "
    "after it are timed and must give the same tokens, so speed and accuracy belong to the same generations. A "
    "speed-up is the median over laps of the ratio of tokens per second, tokens up to EOS only, with its bootstrap "
    "95 % interval. Times of different races are never compared."
)
HOW_TO_READ_LATENCY = (
    "First token: from the start of a batch to the moment the host has the prompt's first token. Per token: the time "
    "from there to the last token over the tokens after the first. Percentiles are over prompts. ms/forward is a lap's "
    "time over the model's forward passes, prompts' passes and all that a method does between them included. Memory is "
    "what must be held: weights, of heads and draft models too, and the KV caches at their largest. Weight traffic is "
    "the bytes of the model's weights times its forwards per second, in % of the speed at which this machine copies "
    "memory (bytes read and written); models that fit into a processor's cache can exceed 100."
)
HOW_THE_LAW_WORKS = (
    "A step of the loop was timed for windows of different widths and batches of different sizes, apart from any "
    "race. The law says that its time depends on the product alone, the positions per forward. With the forwards that "
    "each prompt takes (measured at the smallest batch size; they are the same at all), it predicts the fastest window "
    "for every batch size. Regret is what that choice loses against the fastest window that the races found."
)


def render(rows: Sequence[Row], scale: str) -> str:
    """The report as Markdown: a pure function of the rows of that scale."""
    rows = [row for row in rows if row.scale == scale]
    sweep = Sweep.of(rows)
    sections = [
        f"# Speed at scale {scale}: how fast, at what accuracy, against what",
        _caveat(scale),
        _answer(sweep),
        _all(sweep),
        _pictures(),
        _latency(sweep),
        _table5(sweep),
        _table6(sweep),
        _law(sweep),
        _knee(sweep),
        _checks(sweep),
        facts_section(rows, _command(scale)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def draw(rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
    """Write the figures that the report shows, as PNG and SVG."""
    return speedup_figures.draw(Sweep.of([row for row in rows if row.scale == scale]), reports_dir)


def _command(scale: str) -> str:
    return f"`nox -s speedup-sweep{'' if scale == 'tiny' else f' -- --scale {scale}'}`"


def _caveat(scale: str) -> str:
    small = "These are models of a million parameters or less; they test the mechanism and are not Qwen numbers."
    lead = "Every method runs through one loop, one cache and one clock; `hf-generate` is transformers' own `generate`."
    return f"{lead} {small}" if scale in ("micro", "tiny") else lead


# ---------------------------------------------------------------------- the answer


def _answer(sweep: Sweep) -> str:
    """The best settings per batch size."""
    head = ["", *[f"batch {size}" for size in sweep.batch_sizes]]
    best_mars = {size: best_mars_at(sweep, size) for size in sweep.batch_sizes}
    best_verified = {size: best_verified_at(sweep, size) for size in sweep.batch_sizes}
    lines = [["`ar` over `hf-generate`", *[_ar_over_generate(sweep, size) for size in sweep.batch_sizes]]]
    for title, best in (
        (f"`mars`, at most {ALLOWED_LOSS:g} point lost", best_mars),
        ("`mars-verified`", best_verified),
    ):
        found = list(best.values())
        lines.append([f"{title}: over `ar`", *[_ratio(row) for row in found]])
        lines.append(["setting", *[_setting(row) for row in found]])
        lines.append(["tokens/forward", *[f"{tokens_per_forward_of(row):.2f}" if row else "" for row in found]])
        lines.append(["points lost [95 %]", *[_cost(sweep, row) for row in found]])
    return "\n\n".join(["## The answer", HOW_IT_IS_MEASURED, table(head, lines)])


def best_mars_at(sweep: Sweep, batch_size: int) -> SweepRow | None:
    """The fastest threshold of `mars` that loses at most the allowed points against `ar` on these questions."""

    def allowed(row: SweepRow) -> bool:
        cost = sweep.cost(row)
        return row.method == "mars" and cost is not None and cost.points <= ALLOWED_LOSS

    return max(sweep.at(batch_size, allowed), key=_speed, default=None)


def best_verified_at(sweep: Sweep, batch_size: int) -> SweepRow | None:
    """The fastest layout and window of `mars-verified`."""
    return max(sweep.at(batch_size, lambda row: row.method == "mars-verified"), key=_speed, default=None)


def _speed(row: SweepRow) -> float:
    found = speed_up(row)
    return found.value if found else 0.0


def _ar_over_generate(sweep: Sweep, batch_size: int) -> str:
    ar = sweep.done.get(("ar", batch_size))
    return _shown(speed_up(ar, "hf-generate")) if ar else ""


def _ratio(row: SweepRow | None) -> str:
    return _shown(speed_up(row)) if row else "none"


def _shown(ratio: Estimate | None) -> str:
    return f"{ratio.value:.2f} {bracketed(ratio.interval, 2)}" if ratio else "no baseline"


def _setting(row: SweepRow | None) -> str:
    if row is None:
        return ""
    options = {"tau": row.options.get("threshold", "one"), "window": row.options.get("block_size")}
    layout = [str(row.options["layout"])] if "layout" in row.options else []
    return ", ".join([*layout, *[f"{name} {value}" for name, value in options.items() if value is not None]])


def _cost(sweep: Sweep, row: SweepRow | None) -> str:
    cost = sweep.cost(row) if row else None
    return f"{signed_number(cost.points, 1)} {bracketed(cost.interval, 1, signed=True)}" if cost else ""


# ---------------------------------------------------------------------- every contender


def _all(sweep: Sweep) -> str:
    sizes = sweep.batch_sizes
    head = ["tokens/s over `ar`", *[f"batch {size}" for size in sizes], "tokens/forward", "accuracy", "as `ar`"]
    lines = []
    for name in sweep.names:
        cells = [sweep.done.get((name, size)) for size in sizes]
        first = next((row for row in cells if row is not None), None)
        ratios = [_ratio(row) if row else _why(sweep, name, size) for row, size in zip(cells, sizes, strict=True)]
        lines.append([name, *ratios, *_constants(sweep, first)])
    text = (
        "Accuracy in %, benchmarks weighing the same; tokens/forward and accuracy at the smallest batch size, as the "
        'batch size changes tokens by rounding at most. "as `ar`" counts the prompts whose tokens equal those of `ar` '
        "on the same checkpoint."
    )
    return "\n\n".join(["## Every contender", f"{text} {_checkpoint(sweep)}", table(head, lines), _reasons(sweep)])


def _checkpoint(sweep: Sweep) -> str:
    """Which checkpoint most contenders decode."""
    stages = dict.fromkeys(row.stage for row in sweep.rows if row.contender == "ar")
    said = ", ".join(f"`{name}` ({STAGES[name].summary})" for name in stages)
    return f"`ar`, and all contenders that name no other checkpoint, decode stage {said}."


def _constants(sweep: Sweep, row: SweepRow | None) -> list[str]:
    """What hardly depends on the batch size."""
    if row is None:
        return ["", "", ""]
    return [f"{tokens_per_forward_of(row):.2f}", plus_minus(accuracy_of(row), 1, factor=100), _as_ar(sweep, row)]


def _as_ar(sweep: Sweep, row: SweepRow) -> str:
    """How many prompts get the tokens that AR decoding of the same model gives."""
    stages = {_model_of(other.stage): other.contender for other in reversed(sweep.rows) if other.method == "ar"}
    same = row.same_as.get(stages.get(_model_of(row.stage), ""))
    promise = " (promised)" if is_lossless(row) and same is not None and same < row.prompts else ""
    return "" if same is None else f"{same} of {row.prompts}{promise}"


def _model_of(name: str) -> str | None:
    """The stage whose weights a stage decodes with: Medusa's heads stand on a model that they leave as it is."""
    return STAGES[name].parent if STAGES[name].objective == "medusa" else name


def _why(sweep: Sweep, name: str, size: int) -> str:
    return next((row.status for row in sweep.rows if (row.contender, row.batch_size) == (name, size)), "not run")


def _reasons(sweep: Sweep) -> str:
    """Why cells have no numbers."""
    missing = [row for row in sweep.rows if row.status != "done"]
    return "\n".join(
        f"- {row.contender}, batch {row.batch_size}: {row.status}: {one_line(row.reason)}" for row in missing
    )


def _pictures() -> str:
    figures = {
        speedup_figures.PARETO_SPEED: "Accuracy against tokens per second, relative to ar, by batch size",
        speedup_figures.PARETO_FORWARDS: "Accuracy against tokens per forward",
        speedup_figures.BY_BATCH: "Speed-up over ar by batch size",
        speedup_figures.BY_POSITIONS: "Milliseconds per forward by positions per forward",
    }
    return "\n\n".join(f"![{text}]({name}.png)" for name, text in figures.items())


def _latency(sweep: Sweep) -> str:
    head = [
        "", "tokens/s", "ms/forward", "positions/forward", "first token, ms, p50", "p99", "per token, ms, p50", "p99",
        "memory, MiB", "weight traffic, % of copying",
    ]  # fmt: skip
    parts = ["## Latency, work and memory", HOW_TO_READ_LATENCY]
    copied = median(sweep.step_times.copied_per_second) if sweep.step_times else None
    for size in sweep.batch_sizes:
        lines = [_latency_line(row, copied) for row in sweep.at(size)]
        parts += [f"### Batch size {size}", table(head, lines)]
    return "\n\n".join(parts)


def _latency_line(row: SweepRow, copied: float | None) -> list[str]:
    def number(value: float | None, digits: int) -> str:
        return "n/a" if value is None else f"{value:,.{digits}f}"

    traffic = weights_read_per_second(row)
    held = (row.peak_bytes or row.weight_bytes + row.cache_bytes) / 2**20
    return [
        row.contender,
        number(tokens_per_second(row), 0),
        number(ms_per_forward(row), 2),
        number(positions_per_forward(row), 1),
        number(first_token_ms(row, 50), 1),
        number(first_token_ms(row, 99), 1),
        number(per_token_ms(row, 50), 2),
        number(per_token_ms(row, 99), 2),
        number(held if row.forwards or row.peak_bytes else None, 1),
        number(100 * traffic / copied if traffic and copied else None, 0),
    ]


# ---------------------------------------------------------------------- the paper's tables


def _table5(sweep: Sweep) -> str:
    """Speed-up over AR by batch size and B_cache."""
    cached = [row for row in sweep.rows if row.method == "mars-block-cache"]
    blocks = sorted({int(row.options["cache_block"]) for row in cached})
    if not blocks:
        return ""
    names = {int(row.options["cache_block"]): row.contender for row in cached}
    without = next((row.contender for row in sweep.rows if row.method == "mars-no-cache"), None)
    head = ["batch", "no cache", *[f"B_cache {block}" for block in blocks]]
    lines = []
    for size in sweep.batch_sizes:
        cells = [sweep.done.get((name, size)) for name in (without, *[names[block] for block in blocks]) if name]
        shown = [_ratio(row) if row else "not run" for row in cells]
        positions = [f"{positions_per_forward(row) or 0:.0f}" if row else "" for row in cells]
        lines += [[str(size), *shown], ["positions/forward", *positions]]
    text = (
        "Tokens per second over `ar` with its KV cache, by batch size and block size of the cache, tau = .95. Without "
        "a cache, a forward covers the prefix and B masks (the authors' covers the prefix and 256). Below each line, "
        "the positions that a forward covers."
    )
    return "\n\n".join(["## Table 5: the block-level cache", text, table(head, lines), _published5()])


def _published5() -> str:
    rows = published("5", metric="speedup")
    blocks = sorted({row.cache_block for row in rows if row.cache_block is not None})
    head = ["batch", "no cache", *[f"B_cache {block}" for block in blocks]]
    lines = []
    for size in sorted({row.batch_size for row in rows if row.batch_size is not None}):
        of_size = [row for row in rows if row.batch_size == size]
        without = _value([row for row in of_size if row.method == "mars_no_cache"])
        lines.append(
            [str(size), without, *[_value([row for row in of_size if row.cache_block == block]) for block in blocks]]
        )
    lead = "**Published** (arXiv 2604.07023, Table 5): Qwen2.5 7B, 256 questions of GSM8K; nothing was measured here."
    return f"{lead}\n\n{table(head, lines)}"


def _value(rows: Sequence[Published]) -> str:
    return f"{rows[0].value:g}" if rows else ""


TABLE6 = {  # our contender -> the paper's draft and target
    "speculative, AR SFT by AR SFT": ("ar_sft_0.5b", "ar_sft_7b"),
    "speculative, MARS by AR SFT": ("ar_sft_0.5b", "mars_7b_b4"),
    "speculative, MARS by MARS": ("mars_0.5b_b4", "mars_7b_b4"),
}


def _table6(sweep: Sweep) -> str:
    """Speculative decoding with AR and MARS drafts and targets."""
    if not any((name, sweep.batch_sizes[0]) in sweep.done for name in TABLE6):
        return ""
    parts = [
        "## Table 6: speculative decoding",
        "Target by draft. Tokens per forward of the target say what drafting yields, time per round what it costs; a "
        "speed-up is the one over the other. Points lost are against `ar` on the MARS checkpoint.",
    ]
    head = [
        "",
        "tokens/target forward",
        "ms/round",
        "tokens/s over `ar`",
        "over AR SFT by AR SFT",
        "points lost [95 %]",
    ]
    for size in sweep.batch_sizes:
        known = {name: sweep.done[name, size] for name in TABLE6 if (name, size) in sweep.done}
        parts += [f"Batch size {size}:", table(head, [_table6_line(sweep, row, known) for row in known.values()])]
    return "\n\n".join([*parts, _published6()])


def _table6_line(sweep: Sweep, row: SweepRow, known: Mapping[str, SweepRow]) -> list[str]:
    first = next(iter(known.values()))
    relative = tokens_per_second(row) / tokens_per_second(first)
    return [
        row.contender.partition(", ")[2],
        f"{tokens_per_forward_of(row):.2f}",
        f"{ms_per_forward(row) or 0:.2f}",
        _ratio(row),
        f"{relative:.2f}",
        _cost(sweep, row),
    ]


def _published6() -> str:
    head = ["", "tokens/target forward", "ms/round (derived)", "tokens/s", "over AR SFT by AR SFT", "points gained"]
    lines = []
    for name, (draft, target) in TABLE6.items():
        found = {row.metric: row.value for row in published("6", draft=draft, target=target)}
        tokens, speed = found["tokens_per_target_forward"], found["tokens_per_second"]
        numbers = [f"{tokens:g}", f"{1000 * tokens / speed:.0f}", f"{speed:g}", f"{found['speedup']:g}"]
        lines.append([name.partition(", ")[2], *numbers, signed_number(found["accuracy_delta"], 1)])
    lead = (
        "**Published** (arXiv 2604.07023, Table 6): Qwen2.5 7B with 0.5B drafts, 256 questions of GSM8K, batch size 1; "
        "nothing in it was measured here. The time per round is tokens per target forward over tokens per second."
    )
    return f"{lead}\n\n{table(head, lines)}"


# ---------------------------------------------------------------------- the position law


def _law(sweep: Sweep) -> str:
    if sweep.law is None or sweep.step_times is None:
        return ""
    head = ["positions", *[str(count) for count in _shown_positions(sweep)]]
    costs = ["ms per step", *[f"{1000 * sweep.law.seconds_at(count):.2f}" for count in _shown_positions(sweep)]]
    regrets = _regrets(sweep)
    lines = [[family, str(size), chosen, best, f"{100 * regret:.1f}"] for family, size, chosen, best, regret in regrets]
    chosen = table(["windows of", "batch", "by the law", "by the races", "regret, %"], lines, text=(0, 2, 3))
    worst = max((regret for *_, regret in regrets), default=0.0)
    mean = sum(regret for *_, regret in regrets) / max(len(regrets), 1)
    summary = f"Mean regret {100 * mean:.1f} %, largest {100 * worst:.1f} %."
    return "\n\n".join(
        ["## The position law", HOW_THE_LAW_WORKS, table(head, [costs]), _spread(sweep), chosen, summary]
    )


def _shown_positions(sweep: Sweep) -> list[int]:
    assert sweep.law is not None
    return [count for count in sweep.law.positions if count & (count - 1) == 0]


def _spread(sweep: Sweep) -> str:
    """How far shapes with as many positions differ."""
    assert sweep.step_times is not None
    found: dict[int, list[float]] = {}
    for rows, window, seconds in zip(
        sweep.step_times.rows, sweep.step_times.window, sweep.step_times.seconds, strict=True
    ):
        found.setdefault(rows * window, []).append(median(seconds))
    ratios = [max(times) / min(times) for times in found.values() if len(times) > 1]
    if not ratios:
        return ""
    return (
        f"Shapes with as many positions, such as 4 x 16 and 16 x 4, differ by a factor of {median(ratios):.2f} in the "
        f"median and {max(ratios):.2f} at most: that is how far the law is true."
    )


def families(sweep: Sweep) -> dict[str, list[str]]:
    """Contenders that differ in their window alone, and all windows and layouts of `mars-verified` together."""
    found: dict[str, list[str]] = {}
    for name in sweep.names:
        row = next(row for row in sweep.rows if row.contender == name)
        if row.method == "mars-block-cache":
            found.setdefault("mars-block-cache", []).append(name)
        if row.method == "mars-verified":
            found.setdefault(f"mars-verified, {row.options.get('layout', 'groups')}", []).append(name)
            found.setdefault("mars-verified, either layout", []).append(name)
    return {family: names for family, names in found.items() if len(names) > 1}


def _regrets(sweep: Sweep) -> list[tuple[str, int, str, str, float]]:
    """Family, batch size, the law's choice, the races' best, and the share of speed that the choice loses."""
    assert sweep.law is not None
    smallest, found = sweep.batch_sizes[0], []
    for family, names in families(sweep).items():
        known = {name: sweep.done[name, smallest] for name in names if (name, smallest) in sweep.done}
        for size in sweep.batch_sizes:
            measured = {name: _speed(sweep.done[name, size]) for name in known if (name, size) in sweep.done}
            if measured:
                chosen = fastest(sweep.law, {name: Work.of(known[name]) for name in measured}, size)
                best = max(measured, key=measured.__getitem__)
                found.append((family, size, chosen, best, 1 - measured[chosen] / measured[best]))
    return found


def _knee(sweep: Sweep) -> str:
    """Where more load stops paying, and why."""
    parts = ["## Where more load stops paying"]
    if sweep.law is not None and (double := sweep.law.positions_at(2.0)) is not None:
        parts.append(
            f"A step over {double:.0f} positions takes twice as long as a step over one on this machine. `ar` has as "
            "many positions as rows; a method with a window of w has w times as many for the same rows, so it comes to "
            "that point at a w times smaller batch. From there on a forward costs in proportion to its positions, and "
            "what counts is positions per emitted token, of which `ar` has the fewest, 1."
        )
    head = ["", "positions/token", *[f"batch {size}" for size in sweep.batch_sizes], "pays up to"]
    lines = [_knee_line(sweep, name) for name in _window_contenders(sweep)]
    return "\n\n".join([*parts, table(head, lines)])


def _window_contenders(sweep: Sweep) -> list[str]:
    """The best settings, each once."""
    best = [find(sweep, size) for find in (best_mars_at, best_verified_at) for size in sweep.batch_sizes]
    return list(dict.fromkeys(row.contender for row in best if row is not None))


def _knee_line(sweep: Sweep, name: str) -> list[str]:
    cells = {size: sweep.done.get((name, size)) for size in sweep.batch_sizes}
    paying = [size for size, row in cells.items() if row and (ratio := speed_up(row)) and ratio.interval.low > 1]
    first = next(row for row in cells.values() if row is not None)
    work = f"{first.positions / (sum(first.emitted) - first.prompts):.2f}" if first.forwards else "n/a"
    up_to = "never" if not paying else f"batch {max(paying)}{' at least' if max(paying) == max(cells) else ''}"
    return [name, work, *[_ratio(row) for row in cells.values()], up_to]


def _checks(sweep: Sweep) -> str:
    """What must be so if the clock is to be believed."""
    lines = []
    for size in sweep.batch_sizes:
        row = sweep.done.get((A_A, size))
        ratio = speed_up(row) if row else None
        if ratio is not None:
            inside = ratio.interval.low <= 1 <= ratio.interval.high
            lines.append([str(size), _shown(ratio), "yes" if inside else "no"])
    if not lines:
        return ""
    text = "`ar` raced against `ar` under another name must not differ from it: the interval must contain 1."
    head = ["batch", "`ar, again` over `ar`", "contains 1"]
    return "\n\n".join(["## Is the clock fair?", text, table(head, lines)])
