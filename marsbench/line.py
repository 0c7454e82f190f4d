"""A line: this checkpoint, decoded by this method with these options. Tables, races and rows are about lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from marsbench.errors import UserError
from marsbench.presets import DEFAULT_BLOCK_SIZE
from marsbench.training.stages import BLOCKWISE, stage

_OF_REQUESTS = ("threshold", "accept", "draft", "acceptance")  # among a line's options: they do not make the method
# Earlier names of options. Rows keep them, so that their keys stay; grids, programs and lm-eval may use them.
EARLIER = {"block_size": "window"}
_IN_ROWS = {name: earlier for earlier, name in EARLIER.items()}


class TrainedStage(NamedTuple):
    """A checkpoint, there or not: its stage, and the B that it is trained for; None where there are no blocks."""

    stage: str
    block_size: int | None

    @classmethod
    def of(cls, name: str, block_size: int | None = DEFAULT_BLOCK_SIZE) -> "TrainedStage":
        return cls(name, block_size if stage(name).objective in BLOCKWISE else None)

    @property
    def title(self) -> str:
        return self.stage if self.block_size is None else f"{self.stage}, B = {self.block_size}"

    @property
    def slug(self) -> str:
        return self.stage if self.block_size is None else f"{self.stage}-b{self.block_size}"

    @property
    def id(self) -> str:
        return f"checkpoint {self.slug}"


@dataclass(frozen=True)
class Line:
    """A stage's checkpoint decoded by a method: a line of a table, or a contender of a race.

    `name` is stable; tables show `label`, races `name`. `options` are those of the method, and beside them `threshold`
    (or `accept`: one token per forward) and `draft`, the stage of the draft model, by the names that rows have for
    them. `published` is the paper's name for the line, None for lines of our own.
    """

    name: str
    label: str
    stage: str  # of `training.stages.STAGES`
    method: str  # of `methods.METHODS`
    options: Mapping[str, Any] = field(default_factory=dict)
    published: str | None = None
    untrained_masks: bool = False  # decode with masks although the checkpoint has never seen any
    optional: bool = False  # a line that pages leave out where it has no rows
    block_size: int = DEFAULT_BLOCK_SIZE  # B of the checkpoint and of its draft model, where their training has one
    dtype: str = "float32"  # of weights and caches, in a table; a grid has one for all
    carried: tuple[float, ...] = ()  # acceptance rates of another model, see `racing/grid.py`
    compiled: bool | None = False  # its steps as graphs, or operation by operation; None = as is best on the device

    def __post_init__(self) -> None:
        options = {_IN_ROWS.get(name, name): value for name, value in self.options.items()}
        object.__setattr__(self, "options", options)

    @classmethod
    def named(cls, name: str, stage: str, method: str, **options: Any) -> "Line":
        return cls(name, name, stage, method, options)

    def compiled_form(self) -> "Line":
        name = f"{self.name}, compiled"
        return replace(self, name=name, label=name, compiled=True)

    def of_another_stage(self, ending: str, words: str) -> "Line":
        """The line on the stage whose name ends so; pages leave it out where it has no rows."""
        named = {"name": self.name + ending, "label": f"{self.label}, {words}", "stage": self.stage + ending}
        return replace(self, **named, published=None, optional=True)  # type: ignore[arg-type]

    @property
    def row_fields(self) -> dict[str, Any]:
        return {"arm": self.name, "stage": self.stage, "method": self.method, "options": self.options}

    @property
    def threshold(self) -> float | None:
        """Confidence to accept a token; None is one token per forward."""
        return self.options.get("threshold")

    @property
    def of_method(self) -> dict[str, Any]:
        """Those of its options that make the method: fields of `Options`."""
        return renamed({name: value for name, value in self.options.items() if name not in _OF_REQUESTS})

    @property
    def trained(self) -> TrainedStage:
        return TrainedStage.of(self.stage, self.block_size)

    @property
    def draft(self) -> TrainedStage | None:
        return TrainedStage.of(self.options["draft"], self.block_size) if "draft" in self.options else None

    @property
    def needs(self) -> list[TrainedStage]:
        """The checkpoints that it decodes with: its own, then that of its draft model."""
        return [self.trained, *([self.draft] if self.draft else [])]

    @property
    def shown(self) -> dict[str, Any]:
        """Its options as rows of races show them: the draft model has a field of its own there."""
        return {name: value for name, value in self.options.items() if name != "draft"}

    @property
    def typed(self) -> str:
        """As `marsbench eval` and `marsbench decode` take it."""
        given = renamed({"method": self.method, **self.shown})
        given.pop("acceptance", None)  # they have a model's own
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())

    @property
    def keyed(self) -> dict[str, Any]:
        """What goes into the keys of races; `compiled` only where it is, so that older keys stay."""
        options = {name: value for name, value in self.options.items() if name not in _OF_REQUESTS}
        said = {"name": self.name, "stage": self.stage, "method": self.method, "options": options}
        apart = {"threshold": self.threshold, "draft": self.options.get("draft")}
        how = {"trained_block_size": self.block_size, **({"compiled": True} if self.compiled else {})}
        return {**said, **apart, **how, **({"carried": self.carried} if self.carried else {})}


def checkpoints_of(lines: Iterable[Line]) -> list[TrainedStage]:
    return list(dict.fromkeys(needed for line in lines for needed in line.needs))


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names of today; `UserError` where one is given by two names."""
    for earlier, name in EARLIER.items():
        if earlier in given and name in given:
            raise UserError(f"{earlier} and {name} are two names of one option", fix=f"give {name} alone")
    return {EARLIER.get(name, name): value for name, value in given.items()}
