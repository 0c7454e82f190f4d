"""A server from its first line to its last: the socket, the engine, the signals, the end."""

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from marsbench.errors import UserError
from marsbench.serving.app import build
from marsbench.serving.engine_client import EngineClient
from marsbench.serving.guards import is_local
from marsbench.serving.settings import Settings

_WAITING = 2048  # connections that the system keeps for us


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: it would close its socket at once, and newcomers would get no word."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 is any that is free. `UserError` where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen: {error.strerror}", where=f"{host}:{port}", fix="give another --host or --port"
        ) from error
    return listening


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until a signal says otherwise; `UserError` where it cannot, or can no more."""
    if any(key is not None and not key.strip() for key in (*settings.api_key, settings.speed_key)):
        raise UserError("an API key is empty, which every request would bring", fix="give a key, or none at all")
    own = listen(settings.host, settings.port)

    def said(text: str) -> None:
        with contextlib.suppress(OSError):  # the reader of this output may be gone: that ends nothing
            say(text)

    asyncio.run(_serve(settings, own, said))


async def _serve(settings: Settings, own: socket.socket, say: Callable[[str], None]) -> None:
    engine = EngineClient(settings, say)
    engine.start()
    _heed_signals(engine, say)
    try:
        await engine.started.wait()
        if engine.fatal is not None:
            raise engine.fatal
        if engine.ready is not None and settings.method not in (None, *engine.ready.methods):
            raise UserError(
                f"method {settings.method!r} needs a checkpoint trained with masks", where=settings.checkpoint,
                fix="use a MARS checkpoint, --method ar, or --untrained-masks to see what happens without",
            )  # fmt: skip
        config = uvicorn.Config(
            build(engine), log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off",
            backlog=_WAITING, limit_concurrency=settings.max_connections, ws="none",
        )  # fmt: skip
        server = Server(config)
        gc.freeze()  # what is there to stay need not be looked through whenever a large body is read
        own.listen(_WAITING)  # from now on no connection is refused
        serving = asyncio.create_task(server.serve(sockets=[own]))
        shown, number = own.getsockname()[:2]
        if not settings.api_key and not is_local(settings.host):
            say("warning: all who reach this address may use the server: see --api-key")
        say(f"serving {settings.name} on http://{f'[{shown}]' if ':' in shown else shown}:{number}")
        over = asyncio.create_task(engine.over.wait())
        await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        over.cancel()
        if engine.fatal is not None:
            raise engine.fatal
    finally:
        engine.close()
        own.close()


def _heed_signals(engine: EngineClient, say: Callable[[str], None]) -> None:
    """The first signal to end lets answers be finished, the second does not."""
    draining: list[asyncio.Task[None]] = []

    def heed() -> None:
        if draining or not engine.started.is_set():
            engine.started.set()
            engine.over.set()
            return
        say("ending: no request is let in any more; a second signal ends at once")
        draining.append(asyncio.create_task(engine.drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, heed)
