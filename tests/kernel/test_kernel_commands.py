"""Commands: how they start, what they print, how they end."""

from __future__ import annotations

import asyncio
import time

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.init import is_sandbox_over
from dsec_sandboxd.kernel.interface import CommandResult, CommandSpec, Stream
from kernel_world import MIB, World, descriptors_of


async def test_exit_codes_signals_and_both_streams_are_told(world: World) -> None:
    await world.create()
    result = await world.shell("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.signal) == (7, None)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    killed = await world.shell("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (None, 9)
    assert not killed.oom


async def test_merged_output_keeps_its_order(world: World) -> None:
    await world.create()
    result = await world.shell("echo 1; echo 2 >&2; echo 3", merge_stderr=True)
    assert result.stdout == b"1\n2\n3\n"


async def test_the_environment_is_the_given_one_with_path_and_home(world: World) -> None:
    await world.create()
    result = await world.run("env", env={"A": "b=c", "EMPTY": ""})
    assert sorted(result.stdout.decode().splitlines()) == [
        "A=b=c",
        "EMPTY=",
        "HOME=/root",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ]


async def test_a_user_by_name_by_number_and_by_pair(world: World) -> None:
    await world.create()
    assert await world.say("id; echo $HOME", user="dev") == (
        "uid=1000(dev) gid=1000(dev) groups=1000(dev),44(video)\n/home/dev"
    )
    assert "uid=1234 gid=0" in await world.say("id", user="1234")
    assert "uid=5 gid=6 groups=6" in await world.say("id", user="5:6")
    refused = await world.shell("cat /root/secret", user="dev")
    assert refused.exit_code != 0
    await world.say("touch /home/dev/own", user="dev")


@pytest.mark.parametrize("user", ["nobody-here", "", "65536", "-1", "1:2:3", "0:70000"])
async def test_an_unknown_user_is_a_typed_error(world: World, user: str) -> None:
    await world.create()
    with pytest.raises(DsecError) as caught:
        await world.shell("id", user=user)
    assert caught.value.code in {ErrorCode.NOT_FOUND, ErrorCode.INVALID}
    assert caught.value.details["what"] == "user"


async def test_a_missing_command_is_not_found_and_differs_from_exit_127(world: World) -> None:
    await world.create()
    for argv in (("no-such-program",), ("/no/such/path",)):
        with pytest.raises(DsecError) as caught:
            await world.run(*argv)
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert caught.value.details["what"] == "command"
        assert argv[0] in caught.value.message
    assert (await world.shell("exit 127")).exit_code == 127


async def test_what_cannot_be_executed_or_entered_is_typed(world: World) -> None:
    await world.create()
    with pytest.raises(DsecError) as caught:
        await world.run("/work/code.txt")
    assert caught.value.code is ErrorCode.DENIED
    await world.say("chmod 755 /work/code.txt")
    with pytest.raises(DsecError) as caught:
        await world.run("/work/code.txt")
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError) as caught:
        await world.run("true", cwd="/absent")
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert caught.value.details["what"] == "directory"
    with pytest.raises(DsecError) as caught:
        await world.run("true", cwd="relative")
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError) as caught:
        await world.run()
    assert caught.value.code is ErrorCode.INVALID


async def test_standard_input_of_any_size_is_written_and_closed(world: World) -> None:
    await world.create()
    data = bytes(range(256)) * 8192
    result = await world.run("cat", stdin=data, output_limit_bytes=4 * MIB)
    assert result.stdout == data
    ignoring = await world.run("true", stdin=data)
    assert ignoring.exit_code == 0
    assert (await world.run("cat")).stdout == b""


async def test_output_that_is_no_text_is_kept_byte_for_byte(world: World) -> None:
    await world.create()
    result = await world.shell("printf '\\377\\376\\000\\200'")
    assert result.stdout == b"\xff\xfe\x00\x80"


async def test_a_hundred_megabytes_are_drained_and_the_beginning_is_kept(world: World) -> None:
    await world.create()
    result = await world.shell("yes | head -c 104857600; echo done >&2", output_limit_bytes=1000)
    assert result.exit_code == 0
    assert result.stdout == b"y\n" * 500
    assert result.stdout_truncated
    assert result.stderr == b"done\n"
    assert not result.stderr_truncated


async def test_output_is_told_as_it_arrives(world: World) -> None:
    await world.create()
    pieces: list[tuple[Stream, bytes]] = []
    command = CommandSpec(argv=("/bin/sh", "-c", "echo 1; echo 2 >&2"))
    await world.kernel.exec("a", command, lambda stream, data: pieces.append((stream, data)))
    assert sorted(pieces) == [(Stream.STDERR, b"2\n"), (Stream.STDOUT, b"1\n")]


async def test_arguments_beyond_one_packet_arrive_whole(world: World) -> None:
    await world.create()
    long = "x" * 120_000
    result = await world.run("/bin/sh", "-c", 'printf "%s" "$1$2"', "sh", long, "end")
    assert result.stdout == f"{long}end".encode()


async def test_arguments_of_any_bytes_arrive_as_they_are(world: World) -> None:
    await world.create()
    result = await world.run("/bin/sh", "-c", 'printf "%s" "$1"', "sh", "\udcff\udc80é")
    assert result.stdout == b"\xff\x80\xc3\xa9"
    with pytest.raises(DsecError) as caught:
        await world.run("printf", "a\0b")
    assert caught.value.code is ErrorCode.INVALID


async def test_a_timeout_ends_a_tree_that_ignores_term_and_daemons_of_it(world: World) -> None:
    await world.create()
    text = (
        "trap '' TERM; echo started;"
        " (setsid /bin/sh -c 'trap \"\" TERM; while :; do sleep 1; done' >/dev/null 2>&1 &);"
        " while :; do sleep 0.05; done"
    )
    began = time.monotonic()
    result = await world.shell(text, timeout_s=1.5, grace_s=0.3)
    assert time.monotonic() - began < 20
    assert result.timed_out
    assert result.signal == 9
    assert result.stdout == b"started\n"
    assert await world.say("cat /proc/[0-9]*/comm 2>/dev/null || true") == "init\nsh"


async def test_nothing_of_a_command_that_took_too_long_is_left_when_that_is_told(
    world: World,
) -> None:
    await world.create(memory_bytes=512 << 20)
    # One that takes a while to die: what it holds is freed first.
    holds = "held = b'x' * (300 << 20); print(flush=True); import time; time.sleep(1234)"
    text = f'setsid python3 -c "{holds}" > /tmp/holds & until [ -s /tmp/holds ]; do :; done'
    result = await world.shell(f"{text}; sleep 1234", timeout_s=1.5)
    assert result.timed_out
    assert world.pids() == [world.init_pid()]


async def test_a_timeout_lets_a_command_end_by_itself_within_the_grace(world: World) -> None:
    await world.create()
    text = "trap 'echo bye; exit 3' TERM; echo hi; while :; do sleep 0.02; done"
    result = await world.shell(text, timeout_s=1.5, grace_s=20.0)
    assert result.timed_out
    assert (result.exit_code, result.stdout) == (3, b"hi\nbye\n")


async def test_exec_returns_although_a_daemon_keeps_the_pipe_and_it_lives_on(world: World) -> None:
    await world.create()
    text = "(while :; do echo tick; sleep 0.01; done) & echo main done"
    result = await world.shell(text, timeout_s=20.0)
    assert b"main done" in result.stdout
    assert not result.timed_out
    # It goes on writing to a pipe that nobody reads for it any more, and must not die of it.
    await world.say("sleep 0.3")
    names = await world.say("cat /proc/[0-9]*/comm 2>/dev/null || true")
    assert names.split().count("sh") >= 2


async def test_cancelling_a_command_kills_its_tree(world: World) -> None:
    await world.create()
    started = asyncio.Event()
    command = CommandSpec(argv=("/bin/sh", "-c", "echo go; (sleep 1000 &) ; sleep 1000"))
    running = asyncio.ensure_future(
        world.kernel.exec("a", command, lambda _stream, _data: started.set())
    )
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(20):  # it is cancelled at once, and dies in a moment
        while "sleep" in await world.say("cat /proc/[0-9]*/comm 2>/dev/null || true"):
            await asyncio.sleep(0.001)


async def test_commands_run_side_by_side(world: World) -> None:
    await world.create()
    results = await asyncio.gather(*(world.shell(f"echo {n}; exit {n}") for n in range(20)))
    assert [result.exit_code for result in results] == list(range(20))


async def test_more_commands_than_init_can_hold_are_refused_not_lost(world: World) -> None:
    await world.create(pids=1300, memory_bytes=1024 * MIB)
    running = [asyncio.ensure_future(world.run("sleep", "100")) for _ in range(1110)]
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    refusal = done.pop().exception()
    assert isinstance(refusal, DsecError)
    assert refusal.code is ErrorCode.EXHAUSTED
    assert refusal.details["what"] == "commands"
    await world.kernel.destroy("a")
    await asyncio.gather(*running, return_exceptions=True)


async def test_destroying_ends_running_commands_with_an_error(world: World) -> None:
    await world.create()
    running = asyncio.ensure_future(world.run("sleep", "1000"))
    await asyncio.sleep(0)
    await world.kernel.destroy("a")
    with pytest.raises(DsecError) as caught:
        await running
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_at_each_moment_of_an_end_a_command_is_told_that_the_sandbox_has_ended(
    world: World,
) -> None:
    await world.create()
    ending = asyncio.ensure_future(world.kernel.destroy("a"))
    await asyncio.sleep(0)
    while not ending.done():
        with pytest.raises(DsecError) as caught:
            await world.run("true")
        error = caught.value
        assert is_sandbox_over(error) or error.details.get("what") == "sandbox", error
        await asyncio.sleep(0)


async def test_orphans_are_reaped(world: World) -> None:
    await world.create()
    await world.say("for i in 1 2 3 4 5; do (true &) ; done")
    states = await world.say("sleep 0.1; cat /proc/[0-9]*/status | grep State")
    assert "Z" not in states


async def test_command_cgroups_do_not_pile_up(world: World) -> None:
    await world.create()
    for _ in range(10):
        await world.say("true")
    directories = [path for path in world.cgroup().iterdir() if path.is_dir()]
    assert len(directories) <= 3


async def test_commands_live_in_their_own_cgroup_below_the_sandbox(world: World) -> None:
    await world.create()
    assert (await world.say("cat /proc/self/cgroup")).splitlines()[-1].startswith("0::/exec-")


async def test_init_lets_go_of_a_command_that_is_over_though_none_follows(world: World) -> None:
    await world.create()
    before = descriptors_of(world.init_pid())
    await world.run("/bin/true")
    deadline = time.monotonic() + 20.0
    while descriptors_of(world.init_pid()) != before:
        assert time.monotonic() < deadline, "PID 1 keeps the pipes of a command that is over"
        await asyncio.sleep(0.01)


class Lasting:
    """Counts how often a command was taken for one that lasts."""

    def __init__(self) -> None:
        self.count = 0

    def asked(self, run_id: int) -> None:
        """See ``OutputKeeper``."""

    def lasting(self, *, fed: bool) -> None:
        """See ``OutputKeeper``."""
        assert fed
        self.count += 1

    def fed(self) -> None:
        """See ``OutputKeeper``."""

    def over(self, result: CommandResult) -> None:
        """See ``OutputKeeper``."""


async def test_a_daemon_that_is_behind_takes_no_short_command_for_one_that_lasts(
    world: World,
) -> None:
    await world.create()
    keeper = Lasting()
    spec = CommandSpec(argv=("/bin/true",), timeout_s=30.0)
    running = asyncio.create_task(world.kernel.exec("a", spec, None, keeper))
    while not keeper.count and not running.done():
        time.sleep(0.02)  # noqa: ASYNC251  the daemon has other things to do
        await asyncio.sleep(0)
    assert (await running).exit_code == 0
    assert keeper.count == 0
