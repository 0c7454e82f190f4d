"""What happens where the Hugging Face hub cannot be reached."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import datasets.config
import pytest
from huggingface_hub import constants

from marsbench import hub
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark, load_tasks
from marsbench.evaluation.local_data import Unavailable
from marsbench.training import checkpoints
from marsbench.transformers_generate import _tokenizer_mask

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
    """Guards against half a minute or more of retries for every name, and a message that blames something else."""
    started = time.monotonic()
    with pytest.raises(UserError, match="hub cannot be reached") as raised:
        checkpoints.load("nobody/nothing")
    assert raised.value.where == "nobody/nothing"
    with pytest.raises(Unavailable, match=r"data of gsm8k .* cannot be reached"):
        load_tasks(benchmark("gsm8k"))
    assert _tokenizer_mask("nobody/nothing-either") is None
    assert time.monotonic() - started < BOUND_S
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE, "it may be there again later"


def test_what_is_in_the_cache_is_found(unreachable: Path) -> None:
    """Guards against a checkpoint that has been fetched before and is not found without a network."""
    place = unreachable / "models--somebody--something"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "snapshots" / "abc" / "config.json").write_text(json.dumps({}))
    assert checkpoints._fetched("somebody/something") == place / "snapshots" / "abc"


@pytest.mark.parametrize("variable", hub.VARIABLES)
def test_the_users_own_word_counts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a hub that is asked although somebody has said to leave it alone, or to insist on it."""
    monkeypatch.setattr(hub, "_answers", lambda _: pytest.fail("it was asked"))
    monkeypatch.setenv(variable, "0")
    assert not hub.out_of_reach()


def test_a_hub_that_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second request before every file, and a cache taken for the hub."""
    asked = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)

    for name in hub.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    hub._answers.cache_clear()
    for _ in range(3):
        with hub.from_cache_if_out_of_reach():
            assert not constants.HF_HUB_OFFLINE
    assert len(asked) <= 2  # the clock may reach the next minute in between
    hub._answers.cache_clear()
