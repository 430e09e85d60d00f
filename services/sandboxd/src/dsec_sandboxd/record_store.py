"""The node's StateDB: one record per sandbox, so that a restarted daemon knows what there was."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import structlog

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_sandboxd.actions.store import ActionStore
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase

_log: Final = structlog.get_logger(__name__)

_PREFIX: Final = b"sandbox|"
_OUTCOME_PREFIX: Final = b"outcome|"
_SEQUENCE_PREFIX: Final = b"sequence|"
_NOT_LOGGED_EVERY: Final = 1000
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(SandboxRecord)
_sequence_decoder: Final = msgspec.msgpack.Decoder(tuple[str, int])


class RecordStore:
    """Sandbox records in RocksDB.

    A write has survived a crash of this process when :meth:`put` returns. It is not synced to the
    disk: what a power cut could lose are sandboxes that the same cut has ended.
    """

    def __init__(self, directory: Path) -> None:
        """Open the store, made when missing.

        Raises:
            DsecError: ``unavailable`` when another process has it open or it is damaged.
        """
        self._database = StateDatabase(directory)
        self.actions = ActionStore(self._database)
        self._not_kept = 0

    @property
    def database(self) -> StateDatabase:
        """The StateDB itself, for parts that keep records of their own under other prefixes."""
        return self._database

    def put(self, record: SandboxRecord) -> None:
        """Keep ``record`` in place of any earlier one of the same sandbox.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses (a full disk).
        """
        try:
            self._database[_PREFIX + record.local.encode()] = _encoder.encode(record)
        except Exception as error:  # rocksdict raises plain Exception
            raise DsecError(
                ErrorCode.UNAVAILABLE,
                f"the StateDB refuses the record of sandbox {record.local}: {error}",
            ) from error

    def delete(self, local: str) -> None:
        """Drop the record of a sandbox; none is fine."""
        try:
            del self._database[_PREFIX + local.encode()]
            del self._database[_OUTCOME_PREFIX + local.encode()]
            del self._database[_SEQUENCE_PREFIX + local.encode()]
            self.actions.delete_all(local)
        except Exception as error:  # noqa: BLE001  it stays until the next start drops it
            _log.warning("record_not_dropped", local=local, error=str(error))

    def load(self) -> tuple[SandboxRecord, ...]:
        """Return every record; one that cannot be read is dropped and logged."""
        records = []
        for key, value in self._database.items(_PREFIX):
            if not key.startswith(_PREFIX):
                break
            try:
                records.append(_decoder.decode(value))
            except msgspec.DecodeError as error:
                _log.error("record_unreadable", key=repr(key), error=str(error))
        return tuple(records)

    def keep_sequence(self, local: str, source: str, seq: int) -> None:
        """Remember how far a sandbox's steps are numbered; see ``StepLog``. Never raises."""
        try:
            self._database[_SEQUENCE_PREFIX + local.encode()] = _encoder.encode((source, seq))
        except Exception as error:  # noqa: BLE001  its steps may then be numbered twice; said here
            self._not_kept += 1
            if self._not_kept % _NOT_LOGGED_EVERY == 1:
                _log.warning("sequence_not_kept", local=local, seq=seq, error=str(error))

    def sequences(self) -> dict[str, tuple[str, int]]:
        """Return by local id who numbered its steps, and the last number."""
        found = {}
        for key, value in self._database.items(_SEQUENCE_PREFIX):
            if not key.startswith(_SEQUENCE_PREFIX):
                break
            try:
                found[key.removeprefix(_SEQUENCE_PREFIX).decode()] = _sequence_decoder.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _log.error("sequence_unreadable", key=repr(key), error=str(error))
        return found

    def put_outcome(self, local: str, outcome: bytes) -> None:
        """Keep what came of a sandbox's first command, for as long as its record.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses (a full disk).
        """
        try:
            self._database[_OUTCOME_PREFIX + local.encode()] = outcome
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(
                f"the StateDB refuses what came of sandbox {local}'s first command: {error}"
            ) from error

    def outcome(self, local: str) -> bytes | None:
        """Return what came of a sandbox's first command, or None."""
        return self._database.get(_OUTCOME_PREFIX + local.encode())

    def close(self) -> None:
        """Let go of the store; later calls fail."""
        self._database.close()
