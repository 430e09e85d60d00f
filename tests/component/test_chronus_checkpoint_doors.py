"""What is kept with a rollout, asked of a real Chronus: whose it is, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chronus_parties import Agent, chronus_service
from dsec.channel import Channel
from dsec.rollouts import Rollout, Rollouts
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.checkpoint import CheckpointInfo, MakeCheckpoint


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests(projects=("other",)) as running:
        yield running


async def test_state_outlives_chronus_and_a_snapshot_of_its_journal(nats: NatsForTests) -> None:
    settings = {"shards": 1, "snapshot_after_frames": 5}
    async with nats.project() as bus:
        async with chronus_service(nats, **settings):
            rollout = await Rollouts(Channel(bus, "default")).open()
            for number in range(12):
                await rollout.put_state({"n": number, f"list {number % 3}": [number] * 1000})
            await rollout.put_state(deletes=["list 0"])
        async with chronus_service(nats, **settings):
            assert await rollout.get_state("n", "list 0", "unknown") == {"n": 11}
            assert sorted(await rollout.get_state()) == ["list 1", "list 2", "n"]


async def test_another_project_reaches_nothing_of_a_rollout(nats: NatsForTests) -> None:
    async with chronus_service(nats), nats.project() as bus, nats.project("other") as stranger:
        mine = await Rollouts(Channel(bus, "default")).open()
        await mine.put_state({"secret": 1})
        theirs = Rollout(Channel(stranger, "other"), mine.id)
        for ask in (
            theirs.put_state({"secret": 2}),
            theirs.get_state(),
            theirs.checkpoint(sandbox="node-1.a"),
            theirs.checkpoints(),
            theirs.roll_back(),
            theirs.branch(1),
        ):
            with pytest.raises(DsecError) as refusal:
                await ask
            assert refusal.value.code is ErrorCode.NOT_FOUND
        assert await mine.get_state() == {"secret": 1}


async def test_what_makes_no_sense_is_refused_and_changes_nothing(nats: NatsForTests) -> None:
    async with chronus_service(nats), nats.project() as bus:
        rollout = await Rollouts(Channel(bus, "default")).open()
        version = await rollout.put_state({"kept": True})
        for ask, why in (
            (rollout.put_state({"": 1}), "name"),
            (rollout.put_state({"x" * 257: 1}), "256"),
            (rollout.put_state({str(number): 1 for number in range(1025)}), "1024"),
            (rollout.put_state({"large": "x" * 262_144}), "262144"),
            (rollout.checkpoint(key="a\nb"), "key"),
            (rollout.checkpoint(key="x" * 129), "128"),
            (rollout.checkpoint(sandbox="no sandbox"), "sandbox id"),
            (rollout.branch(0), "1 to 64"),
            (rollout.branch(65), "1 to 64"),
        ):
            with pytest.raises(DsecError, match=why) as refusal:
                await ask
            assert refusal.value.code is ErrorCode.INVALID
        assert await rollout.put_state({"kept": True}) == version
        await rollout.close()
        with pytest.raises(DsecError) as refusal:
            await rollout.put_state({"late": 1})
        assert refusal.value.code is ErrorCode.EXPIRED


async def test_a_node_that_never_was_is_no_place_for_a_checkpoint(
    nats: NatsForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_chronus.node_asking.PATIENCE_S", 0.2)
    async with (
        chronus_service(nats),
        nats.project() as bus,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        rollout = await Rollouts(Channel(bus, "default")).open()
        agent = Agent(node_bus, rollout.id)
        await agent.report(1, "saw")
        with pytest.raises(DsecError, match="node-1 does not answer") as refusal:
            await bus.request(
                subjects.rollout("default", ScopedId.parse(rollout.id), "checkpoint"),
                MakeCheckpoint(key="one"),
                CheckpointInfo,
                timeout_s=20.0,
            )
        assert refusal.value.code is ErrorCode.UNAVAILABLE
        assert await rollout.checkpoints() == []
        # The rollout goes on as if nothing had been asked.
        await rollout.feedback(1, "go on")
        assert (await agent.await_feedback(1)).payload == "go on"
