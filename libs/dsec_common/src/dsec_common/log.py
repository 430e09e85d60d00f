"""The behaviour log's writer and reader: Kafka behind a spool that loses nothing.

:class:`LogProducer` keeps every record in RocksDB before Kafka sees it; :class:`LogConsumer` hands
each record out once; :class:`MeterConsumer` reads what was used. This module is the door; the parts
are its neighbours ``log_*.py``, and they alone import aiokafka.
"""

from __future__ import annotations

from dsec_common.log_consumer import LogConsumer
from dsec_common.log_kafka import KafkaConfig, ensure_topics
from dsec_common.log_meters import MeterConsumer
from dsec_common.log_producer import LogConfig, LogProducer, LogStats
from dsec_common.log_reader import StartAt
from dsec_common.log_sequence import Arrival, SequenceCounter, SequenceTracker
from dsec_common.log_shed import SPOOL_SHED

__all__ = [
    "SPOOL_SHED",
    "Arrival",
    "KafkaConfig",
    "LogConfig",
    "LogConsumer",
    "LogProducer",
    "LogStats",
    "MeterConsumer",
    "SequenceCounter",
    "SequenceTracker",
    "StartAt",
    "ensure_topics",
]
