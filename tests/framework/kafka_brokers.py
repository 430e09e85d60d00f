"""Brokers that the tests of one module share; at no time is more than one JVM alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from uuid import uuid4

import pytest

from dsec_common.testing.kafka import KafkaForTests, kafka_for_tests

PROVIDERS = ("embedded", "apache")


@contextlib.contextmanager
def running(provider: str) -> Iterator[KafkaForTests]:
    """Yield a broker outside any test's event loop."""
    with asyncio.Runner() as runner:
        context = kafka_for_tests(provider)
        kafka = runner.run(context.__aenter__())
        try:
            yield kafka
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module", params=PROVIDERS)
def kafka(request: pytest.FixtureRequest) -> Iterator[KafkaForTests]:
    """The embedded broker, then Apache Kafka itself."""
    with running(request.param) as broker:
        yield broker


@pytest.fixture
def project() -> str:
    """A project of the test's own, and so a topic of its own."""
    return f"p{uuid4().hex[:12]}"
