"""Asking a benchmark: limits that belong to it, and prompts that the context has no room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from marsbench.answering import Answering
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import GROUPS, benchmark
from marsbench.evaluation.harness import (
    AnswerLog,
    Scored,
    answer,
    cut_in_words,
    prepare,
    room_for_prompt,
    without_beginning,
)
from marsbench.methods import Options, build_method
from marsbench.training.checkpoints import Loaded
from marsbench.training.tokenizer import build_tokenizer

HERE = Path(__file__).parent
CONTEXT, LIMIT = 128, 4


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A checkpoint with a short context."""
    model = AutoModelForCausalLM.from_pretrained(HERE / "golden" / "ar", dtype=torch.float32).eval()
    model.config.max_position_embeddings = CONTEXT
    return Loaded(model, build_tokenizer(512, texts=500), "weights", None)


def ask(loaded: Loaded, log: AnswerLog, limit: int = LIMIT) -> Scored:
    """Two questions of BBH, whose prompts with their three examples are long."""
    exam = prepare(benchmark("bbh"), HERE / "data").first(2)
    method = build_method("ar", Options())
    return answer(exam, log, Answering(loaded, method, batch_size=2), limit, lambda done, asked: None)


def test_real_answers_have_the_papers_limit_at_every_scale() -> None:
    """Guards against real answers cut short by the limit of a small scale, and mini ones that run on for long."""
    assert {benchmark(name).answer_limit(96) for name in (*GROUPS["real"], "bbh_word_sorting")} == {256}
    assert {benchmark(name).answer_limit(96) for name in GROUPS["mini"]} == {96}


def test_prompts_that_lost_their_beginning_are_counted(loaded: Loaded, tmp_path: Path) -> None:
    """Guards against questions that go unread in silence, and a count that is lost with an interruption."""
    file = tmp_path / "log.jsonl"
    cuts, room = [one.prompt_cut for one in ask(loaded, AnswerLog(file)).answers], room_for_prompt(loaded.model, LIMIT)
    assert room == CONTEXT - LIMIT and min(cuts) > 0
    file.write_text(file.read_text().splitlines(keepends=True)[0])  # interrupted after the first answer
    assert [one.prompt_cut for one in ask(loaded, AnswerLog(file)).answers] == cuts
    assert "bbh: 2 of 2 prompts are longer than the 124 tokens" in cut_in_words("bbh", cuts, room)


def test_logs_without_the_count_still_load(tmp_path: Path) -> None:
    """Guards against answers of hours that a newer version asks for again."""
    (tmp_path / "log.jsonl").write_text(json.dumps({"doc_id": 0, "response": "four", "emitted": 2}) + "\n")
    assert AnswerLog(tmp_path / "log.jsonl").answers[0].prompt_cut == 0


def test_cut_prompts_are_said_in_one_line() -> None:
    """Guards against a warning that nobody can act on, or one where nothing was cut."""
    assert cut_in_words("bbh", [0, 947, 0, 1], 416) == (
        "bbh: 2 of 4 prompts are longer than the 416 tokens that the context leaves for them (the longest has 1,363); "
        "their beginnings are cut"
    )
    assert cut_in_words("gsm8k", [3], 5).endswith("leaves for it (the longest has 8); its beginning is cut")
    assert cut_in_words("bbh", [0, 0], 416) == cut_in_words("bbh", [], 416) == ""


def test_what_is_left_of_a_prompt_is_its_end() -> None:
    """Guards against a question that is cut instead of its examples, and a prompt that fits exactly and is cut."""
    assert without_beginning([1, 2, 3, 4], 3) == ([2, 3, 4], 1)
    assert without_beginning([1, 2, 3], 3) == ([1, 2, 3], 0)


def test_a_limit_that_leaves_no_room_for_prompts_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    """Guards against a slice from the wrong end where the limit is longer than the context."""
    for limit in (CONTEXT, CONTEXT + 5):
        with pytest.raises(UserError, match="no room for a prompt"):
            ask(loaded, AnswerLog(tmp_path / "log.jsonl"), limit)
