"""Files of sandboxes: read and written through descriptors that the sandbox itself opens.

Paths mean what they mean inside the sandbox, links included, and every operation has the rights of
the user it names: a path can never lead out of the sandbox. The content goes straight through the
descriptor, at most 128 KiB at a time, so it does not wait for the sandbox's first process.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat as stat_bits
import time
from typing import Any, Final

import structlog

from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, from_os_error, unavailable
from dsec_common.subjects import validate_local
from dsec_common.wire.sandbox import (
    FILE_CHUNK_BYTES,
    DirectoryListing,
    DirectoryMade,
    FileChunk,
    FileInfo,
    FileKind,
    FileWritten,
    ListDirectory,
    MakeDirectory,
    ReadFile,
    StatFile,
    WriteFile,
)
from dsec_sandboxd.commands import check_path, kernel_user
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.kernel.interface import FileKind as KernelFileKind
from dsec_sandboxd.kernel.interface import FileStat, Kernel, OpenMode
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog
from dsec_sandboxd.uploads import OrderedWriter

_log: Final = structlog.get_logger(__name__)

LISTING_MAX: Final = 1000
UPLOADS_PER_SANDBOX: Final = 8
UPLOADS_MAX: Final = 512
_PERMISSION_BITS: Final = 0o777
#: Beyond it the kernel takes no offset and length.
_OFFSET_MAX: Final = 2**62
_LATE_PIECES_S: Final = 10.0
#: Content going in or out is a step of the sandbox; looking around is not.
_LOGGED: Final = frozenset({"read_file", "write_file"})
_KIND_OF: Final = {
    KernelFileKind.FILE: FileKind.FILE,
    KernelFileKind.DIRECTORY: FileKind.DIRECTORY,
    KernelFileKind.LINK: FileKind.SYMLINK,
    KernelFileKind.OTHER: FileKind.OTHER,
}
_REASON_OF: Final = {
    ErrorCode.NOT_FOUND: "not_found",
    ErrorCode.DENIED: "permission_denied",
    ErrorCode.EXHAUSTED: "no_space",
}


#: Failed uploads that are remembered until their last pieces are here.
_FAILED_MAX: Final = 1024

#: Project, sandbox, upload.
_Key = tuple[str, str, str]


class _Upload:
    """A file that is being sent: a temporary name beside its target, and what has arrived."""

    def __init__(self, message: WriteFile, temporary: str, descriptor: int, now: float) -> None:
        self.path = message.path
        self.user = kernel_user(message.user)
        self.temporary = temporary
        self.writer = OrderedWriter(descriptor)
        self.last_piece_at = now
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            # Its number may be another file's a moment later, so no piece may still use it.
            self.writer.fail(unavailable(f"the upload to {self.path} is over; begin another"))
            os.close(self.writer.descriptor)


class Files:
    """The file verbs of this node's sandboxes."""

    def __init__(
        self, state: NodeState, kernel: Kernel, steps: StepLog, clock: Clock, *, idle_s: float
    ) -> None:
        self._state = state
        self._kernel = kernel
        self._steps = steps
        self._clock = clock
        self._idle_s = idle_s
        self._uploads: dict[_Key, asyncio.Task[_Upload]] = {}
        self._failed: dict[_Key, DsecError] = {}

    # --- Reading ------------------------------------------------------------------------------

    async def read_file(self, request: Request[ReadFile]) -> FileChunk:
        """Return a piece of a regular file.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``.
        """
        message = request.message
        record = self._checked(request, message.path)
        if not 0 <= message.offset <= _OFFSET_MAX:
            raise invalid_field("offset", f"{message.offset} is not a place in a file")
        if not 0 < message.length <= FILE_CHUNK_BYTES:
            raise invalid_field(
                "length", f"{message.length} is not between 1 and {FILE_CHUNK_BYTES}"
            )
        started_at = time.perf_counter()
        try:
            descriptor = await self._kernel.open_file(
                record.local, message.path, OpenMode.READ, user=kernel_user(message.user)
            )
            chunk = _read_piece(descriptor, message)
        except DsecError as error:
            raise self._told(record, "read_file", message.path, error) from error
        if message.offset == 0:
            self._log(record, request, "read_file", chunk.size_bytes, started_at)
        return chunk

    async def stat_file(self, request: Request[StatFile]) -> FileInfo:
        """Return what a path is; a last link is not followed.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``.
        """
        message = request.message
        record = self._checked(request, message.path)
        try:
            found = await self._kernel.stat(
                record.local, message.path, user=kernel_user(message.user)
            )
        except DsecError as error:
            raise self._told(record, "stat_file", message.path, error) from error
        return _file_info(message.path, found, message.message_id)

    async def list_directory(self, request: Request[ListDirectory]) -> DirectoryListing:
        """Return one page of a directory, sorted by name.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid``, with ``details["reason"]``.
        """
        message = request.message
        record = self._checked(request, message.path)
        if not 0 < message.limit <= LISTING_MAX:
            raise invalid_field("limit", f"{message.limit} is not between 1 and {LISTING_MAX}")
        user = kernel_user(message.user)
        try:
            entries = await self._kernel.list_directory(record.local, message.path, user=user)
        except DsecError as error:
            raise self._told(record, "list_directory", message.path, error) from error
        # Names are bytes to the kernel; a message carries text.
        named = sorted(
            ((_as_text(entry.name), entry) for entry in entries), key=lambda pair: pair[0]
        )
        page = [(name, entry) for name, entry in named if name > message.after]
        more = len(page) > message.limit
        infos = []
        for name, entry in page[: message.limit]:
            path = posixpath.join(message.path, entry.name)
            try:
                found = await self._kernel.stat(record.local, path, user=user)
            except DsecError:
                # It went meanwhile, or may not be looked at: its name and kind are known.
                infos.append(FileInfo(path=name, kind=_KIND_OF[entry.kind]))
            else:
                infos.append(_file_info(name, found, message.message_id))
        return DirectoryListing(cause_id=message.message_id, entries=tuple(infos), more=more)

    # --- Writing ------------------------------------------------------------------------------

    async def make_directory(self, request: Request[MakeDirectory]) -> DirectoryMade:
        """Create a directory and those above it; an existing one is fine.

        Raises:
            DsecError: ``denied``, ``invalid`` or ``exhausted``, with ``details["reason"]``.
        """
        message = request.message
        record = self._checked(request, message.path)
        try:
            await self._kernel.make_directory(
                record.local,
                message.path,
                parents=True,
                permissions=_permissions(message.mode),
                user=kernel_user(message.user),
            )
        except DsecError as error:
            raise self._told(record, "make_directory", message.path, error) from error
        return DirectoryMade(cause_id=message.message_id, path=message.path)

    async def write_file(self, request: Request[WriteFile]) -> FileWritten:
        """Take one piece of a file; with the last one the file takes its place, or nothing changes.

        Pieces may arrive in any order within a window of eight. An upload without a new piece for
        the configured time is removed.

        Raises:
            DsecError: ``not_found``, ``denied`` or ``invalid`` with ``details["reason"]``;
                ``exhausted`` when the sandbox's disk is full; ``timeout`` when pieces are missing.
        """
        message = request.message
        record = self._checked(request, message.path)
        validate_local(message.upload_id)
        _permissions(message.mode)
        if len(message.data) > FILE_CHUNK_BYTES:
            raise invalid_field("data", f"{len(message.data)} bytes; {FILE_CHUNK_BYTES} at most")
        started_at = time.perf_counter()
        key = (record.project, record.local, message.upload_id)
        try:
            upload = await self._upload(key, message)
            if upload.path != message.path:
                raise invalid_field("path", "the pieces of one upload name different paths")
            upload.last_piece_at = self._clock.now()
            upload.writer.accept(message.offset, message.data)
            if not message.final:
                return FileWritten(
                    cause_id=message.message_id, received_bytes=upload.writer.received_bytes
                )
            await self._finish(key, upload, message)
        except DsecError as error:
            if error.code is not ErrorCode.TIMEOUT:  # after which the missing pieces may come
                self._remember_failure(key, error)
                await self._abandon(key)
            raise self._told(record, "write_file", message.path, error) from error
        size_bytes = upload.writer.written_bytes
        self._log(record, request, "write_file", size_bytes, started_at)
        return FileWritten(cause_id=message.message_id, received_bytes=size_bytes, complete=True)

    async def _upload(self, key: _Key, message: WriteFile) -> _Upload:
        opening = self._uploads.get(key)
        if opening is None:
            if failure := self._failed.get(key):
                raise DsecError(
                    failure.code, failure.message, retryable=False, details={**failure.details}
                )
            self._check_room(key)
            opening = self._uploads[key] = asyncio.create_task(
                self._open(key[1], message), name=f"open upload {key}"
            )
        return await asyncio.shield(opening)

    def _remember_failure(self, key: _Key, error: DsecError) -> None:
        """Have the pieces that are still on their way refused, too: none begins the upload anew."""
        if error.retryable or key not in self._uploads:
            return
        self._failed[key] = error.with_traceback(None)
        if len(self._failed) > _FAILED_MAX:
            del self._failed[next(iter(self._failed))]

    def _check_room(self, key: _Key) -> None:
        here = sum(1 for other in self._uploads if other[:2] == key[:2])
        ours = sum(1 for other in self._uploads if other[0] == key[0])
        # No project may keep all others out.
        if (
            here >= UPLOADS_PER_SANDBOX
            or ours >= UPLOADS_MAX // 2
            or (len(self._uploads) >= UPLOADS_MAX)
        ):
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{here} files are on their way into this sandbox, {ours} into this project's on "
                "this node; finish one first",
                retry_after_s=0.5,
            )

    async def _open(self, local: str, message: WriteFile) -> _Upload:
        parent = posixpath.dirname(message.path.rstrip("/"))
        if message.path.endswith("/"):
            raise _path_error(message.path, "is_directory", "names a directory; name a file")
        temporary = posixpath.join(parent, f".dsec-upload-{message.upload_id}")
        user = kernel_user(message.user)
        permissions = _permissions(message.mode)

        async def create() -> int:
            return await self._kernel.open_file(
                local, temporary, OpenMode.CREATE, permissions=permissions, user=user
            )

        try:
            descriptor = await create()
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND or not message.make_parents:
                raise
            await self._kernel.make_directory(local, parent, parents=True, user=user)
            try:
                descriptor = await create()
            except DsecError as again:
                # The caller knows nothing of the temporary name.
                said = again.message.replace(temporary, message.path)
                raise DsecError(
                    again.code, said, details={**again.details, "path": message.path}
                ) from again
        return _Upload(message, temporary, descriptor, self._clock.now())

    async def _finish(self, key: _Key, upload: _Upload, message: WriteFile) -> None:
        size_bytes = message.size_bytes or message.offset + len(message.data)
        await upload.writer.complete(size_bytes, message.sha256, _LATE_PIECES_S)
        try:
            os.fchmod(upload.writer.descriptor, _permissions(message.mode))
        except OSError as error:
            raise from_os_error("chmod", error, message.path) from error
        await self._kernel.rename(key[1], upload.temporary, upload.path, user=upload.user)
        upload.close()
        self._uploads.pop(key, None)

    async def _abandon(self, key: _Key, *, unlink: bool = True) -> None:
        opening = self._uploads.pop(key, None)
        if opening is None:
            return
        try:
            upload = await opening
        except DsecError:
            return
        upload.close()
        if not unlink:
            return
        try:
            await self._kernel.unlink(key[1], upload.temporary, user=upload.user)
        except DsecError as error:
            _log.info("upload_not_removed", local=key[1], error=str(error))

    async def remove_idle(self) -> None:
        """Remove uploads that nobody goes on with."""
        oldest = self._clock.now() - self._idle_s
        for key, opening in list(self._uploads.items()):
            if (
                opening.done()
                and not opening.exception()
                and (opening.result().last_piece_at < oldest)
            ):
                await self._abandon(key)

    async def sandbox_ending(self, local: str) -> None:
        """Let go of every upload into a sandbox; its files go with it."""
        for key in [key for key in self._uploads if key[1] == local]:
            await self._abandon(key, unlink=False)

    # --- Common -------------------------------------------------------------------------------

    def _checked(self, request: Request[Any], path: str) -> SandboxRecord:
        record = self._state.running(request.project, local_of(request))
        check_path(path, "path")
        return record

    def _told(self, record: SandboxRecord, action: str, path: str, error: DsecError) -> DsecError:
        """Return the error for the caller, with path and reason; log it if its success is."""
        if error.details.get("what") == "sandbox" or error.code is ErrorCode.UNAVAILABLE:
            try:
                self._state.running(record.project, record.local)
            except DsecError as ended:
                error = ended
        if error.code in _REASON_OF:
            error.details.setdefault("reason", _REASON_OF[error.code])
        error.details.setdefault("path", path)
        if action in _LOGGED:
            self._steps.step(
                record,
                action,
                status=error.code.value,
                attributes={"path": path},
                error_code=error.code.value,
            )
        return error

    def _log(
        self,
        record: SandboxRecord,
        request: Request[Any],
        action: str,
        size_bytes: int,
        started_at: float,
    ) -> None:
        self._steps.step(
            record,
            action,
            latency_ms=(time.perf_counter() - started_at) * 1000,
            attributes={"path": request.message.path, "size_bytes": str(size_bytes)},
            cause_id=request.message.message_id,
        )


def _read_piece(descriptor: int, message: ReadFile) -> FileChunk:
    try:
        found = os.fstat(descriptor)
        data = os.pread(descriptor, message.length, message.offset)
    except OSError as error:
        raise from_os_error("read", error, message.path) from error
    finally:
        os.close(descriptor)
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
        version=f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}",
    )


def _file_info(path: str, found: FileStat, cause_id: str) -> FileInfo:
    return FileInfo(
        cause_id=cause_id,
        path=path,
        kind=_KIND_OF[found.kind],
        size_bytes=found.size_bytes,
        mode=found.mode,
        modified_at=found.modified_at,
    )


def _as_text(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _permissions(mode: int) -> int:
    if mode & ~_PERMISSION_BITS:
        raise invalid_field("mode", f"{mode:#o} has more than permission bits; use 0 to 0o777")
    return mode


def _path_error(path: str, reason: str, message: str) -> DsecError:
    error = invalid_field("path", f"{path[:80]!r} {message}")
    error.details["reason"] = reason
    return error
