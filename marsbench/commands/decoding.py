"""What a checkpoint writes: `show` and `decode`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marsbench.commands.shared import (
    Adapter,
    BlockSize,
    Checkpoint,
    Compile,
    DecodingMethod,
    Draft,
    Dtype,
    Layout,
    Metric,
    Output,
    OwnStage,
    Pack,
    PrefillPositions,
    Scale,
    Seed,
    UntrainedMasks,
    Window,
    check_decoding,
    dtype_of,
    make_run,
    use_packing,
)
from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.errors import UserError

if TYPE_CHECKING:
    from marsbench.show import Shown


def show(
    prompt: Annotated[str | None, typer.Argument(help="A user's question; by default one of mini_gsm8k.")] = None,
    checkpoint: Checkpoint = None,
    adapter: Adapter = None,
    stage: OwnStage = "mars",
    method: Annotated[
        list[str] | None, typer.Option(help="How to decode, several times to compare; by default ar and mars.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Confidence for methods that take one.")] = 0.95,
    block_size: BlockSize = 4,
    window: Window = None,
    draft: Draft = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of the answer.")] = 96,
    untrained_masks: UntrainedMasks = False,
    compiled: Compile = False,
    pack: Pack = True,
    image: Annotated[Path | None, typer.Option(help="Also draw it: FILE.png, .svg or .pdf.")] = None,
    scale: Scale = "tiny",
    seed: Seed = 0,
    output: Output = Path("."),
) -> None:
    """Print an answer with the tokens of one forward pass shaded together (the paper's Figure 1)."""
    from marsbench.methods import METHODS

    if prompt is not None and not prompt.strip():
        raise UserError("the question is empty", fix="write one, or leave it out for one of mini_gsm8k")
    names, checkpoint = method or ["ar", "mars"], checkpoint or adapter
    for name in names:
        takes = name in METHODS and METHODS[name].takes_threshold
        check_decoding(
            name,
            threshold=threshold if takes else None,
            draft=draft,
            stage=None if checkpoint else stage,
            untrained_masks=untrained_masks,
            block_size=window or block_size,
        )
    run = make_run(scale, output, "reuse", seed)
    use_packing(pack)
    from marsbench.methods.settings import load_aloud
    from marsbench.running.checkpoints import Checkpoints
    from marsbench.show import answers, check_image, draw, sample_question
    from marsbench.training.checkpoints import default_device

    if image:
        check_image(image)
    question, device = sample_question() if prompt is None else prompt, default_device()
    companion = load_aloud(draft, run.reporter, device=device) if draft else None
    if checkpoint:
        loaded = load_aloud(checkpoint, run.reporter, device=device, adapter=adapter)
    else:
        loaded = Checkpoints(run).load(stage, block_size)
    found = answers(
        loaded,
        question,
        names,
        threshold=threshold,
        max_new_tokens=max_new_tokens,
        draft=companion,
        untrained_masks=untrained_masks,
        block_size=window or block_size,
        compiled=compiled,
        reporter=run.reporter,
    )
    _print_answers(question, found)
    if image:
        draw(found, image)
        typer.echo(f"wrote {image}")


def _print_answers(question: str, found: list[Shown]) -> None:
    """The question and its answers, with the forward passes shaded, or parted where there is no terminal."""
    from rich.console import Console

    from marsbench.show import shaded

    console = Console(soft_wrap=True)
    border = "each forward pass in a shade of its own" if console.is_terminal else "forward passes parted by |"
    console.print(f"{question}\n({border})", highlight=False, markup=False)
    for answer in found:
        console.print(f"\n{answer.summary}", style="bold", highlight=False)
        console.print(shaded(answer, color=console.is_terminal))


def decode(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub name.")],
    prompt_ids: Annotated[Path, typer.Option(help='JSON Lines, one {"prompt_ids": [...]} a line.')],
    out: Annotated[Path, typer.Option(help="Where the continuations go, one line per prompt, in the same order.")],
    adapter: Adapter = None,
    method: DecodingMethod = "mars",
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size",
            "--window",
            help="B of mars, mars-no-cache, mars-speculative, block-diffusion and drafts by mars; window of "
            "mars-verified, mars-lookup and jacobi.",
        ),
    ] = 4,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Confidence to accept a token (mars-verified, mars-lookup: to draft one), for mars methods and "
            "block-diffusion; without it, mars takes one per pass."
        ),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            help="`one`: exactly one token per pass, for mars, mars-no-cache, mars-block-cache and block-diffusion."
        ),
    ] = None,
    metric: Metric = "probability",
    cache_block: Annotated[int, typer.Option(help="B_cache of mars-block-cache, in tokens.")] = 4,
    layout: Layout = "groups",
    draft: Draft = None,
    draft_length: Annotated[
        int,
        typer.Option(
            help="K: tokens drafted per round at most, by speculative, mars-speculative, hf-assisted, prompt-lookup; "
            "by mars-lookup, those from the text so far."
        ),
    ] = 4,
    draft_method: Annotated[
        str, typer.Option(help="How the draft model of speculative and mars-speculative decodes: ar or mars.")
    ] = "ar",
    draft_threshold: Annotated[
        float,
        typer.Option(help="Confidence that drafts by mars must pass, for speculative and mars-speculative."),
    ] = 0.95,
    tree_width: Annotated[int, typer.Option(help="Guesses of medusa's first head; 1 is a chain.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of every continuation; an EOS counts.")] = 256,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows decoded at once; by default 16, for hf-assisted 1.")
    ] = None,
    prefill_positions: PrefillPositions = PREFILL_POSITIONS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling; prompt i takes seed + i.")] = 0,
    dtype: Dtype = "float32",
    eos_id: Annotated[int | None, typer.Option(help="EOS; by default the checkpoint's.")] = None,
    pad_id: Annotated[int | None, typer.Option(help="Padding; by default the checkpoint's, else EOS.")] = None,
    mask_id: Annotated[
        int | None,
        typer.Option(help="Mask token of mars methods and block-diffusion; by default the tokenizer's <|mask|>."),
    ] = None,
    untrained_masks: UntrainedMasks = False,
    compiled: Compile = False,
    pack: Pack = True,
) -> None:
    """Continue prompts given as token ids.

    Every line of the output has the tokens up to and without EOS, the forward passes of the model, the tokens accepted
    by each of them (an EOS counted once) and what ended it: eos or length. The file appears whole or not at all.
    """
    options: dict[str, Any] = {"block_size": block_size, "metric": metric, "cache_block": cache_block, "layout": layout}
    options |= {"draft_length": draft_length, "draft_method": draft_method, "draft_threshold": draft_threshold}
    options |= {"tree_width": tree_width} | ({} if mask_id is None else {"mask_id": mask_id})
    check_decoding(method, threshold=threshold, draft=draft, stage=None, **options)
    number_type = dtype_of(dtype)
    from marsbench.quiet import quieten_libraries

    quieten_libraries()
    use_packing(pack)
    from marsbench.compiled.graphs import kind_of_batch
    from marsbench.decode_file import check_target, decode_file, read_prompts
    from marsbench.decoding.generation import Request
    from marsbench.methods import METHODS
    from marsbench.methods.fitting import check_accept, default_ids, fit
    from marsbench.methods.settings import load_aloud
    from marsbench.progress import Reporter
    from marsbench.training.checkpoints import default_device

    check_accept(method, accept, threshold)
    check_target(prompt_ids, out)
    prompts = read_prompts(prompt_ids)
    how: dict[str, Any] = {"dtype": number_type, "device": default_device(), "needs_tokenizer": False}
    reporter = Reporter()
    loaded = load_aloud(model, reporter, **how, adapter=adapter)
    companion = load_aloud(draft, reporter, **how) if draft else None
    eos, pad = default_ids(loaded, eos_id, pad_id)
    chosen = fit(method, loaded, draft=companion, untrained_masks=untrained_masks, **options)
    requests = [
        Request(ids, max_new_tokens, threshold, temperature=temperature, seed=seed + number)
        for number, ids in enumerate(prompts)
    ]
    kind, not_compiled = kind_of_batch(loaded.model, chosen, compiled)
    reporter.say_once(not_compiled)
    rows = batch_size or (1 if METHODS[method].one_row else 16)
    decode_file(
        loaded.model, chosen, requests, prompt_ids, out,
        eos_id=eos, pad_id=pad, batch_size=rows, prefill_positions=prefill_positions, kind=kind, reporter=reporter,
    )  # fmt: skip
    typer.echo(f"wrote {out}")
