"""Policies and updates of agents: what nodes are told, and what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from control_plane import until
from dsec_common import subjects
from dsec_common.bus import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.streams import EVENTS
from dsec_common.wire.agent import (
    NETWORK_ACCESS,
    AgentPolicy,
    AgentRolledBack,
    VersionState,
)
from dsec_common.wire.agent_node import (
    InstancesReported,
    ReportInstances,
)
from registry_world import RATE, RegistryWorld, registry_world


@pytest.fixture
async def world() -> AsyncIterator[RegistryWorld]:
    async with registry_world() as running:
        yield running


async def test_a_policy_is_told_to_every_node_that_holds_instances(world: RegistryWorld) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a")
    governed = await world.agents.push_policy("bot", rate_limits=RATE)
    assert (governed.nodes, governed.instances, governed.silent_nodes) == (1, 1, ())
    rules = world.node.told[-1]
    assert rules.policies[rules.versions["1"]].rate_limits == RATE
    (instance,) = await world.agents.instances("bot")
    assert instance.policy_revision == governed.revision


async def test_a_node_that_is_silent_is_named_and_told_when_it_reports(
    world: RegistryWorld,
) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a")
    world.node.refuses = True
    governed = await world.agents.push_policy("bot", rate_limits=RATE)
    assert governed.silent_nodes == ("node-1",)
    answer = await world.node.report(revisions={"default": {"bot": governed.revision - 1}})
    (rules,) = answer.rules
    assert rules.revision == governed.revision
    assert rules.policies[rules.versions["1"]].rate_limits == RATE
    again = await world.node.report(revisions={"default": {"bot": governed.revision}})
    assert again.rules == ()


async def test_a_node_that_was_away_learns_the_policies_of_its_single_instances(
    world: RegistryWorld,
) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b")
    world.node.refuses = True
    governed = await world.agents.push_policy("bot", paused=True, instances=["node-1.a"])
    answer = await world.node.report(revisions={"default": {"bot": 0}})
    (rules,) = answer.rules
    assert rules.pinned == {"a": governed.revision}
    assert rules.policies[governed.revision].paused


async def test_a_policy_of_chosen_instances_leaves_the_others_alone(world: RegistryWorld) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b")
    governed = await world.agents.push_policy(
        "bot", paused=True, instances=["node-1.a", "node-1.unknown"]
    )
    assert governed.instances == 1
    assert [one.what for one in governed.refused] == ["node-1.unknown"]
    assert world.node.told[-1].pinned == {"a": governed.revision}
    revisions = {one.sandbox_id: one.policy_revision for one in await world.agents.instances("bot")}
    assert revisions == {"node-1.a": governed.revision, "node-1.b": 0}


async def test_a_revocation_keeps_what_single_instances_had_of_their_own(
    world: RegistryWorld,
) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b")
    await world.agents.push_policy("bot", rate_limits=RATE, instances=["node-1.a"])
    await world.agents.revoke("bot", [NETWORK_ACCESS])
    rules = world.node.told[-1]
    own = rules.policies[rules.pinned["a"]]
    assert (own.rate_limits, own.revoked) == (RATE, (NETWORK_ACCESS,))
    assert rules.policies[rules.versions["1"]].revoked == (NETWORK_ACCESS,)


async def test_what_nothing_enforces_changes_nothing(world: RegistryWorld) -> None:
    await world.agents.register("bot", "1", permissions=["read_file"])
    with pytest.raises(DsecError, match="nothing enforces") as caught:
        await world.agents.revoke("bot", ["read_file"])
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert (await world.agents.inspect("bot")).versions[0].policy is None
    assert world.node.told == []


async def test_a_node_cannot_report_for_another(world: RegistryWorld) -> None:
    world.node.name = "node-1"
    message = ReportInstances(node="node-2", complete=True)
    with pytest.raises(DsecError) as caught:
        await world.node.bus.request(subjects.instance_report("node-1"), message, InstancesReported)
    assert caught.value.code is ErrorCode.DENIED


async def test_a_restarted_node_says_which_instances_there_are_still(world: RegistryWorld) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b", "c")
    await world.node.report("b", complete=True)
    assert [one.sandbox_id for one in await world.agents.instances("bot")] == ["node-1.b"]
    (version,) = (await world.agents.inspect("bot")).versions
    assert (version.instances, version.finished, version.failed) == (1, 2, 0)


async def test_an_update_drains_the_old_version_and_can_be_taken_back(world: RegistryWorld) -> None:
    for version in ("1", "2"):
        await world.agents.register("bot", version)
    await world.node.report("a")
    await world.agents.update("bot", "2", drain_idle_s=1.5)
    rules = world.node.told[-1]
    assert (rules.draining, rules.drain_idle_s) == (("1",), 1.5)
    await world.agents.update("bot", "1")
    assert world.node.told[-1].draining == ("2",)


async def test_a_revocation_in_the_middle_of_an_update_outlives_its_being_taken_back(
    world: RegistryWorld,
) -> None:
    for version in ("1", "2"):
        await world.agents.register("bot", version)
    await world.node.report("old")
    await world.agents.update("bot", "2", failure_minimum=1, failure_threshold=0.0)
    await world.node.report("new", version="2")
    await world.agents.revoke("bot", [NETWORK_ACCESS])
    await world.node.report(ended=("new",), failed=True)
    async with asyncio.timeout(20):
        while (agent := await world.agents.inspect("bot")).active != "1":
            await asyncio.sleep(0.05)
    assert [one.policy for one in agent.versions] == 2 * [AgentPolicy(revoked=(NETWORK_ACCESS,))]
    rules = world.node.told[-1]
    assert rules.draining == ("2",)
    assert all(NETWORK_ACCESS in rules.policies[it].revoked for it in rules.versions.values())


async def test_too_many_failures_take_a_new_version_back(world: RegistryWorld) -> None:
    events: list[AgentRolledBack] = []
    watching = await world.plane.project()
    await world.scheduler.bus.ensure_stream(EVENTS)

    async def heard(request: Request[AgentRolledBack]) -> None:
        events.append(request.message)

    await watching.subscribe(
        subjects.agent_event("default", "bot", "rolled_back"), AgentRolledBack, heard
    )
    for version in ("1", "2"):
        await world.agents.register("bot", version)
    await world.agents.update("bot", "2", failure_minimum=3, failure_threshold=0.5)
    good, bad = ("g1", "g2"), ("b1", "b2", "b3")
    await world.node.report("lives", *good, *bad, version="2")
    await world.node.report(ended=good)
    await world.node.report(ended=bad, failed=True)
    await until(lambda: bool(events))
    assert (events[0].from_version, events[0].to_version) == ("2", "1")
    agent = await world.agents.inspect("bot")
    assert agent.active == "1"
    assert agent.rollout is not None
    assert agent.rollout.state == "rolled_back"
    assert {one.version: one.state for one in agent.versions} == {
        "1": VersionState.ACTIVE,
        "2": VersionState.FAILED,
    }
    await until(lambda: bool(world.node.told) and world.node.told[-1].draining == ("2",))
