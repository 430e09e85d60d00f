"""An inference server that says what it is told to, and returns its tokens as vLLM does.

Its tokens are the bytes of the text and a few ids above them for the template, so a test can tell
what any of them stands for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

BEGIN, END = 300, 301
"""What stands before and after each message."""


CALL = "$ "
"""What follows it in an answer is a command for the tool ``bash``."""


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    """Return a conversation as the engine sees it, up to where it is to go on."""
    ids: list[int] = []
    for message in messages:
        text = message.get("content") or ""
        for call in message.get("tool_calls", ()):
            text += CALL + msgspec.json.decode(call["function"]["arguments"])["command"]
        ids += [BEGIN, *tokens_of(message["role"]), *tokens_of(text), END]
    return [*ids, BEGIN, *tokens_of("assistant")]


class ScriptedServer:
    """Answers with ``answers`` in order, and then with the number of the call.

    Attributes:
        asked: the bodies of all calls that were begun.
        away: it says 503.
        held: while it is set, calls wait before they are answered.
        abandoned: calls whose client went away.
        breaks: it hangs up on whom it streams to, at the next token.
    """

    def __init__(self, *answers: str) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.away = False
        self.open = asyncio.Event()
        self.open.set()
        self.abandoned = 0
        self.changed = asyncio.Event()
        self.breaks = False
        self._let_through = asyncio.Semaphore(1 << 30)
        self._answers = list(answers)

    def hold_tokens(self) -> None:
        """Stream no token that :meth:`let_through` does not let through."""
        self._let_through = asyncio.Semaphore(0)

    def let_through(self, count: int) -> None:
        """Stream so many tokens more; of a text, each is a byte."""
        for _ in range(count):
            self._let_through.release()

    async def until_asked(self, count: int) -> None:
        """Return when so many calls were begun."""
        async with asyncio.timeout(20):
            while len(self.asked) < count:
                self.changed.clear()
                await self.changed.wait()

    async def until_abandoned(self, count: int) -> None:
        """Return when so many clients went away."""
        async with asyncio.timeout(20):
            while self.abandoned < count:
                self.changed.clear()
                await self.changed.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion."""
        if self.away:
            return web.Response(status=503)
        body = msgspec.json.decode(await request.read())
        number = len(self.asked)
        self.asked.append(body)
        self.authorizations.append(request.headers.get("authorization", ""))
        self.changed.set()
        try:
            await self.open.wait()
            text = self._answers[number] if number < len(self._answers) else f"answer {number}"
            sampled = [*tokens_of(text), END][: body.get("max_tokens", 1 << 20)]
            if body.get("stream"):
                return await self._stream(request, body, number, sampled)
        except (asyncio.CancelledError, ConnectionError):
            self.abandoned += 1
            self.changed.set()
            raise
        choice = {
            "index": 0,
            "message": _message(_text(sampled), number),
            "finish_reason": _finish(sampled),
            "token_ids": sampled,
            "logprobs": {"content": _logprobs(sampled)},
        }
        told = {**_head(body, number), "choices": [choice]}
        told |= {"object": "chat.completion", "prompt_token_ids": prompt_ids(body["messages"])}
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    async def _stream(
        self, request: web.Request, body: dict[str, Any], number: int, sampled: list[int]
    ) -> web.StreamResponse:
        """Tell a token at a time, as many as were let through."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        head = {**_head(body, number), "object": "chat.completion.chunk"}

        async def tell(choice: dict[str, Any], **more: Any) -> None:
            choices = [{"index": 0, "finish_reason": None, **choice}]
            event = msgspec.json.encode({**head, "choices": choices, **more})
            await response.write(b"data: " + event + b"\n\n")

        said = {"role": "assistant", "content": ""}
        await tell({"delta": said}, prompt_token_ids=prompt_ids(body["messages"]))
        for token in sampled:
            await self._let_through.acquire()
            if self.breaks:
                assert request.transport is not None
                request.transport.abort()
                return response
            choice = {
                "delta": {"content": _text([token])},
                "token_ids": [token],
                "logprobs": {"content": _logprobs([token])},
            }
            await tell(choice)
        await tell({"delta": {}, "finish_reason": _finish(sampled)})
        await response.write(b"data: [DONE]\n\n")
        return response


def _head(body: dict[str, Any], number: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "created": 1, "model": body["model"]}


def _text(sampled: list[int]) -> str:
    return bytes(it for it in sampled if it != END).decode()


def _message(text: str, number: int) -> dict[str, Any]:
    content, call, command = text.partition(CALL)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if call:
        arguments = msgspec.json.encode({"command": command}).decode()
        function = {"name": "bash", "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
    return message


def _finish(sampled: list[int]) -> str:
    return "stop" if sampled[-1] == END else "length"


def _logprobs(sampled: list[int]) -> list[Any]:
    return [
        {"token": str(it), "logprob": -it / 1000, "bytes": None, "top_logprobs": []}
        for it in sampled
    ]


@contextlib.asynccontextmanager
async def scripted_server(*answers: str) -> AsyncIterator[ScriptedServer]:
    """Yield a server on a free port."""
    server = ScriptedServer(*answers)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield server
    finally:
        server.open.set()
        await runner.cleanup()
