"""The records of durable snapshots in the node's StateDB."""

from __future__ import annotations

from typing import Final

import msgspec
import structlog

from dsec_common.errors import unavailable
from dsec_sandboxd.snapshot_tree import SnapshotRecord
from dsec_sandboxd.state_database import StateDatabase

_log: Final = structlog.get_logger(__name__)

_PREFIX: Final = b"snapshot|"
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(SnapshotRecord)


class SnapshotRecords:
    """Snapshots in RocksDB, each written when its image is on the disk and not before."""

    def __init__(self, database: StateDatabase) -> None:
        self._database = database

    def put(self, record: SnapshotRecord) -> None:
        """Keep a record in place of any earlier one of the same snapshot.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses (a full disk).
        """
        try:
            self._database[_PREFIX + record.local.encode()] = _encoder.encode(record)
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(
                f"the StateDB refuses the record of snapshot {record.local}: {error}"
            ) from error

    def delete(self, local: str) -> None:
        """Drop a record; none is fine."""
        try:
            del self._database[_PREFIX + local.encode()]
        except Exception as error:  # noqa: BLE001  without its image the next start drops it
            _log.warning("snapshot_record_not_dropped", local=local, error=str(error))

    def load(self) -> list[SnapshotRecord]:
        """Return every record; one that cannot be read is logged."""
        records = []
        for key, value in self._database.items(_PREFIX):
            if not key.startswith(_PREFIX):
                break
            try:
                records.append(_decoder.decode(value))
            except msgspec.DecodeError as error:
                _log.error("snapshot_record_unreadable", key=repr(key), error=str(error))
        return records
