"""A consumer that takes one message, says so through a named pipe, and never finishes.

Usage: nats_stuck_consumer.py SERVER CREDENTIALS STREAM PIPE. It is there to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dsec_common.bus import Bus, BusConfig, Request
from dsec_common.wire.base import Message


class Job(Message, frozen=True, kw_only=True):
    number: int = 0


async def main(server: str, credentials: str, stream: str, pipe: str) -> None:
    async def hold(request: Request[Job]) -> None:
        await asyncio.to_thread(Path(pipe).write_text, str(request.message.number))
        await asyncio.Event().wait()

    bus = await Bus.connect(BusConfig(servers=(server,), credentials_path=credentials))
    await bus.consume(stream, "worker", Job, hold, ack_wait_s=1.0)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
