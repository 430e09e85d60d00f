"""The registry of agents: schedulers on a real NATS, and nodes that say what they are told."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane import ControlPlane, control_plane, until
from dsec.agents import Agents
from dsec.channel import Channel
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.streams import EVENTS
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.agent import (
    ACTIVE,
    AGENT_SOCKET,
    NETWORK_ACCESS,
    PACKAGE_CHUNK_BYTES,
    AgentInfo,
    AgentList,
    AgentPolicy,
    AgentRolledBack,
    ListAgents,
    PackagePieceKept,
    RegisterAgent,
    UploadPackage,
    VersionState,
    shard_of,
)
from dsec_common.wire.agent_node import (
    AgentRules,
    GovernNode,
    InstanceEnded,
    InstancesReported,
    InstanceStarted,
    NodeGoverned,
    ReportInstances,
)
from dsec_scheduler.agents import changes
from dsec_scheduler.agents.records import AgentRecord, ShardRecord
from dsec_scheduler.agents.registry import INSTANCES_BUCKET, Registry
from dsec_scheduler.service import SchedulerService

RATE = {AGENT_SOCKET: 5.0}


def _with_package(digest: str, size: int) -> RegisterAgent:
    return RegisterAgent(name="bot", version="1", package_sha256=digest, package_bytes=size)


class Node:
    """A node that holds instances, and remembers what it is told."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.told: list[AgentRules] = []
        self.refuses = False

    async def start(self) -> None:
        """Listen."""
        await self.bus.serve(subjects.node_request(self.name, "govern"), GovernNode, self._govern)
        await self.bus.flush()

    async def _govern(self, request: Request[GovernNode]) -> NodeGoverned:
        if self.refuses:
            raise unavailable("this node is not well")
        self.told.append(request.message.rules)
        return NodeGoverned(instances=1)

    async def report(
        self,
        *started: str,
        ended: tuple[str, ...] = (),
        project: str = "default",
        version: str = "1",
        failed: bool = False,
        **fields: Any,
    ) -> InstancesReported:
        """Tell a scheduler what began and ended."""
        message = ReportInstances(
            node=self.name,
            started=tuple(
                InstanceStarted(
                    project=project, local=local, agent="bot", version=version, started_at=1.0
                )
                for local in started
            ),
            ended=tuple(
                InstanceEnded(project=project, local=local, failed=failed) for local in ended
            ),
            **fields,
        )
        return await self.bus.request(
            subjects.instance_report(self.name), message, InstancesReported
        )


class World:
    """What a test has: services, a node, and the agents of two projects."""

    def __init__(self, plane: ControlPlane, scheduler: SchedulerService) -> None:
        self.plane = plane
        self.scheduler = scheduler
        self.node: Node
        self.agents: Agents
        self.others: Agents


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with (
        nats_for_tests(projects=("other",)) as nats,
        control_plane(nats) as plane,
        nats.service("sandboxd", "node-1") as bus,
    ):
        world = World(plane, await plane.scheduler())
        world.node = Node(bus, "node-1")
        await world.node.start()
        world.agents = Agents(Channel(await plane.project(), "default"))
        world.others = Agents(Channel(await plane.project("other"), "other"))
        yield world


async def test_an_agent_is_registered_listed_and_inspected(world: World) -> None:
    contract = {"name": "bot", "capabilities": [{"tool": "calculator"}]}
    await world.agents.register(
        "bot", "1", description="répond", contract=contract, permissions=[NETWORK_ACCESS]
    )
    await world.agents.register("bot", "2")
    await world.agents.register("another", "1")
    assert [one.name for one in await world.agents.list()] == ["another", "bot"]
    assert [one.name for one in await world.agents.list(prefix="b")] == ["bot"]
    assert [one.name for one in await world.agents.list(permission=NETWORK_ACCESS)] == ["bot"]
    agent = await world.agents.inspect("bot")
    assert (agent.active, agent.description) == ("1", "répond")
    assert agent.versions[0].contract == contract


async def test_a_listing_has_pages(world: World) -> None:
    for number in range(5):
        await world.agents.register(f"bot-{number}", "1")
    found: list[str] = []
    for _ in range(3):
        page = await world.agents._ask(
            "list",
            ListAgents(limit=2, after=found[-1] if found else ""),
            AgentList,
        )
        found += [one.name for one in page.agents]
        assert page.more == (len(found) < 5)
    assert found == [f"bot-{number}" for number in range(5)]


async def test_a_project_sees_only_its_own_agents(world: World) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a")
    assert await world.others.list() == []
    for ask in (
        world.others.inspect("bot"),
        world.others.instances("bot"),
        world.others.push_policy("bot", paused=True),
        world.others.revoke("bot", [NETWORK_ACCESS]),
        world.others.update("bot", "1"),
    ):
        with pytest.raises(DsecError) as caught:
            await ask
        assert caught.value.code is ErrorCode.NOT_FOUND
    assert world.node.told == []
    await world.others.register("bot", "7")
    assert (await world.agents.inspect("bot")).active == "1"
    refused = await world.others.push_policy("bot", paused=True, instances=["node-1.a"])
    assert [one.what for one in refused.refused] == ["node-1.a"]
    assert refused.instances == 0


async def test_a_package_is_kept_in_pieces_and_checked_as_a_whole(world: World) -> None:
    package = bytes(range(256)) * (PACKAGE_CHUNK_BYTES // 256 + 1)
    await world.agents.register("bot", "1", package=package)
    (version,) = (await world.agents.inspect("bot")).versions
    assert version.package_sha256 == hashlib.sha256(package).hexdigest()
    assert version.package_bytes == len(package)


async def test_a_package_that_is_not_what_its_hash_says_is_refused(world: World) -> None:
    digest = hashlib.sha256(b"meant").hexdigest()
    await world.agents._ask(
        "upload", UploadPackage(sha256=digest, index=0, data=b"other"), PackagePieceKept
    )
    with pytest.raises(DsecError, match="another hash") as caught:
        await world.agents._ask("register", _with_package(digest, 5), AgentInfo)
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError, match="piece 1") as missing:
        await world.agents._ask(
            "register", _with_package(digest, PACKAGE_CHUNK_BYTES + 1), AgentInfo
        )
    assert missing.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(DsecError, match="at most") as large:
        await world.agents.register("bot", "1", package=bytes(50 * 1024 * 1024 + 1))
    assert large.value.code is ErrorCode.INVALID


async def test_a_policy_is_told_to_every_node_that_holds_instances(world: World) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a")
    governed = await world.agents.push_policy("bot", rate_limits=RATE)
    assert (governed.nodes, governed.instances, governed.silent_nodes) == (1, 1, ())
    rules = world.node.told[-1]
    assert rules.policies[rules.versions["1"]].rate_limits == RATE
    (instance,) = await world.agents.instances("bot")
    assert instance.policy_revision == governed.revision


async def test_a_node_that_is_silent_is_named_and_told_when_it_reports(world: World) -> None:
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
    world: World,
) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b")
    world.node.refuses = True
    governed = await world.agents.push_policy("bot", paused=True, instances=["node-1.a"])
    answer = await world.node.report(revisions={"default": {"bot": 0}})
    (rules,) = answer.rules
    assert rules.pinned == {"a": governed.revision}
    assert rules.policies[governed.revision].paused


async def test_a_policy_of_chosen_instances_leaves_the_others_alone(world: World) -> None:
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


async def test_a_revocation_keeps_what_single_instances_had_of_their_own(world: World) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b")
    await world.agents.push_policy("bot", rate_limits=RATE, instances=["node-1.a"])
    await world.agents.revoke("bot", [NETWORK_ACCESS])
    rules = world.node.told[-1]
    own = rules.policies[rules.pinned["a"]]
    assert (own.rate_limits, own.revoked) == (RATE, (NETWORK_ACCESS,))
    assert rules.policies[rules.versions["1"]].revoked == (NETWORK_ACCESS,)


async def test_what_nothing_enforces_changes_nothing(world: World) -> None:
    await world.agents.register("bot", "1", permissions=["read_file"])
    with pytest.raises(DsecError, match="nothing enforces") as caught:
        await world.agents.revoke("bot", ["read_file"])
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert (await world.agents.inspect("bot")).versions[0].policy is None
    assert world.node.told == []


async def test_a_node_cannot_report_for_another(world: World) -> None:
    world.node.name = "node-1"
    message = ReportInstances(node="node-2", complete=True)
    with pytest.raises(DsecError) as caught:
        await world.node.bus.request(subjects.instance_report("node-1"), message, InstancesReported)
    assert caught.value.code is ErrorCode.DENIED


async def test_a_restarted_node_says_which_instances_there_are_still(world: World) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a", "b", "c")
    await world.node.report("b", complete=True)
    assert [one.sandbox_id for one in await world.agents.instances("bot")] == ["node-1.b"]
    (version,) = (await world.agents.inspect("bot")).versions
    assert (version.instances, version.finished, version.failed) == (1, 2, 0)


async def test_an_update_drains_the_old_version_and_can_be_taken_back(world: World) -> None:
    for version in ("1", "2"):
        await world.agents.register("bot", version)
    await world.node.report("a")
    await world.agents.update("bot", "2", drain_idle_s=1.5)
    rules = world.node.told[-1]
    assert (rules.draining, rules.drain_idle_s) == (("1",), 1.5)
    await world.agents.update("bot", "1")
    assert world.node.told[-1].draining == ("2",)


async def test_active_means_the_active_version_wherever_a_version_is_named(world: World) -> None:
    for version in ("1", "2"):
        await world.agents.register("bot", version)
    await world.node.report("a")
    await world.node.report("b", version="2")
    await world.agents.update("bot", "2")
    await world.agents.update("bot", ACTIVE)
    listed = await world.agents.instances("bot", version=ACTIVE)
    assert [one.sandbox_id for one in listed] == ["node-1.b"]
    await world.agents.push_policy("bot", version=ACTIVE, rate_limits={AGENT_SOCKET: 5.0})
    await world.agents.revoke("bot", [NETWORK_ACCESS], version=ACTIVE)
    found = [one.policy for one in (await world.agents.inspect("bot")).versions]
    assert found == [None, AgentPolicy(rate_limits={AGENT_SOCKET: 5}, revoked=(NETWORK_ACCESS,))]


async def test_a_revocation_in_the_middle_of_an_update_outlives_its_being_taken_back(
    world: World,
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


async def test_too_many_failures_take_a_new_version_back(world: World) -> None:
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


async def test_nothing_is_lost_under_four_schedulers(world: World) -> None:
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


async def test_a_write_whose_answer_got_lost_is_known_again(world: World) -> None:
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


async def test_reports_for_one_document_are_written_together(world: World) -> None:
    registry: Registry = world.scheduler._registry
    bucket = await world.scheduler.bus.kv(INSTANCES_BUCKET, ShardRecord)
    shard = shard_of("node-1.a")
    same = [
        local
        for local in (f"x{number}" for number in range(20_000))
        if shard_of(f"node-1.{local}") == shard
    ][:40]
    await asyncio.gather(*(world.node.report(local) for local in same))
    entry = await bucket.get(f"default.{shard}")
    assert entry.value is not None
    assert len(entry.value.instances) == len(same)
    assert entry.revision < len(same)
    assert registry._writers == {}


async def test_the_instances_of_a_lost_node_are_dropped_in_the_end(world: World) -> None:
    await world.agents.register("bot", "1")
    await world.node.report("a")
    governor = world.scheduler._agent_part._governor
    await governor.sweep()
    assert len(await world.agents.instances("bot")) == 1
    governor._forget_s = 0.0
    await governor.sweep()
    assert await world.agents.instances("bot") == []


async def test_a_scheduler_killed_between_write_and_reply_leaves_nothing_undone(
    world: World,
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


async def test_a_scheduler_that_is_killed_loses_no_change(world: World) -> None:
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


async def test_what_nobody_uses_is_removed_with_its_package(world: World) -> None:
    first, second = b"one" * 1000, b"two" * 1000
    await world.agents.register("bot", "1", package=first, toolkits=["tools@1"])
    await world.agents.register("bot", "2", package=second)
    await world.agents.register_like("bot", "3", of="1", toolkits=["tools@2"])
    await world.node.report("a")
    with pytest.raises(DsecError, match="1 instances") as used:
        await world.agents.remove("bot")
    assert used.value.code is ErrorCode.CONFLICT
    assert await world.agents.remove("bot", "2") == ("2",)
    with pytest.raises(DsecError, match="piece 0"):
        await world.agents._ask("register", _with_package(_sha256(second), 3000), AgentInfo)
    with pytest.raises(DsecError, match="no version '2'"):
        await world.agents.remove("bot", "2")
    await world.agents.update("bot", "3", failure_window_s=0.0)
    await world.node.report(ended=("a",))
    assert await world.agents.remove("bot", "1") == ("1",)
    (left,) = (await world.agents.inspect("bot")).versions
    # The package is that of the other version, too.
    assert (left.version, left.toolkits) == ("3", ("tools@2",))
    assert left.package_sha256 == _sha256(first)
    assert await world.agents.remove("bot") == ("3",)
    for gone in (world.agents.inspect, world.agents.remove):
        with pytest.raises(DsecError) as missing:
            await gone("bot")
        assert missing.value.code is ErrorCode.NOT_FOUND
    assert await world.agents.list() == []
    with pytest.raises(DsecError, match="piece 0"):
        await world.agents._ask("register", _with_package(_sha256(first), 3000), AgentInfo)
    again = await world.agents.register("bot", "1")
    assert (again.active, again.versions[0].package_bytes) == ("1", 0)


async def test_the_last_update_is_rolled_back_and_that_again(world: World) -> None:
    await world.agents.register("bot", "1")
    with pytest.raises(DsecError, match="never updated") as caught:
        await world.agents.rollback("bot")
    assert caught.value.code is ErrorCode.CONFLICT
    await world.agents.register("bot", "2")
    await world.agents.update("bot", "2")
    for active in ("1", "2"):
        await world.agents.rollback("bot")
        assert (await world.agents.inspect("bot")).active == active


def _sha256(package: bytes) -> str:
    return hashlib.sha256(package).hexdigest()
