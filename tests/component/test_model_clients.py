"""The clients that harnesses use, unchanged: each side reads what the other one writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from dsec.model_relay.calls import (
    ModelAnswer,
    ModelDelta,
    ModelRequest,
    ToolCall,
    begun_of,
    deltas_of,
)
from dsec.model_relay.interfaces import EventWriter, parse_call, render_answer
from dsec_common.model_errors import API_OF_PATH, ModelCallError

TOOL_SCHEMA = {"type": "object", "properties": {"line": {"type": "string"}}}
WITH_A_CALL = ModelAnswer(
    id="1",
    created=7,
    content="I look.",
    reasoning="Hm.",
    tool_calls=(ToolCall(id="call_1", name="sh", arguments='{"line":"ls"}'),),
    finish_reason="tool_calls",
    prompt_tokens=11,
    completion_tokens=5,
)
IN_WORDS = ModelAnswer(
    id="2", created=8, content="It is a.txt.", prompt_tokens=20, completion_tokens=4
)


class _Server:
    """Answers calls as the relay does, from a list."""

    def __init__(self, *answers: ModelAnswer) -> None:
        self.asked: list[ModelRequest] = []
        self.url = ""
        self.in_letters = False
        self._answers = list(answers)

    async def handle(self, request: web.Request) -> web.Response:
        api = API_OF_PATH[request.path]
        try:
            asked = parse_call(api, await request.read())
        except ModelCallError as error:
            return web.Response(
                status=error.status,
                body=error.body(api),
                content_type="application/json",
                headers=error.headers(),
            )
        self.asked.append(asked)
        answer = self._answers.pop(0)
        if asked.stream and self.in_letters:
            return web.Response(body=_in_letters(asked, answer), content_type="text/event-stream")
        rendered = render_answer(asked, answer)
        return web.Response(body=rendered.body, content_type=rendered.content_type)


def _in_letters(asked: ModelRequest, answer: ModelAnswer) -> bytes:
    """Return a stream as of an engine that has a token for each letter."""
    events = EventWriter(asked)
    body = events.begin(begun_of(answer))
    for delta in deltas_of(answer):
        letters = delta.content or delta.reasoning or delta.arguments
        for at, letter in enumerate(letters):
            part = ModelDelta(
                content=letter if delta.content else "",
                reasoning=letter if delta.reasoning else "",
                arguments=letter if delta.arguments else "",
                tool=delta.tool,
                tool_id="" if at else delta.tool_id,
                tool_name="" if at else delta.tool_name,
            )
            body += events.add(part)
    return body + events.end(answer)


@asynccontextmanager
async def _serving(*answers: ModelAnswer) -> AsyncIterator[_Server]:
    server = _Server(*answers)
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


def _openai(server: _Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")


def _anthropic(server: _Server) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=server.url, api_key="none")


@pytest.mark.parametrize("stream", ["no", "whole", "letters"])
async def test_a_chat_with_a_tool_goes_there_and_back(stream: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "sh", "parameters": TOOL_SCHEMA}}]
    said: list[Any] = [{"role": "user", "content": "look"}]
    async with _serving(WITH_A_CALL, IN_WORDS) as server, _openai(server) as client:
        server.in_letters = stream == "letters"

        async def call() -> Any:
            if stream == "no":
                return await client.chat.completions.create(model="m", messages=said, tools=tools)
            async with client.chat.completions.stream(
                model="m", messages=said, tools=tools, stream_options={"include_usage": True}
            ) as events:
                return await events.get_final_completion()

        first = await call()
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.tool_calls[0].function.arguments == '{"line":"ls"}'
        assert first.usage.total_tokens == 16
        said.append(choice.message.model_dump(exclude={"parsed"}))
        for made in said[-1]["tool_calls"]:
            made["function"].pop("parsed_arguments", None)
        said.append({"role": "tool", "tool_call_id": "call_1", "content": "a.txt"})
        second = await call()
        assert second.choices[0].message.content == "It is a.txt."
        _, assistant, tool = server.asked[1].messages
        assert assistant["content"] == "I look."
        assert assistant["reasoning_content"] == "Hm."
        assert assistant["tool_calls"][0]["function"] == {
            "name": "sh",
            "arguments": '{"line":"ls"}',
        }
        assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}


@pytest.mark.parametrize("stream", ["no", "whole", "letters"])
async def test_responses_with_a_tool_go_there_and_back(stream: str) -> None:
    tools: Any = [{"type": "function", "name": "sh", "parameters": TOOL_SCHEMA, "strict": False}]
    said: list[Any] = [{"role": "user", "content": "look"}]
    async with _serving(WITH_A_CALL, IN_WORDS) as server, _openai(server) as client:
        server.in_letters = stream == "letters"

        async def call() -> Any:
            if stream == "no":
                return await client.responses.create(model="m", input=said, tools=tools)
            async with client.responses.stream(model="m", input=said, tools=tools) as events:
                return await events.get_final_response()

        first = await call()
        assert first.status == "completed"
        assert first.output_text == "I look."
        made = first.output[-1]
        assert (made.type, made.call_id, made.arguments) == (
            "function_call",
            "call_1",
            '{"line":"ls"}',
        )
        assert first.usage.output_tokens == 5
        said += [item.model_dump(exclude={"parsed_arguments", "parsed"}) for item in first.output]
        said.append({"type": "function_call_output", "call_id": "call_1", "output": "a.txt"})
        second = await call()
        assert second.output_text == "It is a.txt."
        _, assistant, tool = server.asked[1].messages
        assert assistant["content"] == "I look."
        assert assistant["reasoning_content"] == "Hm."
        assert assistant["tool_calls"][0]["id"] == "call_1"
        assert tool["content"] == "a.txt"


@pytest.mark.parametrize("stream", ["no", "whole", "letters"])
async def test_messages_with_a_tool_go_there_and_back(stream: str) -> None:
    tools: Any = [{"name": "sh", "input_schema": TOOL_SCHEMA}]
    said: list[Any] = [{"role": "user", "content": "look"}]
    async with _serving(WITH_A_CALL, IN_WORDS) as server, _anthropic(server) as client:
        server.in_letters = stream == "letters"

        async def call() -> Any:
            asked: dict[str, Any] = {
                "model": "m",
                "messages": said,
                "tools": tools,
                "max_tokens": 100,
            }
            if stream == "no":
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                return await events.get_final_message()

        first = await call()
        assert first.stop_reason == "tool_use"
        thought, words, made = first.content
        assert (thought.thinking, words.text) == ("Hm.", "I look.")
        assert (made.id, made.name, made.input) == ("call_1", "sh", {"line": "ls"})
        assert (first.usage.input_tokens, first.usage.output_tokens) == (11, 5)
        said.append({"role": "assistant", "content": first.content})
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "a.txt"}
        said.append({"role": "user", "content": [result]})
        second = await call()
        assert second.content[0].text == "It is a.txt."
        assert second.stop_reason == "end_turn"
        _, assistant, tool = server.asked[1].messages
        assert assistant["content"] == "I look."
        assert assistant["reasoning_content"] == "Hm."
        assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}


async def test_an_answer_that_was_cut_is_told_so_in_each_interface() -> None:
    cut = ModelAnswer(id="3", created=9, content="It is", finish_reason="length")
    async with _serving(cut, cut, cut) as server:
        async with _openai(server) as client:
            chat = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
            response = await client.responses.create(model="m", input="x")
        async with _anthropic(server) as other:
            message = await other.messages.create(
                model="m", max_tokens=2, messages=[{"role": "user", "content": "x"}]
            )
    assert chat.choices[0].finish_reason == "length"
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert message.stop_reason == "max_tokens"


async def test_clients_raise_their_own_errors_for_what_is_refused() -> None:
    async with _serving() as server:
        async with _openai(server) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}], n=2
                )
            assert refused.value.param == "n"
            assert refused.value.code == "unsupported_value"
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(model="m", input="x", previous_response_id="r")
        async with _anthropic(server) as other:
            with pytest.raises(anthropic.BadRequestError) as denied:
                await other.messages.create(
                    model="m",
                    max_tokens=2,
                    messages=[{"role": "user", "content": "x"}],
                    extra_body={"container": "c"},
                )
            assert "container" in str(denied.value)
    assert not server.asked
