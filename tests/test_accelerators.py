"""What training does on GPUs, as far as a CPU can show it."""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from test_host_reads import Operations
from tools import Models
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from marsbench.errors import UserError
from marsbench.files import PACKAGE
from marsbench.forward.decoder import decoder_of
from marsbench.gpu_check.bench import Bench
from marsbench.presets import preset
from marsbench.provenance import products, provenance
from marsbench.racing.course import Course
from marsbench.racing.grid import Grid
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import CellRunner
from marsbench.running.plans import PlannedCell
from marsbench.running.run import Run
from marsbench.running.training_cost import step_cost
from marsbench.studies.lines import AR_SFT
from marsbench.training import memory, objectives, trainer
from marsbench.training.gated import GatedAdapter, gated_loss
from marsbench.training.medusa import MedusaHeads, medusa_loss
from marsbench.training.objectives import mars_loss
from marsbench.training.stages import recipe
from marsbench.training.visibility import additive_mask

MASK = 3
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCKS = {"block_size": 4, "mask_token_id": MASK}


def batch() -> dict[str, Tensor]:
    """Three sequences, the first half of each a prompt."""
    ids = torch.randint(4, 900, (3, 20), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(20) < 10, -100)}


def decode_with(model: PreTrainedModel, folder: Path) -> None:
    decoder_of(model)
    raise UserError("", where="", fix="")


def train_in(model: PreTrainedModel, folder: Path) -> None:
    trainer.train(recipe(preset("micro"), "base"), folder / "base", None, lambda *_: None, print)


def time_in(model: PreTrainedModel, folder: Path) -> None:
    step_cost(preset("micro"), folder / "nowhere", 0)


def check_in(model: PreTrainedModel, folder: Path) -> None:
    Bench(CPU)
    raise UserError("", where="", fix="")


@pytest.mark.parametrize("work", [decode_with, train_in, time_in, check_in])
def test_nothing_uses_cudnns_attention(
    work: Any, golden_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against attention planned at every step, gradients that are NaN, and step costs of unused settings."""
    monkeypatch.setattr(trainer, "weights_of", Mock(side_effect=UserError("", where="", fix="")))
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default
    try:
        with pytest.raises(UserError):
            work(golden_models["ar"], tmp_path)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("objective", "wrap"), [("mars", DistributedDataParallel), ("gated", DistributedDataParallel), ("mars", sharded)]
)
def test_logits_are_chunked_under_a_wrapper(
    objective: str, wrap: Callable[[nn.Module], nn.Module], golden_models: Models,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Guards against all logits of a device's rows at once, and gradients of a chunk that DDP or FSDP does not get."""
    model = copy.deepcopy(golden_models["mars"]).train()
    learner: nn.Module = model
    if objective == "gated":
        learner = GatedAdapter(model.requires_grad_(False), 2)
        torch.nn.init.normal_(learner.ups[0])  # type: ignore[arg-type]
    chunks: list[int] = []
    of_chunk = objectives._nll_of_chunk

    def counted(hidden: Tensor, *rest: Any) -> Tensor:
        chunks.append(len(hidden))
        return of_chunk(hidden, *rest)

    def learned(wrapped: nn.Module) -> tuple[float, list[Tensor]]:
        learner.zero_grad()
        torch.manual_seed(0)
        if objective == "gated":
            loss = gated_loss(wrapped, **batch(), model=model, **BLOCKS)
        else:
            loss = mars_loss(wrapped, **batch(), **BLOCKS).total
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in learner.parameters() if p.grad is not None]
        return loss.item(), [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in gradients]

    at_once, gradients = learned(learner)
    monkeypatch.setattr(objectives, "_nll_of_chunk", counted)
    monkeypatch.setattr(objectives, "MOST_LOGITS", 7 * model.config.vocab_size)
    in_chunks, of_chunks = learned(wrap(learner))
    assert in_chunks == pytest.approx(at_once, rel=1e-5)
    assert len(chunks) > 2 and max(chunks) == 7
    torch.testing.assert_close(of_chunks, gradients, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("objective", ["mars", "gated", "medusa"])
def test_all_of_a_step_is_in_bf16_on_a_gpu(
    objective: str, golden_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against chunks of logits, and models below adapters and heads, that run in fp32 beside a bf16 model."""
    model, learner = golden_models["mars"], None
    loss: Any = partial(mars_loss, **BLOCKS)
    if objective == "gated":
        learner, loss = GatedAdapter(model, 2), partial(gated_loss, model=model, **BLOCKS)
    if objective == "medusa":
        learner, loss = MedusaHeads(model.config.hidden_size), partial(medusa_loss, backbone=model)
    monkeypatch.setattr(objectives, "MOST_LOGITS", 7 * model.config.vocab_size)
    own = torch.autocast
    monkeypatch.setattr(trainer.torch, "autocast", lambda device, dtype: own({"cuda": "cpu"}[device], dtype))

    def products(device: torch.device, bf16: bool) -> set[torch.dtype]:
        stage: Any = SimpleNamespace(args=SimpleNamespace(device=device, bf16=bf16), _loss=loss)
        with Operations() as noted, torch.no_grad():
            trainer._StageTrainer._loss_of(stage, learner or model, **batch())
        return noted.products

    assert products(CUDA, True) == {torch.bfloat16}
    assert products(CUDA, False) == products(CPU, True) == {torch.float32}


def test_a_mask_has_the_type_that_attention_computes_in() -> None:
    """Guards against a mask of full precision that every layer casts again."""
    visible = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    assert additive_mask(visible, torch.float32).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        mask = additive_mask(visible, torch.float32)
    assert mask.dtype == torch.bfloat16
    assert mask[0, 0].float().softmax(-1).tolist() == [[1, 0], [0.5, 0.5]]


def test_the_peak_is_the_gpus_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a host's memory that passes for the GPU's."""
    on_host = memory.peak()
    assert on_host is None or on_host > 2**26
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 12345)
    assert memory.peak() == 12345


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-smi, which answers for two GPUs, the second of which another process uses."""
    status = "570.86.15, 1980, 1980, 2619, 700.00, 71.20, 33, 0, 4\\n"
    status += "570.86.15, 345, 1980, 2619, 500.00, [N/A], 41, 97, 80123"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nprintf "{status}\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return program


def test_rows_say_how_a_gpu_was_set_and_who_was_on_it(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times at a low clock or on a shared GPU that look normal, and runs ended by a failing driver."""
    first, second = provenance(seed=0)["gpus"]
    assert (first["driver"], first["clock"], first["power_limit"]) == ("570.86.15", "1980", "700.00")
    assert (second["clock"], second["power_limit"]) == ("345", "500.00")
    assert (second["busy_percent"], second["power"], second["memory_used_mib"]) == ("97", "[N/A]", "80123")
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert "gpus" not in provenance(seed=0)
    monkeypatch.setenv("PATH", str(driver.parent / "nothing"))
    assert "gpus" not in provenance(seed=0)


def test_rounded_products_are_told_and_have_keys_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against races with TF32, or unpacked weights, that are taken for others, and rows not found again."""
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    grid = Grid((), (1,), prompts=1, repeats=1)
    course: Any = SimpleNamespace(run=run, grid=grid, max_new_tokens=1, questions=SimpleNamespace(fingerprint=str))
    everywhere: Any = Course.__dict__["everywhere"]

    def keys(precision: str, dtype: str) -> tuple[str, Any]:
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
        course.grid = replace(grid, dtype=dtype)
        return CellRunner(run)._key(PlannedCell(AR_SFT, "mini_bbh", 1), "weights", None, dtype), everywhere.func(course)

    for full, rounded in zip(keys("highest", "float32"), keys("high", "float32"), strict=True):
        assert full != rounded
    assert provenance(seed=0)["float32_products"] == "high" and products("bfloat16") == {}
    assert products("float32") == {"float32_products": "high"}
    assert keys("highest", "bfloat16") == keys("high", "bfloat16"), "which multiplies in 16 bits anyway"
    monkeypatch.setenv("MARSBENCH_NATIVE", "0")
    assert everywhere.func(course)["packed"] is False


@pytest.mark.parametrize(("stage", "sharded"), [("mars", True), ("medusa", False), ("base_gated", False)])
def test_heads_and_adapters_are_not_sharded(
    stage: str, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against FSDP that looks for layers in what has none, and a later stage that is not sharded either."""
    seen: list[bool] = []
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(trainer, "_train", lambda *_: seen.append(os.environ["ACCELERATE_USE_FSDP"] == "true"))
    trainer.train(recipe(preset("7b"), stage), tmp_path / stage, None, lambda *_: None, print)
    assert seen == [sharded]
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_a_finished_checkpoint_is_whole_though_its_states_are_in_pieces(tmp_path: Path) -> None:
    """Guards against 90 GB in one process at every state, and a final checkpoint that nothing else can load."""
    calls: list[str] = []
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(set_state_dict_type=calls.append))
    fake: Any = SimpleNamespace(
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None, state=state), is_fsdp_enabled=True,
        is_world_process_zero=lambda: False, save_model=lambda folder: calls.append("save"),
    )  # fmt: skip
    learner: Any = SimpleNamespace(freezes_model=False)
    trainer._save(fake, tmp_path, learner, learner, "")
    assert calls == ["FULL_STATE_DICT", "save"]
    launch = yaml.safe_load((PACKAGE / "presets/launch/fsdp.yaml").read_text(encoding="utf-8"))
    assert launch["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
