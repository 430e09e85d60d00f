"""Started execs and repeated commands of a node, over real NATS on the real kernel."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.exec import (
    STDIN_CHUNK_BYTES,
    ExecChanged,
    ExecInfo,
    ExecList,
    ExecState,
    ExecStream,
    InspectExec,
    ListExecs,
    ResizeExec,
    SignalExec,
    SignalTarget,
    StartExec,
    TerminalSize,
)
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    ExecCommand,
    ExecResult,
    Limits,
    SandboxDeleted,
)
from exec_client import Box, output
from sandboxd_node import BASE, NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
R = TypeVar("R", bound=Message)


@pytest.fixture
async def node(tmp_path: Path, layers: Path) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path, layers, exec_output_bytes=256 * 1024) as running:
        yield running


@pytest.fixture
async def box(node: NodeForTests) -> Box:
    return Box(node, (await node.place()).sandbox_id)


async def test_events_are_numbered_and_the_exit_is_the_last(box: Box) -> None:
    exec_id = await box.sh("echo one; echo two >&2; exit 7")
    events = await box.events(exec_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert output(events) == b"one\n"
    assert output(events, ExecStream.STDERR) == b"two\n"
    info = await box.inspect(exec_id)
    assert (info.state, info.exit_code, info.last_seq) == (ExecState.EXITED, 7, events[-1].seq)
    again = await box.events(exec_id, after=1)
    assert again == events[1:]


async def test_output_streams_while_the_command_runs(box: Box) -> None:
    exec_id = await box.start("sh", "-c", "echo ready; read line; echo got $line", stdin=True)
    await box.until(exec_id, b"ready\n")
    assert (await box.inspect(exec_id)).state is ExecState.RUNNING
    await box.write(exec_id, 0, b"it\n", end=True)
    assert output(await box.events(exec_id)) == b"ready\ngot it\n"


async def test_input_is_taken_once_however_often_it_is_sent(box: Box) -> None:
    exec_id = await box.start("cat", stdin=True)
    assert (await box.write(exec_id, 0, b"abc")).accepted == 3
    assert (await box.write(exec_id, 0, b"abc")).accepted == 3
    assert (await box.write(exec_id, 1, b"bcdef")).accepted == 6
    with pytest.raises(DsecError) as caught:
        await box.write(exec_id, 9, b"late")
    assert caught.value.code is ErrorCode.CONFLICT
    assert caught.value.details["accepted"] == 6
    assert (await box.write(exec_id, 6, b"", end=True)).closed
    assert (await box.write(exec_id, 6, b"", end=True)).closed
    assert output(await box.events(exec_id)) == b"abcdef"


async def test_fifty_mebibytes_of_input_stream_through(box: Box) -> None:
    exec_id = await box.sh("wc -c", stdin=True)
    total, sent = 50 << 20, 0
    piece = bytes(STDIN_CHUNK_BYTES)
    while sent < total:
        sent = (await box.write(exec_id, sent, piece[: total - sent])).accepted
    await box.write(exec_id, sent, b"", end=True)
    assert int(output(await box.events(exec_id))) == total


async def test_input_that_nobody_reads_waits_and_is_bounded(box: Box) -> None:
    exec_id = await box.start("sleep", "100", stdin=True)
    accepted = 0
    for _ in range(12):
        piece = bytes(STDIN_CHUNK_BYTES)
        accepted = (await box.write(exec_id, accepted, piece, wait_s=0.0)).accepted
    full = await box.write(exec_id, accepted, b"more", wait_s=0.05)
    assert full.accepted == accepted < 12 * STDIN_CHUNK_BYTES
    assert not full.closed
    await box.cancel(exec_id)


async def test_input_to_a_command_that_closed_it_is_said_to_be_closed(box: Box) -> None:
    exec_id = await box.sh("exec <&-; echo closed; sleep 100", stdin=True)
    await box.until(exec_id, b"closed\n")
    await box.write(exec_id, 0, b"x")
    assert (await box.write(exec_id, 1, b"y")).closed
    await box.cancel(exec_id)


async def test_a_flood_keeps_its_end_and_says_what_is_missing(box: Box) -> None:
    exec_id = await box.sh("head -c 3000000 /dev/zero | tr '\\0' x; echo end")
    while (await box.inspect(exec_id)).state is ExecState.RUNNING:
        await box.read(exec_id, after=1 << 40, wait_s=1.0)
    page = await box.read(exec_id)
    assert page.truncated
    assert page.first_seq > 1
    events = await box.events(exec_id)
    assert output(events).endswith(b"xend\n")
    assert 256 * 1024 <= len(output(events)) < 1 << 20
    assert (await box.inspect(exec_id)).stdout_truncated


async def test_a_flood_that_nobody_reads_leaves_the_node_answering(
    box: Box, node: NodeForTests
) -> None:
    floods = [await box.start("yes") for _ in range(8)]
    loop = asyncio.get_running_loop()
    slowest = 0.0
    for _ in range(20):
        began = loop.time()
        assert (await node.exec(box.id, "true")).exit_code == 0
        slowest = max(slowest, loop.time() - began)
    assert slowest < 2.0
    for exec_id in floods:
        info = await box.cancel(exec_id)
        assert info.signal == 15 or info.exit_code is not None
    place = Path(node.config.run_path) / "execs"
    kept = sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())
    assert kept < 8 * 4 * 256 * 1024


async def test_signals_go_to_the_main_process_the_tree_or_all_but_the_main(box: Box) -> None:
    child = "trap 'echo child' USR1; echo up; while :; do sleep .05; done"
    line = 'trap "echo main" USR1; sh -c "$0" & while :; do sleep .05; done'
    exec_id = await box.start("sh", "-c", line, child)
    await box.until(exec_id, b"up\n")

    async def signal(target: SignalTarget) -> None:
        message = SignalExec(exec_id=exec_id, signal=10, target=target)
        await box.ask("signal_exec", message, ExecChanged)

    await signal(SignalTarget.MAIN)
    await box.until(exec_id, b"main\n")
    assert b"child" not in output(list((await box.read(exec_id)).events))
    await signal(SignalTarget.DESCENDANTS)
    await box.until(exec_id, b"child\n")
    assert output(list((await box.read(exec_id)).events)).count(b"main\n") == 1
    info = await box.cancel(exec_id)
    assert info.cancelled
    with pytest.raises(DsecError) as caught:
        await signal(SignalTarget.TREE)
    assert caught.value.code is ErrorCode.CONFLICT


async def test_cancel_ends_the_whole_tree_even_one_that_ignores_it(box: Box) -> None:
    # The first one makes a process group of its own.
    exec_id = await box.sh("trap '' TERM; timeout 900 sleep 100 & sleep 200 & echo up; sleep 300")
    await box.until(exec_id, b"up\n")

    async def processes() -> list[bytes]:
        listing = await box.node.exec(box.id, "sh", "-c", "cat /proc/[0-9]*/comm")
        return listing.stdout.split()

    async with asyncio.timeout(20):
        while (await processes()).count(b"sleep") < 3:
            await asyncio.sleep(0.01)
    info = await box.cancel(exec_id, grace_s=0.1)
    assert (info.state, info.signal, info.cancelled) == (ExecState.EXITED, 9, True)
    assert b"sleep" not in await processes()


async def test_a_time_limit_ends_an_exec_and_143_by_itself_is_none(box: Box) -> None:
    late = await box.sh("echo partial; sleep 100", timeout_s=1.5)
    assert output(await box.events(late)) == b"partial\n"
    info = await box.inspect(late)
    assert (info.timed_out, info.signal) == (True, 15)
    own = await box.node.exec(box.id, "sh", "-c", "exit 143")
    assert (own.exit_code, own.timed_out) == (143, False)
    own_exec = await box.sh("exit 143")
    await box.events(own_exec)
    assert not (await box.inspect(own_exec)).timed_out


async def test_a_program_that_is_not_there_is_a_failed_exec(box: Box) -> None:
    exec_id = await box.start("no-such-program")
    events = await box.events(exec_id)
    info = await box.inspect(exec_id)
    assert [event.stream for event in events] == [ExecStream.EXIT]
    assert (info.state, info.error_code) == (ExecState.FAILED, "not_found")
    assert "no-such-program" in info.error_message


async def test_a_terminal_has_a_size_a_name_and_hangs_up(box: Box) -> None:
    exec_id = await box.start(
        "sh", "-c", "tty; stty size; echo $TERM; read x; stty size; cat", terminal=TerminalSize()
    )
    await box.until(exec_id, b"xterm-256color\r\n")
    await box.ask(
        "resize_exec",
        ResizeExec(exec_id=exec_id, size=TerminalSize(rows=50, columns=132)),
        ExecChanged,
    )
    await box.write(exec_id, 0, b"\n")
    events = await box.until(exec_id, b"50 132\r\n")
    assert b"/dev/pts/" in output(events)
    assert b"24 80\r\n" in output(events)
    accepted = (await box.write(exec_id, 1, b"", end=True)).accepted
    assert accepted >= 1
    assert (await box.inspect(exec_id)).terminal
    await box.events(exec_id)
    assert (await box.inspect(exec_id)).exit_code == 0


async def test_the_interrupt_key_of_a_terminal_interrupts(box: Box) -> None:
    exec_id = await box.sh("echo up; sleep 100", terminal=TerminalSize())
    await box.until(exec_id, b"up\r\n")
    await box.write(exec_id, 0, b"\x03")
    await box.events(exec_id)
    assert (await box.inspect(exec_id)).signal == 2


@pytest.mark.parametrize(("rows", "columns"), [(0, 80), (24, 0), (1001, 80), (24, 2**31), (-1, 1)])
async def test_a_terminal_of_no_possible_size_is_refused(box: Box, rows: int, columns: int) -> None:
    size = TerminalSize(rows=rows, columns=columns)
    with pytest.raises(DsecError) as caught:
        await box.start("true", terminal=size)
    assert caught.value.code is ErrorCode.INVALID


async def test_more_terminals_than_a_sandbox_has_are_exhausted(box: Box) -> None:
    execs: list[str] = []

    async def take_all() -> None:
        while len(execs) < 20:
            execs.append(await box.start("sleep", "100", terminal=TerminalSize()))

    with pytest.raises(DsecError) as caught:
        await take_all()
    assert caught.value.code is ErrorCode.EXHAUSTED
    assert 8 <= len(execs) <= 16
    for exec_id in execs:
        await box.cancel(exec_id)
    await box.cancel(await box.start("sleep", "100", terminal=TerminalSize()))


async def test_the_same_start_twice_is_one_exec(box: Box) -> None:
    message = StartExec(argv=("sh", "-c", "echo x >> /tmp/count; echo up; sleep 100"))
    first, second = await asyncio.gather(
        box.ask("start_exec", message, ExecInfo), box.ask("start_exec", message, ExecInfo)
    )
    third = await box.ask("start_exec", message, ExecInfo)
    assert first.exec_id == second.exec_id == third.exec_id
    await box.until(first.exec_id, b"up\n")
    await box.cancel(first.exec_id)
    counted = await box.node.exec(box.id, "cat", "/tmp/count")
    assert counted.stdout == b"x\n"


async def test_the_same_command_again_is_joined_or_answered_and_never_run_again(box: Box) -> None:
    message = ExecCommand(argv=("sh", "-c", "echo x >> /tmp/c; sleep .3; wc -l < /tmp/c"))
    first, second = await asyncio.gather(
        box.ask("exec", message, ExecResult), box.ask("exec", message, ExecResult)
    )
    third = await box.ask("exec", message, ExecResult)
    assert first.stdout == second.stdout == third.stdout == b"1\n"
    assert first.message_id == third.message_id


async def test_one_message_is_a_command_or_an_exec_and_never_both(box: Box) -> None:
    line = ("sh", "-c", "echo x >> /tmp/both; sleep .2")
    for first, second in (("exec", "start_exec"), ("start_exec", "exec")):
        run, start = ExecCommand(argv=line), StartExec(argv=line)
        start = msgspec.structs.replace(start, message_id=run.message_id)
        asked: dict[str, Message] = {"exec": run, "start_exec": start}
        answers: dict[str, Any] = {"exec": ExecResult, "start_exec": ExecInfo}
        at_once = await asyncio.gather(
            box.ask(first, asked[first], answers[first]),
            box.ask(second, asked[second], answers[second]),
            return_exceptions=True,
        )
        refused = [answer for answer in at_once if isinstance(answer, DsecError)]
        assert [error.code for error in refused] == [ErrorCode.INVALID]
        loser = second if at_once[0] is not refused[0] else first
        with pytest.raises(DsecError, match="use a fresh one"):
            await box.ask(loser, asked[loser], answers[loser])
    await box.node.exec(box.id, "sleep", ".3")
    assert (await box.node.exec(box.id, "cat", "/tmp/both")).stdout == b"x\nx\n"


async def test_what_a_command_leaves_behind_lives_on_and_its_output_goes_nowhere(
    box: Box, node: NodeForTests
) -> None:
    line = "(sleep .2; echo late; echo done > /tmp/done; exec sleep 100) & echo early"
    result = await node.exec(box.id, "sh", "-c", line)
    assert result.stdout == b"early\n"
    exec_id = await box.sh(line.replace("/tmp/done", "/tmp/done2"))
    assert output(await box.events(exec_id)) == b"early\n"
    for name in ("done", "done2"):
        waited = await node.exec(
            box.id, "sh", "-c", f"until test -e /tmp/{name}; do sleep .05; done"
        )
        assert waited.exit_code == 0


async def test_a_command_that_closes_its_output_lives_on(box: Box) -> None:
    exec_id = await box.sh("exec >&- 2>&-; sleep .3; exit 5")
    events = await box.events(exec_id)
    assert [event.stream for event in events] == [ExecStream.EXIT]
    assert (await box.inspect(exec_id)).exit_code == 5


async def test_execs_are_listed_by_label_and_state(box: Box) -> None:
    one = await box.start("sleep", "100", labels={"kind": "server"})
    two = await box.start("true", labels={"kind": "other"})
    await box.events(two)
    listed = await box.ask("list_execs", ListExecs(labels={"kind": "server"}), ExecList)
    assert [info.exec_id for info in listed.execs] == [one]
    living = await box.ask("list_execs", ListExecs(include_ended=False), ExecList)
    assert [info.exec_id for info in living.execs] == [one]
    rest = await box.ask("list_execs", ListExecs(after=one), ExecList)
    assert [info.exec_id for info in rest.execs] == [two]
    await box.cancel(one)


async def test_the_execs_of_another_sandbox_or_project_are_not_there(
    box: Box, node: NodeForTests
) -> None:
    exec_id = await box.start("sleep", "100")
    other = Box(node, (await node.place()).sandbox_id)
    with pytest.raises(DsecError) as caught:
        await other.inspect(exec_id)
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(DsecError) as caught:
        await node.ask(
            box.id,
            "inspect_exec",
            InspectExec(exec_id=exec_id),
            ExecInfo,
            bus=node.other,
            project="other",
        )
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_an_exec_ends_with_its_sandbox_and_nothing_of_it_is_kept(
    box: Box, node: NodeForTests
) -> None:
    exec_id = await box.sh("echo up; sleep 100")
    await box.until(exec_id, b"up\n")
    reading = asyncio.ensure_future(box.read(exec_id, after=100, wait_s=20.0))
    await asyncio.sleep(0)
    await box.ask("delete", DeleteSandbox(), SandboxDeleted)
    with pytest.raises(DsecError):
        await reading
    assert not (node.config.run_path / "execs" / box.id.split(".")[1]).exists()


async def test_a_thousand_execs_run_at_once_in_one_sandbox(node: NodeForTests) -> None:
    limits = Limits(pids=1200, memory_bytes=1 << 30)
    created = await node.place(CreateSandbox(base=BASE, limits=limits))
    box = Box(node, created.sandbox_id)
    commands = [
        asyncio.ensure_future(
            node.exec(box.id, "sh", "-c", "read x; echo $x", stdin=b"%d" % number)
        )
        for number in range(1000)
    ]
    results = await asyncio.gather(*commands)
    assert [int(result.stdout) for result in results] == list(range(1000))


async def test_when_memory_for_output_is_full_output_is_dropped_and_commands_run_on(
    tmp_path: Path, layers: Path
) -> None:
    async with node_for_tests(
        tmp_path, layers, exec_memory_bytes=2 << 20, exec_output_bytes=1 << 20
    ) as node:
        box = Box(node, (await node.place()).sandbox_id)
        old = await box.sh("head -c 900000 /dev/zero")
        await box.events(old)
        line = "head -c 4000000 /dev/zero; echo over > /tmp/over; exec sleep 100"
        floods = [await box.sh(line.replace("/tmp/over", f"/tmp/over{n}")) for n in range(4)]
        for number in range(4):
            wait = f"until test -e /tmp/over{number}; do sleep .05; done"
            assert (await node.exec(box.id, "sh", "-c", wait)).exit_code == 0
        for exec_id in floods:
            assert (await box.inspect(exec_id)).state is ExecState.RUNNING
            assert (await box.cancel(exec_id)).signal == 15
        assert (await node.exec(box.id, "echo", "fine")).stdout == b"fine\n"
        with pytest.raises(DsecError) as caught:
            await box.inspect(old)
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_message_whose_result_is_no_longer_kept_runs_nothing_again(
    tmp_path: Path, layers: Path
) -> None:
    async with node_for_tests(tmp_path, layers, exec_results_bytes=0) as node:
        box = Box(node, (await node.place()).sandbox_id)
        messages = [ExecCommand(argv=("sh", "-c", f"echo {n} >> /tmp/ran")) for n in range(20)]
        for message in messages:
            await box.ask("exec", message, ExecResult)
        answers = await asyncio.gather(
            *(box.ask("exec", message, ExecResult) for message in messages), return_exceptions=True
        )
        # Those that took their time on a busy machine are kept on the tmpfs.
        lost = [answer for answer in answers if isinstance(answer, DsecError)]
        assert all(error.details["reason"] == "result_lost" for error in lost)
        ran = (await node.exec(box.id, "cat", "/tmp/ran")).stdout.split()
        assert len(ran) == len(set(ran)) == 20
