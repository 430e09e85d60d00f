"""A directory that arrives as a tar stream from somebody who is not trusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat as stat_bits
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from dsec_common.errors import invalid

_QUEUE_PIECES: Final = 16
_COPY_BYTES: Final = 1 << 16
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _Abandoned(Exception):  # noqa: N818  no error: nothing more will come
    """Ends the reading thread."""


class _PieceReader:
    """The file that ``tarfile`` reads from in its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_PIECES)
        self._rest = memoryview(b"")
        self._over = False

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0 and not self._over:
            if not self._rest:
                piece = asyncio.run_coroutine_threadsafe(self.queue.get(), self._loop).result()
                if piece is None:
                    raise _Abandoned
                self._over = not piece
                self._rest = memoryview(piece)
            parts.append(self._rest[:size])
            size -= len(parts[-1])
            self._rest = self._rest[len(parts[-1]) :]
        return b"".join(parts)

    def drain(self) -> None:
        """Read to the end: what follows an archive's end mark is padding."""
        while not self._over:
            self.read(_COPY_BYTES)


class _Extractor:
    """Makes what an archive names below one new directory, through no link."""

    def __init__(self, root: Path) -> None:
        self._root_fd = os.open(root, _DIRECTORY)
        self._parent: tuple[str, ...] = ()
        self._parent_fd = os.dup(self._root_fd)
        self._directories: list[tuple[tuple[str, ...], int, float]] = []
        self.files = 0

    def close(self) -> None:
        os.close(self._parent_fd)
        os.close(self._root_fd)

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = tuple(part for part in member.name.split("/") if part not in {"", "."})
        if member.name.startswith("/") or ".." in parts or "\0" in member.name or not parts:
            raise invalid(f"the sandbox sent an impossible name {member.name[:200]!r}")
        if member.isdir():
            self._enter(parts)
            # Never setuid or setgid: what came from a sandbox gets no rights here.
            self._directories.append((parts, member.mode & 0o777, member.mtime))
            return
        parent_fd = self._enter(parts[:-1])
        if member.issym():
            os.symlink(member.linkname, parts[-1], dir_fd=parent_fd)
        elif member.isreg():
            self._write(archive, member, parent_fd, parts[-1])
            self.files += 1
        else:
            raise invalid(f"the sandbox sent {member.name[:200]!r}, which is no file")

    def _enter(self, parts: tuple[str, ...]) -> int:
        """Open a directory part by part, making what is missing; a link among them is refused."""
        if parts == self._parent:
            return self._parent_fd
        descriptor = os.dup(self._root_fd)
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=descriptor)
            try:
                below = os.open(part, _DIRECTORY, dir_fd=descriptor)
            except NotADirectoryError:
                raise invalid(
                    f"the sandbox sent {'/'.join(parts)[:200]!r} through what is no directory"
                ) from None
            finally:
                os.close(descriptor)
            descriptor = below
        os.close(self._parent_fd)
        self._parent, self._parent_fd = parts, descriptor
        return descriptor

    @staticmethod
    def _write(
        archive: tarfile.TarFile, member: tarfile.TarInfo, parent_fd: int, name: str
    ) -> None:
        content = archive.extractfile(member)
        assert content is not None  # noqa: S101  it is a regular file
        with os.fdopen(os.open(name, _CREATE, 0o600, dir_fd=parent_fd), "wb") as file:
            while data := content.read(_COPY_BYTES):
                if data.count(0) == len(data):
                    file.seek(len(data), os.SEEK_CUR)  # a hole
                else:
                    file.write(data)
            file.truncate(member.size)
            os.fchmod(file.fileno(), member.mode & 0o777)
            file.flush()
            os.utime(file.fileno(), (member.mtime, member.mtime))

    def finish(self) -> None:
        """Give directories their modes, the deepest first: a mode may close them."""
        for parts, mode, modified_at in sorted(self._directories, reverse=True):
            descriptor = self._enter(parts)
            os.fchmod(descriptor, mode)
            os.utime(descriptor, (modified_at, modified_at))
            # Through a closed one the next would not be found again.
            os.close(self._parent_fd)
            self._parent, self._parent_fd = (), os.dup(self._root_fd)


def _extract(reader: _PieceReader, extractor: _Extractor) -> None:
    stream: Any = reader  # tarfile asks for a whole file object; a stream is only read
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            seen: list[tarfile.TarInfo] = vars(archive)["members"]
            for member in archive:
                extractor.take(archive, member)
                # It keeps all it has seen, and there may be very many.
                seen.clear()
        reader.drain()
        extractor.finish()
    except tarfile.TarError as error:
        raise invalid(f"the sandbox sent no whole archive: {error}") from error
    except FileExistsError as error:
        raise invalid("the sandbox sent the same name twice") from error


def _merge(source: Path, target: Path) -> None:
    """Move what is in ``source`` to ``target``, replacing files and links."""
    for entry in sorted(source.iterdir()):
        here = target / entry.name
        if entry.is_symlink() or not entry.is_dir():
            entry.replace(here)
            continue
        if here.is_symlink():
            raise invalid(f"{here} is a symbolic link; nothing is written through it")
        mode = stat_bits.S_IMODE(entry.stat().st_mode)
        entry.chmod(mode | 0o700)  # a closed one could neither be moved nor emptied
        if here.is_dir():
            _merge(entry, here)
        else:
            entry.replace(here)
        here.chmod(mode)


class ReceivedTree:
    """A directory in the making, beside the place where it will be."""

    def __init__(self, local: Path, temporary: Path) -> None:
        self._local = local
        self._temporary = temporary
        self._reader = _PieceReader(asyncio.get_running_loop())
        self._extractor = _Extractor(temporary)
        self._work = asyncio.ensure_future(
            asyncio.to_thread(_extract, self._reader, self._extractor)
        )

    async def put(self, data: bytes) -> None:
        """Take a piece; returns when there is room for more.

        Raises:
            DsecError: ``invalid`` for what cannot be made here.
            OSError: when the disk refuses.
        """
        if not data:
            return
        putting = asyncio.ensure_future(self._reader.queue.put(data))
        await asyncio.wait({putting, self._work}, return_when=asyncio.FIRST_COMPLETED)
        if self._work.done():
            putting.cancel()
            self._work.result()

    async def take_place(self) -> int:
        """Return the number of files once all of it is at its place."""
        await self._reader.queue.put(b"")
        await self._work
        await asyncio.to_thread(self._place)
        return self._extractor.files

    def _place(self) -> None:
        if self._local.is_symlink():
            raise invalid(f"{self._local} is a symbolic link; nothing is written through it")
        self._temporary.chmod(0o755)
        if self._local.is_dir():
            _merge(self._temporary, self._local)
        else:
            self._temporary.rename(self._local)

    async def end(self) -> None:
        """End the thread and remove what is not at its place."""
        while not self._work.done():
            # Wakes a reader that waits for more, so that its thread ends.
            with contextlib.suppress(asyncio.QueueFull):
                self._reader.queue.put_nowait(None)
            await asyncio.wait({self._work}, timeout=0.05)
        if not self._work.cancelled():
            self._work.exception()
        self._extractor.close()
        await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)


@asynccontextmanager
async def received_tree(local: Path) -> AsyncIterator[ReceivedTree]:
    """Begin a directory that will be at ``local``, or be merged into what is there.

    Nothing at ``local`` changes before ``take_place``. An error of the disk is an ``OSError``, an
    archive that cannot be one a ``DsecError``.
    """
    local = local.absolute()  # noqa: ASYNC240  looks at nothing but the working directory
    local.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{local.name}.", dir=local.parent))
    tree = ReceivedTree(local, temporary)
    try:
        yield tree
    finally:
        await tree.end()
