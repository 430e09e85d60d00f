"""The node's StateDB: one record per sandbox, so that a restarted daemon knows what there was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import msgspec
import structlog
from rocksdict import Options, Rdict

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)
_MIB: Final = 1024 * 1024

_PREFIX: Final = b"sandbox|"
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(SandboxRecord)


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
        directory.mkdir(parents=True, exist_ok=True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(8 * _MIB)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(64)
        try:
            self._database = Rdict(str(directory), options)
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(
                f"the StateDB in {directory} cannot be opened: {error}; see that no other sandboxd "
                "of this node runs"
            ) from error

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
        except Exception as error:  # noqa: BLE001  it stays until the next start drops it
            _log.warning("record_not_dropped", local=local, error=str(error))

    def load(self) -> tuple[SandboxRecord, ...]:
        """Return every record; one that cannot be read is dropped and logged."""
        records = []
        rows = cast("Iterator[tuple[bytes, bytes]]", self._database.items(from_key=_PREFIX))
        for key, value in rows:
            if not key.startswith(_PREFIX):
                break
            try:
                records.append(_decoder.decode(value))
            except msgspec.DecodeError as error:
                _log.error("record_unreadable", key=repr(key), error=str(error))
        return tuple(records)

    def close(self) -> None:
        """Let go of the store; later calls fail."""
        self._database.close()
