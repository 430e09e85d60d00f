"""The spool: where records wait until Kafka has acknowledged them.

One RocksDB per process, in a directory of its own that the process holds an exclusive lock on. A
directory that nobody locks was left by a process that ended; whoever finds it may adopt it. A frame
is written with one put and not synced: it survives the process's death, not the machine's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import structlog
from rocksdict import DBCompressionType, Options, Rdict, WriteBatch

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_common.log_frame import CorruptFrameError, LogRecord, decode_frame, encode_frame

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = structlog.get_logger(__name__)

_LOCK: Final = "lock"
_DATABASE: Final = "frames"
_MIB: Final = 1024 * 1024
FRAME_OVERHEAD_BYTES: Final = 512
"""What one frame counts beside its bytes, so that a spool of tiny frames has a bound too."""


class Spool:
    """Frames on disk in the order they were put; made by :meth:`create` or :meth:`adopt`.

    Frames are numbered 1, 2, 3, …; which ones wait is kept in memory, so that no read ever scans
    over deleted keys. Every call is synchronous and short, and belongs to one event loop.

    Attributes:
        directory: where it lives.
        pending_bytes: size of the frames that wait, with :data:`FRAME_OVERHEAD_BYTES` for each.
        corrupt_frames: frames that could not be read and were dropped.
    """

    def __init__(self, directory: Path, lock_descriptor: int) -> None:
        self.directory = directory
        self.corrupt_frames = 0
        self.pending_bytes = 0
        self._lock_descriptor = lock_descriptor
        self._sizes: dict[int, int] = {}
        self._database = _open_database(directory / _DATABASE)
        for key, frame in self._database.items():
            if isinstance(key, bytes):
                self._note(int.from_bytes(key, "big"), len(frame))
        self._first = min(self._sizes, default=1)
        self._next = max(self._sizes, default=0) + 1
        self._shed_through = 0

    @classmethod
    def create(cls, root: Path, name: str) -> Self:
        """Open a spool below ``root`` for this process.

        The oldest directory that an ended process of the same name left is taken over, so its
        records go out before new ones of the same sandboxes; otherwise a fresh one is made.

        Raises:
            DsecError: when the directory cannot be made, locked or opened.
        """
        directory = root / f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in left_behind(root, name):
                spool = cls.adopt(left)
                if spool is not None:
                    _log.info("log_spool_taken_over", directory=str(left))
                    return spool
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise from_os_error("making the log's spool", error, str(directory)) from error
        spool = cls.adopt(directory)
        if spool is None:
            raise DsecError(
                ErrorCode.CONFLICT,
                f"another process took the log's new spool {directory} at once; start again",
            )
        return spool

    @classmethod
    def adopt(cls, directory: Path) -> Self | None:
        """Open a directory that nobody holds; None when somebody does, or removed it.

        Raises:
            DsecError: ``unavailable`` when its database cannot be opened, repaired or set aside.
        """
        try:
            descriptor = _try_lock(directory)
        except FileNotFoundError:
            return None
        if descriptor is None:
            return None
        try:
            return cls(directory, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def pending_frames(self) -> int:
        """Frames that wait."""
        return len(self._sizes)

    @property
    def first_number(self) -> int:
        """The oldest waiting frame's number; one above :attr:`last_number` when none waits."""
        while self._first < self._next and self._first not in self._sizes:
            self._first += 1
        return self._first

    @property
    def last_number(self) -> int:
        """The newest frame's number; 0 when there never was one."""
        return self._next - 1

    def put(self, records: list[LogRecord]) -> int:
        """Keep the records as one frame and return its size in bytes.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses, for instance on a full disk.
        """
        frame = encode_frame(records)
        self._write(self._next, frame)
        self._note(self._next, len(frame))
        self._next += 1
        return len(frame)

    def peek(self, max_frames: int, max_bytes: int) -> list[tuple[int, list[LogRecord]]]:
        """Return the oldest frames with their numbers, at least one when any can be read."""
        frames: list[tuple[int, list[LogRecord]]] = []
        total = 0
        number = self.first_number
        while number < self._next and len(frames) < max_frames and total < max_bytes:
            total += self._sizes.get(number, 0)
            records = self.read(number)
            if records is not None:
                frames.append((number, records))
            number += 1
        return frames

    def read(self, number: int) -> list[LogRecord] | None:
        """Return a waiting frame's records; None when there is no such frame.

        A frame that cannot be read is logged, counted and dropped: it must not block the others.
        """
        if number not in self._sizes:
            return None
        try:
            return decode_frame(self._database[_key(number)] or b"")
        except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception for damaged blocks
            self.corrupt_frames += 1
            _log.error(
                "log_frame_corrupt",
                directory=str(self.directory),
                frame=number,
                size_bytes=self._sizes[number],
                reason=str(error) if isinstance(error, CorruptFrameError) else repr(error),
            )
            self.delete([number])
            return None

    def delete(self, numbers: Iterable[int]) -> None:
        """Forget frames, in one write.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        batch = WriteBatch(raw_mode=True)
        known = [number for number in numbers if number in self._sizes]
        for number in known:
            batch.delete(_key(number))
        try:
            self._database.write(batch)
        except Exception as error:
            raise self._refused("deleting from", error) from error
        for number in known:
            self.pending_bytes -= self._sizes.pop(number) + FRAME_OVERHEAD_BYTES

    def replace(self, number: int, records: list[LogRecord]) -> None:
        """Put other records in a waiting frame's place (fewer, or without their detail).

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        if not records:
            self.delete([number])
            return
        frame = encode_frame(records)
        self._write(number, frame)
        self.pending_bytes += len(frame) - self._sizes[number]
        self._sizes[number] = len(frame)

    def next_to_shed(self, after: int) -> int | None:
        """Return the oldest frame above ``after`` whose detail was not yet shed, and mark it."""
        number = max(self.first_number, after + 1, self._shed_through + 1)
        while number < self._next:
            self._shed_through = number
            if number in self._sizes:
                return number
            number += 1
        return None

    def next_waiting(self, after: int) -> int | None:
        """Return the oldest frame above ``after``; None when none waits."""
        number = max(self.first_number, after + 1)
        while number < self._next:
            if number in self._sizes:
                return number
            number += 1
        return None

    def move_from(self, other: Spool, max_bytes: int) -> bool:
        """Take over about ``max_bytes`` of an adopted spool's frames; True when none is left.

        A crash in between leaves one frame in both: readers drop its records the second time.
        """
        moved = 0
        while other.pending_frames and moved < max_bytes:
            number = other.first_number
            records = other.read(number)
            if records is not None:
                moved += self.put(records)
                other.delete([number])
        return not other.pending_frames

    def close(self) -> None:
        """Close the database and free the lock. An empty spool's directory is removed."""
        self._database.close()
        try:
            if not self._sizes and not any(self.directory.glob("*.damaged-*")):
                shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            os.close(self._lock_descriptor)

    def _write(self, number: int, frame: bytes) -> None:
        try:
            self._database[_key(number)] = frame
        except Exception as error:
            raise self._refused("writing to", error) from error

    def _note(self, number: int, size_bytes: int) -> None:
        self._sizes[number] = size_bytes
        self.pending_bytes += size_bytes + FRAME_OVERHEAD_BYTES

    def _refused(self, what: str, error: Exception) -> DsecError:
        return DsecError(
            ErrorCode.UNAVAILABLE,
            f"{what} the log's spool {self.directory} failed: {error}. "
            "Check the disk's free space and health.",
            details={"path": str(self.directory)},
        )


def left_behind(root: Path, name: str | None = None) -> list[Path]:
    """Return spool directories below ``root``, oldest first, of one process name or of all."""
    directories: list[tuple[float, Path]] = []
    for directory in root.iterdir() if root.is_dir() else ():
        if name is not None and directory.name.rsplit("-", 2)[0] != name:
            continue
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            directories.append(((directory / _LOCK).stat().st_mtime, directory))
    return [directory for _, directory in sorted(directories)]


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _try_lock(directory: Path) -> int | None:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)  # its last owner removed it while we opened it
    return None


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())  # frames live for milliseconds
    options.set_write_buffer_size(16 * _MIB)
    options.set_max_total_wal_size(64 * _MIB)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(_MIB)
    return options


def _open_database(path: Path) -> Rdict:
    """Open RocksDB; a damaged one is repaired, and if that fails set aside, never deleted."""
    try:
        return Rdict(str(path), options=_options())
    except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception
        _log.error("log_spool_damaged", path=str(path), reason=str(error))
    try:
        Rdict.repair(str(path), options=_options())
        return Rdict(str(path), options=_options())
    except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        _log.error("log_spool_set_aside", path=str(path), aside=str(aside), reason=str(error))
    try:
        path.rename(aside)
        return Rdict(str(path), options=_options())
    except Exception as error:
        raise DsecError(
            ErrorCode.UNAVAILABLE,
            f"the log's spool {path} cannot be opened: {error}. "
            "Check the disk's free space and health.",
        ) from error
