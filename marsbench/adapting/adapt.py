"""From a model and prompts to an adapter with a draft head, the settings that pay, and a page.

Whatever is finished lies in the folder of the outcome, so the same command goes on where it was interrupted.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from marsbench.answering import Answering, fit, load_aloud
from marsbench.decoding.acceptance_report import Acceptance
from marsbench.decoding.generation import Generation, Request
from marsbench.distilling.distill import Distiller, Prompt, read_prompts, self_asked
from marsbench.errors import UserError
from marsbench.files import write_atomically
from marsbench.findings.in_words import with_interval
from marsbench.forward.fastest import reads_bf16
from marsbench.json_lines import read_json
from marsbench.line import Line, TrainedStage
from marsbench.presets import Preset
from marsbench.progress import Reporter, roughly
from marsbench.racing.position_law import in_words
from marsbench.racing.race import Race, RoundLog
from marsbench.racing.step_time import windows_that_pay
from marsbench.rendering.markdown import table
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.running.training_cost import training_speed
from marsbench.statistics.intervals import Estimate
from marsbench.training.checkpoints import default_device, ship, with_adapter
from marsbench.training.memory import at_hand
from marsbench.training.records import AT_PLACE, RECORD, finished, in_json
from marsbench.training.stages import Recipe

LAPS = 5  # of the race
HELD_OUT_EVERY = 6  # of that many prompts one is held out, until there are enough
_NEAR = 0.5  # logits, some steps of bf16 where logits lie: rounding decides between two tokens so close


@dataclass(frozen=True)
class Plan:
    """How much is done in the time given; it is reckoned once, and kept for a run that goes on."""

    prompts: int  # that are answered, those held out among them
    held_out: int
    steps: int

    @property
    def kept_back(self) -> range:
        return range(0, self.held_out * HELD_OUT_EVERY, HELD_OUT_EVERY)

    def in_words(self) -> str:
        done = f"{self.prompts:,} prompts answered, {self.steps:,} steps of training"
        return f"{done}, {self.held_out} prompts held out for a race"


class Result(NamedTuple):
    contender: Line
    speed_up: Estimate  # tokens per second over `ar`
    tokens_per_forward: float
    same: int  # answers with the tokens of `ar`
    gap: float = 0.0  # where others part from it, by how much the model prefers its token, at most, in logits


def page_of(
    base: str, adapter: Path, dtype: torch.dtype, plan: Plan, results: Sequence[Result], windows: Sequence[int]
) -> str:
    """What the adapter buys here, with which settings; `windows` are those that pay for 1 row, 2, ..."""
    best, kind = max(results, key=lambda line: line.speed_up.value), str(dtype).removeprefix("torch.")
    name, options = best.contender.name, best.contender.options
    fastest = (
        f"{name[0].upper()}{name[1:]} is the fastest that gives the model's own tokens: "
        f"{with_interval(best.speed_up, 2)} times as fast as `ar` at batch size 1 in {kind}, with "
        f"{best.tokens_per_forward:.2f} tokens per forward pass."
        if name != "ar"
        else f"Nothing was faster than `ar` at batch size 1 in {kind}: train longer (--hours), or on more prompts."
    )
    lines = [
        (line.contender.name, with_interval(line.speed_up, 2), f"{line.tokens_per_forward:.2f}",
         f"{line.same} of {plan.held_out}")
        for line in results
    ]  # fmt: skip
    asked, same = plan.held_out * len(results), sum(line.same for line in results)
    gap = max(line.gap for line in results)
    parted = f". Where others part from it, the two tokens are {gap:.2f} apart in logits at most: " + (
        "in 16 bits, rounding decides such ties" if gap <= _NEAR else "**that is no near tie; please report it**"
    )
    return (Path(__file__).parent / "page.md").read_text(encoding="utf-8").format(
        base=base, fastest=fastest, asked=asked, same=same, parted="" if asked == same else parted,
        table=table(["", "tokens/s over `ar`", "tokens/forward", "answers as `ar`'s"], lines), steps=plan.steps,
        trained=plan.prompts - plan.held_out, held_out=plan.held_out, laps=LAPS, windows=in_words(windows),
        on_it=f"--checkpoint {adapter} --dtype {kind}", typed=best.contender.typed,
        # A server knows fewer methods.
        served=f"mars-verified --block-size {options['block_size']}" if "block_size" in options else "ar",
    )  # fmt: skip


STAGE = "base_gated_network"
CONTENDERS = (
    Line.named("ar", "", "ar"),
    Line.named("prompt lookup", "", "prompt-lookup", draft_length=4),
    *[
        Line.named(f"masks, {layout}, W = {window}", "", "mars-verified", layout=layout, block_size=window)
        for layout in ("linear", "groups") for window in (3, 4)
    ],
    Line.named("masks, two groups, W = 4", "", "mars-verified", layout="groups", block_size=4, groups=2),
    Line.named(
        "masks, linear, W = 4, and prompt lookup", "", "mars-lookup", layout="linear", block_size=4, draft_length=4
    ),
)  # fmt: skip
_DRAFTING = "masks, linear, W = 4"  # whose drafts tell how often one is right, in the layout of the table
_TOKENS, _RACED_TOKENS = 192, 96  # of an answer at most: to learn from, and in the race
_ROWS = 16  # answers decoded at once
_FEWEST = 12  # prompts
# Without prompts: how many the model asks itself, and how many at once on a GPU.
_SELF_ASKED, _SELF_ASKED_ON_GPU, _ASKING_ON_GPU = 1_000, 12_000, 512
_HELD_OUT = 12  # prompts at most
_PROBED_STEPS = 2  # of training, that are timed
_ANSWERING, _RACING = 0.3, 0.15  # shares of the time at most; training has the rest
_PASSES = 10  # over the answers at most; more different ones would be worth more than more passes
_SHORTEST = 10  # steps of a training that is worth starting
_COPIES = 2.5  # of the model in fp32, that memory must have room for


def _check_enough(prompts: Sequence[Prompt], source: Path) -> None:
    if len(prompts) < _FEWEST:
        raise UserError(f"{len(prompts)} prompts are too few", where=str(source), fix=f"give {_FEWEST} or more")


class Adapting:
    def __init__(self, base: str, prompts: Sequence[Prompt] | None, source: Path, out: Path, scale: Preset) -> None:
        """Look at everything that could stand in the way; without `prompts`, the model writes its own to `source`."""
        if prompts is not None:
            _check_enough(prompts, source)
        self._base = str(Path(base).resolve()) if Path(base).is_dir() else base
        self._source, self._out, self._scale = source, out, scale
        self._workspace, self._answers = Workspace(out / "work", scale.scale), out / "answers.jsonl"
        self._reporter = Reporter()
        on_gpu = default_device() == "cuda"
        self._dtype = torch.bfloat16 if on_gpu or reads_bf16() else torch.float32
        self._loaded = load_aloud(base, self._reporter, dtype=self._dtype, device=default_device())
        self._by_ar = Answering(self._loaded, fit("ar", self._loaded), batch_size=_ROWS)
        distiller = Distiller(self._by_ar, self._reporter, max_new_tokens=_TOKENS)
        self._chats, self._answer = distiller.chats, partial(distiller.distill, source=source, keep_cut=True)
        parameters = sum(part.numel() for part in self._loaded.model.parameters())
        free = at_hand(self._loaded.model.device) or 0
        if free < _COPIES * 4 * parameters:
            what = f"training takes some {_COPIES * 4 * parameters / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            raise UserError(what, where=base, fix="close other programs, or choose a smaller model")
        out.mkdir(parents=True, exist_ok=True)
        if prompts is None:
            asking = replace(self._by_ar, batch_size=_ASKING_ON_GPU if on_gpu else _ROWS)
            self_asked(asking, _SELF_ASKED_ON_GPU if on_gpu else _SELF_ASKED, source, self._reporter)
            _check_enough(prompts := read_prompts(source), source)
        self._prompts = prompts

    def run(self, hours: float) -> Path:
        """Do it all, or what is left of it; the page. `UserError` where the time is too short for a training."""
        plan = self._plan(hours)
        asked = enumerate(self._prompts[: plan.prompts])
        self._answer([turns for number, turns in asked if number not in plan.kept_back], out=self._answers)
        adapter = self._out / "adapter"
        if not adapter.exists():
            checkpoints, recipe = self._training(plan.steps, self._answers)
            checkpoints.train(recipe)
            ship(self._workspace.checkpoint(recipe), adapter)
        results, windows = self._race(plan, adapter)
        page = page_of(self._base, adapter, self._dtype, plan, results, windows)
        return write_atomically(self._out / "README.md", page.encode())

    def _plan(self, hours: float) -> Plan:
        file = self._out / "plan.json"
        if file.exists():
            plan: Plan = read_json(file, Plan, mend="remove the file, and the plan is made anew")
            self._reporter.say(f"going on: {plan.in_words()}")
            return plan
        self._reporter.say("estimating: a few answers, then a few training steps")
        for stale in self._out.glob("probe.jsonl*"):  # by an earlier try: answers that take no time now
            stale.unlink()
        started = time.perf_counter()
        learned, _ = self._answer(self._prompts[:_ROWS], out=self._out / "probe.jsonl")
        per_answer = (time.perf_counter() - started) / learned
        _, probed = self._training(_SHORTEST, self._out / "probe.jsonl")
        per_step = max(training_speed(probed, _PROBED_STEPS).seconds)
        (ids,) = self._chats.encoded(self._prompts[:1], self._source)
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            self._by_ar.decode([Request(ids, _RACED_TOKENS)])
        alone = (time.perf_counter() - began) * len(CONTENDERS) * (LAPS + 2)
        left = 3600 * hours - (time.perf_counter() - started)
        asked = min(len(self._prompts), int(_ANSWERING * left / per_answer))
        held_out = min(asked // HELD_OUT_EVERY, _HELD_OUT, int(_RACING * left / alone))
        time_left = left - asked * per_answer - held_out * alone
        a_pass = max(1, (asked - held_out) // self._scale.finetuning.batch_size)
        plan = Plan(asked, held_out, min(int(time_left / per_step), _PASSES * a_pass))
        if asked < _FEWEST or held_out < 1 or plan.steps < _SHORTEST:
            needed = max(_FEWEST * per_answer / _ANSWERING, alone / _RACING, _SHORTEST * per_step / 0.5)
            what = f"{hours:g} hours are too short: a step takes {per_step:.1f} s, an answer {per_answer:.1f} s"
            raise UserError(what, fix=f"give --hours {(needed + 3600 * hours - left) / 3600 + 0.05:.2f} or more")
        parts = map(roughly, (asked * per_answer, plan.steps * per_step, held_out * alone))
        self._reporter.say(f"the plan: {plan.in_words()} ({', '.join(parts)})")
        write_atomically(file, json.dumps(asdict(plan), indent=1).encode())
        return plan

    def _training(self, steps: int, answers: Path) -> tuple[Checkpoints, Recipe]:
        scale = self._scale.adapted(base=self._base, chat_data=str(answers), steps=steps)
        checkpoints = Checkpoints(Run(scale, self._workspace, reporter=self._reporter))
        return checkpoints, checkpoints.recipe(TrainedStage.of(STAGE))

    def _race(self, plan: Plan, adapter: Path) -> tuple[list[Result], tuple[int, ...]]:
        """All contenders on the prompts held out, and the windows that pay; how often drafts were right is recorded."""
        loaded = with_adapter(self._loaded, adapter)
        entrants = {line.name: Answering.of_line(line, loaded) for line in CONTENDERS}
        prompts = self._chats.encoded([self._prompts[number] for number in plan.kept_back], self._source)
        race = Race(entrants, prompts, 1, _RACED_TOKENS, *self._chats.ends(loaded), LAPS)
        with self._reporter.bar("racing on the prompts held out") as bar:
            outcomes = race.run(RoundLog(), bar.update)
        rates = Acceptance.of(outcomes[_DRAFTING].generations).acceptance_rate_per_position
        if (record := finished(adapter)) is not None:
            record.measures.update({f"{AT_PLACE}{place}": rate for place, rate in enumerate(rates)})
            write_atomically(adapter / RECORD, in_json(record))
        windows = windows_that_pay(loaded.model, _ROWS, record.acceptance if record else ())
        ar, results = outcomes["ar"], []
        for contender in CONTENDERS:
            if (mine := outcomes[contender.name]).status == "done":
                answers = [*zip(prompts, ar.generations, mine.generations, strict=True)]
                gaps = [self._gap(ids, a, b) for ids, a, b in answers if a.tokens != b.tokens]
                speed, emitted = mine.speed_over(ar), mine.emitted / mine.row_forwards
                results.append(Result(contender, speed, emitted, len(answers) - len(gaps), max(gaps, default=0.0)))
        return results, windows

    @torch.inference_mode()
    def _gap(self, prompt: list[int], ar: Generation, other: Generation) -> float:
        """By how many logits the model prefers `ar`'s token to the other's where two answers part."""
        both = [[*answer.tokens, *([] if answer.eos_id is None else [answer.eos_id])] for answer in (ar, other)]
        place, (first, second) = next(
            (at, pair) for at, pair in enumerate(zip(*both, strict=False)) if len({*pair}) > 1
        )
        ids = torch.tensor([[*prompt, *both[0][:place]]], device=self._loaded.model.device)
        logits = self._loaded.model(ids).logits[0, -1].float()
        return float(logits[first] - logits[second])
