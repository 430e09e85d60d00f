"""The registry of agents when answers are lost and schedulers are killed or many."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dsec_common.errors import unavailable
from dsec_common.wire.agent import (
    AGENT_SOCKET,
    AgentPolicy,
)
from dsec_scheduler.agents import changes
from dsec_scheduler.agents.records import AgentRecord
from registry_world import RATE, RegistryWorld, registry_world


@pytest.fixture
async def world() -> AsyncIterator[RegistryWorld]:
    async with registry_world() as running:
        yield running


async def test_nothing_is_lost_under_four_schedulers(world: RegistryWorld) -> None:
    """All change the same documents at once, and every change is there in the end."""
    for _ in range(3):
        await world.plane.scheduler()
    await world.agents.register("bot", "0")
    count = 24
    await asyncio.gather(
        *(world.agents.register("bot", str(number)) for number in range(1, count)),
        *(world.node.report(f"i{number}", version="0") for number in range(count)),
        *(world.agents.push_policy("bot", rate_limits=RATE) for _ in range(8)),
    )
    agent = await world.agents.inspect("bot")
    assert {one.version for one in agent.versions} == {str(number) for number in range(count)}
    assert len(await world.agents.instances("bot")) == count
    assert agent.revision == count + 8


async def test_a_write_whose_answer_got_lost_is_known_again(world: RegistryWorld) -> None:
    """The scheduler's write took place, and it was told that it had not."""
    registry = world.scheduler._registry
    kv: Any = registry._agents
    create, lost = kv.create, []

    async def create_and_lose(key: str, value: AgentRecord) -> int:
        await create(key, value)
        lost.append(value)
        raise unavailable("the answer got lost")

    kv.create = create_and_lose
    try:
        agent = await world.agents.register("bot", "1")
    finally:
        del kv.create
    assert len(lost) == 1
    assert agent.revision == 1
    assert (await registry.read("default", "bot")).message_id == lost[0].message_id


async def test_the_instances_of_a_lost_node_are_dropped_in_the_end(world: RegistryWorld) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a")
    governor = world.scheduler._agent_part._governor
    await governor.sweep()
    assert len(await world.agents.instances("bot")) == 1
    governor._forget_s = 0.0
    await governor.sweep()
    assert await world.agents.instances("bot") == []


async def test_a_scheduler_killed_between_write_and_reply_leaves_nothing_undone(
    world: RegistryWorld,
) -> None:
    """The document is written and nobody was told: the next report brings it, or asking again."""
    await world.agents.register("bot", "1")
    await world.node.report("a")

    def pushed(kept: AgentRecord | None) -> AgentRecord:
        assert kept is not None
        return changes.pushed(kept, AgentPolicy(rate_limits=RATE), "", single=False)

    record = await world.scheduler._registry.change("default", "bot", pushed)
    assert world.node.told == []
    answer = await world.node.report(revisions={"default": {"bot": record.revision - 1}})
    assert [one.revision for one in answer.rules] == [record.revision]
    governed = await world.agents.push_policy("bot", rate_limits=RATE)
    assert governed.revision == record.revision + 1
    assert world.node.told[-1].revision == governed.revision


async def test_a_scheduler_that_is_killed_loses_no_change(world: RegistryWorld) -> None:
    """Killed while changes are under way; asked again, another one carries each of them out."""
    await world.agents.register("bot", "1")
    await world.node.report("a")
    bus = world.plane.nats.service_config("scheduler")
    environment = {
        **os.environ,
        "DSEC_NATS_SERVERS": bus.servers[0],
        "DSEC_NATS_CREDENTIALS": bus.credentials_path,
        "DSEC_WARM_UP_S": "0",
        "DSEC_HTTP_PORT": "0",
    }
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec_scheduler", env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert other.stderr is not None
        async with asyncio.timeout(30):
            while b"running" not in await other.stderr.readline():
                pass
        pushes = [
            asyncio.create_task(
                world.agents.push_policy("bot", rate_limits={AGENT_SOCKET: 1.0 + n})
            )
            for n in range(40)
        ]
        await asyncio.wait(pushes, return_when=asyncio.FIRST_COMPLETED)
        other.kill()
        answers = await asyncio.gather(*pushes)
    finally:
        if other.returncode is None:
            other.kill()
        await other.wait()
    agent = await world.agents.inspect("bot")
    assert agent.revision >= max(answer.revision for answer in answers) >= 41
    assert len({answer.revision for answer in answers}) == 40
    await world.agents.push_policy("bot", paused=True)
    last = world.node.told[-1]
    assert last.policies[last.versions["1"]].paused
