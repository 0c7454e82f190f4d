"""Where users meet the decoder: `model.generate(custom_generate=...)`, `marsbench decode` and `marsbench show`."""

import json
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
import tools
import torch
import transformers as hf
import typer
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from tools import GOLDEN, Models, decode_by_command
from torch import nn
from transformers.generation.streamers import TextIteratorStreamer
from typer._click.exceptions import ClickException

import marsbench
from marsbench import generate
from marsbench.cli import app
from marsbench.decoding.acceptance import METRICS
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request, seed_of
from marsbench.errors import UserError
from marsbench.methods import METHODS, OPTIONS, Decoding, Options, build_method, explained, method_class
from marsbench.show import SHADES, check_image, draw, shaded, shown
from marsbench.training.tokenizer import build_tokenizer

IDS = {"eos_token_id": 2, "pad_token_id": 0}


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, as `generate` wants them."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def test_generate_gives_what_transformers_gives(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against prompts cut, rows padded or ended in another way, and options that do not reach the method."""
    model, inputs = golden_models["mars"], padded(golden["prompts"][:5])
    theirs = model.generate(**inputs, max_new_tokens=40, do_sample=False, **IDS)
    ours = partial(model.generate, custom_generate=marsbench.generate, mask_id=3, **IDS)
    for method, options in (
        ("ar", {}), ("mars", {}), ("mars-verified", {"threshold": 0.5}), ("mars-verified", {"prefill_positions": 20}),
        ("speculative", {"draft": golden_models["ar"], "draft_length": 2}),
    ):  # fmt: skip
        tokens = ours(**inputs, max_new_tokens=40, do_sample=False, method=method, **options)
        assert torch.equal(tokens, theirs), method
    inputs = padded(golden["prompts"][2:3])
    output = ours(**inputs, max_new_tokens=96, method="mars", threshold=0.5, return_dict_in_generate=True)
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert [token for token in tokens if token != 2] == golden["decoding"][9]["rows"][2]["tokens"]


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_streams_are_those_of_transformers(skip_prompt: bool, golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against a streamer that takes the first token for the prompt, or does not get the prompt."""
    model, inputs = golden_models["mars"], padded(golden["prompts"][:1])
    arguments = {"max_new_tokens": 20, "do_sample": False, **IDS}
    texts, tokenizer = [], build_tokenizer(1024, texts=500)
    for options in ({}, {"method": "ar"}, {"method": "mars", "threshold": 0.7, "mask_id": 3}):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt)
        streamed = {"custom_generate": marsbench.generate, "token_streamer": streamer} | options
        (output,) = model.generate(**inputs, **arguments, **(streamed if options else {"streamer": streamer}))
        texts.append("".join(streamer))
    assert texts[0] == texts[1] != ""
    assert texts[2] == tokenizer.decode(output[inputs["input_ids"].shape[1] if skip_prompt else 0 :])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_return_sequences": 2, "do_sample": True, "top_k": 0}, "num_return_sequences"),
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"do_sample": True, "top_k": 5}, "TopK"), ({"method": "magic"}, "unknown method"),
        ({"method": "medusa"}, "heads"), ({"method": "mars", "mask_id": None}, "mask token"),
        ({"threshold": 3.0}, "out of range"), ({"threshold": "0.9"}, "threshold '0.9' is not a number"),
        ({"method": "ar", "threshold": 0.9}, "takes no threshold"),
        ({"block_size": "4"}, "window '4' is not a whole number"), ({"sampling_seed": "0"}, "sampling seed '0'"),
        ({"sampling_seed": 2**63}, "sampling seed 9223372036854775808 is out of range"),
        ({"mask_id": 10**6}, "mask id 1000000 lies outside the vocabulary"),
        ({"pad_token_id": 10**6}, "pad id 1000000 lies outside the vocabulary"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"inputs_embeds": torch.zeros(1, 1, 64)}, "inputs_embeds"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long), "inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
        ({"position_ids": torch.full((1, 1), 7)}, "position_ids"),
        ({"attention_mask": torch.zeros(1, 1, dtype=torch.long)}, "padding on the right"),
        ({"method": "ar", "window": 9}, "'ar' has no window"), ({"draft": tools.qwen2(0)}, "'mars' takes no draft"),
        ({"method": "speculative", "draft": tools.qwen2(0)}, "the draft model's vocabulary"),
    ],
)  # fmt: skip
def test_generate_refuses_what_it_would_not_honour(
    arguments: dict[str, Any], message: str, golden: dict[str, Any], golden_models: Models
) -> None:
    """Guards against a setting that silently does nothing."""
    options = {"method": "mars", "mask_id": 3, "max_new_tokens": 4, **IDS} | arguments
    prompt = {"input_ids": torch.tensor([[4]]), "attention_mask": torch.tensor([[1]])}
    with pytest.raises(UserError, match=message):
        golden_models["mars"].generate(**prompt | options, custom_generate=marsbench.generate)


def ours(model: hf.PreTrainedModel, **arguments: Any) -> list[int]:
    ids = torch.tensor([[4, 5, 6, 7]])
    usual = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, **IDS}
    output = model.generate(**usual | arguments, custom_generate=marsbench.generate, method="ar")
    return output[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_what_the_caller_gives_counts(golden_models: Models) -> None:
    """Guards against a filled cache that is left out, an empty cache refused, a stopping rule without effect."""
    model = golden_models["ar"]
    filled = model(torch.tensor([[9, 8, 7]]), use_cache=True).past_key_values
    with pytest.raises(UserError, match="past_key_values"):
        ours(model, past_key_values=filled)
    assert ours(model, past_key_values=hf.DynamicCache()) == ours(model)
    tokens = ours(model)
    assert ours(model, stopping_criteria=hf.StoppingCriteriaList([hf.MaxLengthCriteria(4 + 3)])) == tokens[:3]
    ended = ours(model, stopping_criteria=hf.StoppingCriteriaList([hf.EosTokenCriteria(tokens[2])]))
    assert ended == tokens[: tokens.index(tokens[2]) + 1]


def test_what_is_prepared_for_every_step_is_refused(golden_models: Models) -> None:
    """Guards against learned prompts of peft, and adapters chosen by row, that are silently left out."""
    model = golden_models["ar"]
    alone, of_class = ours(model), model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: of_class(*args, **kwargs)
    with pytest.raises(UserError, match="learned prompts"):
        ours(model)
    model.prepare_inputs_for_generation = of_class  # as peft puts it back
    assert ours(model) == alone
    del model.prepare_inputs_for_generation
    layer = model.model.layers[0].self_attn.q_proj
    task_ids = [0]
    for hook in (partial(lambda *_, adapter_names: None, adapter_names=["a"]), lambda *_: task_ids.append(0)):
        handle = layer.register_forward_pre_hook(hook)
        with pytest.raises(UserError, match=r"apply (adapter_names|task_ids)"):
            ours(model)
        handle.remove()


@pytest.mark.parametrize(
    "options", [("--batch-size", "1"), ("--batch-size", "5"), ("--batch-size", "5", "--prefill-positions", "16")]
)
def test_decode_writes_the_golden_tokens(options: tuple[str, ...], tmp_path: Path, golden: dict[str, Any]) -> None:
    """Guards against rows out of order, counts of another row, and prompts changed where they are read in parts."""
    decode_by_command(tmp_path, golden["prompts"], "--threshold", "0.7", *options)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, recorded in zip(rows, golden["decoding"][8]["rows"], strict=True):
        assert (row["tokens"], row["forwards"]) == (recorded["tokens"], recorded["forwards"])
        assert sum(row["accepted"]) == len(row["tokens"]) + (row["finish"] == "eos")
        assert len(row["accepted"]) == row["forwards"]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("mars-verified", ("--layout", "linear", "--block-size", "3")),
        ("speculative", ("--draft", str(GOLDEN / "ar"), "--draft-length", "3")),
        ("hf-assisted", ("--draft", str(GOLDEN / "ar"))), ("jacobi", ()), ("mars", ("--accept", "one")),
        ("mars-block-cache", ("--cache-block", "8", "--accept", "one")),
    ],
)  # fmt: skip
def test_decode_is_lossless_where_it_says_so(
    method: str, options: tuple[str, ...], tmp_path: Path, golden: dict[str, Any]
) -> None:
    """Guards against options of the command that never reach the method."""
    decode_by_command(tmp_path, golden["prompts"][:6], *options, method=method)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in golden["decoding"][45]["rows"][:6]]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (b"", (), "is empty"), (b'{"prompt_ids": [4, 5]}\n{"prompt_ids": [4,\n', (), "line 2"),
        (b'{"prompt_ids": [4, 5]}\n{"ids": [4]}\n', (), "line 2"), (b'{"prompt_ids": [4, 5]}\n\xff\xfe\n', (), "UTF-8"),
        (b'{"prompt_ids": "Hello"}\n', (), "token ids"), (b'{"prompt_ids": [true]}\n', (), "token ids"),
        ([[4, 5], []], (), "line 2"), ([[4, 99_999]], (), "vocabulary"), ([[4] * 5000], (), "context"),
        ([[4]], ("--block-size", "0"), "--block-size"), ([[4]], ("--max-new-tokens", "0"), "--max-new-tokens"),
        ([[4]], ("--eos-id", "77777"), "EOS id"), ([[4]], ("--pad-id", "77777"), "pad id"),
        ([[4]], ("--mask-id", "77777"), "mask id"), ([[4]], ("--method", "speculative"), "draft model"),
        ([[4]], ("--seed", str(2**63)), "seed 9223372036854775808 is out of range"),
        ([[4]], ("--method", "medusa"), "Medusa heads"), ([[4]], ("--model", "/nowhere/at/all"), "no such checkpoint"),
        ([[4]], ("--out", str(Path(__file__) / "out.jsonl")), "output"), ([[4]], ("--out", str(GOLDEN)), "a folder"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(
    prompts: Any, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Guards against a traceback, an exit code of 0, and half an output."""
    assert message in decode_by_command(tmp_path, prompts, *options, code=2).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_prompts_and_drafts_of_others_are_safe(tmp_path: Path) -> None:
    """Guards against prompts overwritten where `--out` names their file, and drafts with another vocabulary."""
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    for name in ("in.jsonl", "link.jsonl"):
        result = decode_by_command(tmp_path, [[4, 5]], "--out", str(tmp_path / name), code=2)
        assert "--out would overwrite what is read" in result.output
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt_ids": [4, 5]}\n'
    config = hf.AutoModelForCausalLM.from_pretrained(GOLDEN / "ar").config
    config.vocab_size = 100
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "draft")
    folder = tmp_path / "work"
    folder.mkdir()
    result = decode_by_command(folder, [[4]], "--draft", str(tmp_path / "draft"), method="speculative", code=2)
    assert "vocabulary" in result.output


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerFast:
    return build_tokenizer(512, texts=500)


def test_tokens_of_one_forward_are_shown_together(tokenizer: hf.PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Guards against text lost or shaded as another forward's, also a character of several tokens."""
    ids = tokenizer("The answer is ☃ 42.\nDone", add_special_tokens=False).input_ids
    settled_by = [1 + number // 3 for number in range(len(ids) + 1)]
    answer = shown("mars", Generation(ids, settled_by, settled_by[-1], "eos", 2), tokenizer)
    assert "".join(piece for _, piece in answer.pieces) == "The answer is ☃ 42.\nDone"
    assert [forward for forward, _ in answer.pieces] == sorted({*settled_by[: len(ids)]})
    assert f"{settled_by[-1]} forward passes" in answer.summary
    assert shaded(answer).plain == shaded(answer, color=False).plain.replace("|", "")
    draw([answer, answer], tmp_path / "figure.svg")
    drawn = "".join("".join(ElementTree.parse(tmp_path / "figure.svg").getroot().itertext()).split())
    assert drawn.count("Theansweris☃42.Done") == 2 and "".join(answer.summary.split()) in drawn
    assert all((tmp_path / "figure.svg").read_text().count(shade) > 2 for shade in SHADES)
    draw([answer, answer], tmp_path / "figure.PNG")
    pixels = (imread(tmp_path / "figure.PNG")[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()
    assert all(pixels.count([*bytes.fromhex(shade[1:])]) > 1000 for shade in SHADES)
    draw([answer], tmp_path / "figure.pdf")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(("name", "message"), [("a.doc", "ending"), ("figure", "ending"), ("folder.svg", "a folder")])
def test_an_image_that_cannot_be_is_refused(name: str, message: str, tmp_path: Path) -> None:
    """Guards against a traceback after all answers are decoded."""
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UserError, match=message):
        check_image(tmp_path / name)
    check_image(tmp_path / "new" / "figure.SVG")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


EVERYTHING = Options(mask_id=3, draft=nn.Identity(), heads=[nn.Identity()])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("threshold", [0.0, 0.95, 1, 1.5, -0.1, float("nan")])
def test_thresholds_are_refused_as_decoding_would(name: str, threshold: float) -> None:
    """Guards against a threshold that is refused only after minutes of loading, or refused although it works."""
    for metric in METRICS:
        options: Any = {"metric": metric}
        method = build_method(name, Options(**(vars(EVERYTHING) | options)))
        messages = []
        for check in (
            partial(method.confidence_needed, threshold),
            Decoding(method=name, threshold=threshold, **options).check,
        ):
            try:
                check()
            except UserError as error:
                messages.append(str(error))
            else:
                messages.append("")
        assert messages[0] == messages[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_options_that_it_lists(name: str) -> None:
    """Guards against an option that is offered and does nothing, and an option of a method that is not offered."""
    method = method_class(name)
    assert method.name == name
    taken = {option for option in OPTIONS if depends_on(name, option)}
    assert taken == set(METHODS[name].options)


@pytest.mark.parametrize("command", ["decode", "eval", "show", "distill"])
def test_every_command_that_decodes_has_every_option(command: str) -> None:
    """Guards against an option of a method that one command has and another lacks."""
    program: Any = typer.main.get_command(app)
    known = {name for parameter in program.commands[command].params for name in parameter.opts}
    assert {f"--{name.replace('_', '-')}" for name in OPTIONS} | {"--window"} <= known


def depends_on(name: str, option: str) -> bool:
    """Whether another value of an option makes another method."""
    another = {"metric": "margin", "layout": "linear", "draft_method": "mars", "draft_threshold": 0.5}
    another |= {"quantised": "q8_0"}
    by_mars = {"draft_method": "mars"} if option in ("window", "draft_threshold") else {}
    plain = replace(EVERYTHING, **by_mars)
    return build_method(name, plain) != build_method(name, replace(plain, **{option: another.get(option, 7)}))


def test_a_user_is_told_of_every_option() -> None:
    """Guards against an option of no method, help without method or default, one that `generate` does not take."""
    assert set(OPTIONS) == {option for info in METHODS.values() for option in info.options}
    text = explained("tree_width")
    assert "For medusa." in text and text.endswith("[default: 1]")
    assert OPTIONS.keys() <= signature(generate).parameters.keys()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"window": True}, "window True is not a whole number"), ({"window": 2.5}, "2.5"), ({"cache_block": "4"}, "block"),
    ({"tree_width": 1.0}, "tree width"), ({"appended_masks": "7"}, "appended masks"), ({"appended_masks": 2}, "masks"),
    ({"draft_threshold": 1.5}, "draft threshold"), ({"draft_threshold": float("nan")}, "draft threshold"),
    ({"draft_threshold": "0.9"}, "draft threshold '0.9'"), ({"threshold": True}, "threshold True is not a number"),
    ({"threshold": 1.5}, "out of range"), ({"threshold": -0.5, "metric": "entropy"}, "out of range"),
    ({"metric": "hope"}, "unknown confidence metric 'hope'"), ({"mask_id": "3"}, "mask id '3'"),
    ({"dtype": "int3"}, "dtype"), ({"prefill_positions": 0}, "prefill positions 0"), ({"accept": "two"}, "to accept"),
    ({"accept": "one", "threshold": 0.5}, "contradict"),
    ({"accept": "one", "method": "mars-verified"}, "accepts all verified drafts"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    """Guards against a TypeError from inside the loop, and a message that does not name the option."""
    with pytest.raises(UserError, match=message):
        Decoding(**options).check()


@pytest.mark.parametrize("name", [name for name, info in METHODS.items() if info.needs_masks])
def test_advice_on_a_missing_mask_token_fits_every_caller(name: str) -> None:
    """Guards against advice to give an option that this command does not have."""
    with pytest.raises(UserError, match="needs a mask token") as raised:
        build_method(name, Options(draft=nn.Identity()))
    assert "marsbench decode --mask-id" in raised.value.fix and "give --mask-id" not in raised.value.fix


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NUMBERS = [
    (command, option)
    for command, entry in COMMANDS.items()
    for option in entry.params
    if int in ((kind := option.type_descriptor.annotation), *get_args(kind))
]
HUGE = st.integers(min_value=2**63) | st.integers(max_value=-(2**63) - 1)
NO_INTEGER = HUGE | st.floats() | st.booleans() | st.text(max_size=3) | st.just([1])


INTEGERS = {
    "request": ("prompt_ids", "max_new_tokens", "window", "seed", "top_k"),
    "batch": ("eos_id", "pad_id", "batch_size", "prefill_positions"),
    "method": ("mask_id", *(name for name, option in OPTIONS.items() if option.kind is int)),
}


@settings(max_examples=300)
@given(of=st.sampled_from([(what, name) for what, names in INTEGERS.items() for name in names]), value=NO_INTEGER)
def test_integers_are_integers(golden_models: Models, of: tuple[str, str], value: Any) -> None:
    """Guards against an overflow inside a batch, and numbers that are silently cut to integers."""
    fields: dict[str, dict[str, Any]] = {"batch": {"eos_id": 2, "pad_id": 0}, "method": {"mask_id": 3}}
    fields["request"] = {"prompt_ids": [4, 5], "max_new_tokens": 2}
    fields[of[0]][of[1]] = [value] if of[1] in ("prompt_ids", "eos_id") else value
    with pytest.raises(UserError):
        build_method("mars", Options(**fields["method"]))
        decode(golden_models["ar"], build_method("ar", Options()), [Request(**fields["request"])], **fields["batch"])


@given(seed=st.integers(-(2**63), 2**63 - 1), row=st.integers(0, 2**40))
def test_seeds_of_rows_stay_within_64_bits(seed: int, row: int) -> None:
    """Guards against a valid seed whose next row overflows, and rows that share a seed."""
    assert -(2**63) <= seed_of(seed, row) < 2**63
    assert seed_of(seed, row) != seed_of(seed, row + 1)


@pytest.mark.parametrize(("command", "option"), NUMBERS, ids=[f"{name} {option.opts[0]}" for name, option in NUMBERS])
def test_commands_refuse_what_no_tensor_holds(command: str, option: Any) -> None:
    """Guards against `--seed 9223372036854775808`, which ends in a traceback and exit status 1."""
    entry = COMMANDS[command]
    required = [parameter for parameter in entry.params if parameter.required]
    needed = [["x"] if parameter.param_type_name == "argument" else [parameter.opts[0], "x"] for parameter in required]
    with pytest.raises((UserError, ClickException), match=rf"{2**63}|less than or equal to"):
        words = [option.opts[0], str(2**63), *(word for words in needed for word in words)]
        entry.invoke(entry.make_context(command, words))
