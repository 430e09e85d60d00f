"""What is left to others when one sandbox takes all of the daemon that it can get."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.exec import ExecInfo, StartExec
from dsec_common.wire.files import FILE_CHUNK_BYTES, TreeWritten, WriteTree
from dsec_common.wire.sandbox import ExecCommand, ExecResult
from dsec_sandboxd.commands import STDIN_UNDER_WAY_BYTES_MAX
from dsec_sandboxd.file_trees import TREE_PIECES_WAITING_MAX
from dsec_sandboxd.kernel.descriptors import (
    COMMAND_DESCRIPTORS,
    COMMAND_DESCRIPTORS_RESERVED,
    may_begin,
)
from sandboxd_node import NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests

Both = tuple[DaemonProcess, NodeForTests]
FEW = 400


@pytest.fixture
async def both(tmp_path: Path, layers: Path) -> AsyncIterator[Both]:
    async with daemon_for_tests(tmp_path, layers) as running:
        yield running


async def started_until_refused(node: NodeForTests, sandbox_id: str) -> tuple[int, DsecError]:
    """Start commands that wait for input, as many as there may be."""
    for count in range(FEW):
        message = StartExec(argv=("cat",), stdin=True)
        try:
            await node.ask(sandbox_id, "start_exec", message, ExecInfo)
        except DsecError as error:
            return count, error
    message_text = "nothing was refused"
    raise AssertionError(message_text)


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
async def test_commands_of_one_sandbox_leave_descriptors_to_all_others(both: Both) -> None:
    daemon, node = both
    greedy = [(await node.place()).sandbox_id for _ in range(4)]
    neighbour = (await node.place()).sandbox_id
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
    counts = []
    for sandbox_id in greedy:
        count, error = await started_until_refused(node, sandbox_id)
        assert error.code is ErrorCode.EXHAUSTED
        assert error.details["what"] == "descriptors"
        counts.append(count)
    assert counts == sorted(counts, reverse=True)
    assert (await node.exec(neighbour, "echo", "well")).stdout == b"well\n"
    made = (await node.place()).sandbox_id
    assert (await node.exec(made, "echo", "well")).stdout == b"well\n"
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < FEW - COMMAND_DESCRIPTORS  # noqa: PTH208


def test_a_sandbox_holds_no_more_than_it_leaves_and_may_always_begin_one() -> None:
    limit = free = 20_000
    taken = []
    for _ in range(12):
        running = 0
        while may_begin(running, free, limit):
            running += 1
            free -= COMMAND_DESCRIPTORS
        taken.append(running)
    assert taken[0] > 1_000
    assert all(first >= second for first, second in itertools.pairwise(taken))
    assert all(taken)
    assert free > COMMAND_DESCRIPTORS_RESERVED - len(taken) * COMMAND_DESCRIPTORS


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
async def test_what_waits_in_the_daemons_memory_is_bounded(both: Both) -> None:
    _, node = both
    sandbox_id = (await node.place()).sandbox_id
    piece = WriteTree(
        path="/tmp/tree",
        upload_id="late",
        offset=FILE_CHUNK_BYTES,
        data=bytes(FILE_CHUNK_BYTES),
        final=False,
    )
    answers = await asyncio.gather(
        *(
            node.ask(sandbox_id, "write_tree", piece, TreeWritten)
            for _ in range(TREE_PIECES_WAITING_MAX + 1)
        ),
        return_exceptions=True,
    )
    # One too many ends it for all, and each is told why.
    assert all(isinstance(answer, DsecError) for answer in answers)
    assert {answer.code for answer in answers if isinstance(answer, DsecError)} == {
        ErrorCode.INVALID
    }
    given = STDIN_UNDER_WAY_BYTES_MAX // 128 + 1
    waiting = [
        asyncio.ensure_future(
            node.ask(
                sandbox_id,
                "exec",
                ExecCommand(argv=("sleep", "100"), stdin=bytes(given)),
                ExecResult,
            )
        )
        for _ in range(128)
    ]
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    refused = [one.exception() for one in done]
    assert all(isinstance(one, DsecError) and one.details["what"] == "stdin" for one in refused)
    assert (await node.exec(sandbox_id, "echo", "well")).stdout == b"well\n"
    for one in others:
        one.cancel()
    await asyncio.wait(others)
