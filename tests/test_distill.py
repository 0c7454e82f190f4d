"""`marsbench distill`: a model's own answers as chat data, whatever the batch, and however often it is interrupted."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tools import Result, invoke
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from marsbench import answering
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.distilling.distill import TEMPERATURE, Chats, Response, read_prompts, self_asked
from marsbench.errors import UserError
from marsbench.methods.ar import Autoregressive
from marsbench.progress import Reporter
from marsbench.training.chat_data import read_chat_data
from marsbench.training.checkpoints import Loaded, load
from marsbench.training.tokenizer import CHAT_TEMPLATE, END, MASK, PAD, START, build_tokenizer

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "plus", "minus", "is", "and")
QUESTIONS = [" ".join(WORDS[(3 * number + step) % 14] for step in range(1 + number % 5)) for number in range(24)]
SAMPLED = ("--temperature", "1.0")  # about half of the answers come to an end


def save_model(folder: Path, seed: int = 0) -> Path:
    """A random checkpoint that speaks in ASCII letters, one per token, so that any answer is text."""
    letters = [chr(code) for code in range(ord("A"), ord("z") + 1) if chr(code).isalpha()]
    vocabulary = [PAD, START, END, MASK, *letters, ".", "\u0120", "\u010a"]  # the last two: space and line break
    core = Tokenizer(models.BPE({entry: number for number, entry in enumerate(vocabulary)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, mask_token=MASK, additional_special_tokens=[START]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=160, initializer_range=0.4, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    network = Qwen2ForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight.normal_(std=0.8)
        for token, weight in ((PAD, 0), (START, 0), (MASK, 0), (END, 1.4)):  # the last comes often, the others rarely
            network.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] *= weight
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def save(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return save(tmp_path / "prompts.jsonl", *[{"prompt": question} for question in QUESTIONS])


def distill(model: Path, prompts: Path, out: Path, *options: str, code: int = 0) -> Result:
    arguments = ["--checkpoint", model, "--prompts", prompts, "--out", out, "--max-new-tokens", "24"]
    return invoke("distill", *arguments, *options, code=code)


def written(file: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, Generation]]:
    """The requests that the engine gets, and its generations."""
    seen: list[tuple[Request, Generation]] = []

    def noting(model: Any, method: Any, requests: Any, **how: Any) -> list[Generation]:
        generations = decode(model, method, requests, **how)
        seen.extend(zip(requests, generations, strict=True))
        return generations

    monkeypatch.setattr(answering, "decode", noting)
    return seen


def test_answers_are_read_as_the_very_tokens_that_were_decoded(
    model: Path, prompts: Path, tmp_path: Path, decoded: list[tuple[Request, Generation]]
) -> None:
    """Guards against a template applied twice, a BOS or EOS too many, an end not taught, data only we can read."""
    chats = tmp_path / "chats.jsonl"
    distill(model, prompts, chats, *SAMPLED)
    chat = read_chat_data(str(chats), load(model).tokenizer, 512)
    expected = sorted([*request.prompt_ids, *answer.tokens, 2] for request, answer in decoded if answer.finish == "eos")
    assert 5 < len(expected) < len(QUESTIONS) and chat.dropped == 0
    assert sorted(map(list, chat.sequences["input_ids"])) == expected  # type: ignore[call-overload]
    assert sorted(chat.labelled) == sorted(answer.emitted for _, answer in decoded if answer.finish == "eos")
    distill(model, prompts, chats, *SAMPLED)
    start = ["--scale", "0.5b", "--base", str(model), "--chat-data", str(chats), "--output", str(tmp_path)]
    done = invoke("train", "mars", *start, "--max-steps", "2", "--batch-size", "4")
    assert f"{len(written(chats))} conversations to learn, 0 left out" in done.output


@pytest.mark.parametrize("sampled", [(), SAMPLED], ids=["greedy", "sampled"])
def test_the_file_is_the_same_whatever_the_batch_and_the_method(
    sampled: tuple[str, ...], model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Guards against answers under the wrong prompt, seeds by the place in a batch, and prompts in another form."""
    files = []
    ways = [("--batch-size", "1"), ("--batch-size", "5"), ("--method", "mars-verified", "--window", "3")]
    for number, options in enumerate(ways):
        distill(model, prompts, tmp_path / f"{number}.jsonl", "--keep-cut", *sampled, *options)
        files.append((tmp_path / f"{number}.jsonl").read_bytes())
    assert files[0] == files[1] == files[2]
    chats = written(tmp_path / "0.jsonl")
    assert [turns[0]["content"] for turns in chats] == QUESTIONS
    if sampled:
        assert len({turns[1]["content"] for turns in chats}) > 20, "every answer has a seed of its own"
        return
    loaded = load(model)
    ids = loaded.tokenizer.apply_chat_template(chats[7][:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    (generation,) = decode(loaded.model, Autoregressive(), [Request(ids, 24)], eos_id=2, pad_id=0)
    assert chats[7][1]["content"] == loaded.tokenizer.decode(generation.tokens), "asked as in a chat"


def test_what_is_left_out_is_counted(model: Path, tmp_path: Path, decoded: list[tuple[Request, Generation]]) -> None:
    """Guards against targets that teach to stop midway, and against silence about them."""
    long = {"prompt": " ".join(["one"] * 60)}
    prompts = save(tmp_path / "prompts.jsonl", *[{"prompt": question} for question in QUESTIONS], long)
    sampled = "--temperature", "2", "--samples", "8"
    distill(model, prompts, tmp_path / "chats.jsonl", *sampled[:3], "2")
    done = distill(model, prompts, tmp_path / "chats.jsonl", *sampled)  # more samples: it goes on
    cut = sum(generation.finish == "length" for _, generation in decoded)
    left = len(written(tmp_path / "chats.jsonl"))
    lost = len(decoded) - cut - left
    assert cut and left and lost and len(decoded) == 8 * len(QUESTIONS) == len({request.seed for request, _ in decoded})
    questions = [turns[0]["content"] for turns in written(tmp_path / "chats.jsonl")]
    assert questions == sorted(questions, key=QUESTIONS.index), "in the order of the prompts"
    assert f"{left} answers" in done.stdout and f"{cut} cut at --max-new-tokens" in done.stdout
    assert f"{lost} that chat data cannot hold" in done.stdout
    assert "8 to prompts longer than the 136 tokens" in done.stdout
    decoded.clear()
    distill(model, prompts, tmp_path / "chats.jsonl", *sampled, "--keep-cut")
    assert not decoded, "what was cut is in the log"
    assert left < len(written(tmp_path / "chats.jsonl")) <= left + cut


@pytest.mark.parametrize(
    ("text", "ended", "kept", "reason"),
    [("7", True, True, None), ("7", False, True, "cut"), (" \n", True, True, "empty"),
     ("7", True, False, "that chat data cannot hold"), ("7", False, False, "cut")],
)  # fmt: skip
def test_every_answer_left_out_has_one_reason(text: str, ended: bool, kept: bool, reason: str | None) -> None:
    """Guards against empty answers in the data, and against an answer that is counted twice."""
    answer = Response(0, text, 3, ended, kept)
    assert (answer.left_out(keep_cut=False) or "").startswith(reason or "")
    assert bool(answer.left_out(keep_cut=True)) == (reason not in (None, "cut") or not kept)


TRIMS = CHAT_TEMPLATE.replace("message.content", "message.content | trim")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("The answer is 42.", True), ("The ans|wer", True), (f"Stop{END}and go", False), (f"Stop{START}", False),
        ("\u2603", True), ("\u2603<", False), ("seven\n", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMS], ids=["plain", "trims"])
def test_what_the_trainer_would_read_otherwise_is_told(text: str, kept: bool, template: str) -> None:
    """Guards against half a character or an end in the middle learned, and answers lost where a template trims."""
    tokenizer = build_tokenizer(512, texts=500)
    tokenizer.chat_template = template
    tokens = [token for part in text.split("|") for token in tokenizer(part).input_ids] if "<|" not in text else None
    tokens = tokens or tokenizer(text).input_ids
    if text.endswith("\u2603<"):
        tokens = tokenizer("\u2603").input_ids[:-1]
    form = Chats(tokenizer).keeps(tokens, [{"role": "user", "content": "?"}])
    assert bool(form) == kept and form == {"The answer is 42.": "tokens", "The ans|wer": "text"}.get(text, form)


def test_an_answer_ends_where_the_trainer_will_end_it(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against answers that run past their turn, where a checkpoint names the end of documents as its EOS."""
    base = Path(shutil.copytree(model, tmp_path / "base"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((base / name).read_text())
        other = {"eos_token": PAD} if "tokenizer" in name else {"eos_token_id": 0}
        (base / name).write_text(json.dumps(settings | other))
    assert load(base).tokenizer.eos_token == PAD
    for folder in (model, base):
        distill(folder, prompts, tmp_path / f"{folder.name}.jsonl", *SAMPLED)
    named, inferred = (written(tmp_path / f"{folder.name}.jsonl") for folder in (model, base))
    assert named and all(turns in inferred for turns in named)


# ---- the prompts -----------------------------------------------------------------------------------------------------
def test_prompts_come_in_many_forms(model: Path, tmp_path: Path) -> None:
    """Guards against old answers in a prompt, an unread column or prompt, and a template's traceback."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}
    theirs, again = {"role": "assistant", "content": "Theirs."}, {"role": "user", "content": "Two?"}
    file = save(
        tmp_path / "in.jsonl", {"prompt": "One?"}, {"messages": [user, theirs]}, {"messages": [system, user]},
        {"messages": [user, theirs, again, {"role": "assistant", "content": "4", "name": "x"}]}, {"prompt": [user]},
    )  # fmt: skip
    assert read_prompts(file) == [[user], [user], [system, user], [user, theirs, again], [user]]
    done = distill(model, file, tmp_path / "out.jsonl", "--keep-cut")
    assert "earlier answers stand in 1 of the conversations" in done.stdout
    file = save(tmp_path / "gsm8k.jsonl", {"question": "One?", "answer": "1"})
    assert read_prompts(file, "question") == [[user]]
    tokenizer = build_tokenizer(512, texts=500)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    tokenizer.chat_template = refuses + CHAT_TEMPLATE
    prompts = [[{"role": role, "content": "One?"}] for role in ("user", "system")]
    with pytest.raises(UserError, match="no system turns") as raised:
        Chats(tokenizer).encoded(prompts, Path("in.jsonl"))
    assert raised.value.where == "in.jsonl, line 2"
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi?"}\n')
    both = ["--prompts", tmp_path / "in.jsonl", "--self-asked", "5"]
    for sources in ([], both):
        done = invoke("distill", "--checkpoint", "x", "--out", tmp_path / "out.jsonl", *sources, code=2)
        assert "--self-asked" in done.output


CALLED = [{"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]
BAD = {
    "no column": ({"question": "One?", "answer": "1"}, "--column which one holds the prompts: question, answer"),
    "no object": (["One?"], "not a prompt"),
    "no text": ({"prompt": 7}, "prompt holds no prompt: not a list of turns"),
    "nothing asked": ({"messages": [{"role": "assistant", "content": "4"}]}, "asks nothing"),
    "only a system prompt": ({"messages": [{"role": "system", "content": "Be brief."}]}, "asks nothing"),
    "empty": ({"prompt": " "}, "asks nothing"),
    "no such role": ({"messages": [{"role": "human", "content": "One?"}]}, "message 1 has the unknown role"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "message 1 has no content"),
    "calls of tools": ({"messages": [*CALLED, {"role": "tool", "content": "12:00"}]}, "message 2 has tool"),
    "an empty answer": ({"messages": [CALLED[0], {"role": "assistant", "content": ""}, CALLED[0]]}, "message 2 is an"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BAD)
def test_a_line_that_asks_nothing_is_named(mistake: str, model: Path, tmp_path: Path) -> None:
    """Guards against tracebacks, and prompts that are silently left out."""
    line, message = BAD[mistake]
    done = distill(model, save(tmp_path / "in.jsonl", {"prompt": "One?"}, line), tmp_path / "out.jsonl", code=2)
    assert "in.jsonl, line 2" in done.stderr and message in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


# ---- interruptions ---------------------------------------------------------------------------------------------------
@pytest.fixture
def chats(model: Path, prompts: Path, tmp_path: Path) -> Path:
    """Chat data that was written in one run, with its log."""
    distill(model, prompts, tmp_path / "chats.jsonl", *SAMPLED)
    return tmp_path / "chats.jsonl"


def log_of(out: Path) -> Path:
    (log,) = out.parent.glob(f"{out.name}.*.answers")
    return log


def test_a_run_goes_on_wherever_it_was_killed(
    chats: Path, model: Path, prompts: Path, decoded: list[tuple[Request, Generation]]
) -> None:
    """Guards against answers lost or repeated after a kill, even within a line, and a broken log without its name."""
    log, file, data = log_of(chats).read_bytes(), log_of(chats), chats.read_bytes()
    ends = [at + 1 for at, byte in enumerate(log) if byte == ord("\n")]
    for size in (0, ends[0] - 1, ends[0], ends[7] + 1, ends[20] - 1, ends[-1]):
        chats.unlink()
        file.write_bytes(log[:size])
        decoded.clear()
        distill(model, prompts, chats, *SAMPLED)
        assert chats.read_bytes() == data
        assert len(decoded) == len(QUESTIONS) - log[:size].count(b"\n"), "what is there is not decoded again"
        assert sorted(file.read_text().splitlines()) == sorted(log.decode().splitlines())
    file.write_bytes(log[: ends[2]] + b"{}\n" + log[ends[2] :])  # by an editor
    assert f"{file}, line 4" in distill(model, prompts, chats, *SAMPLED, code=2).stderr


def test_an_interruption_leaves_no_chat_data_and_all_answers(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against training on half a file, and answers that are only kept at the end."""
    keeps = Chats.keeps
    left = 10

    def interrupted(*arguments: Any) -> Any:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return keeps(*arguments)

    monkeypatch.setattr(Chats, "keeps", interrupted)
    out = tmp_path / "chats.jsonl"
    done = distill(model, prompts, out, *SAMPLED, code=130)
    assert "the same command resumes" in done.stderr and not out.exists()
    monkeypatch.setattr(Chats, "keeps", keeps)
    done = distill(model, prompts, out, *SAMPLED)
    assert f"going on after 10 of {len(QUESTIONS)} answers" in done.stderr


def _other_model(model: Path, prompts: Path, folder: Path) -> Path:
    return save_model(folder / "other", seed=1)


def _other_template(model: Path, prompts: Path, folder: Path) -> Path:
    shutil.copytree(model, folder / "reworded")
    template = folder / "reworded" / "chat_template.jinja"
    template.write_text(template.read_text().replace("You are a helpful", "You a helpful"))
    return folder / "reworded"


def _other_prompts(model: Path, prompts: Path, folder: Path) -> Path:
    save(prompts, *[{"prompt": question} for question in QUESTIONS[1:]])
    return model


OTHERS: list[Any] = [
    _other_model, _other_template, _other_prompts, ("--max-new-tokens", "20"), ("--temperature", "0.5"),
    ("--seed", "3"), ("--dtype", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_other_answers_are_not_mixed_in(other: Any, chats: Path, model: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against chat data of two models or settings, and against a refusal that spoils the file."""
    before = chats.read_bytes(), log_of(chats).read_bytes()
    options = other if isinstance(other, tuple) else ()
    checkpoint = other(model, prompts, tmp_path) if callable(other) else model
    refused = distill(checkpoint, prompts, chats, *SAMPLED, *options, code=2).stderr
    assert "the file exists, with other settings (one of: weights, chat template, prompts, max_new" in refused
    assert (chats.read_bytes(), log_of(chats).read_bytes()) == before


def test_more_can_be_asked_later(
    model: Path, prompts: Path, tmp_path: Path, decoded: list[tuple[Request, Generation]]
) -> None:
    """Guards against a first try that has to be thrown away."""
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    distill(model, prompts, few, *SAMPLED, "--limit", "6", "--keep-cut")
    assert [turns[0]["content"] for turns in written(few)] == QUESTIONS[:6]
    distill(model, prompts, few, *SAMPLED)
    assert len(decoded) == len(QUESTIONS)
    distill(model, prompts, many, *SAMPLED)
    assert few.read_bytes() == many.read_bytes()


def test_what_is_there_or_in_use_is_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against a data set overwritten by mistake, two runs in one file, and a model without a chat template."""
    mine = save(tmp_path / "mine.jsonl", {"messages": []})
    assert "the file exists" in distill(model, prompts, mine, *SAMPLED, code=2).stderr
    assert mine.read_text() == '{"messages": []}\n'
    with FileLock(tmp_path / "chats.jsonl.lock"):
        done = distill(model, prompts, tmp_path / "chats.jsonl", *SAMPLED, code=2)
    assert "another command is writing" in done.stderr
    shutil.copytree(model, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    assert "no chat template" in distill(tmp_path / "plain", prompts, tmp_path / "chats.jsonl", code=2).stderr


# ---- what cannot be --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-new-tokens", "1", "--limit", "3"), "nothing to write"),
        (("--max-new-tokens", "160"), "no room for a prompt"), (("--prompts", "empty.jsonl"), "the file is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_distilled_is_said(
    options: tuple[str, ...], message: str, model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against empty files that look like a success, and every prompt left out as too long."""
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    assert message in distill(model, prompts, tmp_path / "chats.jsonl", *options, code=2).stderr
    assert not (tmp_path / "chats.jsonl").exists()


@pytest.fixture(scope="module")
def talker(micro_checkpoints: Path) -> Loaded:
    return load(next(micro_checkpoints.glob("ar_sft-*")), device="cpu")


def asking(talker: Loaded, says: list[tuple[str, str]]) -> tuple[Any, list[Any]]:
    """A checkpoint that answers with these texts in turn, each with how it ends; and its requests."""
    requests: list[Any] = []

    def decode(batch: Any, on_finished: Any, **how: Any) -> None:
        for request in batch:
            text, finish = says[len(requests) % len(says)]
            ids = talker.tokenizer(text, add_special_tokens=False).input_ids
            requests.append(request)
            on_finished(len(requests), Generation(ids, [1] * len(ids), 1, finish))  # type: ignore[arg-type]

    return SimpleNamespace(loaded=talker, decode=decode), requests


def test_questions_are_whole_and_asked_once(talker: Loaded, tmp_path: Path) -> None:
    """Guards against prompts that are cut, almost empty, doubled or full of special tokens, and noise."""
    mask, good = str(talker.tokenizer.eos_token), [f"how many apples has Tom {number} ?" for number in range(4)]
    says = [(good[0], "eos"), (good[0], "eos"), (good[1], "length"), (good[2] + mask + good[3], "eos"), ("a", "eos")]
    answering, requests = asking(talker, [*says, (good[1], "eos"), (good[2], "eos")])
    file = self_asked(answering, 3, tmp_path / "own.jsonl", Reporter())
    prompts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    assert prompts[0] == talker.tokenizer.decode(talker.tokenizer(good[0]).input_ids, skip_special_tokens=True).strip()
    assert len(prompts) == len(set(prompts)) == 2, "six were drawn for three"
    assert {request.temperature for request in requests} == {TEMPERATURE}
    assert len({request.seed for request in requests}) == 6
    text = talker.tokenizer.decode(requests[0].prompt_ids)
    chat = talker.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert chat.startswith(text) and "Hello" not in text
    before, said = len(requests), Mock()
    assert self_asked(answering, 9, file, said) == file and len(requests) == before, "what is there stays"
    assert "for others, remove it" in said.say.call_args.args[0]
    with pytest.raises(UserError, match="only 0"):
        self_asked(asking(talker, [("a", "eos")])[0], 3, tmp_path / "none.jsonl", Reporter())
    assert not (tmp_path / "none.jsonl").exists()
