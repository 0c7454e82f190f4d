"""How a study that measures by itself keeps a row: what is there counts, what is made now is written at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from marsbench.keys import content_hash
from marsbench.provenance import provenance
from marsbench.rows.kinds import GenerationRow, Row, TokenClassRow
from marsbench.running.plans import Arm
from marsbench.running.run import Run

_Kind = TypeVar("_Kind", bound=Row)
_OfLine = TypeVar("_OfLine", GenerationRow, TokenClassRow)


def kept(
    run: Run, kind: type[_Kind], content: Mapping[str, Any], what: str, make: Callable[[], Mapping[str, Any]]
) -> _Kind:
    """The finished row of what was measured, or one that is made now.

    `content` is all that its numbers depend on; `make` gives the fields that are not those of every row.
    """
    key = content_hash(content)
    row = run.existing_row(key, kind, what)
    if row is None:
        origin, new = provenance(seed=run.seed), cast("Callable[..., _Kind]", kind)
        row = new(key=key, status="done", reason="", scale=run.scale.scale, **make(), provenance=origin)
        run.keep(row)
    return row


def skipped(run: Run, kind: type[_OfLine], arm: Arm, asked: str, reason: str, what: str) -> _OfLine:
    """The row of a line that could not be measured on what it was asked."""
    run.reporter.say(f"{what}: skipped ({reason})")
    said: list[Any] = [run.scale.scale, arm.name, arm.stage, arm.method, arm.options, asked]
    key = content_hash({"skipped": [kind.kind, *said, reason]})
    make: Callable[..., _OfLine] = kind
    return make(key, "skipped", reason, *said, provenance=provenance(seed=run.seed))
