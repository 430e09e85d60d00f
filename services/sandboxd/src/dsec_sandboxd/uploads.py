"""Pieces of a file on their way into a sandbox: put in order, hashed, written."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid
from dsec_common.wire.files import FILE_CHUNK_BYTES

#: A sender has eight pieces on their way; twice that much may wait for one that is late.
EARLY_BYTES_MAX: Final = 16 * FILE_CHUNK_BYTES

#: However small they are: each takes more memory than what is in it.
EARLY_PIECES_MAX: Final = 64

_ZEROS: Final = memoryview(bytes(FILE_CHUNK_BYTES))


def _write_error(error: OSError) -> DsecError:
    if error.errno != errno.ENOSPC:
        return from_os_error("write", error)
    return DsecError(
        ErrorCode.EXHAUSTED,
        "the sandbox's writable layer is full; remove files, or create a sandbox with more "
        "disk_bytes and memory_bytes",
        # The same piece again would begin another upload.
        retryable=False,
        details={"operation": "write", "errno": "ENOSPC"},
    )


class OrderedWriter:
    """Writes pieces to a descriptor in order, whatever the order in which they arrive.

    Pieces that come early are held in memory, up to 2 MiB and 64 of them. Writing in order lets the
    hash be taken on the way and leaves no hole that was never sent.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.written_bytes = 0
        self._early: dict[int, bytes] = {}
        self._early_bytes = 0
        self._hash = hashlib.sha256()
        self._progress = asyncio.Event()
        self._error: DsecError | None = None

    @property
    def received_bytes(self) -> int:
        """How much has arrived, in order or early."""
        return self.written_bytes + self._early_bytes

    def accept(self, offset: int, data: bytes) -> None:
        """Take one piece; one that has been taken before is ignored.

        Raises:
            DsecError: ``invalid`` when it is too far ahead or overlaps; ``exhausted`` when the
                file system is full.
        """
        if self._error is not None:
            raise self._error
        if offset < 0:
            raise invalid(f"offset {offset} is negative", field="offset")
        if offset > self.written_bytes:
            self._hold(offset, data)
            return
        if offset < self.written_bytes:
            if offset + len(data) <= self.written_bytes:
                return  # repeated
            raise invalid(
                f"the piece at {offset} overlaps what was sent before up to {self.written_bytes}",
                field="offset",
            )
        self._write(data)
        while (early := self._early.pop(self.written_bytes, None)) is not None:
            self._early_bytes -= len(early)
            self._write(early)
        self._progress.set()

    def _hold(self, offset: int, data: bytes) -> None:
        if offset in self._early:
            return
        if self._early_bytes + len(data) > EARLY_BYTES_MAX or len(self._early) >= EARLY_PIECES_MAX:
            raise invalid(
                f"the piece at {offset} is too far ahead of {self.written_bytes}, which is "
                "missing; have at most 8 pieces on their way",
                field="offset",
            )
        self._early[offset] = data
        self._early_bytes += len(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        if view == _ZEROS[: len(view)]:  # stays a hole
            self._hash.update(view)
            self.written_bytes += len(view)
            return
        while view:
            try:
                count = os.pwrite(self.descriptor, view, self.written_bytes)
            except OSError as error:
                failure = _write_error(error)
                self.fail(failure)
                raise failure from error
            self._hash.update(view[:count])
            self.written_bytes += count
            view = view[count:]

    def _end_in_a_hole(self) -> None:
        try:
            if os.fstat(self.descriptor).st_size < self.written_bytes:
                os.ftruncate(self.descriptor, self.written_bytes)
        except OSError as error:
            raise _write_error(error) from error

    def fail(self, error: DsecError) -> None:
        """Have every later call raise ``error``."""
        self._error = error
        self._progress.set()

    async def complete(self, size_bytes: int, sha256: str, timeout_s: float) -> None:
        """Return when exactly ``size_bytes`` have been written and have the hash ``sha256``.

        Args:
            size_bytes: of the whole.
            sha256: hexadecimal; empty checks the size alone.
            timeout_s: how long to wait for pieces that are still on their way.

        Raises:
            DsecError: ``timeout`` naming the missing piece, ``invalid`` when size or hash differ.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.written_bytes < size_bytes and self._error is None:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"the piece at offset {self.written_bytes} of {size_bytes} bytes did not arrive "
                f"within {timeout_s:g} s; send the missing pieces and the last one again",
                details={"offset": self.written_bytes, "size_bytes": size_bytes},
            ) from None
        if self._error is not None:
            raise self._error
        if self.received_bytes != size_bytes:
            raise invalid(
                f"{self.received_bytes} bytes were sent, {size_bytes} were announced",
                field="size_bytes",
            )
        self._end_in_a_hole()
        digest = self._hash.hexdigest()
        if sha256 and digest != sha256.lower():
            raise invalid(
                f"the content's sha256 is {digest}, {sha256[:64]} was announced; send it again",
                field="sha256",
            )
