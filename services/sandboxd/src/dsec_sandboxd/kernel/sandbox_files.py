"""The files of one living sandbox."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import struct
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.command import out_of_descriptors
from dsec_sandboxd.kernel.file_errors import check_path, file_error
from dsec_sandboxd.kernel.file_ports import (
    DirectoryEntry,
    DirectoryPage,
    FileKind,
    FileStat,
    Removal,
    TreeCount,
)
from dsec_sandboxd.kernel.file_streams import (
    FileStream,
    StreamTreeSink,
    StreamTreeSource,
    StreamUpload,
    StreamWatcher,
)
from dsec_sandboxd.kernel.interface import OpenMode
from dsec_sandboxd.kernel.protocol import LIST_NAMES_MAX, FileModeFlag, FileOperation, step_name

if TYPE_CHECKING:
    from dsec_sandboxd.kernel.init import FileAnswer, InitClient

#: A file operation takes well under a millisecond. Whoever waits for one holds up others.
_FILE_TIMEOUT_S: Final = 10.0

_OPEN_OPERATIONS: Final = {
    OpenMode.READ: FileOperation.OPEN_READ,
    OpenMode.WRITE: FileOperation.OPEN_WRITE,
    OpenMode.APPEND: FileOperation.OPEN_APPEND,
    OpenMode.CREATE: FileOperation.OPEN_CREATE,
}
_DESCRIPTORS_OF: Final = {
    **dict.fromkeys(_OPEN_OPERATIONS.values(), 1),
    FileOperation.LIST: 1,
    FileOperation.PUT: 2,
    FileOperation.UNPACK: 1,
    FileOperation.PACK: 1,
    FileOperation.WATCH: 1,
    FileOperation.COPY: 1,
}
_LIST_ENTRY: Final = struct.Struct("=4IQq2I")
#: PID 1 has 64 places for file operations, 24 of which are left to those that go on.
_AT_ONCE_MAX: Final = 40
#: How long until a place that is taken is asked for again.
_PLACE_WAIT_S: Final = 0.01
#: Why a move fails that are about what is at its target.
_OF_A_MOVES_TARGET: Final = frozenset({errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


class SandboxFiles:
    """File operations, each done by a child of PID 1 as the user it names."""

    init: InitClient
    _places: asyncio.Semaphore | None = None

    async def open_file(self, path: str, mode: OpenMode, permissions: int, user: str) -> int:
        """Open a regular file; see ``Kernel.open_file``."""
        _, descriptors = await self._file(_OPEN_OPERATIONS[mode], user, path, permissions)
        # Opened without blocking, for the sandbox's sake; regular files ignore the flag.
        return descriptors[0]

    async def stat(self, path: str, user: str) -> FileStat:
        """Describe a path; see ``Kernel.stat``."""
        reply, descriptors = await self._file(FileOperation.STAT, user, path)
        return FileStat(
            link_target=os.fsdecode(_read_memory(descriptors[0])) if descriptors else "",
            kind=_kind_of(reply.file_mode),
            size_bytes=reply.size_bytes,
            mode=stat.S_IMODE(reply.file_mode),
            user_id=reply.user_id,
            group_id=reply.group_id,
            modified_at=reply.modified_ns / 1e9,
        )

    async def list_page(self, path: str, after: str, limit: int, user: str) -> DirectoryPage:
        """List a directory; see ``FileKernel.list_page``."""
        reply, descriptors = await self._file(
            FileOperation.LIST, user, path, min(limit, LIST_NAMES_MAX), target=after
        )
        return DirectoryPage(
            entries=_entries_of(_read_memory(descriptors[0])), more=reply.status == 1
        )

    async def make_directory(
        self, path: str, *, parents: bool, permissions: int, user: str
    ) -> None:
        """Create a directory; see ``Kernel.make_directory``."""
        operation = FileOperation.MKDIR_PARENTS if parents else FileOperation.MKDIR
        await self._file(operation, user, path, permissions)

    async def rename(self, source: str, target: str, user: str, *, replace: bool) -> None:
        """Move a path; see ``Kernel.rename``."""
        check_path(target)
        flags = 0 if replace else FileModeFlag.KEEP
        await self._file(FileOperation.RENAME, user, source, flags, target=target)

    async def unlink(self, path: str, user: str) -> None:
        """Remove a path; see ``Kernel.unlink``."""
        await self._file(FileOperation.UNLINK, user, path)

    async def remove_tree(self, path: str, user: str, budget_s: float) -> Removal:
        """Remove a path and all below it; see ``FileKernel.remove_tree``."""
        budget_ms = int(min(budget_s, _FILE_TIMEOUT_S / 2) * 1000)
        reply, _ = await self._file(FileOperation.REMOVE, user, path, budget_ms)
        return Removal(removed=reply.size_bytes, complete=reply.status == 0)

    async def put_file(self, path: str, user: str, *, parents: bool) -> StreamUpload:
        """Begin a file; see ``FileKernel.put_file``."""
        flags = FileModeFlag.PARENTS if parents else 0
        _, (stream_fd, file_fd) = await self._file(FileOperation.PUT, user, path, flags)
        return StreamUpload(stream_fd, file_fd, path, user)

    async def unpack_tree(self, path: str, user: str, *, keep_set_id: bool) -> StreamTreeSink:
        """Begin to unpack a tree; see ``FileKernel.unpack_tree``."""
        flags = FileModeFlag.SET_ID if keep_set_id else 0
        _, (stream_fd,) = await self._file(FileOperation.UNPACK, user, path, flags)
        return StreamTreeSink(stream_fd, path, user)

    async def pack_tree(self, path: str, user: str) -> StreamTreeSource:
        """Begin to pack a tree; see ``FileKernel.pack_tree``."""
        _, (stream_fd,) = await self._file(FileOperation.PACK, user, path)
        return StreamTreeSource(stream_fd, path, user)

    async def copy_path(self, source: str, target: str, user: str) -> TreeCount:
        """Copy a path to a new one; see ``FileKernel.copy_path``."""
        check_path(target)
        _, (stream_fd,) = await self._file(FileOperation.COPY, user, source, target=target)
        with FileStream(stream_fd, source, user) as stream:
            result = await stream.last_word()
        return TreeCount(entries=result.entries, content_bytes=result.content_bytes)

    async def watch(self, path: str, user: str, *, recursive: bool) -> StreamWatcher:
        """Watch a directory; see ``FileKernel.watch``."""
        flags = FileModeFlag.RECURSIVE if recursive else 0
        _, (stream_fd,) = await self._file(FileOperation.WATCH, user, path, flags)
        return StreamWatcher(stream_fd, path, user)

    async def _file(
        self,
        operation: FileOperation,
        user: str,
        path: str,
        mode: int = 0,
        target: str | None = None,
    ) -> FileAnswer:
        check_path(path)
        paths = [path] if target is None else [path, target]
        try:
            async with asyncio.timeout(_FILE_TIMEOUT_S):
                reply, descriptors = await self._place(operation, user, paths, mode)
        except TimeoutError as error:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"{path!r}: the sandbox did not answer within {_FILE_TIMEOUT_S:g} s: look at what "
                "its processes do, or delete it",
                details={"operation": operation.name.lower(), "path": path},
            ) from error
        if reply.error:
            of_target = operation is FileOperation.RENAME and reply.error in _OF_A_MOVES_TARGET
            named = target if target is not None and of_target else path
            raise file_error(named, user, reply.step, reply.error)
        wanted = _DESCRIPTORS_OF.get(operation)
        if wanted is not None and len(descriptors) != wanted:
            for descriptor in descriptors:
                os.close(descriptor)
            raise out_of_descriptors()
        return reply, descriptors

    async def _place(
        self, operation: FileOperation, user: str, paths: list[str], mode: int
    ) -> FileAnswer:
        """Wait for a place among those at work, then ask; PID 1 frees one when it has reaped."""
        if self._places is None:
            self._places = asyncio.Semaphore(_AT_ONCE_MAX)
        async with self._places:
            while True:
                answer = await self.init.file(operation, user, paths, mode)
                reply = answer[0]
                if reply.error != errno.EBUSY or step_name(reply.step) != "file_fork":
                    return answer
                await asyncio.sleep(_PLACE_WAIT_S)


def _read_memory(descriptor: int) -> bytes:
    """Return what a memfd of the sandbox's holds and close it."""
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def _entries_of(data: bytes) -> list[DirectoryEntry]:
    entries = []
    at = 0
    while at + _LIST_ENTRY.size <= len(data):
        mode, user_id, group_id, name_bytes, size_bytes, modified_ns, target_bytes, _ = (
            _LIST_ENTRY.unpack_from(data, at)
        )
        at += _LIST_ENTRY.size
        name = os.fsdecode(data[at : at + name_bytes])
        target = os.fsdecode(data[at + name_bytes : at + name_bytes + target_bytes])
        at += name_bytes + target_bytes
        found = FileStat(
            kind=_kind_of(mode),
            size_bytes=size_bytes,
            mode=stat.S_IMODE(mode),
            user_id=user_id,
            group_id=group_id,
            modified_at=modified_ns / 1e9,
            link_target=target,
        )
        entries.append(DirectoryEntry(name=name, kind=found.kind, stat=found if mode else None))
    return entries


def _kind_of(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return FileKind.FILE
    if stat.S_ISDIR(mode):
        return FileKind.DIRECTORY
    return FileKind.LINK if stat.S_ISLNK(mode) else FileKind.OTHER
