"""Chronus against a real NATS: both sides of a rollout, and what they are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from chronus_parties import Agent, Trainer, chronus_service, open_rollout
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ScopedId
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.rollout import InspectRollout, RolloutInfo, RolloutState


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests(projects=("other",)) as nats:
        yield nats


async def test_the_sdk_trains_an_agent_step_by_step(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open(labels={"task": "repair"})
        agent = asyncio.create_task(Agent(node_bus, rollout.id).step_all(20))
        async for stage in rollout.stages():
            await stage.reply({"to": stage.payload}, reward=0.5, done=stage.seq == 20)
            assert stage.sandbox_id == "node-1.a"
            if stage.seq == 20:
                break
        await agent
        info = await rollout.close()
        assert (info.state, info.last_seq, info.answered_seq) == (RolloutState.CLOSED, 20, 20)
        assert info.total_reward == 10.0
        assert info.labels == {"task": "repair"}
        assert [stage.seq async for stage in rollout.stages()] == list(range(1, 21))


async def test_many_rollouts_at_once_share_frames(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats) as chronus,
        nats.project() as trainer_bus,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        rollouts = await asyncio.gather(*(open_rollout(trainer_bus) for _ in range(40)))
        assert len({rollout.partition(".")[0] for rollout in rollouts}) > 4
        seen: list[list[int]] = [[] for _ in rollouts]
        async with asyncio.TaskGroup() as tasks:
            for rollout, numbers in zip(rollouts, seen, strict=True):
                tasks.create_task(Trainer(trainer_bus, rollout).answer_all(10, numbers))
                tasks.create_task(Agent(node_bus, rollout).step_all(10))
        assert all(numbers == list(range(1, 11)) for numbers in seen)
        assert len(chronus._shards) == 8


async def test_the_same_idempotency_key_opens_one_rollout(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats),
        chronus_service(nats) as second,
        nats.project() as bus,
        nats.project("other") as other,
    ):
        await shares(second, 4)
        first = await open_rollout(bus, "one")
        assert {await open_rollout(bus, "one") for _ in range(20)} == {first}
        assert await open_rollout(bus, "two") != first
        assert await open_rollout(other, "one", "other") != first
        rollouts = Rollouts(Channel(bus, "default"))
        with pytest.raises(DsecError) as caught:
            await rollouts.open(labels={"a": "b"}, idempotency_key="one")
        assert caught.value.code is ErrorCode.CONFLICT


async def test_another_projects_rollout_is_not_found(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats),
        nats.project() as bus,
        nats.project("other") as stranger,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        rollout = await open_rollout(bus)
        for ask in (
            Trainer(stranger, rollout, "other").next(0),
            Trainer(stranger, rollout, "other").feedback(1),
            Agent(node_bus, rollout, "other").report(1),
            Agent(node_bus, rollout, "other").await_feedback(1),
        ):
            with pytest.raises(DsecError) as caught:
                await ask
            assert caught.value.code is ErrorCode.NOT_FOUND


async def test_what_is_wrong_is_refused_with_a_reason(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats),
        nats.project() as bus,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        rollout = await open_rollout(bus)
        agent, trainer = Agent(node_bus, rollout), Trainer(bus, rollout)
        assert not await agent.report(1, "one")
        assert await agent.report(1, "one")
        refusals = {
            "262144": agent.report(2, "x" * 262_144),
            "3 is expected": agent.report(7),
            "another report 1": agent.report(1, "other"),
            "stage's name": agent.report(3, stage="x" * 257),
            "finite": trainer.feedback(1, reward=float("nan")),
            "no report 5": trainer.feedback(5),
        }
        await agent.report(2)
        for reason, ask in refusals.items():
            with pytest.raises(DsecError, match=reason) as caught:
                await ask
            assert caught.value.code in {ErrorCode.INVALID, ErrorCode.CONFLICT}
        with pytest.raises(DsecError, match="labels"):
            await Rollouts(Channel(bus, "default")).open(labels={"a": "x" * 20_000})
        with pytest.raises(DsecError, match="key"):
            await open_rollout(bus, "k" * 257)


async def test_a_client_without_our_library_speaks_json(nats: NatsForTests) -> None:
    async with (
        chronus_service(nats),
        nats.project() as bus,
        nats.service("sandboxd", "node-1") as node_bus,
    ):
        rollout = await open_rollout(bus)
        await Agent(node_bus, rollout).report(1, {"saw": ["a", 1.5, None, True]})
        subject = subjects.rollout("default", ScopedId.parse(rollout), "next")
        reply = await bus._inbox.request(
            subject,
            b'{"type": "NextStages", "after_seq": 0}',
            {"content-type": "application/json"},
            5.0,
        )
        report = json.loads(reply.data)["reports"][0]
        assert report["payload"] == {"saw": ["a", 1.5, None, True]}
        poison = b'{"type": "SendFeedback", "seq": 1, "payload": 1000000000000000000000}'
        reply = await bus._inbox.request(
            subject.replace("next", "feedback"), poison, {"content-type": "application/json"}, 5.0
        )
        assert json.loads(reply.data)["code"] == "invalid"


async def test_a_long_wait_ends_at_once_when_the_shard_is_handed_over(nats: NatsForTests) -> None:
    async with nats.project() as bus:
        async with chronus_service(nats):
            rollout = await open_rollout(bus)
            subject = subjects.rollout("default", ScopedId.parse(rollout), "inspect")
            waiting = asyncio.create_task(Trainer(bus, rollout).next(0, wait_s=20))
            await bus.request(subject, InspectRollout(), RolloutInfo)
        async with chronus_service(nats), nats.service("sandboxd", "node-1") as node_bus:
            await Agent(node_bus, rollout).report(1)
            async with asyncio.timeout(20):
                assert [report.seq for report in (await waiting).reports] == [1]


async def test_a_snapshot_keeps_the_journal_short_and_loses_nothing(nats: NatsForTests) -> None:
    settings = {"shards": 1, "snapshot_after_frames": 20}
    async with nats.project() as bus, nats.service("sandboxd", "node-1") as node_bus:
        async with chronus_service(nats, **settings):
            rollout = await open_rollout(bus)
            for seq in range(1, 120):
                await Agent(node_bus, rollout).report(seq, {"step": seq})
        async with nats.service("chronus") as looking:
            info = json.loads(await looking.request_raw("$JS.API.STREAM.INFO.chronus-journal", b""))
        assert info["state"]["messages"] < 60
        async with chronus_service(nats, **settings):
            batch = await Trainer(bus, rollout).next(100)
            assert [report.payload["step"] for report in batch.reports] == list(range(101, 120))


async def test_large_reports_survive_a_restart(nats: NatsForTests) -> None:
    payloads = ["x" * (262_144 - 2), [1.5] * 60_000, "\u20ac" * 80_000]
    async with nats.project() as bus, nats.service("sandboxd", "node-1") as node_bus:
        async with chronus_service(nats, snapshot_after_frames=2):
            rollout = await open_rollout(bus)
            await asyncio.gather(
                *(Agent(node_bus, rollout).report(1, payloads[0]) for _ in range(3))
            )
            for seq, payload in enumerate(payloads[1:], start=2):
                await Agent(node_bus, rollout).report(seq, payload)
        async with chronus_service(nats):
            for seq, payload in enumerate(payloads):
                batch = await Trainer(bus, rollout).next(seq)
                assert batch.reports[0].payload == payload


async def shares(service: object, count: int) -> None:
    """Return when a service owns this many shards."""
    async with asyncio.timeout(10):
        while len(service._shards) != count:  # type: ignore[attr-defined]
            await asyncio.sleep(0.02)
