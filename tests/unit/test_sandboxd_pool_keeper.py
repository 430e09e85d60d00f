"""The keeper of a node's pools, on a recording kernel: it fills, hands out once, gives way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec_common.bus_types import ReplyAddress, Request
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.pool import NodePool, NodePools, SetNodePools
from dsec_common.wire.sandbox import (
    CreateSandbox,
    ExecCommand,
    InspectSandbox,
    Limits,
    SandboxCreated,
)
from dsec_common.wire.task import TaskFiles, WarmUse
from dsec_sandboxd.kernel.interface import EndCause
from dsec_sandboxd.pool_keeper import PoolKeeper
from node_world import MIB, NOTHING, World
from refusals import refused

POOL = NodePool(key="k", project="p", base="base@1", toolkits=("tool@1",), wanted=3)


def asks(*pools: NodePool) -> Request[SetNodePools]:
    return Request(
        message=SetNodePools(pools=pools),
        subject="",
        tokens=(),
        headers={},
        reply_to="",
        caller=ReplyAddress(),
        content_type="",
        traceparent="",
    )


def local_of(created: SandboxCreated) -> str:
    return created.sandbox_id.partition(".")[2]


def bound(node: Node) -> list[str]:
    """Return the ids of what was tried to be handed out."""
    calls = node.world.kernel.calls
    return [call.arguments["spec"].local for call in calls if call.name == "bind"]


class Node:
    """A node with pools."""

    def __init__(self, world: World, clock: FakeClock) -> None:
        self.world = world
        self.clock = clock
        self.keeper = PoolKeeper(world.sandboxes, world.maker, calls_max=4)

    async def set(self, *pools: NodePool) -> NodePools:
        return await self.keeper.set(asks(*pools))

    async def ready(self, count: int, key: str = "k") -> None:
        """Return when so many wait, and nothing is being made or dropped."""
        async with asyncio.timeout(20):
            while self.keeper.ready_by_key().get(key, 0) != count or self.keeper.busy:
                await asyncio.sleep(0)
                await self.clock.advance(0.01)

    async def create(self, local: str, warm: WarmUse = WarmUse.PREFER, **given: Any) -> Any:
        request = CreateSandbox(base="base@1", toolkits=("tool@1",), warm=warm, **given)
        return await self.world.place(local, request=request, message_id=local)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    clock = FakeClock()
    world = World(tmp_path, clock)
    await world.start()
    made = Node(world, clock)
    yield made
    await made.keeper.close()
    await world.stop()
    assert world.left() == NOTHING
    world.memory.cleanup()


async def test_a_pool_fills_and_what_waits_is_handed_out(node: Node) -> None:
    told = await node.set(POOL)
    assert [(pool.key, pool.wanted) for pool in told.pools] == [("k", 3)]
    await node.ready(3)
    created: SandboxCreated = await node.create("s1")
    assert created.warm
    local = local_of(created)
    assert node.world.kernel.names().count("create") == 3
    assert local in node.world.sockets.open_now
    assert node.world.directories.find(local) is not None
    await node.ready(3)
    assert len(node.world.kernel.alive) == 4
    await node.world.delete(local)


async def test_it_is_found_by_the_id_that_was_meant_for_it_too(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    created = await node.create("s1")
    assert node.world.state.find("p", "s1") == node.world.state.find("p", local_of(created))
    info = await node.world.sandboxes.inspect(node.world.ask("s1", InspectSandbox()))
    assert info.sandbox_id == created.sandbox_id
    again = await node.create("s1")
    assert again.sandbox_id == created.sandbox_id
    await node.world.delete("s1")
    assert local_of(created) not in node.world.kernel.alive


async def test_one_that_was_claimed_for_a_refused_placement_waits_again(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    error = await refused(
        node.world.place(
            "s1",
            request=CreateSandbox(base="base@1", toolkits=("tool@1",)),
            valid_until=node.clock.now() - 1,
        )
    )
    assert error.code is ErrorCode.TIMEOUT
    assert node.keeper.ready_by_key() == {"k": 3}
    assert len(node.world.kernel.alive) == 3


async def test_bypass_makes_a_new_one_and_require_takes_no_new_one(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    assert not (await node.create("s1", WarmUse.BYPASS)).warm
    refilling = node.world.kernel.hold("create")
    for index in range(3):
        assert (await node.create(f"r{index}", WarmUse.REQUIRE)).warm
    error = await refused(node.create("r3", WarmUse.REQUIRE))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    assert error.details["reason"] == "no_warm_sandbox"
    refilling.set()


async def test_other_layers_another_project_or_a_class_get_no_warm_one(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    plain = CreateSandbox(base="base@1")
    assert not (await node.world.place("s1", request=plain, message_id="1")).warm
    same = CreateSandbox(base="base@1", toolkits=("tool@1",))
    other = await node.world.place("s2", request=same, message_id="2", project="q")
    assert not other.warm
    grouped = await node.create("s3", limits=Limits(oom_group=True))
    assert not grouped.warm


async def test_limits_env_and_network_are_those_of_the_request(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    limits = Limits(memory_bytes=64 * MIB, disk_bytes=16 * MIB, pids=9)
    created = await node.create("s1", limits=limits, env={"A": "1"}, labels={"l": "2"}, agent="x")
    assert created.warm
    assert created.limits == limits
    (bound,) = [call for call in node.world.kernel.calls if call.name == "bind"]
    spec = bound.arguments["spec"]
    assert (spec.memory_bytes, spec.disk_bytes, spec.pids) == (64 * MIB, 16 * MIB, 9)
    assert (spec.local, spec.hostname) == (local_of(created), local_of(created))
    record = node.world.state.find("p", local_of(created))
    assert (record.env, record.labels, record.agent) == ({"A": "1"}, {"l": "2"}, "x")


async def test_many_at_once_get_one_each_and_the_rest_are_made(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    created = await asyncio.gather(
        *(node.create(f"s{index}", limits=Limits(cpus=0.1)) for index in range(10))
    )
    assert sum(one.warm for one in created) >= 3
    assert len(set(bound(node))) == len(bound(node))
    assert {local_of(one) for one in created} <= set(node.world.kernel.alive)


async def test_a_dead_one_is_thrown_away_and_the_next_is_taken(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    node.world.kernel.fail("bind", unavailable("its PID 1 is dead"))
    created = await node.create("s1")
    assert created.warm
    assert node.world.kernel.names().count("bind") == 2
    await node.ready(3)
    assert len(node.world.kernel.alive) == 4


async def test_one_whose_first_process_stands_still_is_not_handed_out(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    still = set(node.world.kernel.alive)
    node.world.kernel.standing_still = still
    created = await node.create("s1")
    assert not created.warm
    assert set(bound(node)) == still
    await node.ready(3)
    assert not still & set(node.world.kernel.alive)


async def test_one_that_dies_while_it_is_handed_out_leads_to_the_next(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    opened = node.world.kernel.hold("bind")
    creating = asyncio.create_task(node.create("s1"))
    async with asyncio.timeout(20):
        while not (tried := bound(node)):
            await asyncio.sleep(0)
    node.world.kernel.end(tried[0], EndCause.KILLED)
    opened.set()
    created = await creating
    assert created.warm
    assert local_of(created) != tried[0]
    await node.ready(3)
    assert len(node.world.kernel.alive) == 4


async def test_one_that_cannot_be_kept_is_told_to_nobody_and_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.set(POOL)
    await node.ready(3)

    def full(record: Any) -> None:
        raise unavailable("the disk is full")

    monkeypatch.setattr(node.world.store, "put", full)
    error = await refused(node.create("s1"))
    assert error.code is ErrorCode.UNAVAILABLE
    await node.world.sandboxes.settled()
    await node.ready(3)
    assert len(node.world.kernel.alive) == 3


async def test_when_none_of_them_lives_one_is_made_now(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    for nth in (1, 2, 3):
        node.world.kernel.fail("bind", unavailable("its PID 1 is dead"), nth=nth)
    created = await node.create("s1")
    assert not created.warm
    assert "s1" in node.world.kernel.alive


async def test_one_that_dies_while_it_waits_is_replaced_and_never_handed_out(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    (dead, *_) = node.world.kernel.alive
    node.world.kernel.end(dead, EndCause.KILLED)
    async with asyncio.timeout(20):
        while node.world.directories.find(dead) is not None:
            await asyncio.sleep(0)
    await node.ready(3)
    for index in range(3):
        await node.create(f"s{index}")
    assert dead not in bound(node)


async def test_every_step_of_a_hand_out_may_fail_and_nothing_is_left(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    node.world.sockets.refuse = True
    error = await refused(node.create("s1"))
    assert error.code is ErrorCode.UNAVAILABLE
    node.world.sockets.refuse = False
    await node.clock.advance(60)
    await node.keeper.tick()
    await node.ready(3)
    assert sorted(node.world.kernel.alive) == sorted(
        path.name for path in node.world.directories.path.iterdir()
    )
    assert (await node.create("s2")).warm


async def test_a_pool_that_cannot_be_made_says_why_and_creations_go_on(node: Node) -> None:
    for nth in (1, 2):
        node.world.kernel.fail("create", DsecError(ErrorCode.EXHAUSTED, "no ids are left"), nth=nth)
    await node.set(POOL)
    async with asyncio.timeout(20):
        while not (told := (await node.set(POOL)).pools[0]).note:
            await asyncio.sleep(0)
    assert "no ids are left" in told.note
    await node.keeper.settled()
    assert not (await node.create("s1")).warm
    await node.clock.advance(60)
    await node.keeper.tick()
    await node.ready(3)


async def test_a_removed_pool_drops_what_waits(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    await node.set()
    await node.keeper.settled()
    assert node.world.kernel.alive == []
    assert node.keeper.ready_by_key() == {}


async def test_a_tag_that_moves_replaces_what_waits(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.set(POOL)
    await node.ready(3)
    before = set(node.world.kernel.alive)
    resolve = node.world.layers.resolve

    async def moved(project: str, reference: str) -> Any:
        layer = await resolve(project, reference)
        return dataclasses.replace(layer, digest=f"{layer.digest}-new")

    monkeypatch.setattr(node.world.layers, "resolve", moved)
    node.world.layers.references_version = "2"
    await node.clock.advance(2)
    await node.keeper.tick()
    await node.ready(3)
    assert not before & set(node.world.kernel.alive)
    assert (await node.create("s1")).warm


async def test_a_layer_that_is_gone_empties_its_pool_and_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.set(POOL)
    await node.ready(3)

    async def gone(project: str, reference: str) -> Any:
        raise DsecError(ErrorCode.NOT_FOUND, f"there is no layer {reference}")

    monkeypatch.setattr(node.world.layers, "resolve", gone)
    node.world.layers.references_version = "2"
    await node.clock.advance(2)
    await node.keeper.tick()
    await node.keeper.settled()
    told = (await node.set(POOL)).pools[0]
    assert (told.ready, told.note) == (0, "there is no layer base@1")
    assert node.world.kernel.alive == []


async def test_pools_give_way_to_sandboxes_and_are_filled_again(node: Node) -> None:
    # The node has room for 64 sandboxes and 8 processors.
    await node.set(msgspec.structs.replace(POOL, wanted=6))
    await node.ready(6)
    for index in range(6):
        await node.create(f"s{index}", WarmUse.BYPASS)
    await node.keeper.tick()
    await node.keeper.settled()
    told = (await node.set(msgspec.structs.replace(POOL, wanted=6))).pools[0]
    assert told.ready == 2  # 6 + 2 processors
    assert "cpus" in told.note
    await node.create("s6", WarmUse.BYPASS)
    await node.create("s7", WarmUse.BYPASS)
    await node.keeper.settled()
    assert node.keeper.ready_by_key() == {}
    for index in range(8):
        await node.world.delete(f"s{index}")
    await node.clock.advance(60)
    await node.keeper.tick()
    await node.ready(6)


async def test_calls_have_sandboxes_wait_for_the_next_and_stop_doing_so(node: Node) -> None:
    task = TaskFiles()
    command = ExecCommand(argv=("true",))
    for index in range(3):
        await node.create(f"s{index}", task=task, command=command)
    keys = node.keeper.ready_by_key
    async with asyncio.timeout(20):
        while not keys():
            await asyncio.sleep(0)
            await node.clock.advance(0.001)
    assert (await node.create("s3", task=task, command=command)).warm
    await node.keeper.settled()
    await node.clock.advance(600)
    await node.keeper.tick()
    await node.keeper.settled()
    assert keys() == {}
    assert len(node.world.kernel.alive) == 4


async def test_closing_drops_what_waits_and_makes_no_more(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    await node.keeper.close()
    assert node.world.kernel.alive == []
    await node.keeper.tick()
    await node.keeper.settled()
    assert node.world.kernel.alive == []


async def test_a_network_is_no_reason_to_make_a_new_one(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    assert (await node.create("s1", network=NetworkPolicy())).warm


async def test_whichever_call_of_the_kernel_fails_in_a_hand_out_nothing_is_left(
    tmp_path: Path,
) -> None:
    for step in range(12):
        clock = FakeClock()
        world = World(tmp_path / str(step), clock)
        (tmp_path / str(step)).mkdir(exist_ok=True)
        await world.start()
        node = Node(world, clock)
        await node.set(POOL)
        await node.ready(3)
        error = DsecError(ErrorCode.INTERNAL, "refused by the test")
        world.kernel.fail_call(len(world.kernel.calls) + 1 + step, error)
        with contextlib.suppress(DsecError):
            await node.create("s1")
            await world.delete("s1")  # by the id that was asked for, too
        world.kernel.fail_none()
        await clock.advance(60)
        await node.keeper.tick()
        await node.ready(3)
        assert (await node.create("s2")).warm
        await node.keeper.close()
        await world.stop()
        assert world.left() == NOTHING, step
        world.memory.cleanup()


async def test_what_the_kernel_does_not_let_go_of_is_dropped_again(node: Node) -> None:
    await node.set(POOL)
    await node.ready(3)
    node.world.kernel.fail("bind", unavailable("its PID 1 is dead"))
    for nth in (1, 2):
        node.world.kernel.fail("destroy", DsecError(ErrorCode.TIMEOUT, "one hangs"), nth=nth)
    assert (await node.create("s1")).warm
    await node.keeper.settled()
    await node.ready(3)
    assert len(node.world.kernel.alive) == 5  # three that wait, one in use, and the dead one
    await node.keeper.tick()
    await node.keeper.settled()
    await node.keeper.tick()
    await node.ready(3)
    assert len(node.world.kernel.alive) == 4
