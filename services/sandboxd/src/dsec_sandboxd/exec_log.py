"""What a command printed, kept so that a daemon's death loses nothing of it.

Bytes go from a command's pipe into a file with ``splice``: one call takes them out of the pipe and
appends them, so between any two lines of this program each byte is in the pipe, which PID 1 keeps,
or in the file, which lies on a tmpfs that outlives the daemon. Beside the files of both streams is
an index of the order in which pieces came; a piece that a dying daemon took and did not index is
found by the file's size.

The files only grow, and what is too old is punched out of their beginning, so an offset in a stream
is an offset in its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from dsec_common.errors import from_os_error
from dsec_sandboxd.kernel.interface import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TAKE_BYTES: Final = 65_536
"""The most that is taken from a pipe at once, and so the size of the largest piece."""
EVENTS_KEPT: Final = 16_384
"""The most pieces of one command's output that are kept."""
_PAGE: Final = 4096
#: Punching costs some microseconds; it is done when so much more than wanted is there.
_SLACK_BYTES: Final = 256 * 1024
_SLACK_EVENTS: Final = 4096

_PUNCH_KEEP_SIZE: Final = 0x02 | 0x01
_RECORD: Final = struct.Struct("=QII")
_NUMBER_OF: Final = {Stream.STDOUT: 1, Stream.STDERR: 2}
_STREAM_OF: Final = {number: stream for stream, number in _NUMBER_OF.items()}

_libc: Final = ctypes.CDLL(None, use_errno=True)


def punch(descriptor: int, size: int) -> None:
    """Free the first ``size`` bytes of a file; they read as zeros, and its size stays.

    Raises:
        OSError: the file system cannot.
    """
    length = size - size % _PAGE
    if length <= 0:
        return
    result = _libc.fallocate(
        descriptor, _PUNCH_KEEP_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(length)
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def first_data(descriptor: int, size: int) -> int:
    """Return where the first data of a file begins, in steps of pages; its size when none is."""
    try:
        return min(os.lseek(descriptor, 0, os.SEEK_DATA), size)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size


class Nowhere:
    """Takes bytes out of pipes and drops them."""

    def __init__(self) -> None:
        self._descriptor = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)

    def take(self, descriptor: int) -> int:
        """See ``OutputSink``."""
        return os.splice(descriptor, self._descriptor, TAKE_BYTES, flags=os.SPLICE_F_NONBLOCK)

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StreamFile:
    """One stream's bytes in a file of a tmpfs.

    With ``keep_end`` its end is kept and its beginning dropped, else the other way round.

    Attributes:
        start: the offset of the first byte that is still there.
        size: the offset behind the last one.
        truncated: whether bytes were dropped.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        nowhere: Nowhere,
        make_room: Callable[[], bool],
        *,
        keep_end: bool,
        note: Callable[[int], None],
        has_room: Callable[[int], bool],
    ) -> None:
        """Open or make the file.

        ``note`` is told how much is kept; ``has_room`` says whether more may be.

        Raises:
            OSError: the tmpfs is full, or descriptors are used up.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._limit = limit_bytes
        self._nowhere = nowhere
        self._make_room = make_room
        self._keep_end = keep_end
        self._note = note
        self._has_room = has_room
        self.size = os.fstat(self._descriptor).st_size
        self.start = first_data(self._descriptor, self.size) if keep_end else 0
        self.truncated = self.start > 0
        self._note(self.size - self.start)

    def take(self, descriptor: int) -> int:
        """See ``OutputSink``; what is dropped counts as taken, too."""
        room = TAKE_BYTES if self._keep_end else min(TAKE_BYTES, self._limit - self.size)
        if room > 0 and not self._has_room(room):
            if self._keep_end:  # the sandbox's other commands keep so much: half of this one goes
                self._drop(self.start + (self.size - self.start) // 2)
            room = room if self._has_room(room) else 0
        moved = 0 if room <= 0 else self._splice(descriptor, room)
        if moved < 0 or room <= 0:
            dropped = self._nowhere.take(descriptor)
            self.truncated = self.truncated or dropped > 0
            return dropped
        self.size += moved
        self._note(self.size - self.start)
        # A piece whose beginning is dropped is no piece any more, so one more than wanted stays.
        wanted = self._limit + TAKE_BYTES
        if self._keep_end and self.size - self.start > wanted + _SLACK_BYTES:
            self._drop(self.size - wanted)
        return moved

    def _splice(self, descriptor: int, room: int) -> int:
        """Return how much was moved; -1 when the tmpfs has no room for anything."""
        for _ in range(2):
            try:
                return os.splice(
                    descriptor,
                    self._descriptor,
                    room,
                    offset_dst=self.size,
                    flags=os.SPLICE_F_NONBLOCK,
                )
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            if not self._make_room():
                break
        return -1

    def append(self, data: bytes) -> None:
        """Add bytes that are in memory, as far as they fit."""
        kept = data if self._keep_end else data[: max(self._limit - self.size, 0)]
        if len(kept) < len(data):
            self.truncated = True
        with contextlib.suppress(OSError):
            self.size += os.pwrite(self._descriptor, kept, self.size)
        self._note(self.size - self.start)

    def _drop(self, end: int) -> None:
        end -= end % _PAGE
        with contextlib.suppress(OSError):
            punch(self._descriptor, end)
            self.truncated = self.truncated or end > self.start
            self.start = max(self.start, end)
        self._note(self.size - self.start)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the stream."""
        return os.pread(self._descriptor, length, offset)

    def kept(self) -> bytes:
        """Return all that is kept."""
        return self.read(self.start, self.size - self.start)

    def close(self) -> None:
        """Close the file; it stays. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of output. Numbers of one command begin at 1 and leave none out."""

    seq: int
    stream: Stream
    data: bytes


class ExecLog:
    """Both streams of one command and the order of their pieces, in one directory.

    Attributes:
        last_seq: the number of the last piece; 0 before the first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limit_bytes: int,
        nowhere: Nowhere,
        make_room: Callable[[], bool],
        ordered: bool,
        note: Callable[[Stream, int], None] = lambda _stream, _kept: None,
        has_room: Callable[[int], bool] = lambda _size: True,
    ) -> None:
        """Open or make the log; one that a dead daemon left is mended.

        Args:
            directory: exists already.
            limit_bytes: kept of each stream.
            nowhere: takes what is not kept.
            make_room: frees memory of the tmpfs; False when it cannot.
            note: is told how many bytes of a stream are kept, whenever that changes.
            has_room: whether so many more may be kept.
            ordered: keep the end of each stream, and the order of pieces; without it the
                beginning of each.

        Raises:
            DsecError: ``exhausted`` when the tmpfs is full or descriptors are used up.
        """
        self.streams: dict[Stream, StreamFile] = {}
        self._index = -1
        self.last_seq = 0
        self._first_seq = 1
        try:
            for stream in Stream:
                self.streams[stream] = StreamFile(
                    directory / stream.value,
                    limit_bytes,
                    nowhere,
                    make_room,
                    keep_end=ordered,
                    note=partial(note, stream),
                    has_room=has_room,
                )
            if ordered:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._index = os.open(directory / "index", flags, 0o600)
                self._mend()
        except OSError as error:
            self.close()
            raise from_os_error("opening an exec's log", error) from error

    def _mend(self) -> None:
        """Find where the index begins and index what a dying daemon took and did not."""
        size = os.fstat(self._index).st_size
        size -= size % _RECORD.size
        self.last_seq = size // _RECORD.size
        self._first_seq = first_data(self._index, size) // _RECORD.size + 1
        indexed = dict.fromkeys(Stream, 0)
        for _, stream, offset, length in self._records(self._first_seq):
            indexed[stream] = max(indexed[stream], offset + length)
        for stream, file in self.streams.items():
            at = max(indexed[stream], file.start)
            while at < file.size:
                length = min(TAKE_BYTES, file.size - at)
                self._add(stream, at, length)
                at += length

    def take(self, stream: Stream, descriptor: int) -> int:
        """Take from a pipe what is there, as one piece; see ``OutputSink.take``."""
        file = self.streams[stream]
        before = file.size
        taken = file.take(descriptor)
        if file.size > before and self._index >= 0:
            self._add(stream, before, file.size - before)
        return taken

    def _add(self, stream: Stream, offset: int, length: int) -> None:
        record = _RECORD.pack(offset, length, _NUMBER_OF[stream])
        # When the tmpfs is full the piece has no number: it goes out with the next one's.
        with contextlib.suppress(OSError):
            if os.pwrite(self._index, record, self.last_seq * _RECORD.size) == _RECORD.size:
                self.last_seq += 1
        if self.last_seq - self._first_seq > EVENTS_KEPT + _SLACK_EVENTS:
            first = self.last_seq - EVENTS_KEPT
            first -= first % (_PAGE // _RECORD.size)
            with contextlib.suppress(OSError):
                punch(self._index, first * _RECORD.size)
                self._first_seq = first + 1

    def _records(self, seq: int) -> Iterator[tuple[int, Stream, int, int]]:
        while seq <= self.last_seq:
            block = os.pread(self._index, 256 * _RECORD.size, (seq - 1) * _RECORD.size)
            whole = block[: len(block) - len(block) % _RECORD.size]
            if not whole:
                return
            for offset, length, number in _RECORD.iter_unpack(whole):
                if seq > self.last_seq:
                    return
                if length and number in _STREAM_OF:
                    yield seq, _STREAM_OF[number], offset, length
                seq += 1

    def _is_kept(self, stream: Stream, offset: int) -> bool:
        return offset >= self.streams[stream].start

    def first_seq(self) -> int:
        """Return the number of the first piece that is still whole; behind the last if none is."""
        for seq, stream, offset, _ in self._records(self._first_seq):
            if self._is_kept(stream, offset):
                return seq
        return self.last_seq + 1

    def read(self, after: int, max_bytes: int) -> list[Piece]:
        """Return pieces after a number, at least one if there is one, and what fits beside it."""
        found: list[Piece] = []
        size = 0
        for seq, stream, offset, length in self._records(max(after + 1, self._first_seq)):
            if not self._is_kept(stream, offset):
                continue
            if found and size + length > max_bytes:
                break
            found.append(Piece(seq, stream, self.streams[stream].read(offset, length)))
            size += length
        return found

    @property
    def truncated(self) -> dict[Stream, bool]:
        """Whether bytes of a stream were dropped."""
        return {stream: file.truncated for stream, file in self.streams.items()}

    def close(self) -> None:
        """Close the files; they stay. Idempotent."""
        for file in self.streams.values():
            file.close()
        if self._index >= 0:
            os.close(self._index)
            self._index = -1
