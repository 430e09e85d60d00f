"""The connection's socket, written to once or twice in a turn of the event loop.

A write costs a system call, and for a peer on the same machine the kernel's work of receiving it
and of waking that peer. Under load one turn has some dozens of messages to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from nats.aio.transport import TcpTransport

#: With more than this kept back it is not waited for the turn's end.
_KEPT_BACK_BYTES_MAX: Final = 64 * 1024


class GatheringTransport(TcpTransport):
    """Writes what comes first in a turn of the loop at once, and all that follows when it ends.

    So one request alone is not held up by anything. The order of what is written is kept.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._in_turn = False
        self._kept_back: list[bytes] = []
        self._kept_back_bytes = 0

    def __bool__(self) -> bool:
        """Be there before it is connected: otherwise the client would make one of its own."""
        return True

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
