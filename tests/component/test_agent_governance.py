"""Policies of agents on a real node: what an instance may do is what its policy says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec.client import DSecClient
from dsec.sandbox import Sandbox
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent import ACTIVE, AGENT_SOCKET, NETWORK_ACCESS, AgentPolicy
from dsec_common.wire.network import NetworkMode
from dsec_common.wire.sandbox import EndCause, SandboxEnded, SandboxState
from dsec_scheduler.agents import changes
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.service import SchedulerService
from sandboxd_node import BASE, TOOLKIT, NodeForTests, node_for_tests

ELSEWHERE: dict[str, Any] = {"mode": "allow", "allow": ["10.9.9.9"]}


class World:
    """A node, a scheduler, and a project's client."""

    def __init__(self, node: NodeForTests, scheduler: SchedulerService, client: DSecClient) -> None:
        self.node = node
        self.scheduler = scheduler
        self.client = client
        self.agents = client.agents

    async def instance(self, **given: Any) -> Sandbox:
        """Return an instance of the agent ``bot``."""
        return await self.client.create_sandbox(agent="bot", agent_version=ACTIVE, **given)

    async def known(self, *sandboxes: Sandbox) -> None:
        """Return when the registry knows the instances, and no others."""
        ids = {sandbox.id for sandbox in sandboxes}
        async with asyncio.timeout(20):
            while {one.sandbox_id for one in await self.agents.instances("bot")} != ids:
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _world(node: NodeForTests) -> AsyncIterator[World]:
    bus = node.nats.service_config("scheduler")
    scheduler = SchedulerService(
        SchedulerConfig(
            nats_servers=bus.servers,
            nats_credentials=bus.credentials_path,
            node_timeout_s=5.0,
            warm_up_s=0.5,
        )
    )
    await scheduler.start()
    try:
        credentials = str(node.nats.auth.project("default"))
        async with DSecClient([node.nats.server.url], credentials) as client:
            world = World(node, scheduler, client)
            await world.agents.register("bot", "1", base=BASE, permissions=[NETWORK_ACCESS])
            yield world
    finally:
        assert await scheduler.stop() == 0


@pytest.fixture
async def world(tmp_path: Path, layers: Path) -> AsyncIterator[World]:
    async with node_for_tests(tmp_path, layers) as node, _world(node) as world:
        yield world


async def test_an_instance_has_its_versions_layers_and_is_known(world: World) -> None:
    await world.agents.register("bot", "2", base=BASE, toolkits=[TOOLKIT])
    await world.agents.update("bot", "2")
    async with await world.instance() as sandbox:
        result = await sandbox.exec("cat /opt/tools/hello", check=True)
        assert result.stdout_text == "hello from the toolkit\n"
        assert (await sandbox.inspect()).agent_version == "2"
        await world.known(sandbox)
    await world.known()
    counts = {one.version: one.finished for one in (await world.agents.inspect("bot")).versions}
    assert counts == {"1": 0, "2": 1}


async def test_an_agent_that_is_not_registered_is_a_label_unless_it_has_to_be(
    world: World,
) -> None:
    async with await world.client.create_sandbox(BASE, agent="stranger") as sandbox:
        info = await sandbox.inspect()
        assert (info.agent, info.agent_version) == ("stranger", "")
    with pytest.raises(DsecError) as caught:
        await world.client.create_sandbox(BASE, agent="stranger", agent_version=ACTIVE)
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(DsecError, match="no version '9'") as unknown:
        await world.client.create_sandbox(BASE, agent="bot", agent_version="9")
    assert unknown.value.code is ErrorCode.NOT_FOUND


async def test_a_revoked_permission_takes_the_network_away_and_keeps_it_away(
    world: World,
) -> None:
    sandbox = await world.instance(network=ELSEWHERE)
    await world.known(sandbox)
    assert (await sandbox.network.inspect()).policy.mode is NetworkMode.ALLOW
    governed = await world.agents.revoke("bot", [NETWORK_ACCESS])
    assert (governed.instances, governed.nodes, governed.refused) == (1, 1, ())
    assert (await sandbox.network.inspect()).policy.mode is NetworkMode.NONE
    with pytest.raises(DsecError, match="policy of agent bot") as caught:
        await sandbox.network.set("open")
    assert caught.value.code is ErrorCode.DENIED
    later = await world.instance(network=ELSEWHERE)
    assert (await later.network.inspect()).policy.mode is NetworkMode.NONE
    await world.agents.push_policy("bot")
    for one in (sandbox, later):
        assert (await one.network.inspect()).policy.mode is NetworkMode.ALLOW
        await one.delete()


@pytest.mark.parametrize(
    "rule",
    [{"cidr": "nonsense"}, {"cidr": "10.0.0.1", "ports": "99999"}, {"host": "a host"}],
)
async def test_a_network_that_makes_no_sense_is_refused_and_harms_no_instance(
    world: World, rule: dict[str, str]
) -> None:
    async with await world.instance(network=ELSEWHERE) as sandbox:
        await world.known(sandbox)
        with pytest.raises(DsecError) as caught:
            await world.agents.push_policy("bot", network={"mode": "allow", "allow": [rule]})
        assert caught.value.code is ErrorCode.INVALID
        assert (await world.agents.inspect("bot")).versions[0].policy is None
        assert (await sandbox.network.inspect()).policy.mode is NetworkMode.ALLOW


async def test_a_network_that_a_node_cannot_give_leaves_an_instance_without(world: World) -> None:
    async with await world.instance(network=ELSEWHERE) as sandbox:
        await world.known(sandbox)
        network = {"mode": "allow", "rule_sets": {"pypii": True}}
        governed = await world.agents.push_policy("bot", network=network)
        (refused,) = governed.refused
        assert (refused.what, refused.code) == (sandbox.id, ErrorCode.INVALID)
        assert "pypii" in refused.reason
        assert (await sandbox.network.inspect()).policy.mode is NetworkMode.NONE
        await world.agents.push_policy("bot", network=ELSEWHERE)
        assert (await sandbox.network.inspect()).policy.mode is NetworkMode.ALLOW


async def test_the_agent_phase_is_no_way_around_a_policy(world: World) -> None:
    async with await world.instance(network=ELSEWHERE, setup_network={"mode": "none"}) as sandbox:
        await world.agents.revoke("bot", [NETWORK_ACCESS])
        info = await sandbox.network.enter_agent_phase()
        assert info.policy.mode is NetworkMode.NONE


async def test_a_paused_agents_instances_stand_still_until_it_is_said_otherwise(
    world: World,
) -> None:
    sandbox, other = await world.instance(), await world.instance()
    await world.known(sandbox, other)
    governed = await world.agents.push_policy("bot", paused=True, instances=[sandbox.id])
    assert governed.instances == 1
    assert (await sandbox.inspect()).state is SandboxState.PAUSED
    for ask in (sandbox.exec("true"), sandbox.resume()):
        with pytest.raises(DsecError, match="stand still") as caught:
            await ask
        assert caught.value.code is ErrorCode.DENIED
    assert (await other.exec("true")).ok
    await world.agents.push_policy("bot")
    assert (await sandbox.exec("true")).ok
    for one in (sandbox, other):
        await one.delete()


async def test_a_paused_agent_gets_no_new_instances(world: World) -> None:
    await world.agents.push_policy("bot", paused=True)
    with pytest.raises(DsecError, match="stand still") as caught:
        await world.instance()
    assert caught.value.code is ErrorCode.DENIED


async def test_a_policy_outlives_the_nodes_daemon(world: World) -> None:
    sandbox = await world.instance(network=ELSEWHERE)
    await world.known(sandbox)
    await world.agents.push_policy("bot", paused=True, revoked=[NETWORK_ACCESS])
    world.node.service.request_handover()
    assert await world.node.stop_service() == 0
    await world.node.start_service()
    with pytest.raises(DsecError, match="stand still"):
        await sandbox.exec("true")
    await world.known(sandbox)
    await world.agents.push_policy("bot", revoked=[NETWORK_ACCESS])
    assert (await sandbox.network.inspect()).policy.mode is NetworkMode.NONE
    await sandbox.delete()


async def test_old_instances_finish_and_leave_while_new_work_goes_to_the_new_version(
    world: World,
) -> None:
    await world.agents.register("bot", "2", base=BASE)
    idle, busy = await world.instance(), await world.instance()
    await world.known(idle, busy)
    working = asyncio.create_task(busy.exec("sleep 2; echo done"))
    await asyncio.sleep(0)
    await world.agents.update("bot", "2", drain_idle_s=0.3)
    async with await world.instance() as new:
        assert (await new.inspect()).agent_version == "2"
        ended = await world.node.event_of(idle.id, SandboxEnded)
        assert ended.cause is EndCause.IDLE
        assert (await working).stdout_text == "done\n"
        await world.node.event_of(busy.id, SandboxEnded)
        assert (await new.exec("true")).ok
        await world.known(new)


async def test_an_instance_that_is_killed_has_failed_and_one_that_is_deleted_has_not(
    world: World,
) -> None:
    good = await world.instance()
    await good.delete()
    failing = await world.instance(command="exit 3")
    await failing.delete()
    async with asyncio.timeout(20):
        while True:
            (version,) = (await world.agents.inspect("bot")).versions
            if version.finished == 2:
                break
            await asyncio.sleep(0.05)
    assert version.failed == 1


async def test_the_agent_socket_answers_only_as_often_as_allowed(world: World) -> None:
    sandbox = await world.instance()
    await world.known(sandbox)
    await world.agents.push_policy("bot", rate_limits={AGENT_SOCKET: 1.0})
    server = world.node.service._agents._governing._rates
    assert server is not None
    door: Any = server._doors[sandbox.id.partition(".")[2]]  # type: ignore[attr-defined]
    assert (door._rate._per_s, door._rate._burst) == (1.0, 1.0)
    await world.agents.push_policy("bot")
    assert door._rate._per_s == server.limits.requests_per_s  # type: ignore[attr-defined]
    await sandbox.delete()


async def test_a_node_that_missed_a_change_learns_of_it_with_its_next_report(
    world: World,
) -> None:
    """Nobody could tell it: the change was made while it could not be reached."""
    sandbox = await world.instance()
    await world.known(sandbox)
    scheduler = world.scheduler
    record = await scheduler._registry.read("default", "bot")
    await scheduler._registry.change(
        "default",
        "bot",
        lambda kept: changes.pushed(kept or record, AgentPolicy(paused=True), "", single=False),
    )
    async with asyncio.timeout(20):
        while (await sandbox.inspect()).state is not SandboxState.PAUSED:
            await asyncio.sleep(0.1)
    await world.agents.push_policy("bot")
    await sandbox.delete()
