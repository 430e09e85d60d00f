"""What the log promises, held against the embedded broker and against Apache Kafka itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import LogConsumer, LogProducer, SequenceCounter, StartAt, ensure_topics
from dsec_common.log_pace import Pace
from dsec_common.testing.kafka import KafkaForTests
from dsec_common.topics import METERING, behavior_logs
from kafka_readers import READ_TIMEOUT_S, plain_consumer, read_back, reader, take, take_until
from log_processes import kill_after, writer_process

FLUSH_S = 30.0


def step(sandbox: str, project: str, seq: int = 0, **fields: Any) -> BehaviorLog:
    defaults = {"action": "step"}
    return BehaviorLog(sandbox_id=sandbox, project=project, seq=seq, **(defaults | fields))


async def test_each_sandboxs_records_arrive_in_the_order_they_were_appended(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    counter = SequenceCounter()
    sandboxes = [f"node-1.s{number}" for number in range(20)]
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for _ in range(100):
            for sandbox in sandboxes:
                producer.append(step(sandbox, project, counter.next(sandbox)))
            await asyncio.sleep(0)
        await producer.flushed(FLUSH_S)
        assert producer.stats.sent == 2000
        assert producer.stats.pending_bytes == 0
    records = await read_back(kafka, project, 2000)
    for sandbox in sandboxes:
        assert [r.seq for r in records if r.sandbox_id == sandbox] == list(range(1, 101))


async def test_a_records_partition_is_the_one_every_kafka_client_would_choose(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    sandboxes = [f"node-1.s{number}" for number in range(12)]
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for sandbox in sandboxes:
            producer.append(step(sandbox, project, 1))
        await producer.flushed(FLUSH_S)
    other = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers)
    await other.start()
    try:
        for sandbox in sandboxes:
            value = step(sandbox, project, 2).serialize()
            await other.send_and_wait(behavior_logs(project), value, key=sandbox.encode())
    finally:
        await other.stop()
    partitions: dict[bytes, set[int]] = {}
    async with plain_consumer(kafka, project) as consumer:
        for _ in range(24):
            message = await asyncio.wait_for(anext(consumer), 60)
            partitions.setdefault(message.key, set()).add(message.partition)
    assert len(partitions) == 12
    assert all(len(found) == 1 for found in partitions.values())


async def test_a_plain_kafka_consumer_reads_the_log_with_parse_as_its_deserializer(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    written = step(
        "node-1.a",
        project,
        1,
        agent="web_crawler",
        latency_ms=142.0,
        tokens_out=89,
        input_prompt="what?",
        output_text="that",
        status="200",
        time_us=1_718_461_323_127_000,
    )
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        producer.append(written)
        await producer.flushed(FLUSH_S)
    consumer = AIOKafkaConsumer(
        behavior_logs(project),
        bootstrap_servers=kafka.bootstrap_servers,
        auto_offset_reset="earliest",
        value_deserializer=BehaviorLog.parse,
    )
    await consumer.start()
    try:
        message = await asyncio.wait_for(anext(consumer), 60)
    finally:
        await consumer.stop()
    assert message.value == written
    assert message.key == b"node-1.a"
    assert message.timestamp == 1_718_461_323_127


async def test_a_record_that_was_sent_twice_is_read_once(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for seq in (1, 2, 3, 2, 3, 4):
            producer.append(step("node-1.a", project, seq))
        await producer.flushed(FLUSH_S)
    async with reader(kafka, project) as consumer:
        assert [record.seq for record in await take(consumer, 4)] == [1, 2, 3, 4]
        assert consumer.sequence.duplicates == 2
        assert consumer.sequence.missing == 0


async def test_a_missing_number_is_noticed_and_a_late_one_is_still_read(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for seq in (1, 4, 3):
            producer.append(step("node-1.a", project, seq))
        await producer.flushed(FLUSH_S)
    async with reader(kafka, project) as consumer:
        assert [record.seq for record in await take(consumer, 3)] == [1, 4, 3]
        assert consumer.sequence.missing == 1


async def test_a_killed_process_loses_nothing_that_was_durable(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with writer_process(kafka.bootstrap_servers, tmp_path, "killed", project) as process:
        durable = await kill_after(process, 2000)
    async with LogProducer(kafka.log_config(tmp_path), "killed") as producer:
        await producer.flushed(FLUSH_S)
        records = await read_back(kafka, project, durable)
    assert [record.seq for record in records] == list(range(1, durable + 1))
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240  a local directory


async def test_a_process_killed_without_kafka_loses_nothing_that_was_durable(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with writer_process("127.0.0.1:1", tmp_path, "killed", project) as process:
        durable = await kill_after(process, 500)
    async with LogProducer(kafka.log_config(tmp_path), "killed") as producer:
        producer.append(step("node-1.killed", project, 0, action="after"))
        records = await take_all(kafka, project)
        await producer.flushed(FLUSH_S)
    assert [record.seq for record in records][:durable] == list(range(1, durable + 1))
    assert records[-1].action == "after"


async def take_all(kafka: KafkaForTests, project: str) -> list[BehaviorLog]:
    async with reader(kafka, project) as consumer:
        return await take_until(consumer, lambda record: record.action == "after")


async def test_twenty_thousand_records_pass_through(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    counter = SequenceCounter()
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for number in range(20_000):
            sandbox = f"node-1.s{number % 64}"
            producer.append(
                step(sandbox, project, counter.next(sandbox), attributes={"n": str(number)})
            )
            if number % 500 == 0:
                await asyncio.sleep(0)
        await producer.flushed(FLUSH_S)
    records = await read_back(kafka, project, 20_000)
    assert {record.attributes["n"] for record in records} == {str(n) for n in range(20_000)}


async def test_a_prompt_of_three_megabytes_arrives_whole(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    prompt = "".join(f"{number:08x} " for number in range(350_000))
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        producer.append(step("node-1.a", project, 1, input_prompt=prompt))
        producer.append(step("node-1.a", project, 2))
        await producer.flushed(FLUSH_S)
    first, second = await read_back(kafka, project, 2)
    assert first.input_prompt == prompt
    assert second.seq == 2


async def test_a_record_over_the_limit_loses_its_detail_and_says_so(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    config = kafka.log_config(tmp_path, record_max_bytes=10_000)
    async with LogProducer(config, "test") as producer:
        producer.append(step("node-1.a", project, 1, output_text="x" * 20_000, tokens_out=7))
        with pytest.raises(DsecError, match="larger than 10000") as refused:
            producer.append(step("node-1.a", project, 2, agent="x" * 20_000))
        assert refused.value.code is ErrorCode.INVALID
        await producer.flushed(FLUSH_S)
        assert producer.stats.details_shed == 1
    async with reader(kafka, project) as consumer:
        records = await take(consumer, 2)
    light = next(record for record in records if record.action == "step")
    assert light.detail_shed
    assert light.tokens_out == 7
    assert light.output_text == ""


async def test_what_the_broker_finds_too_large_is_split_then_lightened_then_refused(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    try:
        limit = {"max.message.bytes": "20000"}
        await admin.create_topics([NewTopic(behavior_logs(project), 1, 1, topic_configs=limit)])
    finally:
        await admin.close()
    config = kafka.log_config(tmp_path, compression="none")
    async with LogProducer(config, "test") as producer:
        producer.append(step("node-1.a", project, 1, output_text="x" * 40_000))
        producer.append(step("node-1.a", project, 2, agent="x" * 40_000))
        for seq in range(3, 40):
            producer.append(step("node-1.a", project, seq, output_text="y" * 3_000))
        await producer.flushed(FLUSH_S)
        stats = producer.stats
    assert stats.records_refused == 1
    assert stats.records_shed == 1
    async with reader(kafka, project, where=lambda record: record.action == "step") as consumer:
        records = await take(consumer, 38)
    assert [record.seq for record in records] == [1, *range(3, 40)]
    assert records[0].detail_shed
    assert records[1].output_text == "y" * 3_000


async def test_a_topic_that_the_broker_forgot_is_made_again(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        producer.append(step("node-1.a", project, 1))
        await producer.flushed(FLUSH_S)
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
        await admin.start()
        try:
            await admin.delete_topics([behavior_logs(project)])
        finally:
            await admin.close()
        producer.append(step("node-1.a", project, 2))
        await producer.flushed(FLUSH_S)
    (record,) = await read_back(kafka, project, 1)
    assert record.seq == 2


async def test_another_topics_payload_goes_through_the_same_spool(
    kafka: KafkaForTests, tmp_path: Path
) -> None:
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        producer.append_raw(METERING, b"node-1", b"units=100")
        await producer.flushed(FLUSH_S)
    consumer = AIOKafkaConsumer(
        METERING, bootstrap_servers=kafka.bootstrap_servers, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        message = await asyncio.wait_for(anext(consumer), 60)
    finally:
        await consumer.stop()
    assert (message.key, message.value) == (b"node-1", b"units=100")


async def test_a_group_goes_on_behind_the_last_record_it_handled(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for seq in range(1, 11):
            producer.append(step("node-1.a", project, seq))
        await producer.flushed(FLUSH_S)
    async with reader(kafka, project, group_id=f"group-{project}") as consumer:
        assert [record.seq for record in await take(consumer, 5)] == [1, 2, 3, 4, 5]
    async with reader(kafka, project, group_id=f"group-{project}") as consumer:
        # The fifth was handed out, but its reader stopped before it came back for another.
        assert [record.seq for record in await take(consumer, 6)] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_reader_that_starts_at_the_end_sees_only_what_comes_after(
    kafka: KafkaForTests, project: str, tmp_path: Path, *, grouped: bool
) -> None:
    group_id = f"group-{project}" if grouped else None
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for seq in range(1, 11):
            producer.append(step("node-1.a", project, seq))
        await producer.flushed(FLUSH_S)
        async with reader(kafka, project, group_id=group_id, start_at=StartAt.LATEST) as consumer:
            producer.append(step("node-1.a", project, 11))
            assert [record.seq for record in await take(consumer, 1)] == [11]


async def test_a_filter_returns_only_what_was_asked_for(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        for number in range(10):
            producer.append(step(f"node-1.s{number % 2}", project, number // 2 + 1))
        await producer.flushed(FLUSH_S)
    async with reader(
        kafka, project, where=lambda record: record.sandbox_id == "node-1.s1"
    ) as consumer:
        assert {record.sandbox_id for record in await take(consumer, 5)} == {"node-1.s1"}


async def test_a_reader_of_all_projects_finds_a_project_that_begins_later(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with (
        LogConsumer(kafka.config, projects=None, start_at=StartAt.LATEST) as consumer,
        LogProducer(kafka.log_config(tmp_path), "test") as producer,
    ):
        producer.append(step("node-1.a", project, 1))
        await producer.flushed(FLUSH_S)
        records = await take_until(consumer, lambda record: record.project == project)
    assert records[-1].seq == 1


class LongPause(Pace):
    """Waits for a minute whatever comes, which no test does."""

    def pause_s(self, now_s: float) -> float:
        return 60.0


async def test_a_reader_in_a_long_pause_reads_at_once_when_the_broker_tells_or_somebody_waits(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    async with (
        reader(kafka, project) as consumer,
        LogProducer(kafka.log_config(tmp_path), "test") as producer,
    ):
        producer.append(step("node-1.a", project, 1))
        assert [record.seq for record in await take(consumer, 1)] == [1]
        consumer._pace = LongPause(0.0)
        holds_fetches = kafka.provider.name == "apache"
        coming = asyncio.create_task(take(consumer, 1))
        async with asyncio.timeout(READ_TIMEOUT_S):
            consumer.hurry()
            while consumer._hurried.is_set() and not holds_fetches:
                await asyncio.sleep(0.001)  # it asks once more, and then waits
        producer.append(step("node-1.a", project, 2))
        await producer.flushed(FLUSH_S)
        if not holds_fetches:
            consumer.hurry()
        assert [record.seq for record in await coming] == [2]


async def test_a_value_that_is_no_behaviour_log_is_counted_and_skipped(
    kafka: KafkaForTests, project: str, tmp_path: Path
) -> None:
    topic = behavior_logs(project)
    async with LogProducer(kafka.log_config(tmp_path), "test") as producer:
        producer.append_raw(topic, b"node-1.a", b"\xff\xff not protobuf")
        producer.append(step("node-1.a", project, 1))
        await producer.flushed(FLUSH_S)
    async with reader(kafka, project) as consumer:
        assert [record.seq for record in await take(consumer, 1)] == [1]
        assert consumer.unreadable == 1


async def test_topics_may_be_made_by_many_at_once(kafka: KafkaForTests, project: str) -> None:
    topics = [behavior_logs(project)]
    await asyncio.gather(*(ensure_topics(kafka.config, topics) for _ in range(4)))
    await ensure_topics(kafka.config, topics)
