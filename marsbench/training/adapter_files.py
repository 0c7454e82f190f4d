"""A gated adapter on disk: a folder as peft lays one out, with the mask's vector and the draft head beside it."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from marsbench.errors import UserError, told_to_user
from marsbench.forward.adapter import Adapter, LowRank
from marsbench.forward.draft_head import KINDS, DraftHead
from marsbench.json_lines import read_json
from marsbench.training.records import finished

CONFIG = "adapter_config.json"  # peft's
WEIGHTS, VECTOR = "adapter_model.safetensors", "mask_vector.safetensors"  # peft's, and ours
HEAD = "draft_head.safetensors"  # where there is one; of which kind, the record says
PREFIX = "base_model.model."  # of peft's names
_NOT_PLAIN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")  # peft's: more than maps of one scale

# Adapters that came with the package, by the names that they go by wherever a checkpoint's name is asked for.
SHIPPED = {"smollm2-135m-adapter": Path(__file__).parent.parent / "presets" / "adapters" / "smollm2-135m"}


def write_adapter(adapter: Adapter, model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write an adapter's folder, without a record; `base` is where its model lies, as seen from there."""
    folder.mkdir(parents=True, exist_ok=True)
    inside = f"{PREFIX}{_place_of_decoder(model)}"
    weights = {
        f"{inside}{name}.lora_{which}.weight": tensor.detach().cpu().contiguous()
        for name, pair in adapter.maps.items()
        for which, tensor in zip("AB", pair, strict=True)
    }
    save_file(weights, folder / WEIGHTS)
    save_file({"mask_vector": adapter.vector.detach().cpu()}, folder / VECTOR)
    if adapter.head is not None:
        write_head(adapter.head, folder)
    rank = len(next(iter(adapter.maps.values())).down)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": rank,  # what the maps say counts as it is
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.maps}),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_head(head: DraftHead, folder: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in head._asdict().items()}, folder / HEAD)


def _place_of_decoder(model: PreTrainedModel) -> str:
    """What names of a decoder's layers begin with in the model: "model." in Qwen2's."""
    name = next(name for name, module in model.named_modules() if module is model.get_decoder())  # type: ignore[no-untyped-call]
    return f"{name}." if name else ""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    base = str(_config(folder).get("base_model_name_or_path") or "")
    beside = folder / base
    return str(beside.resolve()) if base and beside.is_dir() else base


def read_adapter(folder: Path, model: PreTrainedModel) -> Adapter:
    """The adapter in a folder, for a model; `UserError` where a file is missing or cut short, or it does not fit."""
    config = _config(folder)
    if any(config.get(name) for name in _NOT_PLAIN):
        raise UserError("this is no plain LoRA adapter", where=str(folder), fix="train one: marsbench train mars_gated")
    fix = "a file may be missing or cut short, or peft made it without a gate; copy it or train it again"
    with told_to_user("the adapter cannot be loaded", OSError, SafetensorError, KeyError, where=folder, fix=fix):
        weights, vector = load_file(folder / WEIGHTS), load_file(folder / VECTOR)["mask_vector"]
        scale = float(config["lora_alpha"]) / float(config["r"]) ** (0.5 if config.get("use_rslora") else 1)
    inside = f"{PREFIX}{_place_of_decoder(model)}"
    down, up = ".lora_A.weight", ".lora_B.weight"
    names = [name.removeprefix(inside).removesuffix(down) for name in weights if name.endswith(down)]
    fix = "use the model that it was trained for"
    with told_to_user("the adapter does not fit, it lacks", KeyError, where=folder, fix=fix):
        maps = {name: LowRank(weights[inside + name + down], scale * weights[inside + name + up]) for name in names}
    return Adapter(vector, maps, read_head(folder))


def read_head(folder: Path) -> DraftHead | None:
    """The draft head in a checkpoint's folder, of the kind that the record names; without a record there is none."""
    record = finished(folder)
    kind = record.recipe.get("head", "none") if record else "none"
    if kind == "none":
        return None
    what, fix = f"the {kind} draft head cannot be loaded", "copy the checkpoint or train it again"
    with told_to_user(what, OSError, SafetensorError, TypeError, KeyError, where=folder / HEAD, fix=fix):
        return KINDS[kind](**load_file(folder / HEAD))


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(folder / CONFIG, dict[str, Any], mend="copy the adapter or train it again")
    return config
