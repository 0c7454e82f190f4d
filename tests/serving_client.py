"""A running server for tests, and the requests and sockets that reach it."""

import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import requests


class Running:
    """`marsbench serve` in a process of its own, on a port of its own."""

    def __init__(self, checkpoint: Path, *options: str, key: str | None = None) -> None:
        command = [sys.executable, "-m", "marsbench", "serve", "--checkpoint", str(checkpoint), "--name", "micro"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.url = self.wait_for(r"http://\S+")
        self.port = int(self.url.rsplit(":", 1)[1])
        self.key = key

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str, seconds: float = 400) -> str:
        """The first match in what the server prints from now on; loading takes long on a busy machine."""
        until = time.monotonic() + seconds
        while line := self._lines.get(timeout=max(0.1, until - time.monotonic())):
            if match := re.search(pattern, line):
                return match[0]
        raise AssertionError(f"the server has ended: {''.join(self.output)}")

    def call(self, path: str, body: Any = None, method: str | None = None, **more: Any) -> requests.Response:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        method = method or ("GET" if body is None else "POST")
        more = {"headers": headers, "timeout": 60} | more
        return requests.request(method, self.url + path, json=body, **more)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.call("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion, without the last."""
        with self.call("/v1/completions", body | {"stream": True}, stream=True) as response:
            assert response.status_code == 200, response.text
            for line in response.iter_lines(chunk_size=1):
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def gauge(self, name: str) -> float:
        text = self.call("/metrics").text
        (value,) = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M)
        return float(value)

    def is_empty(self) -> bool:
        """Whether its own gauges show that no request is left in it."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return all(self.gauge(name) == 0 for name in names)

    def memory(self) -> int:
        own = psutil.Process(self.process.pid)
        return sum(int(process.memory_info().rss) for process in (own, *own.children(recursive=True)))

    def connect(self, buffer: int | None = None) -> socket.socket:
        """A bare connection, which keeps so many bytes that are not read yet."""
        own = socket.socket()
        own.settimeout(30)
        if buffer is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        own.connect(("127.0.0.1", self.port))
        return own

    def send(self, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
        """A request whose answer is not read yet."""
        data = json.dumps(body).encode()
        own = self.connect(buffer)
        head = "POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
        head += f"Content-Length: {len(data)}\nAuthorization: Bearer {self.key}\n\n"
        own.sendall(head.replace("\n", "\r\n").encode() + data)
        return own

    def end(self, seconds: float = 30) -> int:
        """Tell it to end; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()


def eventually(holds: Any, seconds: float = 120) -> bool:
    """Whether a condition becomes true within a time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.05)
    return bool(holds())
