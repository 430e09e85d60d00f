"""What is in the way of an action's return: it is tried again, and nobody keeps anything by it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from action_world import MIB, ActionWorld, action_world
from dsec_common.errors import ErrorCode
from dsec_common.wire.action import ActionOutcome, ActionState, ActionVolume
from dsec_common.wire.exec import ExecInfo, InspectExec
from refusals import refused
from sandboxd_process import processes_of

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root"),
    pytest.mark.asyncio(loop_scope="module"),
]

SCRATCH = ActionVolume(name="scratch", size_bytes=MIB)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    tmp_path_factory: pytest.TempPathFactory, layers: Path
) -> AsyncIterator[ActionWorld]:
    async with action_world(tmp_path_factory.mktemp("returned"), layers) as made:
        yield made


def local_of(sandbox_id: str) -> str:
    return sandbox_id.partition(".")[2]


async def run(*argv: str | Path) -> None:
    assert await (await asyncio.create_subprocess_exec(*argv)).wait() == 0


async def state_of(world: ActionWorld, sandbox_id: str, exec_id: str) -> str:
    asked = InspectExec(exec_id=exec_id)
    return (await world.node.ask(sandbox_id, "inspect_exec", asked, ExecInfo)).state


async def test_an_end_that_the_systems_error_stopped_goes_on_when_nothing_is_in_the_way(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id, cu=10.0, volumes=(SCRATCH,))
    run_directory = Path(world.node.config.run_directory) / "s" / local_of(sandbox_id)
    place = run_directory / "actions" / action.action_id / "scratch"
    # What something of this namespace is mounted on cannot be removed: EBUSY.
    await run("mount", "-t", "tmpfs", "none", place)
    try:
        error = await refused(world.end(sandbox_id, action.action_id))
        assert error.code is ErrorCode.UNAVAILABLE
        assert (await world.only(sandbox_id)).state is ActionState.ENDING
        assert [lease.cu for lease in await world.leases()] == [10.0]
    finally:
        await run("umount", place)
    await world.ended(sandbox_id, ActionOutcome.OK)
    await world.all_free()
    assert not place.parent.exists()
    assert "nvidia" not in await world.say(sandbox_id, "ls /dev; cat /proc/mounts")


async def test_a_command_that_has_not_started_at_its_actions_end_does_not_outlive_it(
    world: ActionWorld,
) -> None:
    sandbox_id = await world.place()
    action = await world.begin(sandbox_id)
    first = processes_of(local_of(sandbox_id))[0]
    os.kill(first, signal.SIGSTOP)
    try:
        starting = asyncio.create_task(world.start(sandbox_id, action.action_id, "sleep 600"))
        async with asyncio.timeout(20):
            while not (await world.only(sandbox_id)).commands:
                await asyncio.sleep(0.01)
        await world.end(sandbox_id, action.action_id)
    finally:
        os.kill(first, signal.SIGCONT)
    started = await starting
    async with asyncio.timeout(20):
        while await state_of(world, sandbox_id, started.exec_id) == "running":
            await asyncio.sleep(0.02)
    assert "sleep" not in await world.say(sandbox_id, "cat /proc/[0-9]*/comm")
