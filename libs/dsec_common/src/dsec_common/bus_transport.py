"""The connection's socket, written to once or twice in a turn of the event loop.

A write costs a system call, and for a peer on the same machine the kernel's work of receiving it
and of waking that peer. Under load one turn has some dozens of messages to send. What arrives is
taken apart at once: see :mod:`dsec_common.bus_arrivals`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

from dsec_common.bus_arrivals import Arrivals, Parse

#: A turn that kept back so many messages, or more, is followed by others like it.
_MANY: Final = 4
#: NATS's own.
_PORT: Final = 4222
#: With more than this kept back it is not waited for the turn's end.
_KEPT_BACK_BYTES_MAX: Final = 64 * 1024


class GatheringTransport(TcpTransport):
    """Writes what comes first in a turn of the loop at once, and all that follows when it ends.

    So one request alone is not held up by anything. After a turn that had much to send the next one
    sends all of it when it ends. The order of what is written is kept.
    """

    def __init__(self, parse: Parse | None = None) -> None:
        """Take what takes arriving bytes apart; without it they are read."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._parse = parse
        self._arrivals: Arrivals | None = None
        self._in_turn = False
        self._is_busy = False
        self._kept_back: list[bytes] = []
        self._kept_back_bytes = 0

    def __bool__(self) -> bool:
        """Be there before it is connected: otherwise the client would make one of its own."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect, as the library does."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=buffer_size, loop=loop)
        arrivals = Arrivals(reader, loop)
        transport, _ = await asyncio.wait_for(
            loop.create_connection(
                lambda: arrivals, uri.hostname or "localhost", uri.port or _PORT
            ),
            connect_timeout,
        )
        writer = asyncio.StreamWriter(transport, arrivals, reader, loop)
        self._arrivals = arrivals
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer

    async def read(self, buffer_size: int) -> bytes:
        """Return bytes to take apart; none when those that came are taken apart already."""
        arrivals = self._arrivals
        # Under TLS another reader has taken its place.
        is_bare = arrivals is not None and arrivals.reader is self._io_reader
        if self._parse is None or arrivals is None or not is_bare or not arrivals.can_take:
            data: bytes = await super().read(buffer_size)
            return data
        await arrivals.take(self._parse)
        return b""

    @property
    def waiting_bytes(self) -> int | None:
        """What is not with the kernel yet; None when nothing can be written any more."""
        writer = self._io_writer
        if writer is None or writer.transport.is_closing():
            return None
        return self._kept_back_bytes + writer.transport.get_write_buffer_size()

    def write(self, payload: bytes) -> None:
        """Write in this turn of the loop."""
        if not self._in_turn:
            self._in_turn = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            if not self._is_busy:
                self._send(payload)
                return
        self._kept_back.append(payload)
        self._kept_back_bytes += len(payload)
        if self._kept_back_bytes > _KEPT_BACK_BYTES_MAX:
            self._catch_up()

    def writelines(self, payload: Sequence[bytes]) -> None:
        """Write all of these in this turn of the loop."""
        self.write(b"".join(payload))

    async def drain(self) -> None:
        """Have everything on its way, and wait until not too much of it waits."""
        self._catch_up()
        await super().drain()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close after what was written; idempotent."""
        self._catch_up()
        super().close()  # type: ignore[no-untyped-call]

    def _end_turn(self) -> None:
        self._in_turn = False
        self._is_busy = len(self._kept_back) >= _MANY
        self._catch_up()

    def _catch_up(self) -> None:
        if not self._kept_back:
            return
        together = b"".join(self._kept_back)
        self._kept_back.clear()
        self._kept_back_bytes = 0
        # What a lost connection had not taken is lost with it, here as in the kernel's buffers.
        if self.waiting_bytes is not None:
            self._send(together)

    def _send(self, data: bytes) -> None:
        super().write(data)  # type: ignore[no-untyped-call]
