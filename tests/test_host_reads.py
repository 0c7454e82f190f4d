"""How often a step reads a number from the device, and that its reads do not grow with the answers."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import tools
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.decoding.rows import Rows
from marsbench.methods import Options, build_method
from marsbench.methods.speculative import Speculative
from marsbench.training.medusa import MedusaHeads

EOS, PAD, MASK = 2, 0, 3
READS = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")
} | {torch.nonzero: "nonzero"}


class Reads(TorchFunctionMode):
    """Counts the calls that make the host wait for the device, and the numbers that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.numbers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = READS.get(func)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            chosen = args[1] if isinstance(args[1], tuple) else (args[1],)
            name = "mask" if any(isinstance(index, Tensor) and index.dtype == torch.bool for index in chosen) else None
        if name:
            self.count[name] += 1
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations by their names, and notes the types of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.products: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, output = function.__name__.split(".")[0], function(*args, **(kwargs or {}))
        if name in ("mm", "addmm"):
            self.products.add(args[-1].dtype)
        if not (name == "to" and output is args[0]):
            self.count[name] += 1
        return output


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """An untrained model that never ends by itself, another that drafts for it, and heads."""
    target = tools.qwen2(max_position_embeddings=2048)
    draft = copy.deepcopy(target)  # one that is sometimes right
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight), alpha=0.15)
    return {"model": target, "draft": draft, "heads": MedusaHeads(32)}


def a_batch(
    models: dict[str, Any], method: str, requests: list[Request], *, meter: Meter | None = None, eos_id: int = -1,
    on_tokens: Callable[[int, list[int]], None] | None = None, **options: Any,
) -> tuple[Batch, dict[int, Generation]]:  # fmt: skip
    """Rows that have just joined, and where their generations will be."""
    done: dict[int, Generation] = {}
    chosen = build_method(method, Options(mask_id=MASK, draft=models["draft"], heads=models["heads"], **options))
    callbacks: dict[str, Any] = {"on_finished": done.__setitem__, "on_tokens": on_tokens, "meter": meter}
    batch = Batch(models["model"], chosen, eos_id=eos_id, pad_id=PAD, **callbacks)
    batch.join(dict(enumerate(requests)))
    return batch, done


def reads_of(batch: Batch, steps: int) -> list[Reads]:
    by_step = []
    for _ in range(steps):
        with Reads() as reads:
            batch.step()
        by_step.append(reads)
    return by_step


def uneven(threshold: float | None) -> list[Request]:
    return [Request([4 + row, 5, 6, 4 + row, 5][row:], 400, threshold) for row in range(4)]


SETTINGS: dict[str, tuple[str, dict[str, Any], int]] = {  # what is decoded how -> the reads that a step may take
    "ar": ("ar", {}, 1), "mars": ("mars", {"threshold": 0.3}, 2),
    "mars-verified in groups": ("mars-verified", {"threshold": 0.3}, 2),
    "mars-verified in a line": ("mars-verified", {"threshold": 0.3, "layout": "linear"}, 2),
    "medusa": ("medusa", {"tree_width": 3}, 2), "jacobi": ("jacobi", {}, 2), "prompt-lookup": ("prompt-lookup", {}, 2),
    "mars-lookup in groups": ("mars-lookup", {"threshold": 0.3}, 2),
    "mars-lookup in a line": ("mars-lookup", {"threshold": 0.3, "layout": "linear"}, 2),
    "uno": ("uno", {"threshold": 0.3}, 2), "speculative": ("speculative", {}, 2),
    "mars-speculative": ("mars-speculative", {"threshold": 0.3}, 3),
}  # fmt: skip


@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("what", SETTINGS)
def test_a_step_reads_little(what: str, metered: bool, models: dict[str, Any]) -> None:
    """Guards against a step that waits for the device again and again: for rows, for fillers, for drafts."""
    method, options, most = SETTINGS[what]
    threshold = options.get("threshold")
    rest = {name: value for name, value in options.items() if name != "threshold"}
    batch, _ = a_batch(models, method, uneven(threshold=threshold), meter=Meter() if metered else None, **rest)
    steps = reads_of(batch, 12)
    assert max(reads.count.total() for reads in steps) <= most, [dict(reads.count) for reads in steps]


@pytest.mark.parametrize("draft_method", ["ar", "mars"])
def test_drafts_are_as_many_as_the_host_believes(draft_method: str, models: dict[str, Any]) -> None:
    """Guards against drafts or lengths that differ between host and device, also near ends and after a failed step."""
    requests = [Request([4 + row, 5, 6], 3 + 5 * row) for row in range(5)]
    drafting = {"draft_method": draft_method, "draft_threshold": 0.2, "draft_length": 3}
    batch, done = a_batch(models, "speculative", requests, **drafting)
    method: Any = batch.method
    drafted = set()

    def draft(rows: Rows) -> None:
        Speculative.note_drafts(method, rows)
        believed = rows.extent
        rows.measure()
        assert believed[:4] == rows.extent[:4]  # pending, drafted, length and even
        drafted.add(believed.drafted)

    object.__setattr__(method, "note_drafts", draft)
    with patch("marsbench.methods.speculative.verify", side_effect=MemoryError), suppress(MemoryError):
        batch.step()
    batch.leave(0)
    while len(batch):
        batch.step()
    assert len(drafted) > 1
    ar = decode(models["model"], build_method("ar", Options()), requests, eos_id=-1, pad_id=PAD)
    assert [done[row].tokens for row in range(1, 5)] == [generation.tokens for generation in ar[1:]]


def test_who_listens_is_told_in_one_read(models: dict[str, Any]) -> None:
    """Guards against reads for every row, and against answers that are read from their beginning at every step."""
    batch, _ = a_batch(models, "mars", uneven(threshold=0.3), on_tokens=lambda index, tokens: None)
    early = reads_of(batch, 5)
    for _ in range(80):
        batch.step()
    late = reads_of(batch, 5)
    assert max(reads.count.total() for reads in (*early, *late)) <= 3
    assert max(reads.numbers for reads in late) <= max(reads.numbers for reads in early)


def test_rows_that_end_are_read_at_once(models: dict[str, Any]) -> None:
    """Guards against several reads for every row that leaves."""
    counts = []
    for rows in (2, 12):
        requests = [Request([4, 5, 6], 3 + row % 2) for row in range(rows)]
        batch, _ = a_batch(models, "ar", requests)
        batch.step()
        counts.append(reads_of(batch, 1)[0].count.total())
        assert len(batch) == rows // 2
    assert counts[0] == counts[1] <= 4
