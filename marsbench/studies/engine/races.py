"""Methods raced against AR at several batch sizes, and where the time of a step goes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marsbench.decoding.outside import OutsideMethod
from marsbench.neighbours import warning
from marsbench.provenance import provenance
from marsbench.racing.grid import Entry
from marsbench.racing.profile import profile
from marsbench.racing.race import Contender, Outcome, Race
from marsbench.racing.rounds import RoundLog
from marsbench.racing.speed_rows import speed_row
from marsbench.rows.kinds import SpeedRow
from marsbench.studies.engine.contenders import RACE
from marsbench.studies.engine.stand import Stand, ids_of


def race(
    stand: Stand, batch_size: int, entries: Sequence[Entry] = RACE, *, page: str = "engine", profiled: bool = True
) -> list[SpeedRow]:
    """All contenders at one batch size, an `ar` among them; a race is run whole or not at all."""
    run, loaded = stand.run, stand.target(next(entry for entry in entries if entry.name == "ar"))
    prompts = stand.prompts(loaded, stand.effort.prompts_at(batch_size))
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    shared = {"batch_size": batch_size, "prompts": digest, "repeats": stand.effort.repeats}
    keys = [stand.key("speed", entry, shared) for entry in entries]
    known = [
        run.existing_row(key, SpeedRow, f"{entry.name}, batch size {batch_size}")
        for key, entry in zip(keys, entries, strict=True)
    ]
    if all(row is not None for row in known):
        return [row for row in known if row is not None]
    origin = provenance(seed=run.seed)
    run.reporter.say_once(warning())
    contenders = [stand.contender(entry) for entry in entries]
    settings = {"batch_size": batch_size, "max_new_tokens": run.scale.max_new_tokens, **ids_of(loaded)}
    with run.reporter.bar(f"racing at batch size {batch_size}") as bar:
        outcomes = Race(contenders, prompts, laps=stand.effort.repeats, **settings).run(RoundLog(), bar.update)
        profiles = [_profile(one, outcomes[one.name], prompts, settings) if profiled else {} for one in contenders]
    everywhere = {
        "scale": run.scale.scale,
        "race": f"{page}, batch size {batch_size}, {origin['started']}",
        "batch_size": batch_size,
        "prompts": len(prompts),
        "prompts_hash": digest,
        "max_new_tokens": run.scale.max_new_tokens,
        "checkpoint": loaded.weights,
        "provenance": origin,
    }
    rows = [
        speed_row(
            outcomes[entry.name], outcomes["ar"], key=key, contender=entry.name, stage=entry.stage,
            method=entry.method, options=entry.shown, profile=parts, **stand.compiling(entry), **everywhere,
        )
        for key, entry, parts in zip(keys, entries, profiles, strict=True)
    ]  # fmt: skip
    for row in rows:
        run.keep(row)
    run.reporter.say(f"raced {len(rows)} contenders at batch size {batch_size}")
    return rows


def _profile(
    contender: Contender, found: Outcome, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]
) -> dict[str, float]:
    """Where a contender's time goes; nothing is known of an outside loop or of who dropped out."""
    if isinstance(contender.method, OutsideMethod) or found.status != "done":
        return {}
    return profile(contender, prompts, **settings)
