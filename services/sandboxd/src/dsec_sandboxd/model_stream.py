"""An answer on its way: what its harness has been told of it before it was whole."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import Final

from dsec_common.wire.rollout_stream import StreamFeedback

PENDING_BYTES: Final = 64 * 1024
"""What is held for a harness that reads slowly; the trainer's side keeps the rest."""


class AnswerStream:
    """The pieces of one answer for one request that waits; belongs to the loop it is used on.

    The answer that is recorded in the end has to begin with all that was told: bytes of two samples
    never come together in one response.
    """

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.broken = False
        """Whether what was told was given up: another sample is being made."""
        self._stream = ""
        self._size = 0
        self._digest = blake2b(digest_size=16)
        self._pending = bytearray()
        self._told = 0
        self._waiting: asyncio.Future[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether any of it was told."""
        return self._told > 0

    def offer(self, piece: StreamFeedback) -> int:
        """Take a piece in if it follows; return how many bytes of its stream are here."""
        if piece.stream != self._stream:
            if self._told:
                self.broken = True
                self.wake()
                return 0
            self._begin(piece)
        if not 0 <= piece.offset <= self._size:
            return self._size
        more = piece.data[self._size - piece.offset :]
        if more and not self._full(len(more)):
            self._size += len(more)
            self._digest.update(more)
            self._pending += more
            self.wake()
        return self._size

    def _begin(self, piece: StreamFeedback) -> None:
        self._stream, self.headers = piece.stream, piece.headers
        self._size = 0
        self._digest = blake2b(digest_size=16)
        self._pending.clear()

    def _full(self, more: int) -> bool:
        return len(self._pending) + more > PENDING_BYTES

    def take(self) -> bytes:
        """Return what is to be told now."""
        data = bytes(self._pending)
        self._pending.clear()
        self._told += len(data)
        return data

    def rest_of(self, body: bytes) -> bytes | None:
        """Return what is left of the whole answer; None when it begins otherwise than was told."""
        if self.broken or len(body) < self._size:
            return None
        if blake2b(body[: self._size], digest_size=16).digest() != self._digest.digest():
            return None
        return body[self._told :]

    def wake(self, _: object = None) -> None:
        """Have :meth:`changed` return."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def changed(self) -> None:
        """Return when there is something new."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting
