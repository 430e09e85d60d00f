"""Connections into sandboxes: a socket each, and how far its bytes have got in both directions.

Bytes are counted from the beginning of the connection, so that a request whose answer was lost may
be repeated: what was read is kept until the reader says that it has it, what was written already
is not written again. Nothing is read from inside before somebody asks for it, so a sender in the
sandbox waits as TCP has it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_sandboxd.network.namespaces import tcp_socket_in

_REFUSED: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL}


def port_refused(host: str, port: int, error: OSError) -> DsecError:
    """Return the answer when nothing takes a connection."""
    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"nothing takes connections on {host} port {port} in this sandbox ({name}); start it "
        "first, and have it listen on that address",
        retry_after_s=0.2,
        details={"reason": "port_refused", "port": port, "errno": name},
    )


def port_broken(error: OSError | None) -> DsecError:
    """Return the answer for a connection that the other end reset."""
    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN") if error else "ECONNRESET"
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"the connection was cut from inside the sandbox ({name}); open another",
        retryable=False,
        details={"reason": "port_broken", "errno": name},
    )


async def connect_inside(
    namespace_fd: int, host: str, port: int, timeout_s: float
) -> PortConnection:
    """Return a connection to what listens at an address of a namespace.

    Raises:
        DsecError: ``unavailable`` when nothing listens there, ``timeout``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    inside = tcp_socket_in(namespace_fd, family)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(inside, (host, port))
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except TimeoutError:
        inside.close()
        raise DsecError(
            ErrorCode.TIMEOUT,
            f"port {port} of the sandbox did not take the connection within {timeout_s:g} s",
            details={"reason": "port_timeout", "port": port},
        ) from None
    except OSError as error:
        inside.close()
        raise port_refused(host, port, error) from error
    except BaseException:
        inside.close()
        raise
    return PortConnection(inside)


class PortConnection:
    """One connection. Reads take turns, and so do writes; both may go on at once."""

    def __init__(self, inside: socket.socket) -> None:
        self._socket = inside
        self._loop = asyncio.get_running_loop()
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._kept = b""
        self._kept_from = 0
        self._read_ended = False
        self._written = 0
        self._write_ended = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._why: DsecError | None = None
        self.used_at = self._loop.time()
        self.users = 0

    def close(self, why: DsecError | None = None) -> None:
        """Cut the connection; who waits on it is told, and why if that is known. Idempotent."""
        self._why = self._why or why
        if not self._closed.done():
            self._closed.set_result(None)
            for forget in (self._loop.remove_reader, self._loop.remove_writer):
                with contextlib.suppress(ValueError, OSError):
                    forget(self._socket.fileno())
            self._socket.close()

    async def read(self, offset: int, length: int, wait_s: float) -> tuple[bytes, int, bool]:
        """Return bytes from ``offset`` on, that offset, and whether none follow.

        Raises:
            DsecError: ``invalid`` for an offset that is not the next or the last; ``unavailable``
                when the connection is cut.
        """
        async with self._reading:
            end = self._kept_from + len(self._kept)
            if not self._kept_from <= offset <= end:
                raise invalid(
                    f"offset {offset} is not between {self._kept_from} and {end}", field="offset"
                )
            if offset < end:
                kept = self._kept[offset - self._kept_from :][:length]
                return kept, offset, self._read_ended and offset + len(kept) == end
            self._kept, self._kept_from = b"", offset
            if not self._read_ended:
                self._kept = await self._receive(length, wait_s)
            return self._kept, offset, self._read_ended and not self._kept

    async def _receive(self, length: int, wait_s: float) -> bytes:
        if not await self._wait(wait_s, for_reading=True):
            return b""
        try:
            data = self._socket.recv(length)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise port_broken(error) from error
        self._read_ended = not data
        return data

    async def write(self, offset: int, data: bytes, wait_s: float, *, end: bool) -> int:
        """Write bytes whose first has this offset; return how many are written in all.

        Raises:
            DsecError: ``invalid`` for an offset beyond what was written; ``unavailable`` when the
                connection is cut.
        """
        async with self._writing:
            if offset > self._written:
                raise invalid(
                    f"offset {offset} leaves a gap: {self._written} bytes were written",
                    field="offset",
                )
            rest = memoryview(data)[self._written - offset :]
            deadline = self._loop.time() + wait_s
            while rest:
                if self._write_ended:
                    raise invalid("bytes after the end of this connection", field="data")
                sent = await self._send(rest, deadline - self._loop.time())
                if not sent:
                    return self._written
                self._written += sent
                rest = rest[sent:]
            if end and not self._write_ended and self._written == offset + len(data):
                self._write_ended = True
                with contextlib.suppress(OSError):  # reset meanwhile: the reader is told
                    self._socket.shutdown(socket.SHUT_WR)
            return self._written

    async def _send(self, data: memoryview, wait_s: float) -> int:
        self._alive()
        try:
            return self._socket.send(data)
        except BlockingIOError:
            pass
        except OSError as error:
            raise port_broken(error) from error
        if wait_s <= 0 or not await self._wait(wait_s, for_reading=False):
            return 0
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise port_broken(error) from error

    async def _wait(self, wait_s: float, *, for_reading: bool) -> bool:
        """Return whether the socket got ready in time.

        Raises:
            DsecError: ``unavailable`` when it was closed meanwhile.
        """
        self._alive()
        descriptor = self._socket.fileno()
        ready: asyncio.Future[None] = self._loop.create_future()
        watch = self._loop.add_reader if for_reading else self._loop.add_writer
        forget = self._loop.remove_reader if for_reading else self._loop.remove_writer
        watch(descriptor, _resolve, ready)
        try:
            await asyncio.wait(
                {ready, self._closed},
                timeout=max(wait_s, 0.0),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if not self._closed.done():
                forget(descriptor)
        self._alive()
        return ready.done()

    def _alive(self) -> None:
        if self._closed.done():
            if self._why is not None:
                raise self._why
            raise unavailable(
                "the connection is closed: its sandbox ended, or nobody used it; open another",
                reason="port_closed",
            )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def open_in(namespace_fd: int, host: str, port: int, timeout_s: float) -> PortConnection:
    """Connect and let go of the namespace."""
    try:
        return await connect_inside(namespace_fd, host, port, timeout_s)
    finally:
        os.close(namespace_fd)
