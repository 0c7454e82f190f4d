"""The bodies that come and go: OpenAI's fields and ours, and what an answer looks like.

What this server cannot do is refused by name, unless it is asked for in the way that changes nothing.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, StrictBool, StrictStr, WithJsonSchema

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
        """The body."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": 'Basic realm="marsbench"'} if self.status == 401 else {})

    @classmethod
    def wrong(cls, message: str, param: str | None = None, code: str | None = None) -> ApiError:
        """A request that can never be answered."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def not_ready(cls, why: str) -> ApiError:
        """Nobody can be served at the moment."""
        return cls(503, why, code="unavailable", retry_after=1)

    @classmethod
    def too_many(cls, why: str) -> ApiError:
        """Nobody more can be served at the moment."""
        return cls(429, why, code="queue_full", retry_after=1)


def _whole(text: str) -> str:
    """Refuse halves of characters, which JSON can spell and no tokenizer can read."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("the text has half a surrogate pair")
    return text


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids. By hand: a union would note every item that is wrong."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not several:
        raise ValueError("there is no prompt")
    if type(several[0]) is int:
        several = [several]
    for prompt in several:
        if isinstance(prompt, str):
            _whole(prompt)
        elif not (isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)):
            raise ValueError("a prompt is a text, or token ids, one at least")
    return several


_OF_PROMPTS = {"anyOf": [{"type": "string"}, {"type": "array"}], "description": "A text or token ids, or several."}
Text = Annotated[StrictStr, AfterValidator(_whole)]
_Confidence = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Token = Annotated[int, Field(strict=True, ge=0)]
_Window = Annotated[int, Field(strict=True, ge=1, le=WIDEST)]
_Best = Annotated[int, Field(strict=True, ge=0, le=20)]
# Fields of others that nothing here can honour -> the values that ask for nothing; null does so always.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "length_penalty": (1,), "logit_bias": ({},), "suffix": ("",), "min_tokens": (0,), "use_beam_search": (False,),
    "early_stopping": (False,), "bad_words": ([],), "stop_token_ids": ([],), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "detokenize": (True,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "prompt_logprobs": (0,), "echo": (False,),
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


class _Body(BaseModel):
    """A body whose fields are all looked at: what is known and cannot be done, and what nobody knows, is refused."""

    model_config = ConfigDict(extra="allow")

    def check(self) -> None:
        """Raise `ApiError` for what cannot be done, and for what contradicts itself."""
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL and name not in _HARMLESS:
                raise ApiError.wrong(f"there is no field {name[:100]!r}", name[:100])
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                usual = f" other than {_NEUTRAL[name][0]!r}" if _NEUTRAL[name] else ""
                raise ApiError.wrong(f"this server does not support {name!r}{usual}", name)


class StreamOptions(BaseModel):
    """What a stream is to hold besides."""

    include_usage: StrictBool = False
    include_forwards: StrictBool = Field(
        default=False, description="Ours: one chunk for each forward, with its tokens."
    )


class _Decoding(_Body):
    """What both kinds of completion take."""

    model: Text | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: StrictBool = False
    method: MethodName | None = Field(None, description="Ours: how to decode.")
    threshold: _Confidence | None = Field(None, description="Ours: tau, fixed for this request.")
    min_threshold: _Confidence | None = Field(None, description="Ours: tau that --adapt may use while requests wait.")
    block_size: _Window | None = Field(None, description="Ours: tokens that one forward settles at most.")

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        found = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if "" in found:
            raise ApiError.wrong("a stop string is empty", "stop")
        return found

    @property
    @abstractmethod
    def best(self) -> int | None:
        """How many of the best tokens are wanted beside each, None where no log-probabilities are."""

    def check(self) -> None:
        super().check()
        if self.method == "ar" and (self.threshold is not None or self.min_threshold is not None):
            raise ApiError.wrong("method 'ar' takes no threshold", "threshold")


class CompletionRequest(_Decoding):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, PlainValidator(_prompts), WithJsonSchema(_OF_PROMPTS)]
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = 16
    echo: StrictBool | None = False
    logprobs: _Best | None = None

    @property
    def best(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError.wrong("'max_tokens' of 0 asks for nothing; it goes with 'echo'", "max_tokens")


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """Its words."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


_Messages = Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]


class ChatRequest(_Decoding):
    """`POST /v1/chat/completions`."""

    echo: ClassVar[bool] = False
    messages: _Messages
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: _Best | None = None

    @property
    def best(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError.wrong("'top_logprobs' goes with 'logprobs'", "top_logprobs")


class TokenizeRequest(_Body):
    """`POST /tokenize`: a text, or a conversation by the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: _Messages | None = None
    add_special_tokens: StrictBool = True

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise ApiError.wrong("give either 'prompt' or 'messages'", "prompt")


class DetokenizeRequest(_Body):
    """`POST /detokenize`."""

    model: Text | None = None
    tokens: Annotated[list[_Token], Field(fail_fast=True)]


class SpeedRequest(BaseModel):
    """`PUT /v1/speed`: what is given is turned, the rest stays."""

    model_config = ConfigDict(extra="forbid")

    threshold: _Confidence | None = None
    draft_threshold: _Confidence | None = None
    block_size: _Window | None = None


def dumps(body: Any) -> str:
    """JSON in ASCII on one line, so that no line break of whatever kind ends an event early."""
    return json.dumps(body, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def event(body: Any) -> bytes:
    """A server-sent event."""
    return f"data: {body if isinstance(body, str) else dumps(body)}\n\n".encode("ascii")
