"""What several commands share: their options, and the run that most of them start.

    @takes("start", Start, ["scale", "seed"])
    def ask(question: str, start: Start) -> None: ...

gives `ask` those options of `Start` beside its own, and `start` has what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from marsbench.errors import UserError, check_known
from marsbench.methods import HOW, METHODS, OPTIONS, Decoding, explained
from marsbench.methods.options import Option, option, options_of
from marsbench.presets import DEFAULT_BLOCK_SIZE, DEFAULT_SCALE, preset

if TYPE_CHECKING:
    import torch

    from marsbench.line import TrainedStage
    from marsbench.presets import Preset
    from marsbench.progress import Reporter
    from marsbench.running.run import Run
    from marsbench.training.checkpoints import Loaded

Command = Callable[..., None]

AskedBenchmark = Annotated[str, typer.Option(help="Benchmark of the answers: see `marsbench list benchmarks`.")]
GridFile = Annotated[Path | None, typer.Option(help="YAML file of contenders and batch sizes [default: the scale's].")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, laps and batch sizes, as set in the grid.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes [default: one per GPU; in the toy, per core].")]
OwnPromptFile = Annotated[
    Path | None,
    typer.Option(help='JSON Lines: {"prompt": "..."} or {"messages": [...]}; without it, the model asks itself.'),
]
PromptColumn = Annotated[str | None, typer.Option(help="Name of the field with the prompts (text or turns).")]


@dataclass(frozen=True)
class Start:
    """Which run a command starts, which checkpoint it decodes with, and what it trains on, as it was typed."""

    scale: str = option("Model, data and budgets: see `marsbench list scales`.", DEFAULT_SCALE)
    seed: int = option("Seed of initial weights and training data.", 0, least=0, most=2**32 - 1)
    benchmarks: str | None = option("Benchmarks: names, `mini` or `real`, with commas [default: the scale's].")
    limit: int | None = option("Only the first N questions of each benchmark.", least=1)
    shard: str = option("Only part I of N, as I/N: 1/4 to 4/4 may run on four machines that share --output.", "1/1")
    data_dir: Path | None = option("Local copy of the benchmark data.", shown={"envvar": "MARSBENCH_DATA"})
    train_all: bool = option(
        "Train every stage, even if a published checkpoint or a shipped base exists.", False,
        flags=("--train", "--from-scratch"),
    )  # fmt: skip
    checkpoint: tuple[str, ...] = option("STAGE=FOLDER_OR_HUB_NAME (mars-b8: mars at B = 8); repeatable.", ())
    output: Path = option("Folder for runs/, results/ and reports/.", Path("."))
    existing: str = option("Finished results of earlier commands: reuse or rerun them, or fail.", "reuse")

    whose: str | None = option("Checkpoint folder or hub name [default: the scale's --stage].", flags=("--checkpoint",))
    adapter: str | None = option(
        "Folder of a gated adapter for the checkpoint's masks [default checkpoint: the one it was trained on].",
        shown={"metavar": "DIR"},
    )
    stage: str | None = option("Stage of the scale, trained if missing [default: mars; at 135m the shipped adapter].")
    block_size: int = option("B (block size) of the checkpoint's training.", DEFAULT_BLOCK_SIZE, least=2, most=4096)

    base: str | None = option("Pretrained checkpoint to start from: folder or hub name (pretrained scales).")
    chat_data: str | None = option("Conversations: JSON Lines or hub data set with `messages` (pretrained scales).")
    max_steps: int | None = option("Steps of every stage [default: the scale's budget].", least=1)
    compiled: bool | None = field(default=None, metadata={"option": HOW["compiled"]})

    @property
    def own_stage(self) -> str:
        """The stage that a user names; by default the one that decodes at this scale."""
        return self.stage or preset(self.scale).stage

    @property
    def own(self) -> TrainedStage:
        """The scale's own checkpoint that decodes: of that stage, at the B that a user names or the scale's."""
        from marsbench.line import TrainedStage

        named = self.stage or self.block_size != DEFAULT_BLOCK_SIZE
        return TrainedStage.of(self.own_stage, self.block_size if named else preset(self.scale).block_size)

    @property
    def trained_stage(self) -> str | None:
        """The stage that decodes, None where a checkpoint or adapter was named: nothing is known of it yet."""
        return None if self.whose or self.adapter else self.own_stage

    def loaded(self, run: Run, dtype: str = "float32") -> Loaded:
        """The checkpoint that decodes, trained now if it is the scale's own and missing."""
        if named := self.whose or self.adapter:
            return load_named(named, dtype, run.reporter, adapter=self.adapter)
        from marsbench.running.checkpoints import Checkpoints

        return Checkpoints(run).load(self.own, dtype_of(dtype))

    def preset(self) -> Preset:
        """The scale with what a user names: checkpoints of its stages, as in "mars-b8=FOLDER", or what it trains on."""
        from marsbench.training.stages import stage

        chosen = preset(self.scale).of_seed(self.seed).with_checkpoints(self.checkpoint, train_all=self.train_all)
        for entry in self.checkpoint:
            named, _, place = entry.partition("=")
            plain, _, size = named.rpartition("-b")
            stage(plain if plain and size.isdecimal() else named)
            if place.startswith((".", "/", "~")) and not Path(place).is_dir():  # what is no path is a name on the hub
                raise UserError("there is no such checkpoint", where=place, fix=f"check --checkpoint {named}=")
        return chosen.adapted(base=self.base, chat_data=self.chat_data, steps=self.max_steps)

    def run(self) -> Run:
        """The run; what is none of the scale's own benchmarks in full at seed 0 gets folders of its own."""
        chosen = self.preset()
        if self.data_dir is not None and not self.data_dir.is_dir():
            fix = "correct --data-dir or MARSBENCH_DATA, or leave both out to load it from the hub"
            raise UserError("there is no such folder of benchmark data", where=str(self.data_dir), fix=fix)
        number, _, of = self.shard.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise UserError(f"--shard {self.shard} is not part I of N", fix="give it as I/N, from 1/N to N/N")
        from marsbench.evaluation.benchmarks import benchmarks
        from marsbench.rows.workspace import Workspace

        names = [name.strip() for name in self.benchmarks.split(",")] if self.benchmarks else []
        asked, limit, seed = benchmarks(names), self.limit, self.seed
        variant = "-".join([*names, *([f"limit{limit}"] if limit else []), *([f"seed{seed}"] if seed else [])])
        workspace = Workspace(self.output, self.scale, variant)
        workspace.check_writable()
        from marsbench.running.run import Existing, Run  # heavy

        check_known("policy for --existing", self.existing, get_args(Existing))
        how: Any = {"compiled": self.compiled, "existing": self.existing, "data_dir": self.data_dir}
        return Run(chosen, workspace, seed, asked, limit, (int(number), int(of)), **how)


def takes(
    word: str, of: type, names: Iterable[str] = (), options: Mapping[str, Option] | None = None,
    panel: Callable[[str], str | None] = lambda name: None,
) -> Callable[[Command], Command]:  # fmt: skip
    """Give a command fields of a dataclass as options; it gets an object with what was typed as its argument `word`.

    Those of some `names` (by default all) that the command has not itself; `options` say otherwise what they are, and
    `panel` where `--help` shows them.
    """
    known, offered = options_of(of) if options is None else options, []
    for name in names or known:
        kind, default = known[name].kind, getattr(of, name)
        if isinstance(default, tuple):
            kind, default = list[str], None
        annotation: Any = Annotated[kind if default is not None else kind | None, typed(name, known[name], panel(name))]
        offered.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def decorated(command: Command) -> Command:
        own = {each.name: each for each in signature(command, eval_str=True).parameters.values() if each.name != word}
        more = [each for each in offered if each.name not in own]

        @wraps(command)
        def called(**given: Any) -> None:
            values = {each.name: given.pop(each.name) for each in more}
            lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            command(**given, **{word: of(**{name: v for name, v in (values | lists).items() if v is not None})})

        called.__signature__ = Signature([*own.values(), *more])  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in (*own.values(), *more)}
        return called

    return decorated


def typed(name: str, option: Option, panel: str | None = None) -> Any:
    word = name.replace("_", "-")
    return typer.Option(
        *(option.flags or [f"--{word}"]), min=option.least, max=option.most, help=option.help, rich_help_panel=panel,
        **option.shown,
    )  # fmt: skip


def starts(*names: str) -> Callable[[Command], Command]:
    return takes("start", Start, names)


_OF_START = options_of(Start)
DataDir = Annotated[Path | None, typed("data_dir", _OF_START["data_dir"])]
Adapter = Annotated[str | None, typed("adapter", _OF_START["adapter"])]
Pack = Annotated[bool, typed("pack", HOW["pack"])]


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console

    from marsbench.progress import terminal_table

    Console().print(terminal_table(title, heads, rows, whole_names=True))


def use_packing(pack: bool) -> None:
    """Have weights packed for decoding where that is faster, or not, by this process and those that it starts."""
    from marsbench.forward.native import use_torch

    if not pack:
        use_torch()


def load_named(checkpoint: str, dtype: str, reporter: Reporter, **how: Any) -> Loaded:
    """A user's checkpoint, a folder or a name on the hub, to decode with on the best device there is."""
    from marsbench.answering import load_aloud
    from marsbench.training.checkpoints import default_device

    return load_aloud(checkpoint, reporter, dtype=dtype_of(dtype), device=default_device(), **how)


def dtype_of(name: str) -> torch.dtype:
    HOW["dtype"].check("dtype", name)
    import torch

    return getattr(torch, name)  # type: ignore[no-any-return]


BatchSize = Annotated[int | None, typer.Option(min=1, help="Prompts decoded together [default: 16; hf-assisted 1].")]


def decodes(*more: str) -> Callable[[Command], Command]:
    """Give a command the options of `Decoding`; of `accept` and `mask_id` those that it names."""
    names = [name for name in HOW if name not in ({"accept", "mask_id", *OPTIONS} - {*more})]
    options = {name: replace(option, help=explained(name)) for name, option in OPTIONS.items()}
    options["window"] = replace(OPTIONS["window"], help=explained("window", "B"))

    def panel(name: str) -> str:
        return "Options of methods" if name in OPTIONS else "How to decode"

    return takes("decoding", Decoding, [*names, *options], {**HOW, **options}, panel)


def check_for(decoding: Decoding, stage: str | None) -> None:
    """Refuse a way to decode that could not work, before a checkpoint of this stage (None: of any) is made for it."""
    from marsbench.training.stages import BLOCKWISE
    from marsbench.training.stages import stage as stage_of

    method, needs = decoding.check().method, METHODS[decoding.method].needs
    if "draft" in needs and decoding.draft is None:
        raise UserError(f"method {method!r} needs a draft model", fix="marsbench train draft_ar_sft, then --draft DIR")
    objective = stage_of(stage).objective if stage is not None else None
    if objective and "masks" in needs and objective not in BLOCKWISE and not decoding.untrained_masks:
        what = f"method {method!r} needs a checkpoint trained with masks; stage {stage!r} is trained without"
        raise UserError(what, fix="choose --stage mars, or give --untrained-masks to try it anyway")
    if objective and "heads" in needs and objective != "medusa":
        raise UserError(f"method {method!r} needs Medusa heads; stage {stage!r} has none", fix="choose --stage medusa")


def at(decoding: Decoding, block_size: int) -> Decoding:
    """Where no window was typed, it is the B that the checkpoint was trained with."""
    return replace(decoding, window=decoding.window or block_size)


def that_pays(decoding: Decoding, loaded: Loaded, rows: int, reporter: Reporter) -> Decoding:
    """By the window that pays for so many rows on this machine, as a server's table has it, or by `ar`."""
    from marsbench.racing.step_time import windows_that_pay

    has_mask = loaded.mask_id is not None or decoding.mask_id is not None
    knows = decoding.untrained_masks or (loaded.knows_masks and has_mask)
    window = windows_that_pay(loaded.model, rows, loaded.acceptance)[-1] if knows and rows else 1
    reporter.say(f"for {rows} rows here: {'ar' if window == 1 else f'mars-verified, linear, W = {window}'}")
    return decoding.by("ar") if window == 1 else replace(decoding, layout="linear", window=window)


def load_draft(decoding: Decoding, reporter: Reporter, **how: Any) -> Loaded | None:
    return load_named(decoding.draft, decoding.dtype, reporter, **how) if decoding.draft else None
