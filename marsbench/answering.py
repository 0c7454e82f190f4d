"""A checkpoint that answers: the method that is fitted to it, and how the loop runs it.

And `marsbench decode`: prompts as token ids in a JSON Lines file, continuations as token ids in another.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from marsbench.compiled.graphs import kind_of_batch
from marsbench.decoding.acceptance_report import Acceptance, cycle_in_words
from marsbench.decoding.engine import Batch, KindOfBatch, Method, OutsideMethod, check_requests, decode
from marsbench.decoding.generation import PREFILL_POSITIONS, Generation, Meter, Request, as_list
from marsbench.errors import UserError
from marsbench.files import write_atomically
from marsbench.forward.adapter import Adapted
from marsbench.forward.decoder import decoder_of
from marsbench.forward.limits import check_ids, check_mask_id, vocabulary_of
from marsbench.json_lines import read_lines
from marsbench.line import Line, renamed
from marsbench.methods import METHODS, Decoding, Options, build_method, check_installed
from marsbench.progress import Reporter
from marsbench.training.checkpoints import Loaded, load

# What would change tokens even where the most probable one is taken -> the values by which it does not.
CHANGES_TOKENS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "num_beams", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), ([],)),
    **dict.fromkeys(("max_time", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    "watermarking_config": (), "stop_strings": ([], ""), "sequence_bias": ({}, []), "token_healing": (False,),
}  # fmt: skip
ROWS = 16  # decoded at once where nothing else is said


def fit(
    name: str, loaded: Loaded, *, draft: Loaded | None = None, untrained_masks: bool = False, **options: Any
) -> Method | OutsideMethod:
    """The method `name` for a checkpoint; `options` are fields of `Options`, `draft` the draft model's checkpoint.

    `untrained_masks` lets it use masks even if the training never showed any. `UserError` where the method is unknown,
    its options are out of range, or the checkpoint lacks what it needs.
    """
    draft_model = draft.model if draft else None
    given = {"mask_id": loaded.mask_id, "heads": loaded.heads, "shifted": loaded.shifted, "draft": draft_model}
    method = build_method(name, Options(**(given | renamed(options))))
    check_installed(name)
    check_mask_id(loaded.model, method)
    if METHODS[name].needs_masks and not untrained_masks:
        _check_knows_masks(name, loaded)
    if name == "block-diffusion" and isinstance(loaded.model, Adapted):
        raise UserError("an adapter cannot act on masks that stand among tokens", fix="choose another method")
    if draft is not None and "draft" in METHODS[name].needs:
        check_draft([loaded.model, draft.model], [loaded.own_tokenizer, draft.own_tokenizer])
        if options.get("draft_method") == "mars":
            _check_knows_masks("mars", draft)
    return method


def remark_on_rounding(name: str, model: Any) -> str:
    """A remark on a verified method in 16 bits where rounding depends on the window; empty where it does not."""
    info, dtype = METHODS[name], model.dtype
    if dtype == torch.float32 or name == "ar" or not info.lossless or info.own_loop:
        return ""
    if getattr(decoder_of(model), "rounds_alike", False):
        return ""
    return (
        f"{str(dtype).removeprefix('torch.')}: on this machine the rounding of this model depends on what is computed "
        f"together, so near ties may end otherwise by {name} than by ar"
    )


def _check_knows_masks(name: str, loaded: Loaded) -> None:
    if not loaded.knows_masks:
        what = f"method {name!r} needs a checkpoint trained with masks; this one is of stage {loaded.stage!r}"
        raise UserError(what, fix="use a MARS checkpoint, or try it with --untrained-masks")


def check_draft(models: Sequence[Any], tokenizers: Sequence[Any]) -> None:
    """Refuse a draft model of another vocabulary: a model and its draft, and their tokenizers or None."""
    sizes = [*map(vocabulary_of, models)]
    words = [None if tokenizer is None else tokenizer.get_vocab() for tokenizer in tokenizers]
    if sizes[0] != sizes[1] if None in words else words[0] != words[1]:
        what = f"the draft model's vocabulary ({sizes[1]:,} entries) is not the model's ({sizes[0]:,} entries)"
        raise UserError(what, fix="choose a draft with the same tokenizer")


def default_ids(loaded: Loaded, eos_id: int | None = None, pad_id: int | None = None) -> tuple[list[int], int]:
    """What ends a text, and padding, which may be an EOS: as given, or as the checkpoint's settings say."""
    tokenizer, settings, config = loaded.own_tokenizer, loaded.model.generation_config, loaded.model.config
    ids = [eos_id] if eos_id is not None else [*_ids(tokenizer, "eos"), *_ids(settings, "eos")] or _ids(config, "eos")
    if not ids:
        fix = "set eos_token_id in its generation_config.json; marsbench decode also takes --eos-id"
        raise UserError("this checkpoint does not name its EOS token", fix=fix)
    pads = [pad_id] if pad_id is not None else []
    pads += [token for source in (tokenizer, settings, config) for token in _ids(source, "pad")]
    return list(dict.fromkeys(ids)), [*pads, *ids][0]


def _ids(source: Any, name: str) -> list[int]:
    ids = getattr(source, f"{name}_token_id", None)
    return [] if ids is None else as_list(ids)


def load_aloud(name: str, reporter: Reporter, **how: Any) -> Loaded:
    loaded = load(name, **how)
    reporter.say_once(left_out_in_words(name, loaded.model))
    return loaded


def left_out_in_words(name: str, model: Any) -> str:
    """One line on what a checkpoint asks for that would change greedy tokens, and no method here does; else empty."""
    asked = {wish: getattr(getattr(model, "generation_config", None), wish, None) for wish in CHANGES_TOKENS}
    wishes = [
        f"{wish} {value}" if isinstance(value, int | float) else wish
        for wish, value in asked.items()
        if value is not None and value not in CHANGES_TOKENS[wish]
    ]
    if not wishes:
        return ""
    return f"{name}: its generation_config asks for {', '.join(wishes)}; decoding by any method here leaves that out"


@dataclass(frozen=True)
class Answering:
    """A line made ready: its checkpoint loaded, its method fitted to it."""

    loaded: Loaded
    method: Method | OutsideMethod
    kind: KindOfBatch | None = None  # how its steps run; None = as is best on the device
    threshold: float | None = None  # for callers that make requests
    batch_size: int = ROWS  # rows at once
    prefill_positions: int = PREFILL_POSITIONS  # of prompts in one forward, at most
    remark: str = ""  # to be said once: steps that cannot be compiled, answers that rounding may change

    @classmethod
    def of_line(cls, line: Line, loaded: Loaded, draft: Loaded | None = None, **how: Any) -> "Answering":
        method = fit(line.method, loaded, draft=draft, untrained_masks=line.untrained_masks, **line.of_method)
        kind, not_compiled = kind_of_batch(loaded.model, method, line.compiled)
        remarks = not_compiled, remark_on_rounding(line.method, loaded.model)
        return cls(loaded, method, kind, line.threshold, remark="\n".join(filter(None, remarks)), **how)

    @classmethod
    def of_decoding(
        cls, decoding: Decoding, loaded: Loaded, draft: Loaded | None, reporter: Reporter, batch_size: int | None = None
    ) -> "Answering":
        rows = batch_size or (1 if METHODS[decoding.method].one_row else ROWS)
        ready = cls.of_line(decoding.line, loaded, draft, batch_size=rows, prefill_positions=decoding.prefill_positions)
        reporter.say_once(ready.remark)
        return ready

    @property
    def compiled(self) -> bool:
        """Whether it compiles a step for each shape that comes up."""
        return self.kind not in (None, Batch)

    def decode(self, requests: Sequence[Request], **more: Any) -> list[Generation]:
        """The continuations of requests; `more` goes to `engine.decode`, and may have an `eos_id` and `pad_id`."""
        if "eos_id" not in more:
            more["eos_id"], more["pad_id"] = default_ids(self.loaded)
        return decode(
            self.loaded.model, self.method, requests, batch_size=self.batch_size,
            prefill_positions=self.prefill_positions,
            kind=self.kind or kind_of_batch(self.loaded.model, self.method)[0], **more,
        )  # fmt: skip

    def decode_all(self, requests: Sequence[Request], reporter: Reporter, title: str, **more: Any) -> list[Generation]:
        done = count(1)
        with reporter.bar(title) as bar:
            return self.decode(requests, on_finished=lambda *_: bar.update(next(done), len(requests)), **more)

    def text(self, tokens: list[int]) -> str:
        return str(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class _Prompt:
    prompt_ids: list[int]


def read_prompts(file: Path) -> list[list[int]]:
    mend = 'give token ids, {"prompt_ids": [5, 6, 7]}'
    return [line.prompt_ids for line in read_lines(file, _Prompt, what="a prompt as token ids", mend=mend)]


def decode_file(
    answering: Answering, requests: Sequence[Request], source: Path, target: Path, reporter: Reporter,
    *, eos_id: Sequence[int], pad_id: int, acceptance: Path | None = None,
) -> str:  # fmt: skip
    """Continue the requests of `source`, one a line, and write `target` at once; what became of the drafts, in words.

    That goes to `acceptance` too, as CSV or YAML. `UserError` for a line that the model cannot run, before any work.
    """
    model = answering.loaded.model
    check_requests(requests, model, where=f"{source}, line {{}}")
    for token in eos_id:
        check_ids(model, EOS=token)
    check_ids(model, pad=pad_id)
    title, meter = f"decoding {source.name} by {answering.method.name}", Meter()
    generations = answering.decode_all(requests, reporter, title, eos_id=eos_id, pad_id=pad_id, meter=meter)
    names = ("tokens", "forwards", "accepted", "finish", "acceptance_histogram_by_draft_length")
    lines = [json.dumps({name: getattr(generation, name) for name in names}) + "\n" for generation in generations]
    write_atomically(target, "".join(lines).encode())
    drafts = Acceptance.of(generations)
    if acceptance is not None:
        written = drafts.table if acceptance.suffix in (".yaml", ".yml") else drafts.csv
        write_atomically(acceptance, written(source.stem).encode())
    cycle = cycle_in_words(generations, meter, METHODS[answering.method.name].forwards_per_cycle)
    return f"{drafts.in_words()}; {cycle}" if drafts.num_drafts else ""
