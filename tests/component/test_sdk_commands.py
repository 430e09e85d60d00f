"""Commands on a real node through the SDK: long input, what is waited for, what is no time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec import Sandbox
from dsec.channel import Channel
from dsec_common.errors import ErrorCode
from refusals import refused
from sandboxd_node import node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
MIB = 1 << 20


@pytest.fixture
async def sandbox(tmp_path: Path, layers: Path) -> AsyncIterator[Sandbox]:
    async with node_for_tests(tmp_path / "node", layers, exec_output_bytes=64 * 1024) as node:
        created = await node.place()
        yield Sandbox(Channel(node.project, "default"), created.sandbox_id, created)


async def test_input_that_fits_no_message_reaches_the_command_whole(sandbox: Sandbox) -> None:
    data = os.urandom(3 * MIB + 17)
    told = await sandbox.exec(["sha256sum"], stdin=data)
    assert told.stdout_text.split()[0] == hashlib.sha256(data).hexdigest()
    wanted = await sandbox.exec("head -c 4; echo; cd; pwd; echo wrong >&2; exit 3", stdin=data)
    assert (wanted.exit_code, wanted.stdout[:4], wanted.stderr) == (3, data[:4], b"wrong\n")
    cut = await sandbox.exec(["cat"], stdin=b"x" * MIB, output_limit_bytes=10)
    assert (cut.stdout, cut.stdout_truncated, cut.exit_code) == (b"x" * 10, True, 0)
    late = await sandbox.exec("sleep 60", stdin=data, timeout_s=0.3)
    assert late.timed_out
    error = await refused(sandbox.exec(["not-there"], stdin=data))
    assert error.code is ErrorCode.NOT_FOUND


async def test_a_command_line_that_fits_no_message_is_run(sandbox: Sandbox) -> None:
    words = [f"{number:0300}" for number in range(4000)]
    result = await sandbox.exec(["/bin/sh", "-c", "echo $#; shift 3999; echo $1", "sh", *words])
    assert result.stdout_text.split() == ["4000", words[-1]]


async def test_what_was_waited_for_still_has_its_output(sandbox: Sandbox) -> None:
    process = await sandbox.start("echo out; echo err >&2; exit 3")
    assert (await process.wait()).exit_code == 3
    result = await process.output()
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    flood = await sandbox.start("yes | head -c 1000000; echo end")
    await flood.wait()
    events = [event async for event in flood]
    assert flood.truncated
    assert events[-2].data.endswith(b"end\n")


async def test_a_command_whose_caller_is_cancelled_is_ended(sandbox: Sandbox) -> None:
    line = "echo $$ > /tmp/pid; sleep 1000 & wait"
    for stdin in (b"", b"x" * MIB):  # in one message, and in pieces
        await sandbox.exec("rm -f /tmp/pid")
        running = asyncio.ensure_future(sandbox.exec(line, stdin=stdin, timeout_s=600))
        await sandbox.exec("until [ -s /tmp/pid ]; do :; done", check=True)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gone = "while [ -d /proc/$(cat /tmp/pid) ] || pgrep sleep; do :; done"
        assert not (await sandbox.exec(gone, timeout_s=20)).timed_out


async def test_a_command_that_goes_with_its_sandbox_names_no_time_that_is_none(
    sandbox: Sandbox,
) -> None:
    process = await sandbox.start("sleep 600")
    cut = [asyncio.ensure_future(refused(sandbox.exec(": > /begun; sleep 600", timeout_s=700)))]
    cut.append(asyncio.ensure_future(refused(process.wait())))
    await sandbox.exec("until [ -e /begun ]; do :; done", check=True)
    began_at = time.time()
    await sandbox.delete()
    for error in await asyncio.gather(*cut):
        assert error.code is ErrorCode.EXPIRED
        assert error.details.get("ended_at") != 0.0
    error = await refused(sandbox.exec("true"))
    assert began_at - 1 < float(str(error.details["ended_at"])) < time.time() + 1


@pytest.mark.parametrize("no_time", [None, 0, -1.0, float("nan"), "60"])
async def test_what_is_no_time_is_refused_with_a_word_on_what_is(
    sandbox: Sandbox, no_time: Any
) -> None:
    error = await refused(sandbox.exec("true", timeout_s=no_time))
    assert error.code is ErrorCode.INVALID
    assert "timeout_s" in error.message
