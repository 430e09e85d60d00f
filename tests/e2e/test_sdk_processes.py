"""Started commands and sessions as users have them: the SDK and the command line."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import pty
import struct
import subprocess
import termios

import pytest

from dsec import CommandFailed, DsecError, ErrorCode, Sandbox, sync
from dsec_common.wire.exec import ExecState, ExecStream
from dsec_common.wire.sandbox import SandboxState
from stack import Stack, environment


async def test_a_process_is_followed_written_to_and_waited_for(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        line = "echo ready; read x; echo got $x; echo oops >&2; exit 4"
        async with await sandbox.start(line, stdin=True, labels={"a": "b"}) as process:
            events = []
            async for event in process:
                events.append(event)
                if event.data == b"ready\n":
                    await process.write("tea\n")
                    await process.close_stdin()
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert events[-1].stream is ExecStream.EXIT
            info = await process.wait()
            assert (info.exit_code, info.state, info.labels) == (4, ExecState.EXITED, {"a": "b"})
        again = sandbox.process(process.id)
        result = await again.output()
        assert (result.stdout, result.stderr) == (b"ready\ngot tea\n", b"oops\n")
        assert [one.exec_id for one in await sandbox.processes(labels={"a": "b"})] == [process.id]


async def test_a_process_that_is_left_is_ended_with_its_tree(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        async with await sandbox.start("sleep 1000 & sleep 1000") as process:
            with pytest.raises(DsecError) as caught:
                await process.wait(timeout_s=0.1)
            assert caught.value.code is ErrorCode.TIMEOUT
        info = await process.inspect()
        assert (info.signal, info.cancelled) == (15, True)
        with pytest.raises(DsecError) as caught:
            await process.write("x")
        assert caught.value.code is ErrorCode.INVALID


async def test_ten_thousand_pieces_of_input_arrive_in_order(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        async with await sandbox.start(["sha256sum"], stdin=True) as process:
            data = os.urandom(5 << 20)
            await process.write(data)
            await process.close_stdin()
            result = await process.output()
        own = await sandbox.exec(["sha256sum"], stdin=data[:1000])
        assert result.exit_code == own.exit_code == 0
        assert result.stdout_text.split()[0] == hashlib.sha256(data).hexdigest()


async def session_of(sandbox: Sandbox, shell: str) -> None:
    async with await sandbox.session(shell=shell, env={"GREETING": "hello"}) as session:
        first = await session.run("cd /tmp; X=5; f() { echo f:$1; }; pwd; echo err >&2")
        assert (first.exit_code, first.stdout, first.stderr) == (0, b"/tmp\n", b"err\n")
        second = await session.run('pwd; echo "$X $GREETING"; f 7; export Y=6; (exit 9)')
        assert (second.exit_code, second.stdout) == (9, b"/tmp\n5 hello\nf:7\n")
        assert second.stderr == b""
        with pytest.raises(CommandFailed):
            await session.run("false", check=True)
        broken = await session.run("echo 'no end")
        assert broken.exit_code != 0
        quoted = await session.run("echo \"it's\"; printf 'no newline'")
        assert quoted.stdout == b"it's\nno newline"
        for endless in ("sleep 1000", "while :; do :; done", "cat /dev/zero | sleep 1000"):
            late = await session.run(f"echo before; {endless}", timeout_s=1.0)
            assert late.timed_out, endless
            assert late.stdout.startswith(b"before\n")
            assert session.alive, endless
        assert (await session.run("echo $X $Y; pwd")).stdout == b"5 6\n/tmp\n"
        background = await session.run("sleep 1000 & echo started")
        assert background.stdout == b"started\n"
        flood = await session.run("yes | head -n 400000", output_limit_bytes=1000)
        assert flood.stdout == b"y\n" * 500
        assert flood.stdout_truncated
        assert (await session.run("echo fine")).stdout == b"fine\n"
        bye = await session.run("echo bye; exit 3")
        assert (bye.exit_code, bye.stdout) == (3, b"bye\n")
        assert not session.alive
        with pytest.raises(DsecError) as caught:
            await session.run("true")
        assert caught.value.code is ErrorCode.CONFLICT


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
async def test_a_session_keeps_its_state_between_commands(
    stack: Stack, base: str, shell: str
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        if (await sandbox.exec(["test", "-x", shell])).exit_code:
            pytest.skip(f"the base has no {shell}")
        await session_of(sandbox, shell)


async def test_a_sessions_time_limit_stands_still_while_its_sandbox_is_paused(
    stack: Stack, base: str
) -> None:
    async with (
        stack.client() as client,
        await client.create_sandbox(base) as sandbox,
        await sandbox.session() as session,
    ):
        running = asyncio.create_task(
            session.run(": >/tmp/begun; sleep 0.5; echo done; sleep 60", timeout_s=2.0)
        )
        await sandbox.exec("until [ -e /tmp/begun ]; do sleep 0.05; done", check=True)
        await sandbox.pause()
        await asyncio.sleep(3.0)  # longer than the limit, which is what is tried
        assert not running.done()
        assert (await sandbox.inspect()).state is SandboxState.PAUSED
        await sandbox.resume()
        result = await running
        assert (result.timed_out, result.stdout[:5]) == (True, b"done\n")


async def test_the_end_of_a_session_ends_its_tree_and_a_stubborn_shell_is_ended(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        async with await sandbox.session() as session:
            # One that takes a while to die: what it holds is freed first.
            holds = "import time; held = b'x' * (150 << 20); print(flush=True); time.sleep(1234)"
            await session.run(f'python3 -c "{holds}" >/tmp/holds & sleep 1234 >/dev/null &')
            await session.run("until [ -s /tmp/holds ]; do sleep 0.05; done", check=True)
        left = await sandbox.exec("cat /proc/[0-9]*/comm | grep -cE 'sleep|python' || true")
        assert left.stdout == b"0\n"
        async with await sandbox.session() as session:
            late = await session.run("trap '' INT; while :; do :; done", timeout_s=1.0)
            assert late.timed_out
            assert not session.alive


async def test_a_shell_that_is_not_there_is_not_found(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        with pytest.raises(DsecError) as caught:
            await (await sandbox.session(shell=("/nowhere/sh",))).run("echo never")  # noqa: S604
        assert caught.value.code is ErrorCode.NOT_FOUND


def test_processes_and_sessions_without_await(stack: Stack, base: str) -> None:
    with (
        sync.DSecClient(stack.context.nats_servers, stack.context.credentials) as client,
        client.create_sandbox(base) as sandbox,
    ):
        with sandbox.start("echo one; echo two") as process:
            data = b"".join(event.data for event in process)
            assert data == b"one\ntwo\n"
        with sandbox.session() as session:
            session.run("cd /tmp")
            assert session.run("pwd").stdout == b"/tmp\n"


async def test_an_exec_of_the_command_line_passes_input_output_and_code(
    stack: Stack, base: str
) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        data = os.urandom(3 << 20)
        piped = await asyncio.to_thread(
            subprocess.run,
            stack.command(
                "sandbox", "exec", "-i", sandbox.id, "sh", "-c", "cat; echo e >&2; exit 7"
            ),
            input=data,
            capture_output=True,
            env=environment(),
            check=False,
        )
        assert piped.returncode == 7, piped.stderr
        assert piped.stdout == data
        assert piped.stderr == b"e\n"


async def test_a_shell_of_the_command_line_is_a_terminal(stack: Stack, base: str) -> None:
    async with stack.client() as client, await client.create_sandbox(base) as sandbox:
        master, peer = pty.openpty()
        fcntl.ioctl(peer, termios.TIOCSWINSZ, struct.pack("=4H", 33, 101, 0, 0))
        process = await asyncio.create_subprocess_exec(
            *stack.command("sandbox", "shell", sandbox.id),
            stdin=peer,
            stdout=peer,
            stderr=peer,
            env={**environment(), "LINES": "24", "COLUMNS": "80"},  # of another terminal
        )
        os.close(peer)
        said = b""
        loop = asyncio.get_running_loop()

        async def until(text: bytes) -> None:
            nonlocal said
            async with asyncio.timeout(20):
                while text not in said:
                    said += await loop.run_in_executor(None, os.read, master, 4096)

        try:
            await until(b"# ")
            os.write(master, b"stty size; echo $((20+3))\n")
            await until(b"33 101\r\n")
            await until(b"23\r\n")
            # Printed by the process that is to be interrupted: it is in the foreground by then.
            os.write(master, b"sh -c 'echo st\"\"arted; exec sleep 1000'\n")
            await until(b"started\r\n")
            os.write(master, b"\x03")
            os.write(master, b"exit 5\n")
            assert await process.wait() == 5
        finally:
            os.close(master)
