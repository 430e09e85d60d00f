"""A directory, or named files, as a tar stream that is made while it is being sent."""

from __future__ import annotations

import asyncio
import io
import os
import stat as stat_bits
import tarfile
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dsec_common.errors import invalid

_QUEUE_PIECES: Final = 16
#: The largest owner id that a sandbox can show: it has this many ids.
_IDS: Final = 65_536


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A file of a stream that no directory holds.

    Attributes:
        path: where it goes, from the root.
        content: what is in it, or the file that it is read from.
        executable: whether it may be run.
    """

    path: str
    content: bytes | Path
    executable: bool = False

    def size_bytes(self) -> int:
        """Return how long the content is.

        Raises:
            DsecError: ``invalid`` when it cannot be read.
        """
        if isinstance(self.content, bytes):
            return len(self.content)
        try:
            return self.content.stat().st_size
        except OSError as error:
            raise invalid(f"cannot read {self.content}: {error.strerror}") from error


class _Abandoned(Exception):  # noqa: N818  no error: nobody reads the stream any more
    """Ends the writing thread."""


class _PieceWriter:
    """The file that ``tarfile`` writes to in its thread: whole pieces go to the loop's queue."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[bytes], piece_bytes: int
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._piece_bytes = piece_bytes
        self._buffer = bytearray()
        self.abandoned = False

    def write(self, data: bytes) -> int:
        self._buffer += data
        while len(self._buffer) >= self._piece_bytes:
            self._put(bytes(self._buffer[: self._piece_bytes]))
            del self._buffer[: self._piece_bytes]
        return len(data)

    def finish(self) -> None:
        if self._buffer:
            self._put(bytes(self._buffer))

    def _put(self, piece: bytes) -> None:
        if self.abandoned:
            raise _Abandoned
        # Waits while the queue is full: the disk is read no faster than the wire takes it.
        asyncio.run_coroutine_threadsafe(self._queue.put(piece), self._loop).result()


def tree_size_bytes(directory: Path) -> int:
    """Return the bytes of all regular files below ``directory``: what a progress bar counts to."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            status = (Path(root) / name).lstat()
            if stat_bits.S_ISREG(status.st_mode):
                total += status.st_size
    return total


class TreeCounter:
    """What a stream has carried so far; with ``plain`` it leaves out pipes and devices."""

    def __init__(self, *, plain: bool = False) -> None:
        self.plain = plain
        self.files = 0


def _own(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Give what nobody in a sandbox could own to root, and forget names: ids are what counts."""
    member.uid = member.uid if member.uid < _IDS else 0
    member.gid = member.gid if member.gid < _IDS else 0
    member.uname = member.gname = ""
    return member


def _write_tree(
    directory: str, archive: tarfile.TarFile, count: TreeCounter, prefix: str = ""
) -> None:
    # Sorted, so that the same tree is the same stream.
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name = f"{prefix}{entry.name}"
        if entry.is_file(follow_symlinks=False):
            count.files += 1
        elif count.plain and not (entry.is_dir(follow_symlinks=False) or entry.is_symlink()):
            continue  # a pipe or device means nothing elsewhere
        archive.add(entry.path, name, recursive=False, filter=_own)
        if entry.is_dir(follow_symlinks=False):
            _write_tree(entry.path, archive, count, f"{name}/")


def _write_archive(directory: Path, writer: _PieceWriter, count: TreeCounter) -> None:
    stream: Any = writer  # tarfile asks for a whole file object; a stream is only written to
    # Whole seconds in one block for each name, where a layer keeps fractions in three.
    form = tarfile.GNU_FORMAT if count.plain else tarfile.PAX_FORMAT
    with tarfile.open(fileobj=stream, mode="w|", format=form) as archive:
        _write_tree(str(directory), archive, count)
    writer.finish()


async def tar_pieces(
    directory: Path, piece_bytes: int, count: TreeCounter | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the tree below ``directory`` as one tar archive, in pieces of ``piece_bytes``.

    Modes, times, hard links, symbolic links and owners are kept; an owner id that no sandbox has
    (65,536 and above) becomes root. Sockets are left out. Nothing is written to disk.

    Raises:
        DsecError: ``invalid`` when it is no directory, or a file cannot be read or changes size.
    """
    if not directory.is_dir():  # noqa: ASYNC240  one stat before a whole tree is read
        raise invalid(f"{directory} is not a directory")
    counter = count or TreeCounter()
    async with aclosing(
        _pieces(lambda writer: _write_archive(directory, writer, counter), piece_bytes, directory)
    ) as pieces:
        async for piece in pieces:
            yield piece


async def file_pieces(files: Iterable[PlainFile], piece_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield files, and the directories that they are in, as one tar archive.

    All belong to root and are as old as Unix: equal files are an equal stream.

    Raises:
        DsecError: ``invalid`` when a file cannot be read or changes size.
    """
    some = tuple(files)
    async with aclosing(
        _pieces(lambda writer: _write_files(some, writer), piece_bytes, Path())
    ) as pieces:
        async for piece in pieces:
            yield piece


def _write_files(files: Iterable[PlainFile], writer: _PieceWriter) -> None:
    stream: Any = writer  # as above
    made: set[str] = set()
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            for above in reversed(PurePosixPath(file.path).parents[:-1]):
                if str(above) not in made:
                    made.add(str(above))
                    directory = tarfile.TarInfo(str(above))
                    directory.type, directory.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(directory)
            member = tarfile.TarInfo(file.path)
            member.mode = 0o755 if file.executable else 0o644
            if isinstance(file.content, bytes):
                member.size = len(file.content)
                archive.addfile(member, io.BytesIO(file.content))
                continue
            with file.content.open("rb") as source:
                member.size = os.fstat(source.fileno()).st_size
                archive.addfile(member, source)
    writer.finish()


async def _pieces(
    write: Callable[[_PieceWriter], None], piece_bytes: int, source: Path
) -> AsyncGenerator[bytes, None]:
    """Yield what ``write`` writes in a thread; ``source`` is named when that fails."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue(_QUEUE_PIECES)
    writer = _PieceWriter(loop, queue, piece_bytes)
    work = asyncio.ensure_future(asyncio.to_thread(write, writer))
    work.add_done_callback(lambda _: queue.put_nowait(b"") if not queue.full() else None)
    try:
        while not (work.done() and queue.empty()):
            if piece := await queue.get():
                yield piece
        try:
            await work
        except OSError as error:
            raise invalid(
                f"cannot read {error.filename or source}: {error.strerror or error}"
            ) from error
    finally:
        writer.abandoned = True
        while not work.done():
            # Frees a writer that waits for room, so that its thread ends.
            while not queue.empty():
                queue.get_nowait()
            await asyncio.sleep(0)
        if not work.cancelled():
            work.exception()
