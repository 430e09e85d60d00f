"""Files on their way into sandboxes, piece by piece: nameless until all of each is there."""

from __future__ import annotations

import time
from typing import Final

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.subjects import validate_local
from dsec_common.wire.files import FILE_CHUNK_BYTES, FileWritten, WriteFile
from dsec_sandboxd.commands import kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.file_desk import FileDesk, permissions
from dsec_sandboxd.file_sessions import Key, Sessions
from dsec_sandboxd.kernel.file_ports import FileUpload
from dsec_sandboxd.uploads import OrderedWriter

UPLOADS_PER_SANDBOX: Final = 8
UPLOADS_MAX: Final = 512
LATE_PIECES_S: Final = 10.0


class _Upload:
    """A file that is being sent, and what has arrived."""

    def __init__(self, path: str, file: FileUpload) -> None:
        self.path = path
        self.file = file
        self.writer = OrderedWriter(file.descriptor)

    async def end(self) -> None:
        """Let go of the file; without its name nothing of it is left."""
        # Its number may be another file's a moment later, so no piece may still use it.
        self.writer.fail(unavailable(f"the upload to {self.path} is over; begin another"))
        self.file.close()


class Uploads:
    """The verb ``write_file``."""

    def __init__(self, desk: FileDesk, idle_s: float) -> None:
        self._desk = desk
        self.sessions: Sessions[_Upload] = Sessions(
            "uploads",
            desk.clock,
            per_sandbox=UPLOADS_PER_SANDBOX,
            per_node=UPLOADS_MAX,
            idle_s=idle_s,
        )

    async def write_file(self, request: Request[WriteFile]) -> FileWritten:
        """Take one piece of a file; with the last one the file takes its place, or nothing changes.

        Pieces may arrive in any order within a window of eight. An upload without a new piece for
        the configured time is removed.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid`` with ``details["reason"]``;
                ``exhausted`` when the sandbox's disk is full; ``timeout`` when pieces are missing.
        """
        message = request.message
        record = self._desk.checked(request, message.path)
        validate_local(message.upload_id)
        permissions(message.mode)
        if len(message.data) > FILE_CHUNK_BYTES:
            raise invalid_field("data", f"{len(message.data)} bytes; {FILE_CHUNK_BYTES} at most")
        started_at = time.perf_counter()
        key = (record.project, record.local, message.upload_id)

        async def begin() -> _Upload:
            file = await self._desk.kernel.put_file(
                record.local,
                message.path,
                parents=message.make_parents,
                user=kernel_user(message.user),
            )
            return _Upload(message.path, file)

        try:
            size_bytes = await self._take(key, message, await self.sessions.use(key, begin))
        except DsecError as error:
            if error.code is not ErrorCode.TIMEOUT:  # after which the missing pieces may come
                error = await self.sessions.fail(key, error)
            raise self._desk.told(record, "write_file", message.path, error) from error
        if message.final:
            self._desk.log(record, request, "write_file", size_bytes, started_at)
        return FileWritten(
            cause_id=message.message_id, received_bytes=size_bytes, complete=message.final
        )

    async def _take(self, key: Key, message: WriteFile, upload: _Upload) -> int:
        try:
            if upload.path != message.path:
                raise invalid_field("path", "the pieces of one upload name different paths")
            writer = upload.writer
            writer.accept(message.offset, message.data)
            if not message.final:
                return writer.received_bytes
            size_bytes = message.size_bytes or message.offset + len(message.data)
            await writer.complete(size_bytes, message.sha256, LATE_PIECES_S)
            await upload.file.commit(permissions(message.mode), change_mode=message.change_mode)
        finally:
            self.sessions.rest(key)
        await self.sessions.end(key)
        return size_bytes
