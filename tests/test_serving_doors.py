"""The server's routes, with an engine that is made up: who is let in, what bodies cost, how tokens become text."""

import asyncio
import base64
import json
import time
import tracemalloc
from collections import Counter
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from tools import invoke
from transformers import PreTrainedTokenizerFast

from marsbench.serving import app
from marsbench.serving.app import build
from marsbench.serving.engine_client import EngineClient
from marsbench.serving.guards import is_local
from marsbench.serving.messages import Cancel, Ending, Job, Ready, Report, Settings, State
from marsbench.serving.text import Vocabulary, Writer
from marsbench.training.tokenizer import CHAT_TEMPLATE, build_tokenizer

TOKENIZER = build_tokenizer(300, texts=50)
AT = "/v1/completions"


class MadeUp(EngineClient):
    """A client whose engine answers every job with the letters of its prompt, as many as are asked for."""

    def __init__(self, answers: bool = True, **settings: Any) -> None:
        super().__init__(Settings("dir/secret", "micro", **settings), lambda _: None)
        self.ready = Ready(TOKENIZER, 4096, 300, ("ar", "mars", "mars-verified"), 1000)
        self.sent: list[Any] = []
        self.answers = answers

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Job) and self.answers:
            tokens = [message.prompt_ids[0]] * message.max_new_tokens
            ending = Ending("length", len(tokens), 2, None, (4, 4), drafted=6, accepted=Counter({0: 1, 2: 1}))
            report = Report(State(), [message.id], {message.id: [tokens]}, [(message.id, ending)])
            asyncio.get_running_loop().call_soon(self._take, report)


Answer = tuple[int, dict[str, str], bytes]


async def call(
    client: EngineClient, path: str = AT, body: Any = None, method: str = "POST", headers: dict[str, str] | None = None
) -> Answer:  # fmt: skip
    """Status, headers and body of an answer, without any socket."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = {"host": "localhost:8000", "content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()], "http_version": "1.1",
        "scheme": "http", "root_path": "",
    }  # fmt: skip
    messages, left = list[Any](), [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        return left.pop()

    async def send(message: Any) -> None:
        messages.append(message)

    with suppress(RuntimeError):
        await build(client)(scope, receive, send)
    answer_headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], answer_headers, b"".join(message["body"] for message in messages[1:])


def ask(body: Any = None, path: str = AT, method: str = "POST", headers: Any = None, **settings: Any) -> Answer:
    async def alone() -> Answer:
        return await call(MadeUp(**settings), path, body, method, headers)

    return asyncio.run(alone())


def events_of(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize(("options", "variable"), [(["--api-key", ""], None), (["--api-key", " "], None), ([], ""),
                                                   (["--speed-key", ""], None)])  # fmt: skip
def test_an_empty_key_is_refused(options: list[str], variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an empty key, which lets in every request."""
    if variable is not None:
        monkeypatch.setenv("MARSBENCH_API_KEY", variable)
    assert "key is empty" in invoke("serve", "--checkpoint", "nowhere", *options, code=2).output


def test_addresses_and_options_that_do_not_fit() -> None:
    """Guards against a server open to the network without a warning, and narrow windows that save nothing."""
    hosts = ("0.0.0.0", "::", "gpu-7", "localhost", "127.0.0.2", "::1")
    assert [is_local(host) for host in hosts] == [False, False, False, True, True, True]
    output = invoke("serve", "--checkpoint", "nowhere", "--adapt", "--compile", code=2).output
    assert "--adapt chooses windows" in output


def test_what_a_server_says_may_find_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that fails to end because the pipe for its last line is closed."""
    ended = list[str]()

    async def serve(_: Settings, own: Any, say: Any) -> None:
        own.close()
        say("ending")
        ended.append("ended")

    monkeypatch.setattr(app, "_serve", serve)
    app.serve(Settings(port=0), Mock(side_effect=BrokenPipeError))
    assert ended


def test_keys_open_what_they_are_for() -> None:
    """Guards against one key for all routes, a knob for all clients, and a password that only looks like a key."""

    def status(key: str, path: str = "/v1/models", method: str = "GET", **settings: Any) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return ask({"threshold": 0.5} if method == "PUT" else None, path, method, headers, **settings)[0]

    keys = {"api_key": ("one", "two")}
    assert [status(key, **keys) for key in ("one", "two", "three", "")] == [200, 200, 401, 401]
    assert [status("", path, **keys) for path in ("/health", "/ping", "/version")] == [200, 200, 401]
    both = {**keys, "speed_key": "knob"}
    assert [status(key, "/v1/speed", "PUT", **both) for key in ("one", "knob")] == [401, 200]
    assert status("knob", **both) == 200
    assert [status(key, "/v1/speed", "PUT", speed_key="knob") for key in ("", "knob")] == [401, 200]
    assert status("", speed_key="knob") == 200
    assert [status("", "/v1/speed", method, lock_speed=True) for method in ("PUT", "GET")] == [403, 200]
    basic = {"authorization": "Basic " + base64.b64encode(b"me:two").decode()}
    assert ask(None, "/v1/models", "GET", basic, **keys)[0] == 200
    assert ask(None, "/v1/models", "GET", {"authorization": "Basic two"}, **keys)[0] == 401


def test_the_description_is_of_this_server() -> None:
    """Guards against a route or a body that the description promises and the server refuses, or the other way round."""
    description = json.loads(ask(None, "/openapi.json", "GET")[2])
    for path, operations in description["paths"].items():
        statuses = {ask({}, path.format(name="micro"), method.upper())[0] for method in operations}
        assert not statuses & {404, 405}, path
    chat, turn = "/v1/chat/completions", {"role": "user", "content": "a"}
    bodies = [
        (chat, {"messages": [turn]}), (chat, {"messages": []}), (chat, {"messages": [{"content": "a"}]}), (chat, {}),
        (chat, {"messages": [turn], "stream_options": {"include_usage": 3}}), (AT, {"prompt": "a", "n": 0}),
        (chat, {"messages": [turn | {"content": [{"type": "image", "text": "a"}]}]}), (AT, {"prompt": [[1], "a"]}),
        (AT, {"prompt": "a", "threshold": 2}), (AT, {"prompt": "a", "method": "magic"}), (AT, {"prompt": {}}),
    ]  # fmt: skip
    for path, body in bodies:
        content = description["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"] | {"components": description["components"]}
        taken = jsonschema.Draft202012Validator(schema).is_valid(body)
        assert ask(body, path)[0] == (200 if taken else 400), body


@pytest.mark.parametrize(("headers", "status"), [
    ({"host": "evil.example:8000"}, 400), ({"host": "localhost.evil.example"}, 400), ({"host": "["}, 400),
    ({"host": "192.0.2.1"}, 400), ({"host": "127.0.0.1:9"}, 200), ({"host": "[::1]:9"}, 200),
    ({"host": "LocalHost"}, 200),
    ({"host": "mine.example"}, 200), ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
    ({"origin": "http://localhost:3000"}, 403), ({"origin": "http://localhost:8000"}, 200),
    ({"origin": "https://mine.example"}, 200), ({"origin": "https://chat.example"}, 200), ({"origin": "http://["}, 403),
])  # fmt: skip
def test_foreign_names_and_pages_turn_nothing(headers: dict[str, str], status: int) -> None:
    """Guards against another site's page that turns the knob, by a host name of its own that leads to this server."""
    ways = {"allowed_host": ("mine.example",), "cors_origin": ("https://chat.example",)}
    assert ask({"threshold": 0.1}, "/v1/speed", "PUT", headers, **ways)[0] == status


def test_pages_of_other_sites_may_be_let_in() -> None:
    """Guards against a preflight that is refused, and answers that the page is not allowed to read."""
    wish = {"origin": "https://a.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization"}  # fmt: skip
    status, headers, _ = ask(None, AT, "OPTIONS", wish, cors_origin=("*",), api_key=("k",))
    assert status == 200 and headers["access-control-allow-headers"] == "authorization"
    status, headers, _ = ask({"prompt": "a"}, headers={"origin": "https://a.example"}, cors_origin=("*",))
    assert (status, headers["access-control-allow-origin"]) == (200, "*")
    assert ask(None, AT, "OPTIONS", {k: v for k, v in wish.items() if k != "origin"})[0] == 405


def test_the_page_works_under_a_prefix_and_in_no_frame() -> None:
    """Guards against a page that calls routes outside its prefix, and one shown inside another site's page."""
    for root in ("", "/mars"):
        status, headers, body = ask(None, f"{root}/", "GET", root_path=root)
        assert status == 200 and b'fetch("v1/' in body and b'fetch("/' not in body
        assert "frame-ancestors 'none'; base-uri 'none'; form-action 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert ask(None, "/mars", "GET", root_path="/mars")[1]["location"] == "/mars/"
    assert ask(None, "/mars/v1/models", "GET", root_path="/mars")[0] == 200
    assert ask(None, "/v1/models", "GET", root_path="/mars")[0] == 200, "the proxy has taken the prefix away"


@pytest.mark.parametrize("body", [
    {"prompt": [[]] * 25_000}, {"prompt": [1.5] * 20_000}, {"prompt": [[1.5]] * 12_000}, {"prompt": [[1]] * 18_000},
    {"prompt": "a", "stop": [1] * 30_000}, {"prompt": "a", "logit_bias": [[]] * 25_000},
    {"messages": [1] * 20_000}, {"messages": [{"role": "user", "content": [1] * 20_000}]}, {"messages": [{}] * 20_000},
])  # fmt: skip
def test_a_small_body_costs_little(body: dict[str, Any]) -> None:
    """Guards against a body of 75 KB that takes a third of a second and 100 MB to be refused, item by item."""
    ask({"prompt": "a"})
    tracemalloc.start()
    began = time.process_time()
    status, _, raw = ask(body, "/v1/chat/completions" if "messages" in body else AT)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status == 400 and len(raw) < 500 and json.loads(raw)["error"]["param"] == [*body][-1]
    assert peak < 12 * 2**20 and seconds < 1.5  # tracing all allocations takes time


def test_more_answers_than_the_queue_holds_are_refused() -> None:
    """Guards against a client that retries for ever a request that never fits."""
    assert ask({"prompt": ["a"] * 9}, max_queue=8)[0] == 400
    assert ask({"prompt": "a", "n": 9}, max_queue=8)[0] == 400
    assert ask({"prompt": ["a"] * 4, "n": 2}, max_queue=8)[0] == 200


def test_several_answers_and_prompts_stream_side_by_side() -> None:
    """Guards against choices that are mixed up, and texts that differ from those that come at once."""
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3}
    answer = json.loads(ask(body)[2])
    chunks = events_of(ask(body | {"stream": True, "stream_options": {"include_usage": True}})[2])
    for choice in answer["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["prompt_tokens"] == sum(len(TOKENIZER(prompt).input_ids) for prompt in ("ab", "cd"))
    answers = {"prompt": "ab", "n": 3, "seed": 7, "temperature": 1}
    client = MadeUp()
    asyncio.run(call(client, AT, answers))
    assert [message.seed for message in client.sent if isinstance(message, Job)] == [7, 8, 9]


def test_one_answer_that_fails_ends_its_siblings() -> None:
    """Guards against answers that are decoded to their end for a request that has failed."""

    async def fail_one() -> tuple[Answer, list[Any]]:
        client = MadeUp(answers=False)
        task = asyncio.create_task(call(client, AT, {"prompt": ["ab", "cd", "ef"]}))
        while len(client.sent) < 3:
            await asyncio.sleep(0.01)
        failed = Ending("cancelled", 0, 0, None, (1, 1), failure="no memory")
        client._take(Report(State(), [], {}, [(client.sent[1].id, failed)]))
        return await task, client.sent[3:]

    (status, _, raw), after = asyncio.run(fail_one())
    assert status == 500 and b"no memory" in raw and [type(message) for message in after] == [Cancel, Cancel]


def test_guesses_are_told_under_vllms_names() -> None:
    """Guards against numbers that vLLM's tools cannot find or that contradict each other."""
    metrics = json.loads(ask({"prompt": "ab", "n": 2})[2])["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": round(4 / 12, 4), "acceptance_histogram": [2, 0, 2, 0],
        "num_spec_steps": 4, "num_accepted_draft_tokens": 4, "num_draft_tokens": 12, "num_spec_tokens": 3,
    }  # fmt: skip


def test_routes_that_clients_look_for() -> None:
    """Guards against models not found by name, a local path shown, HEAD refused, a request's id lost or forged."""
    status, _, raw = ask(None, "/v1/models/micro", "GET")
    assert status == 200 and json.loads(raw)["id"] == "micro" and b"secret" not in raw
    assert b"secret" not in ask(None, "/v1/models", "GET")[2] and ask(None, "/v1/models/other", "GET")[0] == 404
    for path in ("/health", "/v1/models", "/metrics"):
        assert ask(None, path, "HEAD")[0] == 200
    assert ask(None, AT, "HEAD")[0] == 405
    for number, kept in (("mine-1", True), ("a b", False)):
        assert (ask({}, headers={"x-request-id": number})[1]["x-request-id"] == number) == kept


def test_requests_are_written_down_by_their_numbers(tmp_path: Path) -> None:
    """Guards against requests that cannot be followed by their ids, and texts in a log."""
    log = tmp_path / "requests.jsonl"
    for stream in (False, True):
        ask({"prompt": "xyz", "n": 2, "stream": stream}, headers={"x-request-id": "mine"}, request_log=log)
    ask({}, headers={"x-request-id": "a b"}, request_log=log)
    plain, streamed, wrong = (json.loads(line) for line in log.read_text().splitlines())
    for line in (plain, streamed):
        assert (line["id"], line["status"], line["route"]) == ("mine", 200, f"POST {AT}") and line["seconds"] >= 0
        assert (line["completion_tokens"], line["finish"]) == (32, ["length", "length"])
    assert wrong["id"] != "a b" and wrong["status"] == 400 and "xyz" not in log.read_text()


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}",
        b'{"prompt":"a","stop":[' + b"[]," * 1_300_000 + b"[]]}",
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":0' % token for token in range(350_000)) + b"}}",
    ],
    ids=["lists", "stops", "fields"],
)
def test_a_large_body_of_small_parts_is_not_parsed(body: bytes) -> None:
    """Guards against a body of 4 MB that keeps the event loop from all other requests for seconds."""
    began = time.thread_time()
    _, _, raw = ask(body)
    assert json.loads(raw)["error"]["param"] in ("prompt", "stop", "logit_bias")
    assert time.thread_time() - began < 0.5


def test_a_stop_string_ends_the_job_at_its_token() -> None:
    """Guards against tokens that are counted after a stop string, and a wrong finish reason."""
    client = MadeUp()
    answer = json.loads(asyncio.run(call(client, AT, {"prompt": "aa", "max_tokens": 6, "stop": "aaa"}))[2])
    assert answer["usage"]["completion_tokens"] < 6, "tokens after it are not counted"
    assert answer["usage"]["marsbench"]["forwards"] == 1, "nor the forwards that the engine took meanwhile"
    assert answer["choices"][0]["finish_reason"] == "stop", "though the engine came to the limit in the same report"
    assert not any(isinstance(message, Cancel) for message in client.sent)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["tool_calls", "prefix", "reasoning_content", "contnet", "refusal", "annotations"]) | st.text(
    min_size=1, max_size=12
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["system", "user", "assistant", "developer"]), _NAMES, _JSON, st.booleans())
def test_what_a_message_says_beside_its_words_is_refused_unless_it_is_nothing(
    role: str, name: str, value: Any, in_part: bool
) -> None:
    """Guards against an answer to another conversation than the one that was sent."""
    assume(name not in ("role", "content", "name", "type", "text"))
    part: dict[str, Any] = {"type": "text", "text": "hi"}
    message = (
        {"role": role, "content": [part | {name: value}]} if in_part else {"role": role, "content": "hi", name: value}
    )
    status, _, raw = ask({"messages": [message], "max_tokens": 1}, "/v1/chat/completions")
    if value in (None, False, 0, "", [], {}):
        assert status == 200, raw
    else:
        error = json.loads(raw)["error"]
        assert status == 400 and error["param"] == "messages" and repr(name) in error["message"]


@pytest.mark.parametrize("more", [{}, {"content": None}, {"contnet": ""}, {"content": None, "tool_calls": None}])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_message_without_content_is_refused(role: str, more: dict[str, Any]) -> None:
    """Guards against an answer to a message whose text is missing."""
    status, _, raw = ask({"messages": [{"role": role, **more}]}, "/v1/chat/completions")
    assert status == 400 and "'content'" in json.loads(raw)["error"]["message"]


def test_names_go_to_the_chat_template() -> None:
    """Guards against names of speakers that are lost although the template has a place for them."""
    client = MadeUp()
    client.ready.tokenizer.chat_template = "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"
    body = {"messages": [{"role": "user", "name": "Ann", "content": "hi"}], "max_tokens": 1}
    try:
        assert asyncio.run(call(client, "/v1/chat/completions", body))[0] == 200
    finally:
        client.ready.tokenizer.chat_template = CHAT_TEMPLATE
    assert TOKENIZER.decode(client.sent[0].prompt_ids) == "Ann: hi"


@pytest.mark.parametrize(
    ("options", "status"),
    [({"continuous_usage_stats": True}, 400), ({"continuous_usage_stats": False, "include_obfuscation": None}, 200),
     ({"include_usage": 1}, 400), ([], 400), (None, 200)],
)  # fmt: skip
def test_options_of_streams_are_looked_at(options: Any, status: int) -> None:
    """Guards against a stream that lacks what was asked for, without an error."""
    actual, _, raw = ask({"prompt": "ab", "stream": True, "stream_options": options})
    assert actual == status, raw
    if status != 200:
        assert json.loads(raw)["error"]["param"] == "stream_options"


@pytest.mark.parametrize(
    "body", [b'{"prompt":"a",}', b"", b"{", b"[1,]", b'{"prompt":"a"}x', b"\xff\xfe", b"[" * 100_000,
             b'{"prompt":"\\ud800"}', b'{"prompt":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"],
)  # fmt: skip
def test_what_is_no_json_names_no_field(body: bytes) -> None:
    """Guards against a place in the JSON text that is reported as the name of a field."""
    status, _, raw = ask(body)
    assert status == 400 and json.loads(raw)["error"]["param"] is None


def test_numbers_of_any_length() -> None:
    """Guards against a traceback, or seconds of work, for a number of thousands of digits."""
    long = b"9" * 100_000
    for body in (b'{"prompt":"a","max_tokens":%b}', b'{"prompt":"a","seed":-%b}', b'{"prompt":[%b]}',
                 b'{"prompt":"a","temperature":%b}', b'{"prompt":"a","logit_bias":%b}'):  # fmt: skip
        assert ask(body.replace(b"%b", long))[0] == 400


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER)


@cache
def falls_back_to_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has one: spaces are marks before words, unknown characters are bytes. 3 + N is byte N."""
    words = ["\u2581", "\u2581true", "true", *"abehlortuwyA", "\u2581wor", "\u2581a"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    core = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>",
                                byte_fallback=True, fuse_unk=True))  # fmt: skip
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def portions(items: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[first:last] for first, last in pairwise(places)]


def cut_at(text: str, stops: list[str]) -> str:
    """A text up to the stop string that is complete first, of several the longest: by brute force."""
    for end in range(1, len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(starts)]
    return text


WORDS = st.one_of(st.text(max_size=20), st.text("ab", max_size=20))  # in the latter, stop strings overlap
IDS = st.one_of(
    st.lists(st.integers(0, 299), max_size=40),  # bytes of characters that never end among them
    WORDS.map(lambda text: list(TOKENIZER(text, add_special_tokens=False).input_ids)),
)
STOPS = st.text("ab", min_size=1, max_size=4) | st.text("abcdé ", min_size=1, max_size=3) | st.sampled_from("€\nt")


@settings(deadline=None, max_examples=200)
@given(IDS, st.lists(st.integers(0, 100)), st.lists(STOPS, max_size=3))
@example(list("€".encode()), [1, 2], [])
def test_text_in_portions_is_the_text_up_to_its_stop(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    """Guards against characters broken, doubled or lost where a forward ends, and any part of a stop string sent."""
    writer, text, sent = Writer(vocabulary(), stops), cut_at(text_of(ids), stops), ""
    for portion in portions(ids, cuts):
        sent += writer.write(portion)
        assert text.startswith(sent)
    assert sent + writer.close() == text
    assert writer.stopped == (text != text_of(ids)) and (writer.stopped or writer.used == len(ids))


def test_long_stop_strings_are_soon_told_apart() -> None:
    """Guards against stop strings, each nearly the answer, that keep the event loop from all clients for minutes."""
    text = "a b " * 500
    writer, began = Writer(vocabulary(), [f"{text}{number}" for number in range(64)]), time.thread_time()
    assert writer.write(TOKENIZER(text, add_special_tokens=False).input_ids) == "" and writer.close() == text
    assert time.thread_time() - began < 2


BYTES = st.lists(
    st.sampled_from([b"\n", b"\xe2", b"\x82", b"\xac", b"a", b" ", b"\xff", "\N{EURO SIGN}".encode()]), max_size=30
).map(b"".join)


@settings(deadline=None)
@given(BYTES, st.lists(st.integers(0, 100)))
@example(b"\n\xe2", [1])
@example(b"\xe2\n", [1])
def test_what_stands_beside_half_a_character_is_kept(data: bytes, cuts: list[int]) -> None:
    """Guards against a line break that is in the stream and not in the whole answer, or in neither."""
    writer = Writer(Vocabulary(falls_back_to_bytes()))
    sent = [writer.write(portion) for portion in portions([3 + byte for byte in data], cuts)]
    assert "".join([*sent, writer.close()]) == data.decode("utf-8", "replace")


def test_tokens_look_as_they_do_in_a_text() -> None:
    """Guards against words without their space, characters in parts, and stops by list order."""
    own, known = falls_back_to_bytes(), Vocabulary(falls_back_to_bytes())
    for name, text in {
        "\u2581true": " true", "true": "true", "\u2581": " ", "\u2581wor": " wor", "<0x0A>": "\n",
    }.items():  # fmt: skip
        assert known.bytes(own.convert_tokens_to_ids(name)) == text.encode()
    assert known.bytes(3 + 0xE2) == b"\xe2" and known.bytes(2) == b"", "the latter is special"
    writer = Writer(known)
    names = ["\u2581wor", "l", "<0xC3>", "<0xA9>", "\u2581", "</s>", "\u2581true"]
    assert writer.write(own.convert_tokens_to_ids(names)) == " worl\N{LATIN SMALL LETTER E WITH ACUTE}  true"
    ids = TOKENIZER("one two three", add_special_tokens=False).input_ids
    writer = Writer(vocabulary(), ["three", "two"])
    assert writer.write(ids) == "one " and writer.stopped
    assert text_of(ids[: writer.used]).endswith("two") and writer.close() == ""
