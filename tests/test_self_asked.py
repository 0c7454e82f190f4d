"""Prompts that a model asks itself: from where a user's turn begins, without what is no question."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from marsbench.cli import app
from marsbench.decoding.generation import Generation
from marsbench.distilling.self_asked import TEMPERATURE, self_asked
from marsbench.errors import UserError
from marsbench.progress import Reporter
from marsbench.training.checkpoints import Loaded, load


@pytest.fixture(scope="module")
def loaded(micro_checkpoints: Path) -> Loaded:
    return load(next(micro_checkpoints.glob("ar_sft-*")), device="cpu")


def asking(loaded: Loaded, says: list[tuple[str, str]]) -> tuple[Any, list[Any]]:
    """A checkpoint that says these texts in turn, each with how it ends; and what it was asked."""
    asked: list[Any] = []

    def decode(requests: Any, on_finished: Any, **how: Any) -> None:
        for request in requests:
            text, finish = says[len(asked) % len(says)]
            ids = loaded.tokenizer(text, add_special_tokens=False).input_ids
            asked.append((request, how))
            on_finished(len(asked), Generation(ids, [1] * len(ids), 1, finish))  # type: ignore[arg-type]

    return SimpleNamespace(loaded=loaded, decode=decode), asked


def test_questions_are_whole_and_asked_once(loaded: Loaded, tmp_path: Path) -> None:
    """Guards against prompts that are cut, next to nothing, doubled, or full of special tokens."""
    mask, good = str(loaded.tokenizer.eos_token), [f"how many apples has Tom {number} ?" for number in range(4)]
    says = [(good[0], "eos"), (good[0], "eos"), (good[1], "length"), (good[2] + mask + good[3], "eos"), ("a", "eos")]
    answering, asked = asking(loaded, [*says, (good[1], "eos"), (good[2], "eos")])
    file = self_asked(answering, 3, tmp_path / "own.jsonl", Reporter())
    found = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    assert found[0] == loaded.tokenizer.decode(loaded.tokenizer(good[0]).input_ids, skip_special_tokens=True).strip()
    assert len(found) == len(set(found)) == 2, "six were drawn for three"
    requests = [request for request, _ in asked]
    assert {request.temperature for request in requests} == {TEMPERATURE} and len({one.seed for one in requests}) == 6
    text = loaded.tokenizer.decode(requests[0].prompt_ids)
    whole = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert whole.startswith(text) and "Hello" not in text
    before = len(asked)
    assert self_asked(answering, 3, file, Reporter()) == file and len(asked) == before, "what is there stays"


def test_a_model_that_asks_nothing_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    """Guards against an adapter that is trained on noise."""
    with pytest.raises(UserError, match="asked 0"):
        self_asked(asking(loaded, [("a", "eos")])[0], 3, tmp_path / "own.jsonl", Reporter())
    assert not list(tmp_path.iterdir())


def test_prompts_come_from_a_file_or_from_the_model(tmp_path: Path) -> None:
    """Guards against prompts that are given and not read."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi?"}\n')
    both = ["--prompts", str(tmp_path / "in.jsonl"), "--self-asked", "5"]
    for given in ([], both):
        done = CliRunner().invoke(app, ["distill", "--checkpoint", "x", "--out", str(tmp_path / "out.jsonl"), *given])
        assert done.exit_code != 0 and "--self-asked" in str(done.output) + str(done.exception)
