"""Reading a log back in a test, with a bound on the wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer

from dsec_common.behavior import BehaviorLog
from dsec_common.log import LogConsumer, StartAt
from dsec_common.testing.kafka import KafkaForTests
from dsec_common.topics import behavior_logs

READ_TIMEOUT_S = 30.0


@contextlib.asynccontextmanager
async def reader(
    kafka: KafkaForTests,
    project: str,
    *,
    group_id: str | None = None,
    start_at: StartAt = StartAt.EARLIEST,
    where: Callable[[BehaviorLog], bool] | None = None,
) -> AsyncIterator[LogConsumer]:
    """Yield a connected consumer of one project's logs."""
    async with LogConsumer(
        kafka.config, projects=[project], group_id=group_id, start_at=start_at, where=where
    ) as consumer:
        yield consumer


async def take(consumer: LogConsumer, count: int) -> list[BehaviorLog]:
    """Return the next records; fails when they do not come."""
    records: list[BehaviorLog] = []
    async with asyncio.timeout(READ_TIMEOUT_S):
        while len(records) < count:
            records.append(await anext(consumer))
    return records


async def take_until(
    consumer: LogConsumer, is_last: Callable[[BehaviorLog], bool]
) -> list[BehaviorLog]:
    """Return records up to the one that is the last."""
    records: list[BehaviorLog] = []
    async with asyncio.timeout(READ_TIMEOUT_S):
        async for record in consumer:
            records.append(record)
            if is_last(record):
                break
    return records


async def read_back(kafka: KafkaForTests, project: str, count: int) -> list[BehaviorLog]:
    """Return a project's first records, duplicates dropped."""
    async with reader(kafka, project) as consumer:
        return await take(consumer, count)


@contextlib.asynccontextmanager
async def plain_consumer(
    kafka: KafkaForTests, project: str, **settings: Any
) -> AsyncIterator[AIOKafkaConsumer]:
    """Yield a Kafka consumer as any user would write it."""
    consumer = AIOKafkaConsumer(
        behavior_logs(project),
        bootstrap_servers=kafka.bootstrap_servers,
        auto_offset_reset="earliest",
        **settings,
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()
