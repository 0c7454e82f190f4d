"""What several test files share: the golden vectors with their two small checkpoints, and one run at scale micro."""

import gc
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import settings
from rich.console import Console

from marsbench.presets import preset
from marsbench.progress import quieten_libraries

if TYPE_CHECKING:  # pytest's first process only starts the others, and does not wait for this
    from transformers import PreTrainedModel

GOLDEN = Path(__file__).parent / "golden"

# Several test processes run side by side: each of them, and what it starts, uses one thread.
os.environ["OMP_NUM_THREADS"] = "1"
quieten_libraries()

# Every run generates the same cases, so that a test that fails is about what has changed.
settings.register_profile("repeated", derandomize=True)
settings.load_profile("repeated")


# Modules that would end last. The first trains and reproduces a table for others too; the three after it need
# nothing of that.
LONGEST = (
    "test_reproduce", "test_decoding", "test_native", "test_cluster", "test_serving", "test_whole_paper", "test_sweep",
    "test_own_pages", "test_scales", "test_work", "test_training", "test_adapt", "test_reference", "test_static",
    "test_sandbox", "test_gated",
)  # fmt: skip


def turn_of(item: pytest.Item) -> int:
    """The place of a test's module among the longest, or after them."""
    return next((turn for turn, name in enumerate(LONGEST) if item.path.stem.startswith(name)), len(LONGEST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest modules first, so that none is left at the end; skip what needs a GPU where there is none."""
    import torch

    items.sort(key=turn_of)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Keep all imported objects out of later garbage collections, which take time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def brief() -> Iterator[None]:
    """Shorten measurements that no test is about; draw each figure, and put the command line together, only once."""
    from typer import testing

    from marsbench import provenance
    from marsbench.racing import step_time
    from marsbench.rendering import figures
    from marsbench.running import training_cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", cache(testing._get_command))
        patch.setattr(provenance.others_cores, "__defaults__", (0.02,))
        patch.setattr(step_time, "_READ_BYTES", 2**24)
        patch.setattr(training_cost, "_REPEATS", 5)
        patch.delitem(figures.FORMATS, "svg")
        yield


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The vectors recorded from the authors' code."""
    vectors: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return vectors


@pytest.fixture(scope="session")
def golden_models() -> "dict[str, PreTrainedModel]":
    """The checkpoints that the vectors were recorded on: `ar` and `mars`."""
    import torch
    from transformers import AutoModelForCausalLM

    read = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    return {name: read(GOLDEN / name).eval() for name in ("ar", "mars")}


def shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all test processes of a run share."""
    own = factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name


@pytest.fixture(scope="session")
def micro_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every kind at scale micro, trained once for all test processes."""
    from marsbench.line import TrainedStage
    from marsbench.rows.workspace import Workspace
    from marsbench.running.checkpoints import Checkpoints
    from marsbench.running.run import Run

    folder = shared(tmp_path_factory, "micro")
    with FileLock(f"{folder}.lock"):
        run = Run(preset("micro"), Workspace(folder, "micro"))
        for stage in ("mars", "medusa", "draft_mars"):
            Checkpoints(run).path(TrainedStage.of(stage))
    return run.workspace.runs / "checkpoints"


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory: pytest.TempPathFactory, micro_checkpoints: Path) -> Path:
    """Table 2 at scale micro, reproduced once for all test processes; copy what you change."""
    from tools import invoke

    folder = shared(tmp_path_factory, "reproduced")
    with FileLock(f"{folder}.lock"):
        if not (folder / "reports").exists():
            shutil.copytree(micro_checkpoints, folder / "runs" / "micro" / "checkpoints")
            invoke("reproduce", "table2", "--scale", "micro", "--jobs", "1", "--output", folder)
    return folder


@pytest.fixture
def output(micro_checkpoints: Path, tmp_path: Path) -> Path:
    """A folder of a test's own, with a checkpoint of every kind at scale micro."""
    shutil.copytree(micro_checkpoints, tmp_path / "runs" / "micro" / "checkpoints")
    return tmp_path


@pytest.fixture
def brief_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of this process take a tenth of their steps, for tests that do not check their results."""
    from marsbench.training import trainer

    train = trainer.train

    def briefly(chosen: Any, *more: Any) -> Any:
        steps = max(3, chosen.budget.steps // 10)
        return train(replace(chosen, budget=replace(chosen.budget, steps=steps, cycle=None)), *more)

    monkeypatch.setattr(trainer, "train", briefly)


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with room for their words, whatever terminal the tests run in."""
    monkeypatch.setattr(Console, "_environ", {"COLUMNS": "300", "LINES": "50"})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("there is no chromium with a chromedriver here")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1200,900"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(120)
    yield chrome
    chrome.quit()
