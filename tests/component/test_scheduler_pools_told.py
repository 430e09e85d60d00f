"""A node is told its pools when something changed, and again now and then; not all the time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.testing.clock import FakeClock
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.pool import NodePools, PoolSpec, SetNodePools
from dsec_scheduler.pools import BUCKET, PoolDoor

SPEC = PoolSpec(project="default", base="shell@1", size=3)


class Plane:
    """One node that counts what it is told, and the door that tells it."""

    def __init__(self, scheduler: Bus, node: Bus) -> None:
        self.told: list[SetNodePools] = []
        self.clock = FakeClock()
        self.beats = [NodeHeartbeat(node="node-1", epoch="e1", capacity=Resources(sandboxes=9))]
        self.scheduler = scheduler
        self._node = node

    async def open(self) -> None:
        """Have the node listen, and open the bucket."""
        await self._node.serve(subjects.node_request("node-1", "pools"), SetNodePools, self._set)
        await self._node.flush()
        self.bucket = await self.scheduler.kv(BUCKET, PoolSpec)
        self.door = PoolDoor(self.scheduler, self.bucket, lambda: self.beats, self.clock)

    async def _set(self, request: Request[SetNodePools]) -> NodePools:
        self.told.append(request.message)
        return NodePools(pools=())

    async def knows(self) -> asyncio.Task[None]:
        """Return the task that follows the bucket, once it has read it."""
        following = asyncio.create_task(self.door.follow())
        async with asyncio.timeout(10):
            await self.door._known.wait()
        return following


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with (
        nats_for_tests() as nats,
        nats.service("scheduler") as scheduler,
        nats.service("sandboxd", "node-1") as node,
    ):
        plane = Plane(scheduler, node)
        await plane.open()
        await plane.bucket.put(f"default.{SPEC.key}", SPEC)
        following = await plane.knows()
        yield plane
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_node_is_told_the_same_again_only_after_a_while(plane: Plane) -> None:
    for _ in range(3):
        await plane.door.push()
    assert len(plane.told) == 1
    assert [pool.wanted for pool in plane.told[0].pools] == [3]
    await plane.clock.advance(10.0)
    await plane.door.push()
    assert len(plane.told) == 2


async def test_a_node_in_another_life_is_told_at_once(plane: Plane) -> None:
    await plane.door.push()
    plane.beats = [NodeHeartbeat(node="node-1", epoch="e2", capacity=Resources(sandboxes=9))]
    await plane.door.push()
    assert len(plane.told) == 2


async def test_whoever_lists_pools_has_the_nodes_asked_now(plane: Plane) -> None:
    await plane.door.push()
    await plane.door.push(again=True)
    assert len(plane.told) == 2


async def test_what_another_scheduler_wrote_is_told_at_once(plane: Plane) -> None:
    telling = asyncio.create_task(plane.door.run())
    async with asyncio.timeout(10):
        while not plane.told:
            await asyncio.sleep(0.01)
        other = PoolSpec(project="default", base="shell@2", size=2)
        await plane.bucket.put(f"default.{other.key}", other)
        while len(plane.told[-1].pools) < 2:
            await asyncio.sleep(0.01)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)


async def test_a_node_is_told_nothing_while_there_are_no_pools(plane: Plane) -> None:
    await plane.bucket.delete(f"default.{SPEC.key}")
    async with asyncio.timeout(10):
        while plane.door._specs:
            await asyncio.sleep(0.01)
    await plane.door.push()
    assert plane.told == []
