"""Files of the recording kernel: the same contract, kept in memory."""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import tarfile
from abc import ABC, abstractmethod
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, Self

from dsec_common.errors import invalid, not_found
from dsec_sandboxd.kernel.file_ports import (
    DirectoryEntry,
    DirectoryPage,
    FileStat,
    Removal,
    TreeCount,
    WatchEvent,
)
from dsec_sandboxd.kernel.layer_copies import LayerCopy

if TYPE_CHECKING:
    from types import TracebackType


class MemorySandbox(Protocol):
    """What these operations need of a sandbox in memory."""

    files: dict[str, int]
    directories: set[str]


def empty_copy() -> LayerCopy:
    """Return a copy of nothing: a directory that is already deleted."""
    with TemporaryDirectory() as directory:
        mount_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return LayerCopy(mount_fd=mount_fd, size_bytes=0, inodes=1, hole_bytes=0, frozen_s=0.0)


class _Held:
    def close(self) -> None:
        """Let go of it. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Upload(_Held):
    def __init__(self, kernel: RecordingFiles, local: str, path: str) -> None:
        self._kernel = kernel
        self._local = local
        self._path = path
        self.descriptor = os.memfd_create("file", os.MFD_CLOEXEC)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    async def commit(self, permissions: int, *, change_mode: bool = False) -> None:
        """Give it its name."""
        sandbox = self._kernel.memory(self._local)
        await self._kernel.enter("commit", local=self._local, path=self._path)
        replaced = sandbox.files.get(self._path)
        if replaced is not None and not change_mode:
            permissions = os.fstat(replaced).st_mode & 0o777
        os.fchmod(self.descriptor, permissions)
        put(sandbox, self._path, os.dup(self.descriptor))


class _Sink(_Held):
    def __init__(self, kernel: RecordingFiles, local: str, path: str) -> None:
        self._kernel = kernel
        self._local = local
        self._sandbox = kernel.memory(local)
        self._path = path
        self._data = io.BytesIO()

    async def send(self, data: bytes) -> None:
        """Keep it."""
        await self._kernel.enter("send", local=self._local, path=self._path)
        self._data.write(data)

    async def finish(self) -> TreeCount:
        """Put all of it in its place."""
        await self._kernel.enter("finish", local=self._local, path=self._path)
        self._data.seek(0)
        try:
            archive = tarfile.open(fileobj=self._data)  # noqa: SIM115  closed by nobody: memory
            members = archive.getmembers()
        except tarfile.TarError as error:
            raise invalid(f"{self._path!r}: {error}", reason="invalid_archive") from error
        size = 0
        for member in members:
            path = posixpath.join(self._path, member.name)
            if member.isdir():
                make_all(self._sandbox, path)
                continue
            content = archive.extractfile(member)
            data = content.read() if content else b""
            make_all(self._sandbox, posixpath.dirname(path))
            descriptor = os.memfd_create("file", os.MFD_CLOEXEC)
            os.write(descriptor, data)
            os.fchmod(descriptor, member.mode & 0o777)
            put(self._sandbox, path, descriptor)
            size += len(data)
        return TreeCount(entries=len(members), content_bytes=size)


class _Source(_Held):
    def __init__(self, kernel: RecordingFiles, local: str, path: str, data: bytes) -> None:
        self._kernel = kernel
        self._local = local
        self._path = path
        self._data = io.BytesIO(data)

    async def receive(self) -> bytes:
        """Return the next piece."""
        await self._kernel.enter("receive", local=self._local, path=self._path)
        return self._data.read(65_536)


class RecordingFiles(ABC):
    """``FileKernel`` in memory."""

    @abstractmethod
    def memory(self, local: str) -> MemorySandbox:
        """Return a sandbox, or raise ``not_found``."""

    @abstractmethod
    async def enter(self, name: str, **arguments: Any) -> None:
        """Write a call down; wait or fail as the test says."""

    @abstractmethod
    async def stat(self, local: str, path: str, *, user: str = "0") -> FileStat:
        """Describe a path."""

    @abstractmethod
    async def list_directory(
        self, local: str, path: str, *, user: str = "0"
    ) -> list[DirectoryEntry]:
        """List names."""

    async def list_page(
        self, local: str, path: str, *, after: str = "", limit: int, user: str = "0"
    ) -> DirectoryPage:
        """Return up to ``limit`` names after ``after``."""
        found = await self.list_directory(local, path, user=user)
        entries = sorted((entry for entry in found if entry.name > after), key=lambda e: e.name)
        page = [
            DirectoryEntry(
                name=entry.name,
                kind=entry.kind,
                stat=await self.stat(local, posixpath.join(path, entry.name), user=user),
            )
            for entry in entries[:limit]
        ]
        return DirectoryPage(entries=page, more=len(entries) > limit)

    async def put_file(
        self, local: str, path: str, *, parents: bool = False, user: str = "0"
    ) -> _Upload:
        """Begin a file."""
        sandbox = self.memory(local)
        await self.enter("put_file", local=local, path=path, parents=parents, user=user)
        if path in sandbox.directories or path.endswith("/"):
            raise invalid(f"{path!r} is a directory", reason="is_directory")
        if parents:
            make_all(sandbox, posixpath.dirname(path))
        elif posixpath.dirname(path) not in sandbox.directories:
            raise not_found(f"{path!r}: No such file or directory", what="path")
        return _Upload(self, local, path)

    async def remove_tree(
        self, local: str, path: str, *, user: str = "0", budget_s: float = 1.0
    ) -> Removal:
        """Forget a path and all below it."""
        sandbox = self.memory(local)
        await self.enter("remove_tree", local=local, path=path, user=user, budget_s=budget_s)
        files = [name for name in sandbox.files if name == path or name.startswith(f"{path}/")]
        directories = {
            name for name in sandbox.directories if name == path or name.startswith(f"{path}/")
        }
        if not files and not directories:
            raise not_found(f"{path!r}: No such file or directory", what="path")
        for name in files:
            os.close(sandbox.files.pop(name))
        sandbox.directories.difference_update(directories)
        return Removal(removed=len(files) + len(directories), complete=True)

    async def copy_path(
        self, local: str, source: str, target: str, *, user: str = "0"
    ) -> TreeCount:
        """Copy one file kept in memory."""
        sandbox = self.memory(local)
        await self.enter("copy_path", local=local, source=source, target=target, user=user)
        if source not in sandbox.files:
            raise not_found(f"{source!r}: No such file or directory", what="path")
        sandbox.files[target] = os.dup(sandbox.files[source])
        return TreeCount(entries=1, content_bytes=os.fstat(sandbox.files[source]).st_size)

    async def unpack_tree(
        self, local: str, path: str, *, keep_set_id: bool = False, user: str = "0"
    ) -> _Sink:
        """Begin to unpack a tar stream."""
        sandbox = self.memory(local)
        await self.enter("unpack_tree", local=local, path=path, set_id=keep_set_id, user=user)
        make_all(sandbox, path)
        return _Sink(self, local, path)

    async def pack_tree(self, local: str, path: str, *, user: str = "0") -> _Source:
        """Begin to read a directory as a tar stream."""
        sandbox = self.memory(local)
        await self.enter("pack_tree", local=local, path=path, user=user)
        if path not in sandbox.directories:
            raise not_found(f"{path!r}: No such file or directory", what="path")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for name, descriptor in sorted(sandbox.files.items()):
                if name.startswith(f"{path.rstrip('/')}/"):
                    member = tarfile.TarInfo(posixpath.relpath(name, path))
                    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return _Source(self, local, path, data.getvalue())

    async def watch(
        self, local: str, path: str, *, recursive: bool = False, user: str = "0"
    ) -> _Watcher:
        """Begin a watch that never has news: nothing changes here by itself."""
        self.memory(local)
        await self.enter("watch", local=local, path=path, recursive=recursive, user=user)
        return _Watcher(self, local, path)


class _Watcher(_Held):
    def __init__(self, kernel: RecordingFiles, local: str, path: str) -> None:
        self._kernel = kernel
        self._local = local
        self._path = path

    async def next(self) -> WatchEvent | None:
        """Wait for what never comes."""
        await self._kernel.enter("next_change", local=self._local, path=self._path)
        await asyncio.Event().wait()
        return None


def put(sandbox: MemorySandbox, path: str, descriptor: int) -> None:
    """Keep a file in the place of what was there."""
    replaced = sandbox.files.pop(path, None)
    if replaced is not None:
        os.close(replaced)
    sandbox.files[path] = descriptor


def make_all(sandbox: MemorySandbox, path: str) -> None:
    """Remember a directory and those above it."""
    while path not in sandbox.directories:
        sandbox.directories.add(path)
        path = posixpath.dirname(path)
