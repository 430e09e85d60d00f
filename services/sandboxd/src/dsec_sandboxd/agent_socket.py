"""The sockets over which processes in sandboxes reach the platform, one per sandbox.

Each is a plain listening socket in the sandbox's run directory, which is bind-mounted at
``/run/dsec``: nothing inside can tell another sandbox's name, and the file that someone connected
to says who it is. Making one costs a bind and an epoll entry, nothing runs until someone connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import OrderedDict
from pathlib import Path
from typing import Final

import structlog

from dsec_common.clock import Clock, SystemClock
from dsec_common.errors import from_os_error
from dsec_sandboxd.agent_connection import AgentConnection
from dsec_sandboxd.agent_gateway import AgentGateway
from dsec_sandboxd.agent_limits import AgentLimits, ByteBudget, RequestRate
from dsec_sandboxd.agent_session import AgentSession
from dsec_sandboxd.ports import Uses
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.run_directory import SOCKET_NAME
from dsec_sandboxd.tools.desk import ToolDesk

__all__ = ["SOCKET_NAME", "AgentSocketServer"]

_log: Final = structlog.get_logger(__name__)

#: Anyone in the sandbox may connect; nobody outside can reach the directory's mount.
_MODE: Final = 0o666
_PATH_MAX_BYTES: Final = 107
#: Connections that wait in the kernel.
_BACKLOG: Final = 16
_ACCEPTS_AT_ONCE: Final = 8
_RETRY_S: Final = 0.5
#: SO_PASSRIGHTS (Linux 6.16): 0 refuses descriptors that a peer wants to send.
_SO_PASSRIGHTS: Final = 83
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class AgentSocketServer:
    """Implements :class:`dsec_sandboxd.ports.AgentSockets`. Belongs to the loop it is used on."""

    def __init__(
        self,
        gateway: AgentGateway,
        node: str,
        *,
        clock: Clock | None = None,
        limits: AgentLimits | None = None,
    ) -> None:
        """Take the way to the platform.

        Args:
            gateway: carries reports and steps on.
            node: this node's name.
            clock: for durations and deadlines.
            limits: what agents may make the daemon hold or do.
        """
        self._gateway = gateway
        self._node = node
        self._clock: Clock = clock or SystemClock()
        self.limits = limits or AgentLimits()
        self.budget = ByteBudget(self.limits.large_bytes_all)
        self._doors: dict[str, _Door] = {}
        self._uses: Uses | None = None
        self._tools: ToolDesk | None = None
        self._by_use: OrderedDict[AgentConnection, None] = OrderedDict()

    def count_uses(self, uses: Uses) -> None:
        """Tell ``uses`` of every call from a sandbox, for those that open from now on."""
        self._uses = uses

    def run_tools(self, tools: ToolDesk) -> None:
        """Have ``tools`` run what agents call, for sockets that open from now on."""
        self._tools = tools

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._by_use)

    async def open(self, record: SandboxRecord, directory: Path) -> None:
        """Listen in ``directory``, which the sandbox sees at ``/run/dsec``.

        Once more for the same sandbox, who connects from then on speaks for the new record.

        Raises:
            DsecError: naming the call that failed.
        """
        session = AgentSession(
            record, self._node, self._gateway, self._clock, self._uses, tools=self._tools
        )
        door = self._doors.get(record.local)
        if door is not None:
            door.session = session
            return
        self._doors[record.local] = _Door(self, session, _listen(f"{directory}/{SOCKET_NAME}"))

    def limit_rate(self, local: str, per_s: float | None) -> None:
        """Let a sandbox's agent ask at most so often in a second; None for as often as any."""
        door = self._doors.get(local)
        if door is not None:
            door.limit_rate(per_s)

    async def close(self, local: str) -> None:
        """Stop listening for a sandbox and end its connections. Idempotent."""
        door = self._doors.pop(local, None)
        if door is not None:
            await door.close()

    async def aclose(self) -> None:
        """End all of them."""
        for local in list(self._doors):
            await self.close(local)

    # --- What doors and connections tell ------------------------------------------------------

    def began(self, connection: AgentConnection) -> None:
        """Count a connection; make room by closing the one that has been idle for longest."""
        self._by_use[connection] = None
        if len(self._by_use) > self.limits.connections_all:
            idle = next((it for it in self._by_use if it.idle and it is not connection), None)
            (idle or connection).close()

    def used(self, connection: AgentConnection) -> None:
        """Note that a connection asked for something just now."""
        self._by_use.move_to_end(connection)

    def ended(self, connection: AgentConnection) -> None:
        """Note that a connection is closed."""
        self._by_use.pop(connection, None)
        door = self._doors.get(connection.local)
        if door is not None:
            door.ended(connection)


class _Door:
    """One sandbox's listening socket, and who came through it."""

    def __init__(
        self, server: AgentSocketServer, session: AgentSession, listener: socket.socket
    ) -> None:
        limits = server.limits
        self._server = server
        self.session = session
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._rate = RequestRate(limits.requests_per_s, limits.burst, self._loop.time())
        self._budget = ByteBudget(limits.large_bytes, server.budget)
        self._connections: set[AgentConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._full = False
        self._loop.add_reader(listener, self._accept)

    def limit_rate(self, per_s: float | None) -> None:
        limits, now = self._server.limits, self._loop.time()
        if per_s is None:
            self._rate.change(limits.requests_per_s, limits.burst, now)
        else:
            per_s = min(per_s, limits.requests_per_s)
            self._rate.change(per_s, min(max(int(per_s), 1), limits.burst), now)

    async def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.closed()

    def ended(self, connection: AgentConnection) -> None:
        self._connections.discard(connection)
        if self._full:
            self._full = False
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        limits = self._server.limits
        for _ in range(_ACCEPTS_AT_ONCE):
            if len(self._connections) >= limits.connections:
                self._loop.remove_reader(self._listener)
                self._full = True
                return
            if delay_s := self._rate.delay_s(self._loop.time()):
                self._wait(delay_s)
                return
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                _log.warning("agent_connection_waits", local=self.session.local, error=str(error))
                self._wait(_RETRY_S)
                return
            peer.setblocking(False)
            connection = AgentConnection(
                peer,
                self.session,
                self._server,
                limits=limits,
                rate=self._rate,
                budget=self._budget,
            )
            self._connections.add(connection)
            self._server.began(connection)

    def _wait(self, delay_s: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(
            delay_s, self._loop.add_reader, self._listener, self._accept
        )


def _listen(path: str) -> socket.socket:
    """Return a listening socket at ``path``, however long that is.

    Raises:
        DsecError: naming the call that failed.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(OSError):  # older kernels have no such option
            listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        # Under a name of its own until it may be used: an agent that tries meanwhile, as after a
        # restart of the daemon, finds the socket before it or none, but none that refuses it.
        draft = f"{path}.new"
        try:
            _bind(listener, draft)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            os.unlink(draft)  # noqa: PTH108  a hot path; a Path costs as much as the call
            _bind(listener, draft)
        os.chmod(draft, _MODE)  # noqa: PTH101  see above
        listener.listen(_BACKLOG)
        os.rename(draft, path)  # noqa: PTH104  see above
    except OSError as error:
        listener.close()
        raise from_os_error("bind", error, path) from error
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) <= _PATH_MAX_BYTES:
        listener.bind(path)
        return
    parent, name = os.path.split(path)
    directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{name}")
    finally:
        os.close(directory)
