"""The life cycle that every service shares, with a real NATS and a service of a few lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.bus_types import Request
from dsec_common.config import ServiceConfig
from dsec_common.service import Service, ServiceState
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.node import ListNodes, NodeList


class SlowBroker(Service[ServiceConfig]):
    """Answers ``node.list`` when told to."""

    name = "broker"

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.steps: list[str] = []

    async def open(self) -> None:
        self.steps.append("open")

    async def recover(self) -> None:
        self.steps.append("recover")

    async def subscribe(self) -> None:
        self.steps.append("subscribe")
        await self.bus.serve(
            subjects.any_project("node.list"), ListNodes, self._list, queue="broker"
        )

    async def _list(self, request: Request[ListNodes]) -> NodeList:
        self.asked.set()
        await self.answer.wait()
        return NodeList(cause_id=request.message.message_id)

    async def quiesce(self) -> None:
        self.steps.append("quiesce")

    async def close(self) -> None:
        self.steps.append("close")


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as server:
        yield server


def configuration(nats: NatsForTests, directory: Path) -> ServiceConfig:
    return ServiceConfig(
        nats_servers=(nats.server.url,),
        nats_credentials=str(nats.auth.service_credentials("broker")),
        state_directory=str(directory),
        runtime_file=str(directory / "runtime.json"),
        drain_timeout_s=5.0,
    )


async def until_state(service: SlowBroker, state: ServiceState) -> None:
    async with asyncio.timeout(10):
        while service.state is not state:
            await asyncio.sleep(0.01)


async def ready(service: SlowBroker) -> tuple[int, str]:
    url = f"http://127.0.0.1:{service.http_port}/readyz"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, (await response.json())["reason"]


async def ask(bus: Bus) -> NodeList:
    return await bus.request(subjects.node("default", "list"), ListNodes(), NodeList, timeout_s=10)


async def test_a_service_goes_through_its_life_in_order(nats: NatsForTests, tmp_path: Path) -> None:
    service = SlowBroker(configuration(nats, tmp_path))
    life = asyncio.create_task(service.run())
    await until_state(service, ServiceState.RUNNING)
    runtime = json.loads((tmp_path / "runtime.json").read_text())
    assert runtime == {"pid": os.getpid(), "http_port": service.http_port, "state": "running"}
    assert await ready(service) == (200, "")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life == 0
    assert service.steps == ["open", "recover", "subscribe", "quiesce", "close"]
    assert json.loads((tmp_path / "runtime.json").read_text())["state"] == "stopped"


async def test_a_request_in_flight_is_answered_while_the_service_drains(
    nats: NatsForTests, tmp_path: Path
) -> None:
    service = SlowBroker(configuration(nats, tmp_path))
    life = asyncio.create_task(service.run())
    await until_state(service, ServiceState.RUNNING)
    async with nats.project() as bus:
        request = asyncio.create_task(ask(bus))
        await service.asked.wait()
        service.request_stop()
        await until_state(service, ServiceState.DRAINING)
        assert (await ready(service))[0] == 503
        service.answer.set()
        assert (await request).nodes == ()
    assert await life == 0


async def test_a_service_that_loses_a_part_of_itself_fails(
    nats: NatsForTests, tmp_path: Path
) -> None:
    service = SlowBroker(configuration(nats, tmp_path))
    life = asyncio.create_task(service.run())
    await until_state(service, ServiceState.RUNNING)

    async def part() -> None:
        raise RuntimeError("a part is gone")

    service.spawn(part(), "part")
    assert await life == 1
    assert service.state is ServiceState.FAILED


async def test_a_service_waits_for_nats_and_says_so_and_still_stops_when_asked(
    tmp_path: Path,
) -> None:
    service = SlowBroker(ServiceConfig(nats_servers=(f"nats://127.0.0.1:{closed_port()}",)))
    life = asyncio.create_task(service.run())
    async with asyncio.timeout(10):
        while not service.http_port:
            await asyncio.sleep(0.01)
    assert await ready(service) == (503, "the service is starting")
    service.request_stop()
    assert await life == 0
    assert service.steps == ["quiesce", "close"]


async def test_a_service_that_may_not_wait_fails_with_the_address_it_tried() -> None:
    address = f"nats://127.0.0.1:{closed_port()}"
    service = SlowBroker(ServiceConfig(nats_servers=(address,), connect_timeout_s=0.3))
    assert await service.run() == 1
    assert service.state is ServiceState.FAILED


async def test_readiness_is_false_while_nats_is_away_and_comes_back(
    nats: NatsForTests, tmp_path: Path
) -> None:
    service = SlowBroker(configuration(nats, tmp_path))
    service.answer.set()
    life = asyncio.create_task(service.run())
    await until_state(service, ServiceState.RUNNING)
    await nats.server.stop()
    async with asyncio.timeout(10):
        while (await ready(service))[0] != 503:
            await asyncio.sleep(0.01)
    assert "NATS" in (await ready(service))[1]
    await nats.server.start()
    async with asyncio.timeout(10):
        while (await ready(service))[0] != 200:
            await asyncio.sleep(0.01)
    async with nats.project() as bus:
        assert (await ask(bus)).nodes == ()
    service.request_stop()
    assert await life == 0


def test_a_wrong_setting_ends_the_process_with_code_2_and_one_clear_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dsec_broker", "--http-port", "eighty"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("dsec-broker: the configuration of broker is not valid")
    assert "Traceback" not in ended.stderr


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
