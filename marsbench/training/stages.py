"""The training stages: what each starts from, what it learns, and the recipe that determines its checkpoint."""

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from marsbench.errors import UserError, check_known
from marsbench.keys import content_hash, versions
from marsbench.presets import Budget, HeadKind, Preset, Pretrained

Objective = Literal["ar", "mars", "block_diffusion", "medusa", "gated"]
Alignment = Literal["released", "paper"]
BlocksFrom = Literal["sequence", "response"]


@dataclass(frozen=True)
class MarsVariant:
    """How a MARS stage trains where paper and code differ; the defaults are what the released MARS trainer does."""

    alignment: Alignment = "released"  # what predicts a block's first token: the mask before it, or (paper) as in AR
    blocks_from: BlocksFrom = "sequence"  # where blocks are counted from: its first token, or (paper) each response's
    fills_with_eos: bool = True  # sequences are filled up to a multiple of B with labelled EOS, as in no equation
    weighs_by_timestep: bool = False  # each sequence's loss counts 1/t times, as for the released "w/o SFT loss"


@dataclass(frozen=True)
class Stage:
    summary: str
    parent: str | None  # the stage it continues from; None = random weights
    objective: Objective
    plain_text: bool = False  # learns from the world's plain text instead of conversations
    passes: int = 1  # times over the data
    ar_weight: float = 1.0  # weight of the AR term in the MARS loss
    variant: MarsVariant = MarsVariant()  # of MARS training, where paper and released code differ
    draft: bool = False  # trains the scale's small model, the draft of speculative decoding
    share: float = 1.0  # of the budget's steps
    longer: int = 1  # as many times the budget's conversations, each met as often, and so its steps
    width: float = 1.0  # of a base: its model's, in times the world's
    text_only: bool = False  # of a base: it sees no conversations
    adapters_rate: bool = False  # at the learning rate of the scale's adapter
    ranks: int = 1  # of an adapter: its rank, in times the scale's
    strength: float = 1.0  # of an adapter: by how much what its maps say counts, LoRA's alpha over its rank
    head: HeadKind = "none"  # the draft head behind its masks; for an adapter, none = as the scale says


_PAPER = MarsVariant(alignment="paper")
# Masks where decoding puts them: behind a token that the model itself predicts, from the response's first on.
_AS_DECODED = MarsVariant(alignment="paper", blocks_from="response", fills_with_eos=False)


def _base(summary: str, **others: Any) -> Stage:
    return Stage(summary, None, "ar", plain_text=True, **others)


def _mars(summary: str, parent: str = "ar_sft", **others: Any) -> Stage:
    return Stage(summary, parent, "mars", **others)


def _gated(summary: str, parent: str = "ar_sft", **others: Any) -> Stage:
    return Stage(summary, parent, "gated", variant=_AS_DECODED, adapters_rate=True, **others)


def _points(base: str, ending: str, *, hard: bool = False, longer: int = 1, ablated: bool = False) -> dict[str, Stage]:
    """AR fine-tuning and MARS behind it, from another base, at another rate or on more data than the tables have."""
    words = f"of `{base}`" + (" at an adapter's rate" if hard else "")
    words += f" on {longer} times the conversations" if longer > 1 else ""
    sft, how = f"ar_sft{ending}", dict[str, Any](adapters_rate=hard, longer=longer)
    stages = {
        sft: Stage(f"AR fine-tuning {words}", base, "ar", **how),
        f"mars{ending}": _mars(f"MARS {words}", sft, **how),
    }
    if ablated:
        stages[f"mars_no_sft{ending}"] = _mars(f"MARS without the AR term {words}", sft, ar_weight=0.0, **how)
    return stages


STAGES: dict[str, Stage] = {
    "base": _base("next-token prediction on plain text, from random weights"),
    "short_base": _base("`base`, trained two thirds as long", share=2 / 3),
    "ar_sft": Stage("AR fine-tuning on conversations", "base", "ar"),
    "ar_sft_2x": Stage("AR fine-tuning, twice as long (the compute-matched control)", "base", "ar", passes=2),
    "block_diffusion": Stage("block diffusion, continued from AR SFT", "ar_sft", "block_diffusion"),
    "block_diffusion_4x": Stage("block diffusion, trained four times as long", "ar_sft", "block_diffusion", passes=4),
    "block_diffusion_shifted": Stage("block diffusion of the next token", "ar_sft", "block_diffusion", variant=_PAPER),
    "mars_no_sft_hard": _mars("MARS without the AR term at an adapter's rate", ar_weight=0.0, adapters_rate=True),
    "mars_no_sft": _mars("MARS without the AR term (clean ablation), from AR SFT", ar_weight=0.0),
    "mars_no_sft_released": _mars(
        "`mars_no_sft` as released: losses times 1/t", ar_weight=0.0, variant=MarsVariant(weighs_by_timestep=True)
    ),
    "mars": _mars("MARS, continued from AR SFT"),
    "mars_hard": _mars("MARS at an adapter's rate", adapters_rate=True),
    "mars_2x": _mars("MARS, trained twice as long as `mars`", passes=2),
    "mars_network": _mars("MARS with a small network as the draft head of its masks, trained with it", head="network"),
    "mars_paper_alignment": _mars("MARS whose blocks begin with AR's own token, as in the equations", variant=_PAPER),
    "mars_paper_alignment_no_sft": _mars("paper alignment, no AR term elsewhere", ar_weight=0.0, variant=_PAPER),
    "mars_response_blocks": _mars("MARS with each response's own blocks", variant=MarsVariant(blocks_from="response")),
    "mars_no_eos_padding": _mars("MARS that fills no block up with EOS", variant=MarsVariant(fills_with_eos=False)),
    "mars_gated": _gated("a gated adapter on the frozen AR SFT model: masks learn, no token changes"),
    "mars_gated_2x": _gated("`mars_gated`, trained twice as long", passes=2),
    "mars_gated_wide": _gated("`mars_gated` with three times the rank", ranks=3),
    "mars_gated_wide_2x": _gated("`mars_gated_wide`, trained twice as long", passes=2, ranks=3),
    "mars_gated_markov": _gated("`mars_gated` with a table as its draft head", head="markov"),
    "mars_gated_network": _gated("`mars_gated` with a small network as its draft head", head="network"),
    "mars_gated_network_strong": _gated("`mars_gated_network`, alpha/rank = 16", head="network", strength=16.0),
    "base_gated": _gated("a gated adapter on the frozen base itself", "base"),
    "base_gated_4x": _gated("`base_gated`, trained four times as long", "base", passes=4),
    "base_gated_network": _gated("`base_gated` with a small network as draft head", "base", head="network"),
    "base_gated_network_quarter": _gated("`base_gated_network`, 1/4 as long", "base", head="network", share=1 / 4),
    "base_gated_network_strong": _gated("`base_gated_network`, alpha/rank = 16", "base", head="network", strength=16.0),
    "base_mars": _mars("MARS, straight from the base", "base"),
    "base_mars_2x": _mars("MARS, straight from the base, trained twice as long", "base", passes=2),
    "medusa": Stage("Medusa heads on the frozen AR SFT model", "ar_sft", "medusa"),
    "medusa_hard": Stage("Medusa heads at an adapter's rate", "ar_sft", "medusa", adapters_rate=True),
    "draft_base": _base("`base` of the small draft model", draft=True),
    "draft_ar_sft": Stage("AR fine-tuning of the draft model", "draft_base", "ar", draft=True),
    "draft_ar_sft_hard": Stage("`draft_ar_sft`, an adapter's rate", "draft_base", "ar", draft=True, adapters_rate=True),
    "draft_mars": _mars("MARS, continued from the draft's AR SFT", "draft_ar_sft", draft=True),
    "text_base": _base("`base` without conversations, trained a third as long", share=1 / 3, text_only=True),
    "small_base": _base("`base` of half the width, trained a sixth as long", share=1 / 6, width=0.5),
    "medium_base": _base("`base` of the same size, trained a sixth as long", share=1 / 6),
    "large_base": _base("`base` of twice the width, trained a sixth as long", share=1 / 6, width=2.0),
    **_points("base", "_2x_data", longer=2),
    **_points("base", "_4x_data", longer=4, ablated=True),
    **_points("base", "_8x_data", longer=8),
    **_points("base", "_hard_4x_data", hard=True, longer=4),
    **_points("text_base", "_of_text_base"),
    **_points("text_base", "_of_text_base_4x_data", longer=4),
    **_points("text_base", "_of_text_base_hard", hard=True),
    **_points("text_base", "_of_text_base_hard_4x_data", hard=True, longer=4),
    **_points("small_base", "_of_small_base"),
    **_points("medium_base", "_of_medium_base"),
    **_points("large_base", "_of_large_base"),
    **_points("short_base", "_of_short_base", ablated=True),
    **_points("base", "_hard_sft", hard=True, ablated=True),
    **_points("short_base", "_hard_sft_of_short_base", hard=True, ablated=True),
}  # fmt: skip
BLOCK_SIZES = (4, 8, 16)
BLOCKWISE: tuple[Objective, ...] = ("mars", "block_diffusion", "gated")  # show the model masks, block by block


def stage(name: str) -> Stage:
    check_known("stage", name, STAGES)
    return STAGES[name]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a checkpoint; its hash is the checkpoint's key."""

    scale: str
    stage: str
    block_size: int | None  # None for stages without blocks
    seed: int
    objective: Objective
    plain_text: bool
    passes: int
    ar_weight: float
    variant: MarsVariant
    budget: Budget
    model: dict[str, Any] | None  # of random weights in the world; None at a pretrained scale
    vocabulary_size: int | None
    pretrained: Pretrained | None  # base and chat data, None in the world
    chat_data_hash: str | None  # SHA-256 of the chat data where that is a local file
    parent: str | None  # its recipe's key; of a base that is ready in the world, the weights; None = no such parent
    versions: dict[str, int]  # of what makes the data and the loss
    torch: str
    transformers: str
    difficulty: str = "usual"  # of the world
    instruct_base: bool = False  # whether the base learned from conversations too
    rank: int | None = None  # of an adapter
    head: HeadKind = "none"  # the draft head
    strength: float = 1.0  # of an adapter's maps

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits; what came later is left out where it is at its default."""
        facts = asdict(self)
        facts["budget"] = {name: value for name, value in facts["budget"].items() if (name, value) not in _LATER}
        return content_hash({name: value for name, value in facts.items() if (name, value) not in _LATER})

    @property
    def name(self) -> str:
        blocks = f"-b{self.block_size}" if self.block_size else ""
        return f"{self.stage}{blocks}-{self.key}"


_LATER = [("difficulty", "usual"), ("instruct_base", False), ("rank", None), ("head", "none"), ("strength", 1.0)]
_LATER += [("cycle", None), ("sequences", None)]  # in their budgets
_WEIGHTS = "model.safetensors"
_version = cache(metadata.version)  # reads a file


def recipe(scale: Preset, stage_name: str, *, block_size: int = 4, seed: int = 0) -> Recipe:
    """The recipe of a stage at a scale; `block_size` is dropped where the objective has no blocks."""
    chosen, world, pretrained = stage(stage_name), scale.world, scale.pretrained
    if block_size < 2:
        raise UserError(f"block size {block_size} is too small to train", fix=f"choose one of {BLOCK_SIZES}")
    if pretrained and (chosen.plain_text or chosen.draft):
        what = f"scale {scale.scale} does not train {stage_name}: its base {pretrained.base} is pretrained"
        raise UserError(what, fix="use that as --checkpoint, and a checkpoint of a smaller scale as --draft")
    parents = lineage(scale, stage_name)[:-1]
    ready = scale.ready_checkpoint(chosen.parent, None) if world and chosen.parent else None  # the world's, untrained
    budget = scale.finetuning
    if world and chosen.plain_text:
        budget = (chosen.draft and world.draft_pretraining) or world.pretraining
    budget = budget.part(chosen.share).longer(chosen.longer)
    sizes = None if world is None else world.draft_model if chosen.draft else wider(world.model, _width(chosen))
    gated = chosen.objective == "gated"
    return Recipe(
        scale=scale.scale, stage=stage_name, block_size=block_size if chosen.objective in BLOCKWISE else None,
        seed=seed,
        **{name: getattr(chosen, name) for name in ("objective", "plain_text", "passes", "ar_weight", "variant")},
        budget=replace(budget, learning_rate=scale.adapter.learning_rate) if chosen.adapters_rate else budget,
        model=sizes, vocabulary_size=world.vocabulary_size if world else None, pretrained=pretrained,
        chat_data_hash=_file_hash(Path(pretrained.chat_data)) if pretrained else None,
        parent=recipe(scale, parents[-1], seed=seed).key if parents else ready and _file_hash(Path(ready) / _WEIGHTS),
        versions=versions("training", *(() if pretrained else ("world",))), torch=_version("torch"),
        transformers=_version("transformers"), difficulty=world.difficulty if world else "usual",
        instruct_base=world is not None and world.instruct_base and chosen.plain_text and not chosen.text_only,
        rank=scale.adapter.rank * chosen.ranks if gated else None, strength=chosen.strength,
        head=scale.adapter.head if gated and chosen.head == "none" else chosen.head,
    )  # fmt: skip


def wider(model: dict[str, Any], width: float) -> dict[str, Any]:
    """A model of as many layers, `width` times as wide, whose heads are as large."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {name: max(1, round(width * value)) if name in sizes else value for name, value in model.items()}


def _width(chosen: Stage) -> float:
    return chosen.width if chosen.parent is None else _width(STAGES[chosen.parent])


def lineage(scale: Preset, stage_name: str) -> list[str]:
    """The stages to train for a stage, parents first, itself last; without the base where there is one ready."""
    chosen = stage(stage_name)
    if chosen.plain_text and (scale.pretrained or scale.ready_checkpoint(stage_name, None)):
        return []
    return [*(lineage(scale, chosen.parent) if chosen.parent else []), stage_name]


def _file_hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
