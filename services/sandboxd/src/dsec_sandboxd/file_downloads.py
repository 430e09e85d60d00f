"""Files on their way out of sandboxes: opened once, hashed while they are read."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat as stat_bits
import time
from typing import Final

import msgspec

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_common.subjects import validate_local
from dsec_common.wire.files import FILE_CHUNK_BYTES, FileChunk, ReadFile
from dsec_sandboxd.commands import kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.file_desk import FileDesk
from dsec_sandboxd.file_sessions import Key, Sessions
from dsec_sandboxd.kernel.interface import OpenMode
from dsec_sandboxd.records import SandboxRecord

DOWNLOADS_PER_SANDBOX: Final = 8
DOWNLOADS_MAX: Final = 512
#: Pieces read before those in front of them, kept until they are hashed.
EARLY_PIECES_MAX: Final = 16
#: Beyond it the kernel takes no offset and length.
_OFFSET_MAX: Final = 2**62
_HASH_PIECE_BYTES: Final = 1 << 20


class _Download:
    """One open file, as long as it was then, and the hash of what has been read of it in order.

    What is appended to it meanwhile is no part of it, and no conflict either.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        opened = os.fstat(descriptor)
        self._size_bytes = opened.st_size
        self._version = _version(opened)
        self._hash = hashlib.sha256()
        self._hashed_bytes = 0
        self._early: dict[int, bytes] = {}

    async def end(self) -> None:
        """Let go of the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def piece(self, message: ReadFile) -> FileChunk:
        """Read a piece; those in front of it may come later, within a window.

        Raises:
            DsecError: ``conflict`` when the file has become shorter since it was opened; whether
                what it held then has changed is seen at the end.
        """
        if self._descriptor < 0:
            raise _changed(self.path)
        left_bytes = max(self._size_bytes - message.offset, 0)
        chunk = read_piece(self._descriptor, message)
        if chunk.size_bytes < self._size_bytes:
            raise _changed(self.path)
        data = chunk.data[:left_bytes]
        if len(data) < min(left_bytes, message.length):  # cut off after the look at its size
            raise _changed(self.path)
        chunk = msgspec.structs.replace(
            chunk,
            data=data,
            size_bytes=self._size_bytes,
            end_of_file=len(data) == left_bytes,
            version=self._version,
        )
        if message.offset >= self._hashed_bytes and chunk.data:
            is_missing_one = message.offset == self._hashed_bytes
            if len(self._early) >= EARLY_PIECES_MAX and not is_missing_one:
                raise invalid_field(
                    "offset", f"more than {EARLY_PIECES_MAX} pieces in front of it are missing"
                )
            self._early[message.offset] = chunk.data
            while early := self._early.pop(self._hashed_bytes, None):
                self._hash.update(early)
                self._hashed_bytes += len(early)
        return chunk

    async def verdict(self, message: ReadFile) -> FileChunk:
        """Return the hash of the whole, all of one version.

        Raises:
            DsecError: ``conflict`` when it changed, ``invalid`` when pieces were not read.
        """
        if self._descriptor < 0:
            raise _changed(self.path)
        found = os.fstat(self._descriptor)
        if self._early or self._hashed_bytes != self._size_bytes:
            raise invalid_field(
                "final", f"{self._hashed_bytes} of {self._size_bytes} bytes were read in order"
            )
        if _version(found) != self._version:
            await self._check_unchanged(found)
        return FileChunk(
            cause_id=message.message_id,
            data=b"",
            offset=self._hashed_bytes,
            size_bytes=self._size_bytes,
            end_of_file=True,
            mode=stat_bits.S_IMODE(found.st_mode),
            version=self._version,
            sha256=self._hash.hexdigest(),
        )

    async def _check_unchanged(self, found: os.stat_result) -> None:
        """Return if a file that was written to still begins with all that was read of it.

        Then all of it was there at one time: when the first reading had ended. (A file that grows
        has its new time a moment before its new size.)
        """
        if found.st_size < self._size_bytes:
            raise _changed(self.path)
        descriptor = os.dup(self._descriptor)  # the other may be closed meanwhile
        try:
            digest = await asyncio.to_thread(_hash_of, descriptor, self._size_bytes)
        except OSError as error:
            raise from_os_error("read", error, self.path) from error
        finally:
            os.close(descriptor)
        if digest != self._hash.hexdigest():
            raise _changed(self.path)


class Downloads:
    """The verb ``read_file``."""

    def __init__(self, desk: FileDesk, idle_s: float) -> None:
        self._desk = desk
        self.sessions: Sessions[_Download] = Sessions(
            "downloads",
            desk.clock,
            per_sandbox=DOWNLOADS_PER_SANDBOX,
            per_node=DOWNLOADS_MAX,
            idle_s=idle_s,
        )

    async def read_file(self, request: Request[ReadFile]) -> FileChunk:
        """Return a piece of a regular file; of a download's last request, the hash of all pieces.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``;
                ``conflict`` when a download's file has changed or its daemon does not know it.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        if not 0 <= message.offset <= _OFFSET_MAX:
            raise invalid_field("offset", f"{message.offset} is not a place in a file")
        if not 0 < message.length <= FILE_CHUNK_BYTES:
            raise invalid_field(
                "length", f"{message.length} is not between 1 and {FILE_CHUNK_BYTES}"
            )
        started_at = time.perf_counter()
        try:
            if message.download_id:
                validate_local(message.download_id)
                chunk = await self._go_on(record, message)
            else:
                descriptor = await self._open(record, message)
                try:
                    chunk = read_piece(descriptor, message)
                finally:
                    os.close(descriptor)
        except DsecError as error:
            raise self._desk.told(record, "read_file", message.path, error) from error
        if message.offset == 0 and not message.final:
            self._desk.log(record, request, "read_file", chunk.size_bytes, started_at)
        return chunk

    async def _open(self, record: SandboxRecord, message: ReadFile) -> int:
        return await self._desk.kernel.open_file(
            record.local, message.path, OpenMode.READ, user=kernel_user(message.user)
        )

    async def _go_on(self, record: SandboxRecord, message: ReadFile) -> FileChunk:
        key: Key = (record.project, record.local, message.download_id)
        if (message.offset or message.final) and not self.sessions.has(key):
            # Opened anew it could be another file.
            raise _changed(message.path)

        async def begin() -> _Download:
            return _Download(message.path, await self._open(record, message))

        download = await self.sessions.use(key, begin)
        try:
            if download.path != message.path:
                raise invalid_field("path", "the pieces of one download name different paths")
            chunk = await download.verdict(message) if message.final else download.piece(message)
            is_whole = message.offset == 0 and len(chunk.data) == chunk.size_bytes
            if is_whole and not message.final:
                chunk = msgspec.structs.replace(
                    chunk, sha256=hashlib.sha256(chunk.data).hexdigest()
                )
        except DsecError:
            self.sessions.rest(key)
            await self.sessions.end(key)
            raise
        self.sessions.rest(key)
        if message.final or is_whole:
            await self.sessions.end(key)
        return chunk


def read_piece(descriptor: int, message: ReadFile) -> FileChunk:
    """Read one piece of an open file.

    Raises:
        DsecError: what the kernel says.
    """
    try:
        found = os.fstat(descriptor)
        data = os.pread(descriptor, message.length, message.offset)
    except OSError as error:
        raise from_os_error("read", error, message.path) from error
    return FileChunk(
        cause_id=message.message_id,
        data=data,
        offset=message.offset,
        size_bytes=found.st_size,
        # A file in /proc says that it has no size, so only nothing more to read is its end.
        end_of_file=message.offset + len(data) >= found.st_size
        if found.st_size
        else len(data) < message.length,
        mode=stat_bits.S_IMODE(found.st_mode),
        version=_version(found),
    )


def _hash_of(descriptor: int, size_bytes: int) -> str:
    """Return the hash of a file's beginning, or of less when there is less."""
    digest = hashlib.sha256()
    offset = 0
    while data := os.pread(descriptor, min(_HASH_PIECE_BYTES, size_bytes - offset), offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _changed(path: str) -> DsecError:
    return DsecError(
        ErrorCode.CONFLICT,
        f"{path[:200]!r} changed while it was being read; read it again when it is quiet",
        retryable=True,
        details={"path": path},
    )
