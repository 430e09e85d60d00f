"""OpenAI's responses: ``POST /v1/responses``.

No conversation is kept: each call brings all of its own.
"""

from __future__ import annotations

from typing import Any, Literal

from dsec.model_relay.calls import Json, ModelRequest
from dsec.model_relay.reading import Strict, convert, given, json_object, refuse_unless
from dsec.model_relay.responses_answer import Telling, render
from dsec_common.model_errors import ModelApi

__all__ = ["Telling", "parse", "render"]

# --- What is asked ----------------------------------------------------------------------------


class _InputText(Strict, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class _OutputText(Strict, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _ReasoningText(Strict, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


_Content = str | list[_InputText | _OutputText]


class _Message(Strict, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _Called(Strict, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _Output(Strict, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: _Content
    id: str | None = None
    status: str | None = None


class _Reasoning(Strict, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    summary: list[Any]
    content: list[_ReasoningText] | None = None
    id: str | None = None
    encrypted_content: None = None
    status: str | None = None


_Item = _Message | _Called | _Output | _Reasoning


class _Tool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str
    parameters: Json | None = None
    description: str | None = None
    strict: bool | None = None


class _Chosen(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class _Effort(Strict, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Format(Strict, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class _TextOptions(Strict, frozen=True, kw_only=True):
    format: _Format | None = None
    verbosity: str | None = None


class _Asked(Strict, frozen=True, kw_only=True):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Chosen | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    reasoning: _Effort | None = None
    text: _TextOptions | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    truncation: Literal["disabled"] | None = None
    # Answers are whole: neither is anything else included, nor does it harm to ask.
    include: list[str] | None = None
    # These change nothing of what is sampled.
    store: bool | None = None
    user: str | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    client_metadata: Json | None = None
    # What a client sends that does not use them.
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None


def parse(body: bytes) -> ModelRequest:
    """Read a request.

    Raises:
        ModelCallError: 400, naming the field that is wrong or not supported.
    """
    asked = convert(_with_types(json_object(body)), _Asked)
    said: list[Json] = []
    if asked.instructions:
        said.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        said.append({"role": "user", "content": asked.input})
    else:
        said += _conversation(asked.input)
    refuse_unless(bool(said), "input", "a conversation has a message at least")
    choice = asked.tool_choice
    return ModelRequest(
        api=ModelApi.RESPONSES,
        model=asked.model,
        messages=tuple(said),
        tools=tuple(_offered(tool) for tool in asked.tools or ()),
        options=given(
            {
                "tool_choice": (
                    {"type": "function", "function": {"name": choice.name}}
                    if isinstance(choice, _Chosen)
                    else choice
                ),
                "parallel_tool_calls": asked.parallel_tool_calls,
                "temperature": asked.temperature,
                "top_p": asked.top_p,
                "max_tokens": asked.max_output_tokens,
                "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
                "response_format": (
                    _format(asked.text.format) if asked.text and asked.text.format else None
                ),
            }
        ),
        stream=bool(asked.stream),
    )


def _with_types(body: Json) -> Json:
    """Return the body with each message called one: clients may leave that out."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    typed = [
        {"type": "message", **item}
        if isinstance(item, dict) and "role" in item and "type" not in item
        else item
        for item in items
    ]
    return {**body, "input": typed}


def _conversation(items: list[_Item]) -> list[Json]:
    """Return the messages that items are: what a model did in one turn is one message."""
    said: list[Json] = []
    turn: Json | None = None
    for item in items:
        if isinstance(item, _Output):
            turn = None
            said.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            )
            continue
        if isinstance(item, _Message) and item.role != "assistant":
            turn = None
            role = "system" if item.role == "developer" else item.role
            said.append({"role": role, "content": _text(item.content)})
            continue
        # Thoughts, or words after calls, begin a turn of the model.
        if turn is None or isinstance(item, _Reasoning) or _goes_before(item, turn):
            turn = {"role": "assistant"}
            said.append(turn)
        _add_to_turn(turn, item)
    return said


def _goes_before(item: _Message | _Called, turn: Json) -> bool:
    return isinstance(item, _Message) and ("content" in turn or "tool_calls" in turn)


def _add_to_turn(turn: Json, item: _Message | _Called | _Reasoning) -> None:
    match item:
        case _Message():
            turn["content"] = _text(item.content)
        case _Reasoning():
            thoughts = "".join(part.text for part in item.content or ())
            if thoughts:
                turn["reasoning_content"] = thoughts
        case _Called():
            turn.setdefault("tool_calls", []).append(
                {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
            )


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _offered(tool: _Tool) -> Json:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": given(function)}


def _format(wanted: _Format) -> Json | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": given(schema)}
