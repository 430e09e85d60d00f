"""Whoever is killed, and at whatever step: nothing that an action acquired outlives it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from action_world import CARD, MIB, ActionWorld, action_world, new_broker
from dsec_common.wire.action import ActionOutcome, ActionState, ActionVolume
from dsec_common.wire.network import (
    InspectNetwork,
    NetworkInfo,
    NetworkMode,
    NetworkPolicy,
    NetworkRule,
)
from nvml import a100
from refusals import refused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

KILLING = Path(__file__).parent.parent / "framework" / "killing"
HERE = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.1.2.3/32"),))
THERE = NetworkPolicy(mode=NetworkMode.ALLOW, allow=(NetworkRule(cidr="10.4.5.6/32"),))
SCRATCH = ActionVolume(name="scratch", size_bytes=MIB)
TOOLS = ActionVolume(name="tools", layer="tools@1")
#: An action with all kinds of things writes down the intent, units, two volumes, the network, that
#: it runs; that it ends, its volumes' numbers, that no heartbeat names its lease any more, and that
#: it has ended.
WRITES = {2: "units", 4: "layer", 6: "running", 7: "ending"}
WRITES |= {8: "volumes", 9: "unnamed", 10: "ended"}


@pytest.fixture
async def world(tmp_path: Path, layers: Path) -> AsyncIterator[ActionWorld]:
    killed_once = tmp_path / "killed"
    killed_once.mkdir()
    environment = {"PYTHONPATH": str(KILLING), "KILLED_ONCE": str(killed_once)}
    async with action_world(tmp_path, layers, environment) as made:
        yield made


async def begin_all(world: ActionWorld, sandbox_id: str, name: str) -> str:
    action = await world.begin(sandbox_id, name, cu=10.0, volumes=(SCRATCH, TOOLS), network=THERE)
    return action.action_id


async def policy(world: ActionWorld, sandbox_id: str) -> NetworkPolicy:
    asked = InspectNetwork()
    return (await world.node.ask(sandbox_id, "inspect_network", asked, NetworkInfo)).policy


async def nothing_is_left(world: ActionWorld, sandbox_id: str) -> None:
    await world.all_free()
    assert await policy(world, sandbox_id) == HERE
    seen = await world.say(sandbox_id, "ls /dev; ls /run/dsec/*; cat /proc/mounts")
    assert "nvidia" not in seen
    assert "scratch" not in seen
    assert "dsec-volume" not in seen


async def test_a_daemon_that_is_killed_at_any_step_leaves_nothing_of_an_action(
    world: ActionWorld,
) -> None:
    for number, what in WRITES.items():
        sandbox_id = await world.place(network=HERE)

        async def begin_and_end(local: str = sandbox_id, nth: int = number) -> None:
            action_id = await begin_all(world, local, f"kill-{nth}")
            await world.end(local, action_id)

        asking = asyncio.create_task(begin_and_end())
        await world.daemon.died()
        asking.cancel()
        await asyncio.wait({asking})
        await world.daemon.start()
        began = what in {"ending", "volumes", "unnamed", "ended"}
        if what == "ending":  # it had not been written down that it ends, so it goes on
            action = await world.only(sandbox_id)
            assert action.state is ActionState.RUNNING
            await world.end(sandbox_id, action.action_id)
        outcome = ActionOutcome.OK if began else ActionOutcome.INTERRUPTED
        action = await world.ended(sandbox_id, outcome)
        assert bool(action.began_at) is began, what
        assert all(it.returned_at for it in action.acquired), what
        await nothing_is_left(world, sandbox_id)


async def test_an_action_goes_on_when_the_daemon_is_killed(world: ActionWorld) -> None:
    sandbox_id = await world.place(network=HERE)
    action_id = await begin_all(world, sandbox_id, "long")
    process = await world.start(sandbox_id, action_id, "sleep 600")
    await world.node.until(
        lambda: any(action_id in str(it.lease_ids) for it in world.node.heartbeats)
    )
    await world.daemon.kill()
    await world.daemon.start()
    action = await world.only(sandbox_id)
    assert (action.state, action.commands) == (ActionState.RUNNING, (process.cause_id,))
    assert [lease.cu for lease in await world.leases()] == [10.0]
    told = await world.say(
        sandbox_id,
        "head -c 1 /dev/nvidia0 | wc -c; touch $DSEC_ACTION_VOLUMES/scratch/more; "
        "cat $DSEC_ACTION_VOLUMES/tools/opt/tools/hello; env | grep PERCENTAGE",
        action_id,
    )
    assert told == "1\nhello from the toolkit\nCUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10"
    assert await policy(world, sandbox_id) == THERE
    await world.end(sandbox_id, action_id)
    await nothing_is_left(world, sandbox_id)
    assert "600" not in await world.say(sandbox_id, "cat /proc/[0-9]*/cmdline")


async def test_a_device_goes_with_its_action_also_when_nobody_can_tell_any_more_whose_it_was(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0)
    assert "nvidia0" in await world.say(sandbox_id, "ls /dev", action.action_id)
    await world.daemon.kill()
    world.inventory.write([a100(0, uuid=CARD, lost=1)])  # so that a fresh daemon never knew it
    await world.daemon.start()
    await world.end(sandbox_id, action.action_id)
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev")


async def test_the_time_of_an_action_runs_on_while_the_daemon_is_dead(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    await world.begin(sandbox_id, cu=10.0, timeout_s=0.5)
    await world.daemon.kill()
    await asyncio.sleep(0.5)
    await world.daemon.start()
    await world.ended(sandbox_id, ActionOutcome.TIMEOUT)
    await world.all_free()


async def test_units_are_free_after_an_end_that_no_broker_heard_of(world: ActionWorld) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0)
    beats = world.node.heartbeats
    await world.node.until(lambda: any(action.action_id in str(it.lease_ids) for it in beats))
    assert await world.broker.stop() == 0
    ended = await world.end(sandbox_id, action.action_id)
    assert ended.outcome is ActionOutcome.OK
    async with new_broker(world.node):
        await world.all_free()


async def test_so_are_units_that_no_broker_heard_of_in_a_heartbeat_either(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0)
    assert await world.broker.stop() == 0
    await world.end(sandbox_id, action.action_id)
    async with new_broker(world.node):
        await world.all_free()


async def test_without_a_broker_an_action_without_units_begins_and_one_with_them_does_not(
    world: ActionWorld,
) -> None:
    assert await world.broker.stop() == 0
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, volumes=(SCRATCH,))
    error = await refused(world.begin(sandbox_id, cu=10.0, volumes=(TOOLS,)))
    assert error.code in {"unavailable", "timeout"}
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev")
    await world.end(sandbox_id, action.action_id)
