"""A node is gone when it was silent while it could have been heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from broker_world import heartbeat
from dsec_chronus.node_watch import NodesSeen, NodeWatch
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.testing.clock import FakeClock
from dsec_common.testing.nats import NatsForTests, nats_for_tests

NODES = ("node-1", "node-2")


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


async def _hear(watch: NodeWatch, bus: Bus, node: str) -> None:
    before = watch._heard.get(node)
    async with asyncio.timeout(20):
        while watch._heard.get(node) == before:
            await bus.publish(subjects.heartbeat(node), heartbeat(node))
            await asyncio.sleep(0.01)


async def test_nobody_is_gone_because_the_watcher_stood_still(nats: NatsForTests) -> None:
    """A process that was stopped finds its nodes' heartbeats only after it has looked."""
    clock = FakeClock()
    async with nats.service("chronus") as bus, nats.service("sandboxd", "node-1") as node:
        watch = NodeWatch(bus, clock, lost_after_s=30.0)
        await watch.start()
        await clock.advance(5.0)
        await _hear(watch, node, "node-1")
        assert watch.look(NODES) == NodesSeen(living=frozenset({"node-1"}))
        await clock.advance(120.0)  # in which nothing ran here
        assert watch.look(NODES) == NodesSeen()
        await _hear(watch, node, "node-1")
        await clock.advance(5.0)
        seen = watch.look(NODES)
        assert seen == NodesSeen(lost=frozenset({"node-2"}), living=frozenset({"node-1"}))
