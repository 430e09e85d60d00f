"""The connection to Kafka under the log: settings, topics, a producer that sends batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    NoError,
    RecordListTooLargeError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.partitioner import murmur2

from dsec_common.errors import DsecError, ErrorCode, invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsec_common.log_frame import LogRecord

_log = structlog.get_logger(__name__)

# It logs every attempt on a lost broker as an error, ten a second; the log says a loss once.
if logging.getLogger("aiokafka").level == logging.NOTSET:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

KAFKA_FAILURES: Final = (KafkaError, OSError, TimeoutError)
"""What a lost or refusing Kafka raises; everything else is a fault of ours."""

_PORT_MAX: Final = 65535
_TOPIC_MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
_METADATA_PAUSE_S: Final = 0.05


class KafkaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Kafka is reached, and how missing topics are made.

    Attributes:
        bootstrap_servers: ``host:port``, several with commas between.
        partitions: of a topic that is missing and is made.
        replication_factor: of such a topic; -1 takes the broker's own default.
        retention_s: how long such a topic keeps its records; 0 takes the broker's own default.
        request_timeout_s: after this long without an answer the connection is made anew.
        security_protocol: ``PLAINTEXT``, ``SSL``, ``SASL_PLAINTEXT`` or ``SASL_SSL``.
        sasl_mechanism: ``PLAIN``, ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``.
        sasl_username: with the SASL protocols.
        sasl_password: same.
        ca_file: certificates to trust with the SSL protocols; empty: the system's.
    """

    bootstrap_servers: str
    partitions: int = 8
    replication_factor: int = 1
    retention_s: int = 0
    request_timeout_s: float = 10.0
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str = ""
    sasl_password: str = ""
    ca_file: str = ""

    def __post_init__(self) -> None:
        """Refuse what can never work, before any connection.

        Raises:
            DsecError: ``invalid``, naming the setting.
        """
        for server in self.bootstrap_servers.split(","):
            host, _, port = server.strip().rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
                raise invalid(
                    f"Kafka's address {server!r} in {self.bootstrap_servers!r} is not host:port"
                )
        if self.partitions < 1 or self.request_timeout_s <= 0:
            raise invalid("partitions must be at least 1 and request_timeout_s above 0")

    def connection(self) -> dict[str, Any]:
        """Return what every aiokafka client takes to connect."""
        settings: dict[str, Any] = {
            "bootstrap_servers": [part.strip() for part in self.bootstrap_servers.split(",")],
            "request_timeout_ms": int(self.request_timeout_s * 1000),
            "security_protocol": self.security_protocol,
        }
        if self.security_protocol.endswith("SSL"):
            settings["ssl_context"] = ssl.create_default_context(cafile=self.ca_file or None)
        if self.security_protocol.startswith("SASL"):
            settings["sasl_mechanism"] = self.sasl_mechanism
            settings["sasl_plain_username"] = self.sasl_username
            settings["sasl_plain_password"] = self.sasl_password
        return settings


async def ensure_topics(config: KafkaConfig, topics: Iterable[str]) -> None:
    """Make the topics that are missing. Safe to call again and from several processes at once.

    Raises:
        KafkaError: when Kafka is not reached.
        DsecError: ``denied`` or ``unavailable`` when Kafka refuses to make one.
    """
    admin = AIOKafkaAdminClient(**config.connection())
    try:
        await admin.start()
        missing = set(topics) - set(await admin.list_topics())
        if not missing:
            return
        answer = await admin.create_topics(
            [
                NewTopic(
                    topic,
                    config.partitions,
                    config.replication_factor,
                    topic_configs=_topic_settings(config),
                )
                for topic in sorted(missing)
            ]
        )
        for topic, code, *rest in answer.topic_errors:
            error = for_code(code)
            if error not in (NoError, TopicAlreadyExistsError):
                denied = error.__name__.endswith("AuthorizationFailedError")
                raise DsecError(
                    ErrorCode.DENIED if denied else ErrorCode.UNAVAILABLE,
                    f"Kafka at {config.bootstrap_servers} did not make topic {topic!r}: "
                    f"{(rest[0] if rest else None) or error.__name__}. Make the topic by hand, "
                    "or allow this client to.",
                    details={"topic": topic},
                )
    finally:
        await admin.close()


def _topic_settings(config: KafkaConfig) -> dict[str, str]:
    settings = {"max.message.bytes": str(_TOPIC_MAX_MESSAGE_BYTES)}
    if config.retention_s:
        settings["retention.ms"] = str(config.retention_s * 1000)
    return settings


async def is_ready(config: KafkaConfig) -> bool:
    """Whether Kafka answers and has a broker that takes requests.

    Raises:
        OSError: when nobody listens at its first address.
    """
    host, _, port = config.bootstrap_servers.split(",")[0].strip().rpartition(":")
    # aiokafka logs every refused connection as an error; a plain one asks more quietly.
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    admin = AIOKafkaAdminClient(**config.connection())
    try:
        await admin.start()
        return bool((await admin.describe_cluster())["brokers"])
    except KAFKA_FAILURES:
        return False
    finally:
        await admin.close()


def has_connection(client: Any) -> bool:
    """Whether an aiokafka client has a connection to any broker now; asks nobody."""
    return any(connection.connected() for connection in client._conns.values())  # noqa: SLF001  it offers no other way


class RecordsTooLargeError(Exception):
    """Kafka refused a batch for its size; the records in it."""

    def __init__(self, records: list[LogRecord]) -> None:
        super().__init__(f"a batch of {len(records)} records is too large for Kafka")
        self.records = records


_hash_of_key: Final = lru_cache(maxsize=65536)(lambda key: murmur2(key) & 0x7FFFFFFF)


class KafkaLink:
    """One connected, idempotent producer (acks=all). After any failure it is closed, never reused.

    Batches of one partition must be sent one after the other; then their order holds.
    """

    def __init__(self, config: KafkaConfig, compression: str, batch_max_bytes: int) -> None:
        self._config = config
        self._partitions: dict[str, list[int]] = {}
        self._producer = AIOKafkaProducer(
            **config.connection(),
            acks="all",
            enable_idempotence=True,
            compression_type=None if compression == "none" else compression,
            max_batch_size=batch_max_bytes,
        )

    @classmethod
    async def open(cls, config: KafkaConfig, *, compression: str, batch_max_bytes: int) -> Self:
        """Connect.

        Raises:
            KafkaError: when Kafka is not reached.
        """
        link = cls(config, compression, batch_max_bytes)
        try:
            await link._producer.start()
        except BaseException:
            await link.close()
            raise
        return link

    async def prepare(self, topics: set[str]) -> None:
        """Make missing topics and learn their partitions, once for each connection."""
        unknown = topics - self._partitions.keys()
        if not unknown:
            return
        await ensure_topics(self._config, unknown)
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        for topic in unknown:
            while True:
                with contextlib.suppress(UnknownTopicOrPartitionError):
                    partitions = await self._producer.partitions_for(topic)
                    if partitions:
                        self._partitions[topic] = sorted(partitions)
                        break
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(f"topic {topic} has no partitions yet")
                await asyncio.sleep(_METADATA_PAUSE_S)

    async def ping(self) -> None:
        """Ask Kafka for its metadata.

        Raises:
            KafkaError: when no broker answers, or the topics are not what they were: some brokers
                forget them over a restart, and some make them again with fewer partitions.
        """
        if not await self._producer.client.force_metadata_update():
            raise KafkaConnectionError("no broker answers")
        self.check()

    def check(self) -> None:
        """Look, without asking Kafka, whether the connection is still good.

        The client learns of a connection that breaks at once, and then of the topics anew.

        Raises:
            KafkaError: as :meth:`ping`.
        """
        if self._producer._sender.sender_task.done():  # noqa: SLF001  nothing else tells
            raise KafkaError("the producer has failed")
        if not has_connection(self._producer.client):
            raise KafkaConnectionError("the connection is lost")
        for topic, partitions in self._partitions.items():
            if self._producer.client.cluster.partitions_for_topic(topic) != set(partitions):
                raise UnknownTopicOrPartitionError(f"topic {topic} was made anew")

    def partition_of(self, record: LogRecord) -> tuple[str, int]:
        """Return topic and partition: murmur2 of the key, as every Kafka client's default."""
        partitions = self._partitions[record.topic]
        return record.topic, partitions[_hash_of_key(record.key) % len(partitions)]

    async def send(self, topic: str, partition: int, records: list[LogRecord]) -> None:
        """Send records of one partition, in order; return when Kafka has acknowledged all.

        Raises:
            RecordsTooLargeError: when a batch is more than the topic takes.
            KafkaError: anything else that Kafka refuses.
        """
        at = 0
        while at < len(records):
            batch = self._producer.create_batch()
            start = at
            while at < len(records):
                record = records[at]
                added = batch.append(key=record.key, value=record.value, timestamp=record.time_ms)
                if added is None:
                    break
                at += 1
            try:
                acknowledged = await self._producer.send_batch(batch, topic, partition=partition)
                await acknowledged
            except (MessageSizeTooLargeError, RecordListTooLargeError):
                raise RecordsTooLargeError(records[start:at]) from None

    async def close(self) -> None:
        """Close the connections at once; never raises. What is not acknowledged is not waited for.

        aiokafka's own stop waits until every batch is acknowledged, for ever when the broker is
        gone. Here its sockets go first, so that requests under way fail; then the task that sends;
        then the one that keeps the metadata, which the former may be waiting for.
        """
        producer = self._producer
        producer._closed = True  # noqa: SLF001  else it complains when collected
        try:
            for connection in list(producer.client._conns.values()):  # noqa: SLF001  see above
                connection.close()
            async with asyncio.timeout(self._config.request_timeout_s):
                await producer._sender.close()  # noqa: SLF001  see above
        except Exception as error:  # noqa: BLE001  it is being thrown away
            _log.debug("log_link_closed_hard", reason=repr(error))
        with contextlib.suppress(*KAFKA_FAILURES):
            await producer.client.close()
