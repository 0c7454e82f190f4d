"""The bodies that come and go: OpenAI's fields and ours. What cannot be done here is refused by name if wanted."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from marsbench.serving.messages import WIDEST, MethodName


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error, as OpenAI's API words it: in an envelope that its clients know how to raise."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @property
    def envelope(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": 'Basic realm="marsbench"'} if self.status == 401 else {})

    @classmethod
    def wrong(cls, message: str, param: str | None = None, code: str | None = None) -> "ApiError":
        return cls(400, message, param=param, code=code)


T = TypeVar("T", bound=Struct)
_Confidence = Annotated[float, Meta(ge=0, le=1)]
_Window = Annotated[int, Meta(ge=1, le=WIDEST)]
_Count = Annotated[int, Meta(ge=1)]
_Best = Annotated[int, Meta(ge=0, le=20)]
_Token = Annotated[int, Meta(ge=0)]

# Parts that are read by themselves, so that an error can name them; the API's description says what they are.
_PART = {
    name: Meta(extra_json_schema={"$ref": f"#/components/schemas/{name}"})
    for name in ("Message", "StreamOptions", "TextPart")
}
# Fields of others that nothing here can honour -> the values that ask for nothing; null does so always.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "length_penalty": (1,), "logit_bias": ({},), "suffix": ("",), "min_tokens": (0,), "use_beam_search": (False,),
    "early_stopping": (False,), "bad_words": ([],), "stop_token_ids": ([],), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "detokenize": (True,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
    "top_logprobs": (0,), "prompt_logprobs": (0,), "echo": (False,),
    "truncate_prompt_tokens": (), "allowed_token_ids": (), "logits_processors": ([],),
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "reasoning_effort": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "documents": ([],), "priority": (0,), "web_search_options": (),
}  # fmt: skip
# Fields that change no answer, whatever they say.
_HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction", "request_id", "cache_salt",
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})  # what a field within another asks for nothing by
_SHORT = 200  # bytes of a value that may ask for nothing


def read(body: bytes | Raw, kind: type[T], where: str = "") -> T:
    """A body, or (`where` says in which field of it) a part of one, as its type; `ApiError` for what it cannot be."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
        for name in fields.keys() - {*kind.__struct_fields__}:
            _check_asks_nothing(name, fields[name], where)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        match = re.search(r"(?:field `|`\$\.?)(\w*)", str(error))
        place, what = where or (match and match[1]) or None, str(error).removesuffix(f" - at `$.{match and match[1]}`")
        raise ApiError.wrong(f"{place or 'the body'}: {what}", place) from error
    except (ValueError, RecursionError) as error:
        raise ApiError.wrong(f"the body is no JSON that can be read: {error}", where or None) from error


def _check_asks_nothing(name: str, raw: Raw, where: str) -> None:
    value = msgspec.json.decode(raw) if len(bytes(raw)) <= _SHORT else ...
    name, place = name[:100], where or name[:100]
    if where:
        if value not in _NOTHING:
            raise ApiError.wrong(f"{where}: there is no field {name!r}", place)
    elif name in _NEUTRAL:
        neutral = [same for same in _NEUTRAL[name] if isinstance(same, bool) == isinstance(value, bool)]  # 0 == False
        if value is not None and value not in neutral:
            usual = f" other than {_NEUTRAL[name][0]!r}" if _NEUTRAL[name] else ""
            raise ApiError.wrong(f"this server does not support {name!r}{usual}", place)
    elif name not in _HARMLESS:
        raise ApiError.wrong(f"there is no field {name!r}", place)


class StreamOptions(Struct):
    include_usage: bool = False
    # Ours: one chunk for each forward, with its tokens.
    include_forwards: bool = False


class _Decoding(Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = False
    stream_options: Annotated[Raw, _PART["StreamOptions"]] | UnsetType = UNSET
    n: Annotated[int, Meta(ge=1, le=128)] | None = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: _Confidence | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = False
    # Ours: how to decode; tau, fixed for this request; tau while requests wait, with --adapt; tokens of one forward.
    method: MethodName | None = None
    threshold: _Confidence | None = None
    min_threshold: _Confidence | None = None
    block_size: _Window | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def options(self) -> StreamOptions:
        raw = self.stream_options
        if isinstance(raw, UnsetType) or bytes(raw) == b"null":
            return StreamOptions()
        return read(raw, StreamOptions, "stream_options")

    def check(self) -> None:
        if "" in self.stops:
            raise ApiError.wrong("a stop string is empty", "stop")
        if self.method == "ar" and (self.threshold is not None or self.min_threshold is not None):
            raise ApiError.wrong("method 'ar' takes no threshold", "threshold")


class CompletionRequest(_Decoding, kw_only=True):
    prompt: str | list[str | _Token | Annotated[list[_Token], Meta(min_length=1)]]
    max_tokens: _Count | None = 16
    logprobs: _Best | None = None

    @property
    def best(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each, None where no log-probabilities are."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        several: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        kinds = {*map(type, several)}
        if kinds == {int}:
            return [several]
        if not kinds or int in kinds:
            raise ApiError.wrong("a prompt is a text, or token ids, one at least", "prompt")
        return several


class TextPart(Struct):
    type: Literal["text"]
    text: str


class Message(Struct):
    """A turn of a conversation; its `name` is for chat templates that know names."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[Raw, _PART["TextPart"]]] | None = None
    name: str | None = None


class ChatRequest(_Decoding, kw_only=True):
    messages: Annotated[list[Annotated[Raw, _PART["Message"]]], Meta(min_length=1, max_length=10_000)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = False
    top_logprobs: _Best | None = None

    @property
    def best(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError.wrong("'top_logprobs' goes with 'logprobs'", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation as chat templates take it; `ApiError` for a message that says more, or nothing."""
        turns = []
        for message in (read(raw, Message, "messages") for raw in self.messages):
            if (text := message.content) is None:
                raise ApiError.wrong(f"messages: a message of the {message.role} has no 'content'", "messages")
            if not isinstance(text, str):
                text = "".join(read(part, TextPart, "messages").text for part in text)
            named = {"name": message.name} if message.name else {}
            turns.append({"role": message.role.replace("developer", "system"), "content": text, **named})
        return turns


class SpeedRequest(Struct, forbid_unknown_fields=True):
    """`PUT /v1/speed`: what is given is turned, the rest stays."""

    threshold: _Confidence | None = None
    draft_threshold: _Confidence | None = None
    block_size: _Window | None = None


def event(body: Any) -> bytes:
    """A server-sent event, of words or of JSON in ASCII on one line, which no line break ends early."""
    words = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), allow_nan=False)
    return f"data: {words}\n\n".encode("ascii")
