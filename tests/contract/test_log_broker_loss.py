"""Kafka absent at the start, stopped, killed: the log goes on and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Options, Rdict

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import SPOOL_SHED, KafkaConfig, LogConfig, LogProducer, SequenceCounter
from dsec_common.log_frame import LogRecord
from dsec_common.log_spool import Spool
from dsec_common.testing.kafka import kafka_for_tests
from dsec_common.topics import BEHAVIOR_LOGS, behavior_logs
from kafka_brokers import PROVIDERS
from kafka_readers import read_back, reader, take, take_until

FLUSH_S = 60.0


def step(project: str, seq: int, **fields: Any) -> BehaviorLog:
    defaults = {"sandbox_id": "node-1.a", "action": "step"}
    return BehaviorLog(project=project, seq=seq, **(defaults | fields))


@contextlib.asynccontextmanager
async def writing(producer: LogProducer, project: str) -> AsyncIterator[SequenceCounter]:
    """Append a record every few milliseconds until the block ends."""
    counter = SequenceCounter()

    async def write() -> None:
        while True:
            producer.append(step(project, counter.next("node-1.a")))
            await asyncio.sleep(0.002)

    task = asyncio.create_task(write())
    try:
        yield counter
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def disconnected(producer: LogProducer) -> None:
    async with asyncio.timeout(30):
        while producer.connected:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_broker_stopped_and_started_again_in_the_middle_loses_nothing(
    provider: str, project: str, tmp_path: Path
) -> None:
    async with (
        kafka_for_tests(provider) as kafka,
        LogProducer(kafka.log_config(tmp_path), "test") as producer,
        reader(kafka, project) as consumer,
    ):
        async with writing(producer, project) as counter:
            assert [record.seq for record in await take(consumer, 20)] == list(range(1, 21))
            await kafka.provider.stop()
            await disconnected(producer)
            await kafka.provider.start()
            await producer.wait_connected()
        await producer.flushed(FLUSH_S)
        last = counter.last("node-1.a")
        # The reader that lived through it, and one that comes afterwards.
        records = await take_until(consumer, lambda record: record.seq == last)
        assert [record.seq for record in records] == list(range(21, last + 1))
        assert [record.seq for record in await read_back(kafka, project, last)] == list(
            range(1, last + 1)
        )
        assert producer.stats.reconnections == 1


async def test_a_broker_killed_in_the_middle_loses_nothing(project: str, tmp_path: Path) -> None:
    async with (
        kafka_for_tests("apache") as kafka,
        LogProducer(kafka.log_config(tmp_path), "test") as producer,
    ):
        async with writing(producer, project) as counter:
            async with reader(kafka, project) as consumer:
                await take(consumer, 20)
            for _ in range(2):
                kafka.provider.kill()
                await disconnected(producer)
                await kafka.provider.start()
                await producer.wait_connected()
        await producer.flushed(FLUSH_S)
        last = counter.last("node-1.a")
        assert [record.seq for record in await read_back(kafka, project, last)] == list(
            range(1, last + 1)
        )


@pytest.mark.parametrize("group_id", [None, "group"])
async def test_a_reader_of_a_lost_broker_says_so_and_stops_at_once(
    group_id: str | None, project: str, tmp_path: Path
) -> None:
    async with (
        kafka_for_tests() as kafka,
        LogProducer(kafka.log_config(tmp_path), "test") as producer,
        reader(kafka, project, group_id=group_id) as consumer,
    ):
        producer.append(step(project, 1))
        await take(consumer, 1)
        await kafka.provider.stop()
        waiting = asyncio.create_task(take(consumer, 1))
        async with asyncio.timeout(20):
            while consumer.connected:
                await asyncio.sleep(0.05)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(20):
            await consumer.stop()


async def test_a_reader_that_waits_for_kafka_can_be_cancelled(project: str) -> None:
    async with kafka_for_tests(started=False) as kafka:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), reader(kafka, project):
                pass


async def test_kafka_may_come_after_its_writers_and_readers(project: str, tmp_path: Path) -> None:
    async with (
        kafka_for_tests(started=False) as kafka,
        LogProducer(kafka.log_config(tmp_path), "test") as producer,
    ):
        for seq in range(1, 101):
            producer.append(step(project, seq))
        await producer.durable()
        assert not producer.connected
        assert producer.stats.pending_frames > 0
        with pytest.raises(DsecError) as late:
            await producer.flushed(0.05)
        assert late.value.code is ErrorCode.TIMEOUT
        reading = asyncio.create_task(read_back(kafka, project, 100))
        await kafka.provider.start()
        assert [record.seq for record in await reading] == list(range(1, 101))
        assert producer.connected


async def test_what_an_absent_kafka_did_not_take_goes_out_at_the_next_start(
    project: str, tmp_path: Path
) -> None:
    async with kafka_for_tests(started=False) as kafka:
        config = kafka.log_config(tmp_path)
        producer = LogProducer(config, "test")
        await producer.start()
        for seq in range(1, 101):
            producer.append(step(project, seq))
        async with asyncio.timeout(20):
            await producer.stop(timeout_s=60)
            await producer.stop()
        assert producer.stats.pending_frames > 0
        with pytest.raises(DsecError) as stopped:
            producer.append(step(project, 101))
        assert stopped.value.code is ErrorCode.UNAVAILABLE
        await kafka.provider.start()
        async with LogProducer(config, "test") as producer:
            producer.append(step(project, 101))
            await producer.flushed(FLUSH_S)
        assert [record.seq for record in await read_back(kafka, project, 101)] == list(
            range(1, 102)
        )


async def test_a_full_spool_keeps_the_facts_and_says_in_the_log_what_it_shed(
    project: str, tmp_path: Path
) -> None:
    async with kafka_for_tests(started=False) as kafka:
        config = kafka.log_config(tmp_path, spool_max_bytes=300_000)
        async with LogProducer(config, "test") as producer:
            for seq in range(1, 1001):
                producer.append(step(project, seq, output_text="x" * 1_000, tokens_out=seq))
            await producer.durable()
            stats = producer.stats
            assert stats.pending_bytes <= 300_000
            assert stats.details_shed > 500
            assert stats.records_shed == 0
            await kafka.provider.start()
            await producer.flushed(FLUSH_S)
        records = await read_back(kafka, project, 1001)
    steps = [record for record in records if record.action == "step"]
    said = [record for record in records if record.action == SPOOL_SHED]
    assert [record.seq for record in steps] == list(range(1, 1001))
    assert all(record.tokens_out == record.seq for record in steps)
    assert steps[0].detail_shed
    assert not steps[-1].detail_shed
    assert said
    assert int(said[0].attributes["details_shed_total"]) > 0


async def test_a_dead_processs_spool_is_adopted_by_another_service(
    project: str, tmp_path: Path
) -> None:
    left = Spool.create(tmp_path, "other")
    for seq in range(1, 51):
        value = step(project, seq).serialize()
        left.put([LogRecord(behavior_logs(project), b"node-1.a", value, 1, is_behavior=True)])
    left.close()
    async with kafka_for_tests() as kafka:
        config = kafka.log_config(tmp_path, adopt_interval_s=0.1)
        async with LogProducer(config, "test") as producer:
            assert [record.seq for record in await read_back(kafka, project, 50)] == list(
                range(1, 51)
            )
            await producer.flushed(FLUSH_S)
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240  a local directory


async def test_a_living_processs_spool_is_left_alone(tmp_path: Path) -> None:
    living = Spool.create(tmp_path, "other")
    living.put([LogRecord(BEHAVIOR_LOGS, b"node-1.a", b"", 1, is_behavior=True)])
    config = LogConfig(
        kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1"), spool_directory=str(tmp_path)
    )
    async with LogProducer(config, "test") as producer:
        await producer._adopt_one(living.directory)
        assert producer.stats.pending_frames == 0
    assert living.pending_frames == 1
    living.close()


async def test_a_spool_that_refuses_holds_the_records_until_it_takes_them_again(
    project: str, tmp_path: Path
) -> None:
    async with kafka_for_tests() as kafka:
        async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
            await producer.wait_connected()
            spool = producer._open_spool()
            working = spool._database
            broken = Rdict(str(tmp_path / "broken"), options=Options(raw_mode=True))
            broken.close()
            spool._database = broken
            producer.append(step(project, 1))
            with pytest.raises(DsecError) as refused:
                await producer.durable()
            assert refused.value.code is ErrorCode.UNAVAILABLE
            spool._database = working
            await producer.flushed(FLUSH_S)
        assert [record.seq for record in await read_back(kafka, project, 1)] == [1]


@pytest.mark.parametrize(
    "address", ["", "nowhere", "host:", "host:0", "host:99999", ":9092", "a:1,b"]
)
def test_an_address_that_cannot_be_is_refused_before_any_connection(address: str) -> None:
    with pytest.raises(DsecError, match="host:port") as refused:
        KafkaConfig(bootstrap_servers=address)
    assert refused.value.code is ErrorCode.INVALID
