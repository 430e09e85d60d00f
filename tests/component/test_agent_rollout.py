"""From an agent's socket through Chronus to the trainer and back, whatever dies on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_world import LOCAL, NODE, RawAgent, sandbox_record
from chronus_parties import Trainer, chronus_process, chronus_service, open_rollout
from dsec.agent_channel import AgentChannel, AgentError
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_common import subjects
from dsec_common.behavior import BehaviorLog
from dsec_common.bus import Bus
from dsec_common.clock import SystemClock
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.rollout_group import ShardTaken
from dsec_sandboxd.agent_gateway import ChronusGateway
from dsec_sandboxd.agent_socket import SOCKET_NAME, AgentSocketServer
from dsec_sandboxd.shard_news import ShardNews
from dsec_sandboxd.step_log import StepLog

STEPS = 30


class Records(list[BehaviorLog]):
    """Takes what the node logs."""


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests(projects=("other",)) as running:
        yield running


@contextlib.asynccontextmanager
async def sandbox_of(
    bus: Bus, directory: Path, rollout_id: str, *, project: str = "default"
) -> AsyncIterator[Records]:
    """Listen for one sandbox as its node does; yield what it logs."""
    records = Records()
    news = ShardNews(bus)
    following = await bus.subscribe(subjects.SHARDS_TAKEN, ShardTaken, news.taken)
    gateway = ChronusGateway(bus, StepLog(NODE, records), NODE, SystemClock(), news)
    server = AgentSocketServer(gateway, NODE)
    await server.open(sandbox_record(rollout_id=rollout_id, project=project), directory)
    try:
        yield records
    finally:
        await server.aclose()
        await bus.unsubscribe(following)
        (directory / SOCKET_NAME).unlink()


def run_agent(path: Path, first: int = 1, last: int = STEPS) -> list[object]:
    """Report step after step, as an agent does; return the feedback."""
    with AgentChannel(str(path / SOCKET_NAME)) as channel:
        steps = range(first, last + 1)
        return [channel.step("tried", {"step": seq}, seq)["payload"] for seq in steps]


def feedback(first: int = 1, last: int = STEPS) -> list[object]:
    return [{"to": {"step": seq}} for seq in range(first, last + 1)]


async def test_an_agent_is_trained_and_each_step_is_in_the_behaviour_log(
    nats: NatsForTests, tmp_path: Path
) -> None:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open()
        async with sandbox_of(node_bus, tmp_path, rollout.id) as records:
            running = asyncio.create_task(asyncio.to_thread(run_agent, tmp_path, 1, 3))
            async for stage in rollout.stages():
                assert stage.sandbox_id == f"{NODE}.{LOCAL}"
                await stage.reply({"to": stage.payload}, reward=0.5)
                if stage.seq == 3:
                    break
            assert await running == feedback(1, 3)
        assert (await rollout.inspect()).total_reward == 1.5
    assert [record.action for record in records] == ["stage", "feedback"] * 3
    assert [record.seq for record in records] == list(range(1, 7))
    assert {record.sandbox_id for record in records} == {f"{NODE}.{LOCAL}"}
    assert {record.rollout_id for record in records} == {rollout.id}
    assert records[0].stage == "tried"
    assert records[1].attributes == {"seq": "1", "done": "false", "reward": "0.5"}


async def test_a_chronus_that_is_killed_in_the_middle_costs_no_step(
    nats: NatsForTests, tmp_path: Path
) -> None:
    async with (
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
        contextlib.AsyncExitStack() as later,
    ):
        async with chronus_process(nats, tmp_path) as doomed:
            rollout_id = await open_rollout(trainer_bus)
            await later.enter_async_context(sandbox_of(node_bus, tmp_path, rollout_id))
            running = asyncio.create_task(asyncio.to_thread(run_agent, tmp_path))
            seen: list[int] = []
            await Trainer(trainer_bus, rollout_id).answer_all(STEPS // 2, seen)
            doomed.kill()
        async with chronus_process(nats, tmp_path):
            await Trainer(trainer_bus, rollout_id).answer_all(STEPS, seen)
            assert await running == feedback()
    assert seen == list(range(1, STEPS + 1))


async def test_an_agent_that_waits_at_a_dead_owner_asks_the_new_one_as_soon_as_there_is_one(
    nats: NatsForTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The silence of the dead one would be noticed too late for any test.
    monkeypatch.setattr("dsec_sandboxd.agent_gateway._ATTEMPT_S", 1e6)
    async with (
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
        contextlib.AsyncExitStack() as later,
    ):
        async with chronus_process(nats, tmp_path) as doomed:
            rollout_id = await open_rollout(trainer_bus)
            await later.enter_async_context(sandbox_of(node_bus, tmp_path, rollout_id))
            running = asyncio.create_task(asyncio.to_thread(run_agent, tmp_path, 1, 1))
            assert (await Trainer(trainer_bus, rollout_id).next(0)).reports
            doomed.kill()
        async with chronus_process(nats, tmp_path):
            await Trainer(trainer_bus, rollout_id).answer_all(1, [])
            assert await running == feedback(1, 1)


@pytest.mark.parametrize("size", [100, 100_000])
async def test_a_step_without_a_wait_is_durable_whatever_its_size(
    nats: NatsForTests, tmp_path: Path, size: int
) -> None:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout_id = await open_rollout(trainer_bus)
        async with sandbox_of(node_bus, tmp_path, rollout_id):
            agent = RawAgent(*await asyncio.open_unix_connection(tmp_path / SOCKET_NAME))
            step = {"seq": 1, "stage": "tried", "payload": "x" * size, "wait_s": 0}
            assert (await agent.ask("step", **step))["result"] == {"ready": False, "seq": 1}
            await Trainer(trainer_bus, rollout_id).feedback(1, "go on")
            assert (await agent.ask("step", **step))["result"]["payload"] == "go on"
            await agent.close()


async def test_a_huge_observation_is_refused_with_the_limit_and_what_to_do(
    nats: NatsForTests, tmp_path: Path
) -> None:
    async with nats.service("sandboxd", NODE) as bus, sandbox_of(bus, tmp_path, "s0.nobody"):
        with AgentChannel(str(tmp_path / SOCKET_NAME)) as channel:
            with pytest.raises(
                AgentError, match=r"262144.* put larger data into a file"
            ) as refusal:
                await asyncio.to_thread(channel.step, "saw", "x" * (64 << 20), 1)
            assert refusal.value.code == "invalid"


async def test_an_agent_that_is_started_again_goes_on_where_the_rollout_is(
    nats: NatsForTests, tmp_path: Path
) -> None:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout_id = await open_rollout(trainer_bus)
        trainer = asyncio.create_task(Trainer(trainer_bus, rollout_id).answer_all(6, []))
        async with sandbox_of(node_bus, tmp_path, rollout_id):
            assert await asyncio.to_thread(run_agent, tmp_path, 1, 3) == feedback(1, 3)
        # The same rollout in another sandbox: the first one is gone.
        async with sandbox_of(node_bus, tmp_path, rollout_id):
            with AgentChannel(str(tmp_path / SOCKET_NAME)) as channel:
                about = await asyncio.to_thread(channel.hello)
                assert about["last_seq"] == 3
                for seq in (4, 5, 6):
                    answer = await asyncio.to_thread(channel.step, "tried", {"step": seq})
                    assert answer["payload"] == {"to": {"step": seq}}
        await trainer


async def test_another_projects_rollout_is_not_found(nats: NatsForTests, tmp_path: Path) -> None:
    async with (
        chronus_service(nats),
        nats.project("other") as other,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout_id = await open_rollout(other, project="other")
        async with sandbox_of(node_bus, tmp_path, rollout_id):
            with AgentChannel(str(tmp_path / SOCKET_NAME)) as channel:
                for ask in (channel.hello, lambda: channel.report("x", None, 1)):
                    with pytest.raises(AgentError) as refusal:
                        await asyncio.to_thread(ask)
                    assert refusal.value.code == "not_found"


async def test_a_closed_rollout_takes_no_more_reports(nats: NatsForTests, tmp_path: Path) -> None:
    async with (
        chronus_service(nats),
        nats.project() as trainer_bus,
        nats.service("sandboxd", NODE) as node_bus,
    ):
        rollout = await Rollouts(Channel(trainer_bus, "default")).open()
        async with sandbox_of(node_bus, tmp_path, rollout.id):
            with AgentChannel(str(tmp_path / SOCKET_NAME)) as channel:
                await asyncio.to_thread(channel.report, "x")
                await rollout.close()
                with pytest.raises(AgentError) as refusal:
                    await asyncio.to_thread(channel.step, "y")
                assert refusal.value.code == "expired"


async def test_without_any_chronus_an_agent_is_told_after_its_patience(
    nats: NatsForTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_sandboxd.agent_session.REPORT_TIMEOUT_S", 0.2)
    async with (
        nats.service("sandboxd", NODE) as node_bus,
        sandbox_of(node_bus, tmp_path, "s0.nobody"),
    ):
        channel = AgentChannel(str(tmp_path / SOCKET_NAME), patience_s=0.1)
        with channel, pytest.raises(AgentError, match="cannot be reached now") as refusal:
            await asyncio.to_thread(channel.report, "x", None, 1)
    assert refusal.value.code == "unavailable"
    assert refusal.value.retryable
