"""The paper's Tables 5 and 6, rebuilt from a sweep, with the paper's own numbers in tables of their own."""

from __future__ import annotations

from typing import NamedTuple

from marsbench.findings.in_words import signed_number, with_interval
from marsbench.findings.sweep import SweepCells, over, printed_speed_up
from marsbench.paper import published
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import SweepRow


def table5(sweep: SweepCells) -> dict[str, str]:
    """What was measured, and what was published; both empty where nothing was measured."""
    cached = [row for row in sweep.rows if row.method == "mars-block-cache"]
    blocks = sorted({int(row.options["cache_block"]) for row in cached})
    if not blocks:
        return {"table5": "", "published5": ""}
    names = {int(row.options["cache_block"]): row.contender for row in cached}
    without = next((row.contender for row in sweep.rows if row.method == "mars-no-cache"), None)
    head = ["batch", "no cache", *[f"B_cache {block}" for block in blocks]]
    lines = []
    for size in sweep.batch_sizes:
        cells = [sweep.done.get((name, size)) for name in (without, *[names[block] for block in blocks]) if name]
        shown = [printed_speed_up(row) if row else "not run" for row in cells]
        positions = [f"{row.positions_per_forward:.0f}" if row else "" for row in cells]
        lines += [[str(size), *shown], ["positions/forward", *positions]]
        if size == sweep.batch_sizes[-1]:
            lines.append(["accuracy in %", *[f"{100 * row.accuracy.value:.1f}" if row else "" for row in cells]])
    return {"table5": table(head, lines), "published5": _published5()}


def _published5() -> str:
    rows = published("5", metric="speedup")
    blocks = sorted({row.cache_block for row in rows if row.cache_block is not None})
    found = {(row.batch_size, row.cache_block, row.method == "mars_no_cache"): f"{row.value:g}" for row in rows}
    lines = [
        [str(size), found.get((size, None, True), ""), *[found.get((size, block, False), "") for block in blocks]]
        for size in sorted({row.batch_size for row in rows if row.batch_size is not None})
    ]
    return table(["batch", "no cache", *[f"B_cache {block}" for block in blocks]], lines)


AR_SFT = "ar, AR SFT"  # `ar` on the checkpoint that MARS goes on from


class Pairing(NamedTuple):
    """A line of Table 6: a target by a draft."""

    words: str
    draft: str  # the paper's name of it
    target: str

    def row(self, sweep: SweepCells, batch_size: int, *, compiled: bool = False) -> SweepRow | None:
        name = f"speculative, {self.words}"
        return sweep.done.get((f"{name}, compiled" if compiled else name, batch_size))


AR_BY_AR = Pairing("AR SFT by AR SFT", "ar_sft_0.5b", "ar_sft_7b")
MARS_BY_AR = Pairing("MARS by AR SFT", "ar_sft_0.5b", "mars_7b_b4")
MARS_BY_MARS = Pairing("MARS by MARS", "mars_0.5b_b4", "mars_7b_b4")
TABLE6 = (AR_BY_AR, MARS_BY_AR, MARS_BY_MARS)


_HEADS6 = "over AR SFT by AR SFT", "points gained [95 %]"


def table6(sweep: SweepCells) -> dict[str, str]:
    """The same of Table 6, with a table per batch size, eager and compiled."""
    parts = []
    for size in sweep.batch_sizes:
        for compiled in (False, True):
            known = [(line, row) for line in TABLE6 if (row := line.row(sweep, size, compiled=compiled))]
            if known:
                lines = [_table6_line(sweep, line, row, known[0][1]) for line, row in known]
                head = ["", "tokens/target forward", "ms/round", f"tokens/s {over(compiled)}", *_HEADS6]
                parts += [f"Batch size {size}{', compiled' if compiled else ''}:", table(head, lines)]
    return {"table6": paragraphs(*parts), "published6": _published6() if parts else ""}


def _table6_line(sweep: SweepCells, line: Pairing, row: SweepRow, first: SweepRow) -> list[str]:
    gained = sweep.gain(row, sweep.done.get((AR_SFT, row.batch_size)))
    return [
        line.words,
        f"{row.tokens_per_forward:.2f}",
        f"{row.ms_per_forward:.2f}",
        printed_speed_up(row),
        f"{row.tokens_per_second / first.tokens_per_second:.2f}",
        with_interval(gained, 1, signed=True) if gained else "",
    ]


def _published6() -> str:
    head = ["", "tokens/target forward", "ms/round (derived)", "tokens/s", "over AR SFT by AR SFT", "points gained"]
    lines = []
    for line in TABLE6:
        found = {row.metric: row.value for row in published("6", draft=line.draft, target=line.target)}
        tokens, speed = found["tokens_per_target_forward"], found["tokens_per_second"]
        numbers = [f"{tokens:g}", f"{1000 * tokens / speed:.0f}", f"{speed:g}", f"{found['speedup']:g}"]
        lines.append([line.words, *numbers, signed_number(found["accuracy_delta"], 1)])
    return table(head, lines)
