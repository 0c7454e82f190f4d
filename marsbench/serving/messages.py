"""What the two processes say to each other, settings, jobs and knobs one way, what forwards brought the other way."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
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
    best: int | None = None  # log-probabilities are wanted, and of so many of the likeliest tokens at each place
    arrived: float = 0.0  # by the server's clock


@dataclass(frozen=True)
class Cancel:
    """A request that is to end now: its client is gone, or no more tokens are wanted."""

    id: int


class Likelihood(NamedTuple):
    """The model's own (AR) log-probabilities of an answer's tokens."""

    tokens: list[int]
    chosen: list[float]
    best: list[dict[int, float]]  # at each place, of the likeliest tokens


@dataclass
class Ending:
    finish: Finish
    emitted: int = 0  # tokens, an EOS counted once
    forwards: int = 0
    thresholds: tuple[float, float] | None = None  # the lowest and the highest that counted; None for `ar`
    windows: tuple[int, int] = (1, 1)
    lossless: bool = True  # whether its tokens are those of `ar`
    failure: str = ""  # why the engine could not answer
    likelihood: Likelihood | None = None
    drafted: int = 0  # the masks of its windows; of `mars-verified`, the drafts that were checked
    accepted: Counter[int] = field(default_factory=Counter)  # windows that had any, by how many became tokens


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
    name: str = option("Model name for clients [default: the folder's name, or the stage's].", "")
    dtype: Dtype | None = option("float32, bfloat16 or float16 [default: bfloat16 on a GPU, else float32].")
    untrained_masks: bool = option("Use masks even if the checkpoint never saw any.", False)
    # What counts where a request says nothing. The first three can be turned while the server runs.
    threshold: float = option("Tau of mars at the start.", 0.95, least=0, most=1)
    draft_threshold: float = option("Confidence threshold for drafts of mars-verified.", 0.5, least=0, most=1)
    block_size: int = option("Maximum tokens a forward.", 4, least=1, most=WIDEST, flags=("--window", "--block-size"))
    method: MethodName | None = option("ar, mars or mars-verified [default: mars if the checkpoint can, else ar].")
    temperature: float = option("Default temperature of a request; 0 is greedy.", 0.0, least=0)
    max_new_tokens: int = option("Default limit of a chat answer.", 1024, least=1)
    # What the engine may hold.
    max_rows: int = option("Requests decoded together.", 16, least=1)
    kv_slots: int | None = option("Tokens of the KV cache; each row takes the longest [default: full rows].", least=1)
    prefill_positions: int = option("Maximum prompt tokens in one forward pass.", PREFILL_POSITIONS, least=1)
    compile: bool | None = option(
        "Run each step as one graph: faster, with the same tokens. Default on a GPU without --adapt. Then no window is "
        "wider than --window, whatever a request asks for.",
        flags=("--compile/--no-compile",),
    )
    threads: int | None = option("CPU threads of the engine; with few cores, leave one for HTTP.", least=1)
    adapt: bool = option(
        "Measure the cost of forward passes at start-up; then mars-verified uses the fastest window for the number of "
        "running requests, or ar. While requests wait, their min_threshold counts.", False,
    )  # fmt: skip
    acceptance: float | None = option("For --adapt: share of right drafts [default: recorded].", least=0, most=1)
    # Who may come in.
    host: str = option("Address to listen on; 0.0.0.0 lets other machines in.", "127.0.0.1")
    port: int = option("Port; 0 takes a free one.", 8000, least=0, most=65535)
    api_key: tuple[str, ...] = option("Key of all but health checks; repeatable, or once in MARSBENCH_API_KEY.", ())
    speed_key: str | None = option("The only key that may change the speed settings.")
    lock_speed: bool = option("Let no client change the speed settings.", False)
    allowed_host: tuple[str, ...] = option(
        "Host name that clients may use, besides localhost and --host; * is any [default: * if other machines may "
        "connect].", (),
    )  # fmt: skip
    cors_origin: tuple[str, ...] = option("Origin (https://HOST) whose pages may ask; * is any.", ())
    root_path: str = option("Path prefix that a proxy adds.", "")
    request_log: Path | None = option("JSON Lines of all requests, without their texts.")
    # How much is taken in, and how long anything may take.
    max_queue: int = option("Maximum requests that wait or are read; more get 429.", 64, least=1)
    max_body: int = option("Maximum bytes of a request's body.", 4 * 2**20, least=1)
    max_connections: int = option("Maximum connections at once; more get 503.", 1024, least=1)
    read_timeout: float = option("Maximum seconds for a body to arrive.", 20.0, least=0)
    ping: float = option("Seconds of silence after which a stream sends a comment; 0: never.", 15.0, least=0)
    deadline: float = option("Maximum seconds for an answer.", 3600.0, least=0)
    hang_timeout: float = option("Seconds without a sign from a busy engine until it restarts.", 120.0, least=0)
    drain: float = option("Seconds for running answers when the server stops.", 30.0, least=0)
