"""A sandbox that is made anew under its id: the new one is there before the old one goes."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.adoption import is_alive
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import NODE, World, cgroups_left
from snapshot_world import held, take

HEIR = "a-heir"


async def replace(world: World, *snapshots: str, heir: str = HEIR, **changes: Any) -> None:
    """Put the usual sandbox, on snapshots, in the place of the one that is there."""
    layers = ("base", "workspace", "toolkit", *snapshots)
    await world.create(heir, layers=layers, on_snapshot=bool(snapshots), **changes)
    await world.kernel.replace("a", heir)


async def test_a_replaced_sandbox_has_the_files_of_its_new_layers(world: World) -> None:
    await world.create("a")
    await world.say("echo one > /tmp/f")
    async with held(world, "s1", await take(world)):
        await world.say("echo two > /tmp/f")
        await replace(world, "s1")
        assert await world.say("cat /tmp/f") == "one"
        await world.kernel.destroy("a")


async def test_nothing_of_the_old_one_runs_when_the_new_one_is_there(world: World) -> None:
    await world.create("a")
    await world.say("for i in 1 2 3 4 5; do setsid sleep 1000 >/dev/null 2>&1 & done; echo")
    pids = world.pids("a")
    assert len(pids) > 5
    old = world.kernel._require("a")
    pidfd = old.pidfd
    await replace(world)
    assert old.pidfd < 0 or not is_alive(pidfd)
    assert await world.say("ls /proc | grep -c '^[0-9]'") <= "4"
    await world.kernel.destroy("a")
    assert cgroups_left() == []


async def test_its_identity_and_ids_are_new_and_a_later_daemon_finds_it(world: World) -> None:
    await world.create("a")
    before = world.kernel.identity("a")
    await replace(world)
    await replace(world, heir="a-second")
    after = world.kernel.identity("a")
    assert after.init_inode != before.init_inode
    assert after.handle == "a-second"
    await world.say("echo kept > /tmp/f")
    await world.kernel.close(keep_sandboxes=True)
    async with asyncio.timeout(30):
        later = LinuxKernel(NODE)
        await later.start()
        try:
            assert await later.adopt({"a": after}) == {}
            for digest, image in world.layers.items():
                await later.hold_layer(digest, image)
            assert await later.recover() == []
            assert await World(later, world.layers, world.directory).say("cat /tmp/f") == "kept"
        finally:
            await later.close()


async def test_an_heir_that_has_ended_changes_nothing(world: World) -> None:
    await world.create("a")
    await world.say("echo here > /tmp/f")
    await world.create(HEIR)
    heir = world.kernel._require(HEIR)
    os.kill(world.init_pid(HEIR), signal.SIGKILL)
    while heir.ending is None:
        await asyncio.sleep(0.001)
    with pytest.raises(DsecError) as refused:
        await world.kernel.replace("a", HEIR)
    assert refused.value.code in {ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE}
    assert await world.say("cat /tmp/f") == "here"
    await world.kernel.destroy("a")


async def test_one_that_has_ended_is_replaced_all_the_same(world: World) -> None:
    await replace(world)
    assert await world.say("echo lives") == "lives"
    os.kill(world.init_pid(HEIR), signal.SIGKILL)  # its cgroups kept their name
    await replace(world, heir="a-second")
    assert await world.say("echo lives") == "lives"
    await world.kernel.destroy("a")
    while world.kernel._tasks:
        await asyncio.wait(world.kernel._tasks)
    assert cgroups_left() == []


async def test_running_commands_fail_and_no_end_is_told(world: World) -> None:
    await world.create("a")
    running = asyncio.ensure_future(world.shell("echo; sleep 1000"))
    while len(world.pids("a")) < 3:  # PID 1, the shell and its child
        await asyncio.sleep(0.001)
    await replace(world)
    with pytest.raises(DsecError) as refused:
        await running
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert world.kernel._ended.empty()
    await world.kernel.destroy("a")


async def test_one_that_nobody_waits_for_any_more_leaves_nothing(world: World) -> None:
    for turns in range(12):
        await world.create("a")
        replacing = asyncio.ensure_future(replace(world))
        for _ in range(turns):
            await asyncio.sleep(0)
        replacing.cancel()
        await asyncio.wait([replacing])
        await world.kernel.destroy(HEIR)
        await world.kernel.destroy("a")
        while world.kernel._tasks:
            await asyncio.wait(world.kernel._tasks)
        assert cgroups_left() == []


async def test_its_memory_and_process_limits_are_those_it_was_replaced_with(world: World) -> None:
    await world.create("a")
    await replace(world, memory_bytes=64 << 20)
    result = await world.run("python3", "-c", "x = bytearray(100 << 20)")
    assert result.oom
    await world.kernel.destroy("a")
