"""A checkpoint's generation settings: they do not change decoding, stay as they are, and are reported."""

import copy
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tools
import torch
from rich.console import Console
from test_serving_engine import Log, job
from tools import GOLDEN, invoke
from transformers import GenerationConfig, PreTrainedModel

from marsbench.answering import default_ids, left_out_in_words
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.line import TrainedStage
from marsbench.methods import Options, build_method
from marsbench.presets import preset
from marsbench.progress import Reporter
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.serving.messages import Settings
from marsbench.serving.process import _start
from marsbench.training.checkpoints import Loaded, load

EOS, PAD = 2, 0
PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7], [4]]
# Settings that change logits, that suppress EOS, that end early, that choose another loop or cache.
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.5}, "n-grams": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": 12}, "suppressed": {"suppress_tokens": list(range(3, 20))},
    "suppressed at first": {"begin_suppress_tokens": list(range(3, 20))}, "forced end": {"forced_eos_token_id": EOS},
    "beams": {"num_beams": 3}, "own lookup": {"prompt_lookup_num_tokens": 3},
    "static cache": {"cache_implementation": "static"}, "stop strings": {"stop_strings": ["a"]},
    "a dictionary": {"return_dict_in_generate": True, "output_scores": True},
    "Qwen2.5": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
}  # fmt: skip


def tiny(seed: int) -> PreTrainedModel:
    """A random model that repeats few tokens, so that penalties show."""
    more = {"intermediate_size": 32, "num_key_value_heads": 2, "initializer_range": 0.02}
    return tools.llama(seed, **tools.SMALLEST | more)


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and its draft, new for each test."""
    return tiny(0), tiny(1)


def tokens(model: PreTrainedModel, name: str, draft: PreTrainedModel) -> list[list[int]]:
    """The tokens of a method after each prompt, one prompt at a time."""
    method = build_method(name, Options(draft=draft))
    requests = [Request(prompt, 16) for prompt in PROMPTS]
    generations = decode(model, method, requests, eos_id=EOS, pad_id=PAD, batch_size=1)
    return [generation.tokens for generation in generations]


def ask(model: PreTrainedModel, settings: dict[str, Any]) -> GenerationConfig:
    """Give a model these settings; returns the object that holds them."""
    model.generation_config = GenerationConfig(**settings)
    return model.generation_config


@pytest.mark.parametrize("method", ["hf-generate", "hf-assisted"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_greedy_is_greedy_whatever_the_checkpoint_asks_for(
    method: str, kind: str, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    """Guards against a baseline that decodes by the checkpoint's generation_config, and not greedily as `ar`."""
    target, draft = models
    plain = tokens(target, "ar", draft)
    kept = [ask(model, SETTINGS[kind]) for model in models]
    before = copy.deepcopy([config.to_dict() for config in kept])
    assert tokens(target, method, draft) == plain
    assert all(model.generation_config is config for model, config in zip(models, kept, strict=True))
    assert [config.to_dict() for config in kept] == before, "a setting was written into the checkpoint's config"


def test_these_settings_would_have_changed_the_tokens(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Guards against models that no penalty changes, for which the test above checks nothing."""
    target, draft = models
    ids = torch.tensor([PROMPTS[0]])
    plain = tokens(target, "ar", draft)[0]
    for kind in ("repetition penalty", "n-grams", "suppressed"):
        ask(target, {**SETTINGS[kind], "max_new_tokens": 16, "eos_token_id": EOS, "pad_token_id": PAD})
        assert target.generate(ids)[0, ids.shape[1] :].tolist()[: len(plain)] != plain, kind  # type: ignore[operator]


def test_the_settings_are_put_back(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against settings restored in the wrong order where a model drafts for itself, or lost after an error."""
    target, _ = models
    plain, kept = tokens(target, "ar", target), ask(target, {"repetition_penalty": 1.5})
    assert tokens(target, "hf-assisted", target) == plain
    assert target.generation_config is kept
    kept = [ask(model, {"repetition_penalty": 1.5}) for model in models]
    monkeypatch.setattr(models[0], "forward", None)
    for method in ("hf-generate", "hf-assisted"):
        with pytest.raises(TypeError):
            tokens(models[0], method, models[1])
        assert all(model.generation_config is config for model, config in zip(models, kept, strict=True))


def test_what_is_left_out_is_said() -> None:
    """Guards against settings that vanish silently, and a remark on settings without effect."""
    model = tiny(0)
    ask(model, {**SETTINGS["Qwen2.5"], "suppress_tokens": [7], "min_length": 0, "num_beams": 1, "max_new_tokens": 9})
    assert "asks for repetition_penalty 1.1, suppress_tokens;" in left_out_in_words("DIR", model)
    ask(model, {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.0})
    assert left_out_in_words("DIR", model) == ""


def test_a_run_says_once_what_it_leaves_out(
    micro_checkpoints: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against settings of a checkpoint that a run does not report, or that each of its cells reports again."""
    log = io.StringIO()
    run = Run(preset("micro"), Workspace(micro_checkpoints.parent.parent.parent, "micro"), reporter=Reporter())
    monkeypatch.setattr(run.reporter, "_console", Console(file=log))
    asks = "it asks for repetition_penalty 1.1"
    monkeypatch.setattr("marsbench.answering.left_out_in_words", lambda name, model: asks)
    for _ in range(2):
        Checkpoints(run).load(TrainedStage.of("mars"))
    assert log.getvalue().count("repetition_penalty 1.1") == 1


def test_decode_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a user's checkpoint whose repetition penalty is silently left out."""
    shutil.copytree(GOLDEN / "ar", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6]}\n')
    arguments = ["--model", "model", "--prompt-ids", "prompts.jsonl", "--out", "out.jsonl", "--method", "ar"]
    ids = ["--max-new-tokens", "2", "--eos-id", "2", "--pad-id", "0"]
    monkeypatch.chdir(tmp_path)
    result = invoke("decode", *arguments, *ids)
    assert result.stderr.count("repetition_penalty 1.1") == 1, result.stderr


def test_every_eos_of_a_checkpoint_counts(micro_checkpoints: Path, tmp_path: Path) -> None:
    """Guards against a list of EOS read as none or without the tokenizer's, in command, server and evaluation."""
    folder = Path(shutil.copytree(next(micro_checkpoints.glob("ar_sft-*")), tmp_path / "two_ends"))
    settings = json.loads((folder / "generation_config.json").read_text())

    def name_ends(*ends: int) -> Loaded:
        (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ends}))
        return load(str(folder))

    loaded = load(str(folder))
    (uncut,) = decode(loaded.model, build_method("ar", Options()), [Request([5, 6, 7], 24)], eos_id=-1, pad_id=PAD)
    first, second, pad = loaded.tokenizer.eos_token_id, uncut.tokens[6], loaded.tokenizer.pad_token_id
    expected, loaded = uncut.tokens[: uncut.tokens.index(second)], name_ends(first, second)
    assert default_ids(loaded) == ([first, second], pad) and default_ids(loaded, 7, 8) == ([7], 8)
    loaded.model.generation_config.eos_token_id = second
    assert default_ids(loaded) == ([first, second], pad)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt_ids": [5, 6, 7]}))
    place = ["--model", str(folder), "--prompt-ids", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    invoke("decode", *place, "--method", "ar", "--max-new-tokens", "24")
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert (row["tokens"], row["finish"]) == (expected, "eos")
    log = Log(_start(Settings(str(folder), max_rows=1))[0])
    log.engine.submit(job(0, [5, 6, 7], 24))
    log.run()
    assert (log.tokens[0], log.ended[0].finish) == (expected, "eos")
    name_ends(*range(loaded.model.config.vocab_size))
    arguments = ["--benchmark", "mini_gsm8k", "--checkpoint", str(folder), "--method", "ar", "--limit", "3", "--json"]
    done = invoke("eval", *arguments, "--scale", "micro", "--output", str(tmp_path))
    (row,) = json.loads(done.stdout)
    assert row["tokens_per_forward"] == 1 and row["cut_answers"] == 0
    answers = [json.loads(line) for line in Path(row["answers"]).read_text().splitlines()]
    assert [(answer["emitted"], answer["response"]) for answer in answers] == [(1, "")] * 3
