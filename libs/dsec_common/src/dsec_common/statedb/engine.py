"""RocksDB as the StateDB uses it: its options, its errors, and coming back after a full disk.

Calls hold Python's lock and are short: they belong on the event loop. What takes long frees the
lock and runs as a job in a thread (:meth:`Engine.job`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, cast

import structlog
from rocksdict import (
    BlockBasedOptions,
    Cache,
    ChecksumType,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
)

from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode, unavailable

_log: Final = structlog.get_logger(__name__)
_MIB: Final = 1024 * 1024
_CACHE_BYTES: Final = 256 * _MIB
_REOPEN_PAUSE_S: Final = 1.0
T = TypeVar("T")


def damaged(what: str, directory: Path | None = None) -> DsecError:
    """Return the error for content that RocksDB or we cannot read any more."""
    where = f" in {directory}" if directory else ""
    return DsecError(
        ErrorCode.INTERNAL,
        f"the StateDB{where} is damaged: {what}. Restore its last checkpoint, or have "
        "statedb.repair keep what can still be read",
        details={"damaged": True},
    )


def options(buffer_bytes: int) -> Options:
    """Return the options that the StateDB opens RocksDB with."""
    chosen = Options(raw_mode=True)
    chosen.create_if_missing(True)
    chosen.set_db_write_buffer_size(buffer_bytes)
    chosen.set_write_buffer_size(buffer_bytes // 4)
    chosen.set_max_write_buffer_number(4)
    chosen.set_max_total_wal_size(2 * buffer_bytes)
    chosen.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    chosen.set_paranoid_checks(True)
    chosen.set_compression_type(DBCompressionType.lz4())
    chosen.set_level_compaction_dynamic_level_bytes(True)
    chosen.set_max_open_files(512)
    chosen.set_keep_log_file_num(2)
    chosen.set_max_log_file_size(_MIB)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(min(buffer_bytes, _CACHE_BYTES)))
    table.set_checksum_type(ChecksumType.xxh3())
    chosen.set_block_based_table_factory(table)
    return chosen


class Engine:
    """One open RocksDB.

    Attributes:
        directory: where it is.
        openings: how often it was opened; what was read before an opening may not be so after it.
        database: RocksDB itself.
        cursor: an iterator that always sees the latest writes. Whoever uses it seeks first.
        is_closed: whether it was let go of.
    """

    def __init__(self, directory: Path, buffer_bytes: int, on_reopened: Callable[[], None]) -> None:
        """Open the database, made when missing.

        Args:
            directory: of the database alone.
            buffer_bytes: memory for what was written and is not in a file of its own yet.
            on_reopened: called when the database was opened again after a write that failed: what
                that write said may be there or not.

        Raises:
            DsecError: ``unavailable`` when another process has it open; ``internal`` when it is
                damaged.
        """
        # RocksDB knows what this process has open by its path: by another path of the same
        # directory it would open it again, and let go of the lock for all.
        self.directory = directory = directory.resolve()
        self.openings = 0
        self.is_closed = False
        self._buffer_bytes = buffer_bytes
        self._on_reopened = on_reopened
        self._jobs: set[asyncio.Task[Any]] = set()
        self.database: Any = None
        self.cursor: Any = None
        try:
            self._open()
        except Exception as error:
            raise cannot_open(directory, error) from error

    def put(self, key: bytes, value: bytes) -> None:
        """Write one key. It has survived a crash of this process when this returns.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses (a full disk).
        """
        try:
            self.database[key] = value
        except DsecError:
            raise
        except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception

            def again() -> None:
                self.database[key] = value

            self._once_more(again, error)

    def write(self, build: Callable[[], WriteBatch]) -> None:
        """Write a batch, all or nothing; as :meth:`put`.

        Args:
            build: makes the batch; twice when the database had to be opened again.
        """
        batch = build()
        try:
            self.database.write(batch)
        except DsecError:
            raise
        except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception
            self._once_more(lambda: self.database.write(build()), error)

    def get(self, key: bytes) -> bytes | None:
        """Return what is stored under exactly this key.

        Raises:
            DsecError: ``internal`` when it cannot be read.
        """
        try:
            return cast("bytes | None", self.database.get(key))
        except DsecError:
            raise
        except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception
            self.raise_unreadable(error)

    def iterate(self) -> Iterator:
        """Return an iterator over this moment's content; drop it before anything is awaited."""
        return Iterator(self.database.iter())

    def freshen(self) -> None:
        """Let the cursor go of files that are no longer in use."""
        self.cursor.seek(b"")

    def check(self, iterator: Iterator | None = None) -> None:
        """Tell the end of an iterator, or of the cursor, from damage.

        Raises:
            DsecError: ``internal`` when it ended because something cannot be read.
        """
        try:
            (iterator or self.cursor).status()
        except DsecError:
            raise
        except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception
            if iterator is not None:
                iterator.drop()
            self.raise_unreadable(error)

    def raise_unreadable(self, error: Exception) -> NoReturn:
        """Raise ``internal``, for what RocksDB said while something was read."""
        if isinstance(self.database, _NotOpen):
            raise self._refused(error) from error
        raise damaged(str(error), self.directory) from error

    async def job(self, work: Callable[[Rdict], T]) -> T:
        """Do what takes long in a thread; the database stays open for as long as that takes.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        task = asyncio.create_task(asyncio.to_thread(work, self.database))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.shield(task)
        except DsecError:
            raise
        except Exception as error:  # RocksDB raises bare Exception
            raise self._refused(error) from error

    async def close(self) -> None:
        """Let go of the database once its jobs are done; later calls raise ``unavailable``."""
        while self._jobs:
            await asyncio.wait(self._jobs)
        self.close_now()

    def close_now(self) -> None:
        """Let go of the database, which no job uses."""
        if self.is_closed:
            return
        self.is_closed = True
        database = self.database
        closed = unavailable(f"the StateDB in {self.directory} is closed")
        self.cursor = self.database = _NotOpen(closed)
        self._close_quietly(database)

    def _open(self) -> None:
        self._opened_at = time.monotonic()
        self.database = Rdict(str(self.directory), options(self._buffer_bytes))
        tailing = ReadOptions()
        tailing.set_tailing(True)
        self.cursor = self.database.iter(tailing)
        self.openings += 1

    def _once_more(self, action: Callable[[], None], error: Exception) -> None:
        """Open the database again and repeat a write that it refused, at most once a second.

        After one failed write RocksDB refuses all others until it is opened again. To repeat a
        write is safe: it has the same keys and versions.
        """
        if type(error) is not Exception:  # RocksDB raises no other: what was written was no bytes
            raise error
        if self._jobs or time.monotonic() < self._opened_at + _REOPEN_PAUSE_S:
            raise self._refused(error) from error
        _log.warning("statedb_reopened", directory=str(self.directory), error=str(error))
        try:
            database = self.database
            self.cursor = self.database = _NotOpen(error)  # a cursor keeps the lock
            self._close_quietly(database)
            del database
            self._open()
            self._on_reopened()
            action()
        except Exception as again:
            raise self._refused(again) from again

    @staticmethod
    def _close_quietly(database: Rdict) -> None:
        try:
            database.close()
        except Exception as error:  # noqa: BLE001  it tells of the writes that failed before
            _log.warning("statedb_closed", error=str(error))

    def _refused(self, error: Exception) -> DsecError:
        return unavailable(
            f"the StateDB in {self.directory} refuses: {error}. Check the disk's free space "
            "and health",
            **{MAY_HAVE_HAPPENED: True},
        )


class Iterator:
    """RocksDB's iterator, which keeps the database locked for as long as it lives.

    It can be let go of: an error's traceback would otherwise keep it. ``next`` only when ``valid``.
    """

    def __init__(self, iterator: RdictIter) -> None:
        self.seek: Callable[[bytes], None] = iterator.seek
        self.seek_to_first: Callable[[], None] = iterator.seek_to_first
        self.valid: Callable[[], bool] = iterator.valid
        self.next: Callable[[], None] = iterator.next
        self.key: Callable[[], bytes] = iterator.key
        self.value: Callable[[], bytes] = iterator.value
        self.status: Callable[[], None] = iterator.status

    def drop(self) -> None:
        """Let go of it; it is of no use any more."""
        vars(self).clear()


class _NotOpen:
    """In the place of a database that is closed, or could not be opened again."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error.with_traceback(None)  # or it would grow with every call

    def __setitem__(self, key: bytes, value: bytes) -> NoReturn:
        raise self._error.with_traceback(None)  # or it would grow with every call


def cannot_open(directory: Path, error: Exception) -> DsecError:
    """Return the error for what RocksDB said when it was opened."""
    if "lock" in str(error).lower():
        return unavailable(
            f"the StateDB in {directory} is open already, in this process or another: {error}"
        )
    if "Corruption" in str(error):
        return damaged(str(error), directory)
    return unavailable(f"the StateDB in {directory} cannot be opened: {error}")
