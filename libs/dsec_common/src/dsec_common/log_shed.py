"""Making room in a full spool: oldest first, detail before records, and never silently."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError
from dsec_common.log_frame import LogRecord
from dsec_common.log_spool import FRAME_OVERHEAD_BYTES
from dsec_common.topics import BEHAVIOR_LOGS, project_of

if TYPE_CHECKING:
    from dsec_common.log_spool import Spool

_log = structlog.get_logger(__name__)

SPOOL_SHED: Final = "spool_shed"
"""The action of the record that says how much was shed, so that readers know it too."""

_REPORT_EVERY_S: Final = 1.0


class Shedder:
    """Keeps a spool below its bound and counts what that cost.

    Attributes:
        details_shed: records that lost attributes, input_prompt and output_text.
        records_shed: records lost altogether.
    """

    def __init__(self, spool: Spool, max_bytes: int, name: str) -> None:
        self.details_shed = 0
        self.records_shed = 0
        self._spool = spool
        self._max_bytes = max_bytes
        self._name = name
        self._totals: dict[str, tuple[int, int]] = {}
        self._unsaid: set[str] = set()
        self._said_at = float("-inf")

    def make_room(self, extra_bytes: int, *, in_flight: int) -> None:
        """Shed until a frame of ``extra_bytes`` fits. Frames up to ``in_flight`` are left alone.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses.
        """
        extra_bytes += FRAME_OVERHEAD_BYTES
        while self._spool.pending_bytes + extra_bytes > self._max_bytes:
            number = self._spool.next_to_shed(in_flight)
            if number is None:
                break
            self._shed_detail(number)
        while self._spool.pending_bytes + extra_bytes > self._max_bytes:
            number = self._spool.next_waiting(in_flight)
            if number is None:
                break
            records = self._spool.read(number)
            if records is not None:
                self._spool.delete([number])
                self.dropped(records)

    def _shed_detail(self, number: int) -> None:
        records = self._spool.read(number)
        if records is None:
            return
        lighter = [without_detail(record) for record in records]
        self._spool.replace(number, lighter)
        for before, after in zip(records, lighter, strict=True):
            if after is not before:
                self.count(before.topic, details=1)

    def dropped(self, records: list[LogRecord]) -> None:
        """Count records that were lost."""
        for record in records:
            self.count(record.topic, records=1)

    def count(self, topic: str, *, details: int = 0, records: int = 0) -> None:
        """Count what a topic lost; :meth:`report` will say it."""
        if not self._totals:
            _log.warning("log_spool_sheds", topic=topic, max_bytes=self._max_bytes)
        known = self._totals.get(topic, (0, 0))
        self._totals[topic] = (known[0] + details, known[1] + records)
        self._unsaid.add(topic)
        self.details_shed += details
        self.records_shed += records

    def report(self, now_s: float) -> list[LogRecord]:
        """Return the records that say what was shed since the last report; at most once a second.

        Args:
            now_s: monotonic seconds.
        """
        if not self._unsaid or now_s - self._said_at < _REPORT_EVERY_S:
            return []
        return [self._notice(topic) for topic in sorted(self._unsaid)]

    def reported(self, now_s: float) -> None:
        """Note that what :meth:`report` returned is kept."""
        self._unsaid.clear()
        self._said_at = now_s

    @property
    def has_unsaid(self) -> bool:
        """Whether something was shed that no record says yet."""
        return bool(self._unsaid)

    def _notice(self, topic: str) -> LogRecord:
        details, records = self._totals[topic]
        try:
            project = project_of(topic)
        except DsecError:  # verdicts, metering: said where operators read
            topic, project = BEHAVIOR_LOGS, project_of(BEHAVIOR_LOGS)
        time_us = time.time_ns() // 1000
        notice = BehaviorLog(
            sandbox_id=f"spool.{self._name}",
            project=project,
            time_us=time_us,
            agent="dsec",
            agent_id=self._name,
            action=SPOOL_SHED,
            status="shed",
            attributes={
                "details_shed_total": str(details),
                "records_shed_total": str(records),
                "spool": self._spool.directory.name,
            },
        )
        key = notice.sandbox_id.encode()
        return LogRecord(topic, key, notice.serialize(), time_us // 1000, is_behavior=True)


def without_detail(record: LogRecord) -> LogRecord:
    """Return the record without its detail; the same object when it has none to lose."""
    if not record.is_behavior:
        return record
    log = BehaviorLog.parse(record.value)
    if log.action == SPOOL_SHED or not (log.attributes or log.input_prompt or log.output_text):
        return record
    return record._replace(value=log.without_detail().serialize())
