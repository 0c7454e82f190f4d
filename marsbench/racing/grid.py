"""A sweep's grid: which contenders meet at which batch sizes on which questions, read from a YAML file.

    batch_sizes: [1, 4]
    prompts: 24             # from all benchmarks alike
    repeats: 5
    contenders:
      - {method: ar, stage: mars, name: ar}
      - {method: mars, stage: mars, window: 4, threshold: [one, 0.95, 0.9]}

A list among a contender's settings stands for as many contenders; several lists for all their combinations.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Required

import yaml
from pydantic import Field, with_config
from typing_extensions import TypedDict

from marsbench.errors import UserError, told_to_user
from marsbench.files import PACKAGE
from marsbench.json_lines import parse_json, read_text
from marsbench.line import Line, TrainedStage, checkpoints_of, renamed
from marsbench.methods import METHODS, OPTIONS, Decoding
from marsbench.paper import published
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset, preset
from marsbench.running.plans import decoding_s
from marsbench.training.stages import stage

_WORDS = {"threshold": "tau", "cache_block": "B_cache", "tree_width": "tree"}  # in names of contenders
COMPILED_AR = "ar, compiled"  # what compiled contenders are held against
BASELINES = ("ar", "hf-generate", COMPILED_AR)  # contenders by these names run in every race

Count = Annotated[int, Field(ge=1, lt=2**31)]


@with_config(extra="forbid")
@dataclass(frozen=True)
class Grid:
    """A grid, as its file says it, where contenders are objects that stand for one line or several."""

    contenders: tuple[Any, ...]
    batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)]
    prompts: Count
    repeats: Count
    benchmarks: tuple[str, ...] = ()  # none = the scale's own
    max_new_tokens: Count | None = None  # None = the scale's
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")] = "float32"  # of weights and caches
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0  # of a contender for a lap at a batch size
    # Also time forward passes of up to so many positions; 0 = none.
    positions: Annotated[int, Field(ge=0, lt=2**31)] = 1024
    # What compiles; None = what is best on the device.
    backend: Annotated[str, Field(pattern="^(inductor|eager|aot_eager)$")] | None = None
    profiled: bool = False  # also time the parts of eager steps, in a run of their own
    page: str = "speedup"  # whose it is

    @property
    def checkpoints(self) -> list[TrainedStage]:
        return checkpoints_of(self.contenders)

    def part(self, number: int, of: int) -> "Grid":
        """The baselines, and one of so many parts of the other contenders, counted from 1."""
        others = [line for line in self.contenders if line.name not in BASELINES]
        left = [line for line in others if line not in others[number - 1 :: of]]
        return replace(self, contenders=tuple(line for line in self.contenders if line not in left))

    def at(self, batch_size: int) -> "Grid":
        """The race at one batch size; forward passes are timed with the first."""
        first = batch_size == self.batch_sizes[0]
        return replace(self, batch_sizes=(batch_size,), positions=self.positions if first else 0)

    def tokens(self, scale: Preset) -> int:
        """What all contenders decode in all laps, if every answer is as long as it may be."""
        laps, cells = self.repeats + 1, len(self.contenders) * len(self.batch_sizes)
        return cells * laps * self.prompts * (self.max_new_tokens or scale.max_new_tokens)

    def seconds(self, scale: Preset) -> float:
        """How long its races take at most: every answer as long as it may be, a token for a forward."""
        if (costs := scale.assumptions.steps_s) is None:
            return decoding_s(self.tokens(scale), scale)
        longest, whole = self.max_new_tokens or scale.max_new_tokens, 0.0
        for contender, size in product(self.contenders, self.batch_sizes):  # a GPU's step takes long whatever its rows
            method = METHODS[contender.method]
            step = costs["library" if method.own_loop else "ours"]
            if method.recomputes:  # as many positions as an answer may come to, on average: a prompt and half of it
                step = max(step, size * longest * costs["position"])
            laps = self.repeats + 1 + bool(contender.compiled)  # who is compiled decodes everything once beforehand
            if not method.one_row or size == 1:
                whole += laps * math.ceil(self.prompts / size) * longest * step
        return whole


def shipped_grid(scale: str) -> Path:
    return PACKAGE / "presets" / "grids" / f"{preset(scale).grid or scale}.yaml"


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which yaml would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_grid(file: Path, *, quick: bool = False) -> Grid:
    """A grid from its file, with what stands there under `quick`, if that is wanted; `UserError` says what is wrong."""
    with told_to_user("not a YAML file", yaml.YAMLError, ValueError, RecursionError, where=file, fix="correct it"):
        settings = yaml.load(read_text(file, "give a YAML file with --grid"), _UniqueKeys)
    try:
        said = _checked(settings, dict[str, Any])
        smaller = _checked(said.pop("quick", {}), dict[str, Any], "quick")
        leaves_out = not smaller.pop("compiled", False) and quick  # compiling takes longer than a quick race
        usual, small = _checked(said, Grid), _checked(said | smaller, Grid, "quick")
        chosen: Grid = small if quick else usual
        contenders = [line for number, given in enumerate(chosen.contenders, 1) for line in _contenders(given, number)]
        _check(contenders)
        if leaves_out:
            contenders = [contender for contender in contenders if not contender.compiled]
        return replace(chosen, contenders=tuple(contenders))
    except UserError as error:
        where = f"{file}, {error.where}" if error.where else str(file)
        raise UserError(error.what, where=where, fix=error.fix) from error


# What a contender says besides the options of its method.
_OWN = {
    "name": str, "method": Required[str], "stage": Required[str], "draft": str | None, "threshold": float | None,
    "trained_block_size": Count, "compiled": bool,
    "acceptance": dict[str, float | str | list[float]] | None,
}  # fmt: skip
_Fields = TypedDict("_Fields", {**_OWN, **dict.fromkeys(OPTIONS, Any)}, total=False)  # type: ignore[misc]
_Given: Any = with_config(extra="forbid")(_Fields)


def _checked(given: Any, kind: Any, where: str = "") -> Any:
    fix = "correct the file; marsbench/presets/grids/mini.yaml is an example"
    with told_to_user("this is no grid", ValueError, TypeError, where=where, fix=fix):
        return parse_json(json.dumps(given, default=str), kind)


def _check(contenders: list[Line]) -> None:
    """Refuse names that come twice, and compiled contenders that have no `ar` of their kind."""
    names = [contender.name for contender in contenders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two contenders are called {twice[0]!r}", fix="give one of them another `name`")
    if "ar" not in names:
        raise UserError("no contender is called 'ar'", fix="add one: speed-ups are relative to it")
    by_name = {contender.name: contender for contender in contenders}
    plain, compiled = by_name["ar"], by_name.get(COMPILED_AR)
    if compiled is not None and compiled != plain.compiled_form():
        raise UserError(f"{COMPILED_AR!r} is not 'ar', compiled", fix="give `ar` compiled: [false, true] in its place")
    uncompared = next((contender.name for contender in contenders if contender.compiled), None)
    if uncompared is not None and compiled is None:
        fix = "give `ar` compiled: [false, true], so that compiled races against compiled"
        raise UserError(f"{uncompared!r} has no compiled 'ar' to be held against", fix=fix)


def _contenders(given: Any, number: int) -> Iterator[Line]:
    where = f"contender {number}"
    given = _checked(given, dict[str, Any], where)
    if empty := next((name for name, value in given.items() if value == []), None):
        raise UserError(f"the list of {empty} is empty", where=where, fix="add a value, or leave it out")
    lists = {name: value if isinstance(value, list) else [value] for name, value in renamed(given).items()}
    for values in product(*lists.values()):
        varied = [name for name, choices in lists.items() if len(choices) > 1]
        yield _contender(dict(zip(lists, values, strict=True)), varied, where)


def _contender(given: dict[str, Any], varied: list[str], where: str) -> Line:
    threshold = None if given.get("threshold") == "one" else given.get("threshold")
    _checked(given | {"threshold": threshold}, _Given, where)
    method = given["method"]
    options = {name: value for name, value in given.items() if name in OPTIONS and value is not None}
    try:
        Decoding(method=method, threshold=threshold, **options).check().check_heard(method)
        for name in (given["stage"], given.get("draft")):
            if name is not None:
                stage(name)
    except UserError as error:
        raise UserError(error.what, where=where, fix=error.fix) from error
    compiled = given.get("compiled", False)
    values = {name: given[name] for name in varied if name != "compiled"}
    shown = {name: format(value, "g") if isinstance(value, int | float) else value for name, value in values.items()}
    said = [f"{_WORDS.get(name, name)} = {value}" for name, value in shown.items()]
    name = ", ".join([str(given.get("name", method)), *said])
    if compiled and not name.endswith(", compiled"):  # a user may have written the ending
        name = f"{name}, compiled"
    options |= {} if threshold is None else {"threshold": threshold}
    options |= {"draft": given["draft"]} if given.get("draft") else {}
    rates: tuple[float, ...] = ()
    if (forced := given.get("acceptance")) is not None:
        if method not in ("mars", "mars-verified") or (method == "mars" and threshold is None):
            raise UserError(f"{name} has no guesses, so it takes no acceptance", where=where, fix="leave it out")
        rates, source = carried_of(forced, options.get("window", DEFAULT_BLOCK_SIZE) - 1, where)
        options["acceptance"] = f"carried over from {source}"
    block_size = given.get("trained_block_size", DEFAULT_BLOCK_SIZE)
    return Line(name, name, given["stage"], method, options, block_size=block_size, carried=rates, compiled=compiled)


# ---- acceptance that is carried over: what a method writes by it means nothing, and no claim may stand on it --------

_DRAWS = 4096  # made ahead: a step looks one up for each row
_MODE = "thinking_off"  # in the YAML of other suites; MARS has no other
_KINDS = ("mean", "rates", "published", "file")


class Carried(NamedTuple):
    """How often guesses are kept, and whose measurement that is."""

    rates: tuple[float, ...]  # of each guess of a window: the part of all steps that keep it and those before it
    source: str


def draws_of(rates: Sequence[float], seed: int = 0) -> list[int]:
    drawn = random.Random(f"acceptance {seed}")
    return [sum(chance < rate for rate in rates) for chance in (drawn.random() for _ in range(_DRAWS))]


def carried_of(said: Any, guesses: int, where: str = "") -> Carried:
    """What a grid says of a contender's acceptance (`_KINDS`), for so many guesses, or `UserError`."""
    known = [name for name in _KINDS if isinstance(said, Mapping) and name in said]
    if len(known) != 1 or set(said) - {*known, *(("scale", "block_size") if known == ["published"] else ())}:
        raise UserError(f"acceptance: {said} is not understood", where=where, fix=f"use one of: {', '.join(_KINDS)}")
    (kind,) = known
    value, source = said[kind], f"{kind} {said[kind]}"
    if kind == "rates":
        rates = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
        falls = all(0 <= after <= before <= 1 for before, after in zip((1.0, *rates), rates, strict=False))
        if len(rates) != guesses or not falls:
            fix = "give for each guess the share of steps that keep it and all before it; shares must not rise"
            raise UserError(f"{value} are no rates of {guesses} guesses", where=where, fix=fix)
        return Carried(rates, f"rates {', '.join(f'{rate:g}' for rate in rates)}")
    if kind == "published":
        value, source = _published(value, said.get("scale", "7b"), said.get("block_size", guesses + 1), where)
    elif kind == "file":
        value, source = _in_file(Path(str(value)), guesses), str(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= guesses + 1:
        raise UserError(f"{guesses} guesses cannot give {value} tokens", where=where, fix=f"give 1 to {guesses + 1}")
    return Carried(_rates(float(value), guesses), source)


def _rates(mean: float, guesses: int) -> tuple[float, ...]:
    """Rates of guesses that are each as likely to be kept as the one before, and together come to a mean."""

    def at(rate: float) -> list[float]:
        return list(accumulate([rate] * guesses, lambda so_far, own: so_far * own))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(at(middle)) < mean else (low, middle)
    return tuple(at(high))


def _published(benchmark: Any, scale: str, block_size: int, where: str) -> tuple[float, str]:
    cell = {"scale": scale, "benchmark": benchmark, "block_size": block_size, "threshold": 0.95}
    if not (rows := published("4", metric="tokens_per_forward", **cell)):
        what = f"the paper has no tokens per forward of {benchmark} at {scale}, B = {block_size}"
        fix = "name one of its benchmarks, or average, a scale of 0.5b or 7b, and a block size of its Table 4"
        raise UserError(what, where=where, fix=fix)
    return rows[0].value, f"the paper's Table 4, {benchmark}, {scale}, B = {block_size}, tau = 0.95"


def _in_file(file: Path, guesses: int) -> Any:
    try:
        (modes,) = yaml.safe_load(file.read_text(encoding="utf-8")).values()
        by_guesses = {int(number): float(mean) for number, mean in modes.get(_MODE, next(iter(modes.values()))).items()}
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, StopIteration, RecursionError) as error:
        raise UserError(f"not a table of acceptance: {error}", where=str(file), fix="see docs/sweeps.md") from error
    if guesses not in by_guesses:
        fix = f"it has: {', '.join(map(str, by_guesses))}"
        raise UserError(f"it has nothing for {guesses} drafts", where=str(file), fix=fix)
    return by_guesses[guesses]
