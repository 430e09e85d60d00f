"""Requests of three interfaces become one kind of call, and what is not supported is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsec.model_relay.calls import ModelAnswer, ModelRequest
from dsec.model_relay.engine import engine_body, read_engine
from dsec.model_relay.interfaces import parse_call, render_answer
from dsec_common.errors import DsecError
from dsec_common.model_errors import ModelApi, ModelCallError

Json = dict[str, Any]
CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RESPONSES: Json = {"model": "m", "input": "hi"}
MESSAGES: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def _parse(api: ModelApi, body: Json) -> ModelRequest:
    return parse_call(api, msgspec.json.encode(body))


def test_one_conversation_is_the_same_call_in_each_interface() -> None:
    tool = {"name": "sh", "description": "run", "parameters": {"type": "object"}}
    called = {"name": "sh", "arguments": '{"line":"ls"}'}
    chat = _parse(
        ModelApi.CHAT,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [{"id": "c1", "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
                {"role": "user", "content": "and?"},
            ],
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
            "max_tokens": 9,
            "temperature": 0.5,
        },
    )
    responses = _parse(
        ModelApi.RESPONSES,
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c1", **called},
                {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
                {"type": "message", "role": "user", "content": "and?"},
            ],
            "tools": [{"type": "function", **tool}],
            "tool_choice": "required",
            "max_output_tokens": 9,
            "temperature": 0.5,
        },
    )
    messages = _parse(
        ModelApi.MESSAGES,
        {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "none"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "c1", "name": "sh", "input": {"line": "ls"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
            "tools": [{"name": "sh", "description": "run", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
            "temperature": 0.5,
        },
    )
    assert responses.messages == messages.messages == chat.messages
    assert responses.tools == messages.tools == chat.tools
    assert responses.options == messages.options == chat.options


def test_calls_of_one_turn_are_one_message_and_a_turn_after_their_output_another() -> None:
    request = _parse(
        ModelApi.RESPONSES,
        {
            "model": "m",
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "1"},
                {"type": "function_call_output", "call_id": "b", "output": "2"},
                {"role": "assistant", "content": "done"},
            ],
        },
    )
    assert [message["role"] for message in request.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [call["id"] for call in request.messages[1]["tool_calls"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (ModelApi.CHAT, {**CHAT, "n": 2}, "n"),
        (ModelApi.CHAT, {**CHAT, "audio": {}}, "audio"),
        (ModelApi.CHAT, {**CHAT, "functions": []}, "functions"),
        (ModelApi.CHAT, {**CHAT, "messages": []}, "messages"),
        (ModelApi.CHAT, {**CHAT, "temperature": "hot"}, "temperature"),
        (ModelApi.CHAT, {"model": "m"}, None),
        (ModelApi.CHAT, {**CHAT, "messages": [{"role": "wizard", "content": ""}]}, None),
        (
            ModelApi.CHAT,
            {
                **CHAT,
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}
                ],
            },
            None,
        ),
        (ModelApi.RESPONSES, {**RESPONSES, "previous_response_id": "resp_1"}, None),
        (ModelApi.RESPONSES, {**RESPONSES, "background": True}, "background"),
        (ModelApi.RESPONSES, {**RESPONSES, "tools": [{"type": "web_search"}]}, None),
        (ModelApi.RESPONSES, {**RESPONSES, "input": []}, "input"),
        (ModelApi.RESPONSES, {**RESPONSES, "input": [{"type": "item_reference", "id": "x"}]}, None),
        (ModelApi.MESSAGES, {**MESSAGES, "mcp_servers": []}, "mcp_servers"),
        (ModelApi.MESSAGES, {**MESSAGES, "tools": [{"type": "bash_20250124", "name": "b"}]}, None),
        (ModelApi.MESSAGES, {**MESSAGES, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (ModelApi.MESSAGES, {"model": "m", "messages": MESSAGES["messages"]}, None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    api: ModelApi, body: Json, param: str | None
) -> None:
    with pytest.raises(ModelCallError) as caught:
        _parse(api, body)
    assert caught.value.status == 400
    assert param is None or caught.value.param == param
    told = msgspec.json.decode(caught.value.body(api))
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"] == caught.value.message
    assert caught.value.headers() == {"x-should-retry": "false"}


def test_a_field_that_is_null_counts_as_left_out_but_not_within_a_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"default": None}}}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    request = _parse(
        ModelApi.RESPONSES,
        {
            "model": "m",
            "input": [{"role": "user", "content": "x"}, {**called, "of_the_future": None}],
            "tools": [{"type": "function", "name": "f", "parameters": schema, "new": None}],
            "unheard_of": None,
        },
    )
    assert request.tools[0]["function"]["parameters"] == schema
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": None}, "caller": None}
    said = [*MESSAGES["messages"], {"role": "assistant", "content": [used]}]
    request = _parse(ModelApi.MESSAGES, {**MESSAGES, "messages": said})
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x":null}'


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model": "\xff"}', b"null"])
@pytest.mark.parametrize("api", list(ModelApi))
def test_a_body_that_is_no_object_is_refused(api: ModelApi, body: bytes) -> None:
    with pytest.raises(ModelCallError, match="body"):
        parse_call(api, body)


def test_the_engine_is_asked_for_its_tokens_whatever_the_harness_asked() -> None:
    request = _parse(
        ModelApi.CHAT,
        {**CHAT, "stream": True, "logprobs": False, "temperature": 0.0, "stop": ["END"]},
    )
    body = engine_body(request, model="policy", sampling={"temperature": 1.0})
    assert body == {
        "model": "policy",
        "messages": [{"role": "user", "content": "hi"}],
        "stop": ["END"],
        "temperature": 1.0,
        "stream": False,
        "logprobs": True,
        "return_token_ids": True,
    }


def _engine_answer(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "yes"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {
            "content": [
                {"token": "ye", "logprob": -0.25, "bytes": None, "top_logprobs": []},
                {"token": "s", "logprob": -0.5, "bytes": None, "top_logprobs": []},
            ]
        },
    }
    return msgspec.json.encode(
        {
            "id": "chatcmpl-abc",
            "created": 5,
            "choices": [choice | changes.pop("choice", {})],
            "prompt_token_ids": [1, 2, 3],
            **changes,
        }
    )


def test_the_engines_own_tokens_are_read_one_to_one() -> None:
    sampled = read_engine(_engine_answer(), {"temperature": 0.7}, model_version="step-3")
    assert sampled.prompt_ids == (1, 2, 3)
    assert sampled.completion_ids == (7, 8)
    assert sampled.logprobs == (-0.25, -0.5)
    assert (sampled.model_version, sampled.temperature) == ("step-3", 0.7)
    assert sampled.answer.prompt_tokens == 3
    told = read_engine(_engine_answer(model_version="step-4"), {}, model_version="step-3")
    assert told.model_version == "step-4"


@pytest.mark.parametrize(
    "answer",
    [
        b"oops",
        b'{"choices": []}',
        _engine_answer(prompt_token_ids=None),
        _engine_answer(choice={"token_ids": None}),
        _engine_answer(choice={"token_ids": [7]}),
        _engine_answer(choice={"logprobs": None}),
        _engine_answer(choice={"logprobs": {"content": [{"logprob": None}, {"logprob": 0}]}}),
    ],
)
def test_an_engine_whose_tokens_are_not_told_is_refused(answer: bytes) -> None:
    with pytest.raises(DsecError, match="cannot be trained from"):
        read_engine(answer, {})


def test_a_stream_of_events_holds_what_one_object_holds() -> None:
    request = _parse(ModelApi.CHAT, {**CHAT, "stream": True})
    answer = ModelAnswer(id="x", created=1, content="two\nlines", finish_reason="length")
    rendered = render_answer(request, answer)
    assert rendered.content_type == "text/event-stream"
    lines = rendered.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(it["choices"][0]["delta"].get("content", "") for it in chunks)
    assert text == "two\nlines"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
