"""What a client does with the execs of one sandbox, verb by verb."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from dsec_common.wire.base import Message
from dsec_common.wire.exec import (
    CancelExec,
    ExecEvent,
    ExecEvents,
    ExecInfo,
    ExecStream,
    InspectExec,
    ReadExec,
    StartExec,
    StdinWritten,
    WriteStdin,
)
from sandboxd_node import NodeForTests

R = TypeVar("R", bound=Message)


class Box:
    """One sandbox and what a client does with its execs."""

    def __init__(self, node: NodeForTests, sandbox_id: str) -> None:
        self.node = node
        self.id = sandbox_id

    async def ask(self, verb: str, message: Message, reply: type[R], **more: Any) -> R:
        return await self.node.ask(self.id, verb, message, reply, **more)

    async def start(self, *argv: str, **changes: Any) -> str:
        info = await self.ask("start_exec", StartExec(argv=argv, **changes), ExecInfo)
        return info.exec_id

    async def sh(self, line: str, **changes: Any) -> str:
        return await self.start("sh", "-c", line, **changes)

    async def read(self, exec_id: str, after: int = 0, wait_s: float = 10.0) -> ExecEvents:
        return await self.ask(
            "read_exec", ReadExec(exec_id=exec_id, after=after, wait_s=wait_s), ExecEvents
        )

    async def events(self, exec_id: str, after: int = 0) -> list[ExecEvent]:
        """Return all events up to the exit."""
        found: list[ExecEvent] = []
        while not found or found[-1].stream is not ExecStream.EXIT:
            page = await self.read(exec_id, found[-1].seq if found else after)
            found += page.events
        return found

    async def until(self, exec_id: str, text: bytes) -> list[ExecEvent]:
        """Return the events up to the one with which ``text`` was printed."""
        found: list[ExecEvent] = []
        async with asyncio.timeout(20):
            while text not in output(found):
                found += (await self.read(exec_id, found[-1].seq if found else 0)).events
        return found

    async def write(
        self, exec_id: str, offset: int, data: bytes, *, end: bool = False, wait_s: float = 10.0
    ) -> StdinWritten:
        message = WriteStdin(exec_id=exec_id, offset=offset, data=data, end=end, wait_s=wait_s)
        return await self.ask("write_stdin", message, StdinWritten)

    async def inspect(self, exec_id: str) -> ExecInfo:
        return await self.ask("inspect_exec", InspectExec(exec_id=exec_id), ExecInfo)

    async def cancel(self, exec_id: str, grace_s: float = 2.0) -> ExecInfo:
        return await self.ask("cancel_exec", CancelExec(exec_id=exec_id, grace_s=grace_s), ExecInfo)


def output(events: list[ExecEvent], stream: ExecStream = ExecStream.STDOUT) -> bytes:
    return b"".join(event.data for event in events if event.stream is stream)
