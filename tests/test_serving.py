"""The server as its clients see it: OpenAI's own client, plain HTTP and sockets, and clients that misbehave."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
from serving_client import Running, eventually

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.methods import Options, build_method
from marsbench.training.checkpoints import Loaded, load

MANY = int(os.environ.get("MARSBENCH_SOAK", "40"))  # clients that vanish
KEY = "s3cret"
LIMITS = ["--max-rows", "4", "--max-queue", "4", "--max-body", "5000", "--read-timeout", "0.5", "--drain", "20",
          "--api-key", KEY]  # fmt: skip
PROMPT = "Tom has 3 apples and buys 4 more."


@pytest.fixture(scope="module")
def checkpoint(micro_checkpoints: Path) -> Path:
    return next(micro_checkpoints.glob("mars-b4-*"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Loaded:
    return load(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Running]:
    running = Running(checkpoint, "--max-queue", "128", "--max-rows", "24")
    yield running
    assert running.end() == 0, "".join(running.output)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[Running]:
    running = Running(checkpoint, *LIMITS, key=KEY)
    yield running
    running.end()


def decoded(loaded: Loaded, ids: list[int], method: str, tau: float | None, window: int, limit: int) -> list[int]:
    """The tokens that `marsbench decode` writes."""
    chosen = build_method(method, Options(mask_id=loaded.mask_id, window=window))
    eos, pad = loaded.tokenizer.eos_token_id, loaded.tokenizer.pad_token_id
    (generation,) = decode(loaded.model, chosen, [Request(ids, limit, tau)], eos_id=eos, pad_id=pad)
    return generation.tokens


def text_of(loaded: Loaded, tokens: list[int]) -> str:
    return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def test_openai_client_chats(client: openai.OpenAI, loaded: Loaded) -> None:
    """Guards against a chat template that differs from the model's, and answers that the client cannot read."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model="micro", messages=messages, max_tokens=20, extra_body={"method": "ar"})
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens = decoded(loaded, ids, "ar", None, 1, 20)
    assert chat.choices[0].message.content == text_of(loaded, tokens)
    assert chat.usage is not None and chat.usage.prompt_tokens == len(ids)
    assert chat.usage.completion_tokens == len(tokens) + (chat.choices[0].finish_reason == "stop")
    assert [model.id for model in client.models.list()] == ["micro"]


def test_openai_client_streams_and_knows_our_errors(client: openai.OpenAI) -> None:
    """Guards against streams that differ from the answer in one piece or lack parts, and errors that look alike."""
    arguments: Any = {"model": "micro", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24}
    extra = {"threshold": 0.1}
    answer = client.chat.completions.create(**arguments, extra_body=extra)
    streamed = arguments | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**streamed, extra_body=extra))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and answer.usage is not None
    assert chunks[-1].usage.to_dict() == answer.usage.to_dict()
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="micro", prompt="a", max_tokens=10_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


WAYS = [("ar", None, 4), ("mars", 0.0, 4), ("mars", 0.2, 3), ("mars", 0.6, 6), ("mars-verified", 0.2, 5),
        ("mars-verified", None, 4)]  # fmt: skip


def test_64_mixed_requests_are_answered_as_each_would_be_alone(server: Running, loaded: Loaded) -> None:
    """Guards against neighbours that change an answer: methods, thresholds, limits, stops and streams all mixed."""
    rng = random.Random(0)
    cases = []
    for number in range(64):
        method, tau, window = WAYS[number % len(WAYS)]
        ids = loaded.tokenizer(f"{PROMPT} {'and more ' * rng.randint(0, 9)}{number}").input_ids
        limit = rng.randint(1, 60)
        text = text_of(loaded, decoded(loaded, ids, method, tau, window, limit))
        stop = text[len(text) // 2 :][:3] if number % 4 == 0 and len(text) > 8 else None
        expected = text.split(stop)[0] if stop else text
        body = {"prompt": ids, "max_tokens": limit, "stop": stop}
        body |= {"method": method, "threshold": tau, "block_size": window}
        cases.append((body, expected, number % 2 == 0))

    def ask(case: tuple[dict[str, Any], str, bool]) -> str:
        body, _, streamed = case
        if streamed:
            return "".join(event["choices"][0]["text"] for event in server.stream(**body))
        return str(server.complete(**body)["choices"][0]["text"])

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, cases)) == [expected for _, expected, _ in cases]


def test_sampling_draws_what_decode_draws(server: Running, loaded: Loaded) -> None:
    """Guards against a seed that does not fix a sampled answer, whatever else is in the batch."""
    ids = loaded.tokenizer(PROMPT).input_ids
    eos, pad = loaded.tokenizer.eos_token_id, loaded.tokenizer.pad_token_id
    request = Request(ids, 20, temperature=0.9, seed=5)
    (expected,) = decode(loaded.model, build_method("ar", Options()), [request], eos_id=eos, pad_id=pad)
    for method in ("ar", "mars-verified"):
        drawn = server.complete(prompt=ids, max_tokens=20, temperature=0.9, seed=5, method=method)
        assert drawn["choices"][0]["text"] == text_of(loaded, expected.tokens)
        greedy = server.complete(prompt=ids, max_tokens=20, temperature=0.9, seed=5, method=method, top_k=1)
        assert greedy["choices"] == server.complete(prompt=ids, max_tokens=20, method=method)["choices"]
        cut = server.complete(prompt=ids, max_tokens=20, temperature=0.9, seed=5, method=method, top_p=0.5, min_p=0.1)
        assert cut["choices"] != drawn["choices"]


def test_the_knob_turns_a_running_request(server: Running) -> None:
    """Guards against a threshold that only new requests get, and one that loses tokens of requests in flight."""
    server.call("/v1/speed", {"threshold": 1.0}, "PUT")
    try:
        counts = []
        for number, event in enumerate(server.stream(
            prompt=PROMPT, max_tokens=400, method="mars", ignore_eos=True,
            stream_options={"include_forwards": True, "include_usage": True},
        )):  # fmt: skip
            counts += [event["marsbench"]["tokens"]] if "marsbench" in event else []
            if number == 5:
                assert server.call("/v1/speed", {"threshold": 0.0}, "PUT").json()["threshold"] == 0.0
            usage = event.get("usage")
        assert counts[:5] == [1] * 5 and counts[-2] == 4 and sum(counts) == usage["completion_tokens"] == 400
        assert usage["marsbench"]["threshold"] == [0.0, 1.0]
    finally:
        server.call("/v1/speed", {"threshold": 0.95}, "PUT")


def test_the_wire(server: Running) -> None:
    """Guards against streams that clients cannot read, and errors in another form than OpenAI's."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30, "stream": True}
    reply = server.call("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert reply.headers["x-accel-buffering"] == "no" and reply.headers["content-type"].startswith("text/event-stream")
    raw = reply.content
    assert b"\r" not in raw and raw.isascii() and raw.endswith(b"data: [DONE]\n\n") and raw.count(b"[DONE]") == 1
    events = [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant" and events[0]["choices"][0]["delta"]["content"]
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]].count(None) == len(events) - 2
    for path, method, data, status in [
        ("/nowhere", "GET", None, 404),
        ("/v1/completions", "GET", None, 405),
        ("/v1/completions", "POST", b"{", 400),
        ("/v1/completions", "POST", b"x" * (5 * 2**20), 413),
        ("/v1/speed", "PUT", b'{"tau": 1}', 400),
    ]:
        reply = requests.request(method, server.url + path, data=data, headers={"content-type": "application/json"})
        assert (reply.status_code, set(reply.json())) == (status, {"error"}), (path, data)


def test_log_probabilities_are_of_the_tokens_of_the_text(server: Running) -> None:
    """Guards against log-probabilities of other tokens, or none, where an answer ends by a stop string."""
    arguments: dict[str, Any] = {"max_tokens": 24, "method": "ar", "temperature": 2, "seed": 1, "ignore_eos": True}
    plain = arguments | {"prompt": PROMPT, "logprobs": 2}
    choice = server.call("/v1/completions", plain).json()["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    begun = [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)]  # half a character is in its last token
    kept = [token in text[at : at + len(token) + 1] for token, at in begun if "\ufffd" not in token]
    assert len(kept) > 9 and all(kept)
    pairs = [*zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)]
    assert len(pairs) == 24 and all(own <= max(best.values()) and len(best) >= 2 for own, best in pairs)
    *_, end = [event["choices"][0] for event in server.stream(**plain)]
    assert end["finish_reason"] == choice["finish_reason"] and end["logprobs"]["tokens"] == logprobs["tokens"]
    assert end["logprobs"]["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)
    cut = server.call("/v1/completions", plain | {"stop": text[6:12]}).json()["choices"][0]["logprobs"]
    assert 0 < (count := len(cut["tokens"])) < 24 and cut["tokens"] == logprobs["tokens"][:count]
    assert cut["token_logprobs"] == pytest.approx(logprobs["token_logprobs"][:count], abs=1e-4)
    turns = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 1}
    chat = server.call("/v1/chat/completions", arguments | turns).json()["choices"][0]
    assert server.call("/v1/chat/completions", arguments | turns | {"logprobs": False}).status_code == 400
    every = chat["logprobs"]["content"]
    assert len(every) == 24 and all(each["logprob"] <= each["top_logprobs"][0]["logprob"] for each in every)
    assert b"".join(bytes(each["bytes"]) for each in every).decode(errors="replace") == chat["message"]["content"]


BAD: list[tuple[Any, int, str | None]] = [
    ({}, 400, "prompt"), ({"prompt": []}, 400, "prompt"), ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"), ({"prompt": [10**9]}, 400, "prompt"), ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, None), ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"), ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"), ({"prompt": "a", "threshold": 1.5}, 400, "threshold"),
    ({"prompt": "a", "threshold": 0.5, "min_threshold": 0.6}, 400, "min_threshold"),
    ({"prompt": "a", "method": "magic"}, 400, "method"),
    ({"prompt": "a", "method": "ar", "threshold": 0.5}, 400, "threshold"),
    ({"prompt": "a", "block_size": 0}, 400, "block_size"), ({"prompt": "a", "n": 0}, 400, "n"),
    ({"prompt": "a", "n": 200}, 400, "n"), ({"prompt": ["a"] * 65, "n": 2}, 400, "prompt"),
    ({"prompt": "a", "temperature": 1, "top_p": 0}, 400, "top_p"), ({"prompt": "a", "tau": 0.5}, 400, "tau"),
    ({"prompt": "a", "guided_json": {}}, 400, "guided_json"),
    ({"prompt": "a", "stop_token_ids": [5]}, 400, "stop_token_ids"),
    ({"prompt": "a", "tool_choice": "required"}, 400, "tool_choice"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "echo": False, "top_logprobs": 0, "max_tokens": 1}, 200, None),
    ({"prompt": "a", "temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "max_tokens": 1}, 200, None),
    ({"prompt": "a", "presence_penalty": 0.0, "logit_bias": None, "stop_token_ids": [], "max_tokens": 1}, 200, None),
    ({"prompt": "a", "stop": ""}, 400, "stop"), ({"prompt": "a", "model": "other"}, 404, "model"),
    ({"prompt": "a", "n": 1, "top_p": 1, "stop": None, "user": "me", "max_tokens": 1}, 200, None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda body: repr(body)[:40])
def test_what_cannot_be_answered_is_named(server: Running, body: Any, status: int, param: str | None) -> None:
    """Guards against requests answered in another way than asked, and errors that do not say what is wrong."""
    response = server.call("/v1/completions", body)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["param"] == param and response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_cannot_fit_is_not_taken_apart(path: str, server: Running) -> None:
    """Guards against a prompt of 4 MB that takes 700 MB of memory before it is refused as too long."""
    text = "a b " * 2**19
    body: dict[str, Any] = {"prompt": text}
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": text}]}
    before = server.memory()
    response = server.call(path, body)
    assert response.status_code == 400 and "this model's context" in response.json()["error"]["message"]
    assert server.memory() - before < 64 * 2**20


def test_clients_that_vanish_leave_nothing_behind(server: Running) -> None:
    """Guards against rows, queue places and cache that are kept for clients that have gone."""
    rng = random.Random(1)

    def vanish(number: int) -> None:
        kind = {"stream": number % 2 == 0, "max_tokens": rng.randint(50, 400), "ignore_eos": True}
        own = server.send({"prompt": PROMPT * rng.randint(1, 5), **kind})
        time.sleep(rng.random() * 0.3)
        with suppress(TimeoutError):  # a client that has waited long enough goes, too
            if number % 3 == 0:
                own.recv(200)
        own.close()

    list(map(vanish, range(8)))
    before = server.memory()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(vanish, range(MANY)))
    assert eventually(server.is_empty)
    assert server.memory() - before < 100 * 2**20
    assert server.gauge("marsbench:requests_cancelled_total") >= MANY / 4
    assert server.complete(prompt=PROMPT, max_tokens=3)["usage"]["completion_tokens"] > 0


def test_who_goes_away_frees_the_rows(server: Running) -> None:
    """Guards against requests that are decoded after their client has gone."""
    rows = 16
    for streamed in (True, False):
        before = server.gauge("vllm:generation_tokens_total")
        body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": streamed, "method": "ar", "n": rows}
        own = server.send(body)
        assert eventually(lambda: server.gauge("vllm:num_requests_running") == rows)
        own.close()
        assert eventually(server.is_empty)
        assert 0 < server.gauge("vllm:generation_tokens_total") - before < rows * 450


def test_a_reader_that_stalls_delays_no_other(small: Running) -> None:
    """Guards against one client's full buffer that stops the engine for all, and one that is kept for ever."""
    body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": True, "method": "ar", "seed": 0}
    body |= {"stream_options": {"include_forwards": True}}  # so that there is more to send: one chunk for each token
    stalled = [small.send(body, buffer=2048) for _ in range(3)]
    assert small.complete(prompt=PROMPT, max_tokens=50)["usage"]["completion_tokens"] > 0
    assert eventually(small.is_empty), "a client that does not read is decoded for to the end"
    for own in stalled:
        own.settimeout(10)
        received = own.recv(500)
        assert received.startswith(b"HTTP/1.1 200"), "what was sent waits for the reader"
        own.close()


def test_limits_hold(small: Running) -> None:
    """Guards against a server that takes in more than it can hold, or lets in clients without a key."""
    assert small.call("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/speed"):
        assert requests.get(small.url + path).status_code == 401
        assert small.call(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert requests.get(small.url + path, auth=("me", KEY)).status_code == 200
    assert small.call("/v1/completions", {"prompt": "a" * 6000}).status_code == 413
    with small.connect() as own:
        own.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")  # fmt: skip
        assert b" 408 " in own.recv(1000)
    with ThreadPoolExecutor(30) as pool:
        body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}
        responses = list(pool.map(lambda _: small.call("/v1/completions", body), range(30)))
    answered = [response for response in responses if response.status_code == 200]
    turned_away = [response for response in responses if response.status_code == 429]
    assert len(answered) + len(turned_away) == 30 and 4 <= len(answered) < 30
    assert all(response.json()["usage"]["completion_tokens"] == 150 for response in answered)
    assert all("Retry-After" in response.headers for response in turned_away)
    assert small.gauge("marsbench:requests_rejected_total") == len(turned_away)
    assert eventually(small.is_empty)


def test_the_engine_dies_and_the_server_lives(small: Running) -> None:
    """Guards against clients that wait for a lost engine, a server that stays down, and answers cut off at its end."""
    with ThreadPoolExecutor(4) as pool:
        body = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "method": "ar"}
        waiting = pool.submit(small.call, "/v1/completions", body)
        stream = small.stream(**body)
        next(stream)
        children = psutil.Process(small.process.pid).children()
        (engine,) = [child.pid for child in children if "spawn_main" in str(child.cmdline())]
        os.kill(engine, signal.SIGKILL)
        assert eventually(lambda: small.call("/health").status_code == 503, 1)
        assert waiting.result(30).json()["error"]["code"] == "engine_lost"
        assert list(stream)[-1]["error"]["code"] == "engine_lost"
    assert eventually(lambda: small.call("/health").status_code == 200, 400)
    assert small.gauge("marsbench:engine_restarts_total") == 1
    stream = small.stream(**body)
    next(stream)
    small.process.send_signal(signal.SIGTERM)
    small.wait_for("no request is let in")
    assert small.call("/v1/completions", {"prompt": "a"}).status_code == 503
    assert small.call("/health").status_code == 503
    assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
    assert small.process.wait(20) == 0
