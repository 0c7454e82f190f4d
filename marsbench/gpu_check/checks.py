"""The checks. The first line of each docstring says what must hold; the numbers of a check become a row."""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.utils.benchmark import timer  # which waits for a GPU first

from marsbench.decoding.engine import Batch, KindOfBatch, OutsideMethod
from marsbench.errors import UserError, check_known
from marsbench.gpu_check.bench import BLOCK_SIZE, Bench, Found, tried
from marsbench.gpu_check.page import keep, verdict, write_gpu_page
from marsbench.keys import content_hash
from marsbench.methods import METHODS
from marsbench.presets import in_seconds
from marsbench.provenance import float32_products, provenance
from marsbench.racing.step_time import read_per_second
from marsbench.rows.kinds import CheckRow
from marsbench.training.objectives import mars_loss
from marsbench.training.stages import recipe
from marsbench.training.trainer import train

_LIMIT_S = 90  # of one check
_SEVEN_B_GIB = 24  # of free memory, without which the 7B model is not tried


def methods_agree(bench: Bench) -> Found:
    """In fp32, every method gives the same tokens here as on the CPU, and a lossless one those of `ar`."""
    here, there = bench.trained(), bench.trained(torch.device("cpu"))
    ar, facts = bench.answers(here, "ar"), dict[str, Any]()
    for name, info in METHODS.items():
        if info.package:  # decodes on the CPU alone
            continue
        mine, theirs = (bench.answers(loaded, name) for loaded in (here, there))
        facts[name] = {"asked": len(mine), "as on the CPU": _same(mine, theirs)}
        if info.lossless:
            facts[name]["as ar"] = _same(mine, ar[: len(mine)])
    return Found(all(len({*counts.values()}) == 1 for counts in facts.values()), facts)


def graphs_agree(bench: Bench) -> Found:
    """Captured steps give the tokens of eager steps, also with another EOS, reused memory and other weights."""
    loaded, facts = bench.trained(), dict[str, Any]()
    for name in METHODS:
        method = bench.method(name, loaded)
        if not isinstance(method, OutsideMethod) and method.most() is not None:
            facts[name] = _agree(bench, loaded, bench.captured(), name)
    kind = bench.captured()
    before = bench.answers(loaded, "ar", kind)
    # Where the first EOS may have lain.
    held = [torch.full((1,), token, device=bench.device) for token in range(4, 4000)]
    facts["a second batch"] = _same(before, bench.answers(loaded, "ar", kind))
    facts["another EOS"] = _agree(bench, loaded, kind, eos_id=before[0][0])
    weights = {name: value + 0.01 * torch.randn_like(value) for name, value in loaded.model.state_dict().items()}
    loaded.model.load_state_dict(weights, assign=True)
    loaded.model.tie_weights()
    facts["other weights"] = _agree(bench, loaded, kind)
    del held
    return Found(all(same == len(bench.requests) for same in facts.values()), facts)


def products_in_full(bench: Bench) -> Found:
    """Products in fp32 are not rounded to TF32's ten bits, unless that is asked for. Tables decode in fp32."""
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(256, 256, generator=draw).to(bench.device) for _ in range(2))
    exact = first.double() @ second.double()
    off = float(((first @ second).double() - exact).abs().mean() / exact.abs().mean())
    asked = float32_products()
    return Found(off < 1e-5 if asked == "highest" else None, {"asked for": asked, "relative error": off})


def gradients_finite(bench: Bench) -> Found:
    """In bf16 the gradients of the MARS loss are finite, also at lengths at which some kernels fail."""
    model, facts = bench.random_model("small", torch.float32).train(), dict[str, Any]()
    for length in (64, 192, 704) if not bench.quick else (64, 96):
        ids = torch.arange(2 * length, device=bench.device).view(2, length) % 1000 + 4
        model.zero_grad()
        _backward(bench, model, ids)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        facts[f"not finite, length {length}"] = sum(int((~gradient.isfinite()).sum()) for gradient in gradients)
    return Found(bool(facts) and not any(facts.values()), facts)


def training_resumes(bench: Bench) -> Found:
    """A training that is interrupted and resumed ends with the losses of an uninterrupted one."""
    steps, broken_at = (24, 15) if bench.quick else (60, 35)
    chosen = recipe(in_seconds().adapted(steps=steps), "base")
    with tempfile.TemporaryDirectory() as name:

        def run(place: str, until: int | None = None) -> list[float]:
            def stop(step: int, *_: object) -> None:
                if until is not None and step >= until:
                    raise InterruptedError

            bench.say(f"a training that is {place}")
            return train(chosen, Path(name) / place, None, stop, lambda _: None).losses

        straight = run("straight")
        with suppress(InterruptedError):
            run("broken", broken_at)
        resumed = run("broken")
    # A loss is a mean over the steps since the last one, or since the training went on: the last three are whole again.
    differ = max(abs(one - other) for one, other in zip(straight[-3:], resumed[-3:], strict=True))
    holds = differ < 1e-4 and all(map(math.isfinite, straight))
    return Found(holds, {"losses": straight, "largest difference": differ})


def attention_in_place(bench: Bench) -> Found:
    """Attention takes no longer over a new key length than over a known one."""
    seconds: dict[str, list[float]] = {"new length, s": [], "known length, s": []}
    query = torch.randn(1, 2, 7, 64, device=bench.device, dtype=bench.half)
    for of_lap in seconds.values():
        for length in range(400, 410 if bench.quick else 430):
            keys = torch.randn(1, length, 2, 64, device=bench.device, dtype=bench.half).transpose(1, 2)
            mask = torch.zeros(1, 1, 1, length, device=bench.device, dtype=bench.half)
            began = timer()
            F.scaled_dot_product_attention(query, keys, keys, mask)
            of_lap.append(timer() - began)
    facts = {name: median(of_lap[1:]) for name, of_lap in seconds.items()}
    return Found(facts["new length, s"] < 5 * facts["known length, s"] + 1e-3, facts)


def steps_near_the_floor(bench: Bench) -> Found:
    """A captured step takes less time than an eager one; the floor is the time of reading the weights once."""
    model = bench.random_model(bench.size, bench.half)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    facts: dict[str, Any] = {"weights, bytes": weights, "floor, s": weights / read_per_second(bench.device)}
    kinds: dict[str, KindOfBatch] = {"eager": Batch, "captured": bench.captured()}
    for rows, name in product((1,) if bench.quick else (1, 16), ("ar", "mars", "mars-verified")):
        for said, kind in kinds.items():
            facts[f"{name}, {rows} at once, {said}, s"] = median(bench.timed(model, name, rows=rows, kind=kind).steps)
    faster = facts["ar, 1 at once, captured, s"] < facts["ar, 1 at once, eager, s"]
    return Found(faster if bench.on_gpu else None, facts)  # on a CPU nothing is captured


def training_step(bench: Bench) -> Found:
    """A step of MARS training has finite losses; its time and memory are measured."""
    model = bench.random_model(bench.size, torch.float32).train()
    rows, length = (2, 64) if bench.quick or not bench.on_gpu else (8, 512)
    ids = torch.randint(4, 1000, (rows, length), device=bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds, losses = list[float](), list[float]()
    bench.forget_peak()
    for _ in range(3 if bench.quick else 8):
        began = timer()
        optimizer.zero_grad()
        loss = _backward(bench, model, ids)
        optimizer.step()
        seconds.append(timer() - began)
        losses.append(float(loss))
    facts = {"tokens/s": rows * length / median(seconds[1:]), "losses": losses, "peak, bytes": bench.peak_bytes()}
    return Found(all(map(math.isfinite, losses)), facts)


def decoding_fits(bench: Bench) -> Found:
    """Models of the paper's sizes fit into the memory while they decode."""
    facts, free = dict[str, Any](), torch.cuda.mem_get_info(bench.device)[0] / 2**30 if bench.on_gpu else 0.0
    for size in (bench.size, *(["7b"] if free >= _SEVEN_B_GIB and not bench.quick else [])):
        bench.forget_peak()
        model = bench.random_model(size, bench.half)
        timed = bench.timed(model, "mars", rows=1 if bench.quick else 16, kind=Batch)
        facts[size] = {
            "weights, bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "peak, bytes": bench.peak_bytes(),
            "step, s": median(timed.steps),
            "tokens": sum(generation.emitted for generation in timed.done),
        }
        del model
    return Found(all(said["tokens"] for said in facts.values()), facts)


CHECKS: dict[str, Callable[[Bench], Found]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        methods_agree, graphs_agree, products_in_full, gradients_finite, training_resumes, attention_in_place,
        steps_near_the_floor, training_step, decoding_fits,
    )
}  # fmt: skip


def _backward(bench: Bench, model: Any, ids: Tensor) -> Tensor:
    with torch.autocast(bench.device.type, torch.bfloat16):
        loss = mars_loss(model, ids, ids, block_size=BLOCK_SIZE, mask_token_id=3).total
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _same(first: list[list[int]], second: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))


def _agree(bench: Bench, loaded: Any, kind: KindOfBatch, name: str = "ar", **ids: Any) -> int:
    return _same(bench.answers(loaded, name, kind, **ids), bench.answers(loaded, name, **ids))


def device_here(*, cpu: bool) -> torch.device:
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("this machine has no GPU that PyTorch can use", fix="--cpu runs small checks on the CPU")
    return torch.device("cuda")


def run_checks(
    device: torch.device, names: Sequence[str], *, quick: bool, output: Path | None, console: Console
) -> list[CheckRow]:
    """The rows of checks, all if none is named, kept at once below `output`, which holds results/; None = nowhere."""
    for name in names:
        check_known("check", name, CHECKS)
    bench, made = Bench(device, quick), list[CheckRow]()
    for name in names or CHECKS:
        origin = provenance(seed=0)
        bench.say = partial(console.print, f"  {name}:", highlight=False)
        bench.say((CHECKS[name].__doc__ or "").partition("\n")[0])
        end = tried(name, partial(CHECKS[name], bench), _LIMIT_S)
        holds, facts = end.value or Found(None, {})
        key = content_hash({"kind": CheckRow.kind, "check": name, "device": bench.called, "quick": quick})
        row = CheckRow(
            key, end.status, end.reason, bench.size, name, bench.called, quick, holds=holds, facts=facts,
            seconds=end.seconds, provenance=origin,
        )  # fmt: skip
        console.print(f"{name}: {verdict(row)} ({row.seconds:.1f} s)", highlight=False)
        made.append(row)
        if output is not None:
            keep(output, row)
            write_gpu_page(output)
    return made
