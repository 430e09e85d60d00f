"""The tracer against a real NATS and real Kafka brokers: what was logged is read back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

from dsec_common import subjects
from dsec_common.behavior import BehaviorLog
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log import LogProducer
from dsec_common.testing.kafka import KafkaForTests
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.topics import behavior_logs
from dsec_common.wire.trace import GetTrace, Trace
from dsec_tracer.config import TracerConfig
from dsec_tracer.service import TracerService
from kafka_brokers import kafka  # noqa: F401  a fixture

DEADLINE_S = 40.0


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests(projects=("acme",)) as running:
        yield running


@pytest.fixture
def sandbox_id() -> str:
    """A sandbox of the test's own: the brokers keep what other tests wrote."""
    return f"node-1.{uuid4().hex}"


def config(
    nats: NatsForTests, broker: KafkaForTests, directory: Path, name: str = "tracer"
) -> TracerConfig:
    return TracerConfig(
        name=name,
        nats_servers=(nats.server.url,),
        nats_credentials=str(nats.auth.service_credentials("tracer")),
        kafka_bootstrap=broker.bootstrap_servers,
        state_directory=str(directory / "state"),
        connect_timeout_s=10.0,
    )


@contextlib.asynccontextmanager
async def tracer(settings: TracerConfig) -> AsyncIterator[TracerService]:
    service = TracerService(settings)
    try:
        await service.start()
        async with asyncio.timeout(DEADLINE_S):
            while service.not_ready_reason():
                await asyncio.sleep(0.02)
        yield service
    finally:
        assert await service.stop() == 0


async def write(broker: KafkaForTests, directory: Path, *records: BehaviorLog) -> None:
    async with LogProducer(broker.log_config(directory / "spool"), "test") as producer:
        for record in records:
            producer.append(record)
        await producer.durable()


def step(sandbox_id: str, seq: int, project: str = "default", **more: object) -> BehaviorLog:
    return BehaviorLog(
        sandbox_id=sandbox_id,
        project=project,
        seq=seq,
        source="sandboxd",
        action=f"step_{seq}",
        **more,  # type: ignore[arg-type]
    )


async def trace_of(bus: Bus, project: str, sandbox_id: str, after_seq: int = 0) -> Trace:
    return await bus.request(
        subjects.trace(project, "get"),
        GetTrace(sandbox_id=sandbox_id, after_seq=after_seq),
        Trace,
    )


async def when_read(bus: Bus, project: str, sandbox_id: str, last_seq: int) -> Trace:
    """Return the trace once the tracer has read the step with this number."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(DsecError):
                trace = await trace_of(bus, project, sandbox_id)
                if trace.steps and trace.steps[-1].seq >= last_seq:
                    return trace
            await asyncio.sleep(0.05)


async def test_steps_come_back_in_order_once_each_and_what_lacks_is_told(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
    sandbox_id: str,
) -> None:
    records = [
        step(sandbox_id, 1, latency_ms=1.5, tokens_in=2, attributes={"url": "a"}),
        *(step(sandbox_id, seq) for seq in (2, 3, 3, 2, 5, 7)),
    ]
    async with tracer(config(nats, kafka, tmp_path)), nats.project() as project:
        await write(kafka, tmp_path, *records)
        trace = await when_read(project, "default", sandbox_id, 7)
    assert [seen.seq for seen in trace.steps] == [1, 2, 3, 5, 7]
    assert trace.gaps == (4, 6)
    assert not trace.more
    first = trace.steps[0]
    assert (first.action, first.latency_ms, first.tokens_in) == ("step_1", 1.5, 2)
    assert first.attributes == {"url": "a"}
    assert first.time > 1_000_000_000


async def test_a_project_reads_its_own_sandboxes_only(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
    sandbox_id: str,
) -> None:
    async with (
        tracer(config(nats, kafka, tmp_path)),
        nats.project("acme") as acme,
        nats.project() as other,
    ):
        await write(kafka, tmp_path, step(sandbox_id, 1, "acme"))
        await when_read(acme, "acme", sandbox_id, 1)
        with pytest.raises(DsecError, match="nothing was read") as refusal:
            await trace_of(other, "default", sandbox_id)
        assert refusal.value.code == ErrorCode.NOT_FOUND


async def test_a_long_trace_comes_in_pages(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
    sandbox_id: str,
) -> None:
    # 1,200 steps of about a kilobyte: bounded by number and by size.
    records = [step(sandbox_id, n, attributes={"text": "x" * 1000}) for n in range(1, 1201)]
    async with tracer(config(nats, kafka, tmp_path)), nats.project() as project:
        await write(kafka, tmp_path, *records)
        numbers: list[int] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(numbers) < len(records):
                with contextlib.suppress(DsecError):  # not read so far
                    page = await trace_of(
                        project, "default", sandbox_id, numbers[-1] if numbers else 0
                    )
                    assert len(page.steps) < 500
                    numbers += [seen.seq for seen in page.steps]
    assert numbers == list(range(1, 1201))


async def test_a_tracer_that_was_killed_goes_on_where_it_was(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
    sandbox_id: str,
) -> None:
    settings = config(nats, kafka, tmp_path)
    async with nats.project() as project:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dsec_tracer"),
            env=os.environ
            | {
                "DSEC_NATS_SERVERS": nats.server.url,
                "DSEC_NATS_CREDENTIALS": settings.nats_credentials,
                "DSEC_KAFKA_BOOTSTRAP": settings.kafka_bootstrap,
                "DSEC_STATE_DIRECTORY": settings.state_directory,
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await write(kafka, tmp_path, *(step(sandbox_id, seq) for seq in (1, 2, 3)))
            await when_read(project, "default", sandbox_id, 3)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await write(kafka, tmp_path, *(step(sandbox_id, seq) for seq in (3, 4)))
        async with tracer(settings):
            trace = await when_read(project, "default", sandbox_id, 4)
    assert [seen.seq for seen in trace.steps] == [1, 2, 3, 4]


async def test_every_tracer_can_answer_for_everything(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
    sandbox_id: str,
) -> None:
    await write(kafka, tmp_path, *(step(sandbox_id, seq) for seq in (1, 2)))
    async with nats.project() as project:
        for name in ("first", "second"):
            async with tracer(config(nats, kafka, tmp_path, name)):
                trace = await when_read(project, "default", sandbox_id, 2)
                assert [seen.seq for seen in trace.steps] == [1, 2]


async def test_who_may_write_to_one_projects_topic_cannot_speak_for_another_project(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
    sandbox_id: str,
) -> None:
    await write(kafka, tmp_path, step(sandbox_id, 1, "acme"))
    forged = step(sandbox_id, 2, "acme").serialize()
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers)
    await producer.start()
    try:
        await producer.send_and_wait(behavior_logs(), forged, key=sandbox_id.encode())
    finally:
        await producer.stop()
    await write(kafka, tmp_path, step(sandbox_id, 3, "acme"), step(sandbox_id, 1))
    async with tracer(config(nats, kafka, tmp_path)), nats.project("acme") as acme:
        async with nats.project() as other:
            await when_read(other, "default", sandbox_id, 1)
        trace = await when_read(acme, "acme", sandbox_id, 3)
    assert [seen.seq for seen in trace.steps] == [1, 3]


async def test_a_second_tracer_of_the_same_name_does_not_start(
    nats: NatsForTests,
    kafka: KafkaForTests,  # noqa: F811  the fixture
    tmp_path: Path,
) -> None:
    settings = config(nats, kafka, tmp_path)
    async with tracer(settings):
        second = TracerService(settings)
        try:
            with pytest.raises(DsecError, match="no other tracer of this name"):
                await second.start()
        finally:
            await second.stop()


async def test_a_tracer_without_kafka_says_what_to_set(nats: NatsForTests, tmp_path: Path) -> None:
    service = TracerService(
        TracerConfig(
            nats_servers=(nats.server.url,),
            nats_credentials=str(nats.auth.service_credentials("tracer")),
            state_directory=str(tmp_path),
        )
    )
    try:
        with pytest.raises(DsecError, match="kafka_bootstrap"):
            await service.start()
    finally:
        await service.stop()
