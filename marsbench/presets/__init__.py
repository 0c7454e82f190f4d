"""The scales a table can be reproduced at: models, data, budgets and limits, one YAML file each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from marsbench.errors import UserError, check_known

DEFAULT_SCALE = "mini"  # without --scale; its pages lie in reports/ itself
DEFAULT_BLOCK_SIZE = 4  # B without --block-size, the paper's main setting
_FILES = resources.files(__package__)


@dataclass(frozen=True)
class Budget:
    """How long and how hard a stage trains. Fields after `weight_decay` are in a recipe's key only where set."""

    batch_size: int  # sequences per step, over all processes and accumulation steps together
    learning_rate: float  # peak, after a linear warm-up
    steps: int | None = None
    epochs: int | None = None  # counts where `steps` is None
    adam_beta2: float = 0.999
    weight_decay: float = 0.0
    # Steps of a cycle: a warm-up, the peak held, a last fifth that falls linearly to zero, and another cycle, until the
    # steps are over. None = one warm-up, and a cosine to zero.
    cycle: int | None = None
    sequences: int | None = None  # of the world to go over `epochs` times; None = each is met once

    def part(self, share: float) -> "Budget":
        if share == 1 or self.steps is None:
            return self
        steps = max(1, round(share * self.steps))
        return replace(self, steps=steps, cycle=self.cycle and min(self.cycle, steps))

    def longer(self, times: int) -> "Budget":
        steps, sequences = (count and times * count for count in (self.steps, self.sequences))
        return replace(self, steps=steps, sequences=sequences)

    def total_steps(self, sequences: int, passes: int) -> int:
        """Optimizer steps for data of so many sequences; a stage of two passes takes twice the steps."""
        if self.steps is not None:
            return self.steps * passes
        assert self.epochs is not None, "a budget has steps or epochs"
        return math.ceil(self.epochs * passes * (self.sequences or sequences) / self.batch_size)


HeadKind = Literal["none", "markov", "network"]  # of the draft head behind a gated adapter's masks


@dataclass(frozen=True)
class AdapterSize:
    """A gated adapter's size, and the peak of its learning rate: its own, since the model stays as it is."""

    rank: int = 16
    learning_rate: float = 3.0e-3
    head: HeadKind = "none"


@dataclass(frozen=True)
class World:
    """A scale whose models learn the embedded world, from random weights or from shipped ones."""

    model: dict[str, Any]  # Qwen2Config keywords
    draft_model: dict[str, Any]  # the same for the draft model, about a quarter of the parameters
    vocabulary_size: int  # upper bound for the world's tokenizer
    pretraining: Budget  # the base stage
    difficulty: str = "usual"  # of the world, as `marsbench.world` names it
    instruct_base: bool = False  # whether bases learn from conversations too, half and half with plain text
    draft_pretraining: Budget | None = None  # of the draft's base; None = as the base's


@dataclass(frozen=True)
class Pretrained:
    base: str  # checkpoint folder or hub name
    chat_data: str  # conversations: a JSON Lines file, or a hub data set with a `messages` column
    max_length: int  # tokens of a sequence; what is longer loses its end
    bf16: bool  # compute in bf16; the weights and the optimizer's state stay fp32
    gradient_checkpointing: bool  # compute activations twice instead of keeping them
    # Objective -> sequences at once at most, where memory does not decide; accumulation makes up the batch.
    rows_per_device: dict[str, int]
    memory_gib: int | float | None = None  # what pieces of a batch are cut for on a CPU, GiB; None = what is free


@dataclass(frozen=True)
class Assumptions:
    """What `marsbench plan` reckons with; a run only chooses by it what starts first, and guesses the time left."""

    tokens_per_sequence: int
    tokens_per_second: float  # of decoding, all rows together
    source: str  # where the two rates come from
    training_tokens_per_second: float | None = None  # of AR training on one core; None where the paper gives hours
    sequences: int | None = None  # in the chat data; None for the world, which makes what a budget asks for
    training_memory_gib: float | None = None  # per device; None where `Preset.memory_gib` covers training
    training_disk_gib: float | None = None
    # Of races on a GPU, in seconds: a step of "ours" and of another "library", whatever its rows, and a "position" of a
    # forward that reads whole sequences. None = races take what `tokens_per_second` says.
    steps_s: dict[str, float] | None = None


@dataclass(frozen=True)
class Preset:
    """Everything that a scale fixes. It has a `world` or it is `pretrained`, one of the two."""

    scale: str
    summary: str
    finetuning: Budget  # every stage after the base; `ar_sft_2x` takes twice the steps
    benchmarks: tuple[str, ...]
    questions: int | None  # per benchmark; None = all there are
    max_new_tokens: int
    batch_size: int  # rows decoded at once
    memory_gib: float  # free memory that measuring a table needs, GiB
    disk_gib: float  # free disk that it needs, GiB
    assumptions: Assumptions
    world: World | None = None
    pretrained: Pretrained | None = None
    adapter: AdapterSize = AdapterSize()
    # Stage, or stage-bB, -> checkpoint folder or hub name; a stage with blocks and without -bB is one for B = 4. In the
    # file of a scale, "./" is the folder beside it: bases of the world that are shipped.
    published: dict[str, str] = field(default_factory=dict)
    stage: str = "mars"  # whose checkpoint decodes where a user names no stage
    block_size: int = DEFAULT_BLOCK_SIZE  # B that this checkpoint was trained with
    train_all: bool = False  # train the stages that have a published checkpoint too
    grid: str | None = None  # the shipped grid that its sweep runs, None = the one of its own name
    caveat: str = ""  # what readers of verdicts must know of a scale that only tests the mechanism
    place: int | None = None  # among the scales that share one index; None = alone
    needs_gpu: bool = False  # a CPU is far too slow for it
    in_seconds: bool = False  # for tests: pages measure as little as shows that they work

    def ready_checkpoint(self, stage: str, block_size: int | None) -> str | None:
        """The checkpoint that stands for a stage (without blocks: None) untrained; None where it is to be trained."""
        plain = self.published.get(stage) if block_size in (None, DEFAULT_BLOCK_SIZE) else None
        ready = plain or self.published.get(f"{stage}-b{block_size}")
        return self.pretrained.base if ready is None and self.pretrained and stage == "base" else ready

    def with_checkpoints(self, given: Sequence[str], *, train_all: bool = False) -> "Preset":
        """This scale with `STAGE=CHECKPOINT` entries for its published ones, or in place of all (`train_all`)."""
        published = {} if train_all else {**self.published}
        for entry in given:
            stage, _, checkpoint = entry.partition("=")
            if not stage or not checkpoint:
                raise UserError(f"{stage!r} names no stage and checkpoint", fix="write --checkpoint mars=FOLDER")
            published[stage] = checkpoint
        return replace(self, published=published, train_all=train_all)

    def of_seed(self, seed: int) -> "Preset":
        """This scale with the checkpoints that are shipped for a training seed; other seeds train theirs."""
        folder = Path(_beside(f"./trained/{self.scale}/seed{seed}"))
        return replace(self, published={file.name: str(file) for file in folder.glob("*")} | self.published)

    def ships(self, checkpoint: str) -> bool:
        return checkpoint.startswith(_beside("./"))

    @property
    def tables_train(self) -> bool:
        """Whether a table trains what it lacks; where that takes days, it leaves lines out instead, unless asked."""
        return self.world is not None or self.train_all

    def adapted(
        self, *, base: str | None = None, chat_data: str | None = None, steps: int | None = None,
        batch_size: int | None = None, head: HeadKind | None = None,
    ) -> "Preset":  # fmt: skip
        """This scale with another base, chat data or draft head, or with every stage's budget changed."""
        if self.pretrained is None and (base or chat_data):
            fix = f"leave --base and --chat-data out, or choose a scale of {', '.join(scales_with_chat_data())}"
            raise UserError(f"scale {self.scale} trains its own base on the embedded world, not on chat data", fix=fix)

        def changed(budget: Budget) -> Budget:
            cycle = budget.cycle and min(budget.cycle, steps or budget.cycle)  # a rate that reaches its peak, and falls
            batch = batch_size or budget.batch_size
            return replace(budget, steps=steps or budget.steps, batch_size=batch, cycle=cycle)

        world, start = self.world, self.pretrained
        if world is not None:
            draft = world.draft_pretraining
            world = replace(world, pretraining=changed(world.pretraining), draft_pretraining=draft and changed(draft))
        start = start and replace(start, base=base or start.base, chat_data=chat_data or start.chat_data)
        adapter = replace(self.adapter, head=head or self.adapter.head)
        return replace(self, finetuning=changed(self.finetuning), adapter=adapter, world=world, pretrained=start)


def scales() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in _FILES.iterdir() if file.name.endswith(".yaml"))


def in_seconds() -> Preset:
    return next(small for name in scales() if (small := preset(name)).in_seconds)


def scales_with_chat_data() -> list[str]:
    return [scale for scale in scales() if preset(scale).pretrained]


def scales_shown_with(scale: str) -> list[str]:
    placed = {name: place for name in scales() if (place := preset(name).place) is not None}
    return sorted(placed, key=placed.__getitem__) if scale in placed else [scale]


def option_for(scale: str) -> str:
    """What chooses a scale behind the name of a nox session; empty for the default scale."""
    return "" if scale == DEFAULT_SCALE else f" -- --scale {scale}"


@cache
def preset(scale: str) -> Preset:
    check_known("scale", scale, scales())
    from pydantic import TypeAdapter  # `--help` has no time for it

    values = yaml.safe_load((_FILES / f"{scale}.yaml").read_text(encoding="utf-8"))
    values["published"] = {stage: _beside(place) for stage, place in values.get("published", {}).items()}
    return TypeAdapter(Preset).validate_python({"scale": scale, **values})


def _beside(place: str) -> str:
    return str(_FILES / place.removeprefix("./")) if place.startswith("./") else place
