"""Which measurements a table is made of.

An *arm* is one line of a table: a trained stage, decoded by a method with its options. Every arm is measured on every
benchmark of the scale; one arm on one benchmark is a cell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from marsbench.errors import unknown_name
from marsbench.presets import DEFAULT_BLOCK_SIZE
from marsbench.training.stages import BLOCKWISE, stage

ONE_TOKEN: dict[str, Any] = {"accept": "one"}


class TrainedStage(NamedTuple):
    """A stage, and the block size B that its checkpoint is trained for; None where its objective has no blocks."""

    stage: str
    block_size: int | None

    @classmethod
    def of(cls, name: str, block_size: int | None) -> TrainedStage:
        """A stage at a block size, which is dropped where the objective has no blocks."""
        return cls(name, block_size if stage(name).objective in BLOCKWISE else None)


@dataclass(frozen=True)
class Arm:
    """One line of a table.

    `name` is stable and never shown; `label` is shown. `options` go to the method as they are (`block_size`,
    `threshold`, `accept`, `metric`), but for `draft`, which names the stage of the draft model. `published` is the
    paper's name for the line, None for lines of our own.
    """

    name: str
    label: str
    stage: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    published: str | None = None
    untrained_masks: bool = False  # decode with masks although the checkpoint has never seen any
    trained_block_size: int | None = None  # B of the checkpoint; None = the block size that it is decoded with

    @property
    def block_size(self) -> int:
        """B of the line's checkpoint, where its training has one."""
        return self.trained_block_size or int(self.options.get("block_size", DEFAULT_BLOCK_SIZE))

    @property
    def trained(self) -> TrainedStage:
        """What trains the line's checkpoint; lines with the same answer share it."""
        return TrainedStage.of(self.stage, self.block_size)

    @property
    def draft(self) -> TrainedStage | None:
        """What trains the line's draft model, for a line that has one."""
        return TrainedStage.of(self.options["draft"], self.block_size) if "draft" in self.options else None


@dataclass(frozen=True)
class TablePlan:
    """A table of the paper, or a figure, or a page of our own: its number, its title and its arms in order."""

    number: str  # in the paper; of a page of our own, what commands and files call it
    title: str
    arms: tuple[Arm, ...]
    benchmarks: tuple[str, ...] = ()  # as the paper calls them; none = all six
    questions: int | None = None  # of each benchmark; None = all
    step_cost: bool = False  # also time a training step
    figure: bool = False
    own: str = ""  # the name of a page of our own, which the paper has no table for

    @property
    def name(self) -> str:
        """What the paper calls it, as in "Table 2"."""
        return self.own or f"{'Figure' if self.figure else 'Table'} {self.number}"

    @property
    def key(self) -> str:
        """What commands and files call it, as in "table2"."""
        return self.number if self.own else self.name.lower().replace(" ", "")

    def of(self, benchmarks: Iterable[str]) -> list[str]:
        """Those of a scale's benchmarks that the table asks; a mini one stands for the one it is modelled on."""
        return [name for name in benchmarks if not self.benchmarks or name.removeprefix("mini_") in self.benchmarks]

    @property
    def stages(self) -> list[TrainedStage]:
        """The checkpoints that the arms need, each once, in order; those of draft models come last."""
        drafts = [arm.draft for arm in self.arms if arm.draft is not None]
        return list(dict.fromkeys([*[arm.trained for arm in self.arms], *drafts]))


BLOCK_SIZES = (4, 8, 16)
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
METRIC_THRESHOLDS: dict[str, tuple[float, ...]] = {  # of Figure 6, surest first; entropy in nats
    "probability": THRESHOLDS,
    "entropy": (0.05, 0.2, 0.4, 0.7, 1.0, 1.5),
    "margin": (0.9, 0.8, 0.7, 0.5, 0.3),
}
BATCH_SIZES = (4, 8, 16)  # of Tables 5 and 6
CACHE_BLOCKS = (4, 8, 16, 32, 64, 128, 256)
AR_SFT = Arm("ar_sft", "AR SFT", "ar_sft", "ar", {}, "ar_sft_5ep")
AS_RELEASED = ", as released"  # our words, beside the paper's, for what its authors' code does
# Stage -> its words, in Tables 3 and 8.
MARS_STAGES = {
    "mars_no_sft_released": f"MARS w/o SFT loss{AS_RELEASED}",
    "mars_no_sft": "MARS w/o SFT loss",
    "mars": "MARS",
}
# Stage -> its words, on the page of discrepancies.
MARS_VARIANTS = {
    "mars": "MARS",
    "mars_paper_alignment": "MARS, aligned as in the paper",
    "mars_response_blocks": "MARS, blocks counted from the response",
    "mars_no_eos_padding": "MARS, no labelled EOS filled in",
}
_PAPER_NAMES = {"mars": "mars", "mars_no_sft_released": "mars_no_sft"}
ABLATIONS = tuple(name for name in MARS_STAGES if name != "mars")


def _mars(stage: str, block_size: int, threshold: float | None) -> Arm:
    """MARS, or its ablation, at one token per forward or with a threshold."""
    how = ONE_TOKEN if threshold is None else {"threshold": threshold}
    said = "" if threshold is None else f", tau = {_short(threshold)}"
    label = f"{(MARS_STAGES | MARS_VARIANTS)[stage]} (B = {block_size}{said})"
    name = mars_name(stage, block_size, threshold)
    return Arm(name, label, stage, "mars", {"block_size": block_size, **how}, _PAPER_NAMES.get(stage))


def mars_name(stage: str, block_size: int, threshold: float | None = None) -> str:
    """The name of the line that decodes a MARS stage, one token per forward where no threshold is given."""
    return f"{stage}_b{block_size}" + ("" if threshold is None else f"_{threshold:g}")


def _by_metric(metric: str, threshold: float) -> Arm:
    """MARS (B = 4) that accepts tokens by one of the paper's three metrics; probability is its default."""
    options = {"block_size": 4, "threshold": threshold} | ({} if metric == "probability" else {"metric": metric})
    sign = "<=" if metric == "entropy" else ">="
    return Arm(f"{metric}_{threshold:g}", f"MARS, {metric} {sign} {_short(threshold)}", "mars", "mars", options)


def _short(number: float) -> str:
    """A threshold as the paper writes it, without the zero in front."""
    return f"{number:g}".removeprefix("0")


def _timed(batch_size: int) -> list[Arm]:
    """The lines of Table 5 at a batch size: AR, MARS without a cache, and MARS with caches of several block sizes."""
    batch, mars = {"batch_size": batch_size}, {"block_size": 4, "threshold": 0.95}
    cached = [
        Arm(
            f"mars_cache{block}_x{batch_size}", f"MARS, B_cache = {block}, batch {batch_size}", "mars",
            "mars-block-cache", {**mars, "cache_block": block, **batch}, "mars_block_cache",
        )
        for block in CACHE_BLOCKS
    ]  # fmt: skip
    return [
        Arm(f"ar_x{batch_size}", f"AR SFT, KV cache, batch {batch_size}", "ar_sft", "ar", batch, "ar_kv"),
        Arm(
            f"mars_no_cache_x{batch_size}", f"MARS, no cache, batch {batch_size}", "mars", "mars-no-cache",
            {**mars, **batch}, "mars_no_cache",
        ),
        *cached,
    ]  # fmt: skip


def _speculative(target: str, draft: str) -> Arm:
    """A line of Table 6: the MARS target extends what it has verified, the MARS draft drafts several per forward."""
    extends = target == "mars"
    drafting = {"draft_method": "mars"} if draft == "draft_mars" else {}
    return Arm(
        f"{target}_by_{draft}",
        f"{'MARS' if extends else 'AR SFT'} target, {'MARS' if draft == 'draft_mars' else 'AR SFT'} draft",
        target,
        "mars-speculative" if extends else "speculative",
        {"draft": draft, "draft_length": 4, **drafting, **({"block_size": 4, "threshold": 0.95} if extends else {})},
        "speculative",
    )


def _verified(layout: str, window: int, threshold: float | None) -> Arm:
    """Lossless MARS in one of its layouts, on the checkpoint of B = 4 whatever its window."""
    pruned = {} if threshold is None else {"threshold": threshold}
    return Arm(
        f"verified_{layout}", f"MARS verified, {layout} (W = {window})", "mars", "mars-verified",
        {"layout": layout, "block_size": window, **pruned}, trained_block_size=DEFAULT_BLOCK_SIZE,
    )  # fmt: skip


def _medusa(width: int, shape: str) -> Arm:
    """Medusa, whose heads sit on the frozen AR SFT model."""
    return Arm(f"medusa_{width}", f"Medusa, {shape}", "medusa", "medusa", {"tree_width": width})


TABLES: dict[str, TablePlan] = {
    "table2": TablePlan(
        "2",
        "Accuracy when one token is generated per forward pass",
        (
            Arm("base", "Base", "base", "ar", {}, "base"),
            AR_SFT,
            Arm("ar_sft_2x", "AR SFT (compute-matched)", "ar_sft_2x", "ar", {}, "ar_sft_10ep"),
            Arm(
                "block_diffusion",
                "Block Diffusion (B = 4)",
                "block_diffusion",
                "block-diffusion",
                {"block_size": 4, **ONE_TOKEN},
                "block_diffusion",
            ),
            Arm(
                "mars_no_sft",
                "MARS w/o SFT loss (B = 4)",
                "mars_no_sft",
                "mars",
                {"block_size": 4, **ONE_TOKEN},
                "mars_no_sft",
            ),
            Arm("mars", "MARS (B = 4)", "mars", "mars", {"block_size": 4, **ONE_TOKEN}, "mars"),
            Arm(
                "untrained_masks",
                "AR SFT, mask decoding (B = 4, tau = .95)",
                "ar_sft",
                "mars",
                {"block_size": 4, "threshold": 0.95},
                untrained_masks=True,
            ),
            Arm(
                "untrained_masks_always",
                "AR SFT, mask decoding (B = 4, tau = 0)",
                "ar_sft",
                "mars",
                {"block_size": 4, "threshold": 0.0},
                untrained_masks=True,
            ),
            Arm("mars_95", "MARS (B = 4, tau = .95)", "mars", "mars", {"block_size": 4, "threshold": 0.95}),
        ),
        step_cost=True,
    ),
    "table3": TablePlan(
        "3",
        "What the SFT loss does, by block size, at one token per forward pass",
        (AR_SFT, *[_mars(stage, size, None) for size in BLOCK_SIZES for stage in MARS_STAGES]),
    ),
    "table4": TablePlan(
        "4",
        "Accuracy and tokens per forward pass at tau = .95, by block size",
        (AR_SFT, *[_mars("mars", size, threshold) for threshold in (None, 0.95) for size in BLOCK_SIZES]),
    ),
    "table5": TablePlan(
        "5",
        "Wall-clock speed with the block-level cache, by batch size",
        tuple(arm for size in BATCH_SIZES for arm in _timed(size)),
        benchmarks=("gsm8k",),
        questions=256,
    ),
    "table6": TablePlan(
        "6",
        "Speculative decoding with AR and MARS drafts and targets",
        (
            _speculative("ar_sft", "draft_ar_sft"),
            _speculative("mars", "draft_ar_sft"),
            _speculative("mars", "draft_mars"),
        ),
        benchmarks=("gsm8k",),
        questions=256,
    ),
    "table8": TablePlan(
        "8",
        "Accuracy against tokens per forward pass, by threshold and block size, with and without the SFT loss",
        (
            AR_SFT,
            *[
                _mars(stage, size, threshold)
                for stage in MARS_STAGES
                for size in BLOCK_SIZES
                for threshold in (None, *THRESHOLDS)
            ],
        ),
        benchmarks=("gsm8k", "humaneval"),
    ),
    "table9": TablePlan(
        "9",
        "MARS against Jacobi decoding",
        (
            AR_SFT,
            Arm("jacobi", "AR SFT, Jacobi decoding", "ar_sft", "jacobi", {"block_size": 4}, "jacobi"),
            _mars("mars", 4, 0.95),
        ),
    ),
    "discrepancies": TablePlan(
        "discrepancies",
        "What difference it makes where paper and released code differ",
        (
            Arm("base", "Base", "base", "ar", {}),
            AR_SFT,
            *[
                _mars(stage, 4, threshold)
                for stage in dict.fromkeys((*MARS_VARIANTS, *ABLATIONS))
                for threshold in (None, 0.95)
            ],
            _mars("mars", 4, 1.0),
        ),
        own="Discrepancies",
    ),
    "figure1": TablePlan(
        "1",
        "One answer, and which forward pass settled each of its tokens",
        (
            Arm("ar", "one token per forward pass", "mars", "ar"),
            Arm("mars", "MARS (B = 4, tau = .95)", "mars", "mars", {"block_size": 4, "threshold": 0.95}),
        ),
        benchmarks=("gsm8k",),
        questions=1,
        figure=True,
    ),
    "figure6": TablePlan(
        "6",
        "Three ways to tell when a token is sure enough, each at several thresholds",
        (
            AR_SFT,
            _mars("mars", 4, None),
            *[_by_metric(metric, threshold) for metric, found in METRIC_THRESHOLDS.items() for threshold in found],
        ),
        benchmarks=("gsm8k", "humaneval"),
        figure=True,
    ),
    "gains": TablePlan(
        "gains",
        "What the paper did not test",
        (
            AR_SFT,
            Arm("ar_of_mars", "MARS, AR decoding", "mars", "ar"),
            *[_mars("mars", 4, threshold) for threshold in THRESHOLDS],
            _verified("linear", 5, 0.5),
            _verified("groups", 4, None),
            Arm("lookup", "MARS, prompt lookup", "mars", "prompt-lookup", {"draft_length": 4}),
            Arm("jacobi_of_mars", "MARS, Jacobi decoding", "mars", "jacobi", {"block_size": 4}),
            _medusa(1, "a chain"),
            _medusa(3, "a tree"),
            replace(_speculative("ar_sft", "draft_ar_sft"), label="AR SFT, speculative decoding", published=None),
        ),
        own="Where the gain comes from",
    ),
}


def table_plan(name: str) -> TablePlan:
    """The plan of a table, or a `UserError` that names the tables there are."""
    if name not in TABLES:
        raise unknown_name("table", name, list(TABLES))
    return TABLES[name]
