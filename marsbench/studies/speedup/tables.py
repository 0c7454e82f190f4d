"""The paper's Tables 5 and 6, rebuilt from a sweep, beside the paper's own numbers."""

from typing import NamedTuple

from marsbench.findings.in_words import signed_number, with_interval
from marsbench.findings.sweep import SweepCells, over, printed_speed_up
from marsbench.paper import published
from marsbench.racing.grid import called
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rows.kinds import SweepRow
from marsbench.studies.lines import BATCH_SIZES

PAPERS_SCALE = "7b"  # of its Tables 5 and 6


def table5(sweep: SweepCells) -> dict[str, str]:
    cached = {int(row.options["cache_block"]): row.contender for row in sweep.rows if row.method == "mars-block-cache"}
    if not cached:
        return {"table5": "", "published5": ""}
    without = next((row.contender for row in sweep.rows if row.method == "mars-no-cache"), "")
    names = [without, *[cached[block] for block in sorted(cached)]]
    lines, accuracies = [], list[str]()
    for size in sweep.batch_sizes:
        cells = [sweep.done.get((name, size)) for name in names]
        lines.append([str(size), *[printed_speed_up(row) if row else "not run" for row in cells]])
        lines.append(["positions/forward", *[f"{row.positions_per_forward:.0f}" if row else "" for row in cells]])
        accuracies = [f"{100 * row.accuracy.value:.1f}" if row else "" for row in cells]
    lines.append(["accuracy in %", *accuracies])  # of the largest batch
    papers = {size: {**published5(size, "mars-no-cache"), **published5(size)} for size in BATCH_SIZES}
    shown = [[str(size), *[f"{speed:g}" for speed in speeds.values()]] for size, speeds in papers.items()]
    heads = sorted(cached), [block for block in papers[BATCH_SIZES[0]] if block]
    ours, theirs = (["batch", "no cache", *[f"B_cache {block}" for block in blocks]] for blocks in heads)
    return {"table5": table(ours, lines), "published5": table(theirs, shown)}


def published5(batch_size: int, method: str = "mars-block-cache", scale: str = PAPERS_SCALE) -> dict[int, float]:
    """B_cache, 0 for none, -> the paper's speed-up."""
    name = method.replace("-", "_")
    rows = published("5", scale=scale, method=name, batch_size=batch_size, metric="speedup")
    return {row.cache_block or 0: row.value for row in rows}


AR_SFT = "ar, AR SFT"  # `ar` on the checkpoint that MARS goes on from


class Pairing(NamedTuple):
    words: str
    draft: str  # the paper's name of it
    target: str

    def row(self, sweep: SweepCells, batch_size: int, *, compiled: bool = False) -> SweepRow | None:
        name = f"speculative, {self.words}"
        return sweep.done.get((called(name, compiled), batch_size))

    def published(self, scale: str = PAPERS_SCALE) -> dict[str, float]:
        rows = published("6", scale=scale, draft=self.draft, target=self.target)
        return {row.metric: row.value for row in rows}


AR_BY_AR = Pairing("AR SFT by AR SFT", "ar_sft_0.5b", "ar_sft_7b")
MARS_BY_AR = Pairing("MARS by AR SFT", "ar_sft_0.5b", "mars_7b_b4")
MARS_BY_MARS = Pairing("MARS by MARS", "mars_0.5b_b4", "mars_7b_b4")
TABLE6 = (AR_BY_AR, MARS_BY_AR, MARS_BY_MARS)


def table6(sweep: SweepCells) -> dict[str, str]:
    parts = []
    for size in sweep.batch_sizes:
        for compiled in (False, True):
            known = [(line, row) for line in TABLE6 if (row := line.row(sweep, size, compiled=compiled))]
            lines = []
            for line, row in known:
                gained = sweep.gain(row, sweep.done.get((AR_SFT, size)))
                tokens, round_ms = f"{row.tokens_per_forward:.2f}", f"{row.ms_per_forward:.2f}"
                ratio = f"{row.tokens_per_second / known[0][1].tokens_per_second:.2f}"
                points = with_interval(gained, 1, signed=True) if gained else ""
                lines.append([line.words, tokens, round_ms, printed_speed_up(row), ratio, points])
            if lines:
                head = ["", "tokens/target forward", "ms/round", f"tokens/s {over(compiled)}"]
                head += ["over AR SFT by AR SFT", "points gained [95 %]"]
                parts += [f"Batch size {size}{', compiled' if compiled else ''}:", table(head, lines)]
    return {"table6": paragraphs(*parts), "published6": _published6() if parts else ""}


def _published6() -> str:
    head = ["", "tokens/target forward", "ms/round (derived)", "tokens/s", "over AR SFT by AR SFT", "points gained"]
    lines = []
    for line in TABLE6:
        found = line.published()
        tokens, speed = found["tokens_per_target_forward"], found["tokens_per_second"]
        numbers = [f"{tokens:g}", f"{1000 * tokens / speed:.0f}", f"{speed:g}", f"{found['speedup']:g}"]
        lines.append([line.words, *numbers, signed_number(found["accuracy_delta"], 1)])
    return table(head, lines)
