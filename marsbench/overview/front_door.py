"""README's first screen: what MARS promises beside what was measured, in a table and a picture, between two marks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from marsbench.findings.cells import PUBLISHED_SCALES, latest_stages, same_answers
from marsbench.findings.claims import POINTS, TIMES, TOKENS, Finding, Judged, number
from marsbench.findings.collection import Collection
from marsbench.findings.in_words import machines, with_interval
from marsbench.findings.sweep import SweepCells, printed_ratio, speed_up
from marsbench.gpu_check.page import reckoned
from marsbench.paper import published
from marsbench.presets import DEFAULT_SCALE
from marsbench.rendering import claims_in_words as said
from marsbench.rendering.figures import Labelled, exactly, labelled_figure
from marsbench.rendering.markdown import filled, table
from marsbench.rows.kinds import Row
from marsbench.statistics.intervals import Estimate
from marsbench.studies import mars_on_gpu as on_gpu
from marsbench.studies.curves import in_brief as more_steps
from marsbench.studies.gains import in_brief as rivals
from marsbench.studies.real_model import in_brief
from marsbench.studies.speedup import same_as_sft

BEGIN, END = "<!-- rendered by marsbench report: begin -->", "<!-- rendered by marsbench report: end -->"
SPEED, REAL = "speedup", "135m"  # a study; the scale of the real model
_LONGER = "longer", "longer-matches"
# Page and name of the claims on small models that the first screen shows, with their words there.
_TOY = {
    ("table2", "matches-ar-sft"): "Toy: one token per pass, accuracy against AR fine-tuning",
    ("table4", "several-tokens"): "Toy: tau = .95, tokens per pass",
    ("table4", "level"): "Toy: tau = .95, accuracy against AR fine-tuning",
    ("speedup", "cache-faster"): "Toy: tau = .95 with the paper's cache, speed over our AR, batch 4",
    ("speedup", "best-verified"): "Toy: verified MARS (ours), speed over our AR, batch 1",
    _LONGER: "Toy, 4 times the training: one token per pass, accuracy against AR trained as long",
}
STEM = "figures/claims"
CAPTION = "A dozen claims: the paper's number and ours with its 95 % interval"
_SHOWN = (  # page and name, by unit
    ("table2", "matches-ar-sft"), ("table4", "level"), ("table9", "level-with-jacobi"), ("gpu", "real-cost"),
    ("table4", "several-tokens"), ("gpu", "real-tokens"), ("table9", "jacobi-slow"), ("table4", "more-tokens"),
    ("speedup", "cache-faster"), ("speedup", "target-faster"), ("speedup", "best-verified"),
    ("table2", "step-costs-twice"),
)  # fmt: skip


def readme_of(root: Path, judged: Sequence[Judged], collections: Sequence[Collection]) -> dict[Path, str]:
    """README below a folder -> its text with what was found at the default scale; empty where it has no such marks."""
    file = root / "README.md"
    whole = next((each for each in collections if each.scale == DEFAULT_SCALE and SPEED in each.links), None)
    if whole is None or not file.is_file():
        return {}
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return {}
    findings = {(entry.claim.page, entry.claim.name): entry.findings[whole.scale] for entry in judged}
    real = next((each for each in collections if each.scale == REAL), Collection(REAL, {}, {}))
    rows = next(iter(real.of(on_gpu.STUDY.key)), [])  # of MARS on the real model
    ratios, cost = reckoned(root, "7b"), on_gpu.CLAIMS[1].over([rows])
    sweep = SweepCells.of(next(iter(whole.of(SPEED)), ()))
    generate = printed_ratio(speed_up(sweep.eager.done.get(("ar", 1)), "hf-generate"), "n/a")
    lines = [*_at_true_size(ratios), *_on_a_real_model(rows, cost), *_toy(findings, sweep)]
    papers = said.tally((whole.scale, entry.findings[whole.scale]) for entry in judged if entry.claim.papers)
    toys, real_models = machines(row for rows in whole.of("table2") for row in rows), machines(rows)
    where = [f"{what} on {which}" for what, which in (("the toy", toys), ("the real model", real_models)) if which]
    slots = {
        "holds": f"In part. Of the paper's claims, in the toy: {papers} ([each of them](reports/index.md)).",
        "both": _threshold_costs(findings.get(("table4", "level")), findings.get(_LONGER), cost),
        "faster": _faster(ratios) or "Not measured.",
        "here": _here(rows),
        "cpu": "".join(map(in_brief, real.of("real-model")[:1])),
        "table": table(["", "the paper", "measured [95 %]", "on"], lines, text=(0, 1, 2, 3)),
        "figure": f"![{CAPTION}](reports/{STEM}.png)",
        "conditions": f"*{'; '.join(['[n and seeds of each claim](reports/index.md)', *where])}.*",
        "toy": _regime(findings, "".join(map(more_steps, whole.of("curves")[:1]))),
        "speed": f"Our AR baseline is itself {generate} times as fast as transformers' `generate` (toy, batch 1).",
        "rivals": "".join(map(rivals, whole.of("rivals")[:1])),
    }
    return {file: "\n".join([before + BEGIN, *filled(__package__, "front_door.md", slots), END + after])}


def _threshold_costs(toy: Finding | None, longer: Finding | None, real: Finding) -> str:
    if real.estimate is None or toy is None or toy.estimate is None:
        return ""
    trained = dict(longer.beside)["at tau = .95"].number if longer and longer.estimate else "not measured"
    return (
        f"At tau = .95 accuracy changes by {toy.number} points in the toy (against AR fine-tuning; with 4 times the "
        f"training of both, by {trained}), and by "
        f"{real.number} points of IFEval on a real model (against one token): no loss that can be seen."
    )


def _faster(ratios: Mapping[int, float]) -> str:
    """Up to how many requests at once MARS is reckoned to be faster at 7B's shape; empty where it never is."""
    gains = {batch: ratio for batch, ratio in ratios.items() if ratio > 1}
    losses = {batch: ratio for batch, ratio in ratios.items() if ratio <= 1}
    if not gains:
        return ""
    rest = f", and {_listed(losses)} times at {', '.join(map(str, losses))}" if losses else ""
    return (
        f"Probably, with up to {max(gains)} requests at once: {_listed(gains)} times as fast as AR decoding at "
        f"{', '.join(map(str, gains))} requests{rest}. We reckon this from the paper's tokens per pass (GSM8K, tau = "
        ".95) and the time of a step that we measured on one H200 with random weights. No trained 7B was run."
    )


def _here(rows: Sequence[Row]) -> str:
    lost, trained = on_gpu.LOST.of(rows).estimate, next(iter(latest_stages(rows).values()), None)
    if lost is None or trained is None:
        return ""
    return (
        f"After {trained.seconds:.0f} s of MARS training on one H200, SmolLM2-135M yields the tokens per pass in the "
        f"table. At one token it has {with_interval(lost, 1, signed=True)} points of IFEval over the base ({lost.n} "
        "prompts); an AR fine-tuning on the same data, which would say why, is missing. Its speed on a CPU was not "
        "measured."
    )


def _at_true_size(ratios: Mapping[int, float]) -> Iterator[list[str]]:
    papers = {
        batch: max(row.value for row in published("5", method="mars_block_cache", metric="speedup", batch_size=batch))
        for batch in (4, 8, 16)
    }
    if ratios:
        yield [
            f"Shape of 7B: tau = .95 on GSM8K, speed over AR at {', '.join(map(str, ratios))} rows",
            f"{_listed(papers)} at {', '.join(map(str, papers))} rows, over its own AR",
            f"{_listed(ratios)}, **reckoned**: the paper's tokens per pass over the cost of a step that we measured",
            "one H200, bfloat16, random weights, one seed; [page](reports/gpu.md)",
        ]


def _listed(values: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values.values())


def _on_a_real_model(rows: Sequence[Row], cost: Finding) -> Iterator[list[str]]:
    cells = on_gpu.cells_of(rows)
    if not cells.keys() >= on_gpu.LINES.keys():
        return
    same, of = same_answers(cells[on_gpu.VERIFIED], cells[on_gpu.ONE])
    where = f"SmolLM2-135M, {of:,} prompts, one seed; [page](reports/135m/real-model.md)"
    sure, unsure, drafted = (
        with_interval(on_gpu.emitted(cells[name]), 2) for name in (on_gpu.SURE, on_gpu.UNSURE, on_gpu.VERIFIED)
    )
    papers, asked = said.published(on_gpu.CLAIMS[0]), f"{cost.estimate.n if cost.estimate else 0} prompts"
    yield ["Real model: tokens per pass at tau = .95", papers, f"{sure}; at .8 {unsure}", where]
    yield ["Real model: what tau = .95 costs, IFEval points", said.published(cost.claim), cost.number, asked]
    drafts = "Real model: the same masks as drafts, verified (ours), tokens per pass"
    yield [drafts, "-", f"{drafted}; {same:,} of {of:,} answers its own AR's", where]


def _toy(findings: Mapping[tuple[str, str], Finding], sweep: SweepCells) -> Iterator[list[str]]:
    alike = same_as_sft(sweep)
    same = f"; {alike[0]} of {alike[1]} answers are those of AR SFT" if alike else ""
    for key, words in _TOY.items():
        if (one := findings.get(key)) and one.estimate is not None:
            shown = said.measured(one) if key[0] in (SPEED, _LONGER[0]) else one.found
            shown += same if key[1] == "best-verified" else ""
            yield [words, said.published(one.claim) or "-", shown, said.counted(one)]


def _regime(findings: Mapping[tuple[str, str], Finding], steps: str) -> str:
    taught, rate = findings.get(("regime", "taught")), findings.get(("map", "hard-emits"))
    if not taught or not rate or taught.estimate is None or rate.estimate is None:
        return ""
    paper = number(taught.claim.published("0.5b") or 0.0, taught.claim.unit, signed=True)
    return (
        f"In the toy, fine-tuning adds only {taught.number} points to the base (paper: {paper}), so MARS had little to "
        f"gain; ten times the learning rate gives {rate.number} tokens per pass more at tau = .95 for "
        f"{dict(rate.beside)['accuracy'].number} points (one seed), and the real model loses nothing at its threshold. "
        f"{steps} So the toy shows mechanism and exactness, not whether a threshold costs accuracy on text."
    )


# ---- the picture ----


def draw(judged: Sequence[Judged], collections: Sequence[Collection], folder: Path) -> list[Path]:
    """Write the picture below the folder of the index, the paper's numbers beside ours; nothing without its claims."""
    by_key = {(entry.claim.page, entry.claim.name): entry for entry in judged}
    small, large = (f"the paper, {model}" for model in PUBLISHED_SCALES.values())
    panels: dict[str, dict[str, dict[str, Estimate]]] = {
        unit: {small: {}, "measured": {}, large: {}} for unit in (POINTS, TOKENS, TIMES)
    }
    for entry in [by_key[key] for key in _SHOWN if key in by_key]:
        known = [(scale, result, result.estimate) for scale, result in entry.findings.items() if result.estimate]
        for scale, result, estimate in known[:1]:
            series, words = panels[entry.claim.unit], f"{entry.claim.text} ({said.verdict(result, scale)})"
            series["measured"][words] = estimate
            for published_scale, model in PUBLISHED_SCALES.items():
                if (value := entry.claim.published(published_scale)) is not None:
                    series[f"the paper, {model}"][words] = exactly(value)
    drawn = [Labelled(unit, series, float(unit != POINTS)) for unit, series in panels.items() if series["measured"]]
    return labelled_figure(drawn, folder / STEM) if drawn else []
