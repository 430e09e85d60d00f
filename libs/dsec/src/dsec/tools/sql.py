"""``sql``: SQLite databases in files."""

from __future__ import annotations

import contextlib
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found, unavailable

ROWS_MAX: Final = 10_000
_TIMEOUT_S: Final = 30.0
_STEPS_BETWEEN_LOOKS: Final = 10_000

Parameters = Sequence[Any] | Mapping[str, Any]


class Sql(Tool):
    """``sql``. ``query`` needs ``read_file``, ``execute`` needs ``write_file``.

    A statement sees its own database and no other: ``ATTACH`` is refused.

    Errors of every call, as :class:`DsecError`: ``invalid`` for what SQLite refuses, ``not_found``
    without the database, ``unavailable`` while others write to it for too long,
    ``command_timeout`` for a statement that runs for too long, and those of the contract.
    """

    @tool_call("read_file")
    def query(
        self,
        database: str | Path,
        statement: str,
        parameters: Parameters = (),
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """Return the rows of a statement, each by its columns' names; it changes nothing.

        Raises:
            DsecError: as the class says; ``exhausted`` for more than 10,000 rows.
        """
        with _connected(database, "ro", timeout_s) as connection:
            cursor = connection.execute(statement, parameters)
            rows = cursor.fetchmany(ROWS_MAX + 1)
            if len(rows) > ROWS_MAX:
                raise DsecError(
                    ErrorCode.EXHAUSTED,
                    f"there are more than {ROWS_MAX} rows; say LIMIT",
                    retryable=False,
                )
            names = [column[0] for column in cursor.description or ()]
            self.note(rows=str(len(rows)))
            return [dict(zip(names, row, strict=True)) for row in rows]

    @tool_call("write_file")
    def execute(
        self,
        database: str | Path,
        statement: str,
        parameters: Parameters = (),
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> int:
        """Carry out one statement, wholly or not at all, and return how many rows it changed.

        A database that is not there is made.
        """
        with _connected(database, "rwc", timeout_s) as connection, connection:
            count = connection.execute(statement, parameters).rowcount
        self.note(rows=str(max(count, 0)))
        return max(count, 0)


@contextlib.contextmanager
def _connected(database: str | Path, mode: str, timeout_s: float) -> Iterator[sqlite3.Connection]:
    path = Path(database).absolute()
    if mode == "ro" and not path.exists():
        raise not_found(f"there is no database {database}")
    deadline = time.monotonic() + timeout_s
    late = False

    def look() -> int:
        nonlocal late
        late = time.monotonic() > deadline
        return int(late)

    try:
        address = f"file:{urllib.parse.quote(str(path))}?mode={mode}"
        with contextlib.closing(sqlite3.connect(address, timeout_s, uri=True)) as connection:
            connection.set_authorizer(_alone)
            connection.set_progress_handler(look, _STEPS_BETWEEN_LOOKS)
            yield connection
    except sqlite3.Error as error:
        if late:
            raise DsecError(
                ErrorCode.COMMAND_TIMEOUT, f"the statement was ended after {timeout_s:g} s"
            ) from error
        if "locked" in str(error):
            raise unavailable(f"{database} is in use: {error}") from error
        raise invalid(f"{database}: {error}") from error


def _alone(action: int, *_: str | None) -> int:
    refused = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
    return sqlite3.SQLITE_DENY if action in refused else sqlite3.SQLITE_OK
