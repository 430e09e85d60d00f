"""Reading Kafka topics: no record skipped, whatever goes away in between and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError

from dsec_common.errors import DsecError
from dsec_common.log_kafka import KAFKA_FAILURES, KafkaConfig, ensure_topics, has_connection
from dsec_common.log_pace import LONGEST_S, Pace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_log = structlog.get_logger(__name__)

Record = TypeVar("Record")

_POLL_MS: Final = 3
_HOLD_MS: Final = int(LONGEST_S * 1000)
#: A fetch that is answered later than this was held by the broker: it had nothing.
_HELD_S: Final = LONGEST_S / 2
#: Of the event loop, more than the client takes from leave to fetch until it asks.
_TURNS_TO_ASK: Final = 16
_FEW_RECORDS: Final = 256
_GATHER_S: Final = 0.1
_LOOK_EVERY_S: Final = 5.0
_COMMIT_TIMEOUT_S: Final = 3.0
_BATCH_RECORDS: Final = 500
_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 5.0


class StartAt(StrEnum):
    """Where a reader begins that has no committed offsets."""

    EARLIEST = "earliest"
    LATEST = "latest"


class TopicReader(ABC, Generic[Record]):
    """An async iterator over the records of topics; an async context manager.

    Guarantees: no record is skipped while Kafka keeps it, also over reconnections; with a group,
    offsets are committed after the caller has come back for the next record, so a record whose
    handling crashed is returned again. Kafka may be absent at the start and away in between.

    After a quiet of eight seconds a record is read within a second of its arrival from a broker
    that answers a fetch at once though it has nothing (the embedded one does), sooner after a
    shorter quiet or :meth:`hurry`, and at once from one that holds the fetch until then.

    Attributes:
        connected: whether Kafka answered when last asked; a lost connection is noticed within a
            second, a silent broker within some more.
        unreadable: values that are none of the records; skipped.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        topics: Sequence[str],
        *,
        pattern: str = "",
        group_id: str | None = None,
        start_at: StartAt = StartAt.EARLIEST,
        commit_interval_s: float = 1.0,
        position: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Take the settings; nothing is connected yet.

        Args:
            kafka: how Kafka is reached.
            topics: which ones; made when they are missing.
            pattern: read all that match instead, new ones within 6 s of their start.
            group_id: readers of one group share the work and remember how far they came.
            start_at: where to begin when the group has no committed offset, or without a group.
            commit_interval_s: how often offsets are committed.
            position: without a group: what :attr:`position` was in an earlier life.
        """
        self.connected = False
        self.unreadable = 0
        self._kafka = kafka
        self._topics = list(topics)
        self._pattern = pattern
        self._group_id = group_id
        self._start_at = start_at
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
        self._looked_at = 0.0
        self._pace = Pace(0.0)
        self._hurried = asyncio.Event()
        self._found = 0
        self._closed = False

    @abstractmethod
    def _accept(self, message: Any) -> Record | None:
        """Return the record in a message; None to pass it over."""

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

    def hurry(self) -> None:
        """Say that somebody waits for what comes: ask Kafka now, and more often for a while."""
        self._hurried.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
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
        await ensure_topics(self._kafka, self._topics)
        consumer = AIOKafkaConsumer(
            **self._kafka.connection(),
            group_id=self._group_id,
            enable_auto_commit=False,
            # Only a topic that was made anew has offsets out of range: nothing of it was read.
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_HOLD_MS,
            max_poll_records=_BATCH_RECORDS,
        )
        try:
            listener = _Listener(self, consumer)
            if self._pattern:
                consumer.subscribe(pattern=self._pattern, listener=listener)
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
        # It would look five times a second for what its own events tell.
        consumer._fetcher._fetcher_timeout = LONGEST_S  # noqa: SLF001  nothing else sets it
        self.connected = True
        self._looked_at = asyncio.get_running_loop().time()
        self._pace.hurry(self._looked_at)
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
                self.connected = True
            every_s = _LOOK_EVERY_S if self.connected else LONGEST_S
            lost = self.connected and not has_connection(consumer._client)  # noqa: SLF001  nothing else tells
            if lost or loop.time() - self._looked_at > every_s:
                await self._look(consumer)
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

        What comes in a pause waits with Kafka, or in the answer to a fetch that is under way.
        """
        if 0 < self._found < _FEW_RECORDS:
            # What comes within a moment is one fetch: each costs Kafka and us the same. The client
            # would go on fetching from the partitions that had nothing.
            consumer.pause(*consumer.assignment())
            await asyncio.sleep(_GATHER_S)
        # Of a partition at pause the client gives out nothing, and drops what it has fetched.
        consumer.resume(*consumer.assignment())
        found: dict[Any, list[Any]] = await consumer.getmany(timeout_ms=0)
        if not found and self._found >= _FEW_RECORDS:
            found = await consumer.getmany(timeout_ms=_POLL_MS)  # the client fetches ahead
        if not found:
            found = await self._fetch_once(consumer)
        self._found = sum(map(len, found.values()))
        if found:
            self._pace.hurry(asyncio.get_running_loop().time())
        return found

    async def _fetch_once(self, consumer: Any) -> dict[Any, list[Any]]:
        """Ask each broker once and return what it has, or nothing after the pause that is due.

        A broker may answer at once though it has nothing (the embedded one does), and the client
        would ask again without end: so it may ask once for each pause. One that holds the question
        until something comes, or until its time is over, is asked again without a pause.
        """
        loop = asyncio.get_running_loop()
        fetches = consumer._fetcher._pending_tasks  # noqa: SLF001  nothing else tells
        for _ in range(_TURNS_TO_ASK):
            if fetches:
                break
            await asyncio.sleep(0)
        consumer.pause(*consumer.assignment())
        asked_at = loop.time()
        if fetches:
            await asyncio.wait(
                set(fetches), timeout=2 * LONGEST_S, return_when=asyncio.FIRST_COMPLETED
            )
            consumer.resume(*consumer.assignment())
            found: dict[Any, list[Any]] = await consumer.getmany(timeout_ms=0)
            if found or (self.connected and loop.time() - asked_at > _HELD_S):
                return found
            consumer.pause(*consumer.assignment())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pace.pause_s(loop.time())):
                await self._hurried.wait()
                self._hurried.clear()
                self._pace.hurry(loop.time())
        return {}

    async def _look(self, consumer: Any) -> None:
        """Ask Kafka for its topics; one that came back without ours gets them again.

        The client learns so of topics that are new and of partitions that moved.
        """
        self._looked_at = asyncio.get_running_loop().time()
        client = consumer._client  # noqa: SLF001  it offers no other way
        try:
            if not await client.force_metadata_update():
                raise KafkaConnectionError("no broker answers")
            wanted = set(self._topics)
            if not wanted <= client.cluster.topics():
                await ensure_topics(self._kafka, wanted)
        except (*KAFKA_FAILURES, DsecError) as error:
            if self.connected:
                _log.warning("log_reader_disconnected", reason=str(error) or repr(error))
            self.connected = False
        else:
            self.connected = True

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

    async def __aexit__(self, *_: object) -> None:
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
    def __init__(self, reader: TopicReader[Any], consumer: Any) -> None:
        self.has_assigned = asyncio.Event()
        self._reader = reader
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        await self._reader.revoked(self._consumer, revoked)

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        await self._reader.assigned(self._consumer, assigned)
        self.has_assigned.set()
