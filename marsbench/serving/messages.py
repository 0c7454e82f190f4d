"""What the two processes say to each other, settings, jobs and knobs one way, what forwards brought the other way."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from marsbench.decoding.generation import PREFILL_POSITIONS, Dtype, Finish, Request
from marsbench.methods.options import option

MethodName = Literal["ar", "mars", "mars-verified"]
WIDEST = 16  # windows, at most


class Knob(NamedTuple):
    """How a row decodes: AR is a window of 1."""

    threshold: float | None
    window: int  # tokens that one forward settles at most
    verified: bool = False  # whether guesses are checked before they count


@dataclass(frozen=True, kw_only=True)
class Job(Request):
    """A request as the engine takes it; None leaves a knob to the server.

    Only `min_threshold` lets a server with a table of windows narrow the window of `mars`, and decode at that tau while
    requests wait: `mars-verified` too, whose drafts then count unchecked.
    """

    id: int
    method: MethodName
    min_threshold: float | None = None
    widest: int | None = None  # window
    arrived: float = 0.0  # by the server's clock


@dataclass(frozen=True)
class Cancel:
    """A request that is to end now: its client is gone, or no more tokens are wanted."""

    id: int


@dataclass(frozen=True)
class Ending:
    finish: Finish
    emitted: int = 0  # tokens, an EOS counted once
    forwards: int = 0
    thresholds: tuple[float, float] | None = None  # the lowest and the highest that counted; None for `ar`
    windows: tuple[int, int] = (1, 1)
    lossless: bool = True  # whether its tokens are those of `ar`
    failure: str = ""  # why the engine could not answer


class State(NamedTuple):
    running: int = 0
    waiting: int = 0
    slots: int = 0  # of the KV cache, reserved
    threshold: float | None = None  # mean over the rows of `mars`
    window: float = 0.0  # mean over all rows


@dataclass(frozen=True)
class Report:
    state: State
    started: list[int] = field(default_factory=list)
    # Request -> the tokens that each forward brought it, an EOS left out.
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    ended: list[tuple[int, Ending]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)  # by the names of metrics
    accepted: Counter[int] = field(default_factory=Counter)  # drafts that counted, by their place in a step


@dataclass(frozen=True)
class Ready:
    tokenizer: Any
    context: int  # tokens of prompt and answer at most
    vocabulary: int
    methods: tuple[MethodName, ...]  # that the checkpoint can do
    slots: int  # of the KV cache
    warning: str = ""


@dataclass(frozen=True)
class Settings:
    """The options of `marsbench serve`, under their names; times in seconds unless they say otherwise."""

    checkpoint: str = ""
    name: str = option("What clients call the model [default: the folder's name, or the stage's].", "")
    dtype: Dtype | None = option("float32, bfloat16 or float16 [default: bfloat16 on a GPU, else float32].")
    untrained_masks: bool = option("Use masks even if the checkpoint never saw any.", False)
    # What counts where a request says nothing. The first three can be turned while the server runs.
    threshold: float = option("Tau of mars: the knob, to begin with.", 0.95, least=0, most=1)
    draft_threshold: float = option("Confidence that drafts of mars-verified need.", 0.5, least=0, most=1)
    block_size: int = option("Most tokens of one forward.", 4, least=1, most=WIDEST, flags=("--window", "--block-size"))
    method: MethodName | None = option("ar, mars or mars-verified [default: mars where the checkpoint can, else ar].")
    temperature: float = option("Where a request gives none; 0 is greedy.", 0.0, least=0)
    max_new_tokens: int = option("Limit of a chat's answer that asks for none.", 1024, least=1)
    # What the engine may hold.
    max_rows: int = option("Requests decoded together.", 16, least=1)
    kv_slots: int | None = option("Tokens of the KV cache, rows as long as the longest [default: full rows].", least=1)
    prefill_positions: int = option("Prompt tokens in one forward pass at most.", PREFILL_POSITIONS, least=1)
    compile: bool | None = option(
        "Run each step as one graph, recorded as it is on a GPU, where that is the default without --adapt: the same "
        "tokens, sooner. No window is then wider than --window, whatever a request asks for.",
        flags=("--compile/--no-compile",),
    )
    threads: int | None = option("CPU threads of the engine; where cores are few, leave HTTP one of them.", least=1)
    adapt: bool = option(
        "Measure at start-up what a forward costs by its positions, and decode mars-verified by the window that pays "
        "for the requests in flight, or by ar; use min_threshold while requests wait.", False,
    )  # fmt: skip
    acceptance: float | None = option("Of --adapt: how often a draft is right [default: as recorded].", least=0, most=1)
    # Who may come in.
    host: str = option("Address to listen on; 0.0.0.0 lets other machines in.", "127.0.0.1")
    port: int = option("0 takes any that is free.", 8000, least=0, most=65535)
    api_key: tuple[str, ...] = option("Of every route but /health; repeatable, or once in MARSBENCH_API_KEY.", ())
    speed_key: str | None = option("The only key that turns the knobs.")
    allowed_host: tuple[str, ...] = option(
        "A name by which clients may call the server, beside localhost and --host; * is any [default: * where other "
        "machines are let in].", (),
    )  # fmt: skip
    cors_origin: tuple[str, ...] = option("A page's origin (https://HOST) that may ask; * is any.", ())
    root_path: str = option("What a proxy puts before every path.", "")
    # How much is taken in, and how long anything may take.
    max_queue: int = option("Requests that may wait, be read or tokenised; more are told 429.", 64, least=1)
    max_body: int = option("Bytes of a request's body at most.", 4 * 2**20, least=1)
    max_connections: int = option("Connections at once at most; more are told 503.", 1024, least=1)
    read_timeout: float = option("Seconds that a body may take to come.", 20.0, least=0)
    deadline: float = option("Seconds that an answer may take.", 3600.0, least=0)
    hang_timeout: float = option("Seconds until a busy engine without a word is started anew.", 120.0, least=0)
    drain: float = option("Seconds that answers in flight have at the end.", 30.0, least=0)
