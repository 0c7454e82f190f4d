"""The structure of the package: which room may import which, how long a function may be, what a room says of itself."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from marsbench.files import PACKAGE

# The rooms of the package, and the modules beside them, from the lowest floor up. A room imports those of lower floors
# only, and neither its neighbours nor anything above. `__init__` is what `import marsbench` gives.
FLOORS = (
    ("errors", "reference"), ("files", "hub", "json_lines", "keys", "locks", "progress", "provenance"),
    ("presets", "paper", "world", "statistics", "executors", "fetching"), ("forward",), ("training",),
    ("decoding", "line"), ("compiled", "methods", "lm_eval_plugin"), ("answering",), ("evaluation",),
    ("show", "distilling", "transformers_generate", "doctor"), ("__init__",), ("rows",), ("running",), ("racing",),
    ("findings", "serving"), ("rendering",), ("adapting",), ("studies", "gpu_check"), ("overview",), ("commands",),
    ("cli",), ("__main__",),
)  # fmt: skip
MOST_FILES = 20  # of one folder
LONGEST = 50  # lines of a function, without its signature and its docstring

NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Trees = Mapping[str, ast.Module]  # module -> its syntax


@pytest.fixture(scope="module")
def trees() -> Trees:
    return {name_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}


def name_of(file: Path) -> str:
    """The name of a module as imports have it."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module is in, or the module itself where it stands beside the rooms."""
    return [*module.split("."), "__init__"][1]


def imported(tree: ast.Module, modules: Trees) -> Iterator[str]:
    """The package's modules that a module imports anywhere: in functions and for its types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"import {ast.unparse(node)} by the module's whole name"
            for name in node.names:
                yield from [path for path in (f"{node.module}.{name.name}", str(node.module)) if path in modules][:1]


def functions(tree: ast.AST, inside: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of a module, nested ones too, each with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}.{node.name}" if isinstance(node, NAMED) else inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, name)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long a function is below its signature and its docstring."""
    first = function.body[0]
    before = first.lineno - 1 if ast.get_docstring(function) is None else first.end_lineno
    return (function.end_lineno or 0) - (before or 0)


def test_every_room_has_its_floor(trees: Trees) -> None:
    """Guards against a new room without a floor, and a name that stays when its room is gone."""
    placed = Counter(room for floor in FLOORS for room in floor)
    assert placed == Counter({room_of(module) for module in trees})


def test_no_room_knows_one_above_or_beside_it(trees: Trees) -> None:
    """Guards against rooms that cannot be understood, tested or changed without those that are built on them."""
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    upward = [
        f"{module} imports {other}"
        for module, tree in trees.items()
        for other in imported(tree, trees)
        if room_of(other) != room_of(module) and floor_of[room_of(other)] >= floor_of[room_of(module)]
    ]
    assert upward == []


def test_no_room_is_a_crowd() -> None:
    """Guards against a room of so many files that a reader does not see how they belong together."""
    files = Counter(file.parent for file in PACKAGE.rglob("*.*") if file.suffix in (".py", ".md", ".yaml"))
    assert {folder.name: count for folder, count in files.items() if count > MOST_FILES} == {}


def test_no_modules_import_each_other(trees: Trees) -> None:
    """Guards against modules that work only if they are imported in the right order, or only from within functions."""
    graph = {module: {*imported(tree, trees)} for module, tree in trees.items()}
    assert sum(map(len, graph.values())) > len(graph), "imports are not found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_functions_can_be_seen_at_a_glance(trees: Trees) -> None:
    """Guards against functions that are too long to be read to their end."""
    lengths = {name: length(function) for module, tree in trees.items() for name, function in functions(tree, module)}
    assert lengths, "functions are not found"
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


def test_every_room_says_what_it_is_for(trees: Trees) -> None:
    """Guards against a room that only its name explains, and one that is no package."""
    rooms = {file.parent for file in PACKAGE.rglob("*.py")}
    assert {folder.name for folder in rooms if not (folder / "__init__.py").exists()} == set()
    modules = [name_of(folder / "__init__.py") for folder in rooms]
    assert [module for module in modules if not ast.get_docstring(trees[module])] == []
