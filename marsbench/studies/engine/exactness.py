"""Every lossless method held against AR on every prompt, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.methods import METHODS
from marsbench.provenance import provenance
from marsbench.racing.grid import Entry
from marsbench.rows.kinds import ExactnessRow
from marsbench.studies.engine.stand import Stand, ids_of

_BATCH = 32


def exactness(stand: Stand, entry: Entry) -> ExactnessRow:
    """One method against AR on every prompt."""
    run, loaded = stand.run, stand.target(entry)
    key = stand.key("exactness", entry, {})
    known = run.existing_row(key, ExactnessRow, f"exactness of {entry.name}")
    if known is not None:
        return known
    origin = provenance(seed=run.seed)
    prompts = stand.prompts(loaded, None)
    with run.reporter.bar(f"{entry.name} against ar"):
        ours = _decode(stand, entry, prompts)
        theirs = _decode(stand, Entry("ar", entry.stage, "ar", {}), prompts)
    row = ExactnessRow(
        key=key,
        status="done",
        reason="",
        scale=run.scale.scale,
        stage=entry.stage,
        method=entry.method,
        options=entry.shown,
        prompts=len(prompts),
        same_as_ar=sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)),
        emitted=sum(generation.emitted for generation in ours),
        row_forwards=sum(generation.forwards for generation in ours),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        checkpoint=loaded.weights,
        provenance=origin,
    )
    run.keep(row)
    speed = row.emitted / row.row_forwards
    run.reporter.say(f"{entry.name}: {row.same_as_ar} of {row.prompts} as ar, {speed:.2f} tokens/forward")
    return row


def _decode(stand: Stand, entry: Entry, prompts: Sequence[Sequence[int]]) -> list[Generation]:
    contender = stand.contender(entry)
    requests = [Request(prompt, stand.run.scale.max_new_tokens, entry.threshold) for prompt in prompts]
    batch_size = 1 if METHODS[entry.method].one_row else _BATCH
    return decode(contender.model, contender.method, requests, batch_size=batch_size, **ids_of(stand.target(entry)))
