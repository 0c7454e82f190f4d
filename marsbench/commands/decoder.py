"""How a command decodes: the options of `Decoding`, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marsbench.commands import shared
from marsbench.errors import UserError
from marsbench.methods import HOW, METHODS, OPTIONS, Decoding, explained

if TYPE_CHECKING:
    from marsbench.progress import Reporter
    from marsbench.training.checkpoints import Loaded

BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows decoded at once; by default 16, for hf-assisted 1.")]


def decodes(*more: str) -> Callable[[shared.Command], shared.Command]:
    """Give a command the options of `Decoding`; of `accept` and `mask_id` those that it names.

    Where --block-size is another option, B of the training, the window is B by default.
    """
    names = [name for name in HOW if name not in {"accept", "mask_id", *OPTIONS} - {*more}]
    options = {name: replace(option, help=explained(name)) for name, option in OPTIONS.items()}
    options["window"] = replace(OPTIONS["window"], help=explained("window", "B"))

    def panel(name: str) -> str:
        return "Options of methods" if name in OPTIONS else "How to decode"

    return shared.takes("decoding", Decoding, [*names, *options], {**HOW, **options}, panel)


def check_for(decoding: Decoding, stage: str | None) -> None:
    """Refuse a way to decode that could not work, before any checkpoint is trained or loaded for it.

    `stage` is of the scale's own checkpoint; None where another one decodes, which is looked at when it is loaded.
    """
    from marsbench.training.stages import BLOCKWISE
    from marsbench.training.stages import stage as stage_of

    method, needs = decoding.check().method, METHODS[decoding.method].needs
    if "draft" in needs and decoding.draft is None:
        raise UserError(
            f"method {method!r} needs a draft model", fix="give one: marsbench train draft_ar_sft, --draft DIR"
        )
    objective = stage_of(stage).objective if stage is not None else None
    if objective and "masks" in needs and objective not in BLOCKWISE and not decoding.untrained_masks:
        raise UserError(
            f"method {method!r} needs a checkpoint trained with masks; stage {stage!r} is trained without",
            fix="choose --stage mars, or --untrained-masks to see what happens without",
        )
    if objective and "heads" in needs and objective != "medusa":
        raise UserError(f"method {method!r} needs Medusa heads; stage {stage!r} has none", fix="choose --stage medusa")


def at(decoding: Decoding, block_size: int) -> Decoding:
    """The same for a checkpoint that was trained with this B, which is the window where none was typed."""
    return replace(decoding, window=decoding.window or block_size)


def that_pays(decoding: Decoding, loaded: Loaded, rows: int, reporter: Reporter) -> Decoding:
    """The same by the window that pays for so many rows on this machine, as a server's table has it, or by `ar`."""
    from marsbench.racing.step_time import windows_that_pay

    has_mask = loaded.mask_id is not None or decoding.mask_id is not None
    knows = decoding.untrained_masks or (loaded.knows_masks and has_mask)
    window = windows_that_pay(loaded.model, rows, loaded.acceptance)[-1] if knows and rows else 1
    reporter.say(f"for {rows} rows here: {'ar' if window == 1 else f'mars-verified, linear, W = {window}'}")
    return decoding.by("ar") if window == 1 else replace(decoding, layout="linear", window=window)


def load_draft(decoding: Decoding, reporter: Reporter, **how: Any) -> Loaded | None:
    return shared.load_named(decoding.draft, decoding.dtype, reporter, **how) if decoding.draft else None
