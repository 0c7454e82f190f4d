"""A server from its first line to its last: the socket, the engine, the signals, the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from marsbench.errors import UserError
from marsbench.serving.answers import Defaults
from marsbench.serving.app import Doors, build
from marsbench.serving.desk import Desk, Limits
from marsbench.serving.process import Setup


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us: it would close its socket at once, and newcomers would get no word."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 is any that is free. `UserError` where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen: {error.strerror}", where=f"{host}:{port}", fix="give another --host or --port"
        ) from error
    return found


def serve(
    setup: Setup, defaults: Defaults, limits: Limits, doors: Doors, *, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until a signal says otherwise; `UserError` where it cannot, or can no more."""
    own = listen(host, port)

    def said(text: str) -> None:
        with contextlib.suppress(OSError):  # whoever started the server and read along may be gone: that ends nothing
            say(text)

    asyncio.run(_serve(setup, defaults, limits, doors, own, said))


async def _serve(
    setup: Setup, defaults: Defaults, limits: Limits, doors: Doors, own: socket.socket, say: Callable[[str], None]
) -> None:
    desk = Desk(setup, limits, defaults.model, say)
    desk.start()
    _heed_signals(desk, say)
    try:
        await desk.started.wait()
        if desk.fatal is not None:
            raise desk.fatal
        _check_method(desk, defaults)
        config = uvicorn.Config(
            build(desk, defaults, doors), log_level="warning", access_log=False, timeout_graceful_shutdown=5,
            lifespan="off", backlog=2048,
        )  # fmt: skip
        server = _Server(config)
        own.listen(config.backlog)  # from now on nobody is refused
        serving = asyncio.create_task(server.serve(sockets=[own]))
        shown, number = own.getsockname()[:2]
        say(f"serving {defaults.model} on http://{f'[{shown}]' if ':' in shown else shown}:{number}")
        over = asyncio.create_task(desk.over.wait())
        await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        over.cancel()
        if desk.fatal is not None:
            raise desk.fatal
    finally:
        desk.close()
        own.close()


def _check_method(desk: Desk, defaults: Defaults) -> None:
    """Refuse a default method that no request could be answered by."""
    if desk.ready is not None and defaults.method not in (None, *desk.ready.methods):
        raise UserError(
            f"method {defaults.method!r} needs a checkpoint trained with masks",
            where=desk.setup.checkpoint,
            fix="use a MARS checkpoint, --method ar, or --untrained-masks to see what happens without",
        )


def _heed_signals(desk: Desk, say: Callable[[str], None]) -> None:
    """The first signal to end lets answers be finished, the second does not."""
    draining: list[asyncio.Task[None]] = []

    def heed() -> None:
        if draining or not desk.started.is_set():
            desk.started.set()
            desk.over.set()
            return
        say("ending: nobody is let in any more; a second signal ends at once")
        draining.append(asyncio.create_task(desk.drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, heed)
