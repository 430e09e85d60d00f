"""Reading behaviour logs back: each record once, in order for each sandbox, gaps noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError
from dsec_common.log_reader import StartAt, TopicReader
from dsec_common.log_sequence import Arrival, SequenceTracker
from dsec_common.subjects import DEFAULT_PROJECT
from dsec_common.topics import ALL_BEHAVIOR_LOGS, BEHAVIOR_LOGS, behavior_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsec_common.log_kafka import KafkaConfig

_log = structlog.get_logger(__name__)


class LogConsumer(TopicReader[BehaviorLog]):
    """An async iterator over behaviour logs; an async context manager.

    Guarantees, beside those of every :class:`~dsec_common.log_reader.TopicReader`: a record that
    was sent twice is returned once (as long as this reader remembers it).

    Attributes:
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
            projects: whose logs; None reads every project's, new ones within 6 s of their start.
            group_id: as for every reader, like what follows.
            start_at: see there.
            where: only records for which it is true are returned.
            commit_interval_s: see there.
            position: see there.

        Raises:
            DsecError: ``invalid`` for a project that cannot be.
        """
        super().__init__(
            kafka,
            [BEHAVIOR_LOGS] if projects is None else [behavior_logs(name) for name in projects],
            pattern=ALL_BEHAVIOR_LOGS if projects is None else "",
            group_id=group_id,
            start_at=start_at,
            commit_interval_s=commit_interval_s,
            position=position,
        )
        self.sequence = SequenceTracker()
        self._where = where

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
