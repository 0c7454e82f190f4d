"""The server's doors, with an engine that is made up: who is let in, what bodies cost, what sockets may hold up."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from marsbench.cli import app as command
from marsbench.serving.answers import Answers, Completion
from marsbench.serving.app import build
from marsbench.serving.connection import Connection
from marsbench.serving.desk import Desk
from marsbench.serving.guards import is_open_to_all
from marsbench.serving.logs import Log
from marsbench.serving.messages import Cancel, Ending, Job, Likelihood, Ready, Report, State
from marsbench.serving.serve import AT_ONCE, Server
from marsbench.serving.settings import Settings
from marsbench.training.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(300, texts=50)
AT = "/v1/completions"


class MadeUp(Desk):
    """A desk whose engine answers every job with the letters of its prompt, as many as are asked for."""

    def __init__(self, answers: bool = True, **settings: Any) -> None:
        super().__init__(Settings("dir/secret", "micro", **settings), lambda _: None)
        self.ready = Ready(TOKENIZER, 4096, 300, ("ar", "mars", "mars-verified"), 1000)
        self.sent: list[Any] = []
        self.answers = answers

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Job) and self.answers:
            tokens = [message.prompt_ids[0]] * message.max_new_tokens
            told = [*message.prompt_ids, *tokens] if message.echo else tokens
            scored = Likelihood(told, [-1.0] * len(told), [[(one, -1.0)] for one in told])
            said = scored if message.best is not None else None
            ending = Ending(
                "length", len(tokens), 2, None, (4, 4), True, (1, 0, 1), 6, None if message.streamed else said
            )
            report = Report(State(), [message.id], {message.id: [(tokens, said if message.streamed else None)]},
                            [(message.id, ending)])  # fmt: skip
            asyncio.get_running_loop().call_soon(self._take, report)


Answer = tuple[int, dict[str, str], bytes]


async def asked(
    desk: Desk, path: str = AT, body: Any = None, method: str = "POST", headers: dict[str, str] | None = None,
    app: Any = None,
) -> Answer:  # fmt: skip
    """Status, headers and body of an answer, without any socket."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    told = {"host": "localhost:8000", "content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in told.items()], "http_version": "1.1",
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
        await (app or build(desk, lambda _: None))(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], found, b"".join(one["body"] for one in messages[1:])


def ask(body: Any = None, path: str = AT, method: str = "POST", headers: Any = None, **settings: Any) -> Answer:
    async def alone() -> Answer:
        return await asked(MadeUp(**settings), path, body, method, headers)

    return asyncio.run(alone())


def events_of(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]


# ---- keys, names, pages


@pytest.mark.parametrize(("options", "variable"), [(["--api-key", ""], None), (["--api-key", " "], None), ([], ""),
                                                   (["--speed-key", ""], None)])  # fmt: skip
def test_an_empty_key_is_refused(options: list[str], variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a key that every request brings, and so none at all."""
    if variable is not None:
        monkeypatch.setenv("MARSBENCH_API_KEY", variable)
    found = CliRunner().invoke(command, ["serve", "--checkpoint", "nowhere", *options])
    assert found.exit_code == 2 and "key is empty" in found.output


def test_windows_by_rows_and_compiled_steps_are_refused_together() -> None:
    """Guards against narrower windows that save nothing, since they cost as much in a fixed shape."""
    found = CliRunner().invoke(command, ["serve", "--checkpoint", "nowhere", "--adapt", "--compile"])
    assert found.exit_code != 0 and "--adapt chooses windows" in found.output + str(found.exception)


def test_an_open_address_without_a_key_is_noticed() -> None:
    """Guards against a server that the whole network may use without a word of it."""
    hosts = ("0.0.0.0", "::", "gpu-7", "localhost", "127.0.0.2", "::1")
    assert [is_open_to_all(Settings("", host=host)) for host in hosts] == [True, True, True, False, False, False]
    assert not is_open_to_all(Settings("", host="0.0.0.0", api_key=("k",)))


def test_keys_open_what_they_are_for() -> None:
    """Guards against one key for all, a knob that everybody turns, and a password that only looks like a key."""

    def status(key: str, path: str = "/v1/models", method: str = "GET", **settings: Any) -> int:
        told = {"authorization": f"Bearer {key}"} if key else {}
        return ask({"threshold": 0.5} if method == "PUT" else None, path, method, told, **settings)[0]

    keys = {"api_key": ("one", "two")}
    assert [status(key, **keys) for key in ("one", "two", "three", "")] == [200, 200, 401, 401]
    assert status("", "/health", **keys) == status("", "/ping", **keys) == 200
    both = {**keys, "speed_key": "knob"}
    assert [status(key, "/v1/speed", "PUT", **both) for key in ("one", "knob")] == [401, 200]
    assert status("knob", **both) == 200
    assert [status(key, "/v1/speed", "PUT", speed_key="knob") for key in ("", "knob")] == [401, 200]
    assert status("", speed_key="knob") == 200 and status("one", "/v1/speed", "PUT", **keys, lock_speed=True) == 403
    basic = {"authorization": "Basic " + base64.b64encode(b"me:two").decode()}
    assert ask(None, "/v1/models", "GET", basic, **keys)[0] == 200
    assert ask(None, "/v1/models", "GET", {"authorization": "Basic two"}, **keys)[0] == 401


@pytest.mark.parametrize(("told", "status"), [
    ({"host": "evil.example:8000"}, 403), ({"host": "localhost.evil.example"}, 403), ({"host": "["}, 403),
    ({"host": "127.0.0.1:9"}, 200), ({"host": "[::1]:9"}, 200), ({"host": "LocalHost"}, 200),
    ({"host": "mine.example"}, 200), ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
    ({"origin": "http://localhost:3000"}, 403), ({"origin": "http://localhost:8000"}, 200),
    ({"origin": "https://mine.example"}, 200), ({"origin": "https://chat.example"}, 200), ({"origin": "http://["}, 403),
])  # fmt: skip
def test_foreign_names_and_pages_turn_nothing(told: dict[str, str], status: int) -> None:
    """Guards against another site's page that turns the knob, by a name that it has made lead here."""
    ways = {"allowed_host": ("mine.example",), "cors_origin": ("https://chat.example",)}
    assert ask({"threshold": 0.1}, "/v1/speed", "PUT", told, **ways)[0] == status


def test_pages_of_other_sites_may_be_let_in() -> None:
    """Guards against a preflight that is refused, and answers that the page is not allowed to read."""
    wish = {"origin": "https://a.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization"}  # fmt: skip
    status, headers, _ = ask(None, AT, "OPTIONS", wish, cors_origin=("*",), api_key=("k",))
    assert status == 204 and headers["access-control-allow-headers"] == "authorization"
    status, headers, _ = ask({"prompt": "a"}, headers={"origin": "https://a.example"}, cors_origin=("*",))
    assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert ask(None, AT, "OPTIONS", {k: v for k, v in wish.items() if k != "origin"})[0] == 405


def test_the_page_works_under_a_prefix_and_in_no_frame() -> None:
    """Guards against a page that asks for the root of another server, and one inside another's page."""
    for root in ("", "/mars"):
        status, headers, body = ask(None, f"{root}/", "GET", root_path=root)
        assert status == 200 and b'fetch("v1/' in body and b'fetch("/' not in body
        assert "frame-ancestors 'none'; base-uri 'none'; form-action 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert ask(None, "/mars", "GET", root_path="/mars")[1]["location"] == "/mars/"
    assert ask(None, "/mars/v1/models", "GET", root_path="/mars")[0] == 200
    assert ask(None, "/v1/models", "GET", root_path="/mars")[0] == 200, "the proxy has taken the prefix away"


# ---- bodies


@pytest.mark.parametrize("body", [
    {"prompt": [[]] * 25_000}, {"prompt": [1.5] * 20_000}, {"prompt": [[1.5]] * 12_000}, {"prompt": [[1]] * 18_000},
    {"prompt": "a", "stop": [1] * 30_000}, {"prompt": "a", "logit_bias": [[]] * 25_000},
])  # fmt: skip
def test_a_small_body_costs_little(body: dict[str, Any]) -> None:
    """Guards against 75 KB that take a third of a second and a hundred megabytes to be refused."""
    ask({"prompt": "a"})
    tracemalloc.start()
    began = time.process_time()
    assert ask(body)[0] == 400
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * 2**20 and seconds < 1.5  # with all allocations traced, which takes its time


@pytest.mark.parametrize("messages", [[1] * 20_000, [{"role": "user", "content": [1] * 20_000}], [{}] * 20_000])
def test_a_bad_conversation_costs_little(messages: list[Any]) -> None:
    """Guards against an error for each item of a list."""
    _, _, raw = ask({"messages": messages}, "/v1/chat/completions")
    assert len(raw) < 500 and json.loads(raw)["error"]["param"] == "messages"


def test_what_does_not_fit_into_the_queue_is_wrong_and_not_early() -> None:
    """Guards against a client that tries again for ever what can never be answered."""
    assert ask({"prompt": ["a"] * 9}, max_queue=8)[0] == 400
    assert ask({"prompt": "a", "n": 9}, max_queue=8)[0] == 400
    assert ask({"prompt": ["a"] * 4, "n": 2}, max_queue=8)[0] == 200


def test_the_tokenizer_is_not_for_who_sends_the_most() -> None:
    """Guards against large texts that keep everybody else from the only tokenizer, and a drain that they outlast."""

    async def tried() -> tuple[list[int], int, int]:
        desk = MadeUp(max_body=200_000)
        desk.ready = replace(desk.ready, context=2**16)
        app = build(desk, lambda _: None)
        large = {"prompt": "a b " * 2**15}
        slow = [asyncio.create_task(asked(desk, "/tokenize", large, app=app)) for _ in range(20)]
        await asyncio.sleep(0.05)
        chat, _, _ = await asked(desk, AT, {"prompt": "a"}, app=app)
        statuses = [(await one)[0] for one in slow]
        desk.draining = True
        return statuses, chat, (await asked(desk, "/tokenize", {"prompt": "a"}, app=app))[0]

    statuses, chat, draining = asyncio.run(tried())
    assert statuses.count(200) <= 2 and statuses.count(200) + statuses.count(429) == 20 and chat == 200
    assert draining == 503


# ---- what clients send


def test_several_answers_and_prompts_stream_side_by_side() -> None:
    """Guards against choices that are mixed up, and texts that differ from those that come at once."""
    for body in ({"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3}, {"prompt": "ab", "echo": True, "max_tokens": 3},
                 {"prompt": ["ab", "cd"], "logprobs": 1, "max_tokens": 2}):  # fmt: skip
        whole = json.loads(ask(body)[2])
        chunks = events_of(ask(body | {"stream": True, "stream_options": {"include_usage": True}})[2])
        for choice in whole["choices"]:
            own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            assert "".join(one["text"] for one in own) == choice["text"]
            assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
            if choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    assert [one for part in own if part["logprobs"] for one in part["logprobs"][name]] == values
        assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["metrics"] == whole["metrics"]
    assert whole["usage"]["prompt_tokens"] == sum(len(TOKENIZER(one).input_ids) for one in ("ab", "cd"))
    answers = {"prompt": "ab", "n": 3, "seed": 7, "temperature": 1}
    desk = MadeUp()
    asyncio.run(asked(desk, AT, answers))
    assert [one.seed for one in desk.sent if isinstance(one, Job)] == [7, 8, 9]


def test_one_answer_that_fails_ends_its_siblings() -> None:
    """Guards against answers that are decoded to their end for a request that has been told of an error."""

    async def tried() -> tuple[Answer, list[Any]]:
        desk = MadeUp(answers=False)
        task = asyncio.create_task(asked(desk, AT, {"prompt": ["ab", "cd", "ef"]}))
        while len(desk.sent) < 3:
            await asyncio.sleep(0.01)
        failed = Ending("cancelled", 0, 0, None, (1, 1), failure="no memory")
        desk._take(Report(State(), [], {}, [(desk.sent[1].id, failed)]))
        return await task, desk.sent[3:]

    (status, _, raw), after = asyncio.run(tried())
    assert status == 500 and b"no memory" in raw and [type(one) for one in after] == [Cancel, Cancel]


def test_guesses_are_told_under_vllms_names() -> None:
    """Guards against numbers that its tools cannot find or that contradict each other."""
    found = json.loads(ask({"prompt": "ab", "n": 2})[2])["metrics"]["speculative_decoding"]
    assert found == {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": round(4 / 12, 4), "acceptance_histogram": [2, 0, 2],
        "num_spec_steps": 4, "num_accepted_draft_tokens": 4, "num_draft_tokens": 12, "num_spec_tokens": 2,
    }  # fmt: skip


def test_routes_that_clients_look_for() -> None:
    """Guards against clients that look a model up by its name, and a local path that strangers are told."""
    status, _, raw = ask(None, "/v1/models/micro", "GET")
    assert status == 200 and json.loads(raw)["id"] == "micro" and b"secret" not in raw
    assert b"secret" not in ask(None, "/v1/models", "GET")[2] and ask(None, "/v1/models/other", "GET")[0] == 404
    assert json.loads(ask(None, "/version", "GET")[2])["version"] and ask(None, "/ping", "GET")[0] == 200


def test_bytes_of_parts_of_characters_are_their_own() -> None:
    """Guards against the bytes of a replacement character, of which nobody can make text."""
    desk = MadeUp()
    text = "ab" + "\u20ac" * 2
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    pairs = [Answers(desk).token(one) for one in ids]
    assert bytes(byte for _, own in pairs for byte in own).decode() == text
    assert any("\N{REPLACEMENT CHARACTER}" in shown for shown, _ in pairs)


async def paused(desk: Desk, body: Any) -> tuple[float, bytes]:
    """For how long a request keeps the event loop from all others at most, in seconds of its thread; and the answer."""
    app, longest = build(desk, lambda _: None), 0.0
    task, last = asyncio.create_task(asked(desk, AT, body, app=app)), time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        longest, last = max(longest, time.thread_time() - last), time.thread_time()
    return longest, (await task)[2]


def test_a_long_prompts_log_probabilities_take_no_time_of_others() -> None:
    """Guards against work of the square of a prompt's length, and a text for every token, on the event loop."""
    body = {"prompt": "ab", "max_tokens": 4000, "logprobs": 5}
    longest, raw = asyncio.run(paused(MadeUp(max_new_tokens=4000), body))
    assert len(json.loads(raw)["choices"][0]["logprobs"]["tokens"]) == 4000
    assert longest < 0.1


def test_an_echoed_prompts_log_probabilities_are_streamed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[str]()
    worded = Completion._logprobs

    def noted(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return worded(*arguments)

    monkeypatch.setattr(Completion, "_logprobs", noted)
    for most in (0, 3):
        body = {"prompt": "ab" * 500, "max_tokens": most, "logprobs": 0, "echo": True, "stream": True}
        events = events_of(asyncio.run(paused(MadeUp(), body))[1])
        scored = [one["choices"][0]["logprobs"] for one in events if one["choices"][0]["logprobs"]]
        assert [len(one["tokens"]) for one in scored] == [len(TOKENIZER("ab" * 500).input_ids) + most]
    assert threads and all(name.startswith("tokenizer") for name in threads)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}",
        b'{"prompt":"a","stop":[' + b"[]," * 1_300_000 + b"[]]}",
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":0' % one for one in range(350_000)) + b"}}",
    ],
    ids=["lists", "stops", "fields"],
)
def test_a_large_body_of_small_parts_is_not_parsed(body: bytes) -> None:
    longest, raw = asyncio.run(paused(MadeUp(), body))
    assert b"lists, objects and fields" in raw
    assert longest < 0.1


def test_brackets_in_a_text_are_no_parts() -> None:
    text = '[{:\\" ' * 150_000
    assert b"this model's context" in ask({"prompt": text})[2]
    unfinished = b'{"prompt":"' + rb"\"[" * 1_000_000  # which could be begun at each of its quotes
    assert asyncio.run(paused(MadeUp(), unfinished))[0] < 0.5


# ---- logs


def test_requests_are_written_down_by_their_numbers(tmp_path: Path) -> None:
    """Guards against requests that nobody can follow, and numbers that forge lines."""
    log = tmp_path / "requests.jsonl"
    _, headers, _ = ask({"prompt": "ab", "n": 2}, headers={"x-request-id": "mine-1"}, request_log=log)
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = ask({}, headers={"x-request-id": "a b"}, request_log=log)
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert headers["x-request-id"] == second["id"] != "a b" and second["status"] == 400
    assert (first["id"], first["status"], first["completion_tokens"]) == ("mine-1", 200, 32)
    assert first["route"] == f"POST {AT}" and first["seconds"] > 0 and "ab" not in first.values()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_ends_no_log_but_its_own() -> None:
    """Guards against a server that ends because what it writes on the side finds no room."""
    said = list[str]()
    log = Log(Path("/dev/full"), said.append, lambda: {"head": 1})
    for number in range(100):
        log.write({"number": number})
    assert len(said) == 1 and "No space left" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_ends_nothing_though_nobody_can_be_told() -> None:
    """Guards against an engine that dies of its full log because what it says goes to the same disk."""

    def say(_: str) -> None:
        raise OSError(28, "No space left on device")

    log = Log(Path("/dev/full"), say, lambda: {"head": 1})
    log.write({"number": 1})


def test_a_long_log_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a log that fills the disk, and a second file that does not begin as the first did."""
    monkeypatch.setattr("marsbench.serving.logs.MOST_BYTES", 200)
    log = Log(tmp_path / "log", print, lambda: {"head": True})
    for number in range(30):
        log.write({"number": number})
    files = [tmp_path / "log.1", tmp_path / "log"]
    assert all(file.stat().st_size <= 250 and file.read_text().startswith('{"head": true}') for file in files)
    assert json.loads(files[1].read_text().splitlines()[-1]).get("number", 29) == 29


# ---- sockets

Handler = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]
SLOW = {"read_timeout": 0.4, "stall_timeout": 1.0}


async def large(scope: Any, receive: Any, send: Any) -> None:
    """An answer larger than all buffers on its way."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * (16 * 2**20), "more_body": False})


async def waiting(scope: Any, receive: Any, send: Any) -> None:
    """No answer, as long as the client is there; it notes how that ended."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope["state"]["gone"].append(time.monotonic())


@asynccontextmanager
async def serving(app: Any, gone: list[float] | None = None, **settings: Any) -> AsyncIterator[tuple[int, Any]]:
    """A server on a port of its own."""

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["gone"] = gone
        await app(scope, receive, send)

    own = socket.create_server(("127.0.0.1", 0))
    way: Any = functools.partial(Connection, Settings("", **settings))
    server = uvicorn.Server(uvicorn.Config(with_state, log_level="critical", lifespan="off", http=way, ws="none"))
    task = asyncio.create_task(server.serve(sockets=[own]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield own.getsockname()[1], server
    finally:
        server.should_exit = server.force_exit = True
        await task


def connected(port: int, buffer: int | None = None) -> socket.socket:
    own = socket.socket()
    if buffer is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    own.connect(("127.0.0.1", port))
    own.setblocking(False)
    return own


async def until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def cut_within(own: socket.socket, seconds: float) -> bool:
    """Whether the other side ends a connection in time; what comes before that is read."""

    async def to_the_end() -> None:
        with suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(own, 65536):
                pass

    try:
        await asyncio.wait_for(to_the_end(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def test_a_head_that_never_ends_holds_nobody_up() -> None:
    """Guards against half a request line, sent again and again, that holds connections for ever."""

    async def tried() -> None:
        async with serving(waiting, [], **SLOW) as (port, _):
            loop = asyncio.get_running_loop()
            for start in (b"", b"GE", HEAD):
                own = connected(port)
                await loop.sock_sendall(own, start)
                assert await cut_within(own, 20), start
            with connected(port) as patient:
                await loop.sock_sendall(patient, HEAD + b"\r\n")
                assert not await cut_within(patient, 1), "this one has sent all, and waits for its answer"

    asyncio.run(tried())


def test_newcomers_get_in_though_many_hold_on() -> None:
    """Guards against as many sockets as there may be, that ask for nothing and keep everybody else out."""

    async def tried() -> None:
        async with serving(large, max_connections=8, read_timeout=30.0) as (port, server):
            held = [connected(port) for _ in range(30)]
            await until(lambda: len(server.server_state.connections) == 8)
            own = connected(port)
            await asyncio.get_running_loop().sock_sendall(own, HEAD + b"Connection: close\r\n\r\n")
            assert (await asyncio.get_running_loop().sock_recv(own, 100)).startswith(b"HTTP/1.1 200")
            assert len(server.server_state.connections) <= 8
            for one in [*held, own]:
                one.close()

    asyncio.run(tried())


def test_few_come_in_at_once_and_many_may_wait() -> None:
    """Guards against a wave that needs more files than there are before anybody's place can be taken."""

    async def tried() -> None:
        own, way = socket.create_server(("127.0.0.1", 0)), functools.partial(Connection, Settings(""))
        quiet: Any = {"log_level": "critical", "lifespan": "off", "ws": "none", "http": way}
        server = Server(uvicorn.Config(waiting, backlog=AT_ONCE, **quiet))
        task, inside = asyncio.create_task(server.serve(sockets=[own])), server.server_state.connections
        await until(lambda: server.started)
        held, most = [connected(own.getsockname()[1]) for _ in range(100)], 0
        while len(inside) < len(held):
            before = len(inside)
            await asyncio.sleep(0)
            most = max(most, len(inside) - before)
        assert most <= AT_ONCE
        server.should_exit = server.force_exit = True
        await task
        for one in held:
            one.close()

    asyncio.run(tried())


def test_a_reader_that_takes_nothing_is_let_go() -> None:
    """Guards against an answer that waits for a window of zero for ever, streamed or not."""

    async def tried() -> None:
        async with serving(large, **SLOW) as (port, server):
            own = connected(port, 2048)
            await asyncio.get_running_loop().sock_sendall(own, HEAD + b"Connection: close\r\n\r\n")
            await until(lambda: len(server.server_state.connections) == 1)
            await until(lambda: not server.server_state.connections)
            slow, taken = connected(port, 2**16), 0
            await asyncio.get_running_loop().sock_sendall(slow, HEAD + b"Connection: close\r\n\r\n")
            for _ in range(12):  # who takes a little is kept
                taken += len(await asyncio.get_running_loop().sock_recv(slow, 2**17))
                await asyncio.sleep(0.15)
            assert len(server.server_state.connections) == 1 and taken
            slow.close()

    asyncio.run(tried())


def test_who_sends_ahead_and_goes_away_is_gone() -> None:
    """Guards against a row that is decoded to its end for a client that has sent a byte more and left."""

    async def tried() -> None:
        gone = list[float]()
        async with serving(waiting, gone) as (port, _):
            own = connected(port)
            await asyncio.get_running_loop().sock_sendall(own, HEAD + b"\r\n")
            await asyncio.sleep(0.1)
            await asyncio.get_running_loop().sock_sendall(own, b"G")
            await asyncio.sleep(0.1)
            own.close()
            await until(lambda: gone)

    asyncio.run(tried())


async def in_two_parts(scope: Any, receive: Any, send: Any) -> None:
    """An answer that takes a moment."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    await asyncio.sleep(0.3)
    await send({"type": "http.response.body", "body": b"second"})


def test_what_comes_behind_a_last_request_is_passed_over() -> None:
    """Guards against an answer that is cut, with a traceback, because its client sends a line break too many."""

    async def tried() -> None:
        async with serving(in_two_parts) as (port, _):
            own, loop = connected(port), asyncio.get_running_loop()
            await loop.sock_sendall(own, HEAD + b"Connection: close\r\n\r\n")
            found = b""
            while data := await asyncio.wait_for(loop.sock_recv(own, 1000), 20):
                found += data
                if b"second" not in found:
                    await loop.sock_sendall(own, b"\r\n")
            assert b"first" in found and b"second" in found

    asyncio.run(tried())


def test_a_body_without_an_end_is_cut_once_it_is_refused() -> None:
    """Guards against a client that is read for ever after its answer."""

    async def tried() -> None:
        desk = MadeUp(api_key=("k",))
        async with serving(build(desk, print), **SLOW) as (port, _):
            own, loop = connected(port), asyncio.get_running_loop()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            await loop.sock_sendall(own, head)
            began, answer = time.monotonic(), b""
            with pytest.raises(OSError):
                while time.monotonic() - began < 20:
                    await loop.sock_sendall(own, b"5\r\nhello\r\n")
                    await asyncio.sleep(0.02)
                    with suppress(BlockingIOError):
                        answer += own.recv(1000)
            assert b" 401 " in answer

    asyncio.run(tried())


def test_a_stop_string_ends_the_job_at_its_token() -> None:
    """Guards against log-probabilities lost where a stop string fires, and a wrong word for the end."""
    desk = MadeUp(answers=True)
    body = {"prompt": "aa", "max_tokens": 6, "stop": "aaa", "logprobs": 0}

    async def tried() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await asked(desk, AT, body))[2])
        return found

    (choice,) = asyncio.run(tried())["choices"]
    assert choice["finish_reason"] == "stop", "though the engine had come to the limit in the same report"
    assert not any(isinstance(one, Cancel) for one in desk.sent)
