"""Reading the metering records of all projects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from dsec_common.errors import DsecError
from dsec_common.log_reader import TopicReader
from dsec_common.metering import MeterRecord, decode_segment
from dsec_common.topics import METERING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_common.log_kafka import KafkaConfig

_log = structlog.get_logger(__name__)


class MeterConsumer(TopicReader[MeterRecord]):
    """An async iterator over metering records, as Kafka has them: some may come twice."""

    def __init__(
        self, kafka: KafkaConfig, *, position: Mapping[tuple[str, int], int] | None = None
    ) -> None:
        """Take the settings; nothing is connected yet.

        Args:
            kafka: how Kafka is reached.
            position: what :attr:`position` was in an earlier life; without it all is read.
        """
        super().__init__(kafka, [METERING], position=position)

    def _accept(self, message: Any) -> MeterRecord | None:
        try:
            return decode_segment(message.value or b"")
        except DsecError as error:
            self.unreadable += 1
            _log.warning(
                "metering_record_unreadable",
                partition=message.partition,
                offset=message.offset,
                reason=error.message,
            )
            return None
