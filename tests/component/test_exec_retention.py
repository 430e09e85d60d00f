"""How long a node keeps what commands printed and how they ended: ``exec_kept_s``, no longer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.exec import ExecState
from dsec_common.wire.sandbox import ExecCommand, ExecResult
from exec_client import Box, output
from sandboxd_node import NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

KEPT_S = 4.0
#: Says which run of it this is.
COUNTING = (
    "echo x >> /dev/shm/runs; n=0; while read line; do n=$((n + 1)); done < /dev/shm/runs; echo $n"
)


@pytest.fixture
async def node(tmp_path: Path, layers: Path) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path, layers, exec_kept_s=KEPT_S) as running:
        yield running


@pytest.fixture
async def box(node: NodeForTests) -> Box:
    return Box(node, (await node.place()).sandbox_id)


def directories(root: Path, exec_id: str) -> int:
    """Return how many directories are kept for an exec."""
    return len([*root.rglob(exec_id)])


async def said_to(box: Box, command: ExecCommand) -> bytes:
    """Return what a command printed, or why that is not known."""
    try:
        return (await box.ask("exec", command, ExecResult)).stdout.strip()
    except DsecError as error:
        return str(error.details["reason"]).encode()


async def why_not(box: Box, exec_id: str) -> DsecError | None:
    """Return why nothing is known of an exec, or None."""
    try:
        await box.inspect(exec_id)
    except DsecError as error:
        return error
    return None


async def test_a_started_command_is_forgotten_with_its_output_after_its_time(
    box: Box, tmp_path: Path
) -> None:
    lasting = await box.sh("echo lasts; sleep 1000")
    before = await box.until(lasting, b"lasts\n")
    ended = await box.sh("echo said")
    assert output(await box.events(ended)) == b"said\n"
    assert directories(tmp_path, ended) == 1
    async with asyncio.timeout(30):
        while (error := await why_not(box, ended)) is None:
            await asyncio.sleep(0.1)
    assert (error.code, error.details["what"]) == (ErrorCode.NOT_FOUND, "exec")
    assert directories(tmp_path, ended) == 0
    # However long ago it began, what runs is not old.
    assert (await box.inspect(lasting)).state is ExecState.RUNNING
    assert list((await box.read(lasting)).events) == before


@pytest.mark.parametrize("line", [COUNTING, f"sleep 0.2; {COUNTING}"], ids=["short", "lasting"])
async def test_a_result_is_forgotten_after_its_time(box: Box, line: str) -> None:
    command = ExecCommand(argv=("sh", "-c", line))
    said: list[bytes] = []
    async with asyncio.timeout(30):
        while b"2" not in said:
            said.append(await said_to(box, command))
            await asyncio.sleep(0.1)
    # Kept, perhaps known to be gone for a moment, then a command like any other.
    assert said.count(b"1") > 1
    assert [*dict.fromkeys(said)] in ([b"1", b"2"], [b"1", b"result_lost", b"2"])
