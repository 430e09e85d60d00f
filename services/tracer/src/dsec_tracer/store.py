"""Steps on disk: RocksDB, so that a restarted tracer knows what it had read."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import msgspec
import structlog
from rocksdict import Options, Rdict, WriteBatch

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.cost import Amounts
from dsec_common.wire.trace import TraceStep
from dsec_tracer.bills import Bills, Bucket, Thing
from dsec_tracer.events import SandboxKey
from dsec_tracer.numbering import TracedSandbox

_log: Final = structlog.get_logger(__name__)

_MIB: Final = 1024 * 1024
#: A page of steps must fit one message with room to spare.
PAGE_BYTES_MAX: Final = 256 * 1024
_GATHERED_MAX: Final = 512

_POSITION: Final = b"position"
_SANDBOX: Final = b"sandbox|"
_STEP: Final = b"step|"
_SUM: Final = b"sum|"
_THING: Final = b"thing|"
_SEQ: Final = struct.Struct(">Q")

_encoder: Final = msgspec.msgpack.Encoder()
_position_decoder: Final = msgspec.msgpack.Decoder(list[tuple[str, int, int]])
_bucket_decoder: Final = msgspec.msgpack.Decoder(Bucket)
_amounts_decoder: Final = msgspec.msgpack.Decoder(Amounts)
_thing_decoder: Final = msgspec.msgpack.Decoder(Thing)
_sandbox_decoder: Final = msgspec.msgpack.Decoder(TracedSandbox)


class StepStore:
    """Steps by sandbox and number, gathered and written some hundreds at a time.

    What is put is read back at once. A crash of this process takes what was not written yet, and
    the position in the log stands before it then: so it is read again. Nothing is synced to the
    disk: after a power cut the newest steps may be missing here, while Kafka keeps them; removing
    the directory has them all read again.
    """

    def __init__(self, directory: Path) -> None:
        """Open the store, made when missing.

        Raises:
            DsecError: ``unavailable`` when another process has it open or it is damaged.
        """
        directory.mkdir(parents=True, exist_ok=True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(16 * _MIB)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(128)
        try:
            self._database = Rdict(str(directory), options)
        except Exception as error:  # rocksdict raises plain Exception
            raise unavailable(
                f"the store of steps in {directory} cannot be opened: {error}; see that no other "
                "tracer of this name runs here, or remove it to have the log read again"
            ) from error
        self._gathered = WriteBatch(raw_mode=True)
        self._changed: dict[SandboxKey, TracedSandbox] = {}

    def position(self) -> dict[tuple[str, int], int]:
        """Return how far the log had been read when that was kept last."""
        kept = self._database.get(_POSITION)
        if kept is None:
            return {}
        rows = _position_decoder.decode(cast("bytes", kept))
        return {(topic, partition): offset for topic, partition, offset in rows}

    def keep_position(self, position: Mapping[tuple[str, int], int], bills: Bills) -> None:
        """Keep how far all topics were read, with the steps and the sums of all that; or nothing.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        batch = self._gathered
        rows = [(topic, partition, offset) for (topic, partition), offset in position.items()]
        batch.put(_POSITION, _encoder.encode(rows))
        sums, things, dropped = bills.take_changes()
        for bucket, amounts in sums.items():
            batch.put(_SUM + _encoder.encode(bucket), _encoder.encode(amounts))
        for name, thing in things.items():
            batch.put(_THING + name.encode(), _encoder.encode(thing))
        for name in dropped:
            batch.delete(_THING + name.encode())
        self.write()

    def load_bills(self) -> Bills:
        """Return the sums as they were kept last.

        Raises:
            DsecError: ``unavailable`` when they cannot be read.
        """
        bills = Bills()
        try:
            bills.load(
                (
                    (_bucket_decoder.decode(name[len(_SUM) :]), _amounts_decoder.decode(value))
                    for name, value in self._all(_SUM)
                ),
                {
                    name[len(_THING) :].decode(): _thing_decoder.decode(value)
                    for name, value in self._all(_THING)
                },
            )
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise unavailable(
                f"the kept sums cannot be read: {error}; remove the tracer's directory to have "
                "all topics read again"
            ) from error
        return bills

    def forget_sums(self, buckets: Iterable[Bucket]) -> None:
        """Drop sums.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        batch = WriteBatch(raw_mode=True)
        for bucket in buckets:
            batch.delete(_SUM + _encoder.encode(bucket))
        self._write(batch, "sums of long ago")

    def _all(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for name, value in self._from(prefix):
            if not name.startswith(prefix):
                return
            yield name, value

    def put(self, key: SandboxKey, sandbox: TracedSandbox, step: TraceStep | None = None) -> None:
        """Gather a step and what is known of its sandbox, which are written together.

        Args:
            key: of the sandbox.
            sandbox: read again when it is written; what it says then belongs to all its steps.
            step: None where only the sandbox changed.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses (a full disk); nothing is dropped.
        """
        if step is not None:
            self._gathered.put(_steps_of(key) + _SEQ.pack(step.seq), _encoder.encode(step))
        self._changed[key] = sandbox
        self._write_enough()

    def forget(self, key: SandboxKey) -> None:
        """Drop a sandbox with its steps.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        self._changed.pop(key, None)
        self._gathered.delete(_SANDBOX + _name_of(key))
        prefix = _steps_of(key)
        self._gathered.delete_range(prefix, prefix + b"\xff" * _SEQ.size)
        self._write_enough()

    def write(self) -> None:
        """Write what was gathered.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses; it is still gathered.
        """
        batch = self._gathered
        for key, sandbox in self._changed.items():
            batch.put(_SANDBOX + _name_of(key), _encoder.encode(sandbox))
        if batch.is_empty():
            return
        self._write(batch, "what was gathered")
        self._gathered = WriteBatch(raw_mode=True)
        self._changed.clear()

    def _write_enough(self) -> None:
        if len(self._gathered) >= _GATHERED_MAX or self._gathered.size_in_bytes() >= _MIB:
            self.write()

    def steps(
        self, key: SandboxKey, after_seq: int, limit: int
    ) -> tuple[tuple[tuple[int, bytes], ...], bool]:
        """Return a page of steps with their numbers, in order, and whether others follow.

        A page holds ``limit`` steps or 256 KiB, whichever is less, and one step at least.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses what was gathered before.
        """
        self.write()
        prefix = _steps_of(key)
        found: list[tuple[int, bytes]] = []
        size = 0
        for name, value in self._from(prefix + _SEQ.pack(min(after_seq + 1, 2**64 - 1))):
            if not name.startswith(prefix):
                break
            size += len(value)
            if found and (len(found) >= limit or size > PAGE_BYTES_MAX):
                return tuple(found), True
            found.append((_SEQ.unpack(name[len(prefix) :])[0], value))
        return tuple(found), False

    def load(self) -> list[tuple[SandboxKey, TracedSandbox]]:
        """Return every sandbox written, the one without a new step for longest first."""
        loaded: list[tuple[SandboxKey, TracedSandbox]] = []
        for name, value in self._from(_SANDBOX):
            if not name.startswith(_SANDBOX):
                break
            project, _, sandbox_id = name[len(_SANDBOX) :].decode().partition("\0")
            try:
                sandbox = _sandbox_decoder.decode(value)
            except msgspec.DecodeError as error:
                _log.error("sandbox_unreadable", sandbox_id=sandbox_id, error=str(error))
                continue
            loaded.append((SandboxKey(project, sandbox_id), sandbox))
        loaded.sort(key=lambda pair: pair[1].touched_at)
        return loaded

    def close(self) -> None:
        """Write what was gathered and let go of the store; later calls fail.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses; the store is let go all the same.
        """
        try:
            self.write()
        finally:
            self._database.close()

    def _write(self, batch: WriteBatch, what: str) -> None:
        try:
            self._database.write(batch)
        except Exception as error:  # rocksdict raises plain Exception
            raise DsecError(
                ErrorCode.UNAVAILABLE, f"the store of steps refuses {what}: {error}"
            ) from error

    def _from(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        return cast("Iterator[tuple[bytes, bytes]]", self._database.items(from_key=name))


def _name_of(key: SandboxKey) -> bytes:
    return f"{key.project}\0{key.sandbox_id}".encode()


def _steps_of(key: SandboxKey) -> bytes:
    return _STEP + _name_of(key) + b"\0"
