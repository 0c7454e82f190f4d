"""How a command decodes: the options that all of them share, among them every option that some method has.

    @decodes("mars")
    def ask(question: str, decoding: Decoding) -> None: ...

gives `ask` those options beside its own, and hands over in `decoding` what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marsbench.commands import shared
from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.errors import UserError
from marsbench.methods import METHODS, OPTIONS, Options, check_heard, check_how, explained

if TYPE_CHECKING:
    from marsbench.answering import Answering
    from marsbench.progress import Reporter
    from marsbench.training.checkpoints import Loaded

BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows decoded at once; by default 16, for hf-assisted 1.")]
ROWS = 16  # decoded at once where nobody says how many
_PANEL = "Options of methods"


@dataclass(frozen=True)
class Decoding:
    """How to decode, as it was typed."""

    method: Annotated[str, typer.Option(help="How to decode: see `marsbench list methods`.")]
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Confidence to accept a token (mars-verified, mars-lookup: to draft one), for mars methods and "
            "block-diffusion; without it, mars takes one per forward pass."
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model's checkpoint folder, for speculative, mars-speculative and hf-assisted."),
    ] = None
    untrained_masks: shared.UntrainedMasks = False
    dtype: Annotated[str, typer.Option(help="Of weights and caches: float32, bfloat16 or float16.")] = "float32"
    prefill_positions: Annotated[
        int,
        typer.Option(
            min=1, help="Prompt tokens in one forward pass at most: fewer take less memory, the answers are the same."
        ),
    ] = PREFILL_POSITIONS
    compiled: shared.Compile = None
    pack: shared.Pack = True
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method, those that were typed

    def check(self, *, stage: str | None, accept: str | None = None) -> None:
        """Refuse a way to decode that could not work, before any checkpoint is trained or loaded for it.

        `stage` is of the scale's own checkpoint; None where another one decodes, which is looked at when it is loaded.
        """
        from marsbench.training.stages import BLOCKWISE
        from marsbench.training.stages import stage as stage_of

        method = self.method
        check_how(
            method, Options(**self.options), threshold=self.threshold, accept=accept, dtype=self.dtype,
            compiled=self.compiled,
        )  # fmt: skip
        needs = METHODS[method].needs
        if "draft" in needs and self.draft is None:
            raise UserError(
                f"method {method!r} needs a draft model", fix="give one: marsbench train draft_ar_sft, --draft DIR"
            )
        objective = stage_of(stage).objective if stage is not None else None
        if objective and "masks" in needs and objective not in BLOCKWISE and not self.untrained_masks:
            raise UserError(
                f"method {method!r} needs a checkpoint trained with masks; stage {stage!r} is trained without",
                fix="choose --stage mars, or --untrained-masks to see what happens without",
            )
        if objective and "heads" in needs and objective != "medusa":
            raise UserError(
                f"method {method!r} needs Medusa heads; stage {stage!r} has none", fix="choose --stage medusa"
            )

    def check_heard(self, *methods: str) -> None:
        """Refuse options that no method here would hear of."""
        check_heard(self.options, methods, _word)

    def by(self, method: str) -> Decoding:
        """The same by another method, as far as it concerns that one."""
        if method not in METHODS:
            return replace(self, method=method)
        info = METHODS[method]
        options = {name: value for name, value in self.options.items() if name in info.options}
        threshold = self.threshold if info.takes_threshold else None
        return replace(self, method=method, threshold=threshold, options=options)

    def at(self, block_size: int) -> Decoding:
        """The same for a checkpoint that was trained with this B, which is the window where none was typed."""
        return replace(self, options={"block_size": block_size, **self.options})

    def that_pays(self, loaded: Loaded, rows: int, reporter: Reporter) -> Decoding:
        """The same by the window that pays for so many rows on this machine, as a server's table has it, or by `ar`."""
        from marsbench.racing.step_time import windows_that_pay

        knows = self.untrained_masks or (loaded.knows_masks and {loaded.mask_id, self.options.get("mask_id")} != {None})
        window = windows_that_pay(loaded.model, rows, loaded.acceptance)[-1] if knows and rows else 1
        reporter.say(f"for {rows} rows here: {'ar' if window == 1 else f'mars-verified, linear, W = {window}'}")
        if window == 1:
            return replace(self.by("ar"), threshold=None)
        return replace(self, options={**self.options, "layout": "linear", "block_size": window})

    def load_draft(self, reporter: Reporter, **how: Any) -> Loaded | None:
        """The draft model, where one was named."""
        return shared.load_named(self.draft, self.dtype, reporter, **how) if self.draft else None

    def answering(
        self, loaded: Loaded, draft: Loaded | None, reporter: Reporter, batch_size: int | None = None
    ) -> Answering:
        """The checkpoint with the method; where its steps cannot be compiled, that is said."""
        from marsbench.answering import Answering
        from marsbench.line import Line

        typed = Line.raced(self.method, "", self.method, threshold=self.threshold, **self.options)
        line = replace(typed, untrained_masks=self.untrained_masks, compiled=self.compiled)
        rows = batch_size or (1 if METHODS[self.method].one_row else ROWS)
        found = Answering.of(line, loaded, draft, batch_size=rows, prefill_positions=self.prefill_positions)
        reporter.say_once(found.remark)
        return found


def decodes(
    method: str = "mars", *, which: str = "", window: Sequence[str] = ("--window",)
) -> Callable[[shared.Command], shared.Command]:
    """Give a command the options of `Decoding` and of all methods, but for those that it has of its own.

    `window` is what `Options.block_size` is called. Where --block-size is B of the training, it is another option, and
    B by default.
    """
    named, *others = shared.options_from(Decoding, [one.name for one in fields(Decoding)][:-1], panel="How to decode")
    named.annotation.__metadata__[0].help = which or named.annotation.__metadata__[0].help
    of_methods = {}
    for name, option in OPTIONS.items():  # None where it was not typed: what nobody hears of can be refused
        flags = window if name == "block_size" else ()
        said = explained(name, "B" if flags and "--block-size" not in flags else "")
        of_methods[name] = shared.option_of(_word(name), option, None, flags=flags, help=said, panel=_PANEL)

    def decoding(typed: dict[str, Any]) -> Decoding:
        options = {name: value for name, one in of_methods.items() if (value := typed.pop(one.name)) is not None}
        return Decoding(**{"method": method, **typed}, options=options)

    return shared.handing("decoding", [named.replace(default=method), *others, *of_methods.values()], decoding)


def _word(name: str) -> str:
    """What an option is called on the command line, where a block size is B of the training."""
    return "window" if name == "block_size" else name
