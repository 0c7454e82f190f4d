"""A checkpoint as other engines load it: a MARS model as vLLM's parallel draft model, an adapter as one of UNO's.

No weight changes. What the engines read was looked up in their sources; none of them was run.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from marsbench.errors import UserError
from marsbench.forward.adapter import parted
from marsbench.presets import DEFAULT_BLOCK_SIZE
from marsbench.training.adapter_files import CONFIG, HEAD, PREFIX, SHIPPED, VECTOR, WEIGHTS, base_of, write_adapter
from marsbench.training.checkpoints import Loaded, load
from marsbench.training.records import RECORD, finished

Engine = Literal["pard", "uno"]


def export(checkpoint: str, to: Engine, out: Path) -> str:
    """Write a checkpoint for another engine; the command that serves it there. `UserError` for one of another kind."""
    folder = Path(SHIPPED.get(checkpoint, checkpoint))
    if not folder.is_dir():
        raise UserError("there is no such checkpoint", where=checkpoint, fix="give the folder of one")
    if out.exists():
        raise UserError("the output already exists", where=str(out), fix="remove it, or choose another --out")
    loaded, record = load(folder), finished(folder)
    if loaded.mask_id is None or not loaded.knows_masks:
        raise UserError("it was trained without masks", where=checkpoint, fix="train one: marsbench train mars")
    if (to == "uno") != bool(record and record.base_weights):
        fix = "give a MARS checkpoint, or --to uno" if to == "pard" else "give an adapter, or --to pard"
        raise UserError(f"a checkpoint of this kind cannot be written for {to}", where=checkpoint, fix=fix)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write = _write_adapter if to == "uno" else _write_draft
    served, options, place = write(loaded, folder, partial)
    partial.rename(out)
    drafts = record.recipe["block_size"] if record else None
    said = {**options, place: str(out), "num_speculative_tokens": drafts or DEFAULT_BLOCK_SIZE}
    return f"vllm serve {served} --speculative-config '{json.dumps(said)}'"


def _write_draft(loaded: Loaded, folder: Path, out: Path) -> tuple[str, dict[str, Any], str]:
    """A model whose configuration names the id that stands for tokens still to be drafted.

    vLLM asks for `dflash_config.mask_token_id`, `mask_token_id`, `dspark_noise_token_id`, `pard_token` and
    `ptd_token_id`, in this order; older versions for the last two. A draft head would be loaded as weights.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(RECORD, HEAD))
    file = out / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("dflash_config", "dspark_noise_token_id", "ptd_token_id"):
        config.pop(key, None)
    config |= {"mask_token_id": loaded.mask_id, "pard_token": loaded.mask_id}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return "TARGET", {"method": "draft_model", "parallel_drafting": True}, "model"


def _write_adapter(loaded: Loaded, folder: Path, out: Path) -> tuple[str, dict[str, Any], str]:
    """An adapter as peft has it, without its head; the mask's vector becomes a map on the embedding of its id."""
    model, adapter = parted(loaded.model)
    mask = loaded.mask_id
    assert adapter is not None and mask is not None, "that has been looked at"
    write_adapter(replace(adapter, head=None), model, out, base_of(folder))
    (out / VECTOR).unlink()
    config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    embeddings: Any = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    size, values = (config["r"], embeddings.num_embeddings), adapter.vector
    chosen, vector = values.new_zeros(size), values.new_zeros(len(values), config["r"])
    chosen[0, mask], vector[:, 0] = 1, values
    maps = {f"{PREFIX}{name}.lora_embedding_{which}": values_of for which, values_of in (("A", chosen), ("B", vector))}
    save_file(load_file(out / WEIGHTS) | maps, out / WEIGHTS)
    config["target_modules"] = sorted({*config["target_modules"], name.rpartition(".")[2]})
    (out / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    served = f"{base_of(folder)} --enable-lora --max-loras 2 --max-lora-rank {config['r']}"
    return served, {"method": "uno", "uno_noise_low": mask, "uno_mask_token_id": mask + 1}, "uno_lora_path"
