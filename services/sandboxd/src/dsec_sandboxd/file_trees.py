"""Whole directories in and out of sandboxes, as tar streams.

The daemon does not look into an archive: a process of the sandbox makes and reads it, with the
rights of the user named. Here pieces are put in order, hashed, and passed on no faster than they
are taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.subjects import validate_local
from dsec_common.wire.files import FILE_CHUNK_BYTES, ReadTree, TreeChunk, TreeWritten, WriteTree
from dsec_sandboxd.commands import kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.file_desk import FileDesk
from dsec_sandboxd.file_sessions import Key, Sessions
from dsec_sandboxd.kernel.file_ports import TreeCount, TreeSink, TreeSource

TREES_PER_SANDBOX: Final = 4
TREES_MAX: Final = 256
#: A client has eight pieces on their way; twice that much may wait, or be asked for again.
TREE_WINDOW_PIECES: Final = 16
#: Asked once more while the first one waits, too; each of them is in memory meanwhile.
TREE_PIECES_WAITING_MAX: Final = 2 * TREE_WINDOW_PIECES
_LATE_PIECES_S: Final = 10.0


class _Inbound:
    """An archive that is being unpacked: one piece after the other goes in."""

    def __init__(self, path: str, sink: TreeSink) -> None:
        self.path = path
        self._sink = sink
        self._hash = hashlib.sha256()
        self._turn = asyncio.Condition()
        self._sending = False
        self._waiting = 0
        self._over: DsecError | None = None
        self.size_bytes = 0

    async def end(self) -> None:
        """Let go of the stream. Idempotent."""
        self._over = self._over or unavailable(f"the upload to {self.path} is over; begin another")
        self._sink.close()
        async with self._turn:
            self._turn.notify_all()

    async def take(self, offset: int, data: bytes) -> None:
        """Pass one piece on when its turn comes, and return when there is room for more.

        Raises:
            DsecError: ``timeout`` naming the piece that is missing; what the sandbox refused.
        """
        if not 0 <= offset <= self.size_bytes + TREE_WINDOW_PIECES * FILE_CHUNK_BYTES:
            raise invalid_field("offset", f"{offset} is too far from {self.size_bytes}")
        if self._waiting >= TREE_PIECES_WAITING_MAX:
            raise invalid_field(
                "offset",
                f"{self._waiting} pieces wait for the one at {self.size_bytes}; have at most 8 on "
                "their way",
            )
        self._waiting += 1
        try:
            await self._wait_turn(offset)
        finally:
            self._waiting -= 1
        if self._over is not None:
            raise self._over
        if offset < self.size_bytes:
            if offset + len(data) <= self.size_bytes:
                return  # repeated
            raise invalid_field("offset", f"the piece at {offset} overlaps {self.size_bytes}")
        self._sending = True
        try:
            await self._sink.send(data)
            self._hash.update(data)
            self.size_bytes += len(data)
        finally:
            await self._done_sending()

    async def _wait_turn(self, offset: int) -> None:
        def mine() -> bool:
            return self._over is not None or (offset <= self.size_bytes and not self._sending)

        try:
            async with asyncio.timeout(_LATE_PIECES_S), self._turn:
                await self._turn.wait_for(mine)
        except TimeoutError:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"the piece at offset {self.size_bytes} did not arrive within {_LATE_PIECES_S:g} "
                "s; send it and those after it again",
                details={"offset": self.size_bytes},
            ) from None

    async def _done_sending(self) -> None:
        self._sending = False
        async with self._turn:
            self._turn.notify_all()

    async def complete(self, size_bytes: int, sha256: str) -> TreeCount:
        """Return when the tree is in its place and was what was announced.

        Raises:
            DsecError: ``invalid`` when size or hash differ.
        """
        if self.size_bytes != size_bytes:
            raise invalid(
                f"{self.size_bytes} bytes were sent, {size_bytes} were announced",
                field="size_bytes",
            )
        digest = self._hash.hexdigest()
        if sha256 and digest != sha256.lower():
            raise invalid(
                f"the archive's sha256 is {digest}, {sha256[:64]} was announced; send it again",
                field="sha256",
            )
        self._sending = True
        try:
            return await self._sink.finish()
        finally:
            await self._done_sending()


class _Outbound:
    """An archive that is being read: its last pieces are kept, for those who ask again."""

    def __init__(self, path: str, source: TreeSource) -> None:
        self.path = path
        self._source = source
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._pieces: dict[int, bytes] = {}
        self._made_bytes = 0
        self._whole = False
        self._lock = asyncio.Lock()
        self._over = False
        self.logged = False

    async def end(self) -> None:
        """Let go of the stream. Idempotent."""
        self._over = True
        self._source.close()

    async def piece(self, offset: int, cause_id: str) -> TreeChunk:
        """Return the piece at ``offset``; past the end an empty last one.

        Raises:
            DsecError: ``invalid`` for an offset outside the window; what the sandbox said.
        """
        window = TREE_WINDOW_PIECES * FILE_CHUNK_BYTES
        if offset % FILE_CHUNK_BYTES or not 0 <= offset <= self._made_bytes + window:
            raise invalid_field("offset", f"{offset} is no piece that is next")
        async with self._lock:
            while not self._whole and self._made_bytes <= offset:
                await self._make()
        if offset >= self._made_bytes:
            data = b""
        elif offset in self._pieces:
            data = self._pieces[offset]
        else:
            raise invalid_field("offset", f"the piece at {offset} is no longer kept")
        if not self._whole or offset + len(data) < self._made_bytes:
            return TreeChunk(cause_id=cause_id, data=data, offset=offset)
        return TreeChunk(
            cause_id=cause_id,
            data=data,
            offset=offset,
            end=True,
            size_bytes=self._made_bytes,
            sha256=self._hash.hexdigest(),
        )

    async def _make(self) -> None:
        if self._over:
            raise unavailable(f"the download of {self.path} is over; begin another")
        while len(self._buffer) < FILE_CHUNK_BYTES:
            data = await self._source.receive()
            if not data:
                self._whole = True
                break
            self._buffer += data
        piece = bytes(self._buffer[:FILE_CHUNK_BYTES])
        del self._buffer[:FILE_CHUNK_BYTES]
        if piece:
            self._hash.update(piece)
            self._pieces[self._made_bytes] = piece
            self._made_bytes += len(piece)
            if len(self._pieces) > TREE_WINDOW_PIECES:
                del self._pieces[next(iter(self._pieces))]


class Trees:
    """The verbs ``write_tree`` and ``read_tree``."""

    def __init__(self, desk: FileDesk, idle_s: float) -> None:
        self._desk = desk
        self.inbound: Sessions[_Inbound] = Sessions(
            "directories on their way in",
            desk.clock,
            per_sandbox=TREES_PER_SANDBOX,
            per_node=TREES_MAX,
            idle_s=idle_s,
        )
        self.outbound: Sessions[_Outbound] = Sessions(
            "directories on their way out",
            desk.clock,
            per_sandbox=TREES_PER_SANDBOX,
            per_node=TREES_MAX,
            idle_s=idle_s,
        )

    async def write_tree(self, request: Request[WriteTree]) -> TreeWritten:
        """Take one piece of a tar archive; it is unpacked while it arrives.

        What was unpacked before a failure stays. Answered when the sandbox has taken the piece.

        Raises:
            DsecError: ``invalid`` with reason ``invalid_path`` or ``invalid_archive``; ``denied``;
                ``exhausted`` when the sandbox's disk is full; each with the path of the entry.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        validate_local(message.upload_id)
        if len(message.data) > FILE_CHUNK_BYTES:
            raise invalid_field("data", f"{len(message.data)} bytes; {FILE_CHUNK_BYTES} at most")
        started_at = time.perf_counter()
        key: Key = (record.project, record.local, message.upload_id)

        async def begin() -> _Inbound:
            sink = await self._desk.kernel.unpack_tree(
                record.local,
                message.path,
                keep_set_id=message.keep_set_id,
                user=kernel_user(message.user),
            )
            return _Inbound(message.path, sink)

        count = TreeCount(entries=0, content_bytes=0)
        try:
            tree = await self.inbound.use(key, begin)
            try:
                if tree.path != message.path:
                    raise invalid_field("path", "the pieces of one upload name different paths")
                await tree.take(message.offset, message.data)
                if message.final:
                    size_bytes = message.size_bytes or tree.size_bytes
                    count = await tree.complete(size_bytes, message.sha256)
            finally:
                self.inbound.rest(key)
        except DsecError as error:
            if error.code is not ErrorCode.TIMEOUT:
                error = await self.inbound.fail(key, error)
            raise self._desk.told(record, "write_tree", message.path, error) from error
        if message.final:
            await self.inbound.end(key)
            self._desk.log(
                record,
                request,
                "write_tree",
                count.content_bytes,
                started_at,
                entries=str(count.entries),
            )
        return TreeWritten(
            cause_id=message.message_id,
            received_bytes=tree.size_bytes,
            complete=message.final,
            entries=count.entries,
            content_bytes=count.content_bytes,
        )

    async def read_tree(self, request: Request[ReadTree]) -> TreeChunk:
        """Return a piece of a directory as a tar archive.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid`` with ``details["reason"]``;
                ``conflict`` when a file changed while it was read, other than by growing: it is as
                long as it was when its turn came.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        validate_local(message.download_id)
        started_at = time.perf_counter()
        key: Key = (record.project, record.local, message.download_id)
        if message.close:
            await self.outbound.end(key)
            return TreeChunk(cause_id=message.message_id, offset=message.offset, end=True)
        if message.offset and not self.outbound.has(key):
            over = unavailable(f"the download of {message.path} is over; begin another")
            raise self.outbound.why(key, over)

        async def begin() -> _Outbound:
            source = await self._desk.kernel.pack_tree(
                record.local, message.path, user=kernel_user(message.user)
            )
            return _Outbound(message.path, source)

        try:
            tree = await self.outbound.use(key, begin)
            try:
                if tree.path != message.path:
                    raise invalid_field("path", "the pieces of one download name different paths")
                chunk = await tree.piece(message.offset, message.message_id)
            finally:
                self.outbound.rest(key)
        except DsecError as error:
            error = await self.outbound.fail(key, error)
            raise self._desk.told(record, "read_tree", message.path, error) from error
        if chunk.end and not tree.logged:
            tree.logged = True
            self._desk.log(record, request, "read_tree", chunk.size_bytes, started_at)
        return chunk
