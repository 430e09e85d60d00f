"""Brokers on a real NATS server: inventory, leases, restarts, and many at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from control_plane import ControlPlane, control_plane, request, until
from dsec.channel import Channel
from dsec.inventory import list_nodes
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.lease import (
    GrantLease,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
)
from dsec_common.wire.node import Gpu, InspectNode, ListNodes, NodeInfo, NodeList
from dsec_common.wire.sandbox import Limits, SandboxCreated

A100 = (Gpu(uuid="GPU-0", model="NVIDIA A100-SXM4-40GB"),)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        yield plane


async def nodes_of(bus: Bus, project: str = "default") -> NodeList:
    return await bus.request(subjects.node(project, "list"), ListNodes(), NodeList)


async def wait_for(bus: Bus, condition: Callable[[NodeList], bool]) -> NodeList:
    """Ask until the answer is as wanted; each question takes its own time."""
    async with asyncio.timeout(20):
        while not condition(found := await nodes_of(bus)):
            pass
    return found


async def wait_for_units(bus: Bus, cu_total: float) -> NodeList:
    """Return the inventory once all its nodes are ready and together have ``cu_total``."""
    return await wait_for(
        bus,
        lambda found: found.cu_total == cu_total and all(info.ready for info in found.nodes),
    )


def is_free(found: NodeList) -> bool:
    return found.cu_allocated == 0


async def scheduler_bus(plane: ControlPlane) -> Bus:
    """Return a connection that may ask for leases."""
    return await plane._stack.enter_async_context(plane.nats.service("scheduler"))


async def grant(bus: Bus, cu: float, node: str = "", ttl_s: float = 60.0) -> LeaseGranted:
    asked = GrantLease(project="default", holder="test", cu=cu, node=node, ttl_s=ttl_s)
    return await bus.request(subjects.lease("grant"), asked, LeaseGranted)


async def refused(bus: Bus, cu: float, node: str = "") -> DsecError:
    with pytest.raises(DsecError) as error:
        await grant(bus, cu, node)
    return error.value


async def test_a_project_sees_the_nodes_and_their_units(plane: ControlPlane) -> None:
    node = await plane.node("node-1", gpus=A100)
    node.lease_ids = ("node-1.of-another-project",)
    node.lease_resizes = {"node-1.of-another-project": 1}
    await plane.node("node-2")
    await plane.broker()
    user = await plane.project()
    found = await wait_for_units(user, 100)
    assert {info.node for info in found.nodes} <= {"node-1", "node-2"}
    info = await user.request(
        subjects.node("default", "inspect"), InspectNode(node="node-1"), NodeInfo
    )
    assert (info.ready, info.cu_total, info.heartbeat.capacity.cpus) == (True, 100, 1000)
    assert info.heartbeat.lease_ids == ()
    assert info.heartbeat.lease_resizes == {}


async def test_a_node_nobody_knows_is_not_found(plane: ControlPlane) -> None:
    await plane.broker()
    user = await plane.project()
    with pytest.raises(DsecError) as error:
        await user.request(
            subjects.node("default", "inspect"), InspectNode(node="node-9"), NodeInfo
        )
    assert error.value.code is ErrorCode.NOT_FOUND


async def test_the_list_of_nodes_comes_in_pages(plane: ControlPlane) -> None:
    names = [f"node-{number}" for number in range(5)]
    for name in reversed(names):
        await plane.node(name, gpus=A100)
    await plane.broker()
    user = await plane.project()
    await wait_for_units(user, 500)
    told: list[list[str]] = []
    after, more = "", True
    while more:
        asked = ListNodes(after=after, limit=2)
        page = await user.request(subjects.node("default", "list"), asked, NodeList)
        assert page.cu_total == 500  # of the cluster, not of the page
        told.append([info.node for info in page.nodes])
        after, more = told[-1][-1], page.more
    assert told == [names[:2], names[2:4], names[4:]]
    with pytest.raises(DsecError) as caught:
        await user.request(subjects.node("default", "list"), ListNodes(limit=-1), NodeList)
    assert caught.value.code is ErrorCode.INVALID


async def test_more_nodes_than_fit_into_an_answer_are_all_listed(plane: ControlPlane) -> None:
    names = [f"node-{number}" for number in range(5)]
    for name in names:
        await plane.node(name, gpus=(Gpu(uuid="GPU-0", model="H" * 50_000),))
    await plane.broker()
    user = await plane.project()
    channel = Channel(user, "default")
    async with asyncio.timeout(20):
        while len((found := await list_nodes(channel)).nodes) < len(names):
            pass
    assert [info.node for info in found.nodes] == names
    assert not found.more
    assert (await nodes_of(user)).more


async def test_an_unknown_gpu_is_noted_and_can_be_configured(plane: ControlPlane) -> None:
    await plane.node("node-1", gpus=(Gpu(uuid="GPU-0", model="NVIDIA Z9"),))
    plain = await plane.broker()
    user = await plane.project()
    found = await wait_for(user, lambda found: bool(found.nodes))
    assert found.nodes[0].notes == ("gpu_model NVIDIA Z9 unknown: CU 0, set it in nodes.yaml",)
    await plain.stop()
    await plane.broker(cu_table={"Z9": 220.0})
    assert (await wait_for_units(user, 220)).nodes[0].notes == ()


async def test_a_lease_is_granted_renewed_and_released(plane: ControlPlane) -> None:
    await plane.node("node-1", gpus=A100)
    await plane.broker()
    await wait_for_units(await plane.project(), 100)
    bus = await scheduler_bus(plane)
    lease = await grant(bus, 60)
    assert (lease.node, lease.cu) == ("node-1", 60)
    assert (await refused(bus, 60, "node-1")).code is ErrorCode.EXHAUSTED
    renewed = await bus.request(
        subjects.lease("renew"), RenewLease(lease_id=lease.lease_id, ttl_s=600), LeaseRenewed
    )
    assert renewed.expires_at > lease.expires_at + 500
    for _ in range(2):
        await bus.request(
            subjects.lease("release"), ReleaseLease(lease_id=lease.lease_id), LeaseReleased
        )
    again = await grant(bus, 100, "node-1")
    assert again.token > lease.token


async def test_a_lease_ends_by_itself(plane: ControlPlane) -> None:
    await plane.node("node-1", gpus=A100)
    await plane.broker(sweep_interval_s=0.05, clock_skew_s=0.0)
    user = await plane.project()
    await wait_for_units(user, 100)
    bus = await scheduler_bus(plane)
    await grant(bus, 100, ttl_s=1.5)
    assert (await nodes_of(user)).cu_allocated == 100
    await wait_for(user, is_free)
    await grant(bus, 100)


async def test_a_project_cannot_ask_for_leases(plane: ControlPlane) -> None:
    await plane.node("node-1", gpus=A100)
    await plane.broker()
    user = await plane.project()
    await wait_for_units(user, 100)
    error = await refused(user, 1)
    assert error.code in {ErrorCode.DENIED, ErrorCode.UNAVAILABLE}


async def test_a_restarted_broker_knows_every_lease(plane: ControlPlane) -> None:
    await plane.node("node-1", gpus=A100)
    first = await plane.broker()
    user = await plane.project()
    await wait_for_units(user, 100)
    bus = await scheduler_bus(plane)
    lease = await grant(bus, 60, "node-1")
    await first.stop()
    await plane.broker()
    found = await wait_for_units(user, 100)
    assert found.cu_allocated == 60
    assert (await refused(bus, 60, "node-1")).code is ErrorCode.EXHAUSTED
    await bus.request(
        subjects.lease("release"), ReleaseLease(lease_id=lease.lease_id), LeaseReleased
    )
    await grant(bus, 100, "node-1")


async def test_four_brokers_under_fire_never_grant_a_unit_twice(plane: ControlPlane) -> None:
    nodes = 2
    for number in range(nodes):
        await plane.node(f"node-{number}", gpus=A100)
    for _ in range(4):
        await plane.broker()
    user = await plane.project()
    await wait_for_units(user, 100 * nodes)
    bus = await scheduler_bus(plane)

    held: dict[str, LeaseGranted] = {}
    refusals: set[ErrorCode] = set()

    async def fight(number: int) -> int:
        granted = 0
        for turn in range(15):
            node = ("", "node-0", "node-1")[(number + turn) % 3]
            try:
                lease = await grant(bus, 30, node)
            except DsecError as error:
                refusals.add(error.code)
                continue
            granted += 1
            held[lease.lease_id] = lease
            for name in ("node-0", "node-1"):
                units = sum(one.cu for one in held.values() if one.node == name)
                assert units <= 100
            # Hold them for as long as a question takes: others run into full nodes meanwhile.
            await nodes_of(user)
            # Before the broker hears of it: until it answers, the units may still be counted.
            del held[lease.lease_id]
            await bus.request(
                subjects.lease("release"), ReleaseLease(lease_id=lease.lease_id), LeaseReleased
            )
        return granted

    counts = await asyncio.gather(*(fight(number) for number in range(24)))
    assert sum(counts) > 24
    # A node whose heartbeat is late on a busy machine takes none for a while.
    assert {ErrorCode.EXHAUSTED} <= refusals <= {ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE}
    await wait_for(user, is_free)


async def test_a_sandbox_with_units_holds_a_lease_for_as_long_as_it_lives(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1", gpus=A100)
    await plane.node("node-2")
    await plane.broker()
    await plane.scheduler()
    user = await plane.project()
    await wait_for_units(user, 100)
    asked = request(limits=Limits(cu=60.0))
    created = await user.request(subjects.sandbox_create("default"), asked, SandboxCreated)
    assert created.node == "node-1"
    assert created.lease_id.startswith("node-1.")
    in_vain = request(limits=Limits(cu=60.0), timeout_s=1.0)
    with pytest.raises(DsecError) as error:
        await user.request(subjects.sandbox_create("default"), in_vain, SandboxCreated)
    assert error.value.code is ErrorCode.EXHAUSTED
    # Its heartbeats have named the lease; then the sandbox ends.
    await wait_for(user, lambda found: found.cu_allocated == 60)
    await node.beat()
    node.sandboxes.clear()
    node.lease_ids = ()
    await wait_for(user, is_free)
    await user.request(subjects.sandbox_create("default"), asked, SandboxCreated)


async def test_the_units_of_a_sandbox_that_failed_are_free_again(plane: ControlPlane) -> None:
    node = await plane.node("node-1", gpus=A100)
    await plane.broker()
    await plane.scheduler()
    user = await plane.project()
    await wait_for_units(user, 100)
    node.refusal = DsecError(ErrorCode.LAYER_ERROR, "the image is damaged")
    asked = request(limits=Limits(cu=100.0))
    with pytest.raises(DsecError, match="damaged"):
        await user.request(subjects.sandbox_create("default"), asked, SandboxCreated)
    node.refusal = None
    await wait_for(user, is_free)
    await user.request(subjects.sandbox_create("default"), asked, SandboxCreated)


async def test_units_are_refused_where_no_node_has_a_gpu(plane: ControlPlane) -> None:
    await plane.node("node-1")
    await plane.broker()
    await plane.scheduler()
    user = await plane.project()
    with pytest.raises(DsecError) as error:
        await user.request(
            subjects.sandbox_create("default"), request(limits=Limits(cu=1.0)), SandboxCreated
        )
    assert (error.value.code, error.value.retryable) == (ErrorCode.EXHAUSTED, False)


@pytest.mark.parametrize("name", ["broker", "scheduler"])
async def test_a_process_is_ready_and_stops_as_asked(
    plane: ControlPlane, tmp_path: Path, name: str
) -> None:
    runtime = tmp_path / "runtime.json"
    settings = plane.settings(name)
    environment = {
        **os.environ,
        "DSEC_NATS_SERVERS": settings["nats_servers"][0],
        "DSEC_NATS_CREDENTIALS": settings["nats_credentials"],
        "DSEC_RUNTIME_FILE": str(runtime),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"dsec_{name}",
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    await until(lambda: runtime.exists() and '"running"' in runtime.read_text(), timeout_s=15)
    process.send_signal(signal.SIGTERM)
    _, log = await process.communicate()
    assert process.returncode == 0, log.decode()
