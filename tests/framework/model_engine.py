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


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    """Return a conversation as the engine sees it, up to where it is to go on."""
    ids: list[int] = []
    for message in messages:
        ids += [BEGIN, *tokens_of(message["role"]), *tokens_of(message["content"]), END]
    return [*ids, BEGIN, *tokens_of("assistant")]


class ScriptedServer:
    """Answers with ``answers`` in order, and then with the number of the call.

    Attributes:
        asked: the bodies of all calls that were begun.
        away: it says 503.
        held: while it is set, calls wait before they are answered.
        abandoned: calls whose client went away.
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
        self._answers = list(answers)

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

    async def handle(self, request: web.Request) -> web.Response:
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
        except asyncio.CancelledError:
            self.abandoned += 1
            self.changed.set()
            raise
        text = self._answers[number] if number < len(self._answers) else f"answer {number}"
        sampled = [*tokens_of(text), END][: body.get("max_tokens", 1 << 20)]
        logprobs: list[Any] = [
            {"token": str(it), "logprob": -it / 1000, "bytes": None, "top_logprobs": []}
            for it in sampled
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if sampled[-1] == END else "length",
            "token_ids": sampled,
            "logprobs": {"content": logprobs},
        }
        told = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "prompt_token_ids": prompt_ids(body["messages"]),
        }
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")


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
