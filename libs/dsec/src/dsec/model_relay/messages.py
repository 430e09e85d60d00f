"""Anthropic's messages: ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from dsec.model_relay.calls import Json, ModelAnswer, ModelBegun, ModelDelta, ModelRequest
from dsec.model_relay.reading import Strict, convert, given, json_object, refuse_unless
from dsec_common.model_errors import ModelApi

# --- What is asked ----------------------------------------------------------------------------


class _Text(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Json | None = None
    citations: list[Any] | None = None


class _Thinking(Strict, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class _ToolUse(Strict, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Json
    cache_control: Json | None = None
    caller: Json | None = None


class _ToolResult(Strict, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] = ""
    is_error: bool = False
    cache_control: Json | None = None


class _User(Strict, frozen=True, kw_only=True, tag_field="role", tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(Strict, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Thinking | _ToolUse]


class _Tool(Strict, frozen=True, kw_only=True):
    name: str
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Json | None = None


class _Choice(Strict, frozen=True, kw_only=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thought(Strict, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class _Asked(Strict, frozen=True, kw_only=True):
    model: str
    messages: list[_User | _Assistant]
    max_tokens: int
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: _Thought | None = None
    stream: bool | None = None
    # These change nothing of what is sampled.
    metadata: Json | None = None
    service_tier: str | None = None
    cache_control: Json | None = None


_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def parse(body: bytes) -> ModelRequest:
    """Read a request.

    Raises:
        ModelCallError: 400, naming the field that is wrong or not supported.
    """
    asked = convert(json_object(body), _Asked)
    refuse_unless(bool(asked.messages), "messages", "a conversation has a message at least")
    said: list[Json] = []
    if asked.system:
        said.append({"role": "system", "content": _text(asked.system)})
    for message in asked.messages:
        said += _from_user(message) if isinstance(message, _User) else [_from_model(message)]
    choice = asked.tool_choice
    return ModelRequest(
        api=ModelApi.MESSAGES,
        model=asked.model,
        messages=tuple(said),
        tools=tuple(_offered(tool) for tool in asked.tools or ()),
        options=given(
            {
                "tool_choice": _chosen(choice) if choice else None,
                "parallel_tool_calls": (
                    False if choice and choice.disable_parallel_tool_use else None
                ),
                "max_tokens": asked.max_tokens,
                "stop": asked.stop_sequences or None,
                "temperature": asked.temperature,
                "top_p": asked.top_p,
                "top_k": asked.top_k,
                "chat_template_kwargs": (
                    {"enable_thinking": asked.thinking.type != "disabled"}
                    if asked.thinking
                    else None
                ),
            }
        ),
        stream=bool(asked.stream),
    )


def _text(content: str | list[_Text]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


def _from_user(message: _User) -> list[Json]:
    """Return what tools printed, each in a message of its own, and then what the user says."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    said: list[Json] = [
        {"role": "tool", "tool_call_id": it.tool_use_id, "content": _text(it.content)}
        for it in message.content
        if isinstance(it, _ToolResult)
    ]
    texts = [it for it in message.content if isinstance(it, _Text)]
    if texts:
        said.append({"role": "user", "content": _text(texts)})
    return said


def _from_model(message: _Assistant) -> Json:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    said: Json = {"role": "assistant"}
    texts = [it for it in message.content if isinstance(it, _Text)]
    thoughts = [it.thinking for it in message.content if isinstance(it, _Thinking)]
    calls = [it for it in message.content if isinstance(it, _ToolUse)]
    said["content"] = _text(texts)
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": msgspec.json.encode(call.input).decode(),
                },
            }
            for call in calls
        ]
    return said


def _offered(tool: _Tool) -> Json:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": given(function)}


def _chosen(choice: _Choice) -> str | Json:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    refuse_unless(bool(choice.name), "tool_choice.name", "which tool it is")
    return {"type": "function", "function": {"name": choice.name}}


# --- What is answered -------------------------------------------------------------------------

#: It lets Anthropic's servers know their own thoughts again; here nobody asks.
_SIGNATURE: Final = "none"
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def render(request: ModelRequest, answer: ModelAnswer) -> Json:
    """Return the body of an answer that is not streamed."""
    return {
        **_head(request, answer),
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop_sequence,
        "usage": _usage(answer),
    }


class Telling:
    """Writes a streamed answer. What a tool is given comes at once: it has to be whole JSON."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._index = -1
        self._open = ""
        self._tool = -1
        self._arguments = ""

    def begin(self, begun: ModelBegun) -> Iterator[Json | str]:
        """Yield what says that the model speaks."""
        yield {
            "type": "message_start",
            "message": {
                **_head(self._request, begun),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": begun.prompt_tokens, "output_tokens": 0},
            },
        }

    def add(self, delta: ModelDelta) -> Iterator[Json | str]:
        """Yield what says more."""
        if delta.reasoning:
            yield from self._into({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._into({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        if delta.tool > self._tool:
            yield from self._close()
            self._tool = delta.tool
            block = {"id": delta.tool_id, "name": delta.tool_name, "input": {}}
            yield from self._into({"type": "tool_use", **block})
        if delta.tool >= 0:
            self._arguments += delta.arguments

    def end(self, answer: ModelAnswer) -> Iterator[Json | str]:
        """Yield why it ended."""
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence},
            "usage": {"output_tokens": answer.completion_tokens},
        }
        yield {"type": "message_stop"}

    def _into(self, block: Json) -> Iterator[Json]:
        """Begin a block, unless one of its kind is open."""
        if self._open == block["type"]:
            return
        yield from self._close()
        self._open = block["type"]
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Json]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        if self._open == "tool_use":
            added = msgspec.json.encode(_input(self._arguments)).decode()
            self._arguments = ""
            yield self._delta({"type": "input_json_delta", "partial_json": added})
        self._open = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _head(request: ModelRequest, answer: ModelAnswer | ModelBegun) -> Json:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }


def _usage(answer: ModelAnswer) -> Json:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}


def _stop_reason(answer: ModelAnswer) -> str:
    if answer.stop_sequence is not None:
        return "stop_sequence"
    if answer.tool_calls and answer.finish_reason == "stop":
        return "tool_use"
    return _STOP_REASONS.get(answer.finish_reason, "end_turn")


def _blocks(answer: ModelAnswer) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    blocks += [
        {"type": "tool_use", "id": it.id, "name": it.name, "input": _input(it.arguments)}
        for it in answer.tool_calls
    ]
    return blocks


def _input(arguments: str) -> Json:
    """Return a call's arguments; what the model wrote wrong is handed on as text."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
