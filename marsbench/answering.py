"""A checkpoint that answers: its method, and how the loop runs it, beside what is asked.

And `marsbench decode`: prompts as token ids in a JSON Lines file, continuations as token ids in another.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from marsbench.compiled.graphs import kind_of_batch
from marsbench.decoding.acceptance_report import Acceptance, cycle_in_words
from marsbench.decoding.engine import Batch, KindOfBatch, Method, check_requests, decode
from marsbench.decoding.generation import PREFILL_POSITIONS, Generation, Meter, Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically
from marsbench.forward.limits import check_ids
from marsbench.json_lines import read_lines
from marsbench.line import Line
from marsbench.methods import METHODS, Decoding
from marsbench.methods.fitting import default_ids, fit, remark_on_rounding
from marsbench.progress import Reporter
from marsbench.training.checkpoints import Loaded

ROWS = 16  # decoded at once where nothing else is said


@dataclass(frozen=True)
class Answering:
    """A line made ready: its checkpoint loaded, its method fitted to it."""

    loaded: Loaded
    method: Method | OutsideMethod
    kind: KindOfBatch | None = None  # how its steps run; None = as is best on the device
    threshold: float | None = None  # of every request
    batch_size: int = ROWS  # rows at once
    prefill_positions: int = PREFILL_POSITIONS  # of prompts in one forward, at most
    remark: str = ""  # to be said once: steps that cannot be compiled, answers that rounding may change

    @classmethod
    def of(cls, line: Line, loaded: Loaded, draft: Loaded | None = None, **how: Any) -> "Answering":
        """A line with its checkpoints, to which its method is fitted; `UserError` where they do not go together."""
        method = fit(line.method, loaded, draft=draft, untrained_masks=line.untrained_masks, **line.of_method)
        kind, not_compiled = kind_of_batch(loaded.model, method, line.compiled)
        remarks = not_compiled, remark_on_rounding(line.method, loaded.model)
        return cls(loaded, method, kind, line.threshold, remark="\n".join(filter(None, remarks)), **how)

    @classmethod
    def by(
        cls, decoding: Decoding, loaded: Loaded, draft: Loaded | None, reporter: Reporter, batch_size: int | None = None
    ) -> "Answering":
        """A checkpoint decoded as a user says; the remark is said."""
        rows = batch_size or (1 if METHODS[decoding.method].one_row else ROWS)
        ready = cls.of(decoding.line, loaded, draft, batch_size=rows, prefill_positions=decoding.prefill_positions)
        reporter.say_once(ready.remark)
        return ready

    @property
    def compiled(self) -> bool:
        """Whether it compiles a step for each shape that comes up."""
        return self.kind not in (None, Batch)

    def decode(self, requests: Sequence[Request], **told: Any) -> list[Generation]:
        """The continuations of requests; `told` goes to `decode`, an `eos_id` and `pad_id` of one's own among it."""
        if "eos_id" not in told:
            told["eos_id"], told["pad_id"] = default_ids(self.loaded)
        return decode(
            self.loaded.model, self.method, requests, batch_size=self.batch_size,
            prefill_positions=self.prefill_positions,
            kind=self.kind or kind_of_batch(self.loaded.model, self.method)[0], **told,
        )  # fmt: skip

    def decode_all(self, requests: Sequence[Request], reporter: Reporter, title: str, **told: Any) -> list[Generation]:
        done = count(1)
        with reporter.bar(title) as bar:
            return self.decode(requests, on_finished=lambda *_: bar.update(next(done), len(requests)), **told)

    def text(self, tokens: list[int]) -> str:
        return str(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class _Prompt:
    prompt_ids: list[int]


def read_prompts(file: Path) -> list[list[int]]:
    """The prompts of a file, one `{"prompt_ids": [...]}` a line; `UserError` with the line of whatever is wrong."""
    mend = 'give token ids, {"prompt_ids": [5, 6, 7]}'
    return [line.prompt_ids for line in read_lines(file, _Prompt, what="a prompt as token ids", mend=mend)]


def decode_file(
    answering: Answering, requests: Sequence[Request], source: Path, target: Path, reporter: Reporter,
    *, eos_id: Sequence[int], pad_id: int, acceptance: Path | None = None,
) -> str:  # fmt: skip
    """Continue the requests read from `source`, one a line, and write `target`, in the same order and all at once.

    What became of the drafts goes to `acceptance`, as CSV or, by its ending, YAML, and is what is returned in words;
    empty without drafts.

    `UserError` for a line that the model cannot run, or a target that cannot be written to, before anything is decoded.
    """
    check_target(source, target)
    model = answering.loaded.model
    check_requests(requests, model, where=f"{source}, line {{}}")
    for token in eos_id:
        check_ids(model, EOS=token)
    check_ids(model, pad=pad_id)
    title = f"decoding {source.name} by {answering.method.name}"
    meter = Meter()
    generations = answering.decode_all(requests, reporter, title, eos_id=eos_id, pad_id=pad_id, meter=meter)
    told = ("tokens", "forwards", "accepted", "finish", "acceptance_histogram_by_draft_length")
    lines = [json.dumps({name: getattr(generation, name) for name in told}) + "\n" for generation in generations]
    write_atomically(target, "".join(lines).encode())
    drafts = Acceptance.of(generations)
    if acceptance is not None:
        written = drafts.table if acceptance.suffix in (".yaml", ".yml") else drafts.csv
        write_atomically(acceptance, written(source.stem).encode())
    if not drafts.num_drafts:
        return ""
    return (
        f"{drafts.in_words()}; {cycle_in_words(generations, meter, METHODS[answering.method.name].forwards_per_cycle)}"
    )


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that cannot be written to, or that holds the prompts, before any work is done."""
    check_can_be_written(target, "--out")
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError("--out would overwrite the prompts", where=str(target), fix="choose another --out")
