"""A node's answer does not come: one sandbox is made all the same, and none is left to nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from control_plane import ControlPlane, NodePeer, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.retry import until_available
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.sandbox import CreateSandbox, SandboxCreated, SandboxState


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        yield plane


async def create(bus: Bus, asked: CreateSandbox) -> SandboxCreated:
    return await bus.request(
        subjects.sandbox_create("default"), asked, SandboxCreated, timeout_s=20
    )


def become(node: NodePeer, state: SandboxState) -> None:
    """Have the node's one sandbox be in ``state``."""
    [(local, (project, info))] = node.sandboxes.items()
    node.sandboxes[local] = (project, msgspec.structs.replace(info, state=state))


async def test_a_sandbox_that_comes_to_life_late_is_waited_for(plane: ControlPlane) -> None:
    node, other = await plane.node("node-1"), await plane.node("node-2", beating=False)
    await plane.scheduler(attempt_timeout_s=5.0)
    user = await plane.project()

    async def lose_the_answer() -> None:
        become(node, SandboxState.CREATING)
        raise DsecError(ErrorCode.TIMEOUT, "the answer is lost")

    node.before_answer = lose_the_answer
    creating = asyncio.create_task(create(user, request(timeout_s=15)))
    await node.place_arrived.wait()
    await other.beat()
    await until(lambda: node.inspected >= 2)
    become(node, SandboxState.RUNNING)
    assert (await creating).node == "node-1"
    assert other.placed == []


async def test_a_node_that_was_started_again_is_not_waited_for(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler(attempt_timeout_s=30.0)
    user = await plane.project()
    over = asyncio.Event()

    async def die() -> None:
        await over.wait()

    node.before_answer = die
    creating = asyncio.create_task(create(user, request(timeout_s=60)))
    await node.place_arrived.wait()
    await plane.node("node-2")
    began = time.monotonic()
    node.sandboxes.clear()
    node.epoch = "2"
    assert (await creating).node == "node-2"
    assert time.monotonic() - began < 20
    over.set()


async def test_nats_lost_between_grant_and_answer_leaves_one_sandbox(plane: ControlPlane) -> None:
    node, other = await plane.node("node-1"), await plane.node("node-2", beating=False)
    await plane.scheduler(attempt_timeout_s=10.0)
    user = await plane.project()
    made, lost = asyncio.Event(), asyncio.Event()

    async def wait_until_nobody_hears_it() -> None:
        made.set()
        await lost.wait()

    node.before_answer = wait_until_nobody_hears_it
    asked = request(timeout_s=15, idempotency_key="k")
    creating = asyncio.create_task(create(user, asked))
    await made.wait()
    await plane.nats.server.kill()
    with pytest.raises(DsecError) as caught:
        await creating
    assert caught.value.details["may_have_happened"]
    lost.set()
    await plane.nats.server.start()
    await until(lambda: user.connected and other.bus.connected)
    await other.beat()
    again = await until_available("the scheduler", lambda: create(user, asked), SystemClock())
    assert {f"node-1.{local}" for local in node.sandboxes} == {again.sandbox_id}
    assert other.sandboxes == {}
