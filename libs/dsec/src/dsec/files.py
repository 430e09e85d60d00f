"""Files into and out of a sandbox, in pieces, verified."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat as stat_bits
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

from dsec.channel import Channel
from dsec.window import drained, in_window
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import new_id
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

_TORN_READS_MAX: Final = 3


class Files:
    """The files of one sandbox, seen as one of its users.

    Every path is absolute and means what it means inside the sandbox; symbolic links are followed
    there and nowhere else.
    """

    def __init__(
        self, channel: Channel, sandbox_id: ScopedId, *, user: str, timeout_s: float
    ) -> None:
        self._channel = channel
        self._sandbox_id = sandbox_id
        self._user = user
        self._timeout_s = timeout_s

    def _subject(self, verb: str) -> str:
        return subjects.sandbox(self._channel.project, self._sandbox_id, verb)

    # --- Out of the sandbox ---------------------------------------------------------------------

    async def _read_piece(self, path: str, offset: int) -> FileChunk:
        return await self._channel.ask(
            self._subject("read_file"),
            ReadFile(path=path, offset=offset, user=self._user),
            FileChunk,
            timeout_s=self._timeout_s,
            repeatable=True,
        )

    async def _pieces(self, path: str) -> AsyncIterator[FileChunk]:
        """Yield the file's pieces in order; raise ``conflict`` when it changes meanwhile."""
        first = piece = await self._read_piece(path, 0)
        yield first
        if first.size_bytes > len(first.data):

            async def jobs() -> AsyncIterator[Coroutine[Any, Any, FileChunk]]:
                for offset in range(len(first.data), first.size_bytes, len(first.data)):
                    yield self._read_piece(path, offset)

            offset = len(first.data)
            async with aclosing(in_window(jobs())) as answers:
                async for piece in answers:
                    offset += len(piece.data)
                    if piece.version != first.version or piece.size_bytes != first.size_bytes:
                        raise _changed(path)
                    yield piece
            if offset != first.size_bytes:
                raise _changed(path)
            return
        # Files such as those of /proc have no size: read on until the end.
        offset = len(first.data)
        while not piece.end_of_file:
            piece = await self._read_piece(path, offset)
            offset += len(piece.data)
            yield piece

    async def read(self, path: str) -> bytes:
        """Return a regular file's content, all of one version.

        Raises:
            DsecError: ``not_found``, ``invalid`` for what is no regular file, ``denied``;
                ``conflict`` when it kept changing while it was read.
        """
        for _ in range(_TORN_READS_MAX):
            try:
                return b"".join([piece.data async for piece in self._pieces(path)])
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
        raise _changed(path)

    async def download(self, path: str, local: Path) -> int:
        """Copy a regular file to ``local`` and return its size in bytes.

        ``local`` appears, with the file's permission bits, when all of it is there and verified;
        until then, and after a failure, it is what it was.

        Raises:
            DsecError: as :meth:`read`.
            OSError: when ``local`` cannot be written.
        """
        if not local.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(local.parent))
        temporary = local.with_name(f".{local.name}.{new_id()}")
        try:
            for attempt in range(_TORN_READS_MAX):
                try:
                    with temporary.open("wb") as file:
                        mode = 0o644
                        async for piece in self._pieces(path):
                            await asyncio.to_thread(file.write, piece.data)
                            mode = piece.mode
                        size_bytes = file.tell()
                    # Never setuid or setgid: what came from a sandbox gets no rights here.
                    temporary.chmod(stat_bits.S_IMODE(mode) & 0o777)
                    temporary.replace(local)
                except DsecError as error:
                    if error.code is not ErrorCode.CONFLICT or attempt + 1 == _TORN_READS_MAX:
                        raise
                else:
                    return size_bytes
            raise _changed(path)
        finally:
            temporary.unlink(missing_ok=True)

    # --- Into the sandbox -----------------------------------------------------------------------

    async def write(self, path: str, data: bytes, *, mode: int) -> int:
        """Put ``data`` at ``path`` and return its size; readers see the old file or all of the new.

        Raises:
            DsecError: ``invalid`` for an impossible path, ``denied``, ``exhausted`` when the
                sandbox's disk is full.
        """
        view = memoryview(data)

        async def pieces() -> AsyncIterator[bytes]:
            for offset in range(0, len(view), FILE_CHUNK_BYTES):
                yield bytes(view[offset : offset + FILE_CHUNK_BYTES])

        return await self._write_pieces(path, pieces(), mode)

    async def upload(self, local: Path, path: str) -> int:
        """Copy the regular file ``local`` to ``path``, with its permission bits; return its size.

        Raises:
            DsecError: as :meth:`write`.
            OSError: when ``local`` cannot be read.
        """
        with local.open("rb") as file:
            mode = stat_bits.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
            return await self._write_pieces(path, _pieces_of(file), mode)

    async def _write_pieces(self, path: str, pieces: AsyncIterator[bytes], mode: int) -> int:
        upload_id = new_id()
        digest = hashlib.sha256()
        size_bytes = 0
        last = b""

        def piece(data: bytes, offset: int, *, final: bool) -> Coroutine[Any, Any, FileWritten]:
            return self._channel.ask(
                self._subject("write_file"),
                WriteFile(
                    path=path,
                    upload_id=upload_id,
                    data=data,
                    offset=offset,
                    final=final,
                    size_bytes=size_bytes if final else 0,
                    sha256=digest.hexdigest() if final else "",
                    mode=mode,
                    user=self._user,
                ),
                FileWritten,
                timeout_s=self._timeout_s,
                # The same piece twice is the same; the last one also renames, once.
                repeatable=not final,
            )

        async def jobs() -> AsyncIterator[Coroutine[Any, Any, FileWritten]]:
            nonlocal last, size_bytes
            async for data in pieces:
                digest.update(data)
                if size_bytes:
                    yield piece(last, size_bytes - len(last), final=False)
                last = data
                size_bytes += len(data)

        await drained(in_window(jobs()))
        await piece(last, size_bytes - len(last), final=True)
        return size_bytes

    # --- Directories ----------------------------------------------------------------------------

    async def stat(self, path: str) -> FileInfo:
        """Return what ``path`` is; a symbolic link is not followed."""
        return await self._channel.ask(
            self._subject("stat_file"),
            StatFile(path=path, user=self._user),
            FileInfo,
            timeout_s=self._timeout_s,
            repeatable=True,
        )

    async def list(self, path: str) -> list[FileInfo]:
        """Return a directory's entries, sorted by name."""
        entries: list[FileInfo] = []
        after = ""
        while True:
            page = await self._channel.ask(
                self._subject("list_directory"),
                ListDirectory(path=path, after=after, user=self._user),
                DirectoryListing,
                timeout_s=self._timeout_s,
                repeatable=True,
            )
            entries += page.entries
            if not page.more or not page.entries:
                return entries
            after = PurePosixPath(page.entries[-1].path).name

    async def make_directory(self, path: str, *, mode: int) -> None:
        """Create a directory and its parents; an existing one is fine."""
        await self._channel.ask(
            self._subject("make_directory"),
            MakeDirectory(path=path, mode=mode, user=self._user),
            DirectoryMade,
            timeout_s=self._timeout_s,
            repeatable=True,
        )

    async def upload_tree(self, local: Path, path: str) -> int:
        """Copy a directory with the regular files in it; return how many files were copied.

        Symbolic links and special files are left out: they mean something else over there.
        """
        await self.make_directory(path, mode=0o755)
        copied = 0
        for entry in sorted(local.iterdir()):  # noqa: ASYNC240  small beside the requests that follow
            target = f"{path.rstrip('/')}/{entry.name}"
            mode = entry.lstat().st_mode
            if stat_bits.S_ISDIR(mode):
                copied += await self.upload_tree(entry, target)
            elif stat_bits.S_ISREG(mode):
                await self.upload(entry, target)
                copied += 1
        return copied

    async def download_tree(self, path: str, local: Path) -> int:
        """Copy a sandbox's directory with the regular files in it; return how many were copied.

        Symbolic links and special files are left out. A name that would lead out of ``local`` is
        refused: the sandbox is not trusted.
        """
        local.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  as above
        copied = 0
        for entry in await self.list(path):
            name = PurePosixPath(entry.path).name
            if name in {"", ".", ".."} or "/" in name or "\0" in name:
                raise invalid(f"the sandbox lists an impossible name {name!r} in {path}")
            source, target = f"{path.rstrip('/')}/{name}", local / name
            if target.is_symlink():
                raise invalid(f"{target} is a symbolic link; nothing is written through it")
            if entry.kind is FileKind.DIRECTORY:
                copied += await self.download_tree(source, target)
            elif entry.kind is FileKind.FILE:
                await self.download(source, target)
                copied += 1
        return copied


async def _pieces_of(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, FILE_CHUNK_BYTES):
        yield data


def _changed(path: str) -> DsecError:
    return DsecError(
        ErrorCode.CONFLICT,
        f"{path} changed while it was being read; read it again when it is quiet",
        retryable=True,
        details={"path": path},
    )
