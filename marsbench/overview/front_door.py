"""README's first screen: what MARS promises beside what was measured, in a table and a picture, between two marks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from marsbench.findings.cells import PUBLISHED_SCALES, latest_stages, same_answers
from marsbench.findings.claims import POINTS, TIMES, TOKENS, Finding, Judged
from marsbench.findings.collection import Collection
from marsbench.findings.in_words import machines, plus_minus, with_interval
from marsbench.findings.sweep import SweepCells, printed_ratio
from marsbench.gpu_check.page import Steps, steps_at
from marsbench.presets import DEFAULT_SCALE
from marsbench.rendering import claims_in_words as said
from marsbench.rendering.figures import Labelled, exactly, labelled_figure
from marsbench.rendering.markdown import filled, table
from marsbench.rows.kinds import Row
from marsbench.statistics.intervals import Estimate
from marsbench.studies import longer
from marsbench.studies import mars_on_gpu as on_gpu
from marsbench.studies.curves import numbers as more_steps
from marsbench.studies.gains import in_brief as rivals
from marsbench.studies.lines import BATCH_SIZES
from marsbench.studies.real_model import in_brief
from marsbench.studies.speedup import same_as_sft
from marsbench.studies.speedup.speed_claims import published5

BEGIN, END = "<!-- rendered by marsbench report: begin -->", "<!-- rendered by marsbench report: end -->"
SPEED, REAL = "speedup", "135m"  # a study; the scale of the real model
_ONE, _TOKENS, _LEVEL = ("table2", "matches-ar-sft"), ("table4", "several-tokens"), ("table4", "level")
_CACHE, _FASTER, _VERIFIED = (SPEED, "cache-faster"), (SPEED, "mars-95"), (SPEED, "best-verified")
_TAUGHT, _RATE, _LONGER = ("regime", "taught"), ("map", "hard-emits"), ("longer", "longer-matches")
# Slot of the layout -> page and name of the claim whose number fills it, or of what stands beside that number.
_SLOTS: dict[str, tuple[tuple[str, str], str]] = {
    "one": (_ONE, ""), "tokens": (_TOKENS, ""), "level": (_LEVEL, ""), "longer_level": (_LONGER, longer.POINTS_AT[-1]),
    "longer_tokens": (_LONGER, longer.TOKENS_AT[-1]),
    "faster": (_FASTER, ""), "faster_of_many": (_FASTER, "batch 16"), "longer_faster": (_LONGER, longer.FASTER[0]),
    "longer_faster_of_many": (_LONGER, longer.FASTER[-1]),
    "taught": (_TAUGHT, ""), "rate": (_RATE, ""), "rate_accuracy": (_RATE, "accuracy"),
    "rate_sft": (_RATE, "accuracy of AR SFT"),
}  # fmt: skip
# Lines of the table: words, claim, and which of its numbers.
_TOY = (
    ("Toy: mean points against AR SFT, one token", _ONE, ("",)),
    ("Toy: mean points against AR SFT, tau = .95", _LEVEL, ("",)),
    ("Toy, trained 4 times as long: points, one token; tau = .99; .95", _LONGER, longer.POINTS_AT),
    ("Toy, trained 4 times as long: tokens per pass, tau = .99; .95", _LONGER, longer.TOKENS_AT),
    ("Toy: speed over our AR, tau = .95, the paper's cache, batch 4; 8; 16", _CACHE, ("", "batch 8", "batch 16")),
    ("Toy: speed over our AR, verified MARS (ours), batch 1; 4; 16", _VERIFIED, ("", "batch 4", "batch 16")),
)
_RAN = "table2", "longer", SPEED, "rivals"  # studies whose machines the first screen names
_Findings = Mapping[tuple[str, str], Finding]  # page and name of a claim -> what rows say of it
STEM = "figures/claims"
_SHOWN = (  # page and name, by unit
    ("table2", "matches-ar-sft"), ("longer", "longer-matches"), ("table4", "level"), ("gpu", "real-cost"),
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
    sweep = SweepCells.of(next(iter(whole.of(SPEED)), ()))
    generate, alike = sweep.eager.speed_up("ar", 1, "hf-generate"), same_as_sft(sweep)
    papers = [entry.findings[whole.scale] for entry in judged if entry.claim.papers]
    failed = [finding for finding in papers if said.verdict(finding, whole.scale).startswith("does not hold")]
    toys = [row for page in _RAN for rows in whole.of(page) for row in rows]
    where = {"The toy": machines(toys), "MARS on SmolLM2-135M": machines(rows)}
    slots = {
        "machines": ". ".join(f"{what} ran on {which}" for what, which in where.items() if which),
        "papers": said.tally((whole.scale, finding) for finding in papers),
        "fail": "; ".join(f"{each.claim.text} ({each.found})" for each in failed),
        **{slot: _shown(findings, *claim) for slot, claim in _SLOTS.items()},
        **_real(rows),
        **_estimate(steps_at(root, "7b"), rows),
        "cpu": "".join(map(in_brief, real.of("real-model")[:1])),
        "table": table(["", "the paper", "here [95 %]", "of"], [*_real_lines(rows), *_toy(findings)], text=range(4)),
        "figure": f"![A dozen claims: the paper's number and ours with its 95 % interval](reports/{STEM}.png)",
        "paper_taught": said.published(findings[_TAUGHT].claim),
        **{slot: number or "(not measured)" for slot, number in more_steps(whole.of("curves") or [[]]).items()},
        "same": "{} of {} answers equal those of the toy's AR SFT.".format(*alike) if alike else "",
        "generate": printed_ratio(generate, "n/a"),
        "rivals": "".join(map(rivals, whole.of("rivals")[:1])),
    }
    return {file: "\n".join([before + BEGIN, *filled(__package__, "front_door.md", slots), END + after])}


def _shown(findings: _Findings, key: tuple[str, str], beside: str = "") -> str:
    """The number of a claim, or of what stands beside it."""
    finding = dict(findings[key].beside)[beside] if beside else findings[key]
    return "(not measured)" if finding.estimate is None else finding.number


def _real(rows: Sequence[Row]) -> dict[str, str]:
    """What MARS does on the real model, by slot."""
    lost, cells = on_gpu.LOST.of(rows), on_gpu.cells_of(rows)
    trained = next(iter(latest_stages(rows).values()), None)
    return {
        **said.numbers_of(claim.with_beside({0: rows}) for claim in (*on_gpu.CLAIMS, on_gpu.LOST)),
        "paper_tokens": said.published(on_gpu.CLAIMS[0]),
        "real_base": plus_minus(cells[on_gpu.BASE]["ifeval"].accuracy.times(100), 1) if on_gpu.BASE in cells else "",
        "real_asked": f"{lost.estimate.n if lost.estimate else 0}",
        "seconds": f"{trained.seconds if trained else 0:.0f}",
    }


def _estimate(steps: Steps, rows: Sequence[Row]) -> dict[str, str]:
    """The estimated speed of MARS over AR decoding by requests at once, beside the paper's; "" for what is unknown."""
    costs, tokens = steps.costs, on_gpu.CLAIMS[0].over([rows]).estimate  # tokens per pass of the real model
    ratios, papers = {batch: steps.emitted["gsm8k"] / cost for batch, cost in costs.items()}, _papers()
    faster, slower = ([batch for batch, ratio in ratios.items() if (ratio > 1) == wins] for wins in (True, False))
    return {
        "faster_at": _keys(faster) or "no number of",
        "slower_at": f", no at {_keys(slower)}" if slower else "",
        "estimates": _values(ratios),
        "real_estimates": _values({batch: tokens.value / cost for batch, cost in costs.items()}) if tokens else "",
        "estimated_at": _keys(ratios),
        "unmeasured": f", none between {max(faster)} and {min(slower)} requests" if faster and slower else "",
        **{"papers_speeds": _values(papers), "papers_at": _keys(papers)},
        "step_costs": _values(costs),
        "papers_gsm8k": f"{steps.emitted['gsm8k']:.2f}" if ratios else "",
        "papers_mean": f"{steps.emitted['average']:.2f}" if ratios else "",
    }


def _papers() -> dict[int, float]:
    """Batch size -> the published speed of MARS with its cache over AR decoding with a cache, at 7B."""
    return {batch: max(published5(batch).values()) for batch in BATCH_SIZES}


def _keys(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _values(values: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values.values())


def _real_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    cells, (emits, cost) = on_gpu.cells_of(rows), (claim.over([rows]) for claim in on_gpu.CLAIMS)
    if not cells.keys() >= on_gpu.LINES.keys():
        return
    same, of = same_answers(cells[on_gpu.VERIFIED], cells[on_gpu.ONE])
    page = f"{of:,} prompts; 1 seed; [page](reports/135m/real-model.md)"
    drafted = with_interval(on_gpu.emitted(cells[on_gpu.VERIFIED]), 2)
    yield ["Real model: tokens per pass, tau = .95", said.published(emits.claim), emits.number, page]
    asked = f"{cost.estimate.n if cost.estimate else 0} prompts; 1 seed"
    yield ["Real model: IFEval points, tau = .95 against one token", said.published(cost.claim), cost.number, asked]
    exact = f"{same:,} of {of:,} answers equal its own AR decoding's"
    yield ["Real model: tokens per pass, verified MARS (ours)", "-", drafted, exact]


def _toy(findings: _Findings) -> Iterator[list[str]]:
    for words, key, shown in _TOY:
        if (finding := findings[key]).estimate is not None:
            numbers = "; ".join(_shown(findings, key, beside) for beside in shown)
            paper = _values(_papers()) if key == _CACHE else said.published(finding.claim) if shown[0] == "" else ""
            of = said.counted(finding)
            yield [words, paper or "-", numbers, of if finding.measured.counts else of.replace(";", " questions;")]


def draw(judged: Sequence[Judged], folder: Path) -> list[Path]:
    """Write the picture below the folder of the index, the paper's numbers beside ours; nothing without its claims."""
    by_key = {(entry.claim.page, entry.claim.name): entry for entry in judged}
    small, large = (f"the paper, {model}" for model in PUBLISHED_SCALES.values())
    panels: dict[str, dict[str, dict[str, Estimate]]] = {
        unit: {small: {}, "measured": {}, large: {}} for unit in (POINTS, TOKENS, TIMES)
    }
    for entry in [by_key[key] for key in _SHOWN]:
        known = [(scale, result, result.estimate) for scale, result in entry.findings.items() if result.estimate]
        for scale, result, estimate in known[:1]:
            series, words = panels[entry.claim.unit], f"{entry.claim.text} ({said.verdict(result, scale)})"
            series["measured"][words] = estimate
            for published_scale, model in PUBLISHED_SCALES.items():
                if (value := entry.claim.published(published_scale)) is not None:
                    series[f"the paper, {model}"][words] = exactly(value)
    drawn = [Labelled(unit, series, float(unit != POINTS)) for unit, series in panels.items() if series["measured"]]
    return labelled_figure(drawn, folder / STEM) if drawn else []
