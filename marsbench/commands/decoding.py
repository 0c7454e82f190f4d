"""What a checkpoint writes: `show` and `decode`, and `serve`, which puts it behind an API."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands import shared
from marsbench.errors import UserError, told_to_user
from marsbench.files import check_can_be_written, check_target
from marsbench.methods import Decoding, explained
from marsbench.methods.options import options_of
from marsbench.serving.messages import Settings


@shared.decodes()
@shared.starts("whose", "adapter", "stage", "block_size", "scale", "seed", "output")
def show(
    start: shared.Start,
    decoding: Decoding,
    prompt: Annotated[str | None, typer.Argument(help="The question [default: one of mini_gsm8k].")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Method; repeatable [default: ar and mars].")] = None,
    threshold: Annotated[float, typer.Option(help="Confidence threshold, for methods that take one.")] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of the answer.")] = 96,
    image: Annotated[Path | None, typer.Option(help="Also write a picture: FILE.svg, .png or .pdf.")] = None,
) -> None:
    """Print an answer; the tokens of one forward pass have one shade (the paper's Figure 1)."""
    if prompt is not None and not prompt.strip():
        raise UserError("the question is empty", fix="write one, or leave it out for one of mini_gsm8k")
    with told_to_user("the question is not UTF-8", UnicodeEncodeError, where="command line", fix="type it in UTF-8"):
        (prompt or "").encode()
    names = method or ["ar", "mars"]
    typed = replace(decoding, threshold=threshold)
    ways = [shared.at(typed.by(name), start.block_size) for name in names]
    for way in ways:
        shared.check_for(way, start.trained_stage)
    decoding.check_heard(*names)
    run = start.run()
    shared.use_packing(decoding.pack)
    from rich.console import Console

    from marsbench.answering import Answering
    from marsbench.show import answer, check_image, draw, shaded, shown
    from marsbench.world import test_set

    if image:
        check_image(image)
    question, answers = test_set("mini_gsm8k", 1)[0].prompt if prompt is None else prompt, []
    draft = shared.load_draft(decoding, run.reporter)
    loaded = start.loaded(run, decoding.dtype)
    for way in ways:
        generation = answer(Answering.of_decoding(way, loaded, draft, run.reporter), question, max_new_tokens)
        title = way.method if way.threshold is None else f"{way.method}, tau = {way.threshold:g}"
        answers.append(shown(title, generation, loaded.tokenizer))
    console = Console(soft_wrap=True)
    border = "one shade for each forward pass" if console.is_terminal else "| separates forward passes"
    console.print(f"{question}\n({border})", highlight=False, markup=False)
    for each in answers:
        console.print(f"\n{each.summary}", style="bold", highlight=False)
        console.print(shaded(each, color=console.is_terminal))
    if image:
        draw(answers, image)
        typer.echo(f"wrote {image}")


@shared.decodes("accept", "mask_id")
def decode(
    decoding: Decoding,
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub name.")],
    prompt_ids: Annotated[Path, typer.Option(help='JSON Lines, one {"prompt_ids": [...]} a line.')],
    out: Annotated[Path, typer.Option(help="Output file: one line per prompt, in the same order.")],
    method: Annotated[
        str,
        typer.Option(
            help="Decoding method: see `marsbench list methods`. auto: mars-verified with the window that is fastest "
            "here, or ar."
        ),
    ] = "mars",
    window: Annotated[
        int | None,
        typer.Option("--window", "--block-size", min=1, help=explained("window"), rich_help_panel="Options of methods"),
    ] = None,
    adapter: shared.Adapter = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens per prompt, EOS included.")] = 256,
    batch_size: shared.BatchSize = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling; prompt i takes seed + i.")] = 0,
    acceptance: Annotated[Path | None, typer.Option(help="Also write rates of right drafts: CSV or YAML.")] = None,
    eos_id: Annotated[int | None, typer.Option(help="EOS token [default: the checkpoint's].")] = None,
    pad_id: Annotated[int | None, typer.Option(help="Padding token [default: the checkpoint's, else EOS].")] = None,
) -> None:
    """Continue prompts given as token ids.

    Each output line has the tokens (without EOS), the number of forward passes, the tokens that each accepted (EOS
    included), what ended the text, and, of methods that verify, how many drafts were right. The file appears whole or
    not at all.
    """
    decoding = replace(decoding, method="mars-verified" if method == "auto" else method, window=window)
    shared.check_for(decoding, None)
    decoding.check_heard(decoding.method)
    shared.use_packing(decoding.pack)
    from marsbench.answering import ROWS, Answering, decode_file, default_ids, read_prompts
    from marsbench.decoding.generation import Request, seed_of
    from marsbench.progress import Reporter

    check_target(prompt_ids, out)
    if acceptance is not None:
        check_can_be_written(acceptance, "--acceptance")
    prompts, reporter = read_prompts(prompt_ids), Reporter()
    loaded = shared.load_named(model, decoding.dtype, reporter, adapter=adapter, needs_tokenizer=False)
    draft = shared.load_draft(decoding, reporter, needs_tokenizer=False)
    eos, pad = default_ids(loaded, eos_id, pad_id)
    if method == "auto":
        decoding = shared.that_pays(decoding, loaded, min(batch_size or ROWS, len(prompts)), reporter)
    answering = Answering.of_decoding(decoding, loaded, draft, reporter, batch_size)
    requests = [
        Request(ids, max_new_tokens, decoding.threshold, temperature=temperature, seed=seed_of(seed, number))
        for number, ids in enumerate(prompts)
    ]
    said = decode_file(answering, requests, prompt_ids, out, reporter, eos_id=eos, pad_id=pad, acceptance=acceptance)
    typer.echo(f"wrote {out}" + (f"\n{said}" if said else ""))


KEY_VARIABLE = "MARSBENCH_API_KEY"


@shared.takes("settings", Settings)
@shared.starts("whose", "stage", "scale")
def serve(
    start: shared.Start,
    settings: Settings,
    output: Annotated[Path, typer.Option(help="Folder for runs/, in which --scale trains its checkpoint.")] = Path("."),
) -> None:
    """Serve a checkpoint through the API of OpenAI's clients; the threshold can change while it runs.

    Clients connect to http://HOST:PORT/v1. A request may set its own method, threshold (tau) and block_size.
    `PUT /v1/speed` changes the defaults, also for running requests that set none. See docs/serving.md.
    """
    known = options_of(Settings)
    for name in ("dtype", "method"):
        if (value := getattr(settings, name)) is not None:
            known[name].check(name, value)
    if settings.adapt and settings.compile:
        raise UserError("--adapt chooses windows, but with --compile all cost the same", fix="leave one of them out")
    if settings.request_log is not None:
        check_can_be_written(settings.request_log, "--request-log")
    # Found out before anything is trained or loaded: whether the extra that brings a server along is there.
    from marsbench.serving.app import serve as run

    checkpoint, stage = start.whose, start.own_stage
    called = settings.name or (stage if checkpoint is None else os.path.basename(os.path.normpath(checkpoint)))
    if checkpoint is None:
        from marsbench.running.checkpoints import Checkpoints

        checkpoint = Checkpoints(replace(start, output=output).run()).path(start.own)
    keys = settings.api_key or tuple(key for key in [os.environ.get(KEY_VARIABLE)] if key is not None)
    run(replace(settings, name=called, checkpoint=checkpoint, api_key=keys), typer.echo)
