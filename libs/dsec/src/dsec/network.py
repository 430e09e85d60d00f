"""What a sandbox may reach, in a few words or many; and the ports of what runs inside it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, Self

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec.handle import Closing, OfSandbox
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.network_words import Policy, Rule, network_policy, parse_rule
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import new_id
from dsec_common.wire.network import (
    PORT_CHUNK_BYTES,
    ClosePort,
    EnterAgentPhase,
    InspectNetwork,
    NetworkInfo,
    OpenPort,
    PortClosed,
    PortData,
    PortOpened,
    PortWritten,
    ReadPort,
    SetNetwork,
    WritePort,
)

__all__ = [
    "Network",
    "Policy",
    "PortStream",
    "Rule",
    "Tunnel",
    "network_policy",
    "open_port",
    "parse_rule",
]

_TIMEOUT_S: Final = 10.0
_WAIT_S: Final = 20.0
_PORT_MAX: Final = 65535
_RESET_AT_ONCE: Final = struct.pack("ii", 1, 0)
#: For one chunk in one direction, over lost answers and a node that is away for a moment.
_CHUNK_TIMEOUT_S: Final = 60.0


class Network(OfSandbox):
    """The network of one sandbox."""

    async def inspect(self) -> NetworkInfo:
        """Return the policy in force, the sandbox's addresses, and how much was refused."""
        return await self._ask(
            "inspect_network", InspectNetwork(), NetworkInfo, timeout_s=_TIMEOUT_S
        )

    async def set(self, policy: Policy) -> NetworkInfo:
        """Put the sandbox under another policy; when it returns, it is in force.

        Connections to what it denies are cut. Written as for :func:`network_policy`.

        Raises:
            DsecError: ``invalid``; ``unsupported`` when the node cannot enforce one.
        """
        checked = network_policy(policy)
        if checked is None:
            raise invalid("a policy is missing; for no network say 'none'", field="network")
        return await self._ask(
            "set_network", SetNetwork(policy=checked), NetworkInfo, timeout_s=_TIMEOUT_S
        )

    async def enter_agent_phase(self) -> NetworkInfo:
        """Go from ``setup_network`` to ``network``, for good; again is fine."""
        return await self._ask(
            "enter_agent_phase", EnterAgentPhase(), NetworkInfo, timeout_s=_TIMEOUT_S
        )


class PortStream(Closing, OfSandbox):
    """One connection to a TCP port inside a sandbox.

    Reads and writes may go on at the same time. A lost answer loses no byte: both directions are
    counted, and what is asked again is not done again.
    """

    def __init__(self, channel: Channel, scoped: ScopedId, connection_id: str) -> None:
        super().__init__(channel, scoped)
        self._id = connection_id
        self._read_offset = 0
        self._write_offset = 0
        self._read_ended = False
        self._write_ended = False
        self._closed = False

    async def _leave(self) -> None:
        await self.close()

    async def read(self, length: int = PORT_CHUNK_BYTES) -> bytes:
        """Return some bytes, at most ``length``; none at the end.

        Raises:
            DsecError: ``unavailable`` when the connection was cut; ``expired`` when the sandbox
                has ended.
        """
        while not self._read_ended:
            reply = await self._channel.ask(
                self._subject("read_port"),
                ReadPort(
                    connection_id=self._id,
                    offset=self._read_offset,
                    length=max(1, min(length, PORT_CHUNK_BYTES)),
                    wait_s=_WAIT_S,
                ),
                PortData,
                timeout_s=_CHUNK_TIMEOUT_S,
                repeatable=True,
                patience_s=_WAIT_S + ANSWER_PATIENCE_S,
            )
            self._read_offset += len(reply.data)
            self._read_ended = reply.end
            if reply.data:
                return reply.data
        return b""

    async def write(self, data: bytes) -> None:
        """Send ``data``; returns when the sandbox's end has room for what follows.

        Raises:
            DsecError: ``unavailable`` when the connection was cut; ``expired`` when the sandbox
                has ended.
        """
        view = memoryview(data)
        while view:
            view = view[await self._write(bytes(view[:PORT_CHUNK_BYTES]), end=False) :]

    async def write_eof(self) -> None:
        """Say that nothing more comes; reading goes on."""
        if not self._write_ended:
            await self._write(b"", end=True)
            self._write_ended = True

    async def _write(self, data: bytes, *, end: bool) -> int:
        reply = await self._channel.ask(
            self._subject("write_port"),
            WritePort(
                connection_id=self._id,
                offset=self._write_offset,
                data=data,
                end=end,
                wait_s=_WAIT_S,
            ),
            PortWritten,
            timeout_s=_CHUNK_TIMEOUT_S,
            repeatable=True,
            patience_s=_WAIT_S + ANSWER_PATIENCE_S,
        )
        taken = reply.offset - self._write_offset
        self._write_offset = reply.offset
        return taken

    async def close(self) -> None:
        """Let go of the connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._channel.ask(
                self._subject("close_port"),
                ClosePort(connection_id=self._id),
                PortClosed,
                timeout_s=_TIMEOUT_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
        except DsecError as error:
            # Whatever has become of the sandbox, the connection is gone or soon will be.
            if error.code is ErrorCode.DENIED:
                raise


async def open_port(
    channel: Channel,
    scoped: ScopedId,
    port: int,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = 10.0,
) -> PortStream:
    """Return a connection to what listens on ``port`` inside a sandbox.

    Raises:
        DsecError: ``unavailable`` when nothing listens there; ``timeout``, ``exhausted``.
    """
    connection_id = new_id()
    await channel.ask(
        subjects.sandbox(channel.project, scoped, "open_port"),
        OpenPort(connection_id=connection_id, port=port, host=host, timeout_s=timeout_s),
        PortOpened,
        timeout_s=timeout_s + ANSWER_PATIENCE_S,
        repeatable=True,
        attempts_max=1,
        patience_s=timeout_s,
    )
    return PortStream(channel, scoped, connection_id)


class Tunnel(Closing):
    """A local TCP port whose connections end at a port inside a sandbox; closed by its context.

    Attributes:
        port: the port inside.
        local_host: the address here.
        local_port: the port here.
    """

    def __init__(
        self, open_stream: Callable[[], Any], port: int, local_host: str, local_port: int
    ) -> None:
        self._open_stream = open_stream
        self.port = port
        self.local_host = local_host
        self.local_port = local_port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Tunnel({self.local_host}:{self.local_port} to port {self.port})"

    async def start(self) -> Self:
        """Listen.

        Raises:
            DsecError: ``invalid`` when the local port cannot be had, or a number is no port.
        """
        # The port inside would be refused only when somebody connects, who could not be told why.
        for field, number, least in (("port", self.port, 1), ("local_port", self.local_port, 0)):
            if not least <= number <= _PORT_MAX:
                raise invalid(
                    f"{field}: {number} is not between {least} and {_PORT_MAX}", field=field
                )
        try:
            self._server = await asyncio.start_server(
                self._accept, self.local_host, self.local_port, limit=PORT_CHUNK_BYTES
            )
        except OSError as error:
            raise invalid(
                f"cannot listen on {self.local_host} port {self.local_port}: {error.strerror}",
                field="local_port",
            ) from error
        self.local_port = self._server.sockets[0].getsockname()[1]
        return self

    async def _leave(self) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening and cut what is connected. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._connections - self._ending:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="tunnel")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream: PortStream | None = None
        try:
            stream = await self._open_stream()
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump_in(reader, stream))
                group.create_task(_pump_out(stream, writer))
        except* (DsecError, OSError):
            _reset(writer)
        finally:
            # From here on it ends by itself, and whoever closes the tunnel waits for that.
            task = asyncio.current_task()
            if task is not None:
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            writer.close()
            if stream is not None:
                with contextlib.suppress(DsecError):
                    await stream.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that its client sees a reset, as it would inside, and no clean end."""
    one = writer.get_extra_info("socket")
    if one is not None:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_ONCE)
    writer.transport.abort()


async def _pump_in(reader: asyncio.StreamReader, stream: PortStream) -> None:
    while data := await reader.read(PORT_CHUNK_BYTES):
        await stream.write(data)
    await stream.write_eof()


async def _pump_out(stream: PortStream, writer: asyncio.StreamWriter) -> None:
    while data := await stream.read():
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
