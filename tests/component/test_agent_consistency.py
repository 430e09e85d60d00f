"""State consistency on a real node: an agent that is behind stands still until it is not."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from consistency_world import (
    ConsistencyWorld,
    consistency_world,
    goes_on,
    now_ms,
    until,
)
from dsec.client import DSecClient
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import ErrorCode
from dsec_common.wire.agent import AgentPolicy
from dsec_common.wire.consistency import AHEAD_MAX_MS
from dsec_common.wire.life import ResumeSandbox, SandboxPaused, SandboxResumed
from dsec_common.wire.sandbox import EndCause, SandboxInfo, SandboxState
from refusals import refused
from sandboxd_node import node_for_tests
from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


@pytest.fixture
async def world(tmp_path: Path, layers: Path) -> AsyncIterator[ConsistencyWorld]:
    async with node_for_tests(tmp_path, layers) as node, consistency_world(node) as world:
        yield world


async def test_an_agent_that_is_behind_stands_still_is_synchronised_and_goes_on(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    began_ms = (await sandbox.inspect()).state_version_ms
    changed_ms = now_ms()
    assert await world.agents.report_dependencies({"prices": changed_ms}) == {"prices": changed_ms}
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    info = await world.info(sandbox, lambda info: info.state_version_ms == required_ms)
    assert json.loads(inside.read("told")) == {
        "version_ms": required_ms,
        "dependencies": {"prices": changed_ms},
    }
    paused = await world.node.event_of(sandbox.id, SandboxPaused)
    reason = f"its state of {began_ms} is behind prices: synchronise to {required_ms}"
    assert paused.reason == reason
    await world.node.event_of(sandbox.id, SandboxResumed)
    await goes_on(inside)
    assert inside.stood_still() == [True]
    info = await sandbox.inspect()
    assert (info.state, info.behind, info.synchronise_error) == (SandboxState.RUNNING, "", "")


async def test_one_that_depends_on_nothing_that_changed_is_not_touched(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    began_ms = (await sandbox.inspect()).state_version_ms
    await world.agents.report_dependencies({"weather": now_ms(), "prices": began_ms - 60_000})
    # A change that does concern it, after which all that came before has been looked at.
    changed_ms = now_ms()
    await world.agents.report_dependencies({"orders": changed_ms})
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms)
    assert inside.stood_still() == [True]
    told = json.loads(inside.read("told"))["dependencies"]
    assert told == {"orders": changed_ms, "prices": began_ms - 60_000}


async def test_no_request_wakes_it_meanwhile_and_two_schedulers_do_it_once(
    world: ConsistencyWorld,
) -> None:
    await world.scheduler()
    sandbox, inside = await world.trader()
    inside.touch("wait")
    await world.agents.report_dependencies({"prices": now_ms()})
    await until(lambda: bool(inside.read("told")))
    count = inside.read("count")
    error = await refused(sandbox.exec("true", timeout_s=2.0))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "is being synchronised" in error.message
    assert inside.read("count") == count
    assert (await sandbox.inspect()).state is SandboxState.PAUSED
    inside.remove("wait")
    await world.info(sandbox, lambda info: not info.behind)
    await sandbox.exec("true", check=True)
    await goes_on(inside)
    for scheduler in world.schedulers:
        await scheduler._keeper.look("default")
        await until(lambda keeper=scheduler._keeper: not keeper._asking)  # type: ignore[misc]
    assert inside.stood_still() == [True]


async def test_one_that_cannot_be_synchronised_stands_still_and_is_not_tried_blindly(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    inside.touch("fail")
    first_ms = now_ms()
    await world.agents.report_dependencies({"prices": first_ms})
    info = await world.info(sandbox, lambda info: bool(info.synchronise_error))
    assert info.synchronise_error == "exit code 3, signal None: the store is away"
    assert (info.state, info.behind.rpartition(" ")[2]) == (
        SandboxState.PAUSED,
        str(first_ms + CLOCK_TOLERANCE_MS),
    )
    error = await refused(sandbox.exec("true"))
    assert (error.code, error.details["reason"]) == (ErrorCode.DENIED, "behind")
    assert "the store is away" in error.message
    assert (await refused(sandbox.resume())).code is ErrorCode.DENIED

    # Nobody tries again, not a scheduler that knows nothing of it either, before there is a reason.
    inside.remove("told")
    another = await world.scheduler()
    await another._keeper.look("default")
    await until(lambda: not another._keeper._asking)
    assert inside.read("told") == ""
    (state,) = await world.agents.synchronise("trader", [sandbox.id])
    assert (state.error, bool(inside.read("told"))) == (info.synchronise_error, True)

    inside.remove("fail")
    second_ms = now_ms()
    await world.agents.report_dependencies({"orders": second_ms})
    required_ms = second_ms + CLOCK_TOLERANCE_MS
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms)
    await goes_on(inside)
    assert (await sandbox.inspect()).synchronise_error == ""


async def test_an_explicit_request_has_one_that_failed_go_on(world: ConsistencyWorld) -> None:
    sandbox, inside = await world.trader()
    inside.touch("fail")
    await world.agents.report_dependencies({"prices": now_ms()})
    await world.info(sandbox, lambda info: bool(info.synchronise_error))
    inside.remove("fail")
    (state,) = await world.agents.synchronise("trader", [sandbox.id])
    assert (state.behind, state.error) == ("", "")
    await goes_on(inside)
    (again,) = await world.agents.synchronise("trader", [sandbox.id])
    assert (again.version_ms, inside.stood_still()) == (state.version_ms, [True])


async def test_one_that_its_owner_paused_is_synchronised_and_stays_paused(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    await sandbox.pause()
    count = inside.read("count")
    changed_ms = now_ms()
    await world.agents.report_dependencies({"prices": changed_ms})
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    info = await world.info(
        sandbox, lambda info: info.state_version_ms == required_ms and not info.behind
    )
    assert (info.state, inside.frozen, inside.read("count")) == (SandboxState.PAUSED, True, count)
    await sandbox.resume()
    await goes_on(inside)


async def test_its_owner_may_pause_and_resume_it_while_it_is_synchronised(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    for wanted in (SandboxState.PAUSED, SandboxState.RUNNING):
        inside.touch("wait")
        await world.agents.report_dependencies({"prices": now_ms()})
        await world.info(sandbox, lambda info: bool(info.behind))
        await sandbox.pause()
        if wanted is SandboxState.RUNNING:
            # Not by the client, which asks again while it may.
            resuming = world.node.ask(sandbox.id, "resume", ResumeSandbox(), SandboxInfo)
            assert (await refused(resuming)).code is ErrorCode.UNAVAILABLE
        inside.remove("wait")
        info = await world.info(sandbox, lambda info: not info.behind)
        assert info.state is wanted
        if wanted is SandboxState.PAUSED:
            await sandbox.resume()
    await goes_on(inside)


async def test_one_that_its_policy_pauses_does_not_go_on_before_the_policy_is_lifted(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    inside.touch("wait")
    await world.agents.report_dependencies({"prices": now_ms()})
    await world.info(sandbox, lambda info: bool(info.behind))
    await world.agents.push_policy("trader", paused=True)
    inside.remove("wait")
    await world.info(sandbox, lambda info: not info.behind)
    assert inside.frozen
    await world.agents.push_policy("trader", AgentPolicy())
    await goes_on(inside)

    await world.agents.push_policy("trader", paused=True)
    inside.touch("wait")
    await world.agents.report_dependencies({"prices": now_ms()})
    await world.info(sandbox, lambda info: bool(info.behind))
    await world.agents.push_policy("trader", AgentPolicy())
    inside.remove("wait")
    await world.info(sandbox, lambda info: not info.behind)
    await goes_on(inside)
    assert inside.stood_still() == [True, True]


async def test_one_that_ends_meanwhile_is_forgotten(world: ConsistencyWorld) -> None:
    sandbox, inside = await world.trader()
    inside.touch("wait")
    await world.agents.report_dependencies({"prices": now_ms()})
    await world.info(sandbox, lambda info: bool(info.behind))
    await sandbox.delete()
    info = await sandbox.inspect()
    assert (info.state, info.end_cause) == (SandboxState.ENDED, EndCause.DELETED)
    (keeper,) = (scheduler._keeper for scheduler in world.schedulers)
    await until(lambda: not keeper._asking)
    states = world.node.service._agents.consistency
    await until(lambda: not states._kept and not states._turns)


async def test_a_scheduler_that_is_killed_on_the_way_leaves_nothing_half_done(
    world: ConsistencyWorld, tmp_path: Path
) -> None:
    sandbox, inside = await world.trader()
    doomed = SchedulerProcess(world, tmp_path, "doomed", DSEC_WARM_UP_S="0.25")
    await doomed.start()
    try:
        (scheduler,) = world.schedulers
        await scheduler.stop()
        inside.touch("wait")
        await world.agents.report_dependencies({"prices": now_ms()})
        await until(lambda: bool(inside.read("told")))
    finally:
        await doomed.kill()
    count = inside.read("count")
    await world.scheduler()
    assert (inside.stood_still(), inside.read("count")) == ([], count)
    inside.remove("wait")
    await world.info(sandbox, lambda info: not info.behind)
    await goes_on(inside)
    assert inside.stood_still() == [True]


async def test_what_was_reported_to_a_scheduler_that_died_is_done_by_the_next(
    world: ConsistencyWorld,
) -> None:
    sandbox, _ = await world.trader()
    (scheduler,) = world.schedulers
    # As one that dies between keeping what it was told and doing anything about it.
    scheduler._keeper._changed = asyncio.Event()
    scheduler._keeper._learn = lambda *_: None  # type: ignore[method-assign]
    changed_ms = now_ms()
    await world.agents.report_dependencies({"prices": changed_ms})
    await scheduler.stop()
    await world.scheduler()
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms)
    assert await world.agents.dependencies() == {"prices": changed_ms}


async def test_one_that_is_put_back_to_a_snapshot_is_synchronised_anew(
    world: ConsistencyWorld,
) -> None:
    sandbox, _ = await world.trader()
    snapshot = await sandbox.snapshot()
    changed_ms = now_ms()
    await world.agents.report_dependencies({"prices": changed_ms})
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms and not info.behind)
    await sandbox.roll_back(snapshot)
    # Its files are those of before; the node takes over by itself what is new since then.
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms and not info.behind)
    told = await sandbox.exec("cat /tmp/told", check=True)
    assert json.loads(told.stdout)["dependencies"] == {"prices": changed_ms}


async def test_dependencies_are_a_projects_own_and_only_grow(world: ConsistencyWorld) -> None:
    credentials = str(world.node.nats.auth.project("other"))
    changed_ms = now_ms()
    async with DSecClient([world.node.nats.server.url], credentials) as other:
        await other.agents.report_dependencies({"prices": changed_ms - 5})
        await world.agents.report_dependencies({"prices": changed_ms})
        await world.agents.report_dependencies({"prices": changed_ms - 1_000, "orders": 7})
        assert await other.agents.dependencies() == {"prices": changed_ms - 5}
    assert await world.agents.dependencies() == {"prices": changed_ms, "orders": 7}
    assert await world.agents.report_dependencies(forget=["orders"]) == {"prices": changed_ms}
    for versions in ({"prices": now_ms() + 2 * AHEAD_MAX_MS}, {"No Name": 1}, {}):
        error = await refused(world.agents.report_dependencies(versions))
        assert error.code is ErrorCode.INVALID
    assert await world.agents.dependencies() == {"prices": changed_ms}


async def test_who_is_asked_to_be_synchronised_has_to_be_an_instance_that_depends_on_something(
    world: ConsistencyWorld,
) -> None:
    sandbox, _ = await world.trader()
    await world.agents.register("plain", "1", base="base@1")
    for name, instances, code in (
        ("trader", [], ErrorCode.INVALID),
        ("trader", [sandbox.id] * 33, ErrorCode.INVALID),
        ("trader", ["nowhere.x"], ErrorCode.NOT_FOUND),
        ("trader", ["x"], ErrorCode.INVALID),
        ("plain", [sandbox.id], ErrorCode.NOT_FOUND),
        ("nobody", [sandbox.id], ErrorCode.NOT_FOUND),
    ):
        assert (await refused(world.agents.synchronise(name, instances))).code is code
