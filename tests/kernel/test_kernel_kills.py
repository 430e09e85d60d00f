"""kill -9 of the spawner, and of what becomes PID 1, at every few system calls of a creation."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import pytest

import kill_at_call
from dsec_common.errors import DsecError, ErrorCode
from kernel_world import World, cgroups_left

#: More stops than a creation has; each system call is two, its begin and its end.
STOPS_MAX = 2000
#: Odd, so that begins and ends of calls take turns. With 1 the test takes some minutes.
STEP = 5
TYPED = {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.TIMEOUT}


async def create_while_killing(world: World, whom: str, nth: int) -> tuple[str, DsecError | None]:
    """Create a sandbox while its maker is killed; return how far that came, and the error."""
    spawner = await world.kernel._living_spawner()
    tracer = await asyncio.create_subprocess_exec(
        sys.executable,
        kill_at_call.__file__,
        str(spawner.pid),
        str(nth),
        whom,
        stdout=subprocess.PIPE,
    )
    assert tracer.stdout is not None
    assert await tracer.stdout.readline() == b"ready\n"
    error = None
    try:
        async with asyncio.timeout(20):
            await world.create("a")
    except DsecError as caught:
        error = caught
    if spawner.alive and error is None:
        with contextlib.suppress(ProcessLookupError):
            tracer.kill()
    output, _ = await tracer.communicate()
    return output.decode().strip() or "ended", error


async def lives(world: World) -> bool:
    """Return whether the sandbox runs a command; false when it has ended."""
    try:
        return await world.say("echo lives") == "lives"
    except DsecError as error:
        # It dies while it is asked, or its end has been told already.
        if error.code not in {ErrorCode.UNAVAILABLE, ErrorCode.NOT_FOUND}:
            raise
        return False


@pytest.mark.parametrize("whom", ["itself", "child"])
async def test_a_kill_at_each_system_call_of_a_creation_leaves_nothing(
    world: World, whom: str
) -> None:
    killed = refused = 0
    for nth in range(1, STOPS_MAX, STEP):
        said, error = await create_while_killing(world, whom, nth)
        if error is None:
            # A first process may be killed, told or not, the moment it has said that it is there.
            assert await lives(world) or whom == "child"
        else:
            assert error.code in TYPED, error
            refused += 1
            assert cgroups_left() == []
        await world.kernel.destroy("a")
        assert cgroups_left() == []
        if said != "killed":
            break
        killed += 1
    else:
        raise AssertionError("a creation takes more system calls than STOPS_MAX")
    assert killed > 5
    assert refused > 3
    await world.create("b")
    assert await world.say("echo fine", local="b") == "fine"
    await world.kernel.destroy("b")
    await world.create("c")
    slots = world.kernel._slots
    assert slots is not None
    assert len(slots.taken()) == 1  # no id range was lost
