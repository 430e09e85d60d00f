"""The requests that reach a TCP port inside a sandbox, with or without a network of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.network import (
    PORT_CHUNK_BYTES,
    ClosePort,
    OpenPort,
    PortClosed,
    PortData,
    PortOpened,
    PortWritten,
    ReadPort,
    WritePort,
)
from dsec_sandboxd.errors import invalid_field, rolled_back
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.port_connections import PortConnection, open_in
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

#: Connections of one sandbox, and of all: each holds a descriptor of the daemon.
PORT_CONNECTIONS_MAX: Final = 64
NODE_PORT_CONNECTIONS_MAX: Final = 2048
#: A client that lives asks for bytes all the time.
PORT_IDLE_S: Final = 120.0
_WAIT_MAX_S: Final = 30.0
_CONNECT_MAX_S: Final = 60.0
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OFFSET_MAX: Final = 1 << 62
#: Connections that rollbacks cut, remembered for those who ask on.
_PUT_BACK_MAX: Final = 1024

#: Sandbox, connection.
_Key = tuple[str, str]


class PortsDoor:
    """The port verbs of this node's sandboxes."""

    def __init__(
        self, state: NodeState, kernel: Kernel, networks: Networks, steps: StepLog
    ) -> None:
        self._state = state
        self._kernel = kernel
        self._networks = networks
        self._steps = steps
        self._open: dict[_Key, asyncio.Task[PortConnection]] = {}
        self._count: Counter[str] = Counter()
        self._put_back: dict[_Key, None] = {}

    async def open(self, request: Request[OpenPort]) -> PortOpened:
        """Connect to a port; the same connection id again is the same connection.

        Raises:
            DsecError: ``unavailable`` when nothing listens there; ``timeout``; ``exhausted`` when
                the sandbox, or the node, has too many connections; ``invalid``.
        """
        message = request.message
        record = self._record(request)
        if not _ID.fullmatch(message.connection_id):
            raise invalid_field("connection_id", "use 1 to 64 letters, digits, - and _")
        if not 0 < message.port < 1 << 16:
            raise invalid_field("port", f"{message.port} is not between 1 and 65535")
        if not 0 < message.timeout_s <= _CONNECT_MAX_S:
            raise invalid_field("timeout_s", f"use more than 0 and at most {_CONNECT_MAX_S:g}")
        host = self._host(record, message.host)
        key = (record.local, message.connection_id)
        task = self._open.get(key)
        if task is None:
            self._check_room(record.local)
            namespace_fd = self._kernel.network_namespace(record.local)
            task = asyncio.create_task(
                open_in(namespace_fd, host, message.port, message.timeout_s),
                name=f"open port {message.port} of {record.local}",
            )
            self._open[key] = task
            self._count[record.local] += 1
            self._steps.step(
                record, "open_port", attributes={"host": host, "port": str(message.port)}
            )
        try:
            await asyncio.shield(task)
        except DsecError:
            self._let_go(key)
            raise
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise self._no_such(record.local, message.connection_id) from None
        return PortOpened(cause_id=message.message_id, connection_id=message.connection_id)

    async def read(self, request: Request[ReadPort]) -> PortData:
        """Wait for bytes from inside; an answer without any says that none came in time."""
        message = request.message
        self._check_wait(message.wait_s)
        if not 0 < message.length <= PORT_CHUNK_BYTES:
            raise invalid_field("length", f"use 1 to {PORT_CHUNK_BYTES}")
        if not 0 <= message.offset <= _OFFSET_MAX:
            raise invalid_field("offset", f"{message.offset} is not a place in a stream")
        connection = await self._connection(request, message.connection_id)
        with _Use(connection):
            data, offset, end = await connection.read(
                message.offset, message.length, message.wait_s
            )
        return PortData(cause_id=message.message_id, data=data, offset=offset, end=end)

    async def write(self, request: Request[WritePort]) -> PortWritten:
        """Send bytes inside; the answer says how many were taken, in time, since the beginning."""
        message = request.message
        self._check_wait(message.wait_s)
        if len(message.data) > PORT_CHUNK_BYTES:
            raise invalid_field("data", f"at most {PORT_CHUNK_BYTES} bytes at once")
        if not 0 <= message.offset <= _OFFSET_MAX:
            raise invalid_field("offset", f"{message.offset} is not a place in a stream")
        connection = await self._connection(request, message.connection_id)
        with _Use(connection):
            written = await connection.write(
                message.offset, message.data, message.wait_s, end=message.end
            )
        return PortWritten(cause_id=message.message_id, offset=written)

    async def close(self, request: Request[ClosePort]) -> PortClosed:
        """Cut a connection; one that is not there is fine."""
        message = request.message
        self._let_go((self._record(request).local, message.connection_id))
        return PortClosed(cause_id=message.message_id, connection_id=message.connection_id)

    async def sandbox_ending(self, local: str) -> None:
        """Cut every connection into a sandbox. Idempotent."""
        for key in [key for key in self._open if key[0] == local]:
            self._let_go(key)

    async def sandbox_put_back(self, local: str) -> None:
        """Cut every connection into a sandbox whose processes are about to end, and say so."""
        for key in [key for key in self._open if key[0] == local]:
            self._let_go(key, _rolled_back())
            self._put_back[key] = None
            if len(self._put_back) > _PUT_BACK_MAX:
                del self._put_back[next(iter(self._put_back))]

    def remove_idle(self) -> None:
        """Cut what nobody has asked about for long: its client is gone."""
        now = asyncio.get_running_loop().time()
        for key, task in list(self._open.items()):
            if task.done() and not task.cancelled() and task.exception() is None:
                connection = task.result()
                if not connection.users and now - connection.used_at > PORT_IDLE_S:
                    self._let_go(key)

    async def aclose(self) -> None:
        """Cut every connection."""
        for key in list(self._open):
            self._let_go(key)

    # --- Inside -------------------------------------------------------------------------------

    def _record(
        self,
        request: Request[OpenPort] | Request[ReadPort] | Request[WritePort] | Request[ClosePort],
    ) -> SandboxRecord:
        return self._state.running(request.project, local_of(request))

    def _host(self, record: SandboxRecord, text: str) -> str:
        """Return an address that only what is in the sandbox listens on."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise invalid_field("host", f"{text[:60]!r} is not an address") from None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if not address.is_loopback and address not in self._networks.addresses(record.local):
            raise invalid_field(
                "host", f"{address} is neither loopback nor one of the sandbox's own addresses"
            )
        return str(address)

    def _check_room(self, local: str) -> None:
        for count, most, whose in (
            (self._count[local], PORT_CONNECTIONS_MAX, "this sandbox"),
            (len(self._open), NODE_PORT_CONNECTIONS_MAX, "this node"),
        ):
            if count >= most:
                raise DsecError(
                    ErrorCode.EXHAUSTED,
                    f"{most} connections into {whose} are open already; close some first",
                    retry_after_s=1.0,
                    details={"reason": "port_connections", "limit": most},
                )

    async def _connection(
        self, request: Request[ReadPort] | Request[WritePort], connection_id: str
    ) -> PortConnection:
        task = self._open.get((self._record(request).local, connection_id))
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            raise self._no_such(self._record(request).local, connection_id)
        return task.result()

    def _no_such(self, local: str, connection_id: str) -> DsecError:
        if (local, connection_id) in self._put_back:
            return _rolled_back()
        return not_found(
            f"there is no connection {connection_id[:64]!r} into this sandbox; it was closed, or "
            "its node's daemon was started again: open another",
            what="connection",
        )

    def _let_go(self, key: _Key, why: DsecError | None = None) -> None:
        task = self._open.pop(key, None)
        if task is None:
            return
        self._count[key[0]] -= 1
        if not self._count[key[0]]:
            del self._count[key[0]]
        task.add_done_callback(lambda done: _close_result(done, why))
        task.cancel()

    @staticmethod
    def _check_wait(wait_s: float) -> None:
        if not 0 <= wait_s <= _WAIT_MAX_S:
            raise invalid_field("wait_s", f"use 0 to {_WAIT_MAX_S:g}")


class _Use:
    """A connection in use."""

    def __init__(self, connection: PortConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.users += 1

    def __exit__(self, *error: object) -> None:
        self._connection.users -= 1
        self._connection.used_at = asyncio.get_running_loop().time()


def _close_result(task: asyncio.Task[PortConnection], why: DsecError | None) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close(why)


def _rolled_back() -> DsecError:
    return rolled_back("the connection")
