"""All that a server is told when it starts, in one object that both of its processes have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.methods import Option
from marsbench.serving.messages import WIDEST, MethodName


@dataclass(frozen=True)
class Settings:
    """The options of `marsbench serve`, under their names; times in seconds unless they say otherwise."""

    checkpoint: str
    name: Annotated[str, Option("What clients call the model [default: the folder's name, or the stage's].")] = ""
    dtype: str | None = None  # of weights and cache; None = bfloat16 on a GPU, else float32
    untrained_masks: bool = False
    # What counts where a request says nothing. The first three can be turned while the server runs.
    threshold: Annotated[float, Option("Tau of mars: the knob, to begin with.", least=0, most=1)] = 0.95
    draft_threshold: Annotated[float, Option("Confidence that drafts of mars-verified need.", least=0, most=1)] = 0.5
    block_size: Annotated[int, Option("Tokens that one forward settles at most.", least=1, most=WIDEST)] = 4
    method: Annotated[
        MethodName | None,
        Option(
            "How to decode by default: ar, mars or mars-verified [default: mars where the checkpoint can, else ar]."
        ),
    ] = None
    temperature: Annotated[float, Option("Where a request gives none; 0 is greedy.", least=0)] = 0.0
    max_new_tokens: Annotated[int, Option("Limit of a chat's answer that asks for none.", least=1)] = 1024
    # What the engine may hold.
    max_rows: Annotated[int, Option("Requests decoded together.", least=1)] = 16
    kv_slots: Annotated[
        int | None, Option("Tokens of the KV cache, every row as many as the longest [default: full rows].", least=1)
    ] = None
    prefill_positions: Annotated[int, Option("Prompt tokens in one forward pass at most.", least=1)] = PREFILL_POSITIONS
    compile: Annotated[bool | None, Option(
        "Run each step as one graph, recorded as it is on a GPU, where that is the default without --adapt: the same "
        "tokens, sooner. No window is then wider than --block-size, whatever a request asks for."
    )] = None  # fmt: skip
    threads: Annotated[
        int | None, Option("CPU threads of the engine; where cores are few, leave HTTP one of them.", least=1)
    ] = None
    adapt: Annotated[bool, Option(
        "Measure at start-up what a forward costs by its positions, and decode mars-verified by the window that pays "
        "for the requests in flight, or by ar; use min_threshold while requests wait."
    )] = False  # fmt: skip
    acceptance: Annotated[
        float | None,
        Option("Of --adapt: how often a draft is right [default: as the checkpoint's record has it].", least=0, most=1),
    ] = None
    # Who may come in.
    host: Annotated[str, Option("Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, Option("0 takes any that is free.", least=0, most=65535)] = 8000
    api_key: Annotated[tuple[str, ...], Option(
        "Asked for by every route but /health and /ping; may be given several times, or once in MARSBENCH_API_KEY."
    )] = ()  # fmt: skip
    speed_key: Annotated[str | None, Option("The only key that turns the knobs.")] = None
    lock_speed: Annotated[bool, Option("Keep the knobs as they are.")] = False
    allowed_host: Annotated[tuple[str, ...], Option(
        "A name by which clients may call the server, beside localhost and --host; * is any [default: * where other "
        "machines are let in]."
    )] = ()  # fmt: skip
    cors_origin: Annotated[tuple[str, ...], Option("A page's origin (https://HOST) that may ask; * is any.")] = ()
    root_path: Annotated[str, Option("What a proxy puts before every path.")] = ""
    request_log: Annotated[Path | None, Option("JSON Lines of all requests, without their texts.")] = None
    # How much is taken in, and how long anything may take.
    max_queue: Annotated[int, Option("Requests that may wait, be read or tokenised; more are told 429.", least=1)] = 64
    max_body: Annotated[int, Option("Bytes of a request's body at most.", least=1)] = 4 * 2**20
    max_connections: Annotated[int, Option("Connections at once at most; more are told 503.", least=1)] = 1024
    read_timeout: Annotated[float, Option("Seconds that a body may take to come.", least=0)] = 20.0
    ping: Annotated[float, Option("Seconds after which a silent stream says that it is alive; 0: never.", least=0)] = (
        15.0
    )
    deadline: Annotated[float, Option("Seconds that an answer may take.", least=0)] = 3600.0
    hang_timeout: Annotated[float, Option("Seconds until a busy engine without a word is started anew.", least=0)] = (
        120.0
    )
    drain: Annotated[float, Option("Seconds that answers in flight have at the end.", least=0)] = 30.0
