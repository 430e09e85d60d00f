"""Files into and out of a sandbox, in pieces, verified."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import os
import stat as stat_bits
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from dsec.archive import TreeCounter, tar_pieces
from dsec.channel import ANSWER_PATIENCE_S, AWAY_S, Channel
from dsec.file_watch import FileWatch
from dsec.handle import OfSandbox
from dsec.received_tree import ReceivedTree, received_tree
from dsec.window import drained, in_window
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.files import (
    FILE_CHUNK_BYTES,
    CopyFile,
    DeleteFile,
    DirectoryListing,
    DirectoryMade,
    FileChunk,
    FileCopied,
    FileDeleted,
    FileInfo,
    FileKind,
    FileMoved,
    FileWritten,
    ListDirectory,
    MakeDirectory,
    MoveFile,
    ReadFile,
    ReadTree,
    StatFile,
    TreeChunk,
    TreeWritten,
    WriteFile,
    WriteTree,
)

_TORN_READS_MAX: Final = 3
#: A node gives a copy up before.
_COPY_TIMEOUT_S: Final = 660.0


class _Piece(NamedTuple):
    """A piece of an upload; the last one carries size and hash of all of it."""

    data: bytes
    offset: int
    final: bool = False
    size_bytes: int = 0
    sha256: str = ""


class Files(OfSandbox):
    """The files of one sandbox, seen as one of its users.

    Every path is absolute and means what it means inside the sandbox; symbolic links are followed
    there and nowhere else.
    """

    def __init__(
        self, channel: Channel, sandbox_id: ScopedId, *, user: str, timeout_s: float
    ) -> None:
        super().__init__(channel, sandbox_id)
        self._user = user
        self._timeout_s = timeout_s

    # --- Out of the sandbox ---------------------------------------------------------------------

    async def _read_piece(
        self, path: str, offset: int, download_id: str, *, final: bool = False
    ) -> FileChunk:
        return await self._channel.ask(
            self._subject("read_file"),
            ReadFile(
                path=path, offset=offset, user=self._user, download_id=download_id, final=final
            ),
            FileChunk,
            timeout_s=self._timeout_s,
            away_s=AWAY_S,
            repeatable=not final,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def _pieces(self, path: str) -> AsyncIterator[FileChunk]:
        """Yield the file's pieces in order, all of one opened file; then compare the hash of all.

        Raises ``conflict`` when it changed meanwhile.
        """
        download_id = new_id()
        digest = hashlib.sha256()
        first = last = await self._read_piece(path, 0, download_id)
        digest.update(first.data)
        yield first
        offset = len(first.data)
        if first.size_bytes > offset:

            async def jobs() -> AsyncIterator[Coroutine[Any, Any, FileChunk]]:
                for at in range(len(first.data), first.size_bytes, len(first.data)):
                    yield self._read_piece(path, at, download_id)

            async with aclosing(in_window(jobs())) as answers:
                async for piece in answers:
                    offset += len(piece.data)
                    digest.update(piece.data)
                    if piece.version != first.version or piece.size_bytes != first.size_bytes:
                        raise _changed(path)
                    yield piece
            last = await self._read_piece(path, offset, download_id, final=True)
        if offset != first.size_bytes or last.sha256 != digest.hexdigest():
            raise _changed(path)

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

    async def download_whole(self, path: str, local: Path) -> int:
        """Copy a file or a directory to ``local``; return the file's size, or how many files.

        Raises:
            DsecError: as :meth:`read`.
            OSError: when ``local`` cannot be written.
        """
        if (await self.stat(path)).kind is not FileKind.DIRECTORY:
            try:
                return await self.download(path, local)
            except DsecError as error:
                # A link to a directory is that directory, as one to a file is that file.
                if error.details.get("reason") != "is_directory":
                    raise
        return await self.download_tree(path, local)

    # --- Into the sandbox -----------------------------------------------------------------------

    async def write(self, path: str, data: bytes, *, mode: int | None) -> int:
        """Put ``data`` at ``path`` and return its size; readers see the old file or all of the new.

        Without ``mode`` a file that is there keeps its own, and a new one gets 0644.

        Raises:
            DsecError: ``invalid`` for an impossible path, ``denied``, ``exhausted`` when the
                sandbox's disk is full.
        """
        view = memoryview(data)

        async def pieces() -> AsyncGenerator[bytes, None]:
            for offset in range(0, len(view), FILE_CHUNK_BYTES):
                yield bytes(view[offset : offset + FILE_CHUNK_BYTES])

        if mode is None:
            return await self._write_pieces(path, pieces(), 0o644)
        return await self._write_pieces(path, pieces(), mode, change_mode=True)

    async def upload(self, local: Path, path: str) -> int:
        """Copy the regular file ``local`` to ``path`` and return its size.

        A new file gets its permission bits; one that is there keeps its own.

        Raises:
            DsecError: as :meth:`write`.
            OSError: when ``local`` cannot be read.
        """
        with local.open("rb") as file:
            mode = stat_bits.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
            return await self._write_pieces(path, _pieces_of(file), mode)

    async def _write_pieces(
        self,
        path: str,
        pieces: AsyncGenerator[bytes, None],
        mode: int,
        *,
        change_mode: bool = False,
    ) -> int:
        upload_id = new_id()

        def message(piece: _Piece) -> WriteFile:
            return WriteFile(
                path=path,
                upload_id=upload_id,
                data=piece.data,
                offset=piece.offset,
                final=piece.final,
                size_bytes=piece.size_bytes,
                sha256=piece.sha256,
                mode=mode,
                user=self._user,
                change_mode=change_mode,
            )

        return await self._upload("write_file", pieces, message, FileWritten)

    async def _upload(
        self,
        verb: str,
        pieces: AsyncGenerator[bytes, None],
        message: Callable[[_Piece], Message],
        reply: type[Message],
    ) -> int:
        """Send pieces, several at once, and after all others the last; return their size."""
        digest = hashlib.sha256()
        size_bytes = 0
        last = b""

        def send(piece: _Piece) -> Coroutine[Any, Any, Message]:
            return self._channel.ask(
                self._subject(verb),
                message(piece),
                reply,
                timeout_s=self._timeout_s,
                away_s=AWAY_S,
                # The same piece twice is the same; the last one also takes its place, once.
                repeatable=not piece.final,
            )

        async def jobs() -> AsyncIterator[Coroutine[Any, Any, Message]]:
            nonlocal last, size_bytes
            async with aclosing(pieces):
                async for data in pieces:
                    digest.update(data)
                    if size_bytes:
                        yield send(_Piece(last, size_bytes - len(last)))
                    last = data
                    size_bytes += len(data)

        await drained(in_window(jobs()))
        offset = size_bytes - len(last)
        await send(
            _Piece(last, offset, final=True, size_bytes=size_bytes, sha256=digest.hexdigest())
        )
        return size_bytes

    # --- Directories ----------------------------------------------------------------------------

    async def stat(self, path: str) -> FileInfo:
        """Return what ``path`` is; a symbolic link is not followed."""
        return await self._channel.ask(
            self._subject("stat_file"),
            StatFile(path=path, user=self._user),
            FileInfo,
            timeout_s=self._timeout_s,
            away_s=AWAY_S,
            repeatable=True,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def list(self, path: str) -> list[FileInfo]:
        """Return a directory's entries, however many, sorted by the bytes of their names."""
        entries: list[FileInfo] = []
        cursor = ""
        while True:
            page = await self._channel.ask(
                self._subject("list_directory"),
                ListDirectory(path=path, cursor=cursor, user=self._user),
                DirectoryListing,
                timeout_s=self._timeout_s,
                away_s=AWAY_S,
                repeatable=True,
                patience_s=ANSWER_PATIENCE_S,
            )
            entries += page.entries
            cursor = page.cursor
            if not page.more:
                return entries

    async def make_directory(self, path: str, *, mode: int, parents: bool = True) -> None:
        """Create a directory; with ``parents`` those above it, and an existing one is fine."""
        await self._channel.ask(
            self._subject("make_directory"),
            MakeDirectory(path=path, mode=mode, parents=parents, user=self._user),
            DirectoryMade,
            timeout_s=self._timeout_s,
            away_s=AWAY_S,
            repeatable=parents,
            patience_s=ANSWER_PATIENCE_S,
        )

    async def copy(self, path: str, target: str, *, replace: bool) -> int:
        """Copy a file or a directory; return how many files, directories and links there were."""
        reply = await self._channel.ask(
            self._subject("copy_file"),
            CopyFile(path=path, target=target, replace=replace, user=self._user),
            FileCopied,
            timeout_s=_COPY_TIMEOUT_S,
        )
        return reply.entries

    async def move(self, path: str, target: str, *, replace: bool) -> None:
        """Move a file or a directory."""
        await self._channel.ask(
            self._subject("move_file"),
            MoveFile(path=path, target=target, replace=replace, user=self._user),
            FileMoved,
            timeout_s=_COPY_TIMEOUT_S,
        )

    async def remove(self, path: str, *, recursive: bool) -> int:
        """Delete a path and return how many names are gone; asks until a tree is."""
        removed = 0
        while True:
            reply = await self._channel.ask(
                self._subject("delete_file"),
                DeleteFile(path=path, recursive=recursive, user=self._user),
                FileDeleted,
                timeout_s=self._timeout_s,
            )
            removed += reply.removed
            if reply.complete:
                return removed

    # --- Whole directories ----------------------------------------------------------------------

    async def upload_tree(self, local: Path, path: str) -> int:
        """Copy a directory as one tar stream; return how many regular files were copied.

        Modes, times, links and empty directories are kept; what is there already and not in
        ``local`` stays. What was unpacked before a failure stays, too.

        Raises:
            DsecError: ``invalid`` when ``local`` cannot be read or changes; else as :meth:`write`,
                with the path inside the sandbox.
        """
        upload_id = new_id()
        count = TreeCounter(plain=True)

        def message(piece: _Piece) -> WriteTree:
            return WriteTree(
                path=path,
                upload_id=upload_id,
                data=piece.data,
                offset=piece.offset,
                final=piece.final,
                size_bytes=piece.size_bytes,
                sha256=piece.sha256,
                user=self._user,
            )

        pieces = tar_pieces(local, FILE_CHUNK_BYTES, count)
        await self._upload("write_tree", pieces, message, TreeWritten)
        return count.files

    async def download_tree(self, path: str, local: Path) -> int:
        """Copy a sandbox's directory as one tar stream; return how many regular files were copied.

        Nothing at ``local`` changes before all of it is here and verified; then what is there
        already and not in the directory stays. Modes, times, links and empty directories are kept.
        Nothing is ever written through a link: the sandbox is not trusted.

        Raises:
            DsecError: as :meth:`read`; ``invalid`` for names that would lead out of ``local``.
            OSError: when ``local`` cannot be written.
        """
        for attempt in range(_TORN_READS_MAX):
            try:
                async with received_tree(local) as tree:
                    await self._receive_tree(path, tree)
                    return await tree.take_place()
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT or attempt + 1 == _TORN_READS_MAX:
                    raise
        raise _changed(path)

    async def _receive_tree(self, path: str, tree: ReceivedTree) -> None:
        download_id = new_id()
        digest = hashlib.sha256()
        size_bytes = 0

        def piece(offset: int, *, close: bool = False) -> Coroutine[Any, Any, TreeChunk]:
            return self._channel.ask(
                self._subject("read_tree"),
                ReadTree(
                    path=path, download_id=download_id, offset=offset, close=close, user=self._user
                ),
                TreeChunk,
                timeout_s=self._timeout_s,
                away_s=AWAY_S,
                repeatable=True,
            )

        async def jobs() -> AsyncIterator[Coroutine[Any, Any, TreeChunk]]:
            # The first one says whether there is anything at all; then eight are on their way.
            for offset in itertools.count(FILE_CHUNK_BYTES, FILE_CHUNK_BYTES):
                yield piece(offset)

        chunk = await piece(0)
        try:
            digest.update(chunk.data)
            size_bytes += len(chunk.data)
            await tree.put(chunk.data)
            if not chunk.end:
                async with aclosing(in_window(jobs())) as chunks:
                    async for chunk in chunks:
                        digest.update(chunk.data)
                        size_bytes += len(chunk.data)
                        await tree.put(chunk.data)
                        if chunk.end:
                            break
        finally:
            with suppress(DsecError):
                await piece(size_bytes, close=True)
        if chunk.size_bytes != size_bytes or chunk.sha256 != digest.hexdigest():
            raise _changed(path)

    def watch(self, path: str, *, recursive: bool) -> FileWatch:
        """Return a watch that begins when it is entered."""
        return FileWatch(
            self._channel, self._subject("watch_files"), path, recursive=recursive, user=self._user
        )


async def _pieces_of(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    while data := await asyncio.to_thread(file.read, FILE_CHUNK_BYTES):
        yield data


def _changed(path: str) -> DsecError:
    return DsecError(
        ErrorCode.CONFLICT,
        f"{path} changed while it was being read; read it again when it is quiet",
        retryable=True,
        details={"path": path},
    )
