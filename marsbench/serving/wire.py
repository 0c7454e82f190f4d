"""The bodies that come and go: OpenAI's fields and ours, and what an answer looks like.

What this server cannot do is refused by name, unless it is asked for in the way that changes nothing.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from marsbench.serving.errors import wrong
from marsbench.serving.messages import WIDEST, Ending, MethodName


def _whole(text: str) -> str:
    """Refuse halves of characters, which JSON can spell and no tokenizer can read."""
    if any("\ud800" <= one <= "\udfff" for one in text):
        raise ValueError("the text has half a surrogate pair")
    return text


Text = Annotated[StrictStr, AfterValidator(_whole)]
_Confidence = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Token = Annotated[int, Field(strict=True, ge=0)]
# Fields of OpenAI's that nothing here can honour -> the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "suffix": ("",), "tools": ([],),
    "functions": ([],), "min_tokens": (0,),
}  # fmt: skip


class StreamOptions(BaseModel):
    """What a stream is to hold besides."""

    include_usage: StrictBool = False
    include_forwards: StrictBool = Field(False, description="Ours: one chunk for each forward, with its tokens.")


class _Decoding(BaseModel):
    """What both kinds of completion take."""

    model_config = ConfigDict(extra="allow")  # to refuse by name what is known and cannot be done

    model: Text | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    ignore_eos: StrictBool = False
    method: MethodName | None = Field(None, description="Ours: how to decode.")
    threshold: _Confidence | None = Field(None, description="Ours: tau, fixed for this request.")
    min_threshold: _Confidence | None = Field(None, description="Ours: how far a controller may lower tau.")
    block_size: Annotated[int, Field(strict=True, ge=1, le=WIDEST)] | None = Field(
        None, description="Ours: tokens that one forward settles at most."
    )

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        found = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if "" in found:
            raise wrong("a stop string is empty", "stop")
        return found

    def check(self) -> None:
        """Raise `ApiError` for what cannot be done, and for what contradicts itself."""
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise wrong(f"this server does not support {name!r} other than {_NEUTRAL[name][0]!r}", name)
        if self.method == "ar" and (self.threshold is not None or self.min_threshold is not None):
            raise wrong("method 'ar' takes no threshold", "threshold")


class CompletionRequest(_Decoding):
    """`POST /v1/completions`."""

    prompt: Text | list[Text] | list[_Token] | list[Annotated[list[_Token], Field(min_length=1)]]
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = 16
    echo: StrictBool | None = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast("list[str] | list[list[int]]", self.prompt))

    def check(self) -> None:
        super().check()
        if not self.prompts:
            raise wrong("there is no prompt", "prompt")
        if self.stream and (self.logprobs is not None or self.echo):
            raise wrong("'echo' and 'logprobs' are not available while streaming", "stream")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("'max_tokens' of 0 asks for nothing; it goes with 'echo'", "max_tokens")


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """Its words."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ChatRequest(_Decoding):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    def check(self) -> None:
        super().check()
        if self.stream and self.logprobs:
            raise wrong("'logprobs' is not available while streaming", "stream")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("'top_logprobs' goes with 'logprobs'", "top_logprobs")
        wanted = (self.model_extra or {}).get("response_format")
        if wanted not in (None, {"type": "text"}):
            raise wrong("this server answers in plain text only", "response_format")


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a text, or a conversation by the chat template."""

    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    tokens: list[_Token]


class SpeedRequest(BaseModel):
    """`PUT /v1/speed`: what is given is turned, the rest stays."""

    model_config = ConfigDict(extra="forbid")

    threshold: _Confidence | None = None
    draft_threshold: _Confidence | None = None
    block_size: Annotated[StrictInt, Field(ge=1, le=WIDEST)] | None = None


def dumps(body: Any) -> str:
    """JSON in ASCII on one line, so that no line break of whatever kind ends an event early."""
    return json.dumps(body, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def event(body: Any) -> bytes:
    """A server-sent event."""
    return f"data: {body if isinstance(body, str) else dumps(body)}\n\n".encode("ascii")


def usage(prompt_tokens: int, used: int, method: MethodName, ending: Ending) -> dict[str, Any]:
    """Tokens in and out, and what they took."""
    return _summed(prompt_tokens, used) | {
        "marsbench": {
            "method": method,
            "threshold": None if ending.thresholds is None else list(ending.thresholds),
            "block_size": list(ending.windows),
            "lossless": ending.lossless,
            "forwards": ending.forwards,
            "tokens_per_forward": round(used / max(ending.forwards, 1), 4),
        }
    }


def total(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The usage of several choices together; of one, as it is."""
    if len(usages) == 1:
        return usages[0]
    counted = _summed(*(sum(one[name] for one in usages) for name in ("prompt_tokens", "completion_tokens")))
    return counted | {"marsbench": [one["marsbench"] for one in usages]}


def _summed(prompt_tokens: int, used: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": used, "total_tokens": prompt_tokens + used}


def finish_reason(ending: Ending, stopped: bool) -> str:
    """OpenAI's word for what ended an answer."""
    return "length" if ending.finish == "length" and not stopped else "stop"
