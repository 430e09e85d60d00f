"""Actions on a real daemon with a real broker: what they are given, and that it is returned."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from action_world import CARD, MIB, ActionWorld, action_world
from dsec_common import subjects
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import ErrorCode
from dsec_common.wire.action import (
    ActionInfo,
    ActionOutcome,
    ActionState,
    ActionTerms,
    ActionVolume,
    BeginAction,
)
from dsec_common.wire.exec import ExecInfo, InspectExec
from dsec_common.wire.lease import (
    ForceUnlock,
    GrantLease,
    LeaseGranted,
    LeaseReleased,
    LeasesUnlocked,
    ReleaseLease,
)
from dsec_common.wire.life import PauseSandbox
from dsec_common.wire.network import (
    EnterAgentPhase,
    InspectNetwork,
    NetworkInfo,
    NetworkMode,
    NetworkPolicy,
    NetworkRule,
    SetNetwork,
)
from dsec_common.wire.sandbox import (
    DeleteSandbox,
    InspectSandbox,
    SandboxDeleted,
    SandboxInfo,
)
from dsec_common.wire.snapshot import ForkSandbox, SandboxForked
from refusals import refused
from sandboxd_node import NODE

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.asyncio(loop_scope="module"),
]

HERE = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.1.2.3/32"),))
THERE = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.4.5.6/32"),))
SCRATCH = ActionVolume(name="scratch", size_bytes=MIB)
TOOLS = ActionVolume(name="tools", layer="tools@1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    tmp_path_factory: pytest.TempPathFactory, layers: Path
) -> AsyncIterator[ActionWorld]:
    async with action_world(tmp_path_factory.mktemp("actions"), layers) as made:
        yield made


async def policy(world: ActionWorld, sandbox_id: str) -> NetworkPolicy:
    asked = InspectNetwork()
    return (await world.node.ask(sandbox_id, "inspect_network", asked, NetworkInfo)).policy


async def test_units_are_the_actions_own_and_are_free_at_its_end(world: ActionWorld) -> None:
    sandbox_id = await world.place(agent="crawler")
    action = await world.begin(sandbox_id, "train", cu=25.0)
    assert (action.state, action.cu, action.acquired[0].amount) == ("running", 25.0, 25.0)
    (lease,) = await world.leases()
    assert (lease.lease_id, lease.project) == (f"{NODE}.{action.action_id}", "default")
    assert (lease.agent, lease.holder, lease.cu) == ("crawler", sandbox_id, 25.0)
    told = await world.say(sandbox_id, "env", action.action_id)
    assert f"CUDA_VISIBLE_DEVICES={CARD}" in told
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25" in told
    read = "head -c 1 /dev/nvidia0 | wc -c; cat /run/dsec/mps/control"
    assert await world.say(sandbox_id, read, action.action_id) == "1\nof the daemon"
    ended = await world.end(sandbox_id, action.action_id, detail="good")
    assert (ended.state, ended.outcome, ended.detail) == ("ended", ActionOutcome.OK, "good")
    assert await world.leases() == ()
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev; ls /run/dsec")


async def test_commands_outside_of_it_are_told_of_no_units(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0)
    assert "CUDA" not in await world.say(sandbox_id, "env")
    await world.end(sandbox_id, action.action_id)


async def test_volumes_are_there_for_the_action_and_then_gone(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, volumes=(SCRATCH, TOOLS))
    assert [it.kind for it in action.acquired] == ["volume", "layer"]
    told = await world.say(
        sandbox_id,
        "echo mine > $DSEC_ACTION_VOLUMES/scratch/file && cat $DSEC_ACTION_VOLUMES/scratch/file "
        "$DSEC_ACTION_VOLUMES/tools/opt/tools/hello",
        action.action_id,
    )
    assert told == "mine\nhello from the toolkit"
    assert await world.say(sandbox_id, f"cat {action.volumes['scratch']}/file") == "mine"
    ended = await world.end(sandbox_id, action.action_id)
    assert all(it.returned_at >= it.acquired_at > 0 for it in ended.acquired)
    assert await world.say(sandbox_id, "ls /run/dsec/actions; cat /proc/mounts") != ""
    assert "actions/" not in await world.say(sandbox_id, "cat /proc/mounts")


async def test_a_network_policy_is_in_force_for_the_action_only(world: ActionWorld) -> None:
    sandbox_id = await world.place(network=HERE)
    action = await world.begin(sandbox_id, network=THERE)
    assert await policy(world, sandbox_id) == THERE
    error = await refused(world.begin(sandbox_id, network=HERE))
    assert (error.code, error.details["action_id"]) == (ErrorCode.CONFLICT, action.action_id)
    await world.end(sandbox_id, action.action_id)
    assert await policy(world, sandbox_id) == HERE


async def test_a_sandbox_without_a_network_has_none_again_after_an_action(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, network=THERE)
    assert await policy(world, sandbox_id) == THERE
    await world.end(sandbox_id, action.action_id)
    assert await policy(world, sandbox_id) == NetworkPolicy()


async def test_a_policy_that_was_set_meanwhile_stays(world: ActionWorld) -> None:
    sandbox_id = await world.place(network=HERE)
    action = await world.begin(sandbox_id, network=THERE)
    later = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.7.8.9/32"),))
    await world.node.ask(sandbox_id, "set_network", SetNetwork(policy=later), NetworkInfo)
    await world.end(sandbox_id, action.action_id)
    assert await policy(world, sandbox_id) == later


async def test_a_phase_for_setting_up_that_is_over_does_not_come_back_with_an_action_s_end(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place(setup_network=HERE, network=THERE)
    action = await world.begin(sandbox_id, network=THERE)
    await world.node.ask(sandbox_id, "enter_agent_phase", EnterAgentPhase(), NetworkInfo)
    forked = await world.node.ask(sandbox_id, "fork", ForkSandbox(count=1), SandboxForked)
    assert forked.children[0].created is not None
    assert await policy(world, forked.children[0].created.sandbox_id) == THERE
    await world.end(sandbox_id, action.action_id)
    assert await policy(world, sandbox_id) == THERE


async def test_a_child_inherits_nothing_of_an_actions_network(world: ActionWorld) -> None:
    sandbox_id = await world.place(network=HERE)
    action = await world.begin(sandbox_id, network=THERE, volumes=(SCRATCH,), cu=5.0)
    forked = await world.node.ask(sandbox_id, "fork", ForkSandbox(count=1), SandboxForked)
    assert forked.children[0].created is not None
    child = forked.children[0].created.sandbox_id
    assert await policy(world, child) == HERE
    assert "nvidia" not in await world.say(child, "ls /dev; ls /run/dsec; cat /proc/mounts")
    await world.end(sandbox_id, action.action_id)


async def test_what_it_runs_is_killed_at_its_end_and_what_it_does_not_run_goes_on(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0)
    mine = await world.start(sandbox_id, action.action_id, "sleep 600")
    waiting = asyncio.create_task(world.exec(sandbox_id, action.action_id, "sleep 600"))
    other = await world.start(sandbox_id, "", "sleep 600")
    left = "sh -c 'exec 3</dev/nvidia0; echo > /tmp/held; sleep 600' >/dev/null 2>&1 &"
    await world.say(
        sandbox_id, f"{left} while [ ! -e /tmp/held ]; do sleep 0.02; done", action.action_id
    )
    while len((await world.only(sandbox_id)).commands) < 3:
        await asyncio.sleep(0.01)
    ended = await world.end(sandbox_id, action.action_id)
    assert len(ended.commands) == 3
    assert (await refused(waiting)).details["reason"] == "cancelled"

    async def state(exec_id: str) -> str:
        asked = InspectExec(exec_id=exec_id)
        return (await world.node.ask(sandbox_id, "inspect_exec", asked, ExecInfo)).state

    assert (await state(mine.exec_id), await state(other.exec_id)) == ("exited", "running")
    left_over = await world.say(sandbox_id, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert left_over.count("sleep 600") == 2  # the other's: its shell, and what that runs


async def test_no_command_runs_in_an_action_that_has_ended(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id)
    await world.end(sandbox_id, action.action_id, outcome=ActionOutcome.FAILED)
    error = await refused(world.exec(sandbox_id, action.action_id, "true"))
    assert (error.code, error.details["outcome"]) == (ErrorCode.EXPIRED, "failed")
    error = await refused(world.start(sandbox_id, action.action_id, "true"))
    assert error.code is ErrorCode.EXPIRED
    error = await refused(world.exec(sandbox_id, "nosuch", "true"))
    assert error.code is ErrorCode.NOT_FOUND


async def test_it_is_given_all_or_nothing(world: ActionWorld) -> None:
    sandbox_id = await world.place(network=HERE)
    error = await refused(world.begin(sandbox_id, cu=500.0, volumes=(SCRATCH,), network=THERE))
    assert error.code is ErrorCode.EXHAUSTED
    missing = ActionVolume(name="tools", layer="nosuch@1")
    error = await refused(world.begin(sandbox_id, cu=10.0, volumes=(SCRATCH, missing)))
    assert error.code is ErrorCode.NOT_FOUND
    assert await policy(world, sandbox_id) == HERE
    assert await world.leases() == ()
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev; cat /proc/mounts")
    (action,) = await world.list(sandbox_id)  # the other was refused before it was any
    assert (action.state, action.outcome) == ("ended", ActionOutcome.REFUSED)


async def test_the_same_message_is_the_same_action(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    asked = BeginAction(name="twice", gpu=GpuDemand(min_cu=10, max_cu=10))
    asking = (world.node.ask(sandbox_id, "begin_action", asked, ActionInfo) for _ in range(3))
    answers = await asyncio.gather(*asking)
    assert {answer.action_id for answer in answers} == {asked.message_id}
    assert len(await world.leases()) == 1
    await world.end(sandbox_id, asked.message_id)
    again = await world.end(sandbox_id, asked.message_id, outcome=ActionOutcome.FAILED)
    assert again.outcome is ActionOutcome.OK
    error = await refused(world.node.ask(sandbox_id, "begin_action", asked, ActionInfo))
    assert error.code is ErrorCode.EXPIRED


async def test_what_was_refused_may_be_asked_for_again(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    first = await world.begin(sandbox_id, "first", cu=95.0)
    asked = BeginAction(name="second", gpu=GpuDemand(min_cu=10, max_cu=10))
    error = await refused(world.node.ask(sandbox_id, "begin_action", asked, ActionInfo))
    assert error.code is ErrorCode.EXHAUSTED
    await world.end(sandbox_id, first.action_id)
    second = await world.node.ask(sandbox_id, "begin_action", asked, ActionInfo)
    assert (second.state, second.cu) == ("running", 10.0)
    assert second.asked_at < second.began_at
    await world.end(sandbox_id, second.action_id)
    assert await world.leases() == ()


async def test_two_actions_share_a_card_and_each_keeps_it_to_its_own_end(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    one = await world.begin(sandbox_id, "one", cu=10.0)
    two = await world.begin(sandbox_id, "two", cu=20.0)
    await world.end(sandbox_id, one.action_id)
    told = await world.say(
        sandbox_id,
        "head -c 1 /dev/nvidia0 | wc -c; cat /run/dsec/mps/control; "
        "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        two.action_id,
    )
    assert told == "1\nof the daemon\n20"
    await world.end(sandbox_id, two.action_id)
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev")


async def test_a_part_ends_with_the_whole(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    whole = await world.begin(sandbox_id, "whole")
    part = await world.begin(sandbox_id, "part", parent=whole.action_id, cu=10.0)
    await world.end(sandbox_id, whole.action_id)
    first, second = await world.list(sandbox_id)
    assert (second.parent, second.outcome) == (whole.action_id, ActionOutcome.PARENT_ENDED)
    assert first.began_at <= second.asked_at <= second.ended_at <= first.ended_at
    assert await world.leases() == ()
    error = await refused(world.begin(sandbox_id, parent=whole.action_id))
    assert error.code is ErrorCode.EXPIRED
    assert part.state is ActionState.RUNNING


async def test_its_time_ends_it(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    await world.begin(sandbox_id, cu=10.0, timeout_s=0.2)
    action = await world.ended(sandbox_id, ActionOutcome.TIMEOUT)
    assert action.ended_at >= action.expires_at == pytest.approx(action.began_at + 0.2)
    assert await world.leases() == ()


async def test_its_time_ends_it_in_a_sandbox_that_stands_still(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0, timeout_s=1.0)
    held = "exec 3</dev/nvidia0; echo > /tmp/held; sleep 600"
    process = await world.start(sandbox_id, action.action_id, held)
    await world.say(sandbox_id, "while [ ! -e /tmp/held ]; do sleep 0.02; done")
    await world.node.ask(sandbox_id, "pause", PauseSandbox(), SandboxInfo)
    await world.ended(sandbox_id, ActionOutcome.TIMEOUT)
    assert await world.leases() == ()
    seen = await world.node.ask(sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
    assert seen.state == "paused"
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev")
    asked = InspectExec(exec_id=process.exec_id)
    exec_ = await world.node.ask(sandbox_id, "inspect_exec", asked, ExecInfo)
    assert exec_.state == "exited"


async def test_one_that_nobody_wants_any_more_ends_and_one_that_is_kept_does_not(
    world: ActionWorld,
) -> None:
    sandbox_id, other_id = await world.place(), await world.place()
    action = await world.begin(sandbox_id, hold_s=1.0, cu=10.0)
    await world.begin(other_id, hold_s=1.0, cu=10.0)

    async def keep() -> None:
        while True:
            await world.keep(sandbox_id, action.action_id)
            await asyncio.sleep(0.1)

    keeping = asyncio.create_task(keep())
    await world.ended(other_id, ActionOutcome.ABANDONED)
    keeping.cancel()
    assert (await world.keep(sandbox_id, action.action_id)).state is ActionState.RUNNING
    await world.end(sandbox_id, action.action_id)
    assert (await refused(world.keep(sandbox_id, action.action_id))).code is ErrorCode.EXPIRED


async def test_it_ends_with_its_sandbox_and_its_lineage_is_kept(world: ActionWorld) -> None:
    sandbox_id = await world.place(network=HERE)
    await world.begin(sandbox_id, cu=10.0, volumes=(SCRATCH,), network=THERE)
    await world.node.ask(sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    action = await world.only(sandbox_id)
    assert (action.state, action.outcome) == ("ended", ActionOutcome.INTERRUPTED)
    assert [it.kind for it in action.acquired] == ["units", "volume", "network"]
    assert all(it.returned_at for it in action.acquired)
    assert await world.leases() == ()


async def test_units_that_are_taken_away_end_the_action_and_not_the_sandbox(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0)
    running = await world.start(sandbox_id, action.action_id, "sleep 600")
    unlock = ForceUnlock(lease_id=f"{NODE}.{action.action_id}", reason="needed elsewhere")
    subject = "dsec.v1.default.lease.force_unlock"
    await world.node.until(
        lambda: any(unlock.lease_id in it.lease_ids for it in world.node.heartbeats)
    )
    await world.node.project.request(subject, unlock, LeasesUnlocked)
    ended = await world.ended(sandbox_id, ActionOutcome.LEASE_LOST)
    assert "needed elsewhere" in ended.detail
    asked = InspectExec(exec_id=running.exec_id)
    exec_ = await world.node.ask(sandbox_id, "inspect_exec", asked, ExecInfo)
    assert exec_.state == "exited"
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev")


TERMS = ActionTerms(agent="crawler 1.0", max_cu=30.0, network_allowed=True, network=HERE)


async def test_a_contract_bounds_what_actions_hold_together(world: ActionWorld) -> None:
    sandbox_id = await world.place(action_terms=TERMS)
    action = await world.begin(sandbox_id, cu=20.0)
    error = await refused(world.begin(sandbox_id, cu=11.0))
    assert (error.code, error.details["field"]) == (ErrorCode.DENIED, "gpu")
    assert "crawler 1.0" in error.message
    await world.end(sandbox_id, action.action_id)
    action = await world.begin(sandbox_id, cu=30.0)
    await world.end(sandbox_id, action.action_id)


async def test_a_contract_bounds_what_an_action_may_reach(world: ActionWorld) -> None:
    sandbox_id = await world.place(action_terms=TERMS)
    error = await refused(world.begin(sandbox_id, network=THERE))
    assert (error.code, error.details["field"]) == (ErrorCode.DENIED, "network")
    await world.end(sandbox_id, (await world.begin(sandbox_id, network=HERE)).action_id)
    alone = ActionTerms(agent="alone 1.0", network_allowed=False)
    sandbox_id = await world.place(action_terms=alone)
    assert (await refused(world.begin(sandbox_id, network=HERE))).code is ErrorCode.DENIED


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "a\nb"}),
        ("timeout_s", {"timeout_s": float("nan")}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("hold_s", {"hold_s": -1.0}),
        ("gpu", {"gpu": GpuDemand(min_cu=2, max_cu=1)}),
        ("volumes", {"volumes": (ActionVolume(name="../up", size_bytes=1),)}),
        ("volumes", {"volumes": (ActionVolume(name="none"),)}),
        ("volumes", {"volumes": (ActionVolume(name="large", size_bytes=1 << 50),)}),
        ("volumes", {"volumes": (SCRATCH, SCRATCH)}),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    world: ActionWorld, field: str, asked: dict[str, Any]
) -> None:
    sandbox_id = await world.place()
    error = await refused(world.begin(sandbox_id, **asked))
    assert (error.code, error.details["field"]) == (ErrorCode.INVALID, field)
    assert await world.list(sandbox_id) == ()


async def test_an_id_that_is_no_name_is_refused(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    error = await refused(world.begin(sandbox_id, message_id="../../escape"))
    assert error.code is ErrorCode.INVALID


async def test_another_project_sees_and_changes_nothing_of_it(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id)
    asked = BeginAction(name="theirs")
    other = world.node.other
    error = await refused(
        world.node.ask(sandbox_id, "begin_action", asked, ActionInfo, bus=other, project="other")
    )
    assert error.code is ErrorCode.NOT_FOUND
    await world.end(sandbox_id, action.action_id)


async def test_a_node_leases_of_its_own_cards_only(world: ActionWorld) -> None:
    async with world.node.nats.service("sandboxd", NODE) as bus:
        asked = GrantLease(project="default", holder="x", cu=10.0, node="elsewhere")
        granted = await bus.request(subjects.node_lease(NODE, "grant"), asked, LeaseGranted)
        assert granted.node == NODE
        foreign = ReleaseLease(lease_id="elsewhere.x")
        subject = subjects.node_lease(NODE, "release")
        error = await refused(bus.request(subject, foreign, LeaseReleased))
        assert error.code is ErrorCode.DENIED
        asked = GrantLease(project="default", holder="x", cu=10.0)
        error = await refused(
            bus.request(subjects.node_lease("elsewhere", "grant"), asked, LeaseGranted, timeout_s=1)
        )
        assert error.code is not ErrorCode.NOT_FOUND
        own = ReleaseLease(lease_id=granted.lease_id)
        await bus.request(subject, own, LeaseReleased)
