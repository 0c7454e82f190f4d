"""The real scales: presets, chat data, training from a pretrained base, several processes, and what a table takes."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import datasets
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from hypothesis import assume, given
from hypothesis import strategies as st
from made_up import measured, plan_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tools import Result, in_company, invoke
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from marsbench import presets
from marsbench.errors import UserError
from marsbench.files import PACKAGE
from marsbench.line import Line, TrainedStage
from marsbench.presets import Preset, preset, scales
from marsbench.rows.kinds import TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.graph import Known, trainings
from marsbench.running.plans import TablePlan
from marsbench.running.run import Run
from marsbench.studies import studies
from marsbench.studies.lines import BLOCK_SIZES, HEADED_MARS, MARS_STAGES
from marsbench.training import chat_data, checkpoints, records
from marsbench.training.chat_data import read_chat_data, segments, text_turns
from marsbench.training.checkpoints import ship
from marsbench.training.data import in_batches, shuffled_passes
from marsbench.training.stages import STAGES, lineage, recipe, wider
from marsbench.training.tokenizer import CHAT_TEMPLATE, prepare_for_chat
from marsbench.training.trainer import share_of_batch

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One plus one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "Four."},
]
REAL = ["0.5b", "7b"]  # the paper's scales


def base_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like a pretrained Qwen2.5 base's: no `<|mask|>`, and an EOS that ends documents, not turns."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["One plus one is two. system user assistant"] * 10, bpe)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], pad_token=special[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_base(folder: Path, *, spare_rows: int) -> Path:
    """A tiny pretrained checkpoint, with so many embedding rows that no token uses."""
    tokenizer = base_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + spare_rows, hidden_size=16, num_hidden_layers=2, intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_chat(file: Path, *conversations: Any) -> Path:
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return file


def train(stage: str, base: Path, chat_data: Path, output: Path, code: int = 0) -> Result:
    """Two steps of a stage and of its parents, by the command line."""
    start = ("--base", base, "--chat-data", chat_data, "--max-steps", "2", "--batch-size", "4")
    return invoke("train", stage, "--scale", "0.5b", *start, "--output", output, code=code)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), spare_rows=5)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = base_tokenizer()
    prepare_for_chat(tokenizer)
    return tokenizer


def test_real_scales_have_the_papers_hyper_parameters() -> None:
    """Guards against a budget or batch that is rounded or not the paper's, and a Qwen2.5 trained from noise."""
    for scale in REAL:
        chosen = recipe(preset(scale), "ar_sft")
        assert (chosen.budget.batch_size, chosen.budget.epochs, chosen.budget.learning_rate) == (384, 5, 5e-6)
        assert (chosen.budget.adam_beta2, chosen.budget.weight_decay) == (0.999, 0.0)
        assert chosen.budget.total_steps(384_000, 1) == 5000
        assert chosen.budget.total_steps(384_001, STAGES["ar_sft_2x"].passes) == 10_001
        assert preset(scale).max_new_tokens == 256
        assert lineage(preset(scale), "mars") == ["ar_sft", "mars"]
        assert chosen.parent is None
        for stage in ("base", "draft_mars"):
            with pytest.raises(UserError, match="does not train"):
                recipe(preset(scale), stage)
    rows = {scale: preset(scale).pretrained.rows_per_device for scale in REAL}  # type: ignore[union-attr]
    assert share_of_batch(384, 8, rows["0.5b"]["mars"]) == (48, 1)
    assert share_of_batch(384, 8, rows["7b"]["ar"]) == (24, 2)
    assert share_of_batch(384, 8, rows["7b"]["mars"]) == (12, 4)
    with pytest.raises(UserError, match="5 processes"):
        share_of_batch(384, 5)


@pytest.mark.parametrize("processes", [1, 2, 3, 6, 16, 384])
def test_the_batch_of_a_step_is_the_same_for_any_number_of_processes(processes: int) -> None:
    """Guards against a global batch that grows with the number of processes."""
    for limit in (None, 1, 5, 12, 48, 1000):
        rows, accumulation = share_of_batch(384, processes, limit)
        assert rows * accumulation * processes == 384 and rows <= (limit or 384)


def test_options_of_a_training_are_part_of_its_key(tmp_path: Path) -> None:
    """Guards against a checkpoint that is taken for one of another base, other data or another budget."""
    scale, data = preset("0.5b"), save_chat(tmp_path / "chat.jsonl", TALK)
    changes: Any = [{}, {"base": "other/base"}, {"chat_data": str(data)}, {"steps": 7}, {"batch_size": 8}]
    keys = {recipe(scale.adapted(**change), "mars").key for change in changes}
    save_chat(data, TALK, TALK)
    keys.add(recipe(scale.adapted(chat_data=str(data)), "mars").key)
    assert len(keys) == len(changes) + 1
    with pytest.raises(UserError, match="trains its own base"):
        preset("mini").adapted(base="other/base")
    brief = preset("mini").adapted(steps=100).world
    assert brief is not None and brief.pretraining.cycle == brief.pretraining.steps == 100, "the rate reaches its peak"
    assert brief.pretraining.part(0.001).steps == 1 and wider({"num_key_value_heads": 1}, 0.5).popitem()[1] == 1


def test_a_base_is_a_model_alone_and_may_sample(base: Path, tmp_path: Path) -> None:
    """Guards against an adapter that training would drop, and settings of sampling that the first save refuses."""
    chats, own = save_chat(tmp_path / "chat.jsonl", TALK), shutil.copytree(base, tmp_path / "own")
    (own / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    train("ar_sft", own, chats, tmp_path)
    train("base_gated", base, chats, tmp_path)
    (adapter,) = (tmp_path / "runs" / "0.5b" / "checkpoints").glob("base_gated-*[0-9a-f]")
    assert "has an adapter" in train("ar_sft", adapter, chats, tmp_path, code=2).stderr


def test_assistant_turns_are_learned_as_far_as_they_fit(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Guards against learning questions, turns that are not taught to end, torn texts, and beginnings cut off."""
    parts = segments(chat_tokenizer, TALK)
    assert [text for text, learned in parts if learned] == ["Two.<|im_end|>", "Four.<|im_end|>"]
    rendered = chat_tokenizer.apply_chat_template(TALK, tokenize=False)
    assert "".join(text for text, _ in parts) == rendered.rstrip("\n")
    chat = read_chat_data(str(save_chat(tmp_path / "chat.jsonl", TALK)), chat_tokenizer, 512)
    (sequence,) = chat.sequences
    learned = [token for token in sequence["labels"] if token != -100]
    assert chat_tokenizer.decode(learned) == "Two.<|im_end|>Four.<|im_end|>"
    assert sequence["input_ids"] == chat_tokenizer(rendered.rstrip("\n")).input_ids
    assert (chat.lengths, chat.labelled, chat.dropped) == ([len(sequence["input_ids"])], [len(learned)], 0)
    unanswered = [{"role": "user", "content": "Hello?"}]
    file = str(save_chat(tmp_path / "chat.jsonl", TALK, unanswered, TALK))
    (sequence, _) = read_chat_data(file, chat_tokenizer, 512).sequences
    first = next(at for at, label in enumerate(sequence["labels"]) if label != -100)
    cut = read_chat_data(file, chat_tokenizer, first + 2)
    assert [row["input_ids"] for row in cut.sequences] == [sequence["input_ids"][: first + 2]] * 2
    assert cut.dropped == 1
    with pytest.raises(UserError, match="no conversation has an assistant's turn"):
        read_chat_data(file, chat_tokenizer, first)
    chat_tokenizer.chat_template = (  # as Qwen3 writes it, which thinks in the last answer alone
        "{% for m in messages %}{{ m.role }}: {{ '<think>' if m.role == 'assistant' and loop.last }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match="does not write message"):
        segments(chat_tokenizer, TALK)
    chat_tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        prepare_for_chat(chat_tokenizer)


def test_chat_data_is_tokenised_once(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against tokenising again, for minutes, before each training, and against the rows of another file."""
    file = save_chat(tmp_path / "chat.jsonl", TALK)
    first = list(read_chat_data(str(file), chat_tokenizer, 512).sequences)
    monkeypatch.setattr(chat_data, "segments", lambda *_: pytest.fail("tokenised again"))
    assert list(read_chat_data(str(file), chat_tokenizer, 512).sequences) == first
    save_chat(file, TALK, TALK)
    with pytest.raises(pytest.fail.Exception):
        read_chat_data(str(file), chat_tokenizer, 512)


BAD_DATA = {
    "another column": (b'{"text": "hello"}\n', "line 1", "messages: Field required"),
    "empty": (b"", "chat.jsonl", "empty"),
    "Latin-1": (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}\n', "line 1", "not UTF-8"),
    "cut short": (json.dumps({"messages": TALK}).encode() + b'\n{"messages": [{"ro', "line 2", "Invalid JSON"),
    "no role": (b'{"messages": [{"content": "hello"}]}\n', "line 1", "message 1 has no role"),
    "no content": (b'{"messages": [{"role": "user", "content": null}]}\n', "line 1", "message 1 has no content"),
    "unknown role": (b'{"messages": [{"role": "oracle", "content": "42"}]}\n', "line 1", "unknown role 'oracle'"),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}\n', "line 1", "hex escape"),
    "a list of parts": (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}\n', "line 1", "no content"),
    "no turns": (b'{"messages": "hello"}\n', "line 1", "not a list"),
}


@given(
    beside=st.dictionaries(st.sampled_from(["tool_calls", "thinking", "image"]), st.just("f"))
    | st.dictionaries(st.text(), st.just([{"name": "f"}]))
    | st.sampled_from([{"weight": 0}, {"train": False}]),
    content=st.sampled_from(["", " \n", "Let me see."]),
)
def test_an_answer_is_learned_whole_or_refused(beside: dict[str, Any], content: str) -> None:
    """Guards against a model taught to say nothing where a turn calls a tool, or to say half of what a turn holds."""
    assume(not beside.keys() & {"role", "content"})
    turns = [TALK[1], {"role": "assistant", "content": content, "audio": None, "weight": 1, **beside}]
    if beside or not content.strip():
        with pytest.raises(ValueError, match="message 2 "):
            text_turns(turns)
    else:
        assert text_turns(turns)[1] == {"role": "assistant", "content": content}


@pytest.mark.parametrize("mistake", BAD_DATA)
def test_bad_chat_data_gets_one_clear_message(mistake: str, base: Path, tmp_path: Path) -> None:
    """Guards against tracebacks, and messages that do not say where."""
    content, where, reason = BAD_DATA[mistake]
    (tmp_path / "chat.jsonl").write_bytes(content)
    result = train("ar_sft", base, tmp_path / "chat.jsonl", tmp_path, code=2)
    assert str(tmp_path / "chat.jsonl") in result.stderr and where in result.stderr and reason in result.stderr
    assert not list(tmp_path.glob("runs/*/checkpoints/ar_sft*/*.safetensors"))


def test_a_hub_data_set_is_used_as_far_as_it_is_text(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a whole data set refused, or rows left out without a word, because of one call of a tool."""
    call = [*TALK[:2], {"role": "assistant", "content": None}, {"role": "environment", "content": "2"}]
    rows = [{"messages": messages, "source": "x"} for messages in (TALK, call, TALK)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "hub")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.load_from_disk(tmp_path / "hub"))
    for _ in range(2):  # tokenised, then found in the cache
        chat = read_chat_data("somebody/chat", chat_tokenizer, 512)
        assert (len(chat.sequences), chat.dropped) == (2, 1)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list([{"text": "hello"}]))
    with pytest.raises(UserError, match="no column messages"):
        read_chat_data("somebody/text", chat_tokenizer, 512)


def test_passes_are_whole_and_differ() -> None:
    """Guards against conversations left out or read twice in a pass, and against passes in the file's order."""
    drawn = shuffled_passes(10, 25, seed=0)
    passes = drawn[:10], drawn[10:20], drawn[20:]
    assert all(sorted(numbers) == list(range(10)) for numbers in passes[:2]) and len(set(passes[2])) == 5
    assert passes[0] != passes[1]
    sizes = [7, 1, 9, 3, 8, 2, 6, 4, 5, 0]
    assert sorted(in_batches(drawn, sizes, 5, seed=0)) == sorted(drawn)


@pytest.mark.parametrize(("spare_rows", "grown"), [(5, 0), (0, 1)])
def test_training_from_a_pretrained_base(spare_rows: int, grown: int, tmp_path: Path) -> None:
    """Guards against a checkpoint without mask token or end of turn, and embeddings of the wrong size."""
    base = save_base(tmp_path / "base", spare_rows=spare_rows)
    data = save_chat(tmp_path / "chat.jsonl", *[TALK] * 6)
    folder = Path(train("mars", base, data, tmp_path).stdout.strip())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(base)
    assert tokenizer.mask_token == "<|mask|>" and tokenizer.mask_token_id < model.config.vocab_size
    assert model.config.vocab_size == before.config.vocab_size + grown
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
    assert not torch.equal(model.model.norm.weight, before.model.norm.weight)
    record = records.finished(folder)
    assert record is not None and record.steps == 2
    assert len(record.losses) == 2 and all(math.isfinite(loss) for loss in record.losses)
    assert record.recipe["pretrained"]["base"] == str(base)
    names = {path.name.rpartition("-")[0] for path in folder.parent.iterdir()}
    assert names == {"ar_sft", "mars-b4"}, "the base is not trained"


def renamed(base: Path, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A copy of a checkpoint that names an architecture of its own, with code that must not run."""
    shutil.copytree(base, folder)
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "mars_qwen2", "architectures": ["MarsQwen2ForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "modeling.MarsConfig", "AutoModelForCausalLM": "modeling.MarsQwen2ForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise RuntimeError('code of the checkpoint was run')")
    if weights:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_release_loads_as_qwen2_or_is_refused(base: Path, tmp_path: Path) -> None:
    """Guards against a release that loads only by running code from the hub, and weights left out or random."""
    loaded = checkpoints.load(renamed(base, tmp_path / "custom"))
    plain = checkpoints.load(base)
    assert type(loaded.model) is Qwen2ForCausalLM
    ids = torch.arange(12).view(1, -1)
    assert torch.equal(loaded.model(ids).logits, plain.model(ids).logits)
    assert loaded.tokenizer("One plus").input_ids == plain.tokenizer("One plus").input_ids
    weights = load_file(base / "model.safetensors")
    more = {**weights, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}
    fewer = {name: value for name, value in weights.items() if not name.endswith("q_proj.bias")}
    for number, unfit in enumerate((more, fewer)):
        with pytest.raises(UserError, match="do not fit"):
            checkpoints.load(renamed(base, tmp_path / str(number), unfit))


def test_a_table_takes_published_checkpoints_unless_told_to_train(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against 200 GPU hours for a checkpoint that is published, and against a stage that forgets its name."""
    trained: list[str] = []
    monkeypatch.setattr(Checkpoints, "train", lambda self, chosen: trained.append(chosen.stage))
    scale = preset("7b").with_checkpoints([f"ar_sft={base}"])
    ready = of(scale, tmp_path)
    assert ready.load(TrainedStage.of("ar_sft")).stage == "ar_sft"
    assert ready.path(TrainedStage.of("base")) == "Qwen/Qwen2.5-7B-Instruct"
    assert ready.path(TrainedStage("mars", 8)) == preset("7b").published["mars-b8"]
    assert ready.path(TrainedStage.of("ar_sft", 8)) == str(base), "a window of 8 is no other checkpoint"
    named = of(scale.with_checkpoints(["mars=four", "mars-b16=sixteen"]), tmp_path)
    paths = [named.path(TrainedStage("mars", size)) for size in (4, 8, 16)]
    assert paths == ["four", preset("7b").published["mars-b8"], "sixteen"]
    assert trained == []
    of(scale.with_checkpoints([], train_all=True), tmp_path).path(TrainedStage.of("ar_sft"))
    assert trained == ["ar_sft"]
    with pytest.raises(UserError, match="names no stage"):
        scale.with_checkpoints(["mars"])


def test_what_cannot_be_asked_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against cells that are skipped in silence, and checkpoints fetched for nothing."""
    (tmp_path / "data").mkdir()
    lines = tuple(Line(name, name, "medusa", "ar") for name in "AB")
    for benchmarks, skipped in {
        ("mini_gsm8k", "mini_gpqa"): ["A, mini_gsm8k", "A, mini_gpqa", "B, mini_gsm8k", "B, mini_gpqa"],
        ("gsm8k", "gpqa"): ["gsm8k", "gpqa"],
    }.items():  # fmt: skip
        run = Run(preset("7b"), Workspace(tmp_path, "7b"), benchmarks=benchmarks, data_dir=tmp_path / "data")
        rows = measured(run, TablePlan("0", "lines without a checkpoint", lines))
        assert [row.status for row in rows] == ["skipped"] * 4 and not any(isinstance(row, TrainingRow) for row in rows)
        assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == skipped


def test_accumulation_makes_up_the_batch(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against accumulated losses that are summed, or a last batch that counts for more. (bf16: 1e-3.)"""
    data = save_chat(tmp_path / "chat.jsonl", *[TALK, TALK[1:3], TALK[:3]] * 3)
    curves = []
    for share in ((4, 1), (1, 4)):
        monkeypatch.setattr("marsbench.training.trainer.share_of_batch", lambda *_, share=share: share)
        record = records.finished(Path(train("ar_sft", base, data, tmp_path / str(share)).stdout.strip()))
        assert record is not None and record.steps == 2
        curves.append(record.losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


STEPS = 10


def losses(output: Path, processes: int) -> dict[str, list[float]]:
    """Stage -> loss curve at scale micro on so many processes; the last stage draws weights at random."""
    command = ["train", "mars_no_sft_released", "--scale", "micro", "--max-steps", str(STEPS), "--output", str(output)]
    outputs = in_company(output, processes, *command)
    assert f"{output}/runs/micro/checkpoints" in outputs[0] and outputs[1:] == [""] * (processes - 1), "one prints"
    finished = map(records.finished, output.glob("runs/micro/checkpoints/*"))
    trained = [record for record in finished if record]
    assert {record.provenance["processes"] for record in trained} == {processes}
    return {record.recipe["stage"]: record.losses for record in trained}


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """Guards against another batch, order, rate or weights (1e-3 and more) on two processes; sums differ by 1e-7."""
    alone, together = losses(tmp_path / "one", 1), losses(tmp_path / "two", 2)
    assert alone.keys() == together.keys() == {"base", "ar_sft", "mars_no_sft_released"}
    for stage in alone:
        assert len(alone[stage]) == STEPS
        assert together[stage] == pytest.approx(alone[stage], rel=1e-5), stage


LAUNCHED = [file for file in sorted((PACKAGE / "presets" / "launch").glob("*.yaml")) if file.stem[:4] != "ray_"]


@pytest.mark.parametrize("file", LAUNCHED, ids=lambda file: file.stem)
def test_launch_configurations_are_ones_that_accelerate_reads(file: Path) -> None:
    """Guards against a misspelt key, which accelerate refuses only when the training on GPUs starts."""
    config = load_config_from_file(str(file))
    assert 384 % config.num_processes == 0
    layer = getattr(config, "fsdp_config", {}).get("fsdp_transformer_layer_cls_to_wrap")
    assert layer in (None, *Qwen2ForCausalLM._no_split_modules)


def test_a_scale_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against code that asks for scales by name: a new one is listed, planned, checked, shown and trained."""
    shutil.copytree(PACKAGE / "presets", tmp_path / "presets")
    own = yaml.safe_load((PACKAGE / "presets/micro.yaml").read_text(encoding="utf-8"))
    own |= {"summary": "half of micro", "place": 5, "caveat": "It is very small.", "grid": "micro"}
    (tmp_path / "presets/nano.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    monkeypatch.setattr(presets, "_FILES", tmp_path / "presets")
    commands = (
        (["list", "scales"], "half of micro"),
        (["plan", "--table", "2", "--scale", "nano"], "Estimates, not measurements"),
        (["plan", "--sweep", "--scale", "nano"], "A sweep at scale nano"),
        (["doctor", "--scale", "nano"], "ok"),
    )
    for words, output in commands:
        assert output in invoke(*words).output, words
    assert presets.scales_shown_with("nano") == ["mini", "135m", "0.5b", "7b", "nano"]
    assert presets.scales_shown_with("micro") == ["micro"]
    assert recipe(preset("nano"), "base").model == recipe(preset("micro"), "base").model
    preset.cache_clear()


@pytest.mark.parametrize(
    ("scale", "table"), [*((scale, key) for scale in ("mini", "7b") for key, study in studies().items() if study.plan),
                         *((scale, "all") for scale in scales())],
)  # fmt: skip
def test_every_table_can_be_planned_at_every_scale(
    scale: str, table: str, monkeypatch: pytest.MonkeyPatch, wide_terminal: None
) -> None:
    """Guards against a plan that asks the hub, knows only some tables and scales, or leaves out what costs most."""
    monkeypatch.setattr(socket, "socket", None)
    for options in ([], ["--train"]):
        result = invoke("plan", "--table", table.removeprefix("table"), "--scale", scale, *options)
        assert ("An estimate, not a measurement" if table == "all" else "Estimates, not measurements") in result.output
    if table == "all":
        for line in ("training mars, B = 4 ", "answering with mars, B = 4 ", "racing Speed, 1 at once (alone)"):
            assert f"│ {line}" in result.output
        assert re.search(r"it may be: [\d,.]+ hours of one device", result.output)


def test_training_hours_are_the_papers() -> None:
    """Guards against a plan with days of unwanted training, and hours without the second pass or a parent."""

    def hours(table: str, scale: Preset) -> dict[str, float]:
        tasks = trainings(plan_of(table).stages, scale, Known(scale))
        return {task.trained.slug: task.seconds / 3600 for task in tasks}

    assert hours("table2", preset("7b")) == {}
    assert hours("table2", preset("7b").with_checkpoints([], train_all=True)) == {
        "ar_sft": 100, "ar_sft_2x": 200, "block_diffusion-b4": 202, "mars_no_sft-b4": 202, "mars-b4": 202,
        "block_diffusion_shifted-b4": 202, "mars_paper_alignment-b4": 202,
    }  # fmt: skip
    own = len(BLOCK_SIZES) * len(MARS_STAGES) + len(HEADED_MARS)
    assert len(hours("table8", preset("mini"))) == 1 + own, "every block size, parents once, of a shipped base"


WEIGHTS = "model.safetensors"


@pytest.fixture
def shipping(tmp_path: Path, micro_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Preset:
    """Scale micro with a base that is shipped with the package."""
    (trained,) = micro_checkpoints.glob("base-*")
    ship(trained, tmp_path / "bases" / "base")
    monkeypatch.setattr(presets, "_beside", lambda place: str(tmp_path / "bases" / place.removeprefix("./")))
    return replace(preset("micro"), published={"base": presets._beside("./base")})


def of(scale: Preset, folder: Path) -> Checkpoints:
    return Checkpoints(Run(scale, Workspace(folder / "out", scale.scale)))


def test_a_shipped_base_is_the_trained_one_in_bf16(shipping: Preset, micro_checkpoints: Path) -> None:
    """Guards against a base that is shipped from elsewhere, in full width, or without its tokenizer."""
    (trained,) = micro_checkpoints.glob("base-*")
    folder = Path(shipping.published["base"])
    full, half = load_file(trained / WEIGHTS), load_file(folder / WEIGHTS)
    assert {name: tensor.bfloat16() for name, tensor in full.items()}.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in full.items())
    record = records.finished(folder)
    assert record is not None and record.recipe["stage"] == "base" and record.weights == records.weights_hash(folder)
    assert checkpoints.load(folder).mask_id == checkpoints.load(trained).mask_id


def test_stages_start_from_the_shipped_base(shipping: Preset, tmp_path: Path) -> None:
    """Guards against a shipped base trained again, one key for two bases, and `--from-scratch` that is not."""
    assert lineage(shipping, "mars") == ["ar_sft", "mars"] and lineage(preset("micro"), "mars")[0] == "base"
    assert recipe(shipping, "ar_sft").key != recipe(preset("micro"), "ar_sft").key
    ready, short = of(shipping, tmp_path), replace(shipping.finetuning, steps=1)
    assert ready.path(TrainedStage("base", None)) == shipping.published["base"]
    folder = Path(of(replace(shipping, finetuning=short), tmp_path).path(TrainedStage("ar_sft", None)))
    started, ended = (load_file(Path(file) / WEIGHTS) for file in (shipping.published["base"], folder))
    assert all((ended[name] - tensor.float()).abs().max() < 0.02 for name, tensor in started.items()), "not its child"
    assert not list(folder.parent.glob("base-*"))
    scratch = shipping.with_checkpoints([], train_all=True)
    assert lineage(scratch, "ar_sft") == ["base", "ar_sft"] and scratch.ready_checkpoint("base", None) is None


def test_what_is_shipped_for_a_seed_is_of_that_seed(shipping: Preset, micro_checkpoints: Path, tmp_path: Path) -> None:
    """Guards against one seed's checkpoint measured as another's, trained again, or that nothing replaces."""
    (trained,), mars = micro_checkpoints.glob("mars-b4-*"), TrainedStage.of("mars")
    ship(trained, Path(presets._beside("./trained/micro/seed3/mars")))
    of_three, of_four = shipping.of_seed(3), shipping.of_seed(4)
    assert of_four == shipping and of_three.published["base"] == shipping.published["base"]
    assert Path(of(of_three, tmp_path).path(mars)).parts[-3:] == ("micro", "seed3", "mars")
    assert not of(of_three, tmp_path).is_to_train(mars) and of(of_four, tmp_path).is_to_train(mars)
    assert of_three.with_checkpoints(["mars=elsewhere"]).ready_checkpoint(*mars) == "elsewhere"
    assert of_three.with_checkpoints([], train_all=True).ready_checkpoint(*mars) is None


def test_a_missing_or_damaged_base_is_one_clear_line(shipping: Preset, tmp_path: Path) -> None:
    """Guards against a traceback from a loader, and against training from weights that are not the record's."""
    folder = Path(shipping.published["base"])
    weights = load_file(folder / WEIGHTS)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, folder / WEIGHTS, metadata={"format": "pt"})
    for stage in ("base", "ar_sft"):
        with pytest.raises(UserError, match="the shipped checkpoint is damaged"):
            of(shipping, tmp_path).path(TrainedStage(stage, None))
    (folder / records.RECORD).write_text("{")
    with pytest.raises(UserError, match=r"(?s)the file is damaged.*--from-scratch"):
        of(shipping, tmp_path).path(TrainedStage("base", None))
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"(?s)the shipped checkpoint is missing.*--from-scratch"):
        of(shipping, tmp_path).path(TrainedStage("base", None))


@pytest.mark.slow
def test_a_wheel_brings_the_bases_and_decodes(tmp_path: Path) -> None:
    """Guards against bases that are missing in the wheel: a user's first command would train for an hour."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PACKAGE.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    for part, most in (("/bases/", 8), ("/trained/", 14)):
        assert sum(file.compress_size for file in ZipFile(wheel).infolist() if part in file.filename) < most * 2**20
    ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    decoding = "from marsbench.cli import app\nfor stage in ('base', 'short_base'):\n    app(['decode', '--model', "
    decoding += "f'site/marsbench/presets/bases/mini/{stage}', '--method', 'ar', '--max-new-tokens', '8', "
    decoding += "'--prompt-ids', 'in.jsonl', '--out', f'{stage}.jsonl'], standalone_mode=False)"
    alone = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", decoding], cwd=tmp_path, env=alone, check=True)
    for stage in ("base", "short_base"):
        assert json.loads((tmp_path / f"{stage}.jsonl").read_text())["forwards"] >= 1
