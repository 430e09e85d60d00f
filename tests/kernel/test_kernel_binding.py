"""A sandbox made ahead of need becomes, when it is handed out, what it would have been made as."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import EndCause
from dsec_sandboxd.kernel.linux import LinuxKernel
from kernel_world import MIB, NODE, World, cgroups_left


async def hand_out(world: World, **changes: object) -> None:
    await world.create("a", hostname="mine")
    await world.kernel.bind(world.spec("a", hostname="mine", **changes))


async def test_it_has_its_names_from_the_start(world: World) -> None:
    await hand_out(world)
    assert await world.python("import socket; print(socket.gethostname())") == "mine"
    assert world.kernel.identity("a").handle == ""


@pytest.mark.parametrize("memory_mib", [64, 256])
async def test_memory_is_limited_to_what_it_was_bound_to(world: World, memory_mib: int) -> None:
    await hand_out(world, memory_bytes=memory_mib * MIB)
    code = f"x = bytearray(({memory_mib} - 32) << 20)"
    await world.python(code)
    result = await world.run("python3", "-c", f"x = bytearray({memory_mib + 16} << 20)")
    assert result.oom
    assert result.signal == signal.SIGKILL


@pytest.mark.parametrize("disk_mib", [8, 64])
async def test_the_disk_is_full_at_the_bound_size(world: World, disk_mib: int) -> None:
    await hand_out(world, disk_bytes=disk_mib * MIB)
    await world.say(f"dd if=/dev/zero of=/fits bs=1M count={disk_mib - 1} 2>&1")
    result = await world.shell("dd if=/dev/zero of=/more bs=1M count=2")
    assert result.exit_code != 0
    assert b"No space left" in result.stderr


async def test_the_disk_is_out_of_inodes_at_the_bound_number(world: World) -> None:
    await hand_out(world, inodes=64)
    code = "import os; os.mkdir('/d'); [open(f'/d/{i}', 'w').close() for i in range(%d)]"
    await world.python(code % 40)
    with pytest.raises(AssertionError, match="No space left"):
        await world.python("for i in range(40): open(f'/d/more-{i}', 'w').close()")


async def test_processes_are_limited_to_the_bound_number(world: World) -> None:
    await hand_out(world, pids=8)
    result = await world.shell("for i in 1 2 3 4 5 6 7 8 9; do sleep 5 & done; wait")
    assert b"fork" in result.stderr.lower()


async def test_one_that_has_died_is_not_handed_out(world: World) -> None:
    await world.create("a")
    os.kill(world.init_pid("a"), signal.SIGKILL)
    with pytest.raises(DsecError):  # at once: the signal is on its way
        await world.kernel.bind(world.spec("a"))
    await world.kernel.destroy("a")


async def test_one_whose_first_process_stands_still_is_not_handed_out(world: World) -> None:
    await world.create("a")
    os.kill(world.init_pid("a"), signal.SIGSTOP)
    with pytest.raises(DsecError) as refused:  # at once: the signal is on its way
        await world.kernel.bind(world.spec("a"))
    assert refused.value.code is ErrorCode.UNAVAILABLE
    await world.kernel.destroy("a")


async def test_it_is_handed_out_once(world: World) -> None:
    await world.create("a")
    binding = [world.kernel.bind(world.spec("a", disk_bytes=size * MIB)) for size in (8, 16, 24)]
    outcomes = await asyncio.gather(*binding, return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 1


async def test_it_is_not_bound_to_what_it_was_not_made_for(world: World) -> None:
    await world.create("a")
    for changes in (
        {"layers": ("base",)},
        {"best_effort": True},
        {"oom_group": True},
        {"hostname": "another"},
    ):
        with pytest.raises(DsecError) as refused:
            await world.kernel.bind(world.spec("a", **changes))
        assert refused.value.code is ErrorCode.INVALID
    await world.kernel.bind(world.spec("a"))


async def test_its_memory_running_out_and_its_end_are_told(world: World) -> None:
    await hand_out(world, memory_bytes=64 * MIB)
    result = await world.run("python3", "-c", "x = bytearray(128 << 20)")
    assert result.oom
    ended = world.kernel.ended()
    os.kill(world.init_pid("a"), signal.SIGKILL)
    event = await anext(ended)
    assert (event.local, event.cause) == ("a", EndCause.OOM)


async def test_a_bound_sandbox_is_taken_over_by_the_next_daemon(world: World) -> None:
    await hand_out(world)
    await world.say("echo kept > /file")
    identity = world.kernel.identity("a")
    await world.kernel.close(keep_sandboxes=True)
    later = LinuxKernel(NODE)
    await later.start()
    try:
        assert await later.adopt({"a": identity}) == {}
        assert await later.recover() == []
        assert await later.reconcile(lambda _: True) == []
        after = World(later, world.layers, world.directory)
        assert await after.say("cat /file") == "kept"
        assert await after.python("import socket; print(socket.gethostname())") == "mine"
        assert later.identity("a") == identity
    finally:
        await later.close()


async def test_what_was_not_handed_out_is_removed_by_the_next_daemon(world: World) -> None:
    await world.create("ahead")
    await world.kernel.close(keep_sandboxes=True)
    later = LinuxKernel(NODE)
    await later.start()
    try:
        assert await later.adopt({}) == {}
        assert await later.recover() == ["ahead"]
        assert cgroups_left() == []
    finally:
        await later.close()
