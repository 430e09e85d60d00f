"""NATS or its JetStream away at the start, and lost in the middle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, control_plane, request, until
from dsec_broker.config import BrokerConfig
from dsec_broker.service import BrokerService
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.retry import until_available
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Gpu, ListNodes, NodeList
from dsec_common.wire.sandbox import CreateSandbox, Limits, SandboxCreated, SandboxRunning

A100 = (Gpu(uuid="GPU-0", model="NVIDIA A100-SXM4-40GB"),)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        yield plane


async def create(bus: Bus, asked: CreateSandbox) -> SandboxCreated:
    return await bus.request(
        subjects.sandbox_create("default"), asked, SandboxCreated, timeout_s=10
    )


async def create_when_possible(bus: Bus, asked: CreateSandbox) -> SandboxCreated:
    async with asyncio.timeout(20):
        return await until_available("the scheduler", lambda: create(bus, asked), SystemClock())


async def test_everything_goes_on_after_the_server_was_restarted(plane: ControlPlane) -> None:
    node = await plane.node("node-1", gpus=A100)
    broker, scheduler = await plane.broker(), await plane.scheduler()
    user = await plane.project()
    first = await create_when_possible(user, request(limits=Limits(cu=60.0), idempotency_key="k"))
    await plane.nats.server.stop()
    await until(lambda: not user.connected)
    assert "NATS is not connected" in broker.not_ready_reason()
    assert "NATS is not connected" in scheduler.not_ready_reason()
    await plane.nats.server.start()
    # Keys and leases outlived it.
    again = request(limits=Limits(cu=60.0), idempotency_key="k")
    assert await create_when_possible(user, again) == first
    with pytest.raises(DsecError) as error:
        await create(user, request(limits=Limits(cu=60.0)))
    assert error.value.code is ErrorCode.EXHAUSTED
    await create_when_possible(user, request())
    found = await user.request(subjects.node("default", "list"), ListNodes(), NodeList)
    assert found.cu_allocated == 60
    assert len(node.sandboxes) == 2
    # The queue, too.
    heard: list[SandboxRunning] = []

    async def take(event: object) -> None:
        heard.append(event.message)  # type: ignore[attr-defined]

    await user.subscribe(subjects.project_events("default"), SandboxRunning, take)
    await user.flush()
    await user.js_publish(subjects.queue_sandbox_create("default"), request())
    await until(lambda: bool(heard), timeout_s=15)


async def test_a_service_waits_for_an_absent_server_and_stops_when_told(
    plane: ControlPlane,
) -> None:
    settings = plane.settings("broker") | {"connect_timeout_s": 0.0}
    await plane.nats.server.stop()
    service = BrokerService(BrokerConfig(**settings))
    running = asyncio.create_task(service.run())
    await until(lambda: service.http_port > 0)
    assert service.not_ready_reason() == "the service is starting"
    began = time.monotonic()
    service.request_stop()
    assert await running == 0
    assert time.monotonic() - began < 20


async def test_a_service_started_before_the_server_becomes_ready(plane: ControlPlane) -> None:
    settings = plane.settings("broker") | {"connect_timeout_s": 0.0}
    await plane.nats.server.stop()
    service = BrokerService(BrokerConfig(**settings))
    running = asyncio.create_task(service.run())
    await until(lambda: service.http_port > 0)
    await plane.nats.server.start()
    await until(lambda: service.not_ready_reason() == "", timeout_s=15)
    service.request_stop()
    assert await running == 0


class WaitsForEver(BrokerService):
    """A broker on a server whose JetStream never comes."""

    waits: asyncio.Event

    async def open(self) -> None:
        self.waits.set()
        await asyncio.Event().wait()


async def test_a_service_that_waits_for_a_part_stops_when_told(plane: ControlPlane) -> None:
    service = WaitsForEver(BrokerConfig(**plane.settings("broker")))
    service.waits = asyncio.Event()
    running = asyncio.create_task(service.run())
    await service.waits.wait()
    service.request_stop()
    assert await running == 0
