"""Commands outlive their node's daemon: they run on, and not a byte of their output is lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.channel import Channel
from dsec.sandbox import Sandbox
from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError
from dsec_common.wire.exec import ExecInfo, ExecState, ExecStream, StartExec, TerminalSize
from dsec_common.wire.life import PauseSandbox
from dsec_common.wire.sandbox import ExecCommand, ExecResult, SandboxInfo
from exec_client import Box, output
from sandboxd_node import NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests, processes_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

Both = tuple[DaemonProcess, NodeForTests]
COUNT = "i=0; while [ $i -lt 30000 ]; do echo $i; i=$((i+1)); done"
COUNTED = "".join(f"{number}\n" for number in range(30_000)).encode()


@pytest.fixture
async def both(tmp_path: Path, layers: Path) -> AsyncIterator[Both]:
    async with daemon_for_tests(tmp_path, layers) as running:
        yield running


async def box_of(node: NodeForTests) -> Box:
    return Box(node, (await node.place()).sandbox_id)


async def restart(daemon: DaemonProcess) -> None:
    await daemon.kill()
    await daemon.start()


async def given_up(asking: asyncio.Future[ExecResult]) -> None:
    """Wait no longer for an answer that died with the daemon."""
    asking.cancel()
    await asyncio.wait({asking})


async def test_the_output_of_an_exec_is_whole_after_kill_9_at_any_moment(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    source = random.Random(7)  # noqa: S311  a repeatable one is wanted
    for _ in range(3):
        exec_id = await box.sh(f"{COUNT}; echo over >&2; exit 3")
        await asyncio.sleep(source.random() * 0.1)
        await restart(daemon)
        events = await box.events(exec_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert output(events) == COUNTED
        assert output(events, ExecStream.STDERR) == b"over\n"
        assert (await box.inspect(exec_id)).exit_code == 3


async def test_a_terminal_goes_on_with_what_was_printed_and_what_is_typed(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    exec_id = await box.sh(f"echo up; read x; echo got $x; {COUNT}", terminal=TerminalSize())
    await box.until(exec_id, b"up\r\n")
    await restart(daemon)
    await box.write(exec_id, 0, b"it\n")
    await box.until(exec_id, b"got it\r\n")
    await restart(daemon)
    events = await box.events(exec_id)
    expected = b"up\r\nit\r\ngot it\r\n" + COUNTED.replace(b"\n", b"\r\n")
    assert output(events) == expected


async def test_input_goes_on_at_the_very_byte(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    exec_id = await box.sh("sleep .3; sha256sum", stdin=True)
    data = random.Random(3).randbytes(3 << 20)  # noqa: S311  a repeatable one is wanted
    sent, pieces = 0, 0
    while sent < len(data):
        sent = (await box.write(exec_id, sent, data[sent : sent + 100_000])).accepted
        pieces += 1
        if pieces in {4, 20}:
            await restart(daemon)
    assert (await box.write(exec_id, sent, b"", end=True)).closed
    await restart(daemon)
    said = output(await box.events(exec_id)).split()[0].decode()
    assert said == hashlib.sha256(data).hexdigest()


async def test_a_command_that_ran_is_joined_afterwards_and_never_run_again(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    line = f"echo x >> /tmp/ran; {COUNT} | head -n 20000; sleep .5; echo err >&2; exit 4"
    message = ExecCommand(argv=("sh", "-c", line))
    asking = asyncio.ensure_future(box.ask("exec", message, ExecResult, timeout_s=2.0))
    while (await node.exec(box.id, "test", "-e", "/tmp/ran")).exit_code != 0:
        await asyncio.sleep(0.01)
    await restart(daemon)
    result = await box.ask("exec", message, ExecResult)
    again = await box.ask("exec", message, ExecResult)
    assert (result.exit_code, result.stderr) == (4, b"err\n")
    assert result.stdout == b"".join(COUNTED.splitlines(keepends=True)[:20000])
    assert again.stdout == result.stdout
    assert (await node.exec(box.id, "cat", "/tmp/ran")).stdout == b"x\n"
    with pytest.raises(DsecError):
        await asking


async def test_a_command_that_took_a_part_of_its_input_for_all_of_it_has_no_result(
    both: Both,
) -> None:
    daemon, node = both
    box = await box_of(node)
    # More than a pipe holds: the daemon is still giving it when it dies.
    message = ExecCommand(
        argv=("sh", "-c", "touch /tmp/up; sleep 1.5; cat | wc -c; touch /tmp/over"),
        stdin=b"x" * 300_000,
    )
    local = box.id.partition(".")[2]
    quiet = processes_of(local)
    asking = asyncio.ensure_future(box.ask("exec", message, ExecResult, timeout_s=2.0))
    while (await node.exec(box.id, "test", "-e", "/tmp/up")).exit_code != 0:
        await asyncio.sleep(0.01)
    await daemon.kill()
    # It reads on, comes to an end that is none, and has ended before the next daemon looks.
    while processes_of(local) != quiet:
        await asyncio.sleep(0.001)
    await daemon.start()
    assert (await node.exec(box.id, "test", "-e", "/tmp/over")).exit_code == 0
    with pytest.raises(DsecError) as caught:
        await box.ask("exec", message, ExecResult)
    assert caught.value.details["reason"] == "input_cut"
    assert caught.value.details[MAY_HAVE_HAPPENED]
    with pytest.raises(DsecError):
        await asking


async def test_a_result_is_kept_over_the_death_of_the_daemon(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    message = ExecCommand(argv=("sh", "-c", "sleep .4; echo kept; echo x >> /tmp/ran"))
    first = await box.ask("exec", message, ExecResult)
    await restart(daemon)
    second = await box.ask("exec", message, ExecResult)
    assert second.stdout == first.stdout == b"kept\n"
    assert (await node.exec(box.id, "cat", "/tmp/ran")).stdout == b"x\n"


async def test_a_result_too_short_lived_to_be_kept_is_said_to_be_lost(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    messages = [ExecCommand(argv=("true",)) for _ in range(40)]
    for message in messages:
        await box.ask("exec", message, ExecResult)
    await restart(daemon)
    answers = await asyncio.gather(
        *(box.ask("exec", message, ExecResult) for message in messages), return_exceptions=True
    )
    lost = [answer for answer in answers if isinstance(answer, DsecError)]
    # One that took its time on a busy machine is kept.
    assert lost
    assert all(error.details["reason"] == "result_lost" for error in lost)
    assert all(error.details[MAY_HAVE_HAPPENED] and not error.retryable for error in lost)
    assert all(answer.exit_code == 0 for answer in answers if isinstance(answer, ExecResult))


async def test_short_commands_at_the_very_moment_run_once_or_not_at_all(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    told: set[bytes] = set()
    for round_ in range(4):
        messages = [
            ExecCommand(argv=("sh", "-c", f"echo {round_}.{number} >> /tmp/ran; echo {number}"))
            for number in range(40)
        ]
        asking = [
            asyncio.ensure_future(box.ask("exec", message, ExecResult, timeout_s=1.0))
            for message in messages
        ]
        await asyncio.sleep(0.004 * round_ + 0.01)
        await restart(daemon)
        await asyncio.gather(*asking, return_exceptions=True)
        answers = await asyncio.gather(
            *(box.ask("exec", message, ExecResult) for message in messages),
            return_exceptions=True,
        )
        for number, answer in enumerate(answers):
            if isinstance(answer, DsecError):
                assert answer.details["reason"] == "result_lost"
                assert answer.details[MAY_HAVE_HAPPENED]
            else:
                assert isinstance(answer, ExecResult)
                assert (answer.exit_code, answer.stdout) == (0, b"%d\n" % number)
                told.add(b"%d.%d" % (round_, number))
    ran = (await node.exec(box.id, "cat", "/tmp/ran")).stdout.split()
    assert len(ran) == len(set(ran)) <= 160
    assert told <= set(ran)
    assert told


async def test_the_end_of_a_short_command_that_a_daemon_died_before_hearing_is_not_lost(
    both: Both,
) -> None:
    daemon, node = both
    box = await box_of(node)
    line = "[ $$ -gt 0 ] && echo out; echo err >&2; echo x >> /tmp/ran; exit 3"
    messages = [ExecCommand(argv=("sh", "-c", line)) for _ in range(200)]
    asking = [
        asyncio.ensure_future(box.ask("exec", message, ExecResult, timeout_s=1.0))
        for message in messages
    ]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    os.kill(daemon.pid, signal.SIGSTOP)
    await asyncio.gather(*asking, return_exceptions=True)  # what had begun has ended by now
    await restart(daemon)
    answers = await asyncio.gather(
        *(box.ask("exec", message, ExecResult) for message in messages), return_exceptions=True
    )
    results = [answer for answer in answers if isinstance(answer, ExecResult)]
    assert {(one.exit_code, one.stdout, one.stderr) for one in results} == {(3, b"out\n", b"err\n")}
    lost = [answer for answer in answers if not isinstance(answer, ExecResult)]
    assert all(
        isinstance(one, DsecError) and one.details["reason"] == "result_lost" for one in lost
    )
    ran = (await node.exec(box.id, "cat", "/tmp/ran")).stdout.split()
    assert 0 < len(results) <= len(ran) <= len(messages)


async def test_ids_time_limits_and_execs_that_ended_are_known_to_the_next_daemon(
    both: Both,
) -> None:
    daemon, node = both
    box = await box_of(node)
    ended = await box.sh("echo done; exit 9", labels={"a": "b"})
    await box.events(ended)
    limited = await box.start("sleep", "100", timeout_s=1.5)
    message = StartExec(argv=("sleep", "100"))
    started = await box.ask("start_exec", message, ExecInfo)
    await restart(daemon)
    info = await box.inspect(ended)
    assert (info.exit_code, info.labels) == (9, {"a": "b"})
    assert output(await box.events(ended)) == b"done\n"
    again = await box.ask("start_exec", message, ExecInfo)
    assert again.exec_id == started.exec_id
    await box.events(limited)
    assert (await box.inspect(limited)).timed_out
    over = await box.cancel(started.exec_id)
    assert (over.state, over.signal) == (ExecState.EXITED, 15)


async def test_an_upgrade_hands_running_commands_over(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    exec_id = await box.sh(f"{COUNT}; sleep .2; echo end")
    message = ExecCommand(argv=("sh", "-c", "sleep 1; echo once"))
    asking = asyncio.ensure_future(box.ask("exec", message, ExecResult, timeout_s=20.0))
    await asyncio.sleep(0.05)
    assert await daemon.end(signal.SIGUSR2) == 0
    await daemon.start()
    assert output(await box.events(exec_id)) == COUNTED + b"end\n"
    assert (await box.ask("exec", message, ExecResult)).stdout == b"once\n"
    await given_up(asking)


@pytest.mark.parametrize("lasts_s", [0.05, 0.4])
async def test_the_result_of_one_that_ended_while_no_daemon_was_there_is_not_lost(
    both: Both, lasts_s: float
) -> None:
    daemon, node = both
    box = await box_of(node)
    local = box.id.split(".")[1]
    quiet = processes_of(local)
    line = f"sleep {lasts_s}; echo once; echo more >&2; exit 3"
    message = ExecCommand(argv=("sh", "-c", line))
    asking = asyncio.ensure_future(box.ask("exec", message, ExecResult, timeout_s=20.0))
    while processes_of(local) == quiet:
        await asyncio.sleep(0.001)
    await daemon.kill()
    while processes_of(local) != quiet:
        await asyncio.sleep(0.001)
    await daemon.start()
    result = await box.ask("exec", message, ExecResult)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"once\n", b"more\n")
    await given_up(asking)


async def test_the_sdk_asks_again_and_gets_the_result_of_the_one_that_ran(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.one_shot.LOOK_EVERY_S", 0.2)
    monkeypatch.setattr("dsec.one_shot._ASK_AGAIN_S", 0.5)
    daemon, node = both
    box = await box_of(node)
    sandbox = Sandbox(Channel(node.project, "default"), box.id, None)
    running = asyncio.ensure_future(sandbox.exec("echo x >> /tmp/ran; sleep 2; wc -l < /tmp/ran"))
    await asyncio.sleep(0.3)
    await restart(daemon)
    assert (await running).stdout == b"1\n"


async def test_the_commands_of_a_paused_sandbox_are_taken_over_when_it_goes_on(both: Both) -> None:
    daemon, node = both
    box = await box_of(node)
    exec_id = await box.sh("echo before; read x; echo after $x", stdin=True)
    await box.until(exec_id, b"before\n")
    await box.ask("pause", PauseSandbox(), SandboxInfo)
    await restart(daemon)
    await box.write(exec_id, 0, b"it\n", end=True)
    assert output(await box.events(exec_id)) == b"before\nafter it\n"
