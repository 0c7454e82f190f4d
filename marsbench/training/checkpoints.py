"""Loading a checkpoint: a folder, a name on the hub, a model of `fetching`, or an adapter with the model below it.

And handing one on, in bf16 and with its record, as those are that come with the package:
`python -m marsbench.training.checkpoints CHECKPOINT FOLDER`.
"""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2 import Qwen2Config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from marsbench import hub
from marsbench.errors import UserError, told_to_user
from marsbench.fetching import models as fetchable
from marsbench.fetching.fetch import fetch
from marsbench.forward.adapter import Adapted, Adapter, parted
from marsbench.json_lines import read_json
from marsbench.progress import Reporter
from marsbench.training.adapter_files import CONFIG, SHIPPED, base_of, is_adapter, read_adapter, read_head
from marsbench.training.medusa import MedusaHeads
from marsbench.training.records import finished, publish, weights_hash, weights_with_adapter
from marsbench.training.stages import BLOCKWISE, STAGES

_NEEDED = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")  # files of a hub checkpoint that are loaded
# A config with these fields describes a Qwen2 model, under any name.
_QWEN2_FIELDS = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"}
_QWEN2_FIELDS |= {"rms_norm_eps", "vocab_size"}


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel
    own_tokenizer: PreTrainedTokenizerBase | None  # None where the folder holds none and none was asked for
    weights: str  # SHA-256 of the weights files
    stage: str | None  # the stage that trained it, None where it does not say
    heads: MedusaHeads | None = None  # Medusa heads, where the checkpoint has some
    base: str | None = None  # the pretrained model that it is, or was trained from, where it says so
    acceptance: tuple[float, ...] = ()  # how often its drafts were right, as its record has it

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.own_tokenizer is None:
            where, fix = str(self.model.name_or_path), "copy it from the checkpoint it was made of"
            raise UserError("the checkpoint has no tokenizer.json", where=where, fix=fix)
        return self.own_tokenizer

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def mask_id(self) -> int | None:
        return mask_of(self.own_tokenizer)

    @property
    def origin(self) -> dict[str, str]:
        """What rows say of the pretrained model behind it, beside their provenance; nothing where there is none."""
        return {} if self.base is None else {"base": self.base}

    @property
    def knows_masks(self) -> bool:
        """Whether its training showed it masks; True where it does not say how it was trained."""
        return self.stage is None or STAGES[self.stage].objective in BLOCKWISE

    @property
    def shifted(self) -> bool:
        """Whether it was trained to predict masked tokens where the token before them stands."""
        return self.stage is not None and STAGES[self.stage].variant.alignment == "paper"


def mask_of(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    mask: int | None = getattr(tokenizer, "mask_token_id", None)
    return tokenizer.get_vocab().get("<|mask|>") if mask is None and tokenizer is not None else mask


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for all that a GPU has been given to do, before the clock is read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
    needs_tokenizer: bool = True, stage: str | None = None, adapter: str | Path | None = None,
) -> Loaded:  # fmt: skip
    """Load a checkpoint folder (or a hub name, or a model of `fetching`); never runs code that comes with a checkpoint.

    An adapter's folder is loaded with the model that it was trained on, where that still lies where it did. `stage` is
    what a checkpoint counts as that does not say its own; `adapter` the folder of a gated one that is to act on it.
    `UserError` where the folder is missing, incomplete or cut short, or the adapter is not for it.
    """
    path = SHIPPED.get(str(path), path)
    if is_adapter(Path(path)):
        path, adapter = base_of(Path(path)), adapter or path
    folder = Path(path)
    if not (folder.is_absolute() or folder.exists() or str(path).startswith(".")):
        folder = _fetched(str(path))
    _check_folder(folder, needs_tokenizer)
    # transformers and safetensors raise a dozen kinds of errors for a file cut short.
    fix = "a file may be cut short; copy or train it again"
    with told_to_user("the checkpoint cannot be loaded", Exception, where=path, fix=fix):
        config, renamed = _config(folder)
        opened: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
        model: PreTrainedModel = opened[0]
        torch.nn.Module.to(model, device).eval()  # type: ignore[no-untyped-call]
        has_tokenizer = (folder / "tokenizer.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config) if has_tokenizer else None
    if unfit := sorted([*opened[1]["missing_keys"], *(opened[1]["unexpected_keys"] if renamed else [])]):
        what = f"the weights do not fit a {type(model).__name__}: {', '.join(unfit[:3])}"
        raise UserError(what, where=str(path), fix="choose a checkpoint of an architecture that transformers knows")
    if (head := read_head(folder)) is not None:
        nothing = torch.zeros(model.config.get_text_config().hidden_size)  # what acts on masks is the head alone
        model = cast(PreTrainedModel, Adapted(model, Adapter(nothing, {}, head)))
    heads = MedusaHeads.load(folder, dtype=dtype, device=device)
    if record := finished(folder):
        stage, base = str(record.recipe["stage"]), (record.recipe["pretrained"] or {}).get("base")
    else:
        fetched = folder / fetchable.RECORD
        base = str(read_json(fetched, mend="fetch it again")["name"]) if fetched.is_file() else None
    weights, acceptance = (record.weights, record.acceptance) if record else (weights_hash(folder), ())
    loaded = Loaded(model, tokenizer, weights, stage, heads, base, acceptance)
    return loaded if adapter is None else with_adapter(loaded, adapter)


def with_adapter(loaded: Loaded, adapter: str | Path) -> Loaded:
    """A checkpoint with a gated adapter on it, and its tokenizer; `UserError` where it is none, or not for this one."""
    folder, (alone, active) = Path(adapter), parted(loaded.model)
    if active is not None:
        raise UserError("this checkpoint already has an adapter", fix="give the checkpoint without an adapter")
    record = finished(folder)
    if record is None or record.base_weights is None:
        raise UserError("this is no gated adapter", where=str(folder), fix="train one: marsbench train mars_gated")
    if record.base_weights != loaded.weights:
        raise UserError("the adapter was trained on other weights", where=str(folder), fix="see its marsbench.json")
    if weights_hash(folder) != record.weights:
        fix = "copy it again"
        raise UserError("the adapter is damaged: its weights are not those of its record", where=str(folder), fix=fix)
    adapted = Adapted(alone, read_adapter(folder, alone))
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else loaded.own_tokenizer
    weights = weights_with_adapter(loaded.weights, record.weights)
    return replace(
        loaded, model=cast(PreTrainedModel, adapted), own_tokenizer=tokenizer, weights=weights,
        stage=str(record.recipe["stage"]), heads=None, acceptance=record.acceptance,
    )  # fmt: skip


def _fetched(name: str) -> Path:
    if fetchable.is_known(name):
        return fetch(name, Reporter().say)
    try:
        with hub.from_cache_if_out_of_reach():
            return Path(snapshot_download(name, allow_patterns=list(_NEEDED)))
    except Exception as error:  # a dozen kinds: no network, no such checkpoint, no access, no valid name
        silent, first = "no copy of it is here, and the hub cannot be reached", str(error).splitlines()[0]
        what = f"there is no such folder, and no checkpoint from the hub: {silent if hub.out_of_reach() else first}"
        raise UserError(what, where=name, fix="check the name, the network, and that you have access to it") from error


def _config(folder: Path) -> tuple[PreTrainedConfig, bool]:
    """A checkpoint's configuration, and whether it was read as Qwen2's although it calls itself something else."""
    described = read_json(folder / "config.json", dict[str, Any], mend="copy or train the checkpoint again")
    if described.get("model_type") in CONFIG_MAPPING or not described.keys() >= _QWEN2_FIELDS:
        return AutoConfig.from_pretrained(folder), False
    own = {"model_type", "architectures", "auto_map"}
    return Qwen2Config(**{name: value for name, value in described.items() if name not in own}), True


def _check_folder(folder: Path, needs_tokenizer: bool) -> None:
    if not folder.is_dir():
        raise UserError("there is no such checkpoint", where=str(folder), fix="check the path, or train it")
    for name in ("config.json", *(["tokenizer.json"] if needs_tokenizer else []), "*.safetensors"):
        if not any(file.is_file() for file in folder.glob(name)):
            raise UserError(f"the checkpoint has no {name}", where=str(folder), fix="copy or train it again")


def checked_base(folder: str) -> Path:
    """A shipped checkpoint's folder, once its weights are found to be those of its record; `UserError` otherwise."""
    place, fix = Path(folder), "install marsbench again, or train everything with --from-scratch"
    record = finished(place, mend=fix)
    if record is None or record.weights != weights_hash(place):
        what = "missing" if record is None else "damaged: its weights are not those of its record"
        raise UserError(f"the shipped checkpoint is {what}", where=folder, fix=fix)
    return place


def ship(trained: Path, target: Path) -> None:
    """Write a checkpoint's shipped form: bf16, its record, and an adapter's tokenizer if its model knows no mask."""
    record = finished(trained)
    if record is None:
        raise UserError("this is no finished checkpoint", where=str(trained), fix="give what marsbench train printed")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if is_adapter(trained):
        for file in trained.glob("*.safetensors"):
            halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
            save_file(halves, partial / file.name)
        shutil.copy(trained / CONFIG, partial)
        if load(base_of(trained)).mask_id is None:
            AutoTokenizer.from_pretrained(trained).save_pretrained(partial)
    else:
        loaded = load(trained)
        torch.nn.Module.to(loaded.model, torch.bfloat16)
        loaded.model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
    publish(replace(record, weights=weights_hash(partial)), partial, target)


if __name__ == "__main__":
    ship(Path(sys.argv[1]), Path(sys.argv[2]))
