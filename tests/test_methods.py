"""The registry of methods: what it refuses, and how, before a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import pytest
import typer.main
from torch import nn

from marsbench import generate
from marsbench.cli import app
from marsbench.decoding.acceptance import METRICS
from marsbench.errors import UserError
from marsbench.methods import (
    METHODS,
    OPTIONS,
    Decoding,
    Options,
    build_method,
    explained,
    method_class,
)

EVERYTHING = Options(mask_id=3, draft=nn.Identity(), heads=[nn.Identity()])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("threshold", [0.0, 0.95, 1, 1.5, -0.1, float("nan")])
def test_thresholds_are_refused_as_decoding_would(name: str, threshold: float) -> None:
    """Guards against a threshold that is refused only after minutes of loading, or refused although it works."""
    for metric in METRICS:
        options: Any = {"metric": metric}
        method = build_method(name, Options(**(vars(EVERYTHING) | options)))
        said = []
        asked = Decoding(method=name, threshold=threshold, **options)
        for check in (partial(method.bar, threshold), asked.check):
            try:
                check()
            except UserError as error:
                said.append(str(error))
            else:
                said.append("")
        assert said[0] == said[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_options_that_it_lists(name: str) -> None:
    """Guards against an option that is offered and does nothing, and one that a method has and nobody can give."""
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


def test_generate_names_every_option() -> None:
    """Guards against an option that transformers keeps to itself because the signature does not name it."""
    defaults = {name: one.default for name, one in signature(generate).parameters.items()}
    assert OPTIONS.keys() <= defaults.keys()


def depends_on(name: str, option: str) -> bool:
    """Whether a method comes out otherwise for another value of an option."""
    another = {"metric": "margin", "layout": "linear", "draft_method": "mars", "draft_threshold": 0.5}
    another |= {"quantised": "q8_0", "lookup_bar": 0.5}
    by_mars = {"draft_method": "mars"} if option in ("window", "draft_threshold") else {}
    made = []
    for given in ({}, {option: another.get(option, 7)}):
        made.append(build_method(name, replace(EVERYTHING, **{**by_mars, **given})))
    return made[0] != made[1]


def test_a_user_is_told_of_every_option() -> None:
    """Guards against an option that no method takes, and a help that says neither whose it is nor its default."""
    assert set(OPTIONS) == {option for info in METHODS.values() for option in info.options}
    said = explained("tree_width")
    assert "For medusa." in said and said.endswith("[default: 1]")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window", True),
        ("cache_block", "4"),
        ("tree_width", 1.0),
        ("appended_masks", "7"),
        ("appended_masks", 2),
        ("draft_threshold", 1.5),
        ("draft_threshold", float("nan")),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    """Guards against a TypeError from the depths of the loop, and a message that does not say which option."""
    with pytest.raises(UserError, match=option.replace("_", " ")):
        Decoding(**{option: value}).check()


@pytest.mark.parametrize("name", [name for name, info in METHODS.items() if info.needs_masks])
def test_advice_on_a_missing_mask_token_fits_every_caller(name: str) -> None:
    """Guards against advice to give an option that the command at hand does not have."""
    with pytest.raises(UserError, match="needs a mask token") as raised:
        build_method(name, Options(draft=nn.Identity()))
    assert "marsbench decode --mask-id" in raised.value.fix and "give --mask-id" not in raised.value.fix
