"""Where a shard begins and ends, each action is begun once, and ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chronus_parties import chronus_service
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_chronus.effects import Perform, WriteFrame
from dsec_chronus.journal import Journal
from dsec_chronus.node_actions import NodeActions
from dsec_chronus.records import ActionBegun
from dsec_chronus.stream_door import StreamDoor
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.checkpoint import CheckpointInfo, MakeCheckpoint

SANDBOX = "nowhere.s1"


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


class Performed:
    """Actions that were begun, and never come to anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[ActionBegun] = []
        self.on_end: list[Any] = []
        self.seen = asyncio.Event()

        async def perform(_self: NodeActions, it: Perform) -> None:
            self.begun.append(it.begun)
            self.seen.set()
            try:
                await asyncio.Event().wait()
            finally:
                for step in self.on_end:
                    await step()

        monkeypatch.setattr(NodeActions, "_perform", perform)


def checkpointing(bus: Bus, rollout_id: str) -> asyncio.Future[Any]:
    subject = subjects.rollout("default", ScopedId.parse(rollout_id), "checkpoint")
    asked = MakeCheckpoint(key="one", sandbox_id=SANDBOX)
    return asyncio.ensure_future(bus.request(subject, asked, CheckpointInfo, timeout_s=20.0))


async def test_an_action_that_is_asked_for_while_a_shard_begins_is_performed_once(
    nats: NatsForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats.project() as bus:
        async with chronus_service(nats, shards=1):
            rollout = await Rollouts(Channel(bus, "default")).open()
        performed = Performed(monkeypatch)
        serve = StreamDoor.serve
        asked: list[asyncio.Future[Any]] = []

        async def serve_late(door: StreamDoor) -> None:
            # The other doors are open by now.
            asked.append(checkpointing(bus, rollout.id))
            await performed.seen.wait()
            await serve(door)

        monkeypatch.setattr(StreamDoor, "serve", serve_late)
        async with chronus_service(nats, shards=1), asyncio.timeout(20):
            assert await rollout.get_state() == {}
            assert [it.number for it in performed.begun] == [1]
        await asyncio.wait(asked)
        assert all(it.exception() is not None for it in asked)


async def test_no_action_is_begun_while_a_shard_ends(
    nats: NatsForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    performed = Performed(monkeypatch)
    append = Journal.append
    appended, told = asyncio.Event(), asyncio.Event()

    async def append_late(journal: Journal, wanted: WriteFrame) -> int:
        sequence = await append(journal, wanted)
        if performed.begun and any(isinstance(it, ActionBegun) for it in wanted.records):
            appended.set()
            await told.wait()
        return sequence

    async def tell() -> None:
        """Let the second intent be durable while the first action is being ended."""
        told.set()
        for _ in range(5):
            await asyncio.sleep(0)

    monkeypatch.setattr(Journal, "append", append_late)
    performed.on_end = [tell]
    async with nats.project() as bus:
        async with chronus_service(nats, shards=1, drain_timeout_s=0.1) as service:
            rollouts = [await Rollouts(Channel(bus, "default")).open() for _ in range(2)]
            asked = [checkpointing(bus, rollouts[0].id)]
            await performed.seen.wait()
            asked.append(checkpointing(bus, rollouts[1].id))
            await appended.wait()
            (shard,) = service._shards.values()
        await asyncio.wait(asked)
        assert all(it.exception() is not None for it in asked)
        assert [it.local for it in performed.begun] == [ScopedId.parse(rollouts[0].id).local]
        assert not shard._nodes._tasks
