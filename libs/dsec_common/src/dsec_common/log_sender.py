"""The sender: takes frames from the spool, oldest first, until Kafka has acknowledged them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.errors import DsecError
from dsec_common.log_kafka import KAFKA_FAILURES, KafkaLink, RecordsTooLargeError
from dsec_common.log_shed import without_detail

if TYPE_CHECKING:
    from dsec_common.log_frame import LogRecord
    from dsec_common.log_producer import LogConfig
    from dsec_common.log_shed import Shedder
    from dsec_common.log_spool import Spool

_log = structlog.get_logger(__name__)

_ROUND_FRAMES: Final = 256
_ROUND_BYTES: Final = 4 * 1024 * 1024
_BATCH_BYTES: Final = 900_000  # below Kafka's default max.message.bytes, compressed or not
_LOOK_EVERY_S: Final = 2.0
_PING_EVERY_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.1
_FEW_FRAMES: Final = 16
_GATHER_S: Final = 0.05

_Lane = list[tuple[int, int, "LogRecord"]]


class Sender:
    """Sends rounds: the oldest frames, one batch after another on each partition, side by side.

    A frame leaves the spool when every record in it is acknowledged. After a failure the
    connection is made anew and the round goes out again without what was acknowledged before, so
    order holds and duplicates are few.

    Attributes:
        connected: set while Kafka is reached.
        sent: records acknowledged.
        refused: records that Kafka takes in no form, dropped.
        reconnections: connections made after the first.
        in_flight: number of the newest frame in the round under way; 0 between rounds.
    """

    def __init__(self, config: LogConfig, spool: Spool, shedder: Shedder) -> None:
        self.connected = asyncio.Event()
        self.sent = 0
        self.refused = 0
        self.reconnections = 0
        self.in_flight = 0
        self._config = config
        self._spool = spool
        self._shedder = shedder
        self._batch_max_bytes = _BATCH_BYTES
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._given_up = False
        self._acknowledged: set[tuple[int, int]] = set()

    def wake(self) -> None:
        """Say that the spool has new frames."""
        self._work.set()

    async def drained(self) -> None:
        """Return when the spool is empty, or an attempt to reach Kafka has failed."""
        while self._spool.pending_frames and not self._given_up:
            await self._progress.wait()

    async def sent_through(self, number: int) -> None:
        """Return when frame ``number`` and all before it are acknowledged."""
        while self._spool.first_number <= number:
            await self._progress.wait()

    async def run(self) -> None:
        """Send until cancelled; reconnects for ever, with growing pauses."""
        pause_s = _FIRST_PAUSE_S
        connections = 0
        while True:
            link: KafkaLink | None = None
            try:
                link = await KafkaLink.open(
                    self._config.kafka,
                    compression=self._config.compression,
                    batch_max_bytes=self._batch_max_bytes,
                )
                self.reconnections = connections
                connections += 1
                self._given_up = False
                self.connected.set()
                _log.info("log_connected", kafka=self._config.kafka.bootstrap_servers)
                while True:
                    await self._send_round(link)
                    pause_s = _FIRST_PAUSE_S
            except RecordsTooLargeError as error:
                if self._lighten(error.records):
                    continue
            except (*KAFKA_FAILURES, DsecError) as error:
                if not self._given_up:
                    _log.warning(
                        "log_disconnected",
                        kafka=self._config.kafka.bootstrap_servers,
                        reason=str(error) or repr(error),
                        pending_frames=self._spool.pending_frames,
                    )
                self._given_up = True
            except Exception:  # noqa: BLE001  see the next line
                # A log that stopped for good would be worse than one that tries for ever.
                _log.exception("log_sender_failed", kafka=self._config.kafka.bootstrap_servers)
                self._given_up = True
            finally:
                self.in_flight = 0
                self.connected.clear()
                self._announce()
                if link is not None:
                    await link.close()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  spreads retries
            pause_s = min(pause_s * 2, self._config.reconnect_max_s)

    async def _send_round(self, link: KafkaLink) -> None:
        frames = self._spool.peek(_ROUND_FRAMES, _ROUND_BYTES)
        if not frames:
            await self._idle(link)
            return
        if len(frames) < _FEW_FRAMES:
            # What comes within a moment shares the round: each costs Kafka and us the same.
            await asyncio.sleep(_GATHER_S)
            frames = self._spool.peek(_ROUND_FRAMES, _ROUND_BYTES)
        self.in_flight = frames[-1][0]
        await link.prepare({record.topic for _, records in frames for record in records})
        lanes: defaultdict[tuple[str, int], _Lane] = defaultdict(list)
        for number, records in frames:
            for at, record in enumerate(records):
                if (number, at) not in self._acknowledged:
                    lanes[link.partition_of(record)].append((number, at, record))
        await self._watched(link, lanes)
        self._spool.delete(number for number, _ in frames)
        self.sent += sum(len(lane) for lane in lanes.values())
        self._acknowledged.clear()
        self.in_flight = 0
        self._announce()

    async def _watched(self, link: KafkaLink, lanes: dict[tuple[str, int], _Lane]) -> None:
        """Send all lanes; notice a dead broker long before aiokafka would stop retrying."""
        tasks = [
            asyncio.create_task(self._send_lane(link, topic, partition, lane))
            for (topic, partition), lane in lanes.items()
        ]
        try:
            deadline = asyncio.get_running_loop().time() + self._config.kafka.request_timeout_s
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if not done:
                    await link.ping()
                    if asyncio.get_running_loop().time() > deadline:
                        raise TimeoutError("no acknowledgement within request_timeout_s")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_lane(self, link: KafkaLink, topic: str, partition: int, lane: _Lane) -> None:
        await link.send(topic, partition, [record for _, _, record in lane])
        self._acknowledged.update((number, at) for number, at, _ in lane)

    async def _idle(self, link: KafkaLink) -> None:
        """Wait for work; meanwhile see to it that ``connected`` stays true."""
        loop = asyncio.get_running_loop()
        ping_at = loop.time() + _PING_EVERY_S
        self._work.clear()
        while not self._work.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._work.wait()
            link.check()
            if loop.time() >= ping_at:
                await link.ping()
                ping_at = loop.time() + _PING_EVERY_S

    def _lighten(self, too_large: list[LogRecord]) -> bool:
        """After a refusal for size: smaller batches; a single record loses its detail, or goes.

        Returns whether trying again at once can help.
        """
        if len(too_large) > 1:
            self._batch_max_bytes = max(1024, self._batch_max_bytes // 2)
            _log.warning("log_batch_too_large", batch_max_bytes=self._batch_max_bytes)
            return True
        for number, records in self._spool.peek(_ROUND_FRAMES, _ROUND_BYTES):
            for at, record in enumerate(records):
                if record == too_large[0] and (number, at) not in self._acknowledged:
                    return self._lighten_record(number, records, at)
        return False

    def _lighten_record(self, number: int, records: list[LogRecord], at: int) -> bool:
        record = records[at]
        lighter = without_detail(record)
        if lighter is not record:
            try:
                self._spool.replace(number, [*records[:at], lighter, *records[at + 1 :]])
            except DsecError as error:
                _log.error("log_spool_refuses", reason=error.message)
                return False
            self._shedder.count(record.topic, details=1)
            return True
        # Kafka takes it in no form. Its place is marked as done: positions must not shift.
        self._acknowledged.add((number, at))
        self.refused += 1
        self._shedder.dropped([record])
        _log.error("log_record_refused", topic=record.topic, size_bytes=len(record.value))
        return True

    def _announce(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()
