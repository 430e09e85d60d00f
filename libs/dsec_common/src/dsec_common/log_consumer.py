"""Reading behaviour logs back: each record once, in order for each sandbox, gaps noticed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError
from dsec_common.log_kafka import KAFKA_FAILURES, KafkaConfig, ensure_topics
from dsec_common.log_sequence import Arrival, SequenceTracker
from dsec_common.subjects import DEFAULT_PROJECT
from dsec_common.topics import ALL_BEHAVIOR_LOGS, BEHAVIOR_LOGS, behavior_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

_log = structlog.get_logger(__name__)

_POLL_MS: Final = 3
_IDLE_STEP_S: Final = 0.01
_IDLE_MAX_S: Final = 0.1
_PING_EVERY_S: Final = 2.0
_COMMIT_TIMEOUT_S: Final = 3.0
_BATCH_RECORDS: Final = 500
_METADATA_AGE_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 5.0


class StartAt(StrEnum):
    """Where a reader begins that has no committed offsets."""

    EARLIEST = "earliest"
    LATEST = "latest"


class LogConsumer:
    """An async iterator over behaviour logs; an async context manager.

    Guarantees: no record is skipped while Kafka keeps it, also over reconnections; a record that
    was sent twice is returned once (as long as this reader remembers it); with a group, offsets
    are committed after the caller has come back for the next record, so a record whose handling
    crashed is returned again. Kafka may be absent at the start and away in between.

    Attributes:
        connected: whether Kafka answered when last asked.
        sequence: duplicates dropped and numbers missing.
        unreadable: values that are no behaviour logs, or of another project than their topic's;
            skipped.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        *,
        projects: Sequence[str] | None = ("default",),
        group_id: str | None = None,
        start_at: StartAt = StartAt.EARLIEST,
        where: Callable[[BehaviorLog], bool] | None = None,
        commit_interval_s: float = 1.0,
        position: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Take the settings; nothing is connected yet.

        Args:
            kafka: how Kafka is reached.
            projects: whose logs; None reads every project's, new ones within 5 s of their start.
            group_id: readers of one group share the work and remember how far they came.
            start_at: where to begin when the group has no committed offset, or without a group.
            where: only records for which it is true are returned.
            commit_interval_s: how often offsets are committed.
            position: without a group: what :attr:`position` was in an earlier life.

        Raises:
            DsecError: ``invalid`` for a project that cannot be.
        """
        self.connected = False
        self.sequence = SequenceTracker()
        self.unreadable = 0
        self._kafka = kafka
        self._topics = None if projects is None else [behavior_logs(name) for name in projects]
        self._group_id = group_id
        self._start_at = start_at
        self._where = where
        self._commit_interval_s = commit_interval_s
        self._consumer: Any = None
        self._buffer: deque[Any] = deque()
        self._given_out: Any = None
        self._next_offsets: dict[Any, int] = {
            TopicPartition(topic, partition): offset
            for (topic, partition), offset in (position or {}).items()
        }
        self._uncommitted: dict[Any, int] = {}
        self._committed_at = 0.0
        self._heard_at = 0.0
        self._idle_s = 0.0
        self._closed = False

    @property
    def position(self) -> dict[tuple[str, int], int]:
        """Return the next offset of each topic and partition; all before it were handled.

        A record is handled when the caller has come back for the next one. Who keeps the position
        with what was made of the records needs no group, and so waits for no dead member of it.
        """
        return {(it.topic, it.partition): offset for it, offset in self._next_offsets.items()}

    async def start(self) -> None:
        """Connect and take the starting position; waits, with retries, until Kafka is there.

        Records written after it returned are seen with :attr:`StartAt.LATEST` too.
        """
        pause_s = _FIRST_PAUSE_S
        while self._consumer is None:
            try:
                self._consumer = await self._connect()
            except (*KAFKA_FAILURES, DsecError) as error:
                if pause_s == _FIRST_PAUSE_S:
                    _log.warning(
                        "log_reader_waits",
                        kafka=self._kafka.bootstrap_servers,
                        reason=str(error) or repr(error),
                    )
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  spreads retries
                pause_s = min(pause_s * 2, _LAST_PAUSE_S)

    async def stop(self) -> None:
        """Commit what was handled and close. May be called twice."""
        self._closed = True
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await self._commit(consumer)
            await _close(consumer)
        self.connected = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BehaviorLog:
        """Return the next record; ends only after :meth:`stop`."""
        self._note_handled()
        while not self._closed:
            while self._buffer:
                message = self._buffer.popleft()
                record = self._accept(message)
                if record is not None:
                    self._given_out = message
                    return record
                self._handled(message)
            await self._fill()
        raise StopAsyncIteration

    async def _connect(self) -> Any:
        await ensure_topics(self._kafka, self._topics or [BEHAVIOR_LOGS])
        consumer = AIOKafkaConsumer(
            **self._kafka.connection(),
            group_id=self._group_id,
            enable_auto_commit=False,
            # Only a topic that was made anew has offsets out of range: nothing of it was read.
            auto_offset_reset="earliest",
            metadata_max_age_ms=int(_METADATA_AGE_S * 1000),
            max_poll_records=_BATCH_RECORDS,
        )
        try:
            listener = _Listener(self, consumer)
            if self._topics is None:
                consumer.subscribe(pattern=ALL_BEHAVIOR_LOGS, listener=listener)
            else:
                consumer.subscribe(topics=self._topics, listener=listener)
            await consumer.start()
            if self._group_id is None:
                await self._take_position(consumer)
            else:  # start returns when partitions are assigned, before their position is taken
                async with asyncio.timeout(self._kafka.request_timeout_s):
                    await listener.has_assigned.wait()
        except BaseException:
            await _close(consumer)
            raise
        self.connected = True
        self._heard_at = asyncio.get_running_loop().time()
        return consumer

    async def _take_position(self, consumer: Any) -> None:
        """Without a group: go on where this reader was, or begin where it was told to."""
        partitions = consumer.assignment()
        fresh = [partition for partition in partitions if partition not in self._next_offsets]
        if fresh and self._start_at is StartAt.LATEST and not self._next_offsets:
            self._next_offsets.update(await consumer.end_offsets(fresh))
        for partition in partitions & self._next_offsets.keys():
            consumer.seek(partition, self._next_offsets[partition])

    async def _fill(self) -> None:
        await self.start()
        consumer = self._consumer
        loop = asyncio.get_running_loop()
        try:
            found = await self._poll(consumer)
            if found:
                self._heard_at = loop.time()
                self.connected = True
            elif loop.time() - self._heard_at > _PING_EVERY_S:
                await self._ping(consumer)
        except KafkaError as error:
            _log.warning("log_reader_disconnected", reason=str(error) or repr(error))
            self.connected = False
            self._consumer = None
            with contextlib.suppress(*KAFKA_FAILURES):
                await _close(consumer)
            return
        for messages in found.values():
            self._buffer.extend(messages)
        if self._uncommitted and loop.time() - self._committed_at > self._commit_interval_s:
            await self._commit(consumer)

    async def _poll(self, consumer: Any) -> dict[Any, list[Any]]:
        """Return what has come, or nothing after a pause.

        A broker may answer a fetch at once though it has nothing (the embedded one does), and the
        client would ask again without end: so an idle reader stops asking between two polls. What
        comes meanwhile waits with Kafka, or in the answer to a fetch that is under way.
        """
        consumer.resume(*consumer.assignment())
        found: dict[Any, list[Any]] = await consumer.getmany(timeout_ms=_POLL_MS)
        if found:
            self._idle_s = 0.0
            return found
        self._idle_s = min(self._idle_s + _IDLE_STEP_S, _IDLE_MAX_S)
        consumer.pause(*consumer.assignment())
        await asyncio.sleep(self._idle_s)
        return found

    async def _ping(self, consumer: Any) -> None:
        """Ask an idle Kafka for its topics; one that came back without ours gets them again."""
        self._heard_at = asyncio.get_running_loop().time()
        try:
            topics = await consumer.topics()
            wanted = set(self._topics or [BEHAVIOR_LOGS])
            if not wanted <= topics:
                await ensure_topics(self._kafka, wanted)
        except (*KAFKA_FAILURES, DsecError) as error:
            if self.connected:
                _log.warning("log_reader_disconnected", reason=str(error) or repr(error))
            self.connected = False
        else:
            self.connected = True

    def _accept(self, message: Any) -> BehaviorLog | None:
        try:
            record = BehaviorLog.parse(message.value or b"")
        except DsecError as error:
            self.unreadable += 1
            _log.warning(
                "log_record_unreadable",
                topic=message.topic,
                partition=message.partition,
                offset=message.offset,
                reason=error.message,
            )
            return None
        if behavior_logs(record.project or DEFAULT_PROJECT) != message.topic:
            # Whoever may write to one project's topic must not speak for another project.
            self.unreadable += 1
            _log.warning("log_record_of_another_project", topic=message.topic)
            return None
        arrival = self.sequence.observe(record)
        if arrival is Arrival.DUPLICATE:
            return None
        if arrival is Arrival.AFTER_GAP:
            _log.warning("log_gap", sandbox=record.sandbox_id, source=record.source, seq=record.seq)
        return record if self._where is None or self._where(record) else None

    def _note_handled(self) -> None:
        message, self._given_out = self._given_out, None
        if message is not None:
            self._handled(message)

    def _handled(self, message: Any) -> None:
        partition = TopicPartition(message.topic, message.partition)
        self._next_offsets[partition] = message.offset + 1
        if self._group_id is not None:
            self._uncommitted[partition] = message.offset + 1

    async def _commit(self, consumer: Any) -> None:
        offsets, self._uncommitted = self._uncommitted, {}
        if not offsets:
            return
        self._committed_at = asyncio.get_running_loop().time()
        try:
            # aiokafka itself would try until Kafka is back.
            async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                await consumer.commit(offsets)
        except KAFKA_FAILURES as error:
            # Another reader took the partition, or Kafka is away: the records come again.
            _log.warning("log_commit_failed", reason=str(error) or repr(error))

    async def revoked(self, consumer: Any, partitions: Iterable[Any]) -> None:
        """Hand partitions over to other readers of the group: commit, and drop what waits."""
        await self._commit(consumer)
        gone = {(partition.topic, partition.partition) for partition in partitions}
        kept = [it for it in self._buffer if (it.topic, it.partition) not in gone]
        self._buffer = deque(kept)

    async def assigned(self, consumer: Any, partitions: Iterable[Any]) -> None:
        """Begin at the end where the group never committed, if that was asked for."""
        if self._start_at is StartAt.EARLIEST:
            return
        fresh = [it for it in partitions if await consumer.committed(it) is None]
        if fresh:
            for partition, offset in (await consumer.end_offsets(fresh)).items():
                consumer.seek(partition, offset)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


async def _close(consumer: Any) -> None:
    """Stop aiokafka's consumer, all of it.

    On a lost broker the cancellation of one of its own fetches escapes from its stop, which then
    leaves the other fetches and the connections open.
    """
    try:
        await consumer.stop()
    except asyncio.CancelledError:
        fetches = list(getattr(consumer._fetcher, "_pending_tasks", ()))  # noqa: SLF001  see above
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        await consumer._client.close()  # noqa: SLF001  see above
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, reader: LogConsumer, consumer: Any) -> None:
        self.has_assigned = asyncio.Event()
        self._reader = reader
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        await self._reader.revoked(self._consumer, revoked)

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        await self._reader.assigned(self._consumer, assigned)
        self.has_assigned.set()
