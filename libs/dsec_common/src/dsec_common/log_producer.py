"""The log's writer: accepts records without waiting, keeps them, and has them sent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import structlog

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.log_frame import LogRecord
from dsec_common.log_kafka import KafkaConfig
from dsec_common.log_sender import Sender
from dsec_common.log_shed import Shedder
from dsec_common.log_spool import Spool, left_behind
from dsec_common.topics import behavior_logs

if TYPE_CHECKING:
    from dsec_common.behavior import BehaviorLog

_log = structlog.get_logger(__name__)

_MIB: Final = 1024 * 1024
_SPOOL_RETRY_S: Final = 1.0
_CANCEL_AGAIN_S: Final = 1.0
_MOVE_CHUNK_BYTES: Final = 256 * 1024


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a log producer is told.

    Attributes:
        kafka: how Kafka is reached.
        spool_directory: the root that the spools of all processes of a machine share; every
            process below it writes to the same Kafka.
        spool_max_bytes: bound of this process's spool; over it, detail is shed first.
        frame_window_s: a record waits at most this long to be kept on disk.
        frame_max_records: a frame of so many is kept at once.
        frame_max_bytes: same, for its size.
        gather_max_bytes: records held in memory while RocksDB itself refuses.
        record_max_bytes: a larger record loses its detail, or is refused.
        compression: ``lz4``, ``zstd``, ``gzip``, ``snappy`` or ``none``.
        reconnect_max_s: the longest pause between two attempts to reach Kafka.
        adopt_interval_s: how often spools of ended processes are looked for.
    """

    kafka: KafkaConfig
    spool_directory: str
    spool_max_bytes: int = 1024 * _MIB
    frame_window_s: float = 0.005
    frame_max_records: int = 600
    frame_max_bytes: int = 64 * 1024
    gather_max_bytes: int = 64 * _MIB
    record_max_bytes: int = 4 * _MIB
    compression: str = "lz4"
    reconnect_max_s: float = 5.0
    adopt_interval_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what can never work.

        Raises:
            DsecError: ``invalid``, naming the setting.
        """
        if self.compression not in {"lz4", "zstd", "gzip", "snappy", "none"}:
            raise invalid(f"compression {self.compression!r} is none of lz4 zstd gzip snappy none")
        if self.spool_max_bytes < 4 * self.frame_max_bytes:
            raise invalid("spool_max_bytes must hold at least four frames of frame_max_bytes")


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer did since it started, and what waits.

    Attributes:
        appended: records accepted.
        sent: records that Kafka acknowledged (of earlier processes too).
        pending_frames: frames that wait in the spool.
        pending_bytes: their size.
        details_shed: records that lost their detail for want of room.
        records_shed: records dropped for want of room.
        records_refused: records that Kafka does not take even without detail.
        corrupt_frames: frames that could not be read back.
        reconnections: connections made after the first.
    """

    appended: int
    sent: int
    pending_frames: int
    pending_bytes: int
    details_shed: int
    records_shed: int
    records_refused: int
    corrupt_frames: int
    reconnections: int


class LogProducer:
    """Writes records to Kafka through a spool on disk. An async context manager.

    Guarantees: a record is in RocksDB within ``frame_window_s`` and survives this process from then
    on (:meth:`durable` waits for it); it reaches Kafka at least once, whatever happens to Kafka in
    between, unless the spool overflows, which is counted and said in the log (an action
    ``spool_shed``); records of one sandbox keep their order. Kafka may be absent at the start.
    """

    def __init__(self, config: LogConfig, name: str) -> None:
        """Take the settings; ``name`` says which service writes and is reused over restarts."""
        self._config = config
        self._name = name
        self._gathered: list[LogRecord] = []
        self._gathered_bytes = 0
        self._flush_handle: asyncio.TimerHandle | None = None
        self._spool: Spool | None = None
        self._spool_error: DsecError | None = None
        self._appended = 0
        self._last_stats: LogStats | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the spool and begin to reach for Kafka in the background; does not wait for it.

        Raises:
            DsecError: when the spool cannot be opened.
        """
        self._loop = asyncio.get_running_loop()
        self._spool = Spool.create(Path(self._config.spool_directory), self._name)
        self._shedder = Shedder(self._spool, self._config.spool_max_bytes, self._name)
        self._sender = Sender(self._config, self._spool, self._shedder)
        self._tasks = [
            asyncio.create_task(self._sender.run(), name="log-sender"),
            asyncio.create_task(self._adopt(), name="log-adopter"),
        ]

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Keep what was gathered, drain the spool to Kafka, close. May be called twice.

        What Kafka has not taken after ``timeout_s`` stays in the spool for the next start; an
        unreachable Kafka is not waited for.
        """
        if self._spool is None:
            return
        self._flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._sender.drained()
        pending = set(self._tasks)
        while pending:
            # aiokafka swallows a cancellation that comes while it closes: ask until it is heard.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._last_stats = self.stats
        spool, self._spool = self._spool, None
        if spool.pending_frames:
            _log.warning(
                "log_left_in_spool", frames=spool.pending_frames, path=str(spool.directory)
            )
        spool.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def append(self, record: BehaviorLog) -> None:
        """Accept a behaviour log; never waits. The record's project decides the topic.

        Raises:
            DsecError: ``invalid`` when the record cannot be written or is too large even without
                its detail; ``unavailable`` when the producer is not running.
        """
        if not record.time_us:
            record = msgspec.structs.replace(record, time_us=time.time_ns() // 1000)
        topic = behavior_logs(record.project) if record.project else behavior_logs()
        value = record.serialize()
        is_large = len(value) > self._config.record_max_bytes
        if is_large:
            value = record.without_detail().serialize()
        self._accept(
            LogRecord(topic, record.sandbox_id.encode(), value, record.time_us // 1000, True)
        )
        if is_large:
            self._shedder.count(topic, details=1)

    def append_raw(self, topic: str, key: bytes, value: bytes) -> None:
        """Accept a payload for another topic (verdicts, metering); never waits, never loses detail.

        Raises:
            DsecError: as :meth:`append`.
        """
        self._accept(LogRecord(topic, key, value, time.time_ns() // 1_000_000, False))

    def _accept(self, record: LogRecord) -> None:
        self._open_spool()
        size = len(record.key) + len(record.value)
        if size > self._config.record_max_bytes:
            raise invalid(
                f"a log record of {size} bytes for {record.topic} is larger than "
                f"{self._config.record_max_bytes}; keep the payload elsewhere and log a reference",
                size_bytes=size,
            )
        self._gathered.append(record)
        self._gathered_bytes += record.frame_bytes
        self._appended += 1
        if (
            len(self._gathered) >= self._config.frame_max_records
            or self._gathered_bytes >= self._config.frame_max_bytes
        ) and self._spool_error is None:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_later(self._config.frame_window_s, self._flush)

    def _flush(self) -> None:
        """Keep the gathered records as one frame; on failure they stay gathered and are retried."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._spool is None:
            return
        notices = self._shedder.report(self._loop.time())
        records = self._gathered + notices
        if not records:
            return
        try:
            self._shedder.make_room(self._gathered_bytes, in_flight=self._sender.in_flight)
            self._spool.put(records)
        except DsecError as error:
            if self._spool_error is None:
                _log.error("log_spool_refuses", reason=error.message)
            self._spool_error = error
            self._bound_gathered()
            self._flush_handle = self._loop.call_later(_SPOOL_RETRY_S, self._flush)
            return
        if notices:
            self._shedder.reported(self._loop.time())
        self._spool_error = None
        self._gathered = []
        self._gathered_bytes = 0
        self._sender.wake()

    def _bound_gathered(self) -> None:
        while self._gathered_bytes > self._config.gather_max_bytes:
            record = self._gathered.pop(0)
            self._gathered_bytes -= record.frame_bytes
            self._shedder.dropped([record])

    async def durable(self) -> None:
        """Return when everything appended so far is in RocksDB.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses, or the producer is not running.
        """
        self._open_spool()
        self._flush()
        if self._spool_error is not None:
            raise self._spool_error

    async def flushed(self, timeout_s: float) -> None:
        """Return when Kafka has acknowledged everything appended so far.

        Raises:
            DsecError: ``timeout`` after ``timeout_s``; the records stay in the spool.
        """
        await self.durable()
        try:
            async with asyncio.timeout(timeout_s):
                await self._sender.sent_through(self._open_spool().last_number)
        except TimeoutError:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"Kafka at {self._config.kafka.bootstrap_servers} has not acknowledged "
                f"{self._open_spool().pending_frames} frames in {timeout_s} s; they stay spooled",
            ) from None

    async def _adopt(self) -> None:
        """Move the spools of ended processes into this one.

        Those of the same name at once; others when they lie unlocked for a whole interval, since
        their own service may be about to start again.
        """
        root = Path(self._config.spool_directory)
        due = left_behind(root, self._name)
        while True:
            for directory in due:
                try:
                    await self._adopt_one(directory)
                except (DsecError, OSError) as error:
                    _log.error("log_spool_not_adopted", path=str(directory), reason=str(error))
            seen = set(left_behind(root))
            await asyncio.sleep(self._config.adopt_interval_s)
            due = [directory for directory in left_behind(root) if directory in seen]

    async def _adopt_one(self, directory: Path) -> None:
        spool = self._open_spool()
        other = Spool.adopt(directory)
        if other is None:
            return
        frames = other.pending_frames
        try:
            while spool.pending_bytes < self._config.spool_max_bytes // 2:
                if spool.move_from(other, _MOVE_CHUNK_BYTES):
                    break
                self._sender.wake()
                await asyncio.sleep(0)
        finally:
            moved = frames - other.pending_frames
            other.close()
            self._sender.wake()
            _log.info("log_spool_adopted", path=str(directory), frames=moved)

    def _open_spool(self) -> Spool:
        if self._spool is None:
            raise DsecError(ErrorCode.UNAVAILABLE, f"the log producer {self._name} is not running")
        return self._spool

    @property
    def connected(self) -> bool:
        """Whether Kafka is reached now."""
        return self._spool is not None and self._sender.connected.is_set()

    async def wait_connected(self) -> None:
        """Return when Kafka is reached; waits for ever when it never is."""
        self._open_spool()
        await self._sender.connected.wait()

    @property
    def stats(self) -> LogStats:
        """Counts since the start; after the end, what they were then."""
        if self._spool is None and self._last_stats is not None:
            return self._last_stats
        spool = self._open_spool()
        return LogStats(
            appended=self._appended,
            sent=self._sender.sent,
            pending_frames=spool.pending_frames,
            pending_bytes=spool.pending_bytes,
            details_shed=self._shedder.details_shed,
            records_shed=self._shedder.records_shed,
            records_refused=self._sender.refused,
            corrupt_frames=spool.corrupt_frames,
            reconnections=self._sender.reconnections,
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
