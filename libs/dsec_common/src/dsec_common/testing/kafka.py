"""A real Kafka for a test, on a free port, gone afterwards with its data."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsec_common.embedded.kafka import open_kafka
from dsec_common.log import KafkaConfig, LogConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dsec_common.embedded.kafka import KafkaProvider

TEST_PARTITIONS: Final = 3


class KafkaForTests:
    """A broker, and settings of whoever a test wants to be."""

    def __init__(self, provider: KafkaProvider) -> None:
        self.provider = provider

    @property
    def bootstrap_servers(self) -> str:
        """The broker's ``host:port``."""
        return self.provider.bootstrap_servers

    @property
    def config(self) -> KafkaConfig:
        """Return how the broker is reached; topics are made with three partitions."""
        return KafkaConfig(bootstrap_servers=self.bootstrap_servers, partitions=TEST_PARTITIONS)

    def log_config(self, spool_directory: Path, **settings: Any) -> LogConfig:
        """Return a producer's settings, with anything of :class:`LogConfig` changed."""
        defaults = {"reconnect_max_s": 0.5}
        return LogConfig(
            kafka=self.config, spool_directory=str(spool_directory), **(defaults | settings)
        )


@contextlib.asynccontextmanager
async def kafka_for_tests(
    provider: str = "embedded", *, started: bool = True
) -> AsyncIterator[KafkaForTests]:
    """Yield a broker; leave nothing behind.

    Args:
        provider: ``embedded`` or ``apache``.
        started: false for a test that starts it later, on the port it has already.
    """
    with tempfile.TemporaryDirectory(prefix=f"dsec-kafka-{provider}-") as directory:
        kafka = open_kafka(provider, Path(directory))
        await kafka.start()
        try:
            if not started:
                await kafka.stop()
            yield KafkaForTests(kafka)
        finally:
            await kafka.stop()
