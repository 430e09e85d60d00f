"""What an agent remembers: values by key, durable at once, with checkpoints to go back to."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found

_SCHEMA = """
CREATE TABLE IF NOT EXISTS now (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints (number INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS kept (
    name TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (name, key)
) WITHOUT ROWID;
"""


class State:
    """Values by key, in a file: what :meth:`put` has returned from survives a kill.

    A file in a sandbox is part of the sandbox: its snapshots, forks and rollbacks have it too. Any
    thread may use it, and one process at a time. Values are JSON.

    Errors of every method, as :class:`DsecError`: ``exhausted`` when the disk is full, ``internal``
    when the file is no state.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Open the file, or keep all in memory without one."""
        self._lock = threading.Lock()
        self._path = path
        with self._told():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                str(path) if path else ":memory:", isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        with self._told():
            row = self._database.execute("SELECT value FROM now WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Remember a value; it is durable when this returns.

        Raises:
            DsecError: ``invalid`` for what is no JSON.
        """
        self.put_all({key: value})

    def put_all(self, values: dict[str, Any]) -> None:
        """Remember several values, all or none of them; see :meth:`put`."""
        try:
            rows = [(key, json.dumps(value, allow_nan=False)) for key, value in values.items()]
        except (TypeError, ValueError) as error:
            raise invalid(f"a state's values are JSON: {error}") from None
        with self._changing() as database:
            database.executemany("INSERT OR REPLACE INTO now VALUES (?, ?)", rows)

    def delete(self, key: str) -> None:
        """Forget a key, if it is there."""
        with self._changing() as database:
            database.execute("DELETE FROM now WHERE key = ?", (key,))

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""
        with self._told():
            rows = self._database.execute("SELECT key FROM now ORDER BY key").fetchall()
        return [key for (key,) in rows if key.startswith(prefix)]

    def checkpoint(self, name: str) -> None:
        """Keep all values as they are under ``name``, in place of what it had before."""
        with self._changing() as database:
            database.execute("DELETE FROM checkpoints WHERE name = ?", (name,))
            database.execute("DELETE FROM kept WHERE name = ?", (name,))
            database.execute("INSERT INTO checkpoints (name) VALUES (?)", (name,))
            database.execute("INSERT INTO kept SELECT ?, key, value FROM now", (name,))

    def restore(self, name: str) -> None:
        """Make all values what they were at a checkpoint; what was put since is gone.

        Raises:
            DsecError: ``not_found`` when there is no such checkpoint.
        """
        if name not in self.checkpoints():
            raise not_found(f"there is no checkpoint {name!r}", checkpoint=name)
        with self._changing() as database:
            database.execute("DELETE FROM now")
            database.execute("INSERT INTO now SELECT key, value FROM kept WHERE name = ?", (name,))

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, the oldest first."""
        with self._told():
            rows = self._database.execute("SELECT name FROM checkpoints ORDER BY number").fetchall()
        return [name for (name,) in rows]

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._told():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
                raise DsecError(
                    ErrorCode.EXHAUSTED if full else ErrorCode.INTERNAL,
                    f"the agent's state in {self._path or 'memory'} failed: {error}",
                ) from error
