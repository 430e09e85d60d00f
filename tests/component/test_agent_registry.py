"""The registry of agents: what is registered, listed, packaged, removed, put back."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.clock import FakeClock
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.agent import (
    ACTIVE,
    AGENT_SOCKET,
    NETWORK_ACCESS,
    PACKAGE_CHUNK_BYTES,
    AgentInfo,
    AgentList,
    AgentPolicy,
    ListAgents,
    PackagePieceKept,
    RegisterAgent,
    UploadPackage,
    shard_of,
)
from dsec_scheduler.agents.packages import BUCKET, Packages
from dsec_scheduler.agents.records import ContractRecord, ShardRecord
from dsec_scheduler.agents.registry import AGENTS_BUCKET, INSTANCES_BUCKET, Registry
from registry_world import RegistryWorld, registry_world


def _with_package(digest: str, size: int) -> RegisterAgent:
    return RegisterAgent(name="bot", version="1", package_sha256=digest, package_bytes=size)


@pytest.fixture
async def world() -> AsyncIterator[RegistryWorld]:
    async with registry_world() as running:
        yield running


async def test_an_agent_is_registered_listed_and_inspected(world: RegistryWorld) -> None:
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


async def test_a_listing_has_pages(world: RegistryWorld) -> None:
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


async def test_a_project_sees_only_its_own_agents(world: RegistryWorld) -> None:
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


async def test_a_package_is_kept_in_pieces_and_checked_as_a_whole(world: RegistryWorld) -> None:
    package = bytes(range(256)) * (PACKAGE_CHUNK_BYTES // 256 + 1)
    await world.agents.register("bot", "1", package=package)
    (version,) = (await world.agents.inspect("bot")).versions
    assert version.package_sha256 == hashlib.sha256(package).hexdigest()
    assert version.package_bytes == len(package)


async def test_a_package_that_is_not_what_its_hash_says_is_refused(world: RegistryWorld) -> None:
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


async def test_the_packages_of_one_project_leave_room_for_those_of_others() -> None:
    async with registry_world(agent_packages_project_max_bytes=3 * PACKAGE_CHUNK_BYTES) as world:
        await world.agents.register("bot", "1", package=bytes(PACKAGE_CHUNK_BYTES + 1))
        last = UploadPackage(sha256=hashlib.sha256(b"1").hexdigest(), index=0, data=b"1")
        await world.agents._ask("upload", last, PackagePieceKept)
        more = UploadPackage(sha256=hashlib.sha256(b"2").hexdigest(), index=0, data=b"2")
        with pytest.raises(DsecError, match="agent_packages_project_max_bytes") as caught:
            await world.agents._ask("upload", more, PackagePieceKept)
        assert caught.value.code is ErrorCode.EXHAUSTED
        await world.agents._ask("upload", last, PackagePieceKept)
        await world.others.register("bot", "1", package=b"theirs")


async def test_what_was_uploaded_long_ago_and_never_registered_makes_room() -> None:
    async with nats_for_tests() as nats, nats.service("scheduler") as bus:
        bucket = await bus.objects(BUCKET, replicas=1)
        clock = FakeClock(time.time())
        packages = Packages(bucket, clock, 2 * PACKAGE_CHUNK_BYTES)
        used, left, new = (UploadPackage(sha256=64 * it, index=0, data=b"x") for it in "abc")

        async def registered() -> set[str]:
            return {used.sha256}

        for piece in (used, left):
            await packages.keep("default", piece, registered)
        with pytest.raises(DsecError, match="remove versions"):
            await packages.keep("default", new, registered)
        await clock.advance(2 * 3600)
        await packages.keep("default", new, registered)
        assert await bucket.names() == [f"default/{64 * it}/0" for it in "ac"]


async def test_a_project_has_so_many_agents_and_those_it_has_take_versions_all_the_same() -> None:
    async with registry_world(agents_project_max=2) as world:
        for name in ("one", "two"):
            await world.agents.register(name, "1")
        with pytest.raises(DsecError, match=r"agents_project_max\); remove agents") as caught:
            await world.agents.register("three", "1", contract={"capabilities": []})
        assert caught.value.code is ErrorCode.EXHAUSTED
        assert await _kept_contracts(world) == set()
        await world.agents.register("one", "1")
        await world.agents.register("one", "2")
        await world.others.register("three", "1")
        await world.agents.remove("two")
        await world.agents.register("three", "1")
        with pytest.raises(DsecError, match="agents_project_max"):
            await world.agents.register("two", "1")
        assert [one.name for one in await world.agents.list()] == ["one", "three"]


async def test_a_registration_that_is_refused_keeps_no_contract(world: RegistryWorld) -> None:
    contract = {"name": "bot", "capabilities": [{"tool": "calculator"}]}
    await world.agents.register("bot", "1", contract=contract)
    kept = await _kept_contracts(world)
    assert len(kept) == 1
    for number in range(3):
        with pytest.raises(DsecError, match="something else") as caught:
            await world.agents.register(
                "bot", "1", contract={**contract, "description": f"number {number}"}
            )
        assert caught.value.code is ErrorCode.CONFLICT
    assert await _kept_contracts(world) == kept
    await world.agents.register("bot", "1", contract=contract)
    await world.agents.register("bot", "2", contract={**contract, "description": "another"})
    assert len(await _kept_contracts(world)) == 2
    described = {
        one.version: one.contract.get("description")
        for one in (await world.agents.inspect("bot")).versions
    }
    assert described == {"1": None, "2": "another"}


async def _kept_contracts(world: RegistryWorld) -> set[str]:
    async with world.plane.nats.service("scheduler") as bus:
        bucket = await bus.kv(AGENTS_BUCKET, ContractRecord)
        return set(await bucket.keys("*.*.*"))


async def test_active_means_the_active_version_wherever_a_version_is_named(
    world: RegistryWorld,
) -> None:
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


async def test_what_nobody_uses_is_removed_with_its_package(world: RegistryWorld) -> None:
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


async def test_the_last_update_is_rolled_back_and_that_again(world: RegistryWorld) -> None:
    await world.agents.register("bot", "1")
    with pytest.raises(DsecError, match="never updated") as caught:
        await world.agents.rollback("bot")
    assert caught.value.code is ErrorCode.CONFLICT
    await world.agents.register("bot", "2")
    await world.agents.update("bot", "2")
    for active in ("1", "2"):
        await world.agents.rollback("bot")
        assert (await world.agents.inspect("bot")).active == active


async def test_reports_for_one_document_are_written_together(world: RegistryWorld) -> None:
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


def _sha256(package: bytes) -> str:
    return hashlib.sha256(package).hexdigest()
