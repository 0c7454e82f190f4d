"""Integers from outside: whatever a caller or the command line gives, torch gets to see none that it could not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer._click.exceptions import ClickException

import marsbench
from marsbench.cli import app
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request, seed_of
from marsbench.errors import UserError
from marsbench.methods import OPTIONS, Options, build_method

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NUMBERS = [
    (command, option)
    for command, made in COMMANDS.items()
    for option in made.params
    if int in ((kind := option.type_descriptor.annotation), *get_args(kind))
]
HUGE = st.integers(min_value=2**63) | st.integers(max_value=-(2**63) - 1)
NO_INTEGER = HUGE | st.floats() | st.booleans() | st.text(max_size=3) | st.just([1])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "golden" / "ar").eval()


@given(name=st.sampled_from(["prompt_ids", "max_new_tokens", "window", "seed", "top_k"]), value=NO_INTEGER)
def test_requests_hold_integers(model: PreTrainedModel, name: str, value: Any) -> None:
    """Guards against an overflow in the midst of a batch, and numbers that are cut to integers without a word."""
    request = Request(**{"prompt_ids": [4, 5], "max_new_tokens": 2, name: [value] if name == "prompt_ids" else value})
    with pytest.raises(UserError):
        decode(model, build_method("ar", Options()), [request], eos_id=2, pad_id=0)


@given(name=st.sampled_from(["eos_id", "pad_id", "batch_size", "prefill_positions"]), value=NO_INTEGER)
def test_a_batch_is_told_integers(model: PreTrainedModel, name: str, value: Any) -> None:
    """Guards against the same beside the requests."""
    told = {"eos_id": 2, "pad_id": 0, name: [value] if name == "eos_id" else value}
    with pytest.raises(UserError):
        decode(model, build_method("ar", Options()), [Request([4], 2)], **told)


@given(
    name=st.sampled_from(["mask_id", *(name for name, option in OPTIONS.items() if option.kind is int)]),
    value=NO_INTEGER,
)
def test_methods_are_told_integers(name: str, value: Any) -> None:
    """Guards against the same in the options of methods."""
    with pytest.raises(UserError):
        build_method("mars", Options(**{"mask_id": 3, name: value}))


@given(seed=st.integers(-(2**63), 2**63 - 1), row=st.integers(0, 2**40))
def test_seeds_of_rows_stay_within_64_bits(seed: int, row: int) -> None:
    """Guards against a seed that is right and whose next row overflows, and rows that share a seed."""
    assert -(2**63) <= seed_of(seed, row) < 2**63
    assert seed_of(seed, row) != seed_of(seed, row + 1)


@given(seed=NO_INTEGER)
def test_generate_refuses_seeds(model: PreTrainedModel, seed: Any) -> None:
    """Guards against a traceback of torch in a user's program."""
    with pytest.raises(UserError):
        model.generate(
            model.dummy_inputs["input_ids"][:1], custom_generate=marsbench.generate, method="ar", sampling_seed=seed,
            do_sample=True, top_k=0, max_new_tokens=2, pad_token_id=0,
        )  # fmt: skip


@pytest.mark.parametrize(("command", "option"), NUMBERS, ids=[f"{name} {option.opts[0]}" for name, option in NUMBERS])
def test_commands_refuse_what_no_tensor_holds(command: str, option: Any) -> None:
    """Guards against `--seed 9223372036854775808`, which ends in a traceback and exit status 1."""
    made = COMMANDS[command]
    needed = [["x"] if one.param_type_name == "argument" else [one.opts[0], "x"] for one in made.params if one.required]
    with pytest.raises((UserError, ClickException), match=rf"{2**63}|less than or equal to"):
        words = [option.opts[0], str(2**63), *(word for words in needed for word in words)]
        made.invoke(made.make_context(command, words))
