"""How `lm_eval --model marsbench` reads its arguments."""

import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.__main__ import HarnessCLI, cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, PreTrainedModel

from marsbench.errors import UserError
from marsbench.evaluation import lm_eval_model
from marsbench.evaluation.lm_eval_model import MarsbenchLM
from marsbench.files import tasks_dir
from marsbench.training.tokenizer import build_tokenizer

GOLDEN = Path(__file__).parent / "golden"
BY_DEFAULT = {"batch_size": 1, "max_batch_size": None, "device": None}  # what lm-eval's command line passes on


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with a tokenizer and a short context."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(GOLDEN / "ar", dtype=torch.float32)
    model.config.max_position_embeddings = 64
    model.save_pretrained(folder)
    build_tokenizer(512, texts=500).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of the `lm_eval` that this process seems to be."""
    words = ["/usr/bin/lm_eval", "run", "--model", "marsbench"]
    monkeypatch.setattr(sys, "argv", words)
    return words


def batch_size(checkpoint: str, settings: dict[str, Any], **model_args: Any) -> int:
    """The rows decoded at once, as the results report them."""
    model = MarsbenchLM.create_from_arg_obj({"pretrained": checkpoint, "method": "ar", **model_args}, settings)
    return model.batch_sizes["rows"]


def test_rows_are_many_unless_a_user_asks_for_fewer(
    checkpoint: str, command_line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against lm-eval's default batch size of 1, and a requested batch size that is ignored."""
    for words, rows in (([], 16), (["-b", "1"], 1), (["--batch_size=1"], 1), (["--batch_size", "4"], 4)):
        parsed = HarnessCLI()._parser.parse_args([*command_line[1:], *words])
        size = getattr(parsed, "batch_size", EvaluatorConfig().batch_size)
        assert batch_size(checkpoint, BY_DEFAULT | {"batch_size": size}) == rows
    assert batch_size(checkpoint, BY_DEFAULT, batch_size=8) == 8
    assert batch_size(checkpoint, BY_DEFAULT | {"batch_size": "auto"}) == 16
    monkeypatch.setattr(sys, "argv", ["program.py"])
    assert batch_size(checkpoint, BY_DEFAULT) == 1
    assert batch_size(checkpoint, BY_DEFAULT | {"batch_size": None}) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"treshold": 0.9}, "no option 'treshold'(.|\n)*did you mean threshold"),
        ({"zzz": 1}, "no option 'zzz'(.|\n)*choose among .*window"),
        ({"threshold": "hi"}, "threshold 'hi' is not a number"), ({"method": "ar", "threshold": 0.9}, "no threshold"),
        ({"compiled": "perhaps"}, "compiled='perhaps' is neither true nor false"),
        ({"batch_size": "six"}, "batch size 'six' is not a whole number"), ({"batch_size": 0}, "batch size 0 is below"),
        ({"pretrained": None}, "no checkpoint is named"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_anything_is_loaded(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a misspelt option that does nothing, and a refusal after minutes of loading."""
    monkeypatch.setattr(lm_eval_model, "load_aloud", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=message):
        MarsbenchLM(**({"pretrained": "somewhere"} | arguments))


def test_text_that_says_a_number_is_one(checkpoint: str) -> None:
    """Guards against a threshold from a configuration file that is compared as text."""
    options: dict[str, Any] = {"threshold": "0.9", "untrained_masks": "true", "block_size": "2", "mask_id": "3"}
    model = MarsbenchLM(checkpoint, **options)
    assert model.get_model_info()["threshold"] == 0.9


def test_cut_prompts_are_said(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against prompts that lose their beginning without a warning."""
    settings = {"until": [], "max_gen_toks": 4}
    requests = [
        Instance("generate_until", {}, ("word " * count, settings), 0, metadata=("some_task", count, 1))
        for count in (2, 200)
    ]
    assert len(MarsbenchLM(checkpoint, method="ar").generate_until(requests)) == 2
    errors = capsys.readouterr().err
    assert errors.count("leaves 60 tokens") == 1 and "some_task: 1 of 2 prompts lost" in errors


def answers(model: MarsbenchLM, *, copies: int = 1, **settings: Any) -> list[str]:
    """The answers to copies of a question, as lm-eval repeats it."""
    prompt = Instance("generate_until", {}, ("word word", {"max_gen_toks": 6} | settings), 0, metadata=("t", 7, copies))
    return model.generate_until([prompt] * copies)


def test_a_prompt_begins_as_in_lm_eval(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a prompt without the BOS that its tokenizer puts before a text, or with two of them."""
    model, special = MarsbenchLM(checkpoint, method="ar"), list[bool]()
    tokenizer: Any = model._tokenizer
    own = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, *given, **how: special.append(*how.values()) or own(self, *given, **how),
    )
    for bos in (None, "word", "other"):  # none; one that the text begins with; one that it lacks
        tokenizer.bos_token = bos
        answers(model)
    assert special == [False, False, True]


SAMPLED = {"do_sample": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def ar(checkpoint: str) -> MarsbenchLM:
    return MarsbenchLM(checkpoint, method="ar", batch_size=2)


def test_repeats_are_draws_of_their_own(ar: MarsbenchLM) -> None:
    """Guards against majority votes and pass@k of one answer that is copied."""
    drawn = answers(ar, copies=4, **SAMPLED)
    assert len(set(drawn)) == 4 and drawn == answers(ar, copies=4, **SAMPLED)
    assert drawn[:1] == answers(ar, **SAMPLED) != answers(ar, seed=1, **SAMPLED)
    assert len(set(answers(ar, copies=4))) == 1


@pytest.mark.parametrize(
    "cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0}, {"do_sample": False}]
)
def test_settings_that_leave_one_token_are_greedy(cut: dict[str, Any], ar: MarsbenchLM) -> None:
    """Guards against limits of sampling that lm-eval passes on without effect."""
    greedy, drawn = answers(ar), answers(ar, **SAMPLED)
    assert answers(ar, **SAMPLED | cut) == greedy != drawn
    assert answers(ar, temperature=1.0) == answers(ar, do_sample=True) == drawn
    assert answers(ar, **SAMPLED, top_k=None, num_beams=1, repetition_penalty=1.0) == drawn


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_limit_is_heard(name: str, ar: MarsbenchLM) -> None:
    """Guards against answers of lm-eval's default length."""
    assert answers(ar, **{"max_gen_toks": None, name: 2}) == answers(ar, max_gen_toks=2) != answers(ar)


NOT_MET = st.sampled_from(
    ["repetition_penalty", "num_beams", "stop", "top_k", "top_p", "seed", "do_sample", "max_tokens", "min_length"]
)
NO_VALUE = st.sampled_from([2**70, -(2**70), 3.5, "x", [["x"]], {"x": 1}])


@given(st.dictionaries(NOT_MET, NO_VALUE, min_size=1))
@example({"until": [1]})
@example({"temperature": -1, "do_sample": None})
@example({"temperature": float("nan"), "do_sample": None})
@example({"temperature": True})
def test_settings_that_cannot_be_met_are_refused(ar: MarsbenchLM, settings: dict[str, Any]) -> None:
    """Guards against a setting that silently does nothing, and a traceback for an invalid value."""
    with pytest.raises(UserError):
        answers(ar, **SAMPLED | {"max_gen_toks": None} | settings)


def test_a_mistake_is_one_message_on_the_command_line(
    command_line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a page of traceback for a misspelt option, and an exit status that means a bug."""
    own_tasks_alone = partialmethod(TaskManager.__init__, include_defaults=False)  # to find its own takes five seconds
    monkeypatch.setattr(TaskManager, "__init__", own_tasks_alone)
    command_line += ["--include_path", str(tasks_dir()), "--tasks", "mini_gsm8k"]
    command_line += ["--model_args", "pretrained=somewhere,treshold=0.9"]
    with pytest.raises(SystemExit) as ended:
        cli_evaluate()
    error, mend = capsys.readouterr().err, "did you mean threshold or draft_threshold?"
    assert ended.value.code == 2 and "Traceback" not in error
    assert error.endswith(f"no option 'treshold'\n  where: --model_args\n  fix:   {mend}\n")
