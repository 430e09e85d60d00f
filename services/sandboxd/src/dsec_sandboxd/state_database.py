"""RocksDB that comes back after its disk was full.

RocksDB refuses every write after one that failed, for good, until it is opened again. This does
that, no more than once a second, so that a node whose disk has room again goes on by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar, cast

import structlog
from rocksdict import Options, Rdict

from dsec_common.errors import unavailable

_log: Final = structlog.get_logger(__name__)
_MIB: Final = 1024 * 1024
_REOPEN_PAUSE_S: Final = 1.0
T = TypeVar("T")


class StateDatabase:
    """Bytes by bytes. A write has survived a crash of this process when it returns.

    What RocksDB refuses raises its plain ``Exception``.
    """

    def __init__(self, directory: Path) -> None:
        """Open the database, made when missing.

        Raises:
            DsecError: ``unavailable`` when another process has it open or it is damaged.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._database: Rdict | None = None
        self._closed = False
        self._opened_at = 0.0
        try:
            self._open()
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(
                f"the StateDB in {directory} cannot be opened: {error}; see that no other sandboxd "
                "of this node runs"
            ) from error

    def __setitem__(self, key: bytes, value: bytes) -> None:
        """Keep a value in place of any earlier one."""

        def put(database: Rdict) -> None:
            database[key] = value

        self._write(put)

    def __delitem__(self, key: bytes) -> None:
        """Drop a value; none is fine."""

        def drop(database: Rdict) -> None:
            del database[key]

        self._write(drop)

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None."""
        return cast("bytes | None", self._living().get(key))

    def items(self, from_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values in order, from a key on."""
        return cast("Iterator[tuple[bytes, bytes]]", self._living().items(from_key=from_key))

    def close(self) -> None:
        """Let go of the database; later calls fail."""
        self._closed = True
        self._let_go()

    def _write(self, change: Callable[[Rdict], None]) -> None:
        database = self._living()
        try:
            change(database)
        except Exception as error:
            if self._closed or time.monotonic() < self._opened_at + _REOPEN_PAUSE_S:
                raise
            _log.error("state_database_reopened", error=str(error))
            self._let_go()
            change(self._living())

    def _living(self) -> Rdict:
        if self._database is None:
            self._open()
        assert self._database is not None  # noqa: S101  just opened
        return self._database

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError("the StateDB is closed")
        self._opened_at = time.monotonic()
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(8 * _MIB)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(64)
        self._database = Rdict(str(self._directory), options)

    def _let_go(self) -> None:
        database, self._database = self._database, None
        if database is None:
            return
        try:
            database.close()
        except Exception as error:  # noqa: BLE001  it tells of the writes that failed before
            _log.warning("state_database_closed", error=str(error))
