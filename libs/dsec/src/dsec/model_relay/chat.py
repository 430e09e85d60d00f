"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dsec.model_relay.calls import Json, ModelAnswer, ModelBegun, ModelDelta, ModelRequest
from dsec.model_relay.reading import Strict, convert, given, json_object, refuse_unless
from dsec_common.model_errors import ModelApi

# --- What is asked ----------------------------------------------------------------------------


class _Text(Strict, frozen=True, kw_only=True, tag_field="type", tag="text", omit_defaults=True):
    text: str
    cache_control: Json | None = None  # of clients that write for several providers


class _Function(Strict, frozen=True, kw_only=True):
    name: str
    arguments: str


class _ToolCall(Strict, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    function: _Function
    type: Literal["function"]
    index: int | None = None


_Content = str | list[_Text]


class _System(Strict, frozen=True, kw_only=True, tag_field="role", tag="system"):
    content: _Content
    name: str | None = None


class _Developer(Strict, frozen=True, kw_only=True, tag_field="role", tag="developer"):
    content: _Content
    name: str | None = None


class _User(Strict, frozen=True, kw_only=True, tag_field="role", tag="user"):
    content: _Content
    name: str | None = None


class _Tool(Strict, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    content: _Content
    tool_call_id: str
    name: str | None = None


class _Assistant(Strict, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """What a model said; clients send an answer's message back whole, empty fields included."""

    content: _Content | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    provider_specific_fields: Json | None = None


_Message = _System | _Developer | _User | _Tool | _Assistant


class _FunctionTool(Strict, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _ToolOffered(Strict, frozen=True, kw_only=True, omit_defaults=True):
    function: _FunctionTool
    type: Literal["function"]
    cache_control: Json | None = None


class _Named(Strict, frozen=True, kw_only=True):
    name: str


class _Chosen(Strict, frozen=True, kw_only=True):
    function: _Named
    type: Literal["function"]


class _StreamOptions(Strict, frozen=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Asked(Strict, frozen=True, kw_only=True):
    model: str
    messages: list[_Message]
    tools: list[_ToolOffered] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Chosen | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: Json | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # These change nothing of what is sampled.
    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None


def parse(body: bytes) -> ModelRequest:
    """Read a request.

    Raises:
        ModelCallError: 400, naming the field that is wrong or not supported.
    """
    asked = convert(json_object(body), _Asked)
    refuse_unless(bool(asked.messages), "messages", "a conversation has a message at least")
    refuse_unless(asked.n in {None, 1}, "n", "one answer a call; call again for another")
    return ModelRequest(
        api=ModelApi.CHAT,
        model=asked.model,
        messages=tuple(_message(message) for message in asked.messages),
        tools=tuple(
            {"type": "function", "function": msgspec.to_builtins(tool.function)}
            for tool in asked.tools or ()
        ),
        options=given(
            {
                "tool_choice": msgspec.to_builtins(asked.tool_choice),
                "parallel_tool_calls": asked.parallel_tool_calls,
                "temperature": asked.temperature,
                "top_p": asked.top_p,
                "top_k": asked.top_k,
                "min_p": asked.min_p,
                "max_tokens": asked.max_completion_tokens or asked.max_tokens,
                "stop": asked.stop,
                "seed": asked.seed,
                "presence_penalty": asked.presence_penalty,
                "frequency_penalty": asked.frequency_penalty,
                "repetition_penalty": asked.repetition_penalty,
                "response_format": asked.response_format,
                "reasoning_effort": asked.reasoning_effort,
                "chat_template_kwargs": asked.chat_template_kwargs,
            }
        ),
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        logprobs=bool(asked.logprobs),
        top_logprobs=asked.top_logprobs or 0,
    )


def _message(message: _Message) -> Json:
    said: Json = {"role": "system" if isinstance(message, _Developer) else _role(message)}
    if message.content is not None:
        said["content"] = _content(message.content)
    if message.name is not None:
        said["name"] = message.name
    match message:
        case _Tool():
            said["tool_call_id"] = message.tool_call_id
        case _Assistant():
            reasoning = message.reasoning_content or message.reasoning
            if reasoning:
                said["reasoning_content"] = reasoning
            if message.tool_calls:
                said["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": msgspec.to_builtins(call.function),
                    }
                    for call in message.tool_calls
                ]
        case _:
            pass
    return said


def _role(message: _Message) -> str:
    return str(message.__struct_config__.tag)


def _content(content: _Content) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


# --- What is answered -------------------------------------------------------------------------


def render(request: ModelRequest, answer: ModelAnswer) -> Json:
    """Return the body of an answer that is not streamed."""
    message: Json = {
        "role": "assistant",
        "content": answer.content or (None if answer.tool_calls else ""),
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = _tool_calls(answer)
    return {
        **_head(request, answer, "chat.completion"),
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(request, answer.logprobs),
            }
        ],
        "usage": _usage(answer),
    }


class Telling:
    """Writes a streamed answer; its last event is no JSON."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._head: Json = {}

    def begin(self, begun: ModelBegun) -> Iterator[Json | str]:
        """Yield what says that the model speaks."""
        self._head = _head(self._request, begun, "chat.completion.chunk")
        yield self._chunk({"role": "assistant", "content": ""})

    def add(self, delta: ModelDelta) -> Iterator[Json | str]:
        """Yield the chunk that says more."""
        said: Json = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.tool >= 0:
            said["tool_calls"] = [_piece_of_call(delta)]
        yield self._chunk(said, logprobs=_logprobs(self._request, delta.logprobs or None))

    def end(self, answer: ModelAnswer) -> Iterator[Json | str]:
        """Yield why it ended, and the usage if that was asked for."""
        yield self._chunk({}, answer.finish_reason)
        if self._request.include_usage:
            yield {**self._head, "choices": [], "usage": _usage(answer)}
        yield "[DONE]"

    def _chunk(self, delta: Json, finish_reason: str | None = None, logprobs: Any = None) -> Json:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        return {**self._head, "choices": [choice]}


def _piece_of_call(delta: ModelDelta) -> Json:
    function: Json = {"arguments": delta.arguments}
    if not delta.tool_id:
        return {"index": delta.tool, "function": function}
    function = {"name": delta.tool_name, **function}
    return {"index": delta.tool, "id": delta.tool_id, "type": "function", "function": function}


def _head(request: ModelRequest, answer: ModelAnswer | ModelBegun, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": request.model,
    }


def _tool_calls(answer: ModelAnswer) -> list[Json]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.tool_calls
    ]


def _logprobs(request: ModelRequest, content: tuple[Json, ...] | None) -> Json | None:
    if not request.logprobs or content is None:
        return None
    return {"content": list(content), "refusal": None}


def _usage(answer: ModelAnswer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
