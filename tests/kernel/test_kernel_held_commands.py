"""Commands of which PID 1 tells only when they are over, with all that they printed."""

from __future__ import annotations

import asyncio
import os

import pytest

from dsec_sandboxd.kernel.init import InitClient
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec
from dsec_sandboxd.kernel.protocol import INLINE_OUTPUT_MAX
from kernel_world import World


class Heard:
    """Notes what the daemon's side of PID 1 is told of a command before its end."""

    def __init__(self) -> None:
        self.run_id = 0
        self.lasted = False

    def asked(self, run_id: int) -> None:
        """See ``OutputKeeper``."""
        self.run_id = run_id

    def lasting(self, *, fed: bool) -> None:
        """See ``OutputKeeper``."""
        assert fed
        self.lasted = True

    def fed(self) -> None:
        """See ``OutputKeeper``."""

    def over(self, result: CommandResult) -> None:
        """See ``OutputKeeper``."""


def init_of(world: World) -> InitClient:
    return world.kernel._require("a").init


async def listed(world: World) -> list[int]:
    """Ask PID 1 what it knows of, as a later daemon would."""
    found = await init_of(world).list_commands()
    for one in found:
        for descriptor in one.descriptors:
            os.close(descriptor)
    return [one.reply.request_id for one in found]


async def test_a_command_is_forgotten_when_its_end_is_told(world: World) -> None:
    await world.create()
    result = await world.shell("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert await listed(world) == []


@pytest.mark.parametrize("size", [1, INLINE_OUTPUT_MAX, INLINE_OUTPUT_MAX + 1, 60_000, 300_000])
async def test_what_it_printed_is_whole_whatever_its_size(world: World, size: int) -> None:
    await world.create()
    result = await world.shell(f"head -c {size} /dev/zero", output_limit_bytes=1 << 20)
    assert result.stdout == bytes(size)
    assert not result.stdout_truncated
    assert await listed(world) == []


async def test_both_streams_together_may_be_more_than_one_packet_holds(world: World) -> None:
    await world.create()
    half = INLINE_OUTPUT_MAX // 2
    line = f"head -c {half} /dev/zero; head -c {half + 1} /dev/zero >&2"
    result = await world.shell(line)
    assert (len(result.stdout), len(result.stderr)) == (half, half + 1)


async def test_more_than_the_limit_is_cut_and_said_to_be(world: World) -> None:
    await world.create()
    result = await world.shell("echo 12345; echo 1 >&2", output_limit_bytes=4)
    assert (result.stdout, result.stdout_truncated) == (b"1234", True)
    assert (result.stderr, result.stderr_truncated) == (b"1\n", False)


async def test_one_that_lasts_is_handed_over_and_a_later_daemon_is_told_of_it(world: World) -> None:
    await world.create()
    heard = Heard()
    spec = CommandSpec(argv=("/bin/sh", "-c", "echo begins; read -r _ < /tmp/gate; echo ends"))
    await world.say("mkfifo /tmp/gate")
    running = world.kernel.begin("a", spec, heard)
    while not heard.lasted:
        await asyncio.sleep(0.001)
    assert await listed(world) == [heard.run_id]
    await world.say("echo > /tmp/gate")
    assert (await running).stdout == b"begins\nends\n"


async def test_what_a_brief_command_left_behind_writes_on_without_a_signal(world: World) -> None:
    await world.create()
    line = "(trap 'echo broken > /tmp/broken' PIPE; while echo x; do :; done) & echo $! > /tmp/pid"
    assert (await world.shell(line)).exit_code == 0
    # It has written more than a pipe holds, many times over, when others have been run.
    for _ in range(20):
        await world.say("true")
    assert await world.say("kill -0 $(cat /tmp/pid) && ls /tmp") == "pid"
    await world.say("kill -9 $(cat /tmp/pid)")


async def test_a_program_that_is_not_there_is_told_and_forgotten(world: World) -> None:
    await world.create()
    for _ in range(3):
        result = await asyncio.gather(world.run("/no/such"), return_exceptions=True)
        assert isinstance(result[0], Exception)
    assert await listed(world) == []
    assert (await world.shell("exit 5")).exit_code == 5


async def test_a_cgroup_is_another_commands_at_once_only_if_nothing_is_left_in_it(
    world: World,
) -> None:
    await world.create()
    own = "cat /proc/self/cgroup | sed -n 's/^0:://p'"
    first = await world.say(own)
    assert await world.say(own) == first
    await world.say("sleep 1000 > /dev/null 2>&1 & echo $! > /tmp/pid")
    after = await world.say(own)
    assert after != first
    await world.say("kill -9 $(cat /tmp/pid)")
