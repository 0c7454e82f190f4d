"""All that a server is told when it starts, in one object that both of its processes have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.serving.messages import MethodName


@dataclass(frozen=True)
class Settings:
    """The options of `marsbench serve`, under their names; times in seconds unless they say otherwise."""

    checkpoint: str
    name: str = ""  # what clients call it
    dtype: str = "float32"
    untrained_masks: bool = False
    # What counts where a request says nothing. The first three can be turned while the server runs.
    threshold: float = 0.95  # confidence to accept a token, of `mars`
    draft_threshold: float = 0.5  # confidence to draft one, of `mars-verified`
    block_size: int = 4  # tokens that one forward settles at most
    method: MethodName | None = None  # None: `mars` where the checkpoint can, else `ar`
    temperature: float = 0.0
    max_new_tokens: int = 1024
    # What the engine may hold.
    max_rows: int = 16  # requests decoded together
    kv_slots: int | None = None  # of the KV cache over all rows, each of which takes as many as the longest; None: fit
    prefill_positions: int = PREFILL_POSITIONS
    threads: int | None = None
    # Whether a controller turns the knobs, and what it is to keep.
    adapt: bool = False
    target_ms_per_token: float | None = None
    target_first_token_ms: float | None = None
    decision_log: Path | None = None
    # Who may come in.
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()  # any of them opens every route; without one they are open
    speed_key: str | None = None  # the only one that turns the knobs, where it is given
    lock_speed: bool = False  # whether nobody may
    allowed_host: tuple[str, ...] = ()  # names of the server, beside localhost and addresses
    cors_origin: tuple[str, ...] = ()  # pages of other sites that may ask; "*" is any
    root_path: str = ""  # what proxies put before every path
    request_log: Path | None = None
    # How much is taken in, and how long anything may take.
    max_queue: int = 64  # requests that wait, those that are being read and tokenised included
    max_body: int = 4 * 2**20  # bytes
    max_connections: int = 1024
    read_timeout: float = 20.0  # that the head or the body of a request may take to come
    stall_timeout: float = 60.0  # that a reader may take nothing
    ping: float = 15.0  # of silence, after which a stream says that it is alive
    deadline: float = 3600.0  # of one answer
    hang_timeout: float = 120.0  # that the engine may say nothing while it has work
    drain: float = 30.0  # that answers in flight have at the end
