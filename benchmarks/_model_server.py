"""An inference server that samples at once: ``python -m benchmarks._model_server``.

It prints its port, and streams ``max_tokens`` tokens of three letters to whoever asks, each in a
chunk of its own with its id and log-probability, as fast as they are taken.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web


def _event(delta: dict[str, Any], **more: Any) -> bytes:
    ended = more.pop("ended", None)
    choice = {"index": 0, "delta": delta, "finish_reason": ended, **more.pop("choice", {})}
    chunk = {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice], **more}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


_SAMPLED: Final = {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}}
_FIRST: Final = _event({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3])
_NEXT: Final = _event({"content": "abc"}, choice=_SAMPLED)
_LAST: Final = _event({}, ended="length") + b"data: [DONE]\n\n"


async def _complete(request: web.Request) -> web.StreamResponse:
    asked = msgspec.json.decode(await request.read())
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(_FIRST)
    for _ in range(asked["max_tokens"]):
        await response.write(_NEXT)
        await asyncio.sleep(0)  # the other streams' turn
    await response.write(_LAST)
    return response


async def _main() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main())
