"""State consistency of an instance that is being put back to a snapshot at the same time."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from consistency_world import ConsistencyWorld, consistency_world, now_ms, until
from dsec.sandbox import Sandbox
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.wire.sandbox import SandboxState
from dsec_sandboxd.kernel.linux import LinuxKernel
from sandboxd_node import node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


@pytest.fixture
async def world(tmp_path: Path, layers: Path) -> AsyncIterator[ConsistencyWorld]:
    async with node_for_tests(tmp_path, layers) as node, consistency_world(node) as world:
        yield world


class Halt:
    """Has a rollback wait where it gives the sandbox's id to its heir."""

    def __init__(self, world: ConsistencyWorld) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        world.node.service._sandboxes._maker._put_back_listeners.append(self._wait)

    async def _wait(self, _local: str) -> None:
        self.reached.set()
        await self.go.wait()


def is_frozen(world: ConsistencyWorld, sandbox: Sandbox) -> bool:
    """Return whether the processes of the sandbox of this id stand still."""
    kernel = world.node.service._sandboxes.parts.kernel
    assert isinstance(kernel, LinuxKernel)
    return kernel._sandboxes[sandbox.id.partition(".")[2]].freezer.frozen


async def test_one_that_falls_behind_while_it_is_put_back_takes_over_what_is_new_afterwards(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    snapshot = await sandbox.snapshot()
    halt = Halt(world)
    rolling = asyncio.create_task(sandbox.roll_back(snapshot))
    await halt.reached.wait()
    changed_ms = now_ms()
    await world.agents.report_dependencies({"prices": changed_ms})
    await world.info(sandbox, lambda info: bool(info.behind))
    await until(lambda: inside.frozen)
    assert inside.read("told") == ""
    halt.go.set()
    await rolling
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    await world.info(sandbox, lambda info: info.state_version_ms == required_ms and not info.behind)
    told = await sandbox.exec("cat /tmp/told", check=True)
    assert json.loads(told.stdout)["dependencies"] == {"prices": changed_ms}
    assert not is_frozen(world, sandbox)


async def test_one_that_is_put_back_while_it_is_synchronised_is_not_taken_for_what_it_was(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    snapshot = await sandbox.snapshot()
    inside.touch("wait")
    service = world.node.service
    record = service._sandboxes.state.find("default", sandbox.id.partition(".")[2])
    changed_ms = now_ms()
    await world.agents.report_dependencies({"prices": changed_ms})
    await until(lambda: bool(inside.read("told")))
    # As one that had come through the gate before it was paused.
    halt = Halt(world)
    snapshots = service._snapshots
    kept = snapshots.store.find("default", snapshot.id)
    rolling = asyncio.create_task(snapshots.doors._maker.roll_back(record, kept, "r-1"))
    await halt.reached.wait()
    inside.remove("wait")
    await until(lambda: inside.stood_still() == [True])
    await until(lambda: inside.frozen)
    halt.go.set()
    await rolling
    required_ms = changed_ms + CLOCK_TOLERANCE_MS
    info = await world.info(
        sandbox, lambda info: info.state_version_ms == required_ms and not info.behind
    )
    assert (info.state, info.synchronise_error) == (SandboxState.RUNNING, "")
    await sandbox.exec("cat /tmp/told", check=True)


async def test_one_that_is_paused_while_it_is_put_back_stands_still_afterwards(
    world: ConsistencyWorld,
) -> None:
    sandbox, inside = await world.trader()
    snapshot = await sandbox.snapshot()
    halt = Halt(world)
    rolling = asyncio.create_task(sandbox.roll_back(snapshot))
    await halt.reached.wait()
    await sandbox.pause()
    assert inside.frozen
    halt.go.set()
    await rolling
    assert (await sandbox.inspect()).state is SandboxState.PAUSED
    assert is_frozen(world, sandbox)
    await sandbox.exec("true", check=True)
    assert not is_frozen(world, sandbox)
