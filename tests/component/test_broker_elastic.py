"""Brokers on real NATS balance the cluster: shares, nodes, and who of them does it."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from control_plane import ControlPlane, control_plane, until
from dsec_broker.elastic_lease import BUCKET, Balancer, ElasticLease
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.clock import SystemClock
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.elastic import LeaseResized, NodeRetired, ResizeLease, RetireNode
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeaseReleased, ReleaseLease
from dsec_common.wire.node import Gpu, ListNodes, NodeList

A100 = (Gpu(uuid="GPU-0", model="NVIDIA A100-SXM4-40GB"),)
BATCH, REALTIME = ServiceClass.BATCH, ServiceClass.REALTIME


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        yield plane


@pytest.fixture
async def bus(plane: ControlPlane) -> Bus:
    return await plane._stack.enter_async_context(plane.nats.service("scheduler"))


async def grant(
    bus: Bus, min_cu: float, max_cu: float, service_class: ServiceClass = BATCH, node: str = ""
) -> LeaseGranted:
    asked = GrantLease(
        project="default",
        holder="test",
        node=node,
        demand=GpuDemand(min_cu=min_cu, max_cu=max_cu),
        service_class=service_class,
    )
    async with asyncio.timeout(10):
        while True:
            try:
                return await bus.request(subjects.lease("grant"), asked, LeaseGranted)
            except DsecError as error:
                # Of several brokers, the one that is asked may not have heard of a node yet.
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)


async def until_units(bus: Bus, *, total: float, allocated: float) -> None:
    """Return when the cluster's units are these; each question takes its own time."""
    async with asyncio.timeout(10):
        while True:
            found = await bus.request(subjects.node("default", "list"), ListNodes(), NodeList)
            ready = all(info.ready for info in found.nodes)
            if ready and (found.cu_total, round(found.cu_allocated, 6)) == (total, allocated):
                return


class Webhook:
    """Takes orders for nodes."""

    def __init__(self) -> None:
        self.url = ""
        self.orders: list[dict[str, Any]] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.orders.append(await request.json())
        return web.Response(status=self.status)

    @property
    def wanted(self) -> list[int]:
        return [order["wanted"] for order in self.orders]


@pytest.fixture
async def webhook() -> AsyncIterator[Webhook]:
    hook = Webhook()
    application = web.Application()
    application.router.add_post("/", hook.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hook.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield hook
    await runner.cleanup()


def settings(webhook: Webhook) -> dict[str, Any]:
    return {
        "elastic_interval_s": 0.02,
        "elastic_lease_s": 1.0,
        "node_provider": "webhook",
        "node_provider_settings": {"url": webhook.url, "attempts": "1"},
        "node_idle_s": 0.5,
    }


async def test_leases_shrink_above_the_line_and_grow_back_below_it(
    plane: ControlPlane, bus: Bus
) -> None:
    node = await plane.node("node-1", gpus=A100)
    told: list[ResizeLease] = []

    async def resize(request: Request[ResizeLease]) -> LeaseResized:
        told.append(request.message)
        node.lease_resizes[request.message.lease_id] = request.message.resizes
        return LeaseResized(lease_id=request.message.lease_id)

    await node.bus.serve(subjects.node_request("node-1", "resize"), ResizeLease, resize)
    for _ in range(3):
        await plane.broker(elastic_interval_s=0.02)
    user = await plane.project()
    await until_units(user, total=100, allocated=0)
    batch = await grant(bus, 20, 60)
    node.lease_ids = (batch.lease_id,)
    important = await grant(bus, 30, 30, REALTIME)
    await until_units(user, total=100, allocated=85)
    await until(lambda: bool(told))
    assert (told[0].lease_id, told[0].resizes) == (batch.lease_id, 1)
    assert [slice_.percent for slice_ in told[0].slices] == [55]
    assert told[0].reason == "90% of all Compute Units were handed out"
    await bus.request(
        subjects.lease("release"), ReleaseLease(lease_id=important.lease_id), LeaseReleased
    )
    await until_units(user, total=100, allocated=60)
    await until(lambda: told[-1].slices[0].percent == 60)


async def test_nodes_are_ordered_once_by_many_brokers_and_given_up_when_idle(
    plane: ControlPlane, bus: Bus, webhook: Webhook
) -> None:
    await plane.node("node-1", gpus=A100)
    for _ in range(4):
        await plane.broker(**settings(webhook))
    user = await plane.project()
    await until_units(user, total=100, allocated=0)
    leases = [await grant(bus, 30, 30) for _ in range(3)]
    await until(lambda: bool(webhook.orders))
    assert webhook.wanted == [1]
    node = await plane.node("more-1", gpus=A100, beating=False)
    retired = asyncio.Event()

    async def retire(request: Request[RetireNode]) -> NodeRetired:
        node.draining = True
        retired.set()
        return NodeRetired(node="more-1")

    await node.bus.serve(subjects.node_request("more-1", "retire"), RetireNode, retire)
    node.labels = {"provider": "webhook"}
    node._beating = asyncio.create_task(node._beat_for_ever())
    await until_units(user, total=200, allocated=90)
    assert set(webhook.wanted) == {1}
    # With 90 of 100 units taken it is needed, however idle it is.
    await bus.request(
        subjects.lease("release"), ReleaseLease(lease_id=leases[0].lease_id), LeaseReleased
    )
    async with asyncio.timeout(10):
        await retired.wait()
    await until(lambda: webhook.orders[-1]["leaving"] == ["more-1"])
    assert webhook.orders[-1]["wanted"] == 0
    fences = [order["fence"] for order in webhook.orders]
    assert fences == sorted(fences)


async def test_another_broker_goes_on_when_the_one_that_balances_has_died(
    plane: ControlPlane, bus: Bus, webhook: Webhook
) -> None:
    await plane.node("node-1", gpus=A100)
    dead_bus = await plane._stack.enter_async_context(plane.nats.service("broker"))
    dead = ElasticLease(await dead_bus.kv(BUCKET, Balancer), "dead", 1.0, SystemClock())
    fence = await dead.hold()
    assert fence
    await plane.broker(**settings(webhook))
    user = await plane.project()
    await until_units(user, total=100, allocated=0)
    await grant(bus, 90, 90)
    await until(lambda: bool(webhook.orders), timeout_s=10)
    assert dead.fence == 0
    assert webhook.orders[-1]["wanted"] == 1
    assert webhook.orders[-1]["fence"] > fence


async def test_an_order_that_fails_is_given_again(
    plane: ControlPlane, bus: Bus, webhook: Webhook
) -> None:
    await plane.node("node-1", gpus=A100)
    webhook.status = 503
    await plane.broker(**settings(webhook))
    user = await plane.project()
    await until_units(user, total=100, allocated=0)
    await grant(bus, 90, 90)
    await until(lambda: len(webhook.orders) > 1, timeout_s=10)
    assert set(webhook.wanted) == {1}


async def test_a_provider_that_is_not_there_ends_the_broker_at_its_start(
    plane: ControlPlane,
) -> None:
    with pytest.raises(DsecError, match="no node provider 'cloud'"):
        await plane.broker(node_provider="cloud")


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
async def test_a_real_node_is_started_and_ended_when_it_has_nothing_to_do(
    plane: ControlPlane, tmp_path: Path
) -> None:
    prefix = f"elastic-{os.getpid()}"
    bus = plane.nats.service_config("broker")
    node_config = write_text(
        tmp_path / "node.toml",
        f"""
        [sandboxd]
        nats_servers = ["{bus.servers[0]}"]
        state_directory = "{tmp_path}/state"
        layers_directory = "{tmp_path}/layers"
        run_directory = "{tmp_path}/run"
        heartbeat_interval_s = 0.2
        """,
    )
    local = {
        "elastic_interval_s": 0.02,
        "elastic_lease_s": 1.0,
        "node_idle_s": 0.5,
        "node_provider": "local",
        "node_provider_settings": {
            "directory": str(tmp_path / "nodes"),
            "config": str(node_config),
            "auth_directory": str(plane.nats.auth.path),
            "prefix": prefix,
        },
    }
    first = await plane.broker(node_provider_min=1, **local)
    user = await plane.project()

    async def until_nodes(*wanted: str) -> None:
        async with asyncio.timeout(60):
            while True:
                found = await user.request(subjects.node("default", "list"), ListNodes(), NodeList)
                if tuple(info.node for info in found.nodes if info.ready) == wanted:
                    return
                await asyncio.sleep(0.1)  # another process is on its way

    await until_nodes(f"{prefix}-1")
    pid = json.loads(read_text(tmp_path / "nodes" / f"{prefix}-1.json"))["pid"]
    # Nobody wants it any more, says the next broker, which did not start it.
    await first.stop()
    await plane.broker(**local)
    await until_nodes(f"{prefix}-1")
    await until_nodes()
    # The broker that started it has gone, so that its process is ours to take leave of.
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert '"stopped"' in read_text(tmp_path / "nodes" / f"{prefix}-1.log")


def write_text(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def read_text(path: Path) -> str:
    return path.read_text()
