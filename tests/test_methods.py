"""The registry of methods: what it refuses, and how, before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from marsbench.decoding.acceptance import METRICS
from marsbench.errors import UserError
from marsbench.methods import METHODS, Options, build_method, check_options, check_threshold

EVERYTHING = Options(mask_id=3, draft=nn.Identity(), heads=[nn.Identity()])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("threshold", [0.0, 0.95, 1, 1.5, -0.1, float("nan")])
def test_thresholds_are_refused_as_decoding_would(name: str, threshold: float) -> None:
    """Guards against a threshold that is refused only after minutes of loading, or refused although it works."""
    for metric in METRICS:
        options: Any = {"metric": metric}
        method = build_method(name, Options(**(vars(EVERYTHING) | options)))
        said = []
        for check in (lambda: method.bar(threshold), lambda: check_threshold(name, threshold, metric)):  # noqa: B023
            try:
                check()
            except UserError as error:
                said.append(str(error))
            else:
                said.append("")
        assert said[0] == said[1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", True),
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
        check_options("mars", Options(**{option: value}))


@pytest.mark.parametrize("name", [name for name, info in METHODS.items() if info.needs_masks])
def test_advice_on_a_missing_mask_token_fits_every_caller(name: str) -> None:
    """Guards against advice to give an option that the command at hand does not have."""
    with pytest.raises(UserError, match="needs a mask token") as raised:
        build_method(name, Options(draft=nn.Identity()))
    assert "marsbench decode --mask-id" in raised.value.fix and "give --mask-id" not in raised.value.fix
