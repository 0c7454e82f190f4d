"""All rows of the page of compiled steps: races on a trained checkpoint, and the steps of a model bound by memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marsbench.compiled.graphs import Graphs
from marsbench.decoding.engine import Batch
from marsbench.keys import content_hash, versions
from marsbench.methods import Options, build_method
from marsbench.neighbours import warning
from marsbench.provenance import provenance
from marsbench.racing.entrants import size_of
from marsbench.racing.grid import COMPILED_AR
from marsbench.racing.race import Contender, Race
from marsbench.racing.rounds import RoundLog
from marsbench.racing.speed_rows import speed_row, step_time_row
from marsbench.racing.step_time import step_times
from marsbench.rows.kinds import Row, SpeedRow, StepTimeRow
from marsbench.running.run import Run
from marsbench.studies.compiled.contenders import (
    RACE,
    REFERENCE,
    RandomModel,
    backend_at,
    effort_at,
    random_model_at,
)
from marsbench.studies.engine.races import race
from marsbench.studies.engine.stand import Stand

_PROMPT = 64  # tokens


def compiled_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing."""
    stand = Stand(run, effort_at(run.scale), backend_at(run.scale))
    sizes = stand.effort.batch_sizes
    raced = [row for size in sizes for row in race(stand, size, RACE, page="compiled", profiled=False)]
    chosen = random_model_at(run.scale)
    model = _random(chosen)
    timed = _step_times(run, chosen, model)
    bound = [row for size in sizes for row in _race_random(run, chosen, model, size)]
    return [*raced, timed, *bound]


def _random(chosen: RandomModel) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**chosen.config))
    return model.eval()


def _key(run: Run, chosen: RandomModel, more: dict[str, Any]) -> str:
    origin = provenance(seed=run.seed)
    machine = [origin["hardware"], origin["threads"], origin["versions"]["torch"]]
    work = versions("decoding", "timing")
    return content_hash({"model": vars(chosen), "machine": machine, "versions": work, **more})


def _step_times(run: Run, chosen: RandomModel, model: Any) -> StepTimeRow:
    """What an eager step of the random model costs by its shape."""
    key = _key(run, chosen, {"kind": "step_time"})
    known = run.existing_row(key, StepTimeRow, f"the steps of {chosen.name}")
    if known is not None:
        return known
    origin = provenance(seed=run.seed)
    with run.reporter.bar(f"timing the steps of {chosen.name}") as bar:
        found = step_times(model, chosen.positions, bar.update)
    row = step_time_row(
        found, key=key, scale=run.scale.scale, stage=chosen.name, weight_bytes=size_of(model), provenance=origin
    )
    run.keep(row)
    return row


def _race_random(run: Run, chosen: RandomModel, model: Any, batch_size: int) -> list[SpeedRow]:
    """`ar`, eager and compiled, against `generate` on the random model."""
    graphs = Graphs(backend_at(run.scale))
    names = [REFERENCE, "ar", *([COMPILED_AR] if batch_size in chosen.compiled_at else [])]
    effort = effort_at(run.scale)
    shared = {"kind": "speed", "batch_size": batch_size, "repeats": effort.repeats}
    keys = {name: _key(run, chosen, {**shared, "contender": name}) for name in names}
    known = [run.existing_row(keys[name], SpeedRow, f"{name}, {chosen.name}, {batch_size} at once") for name in names]
    if all(row is not None for row in known):
        return [row for row in known if row is not None]
    origin = provenance(seed=run.seed)
    run.reporter.say_once(warning())
    kinds = {name: graphs.batch if name == COMPILED_AR else Batch for name in names}
    methods = {name: build_method(name.split(",")[0], Options()) for name in names}
    contenders = [Contender(name, model, methods[name], kind=kinds[name]) for name in names]
    drawn = torch.Generator().manual_seed(batch_size)  # the same prompts whatever was measured before
    prompts = torch.randint(4, chosen.config["vocab_size"], (2 * batch_size, _PROMPT), generator=drawn).tolist()
    settings = {
        "max_new_tokens": chosen.max_new_tokens,
        "eos_id": chosen.config["vocab_size"],
        "pad_id": 0,
        "laps": effort.repeats,
    }
    with run.reporter.bar(f"racing {chosen.name} at batch size {batch_size}") as bar:
        outcomes = Race(contenders, prompts, batch_size, **settings).run(RoundLog(), bar.update)
    everywhere = {
        "scale": run.scale.scale,
        "race": f"{chosen.name}, batch size {batch_size}, {origin['started']}",
        "stage": chosen.name,
        "batch_size": batch_size,
        "prompts": len(prompts),
        "prompts_hash": content_hash(prompts),
        "max_new_tokens": chosen.max_new_tokens,
        "provenance": origin,
    }
    compiled = {"graphs": len(graphs), "compile_seconds": round(graphs.compile_seconds, 3)}
    rows = [
        speed_row(
            outcomes[name], outcomes["ar"], key=keys[name], contender=name, method=name.split(",")[0],
            options={"compiled": True} if name == COMPILED_AR else {}, **everywhere,
            **(compiled if name == COMPILED_AR else {}),
        )
        for name in names
    ]  # fmt: skip
    for row in rows:
        run.keep(row)
    return rows
