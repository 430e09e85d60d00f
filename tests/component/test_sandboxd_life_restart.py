"""What a daemon's death does to paused sandboxes, and to those made for one command."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.wire.life import PauseSandbox
from dsec_common.wire.sandbox import (
    CreateSandbox,
    EndCause,
    ExecCommand,
    InspectSandbox,
    SandboxEnded,
    SandboxInfo,
    SandboxRunning,
    SandboxState,
)
from sandboxd_node import BASE, NODE, NodeForTests
from sandboxd_process import DaemonProcess, daemon_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

Both = tuple[DaemonProcess, NodeForTests]


@pytest.fixture
async def both(tmp_path: Path, layers: Path) -> AsyncIterator[Both]:
    async with daemon_for_tests(tmp_path, layers) as running:
        yield running


async def state_of(node: NodeForTests, sandbox_id: str) -> SandboxState:
    return (await node.ask(sandbox_id, "inspect", InspectSandbox(), SandboxInfo)).state


def cgroup_of(sandbox_id: str) -> Path:
    local = sandbox_id.partition(".")[2]
    unified = Path("/sys/fs/cgroup/unified")
    root = unified if unified.exists() else unified.parent
    return root / f"dsec-{NODE}" / local


async def test_a_paused_sandbox_stays_paused_over_the_daemons_death_and_wakes(both: Both) -> None:
    daemon, node = both
    sandbox_id = (await node.place()).sandbox_id
    await node.exec(sandbox_id, "sh", "-c", "echo kept > /tmp/kept")
    await node.ask(sandbox_id, "pause", PauseSandbox(), SandboxInfo)
    await daemon.kill()
    await daemon.start()
    assert await state_of(node, sandbox_id) is SandboxState.PAUSED
    assert "frozen 1" in (cgroup_of(sandbox_id) / "cgroup.events").read_text()
    assert (await node.exec(sandbox_id, "cat", "/tmp/kept")).stdout == b"kept\n"
    assert await state_of(node, sandbox_id) is SandboxState.RUNNING


def count_in(sandbox_id: str) -> str:
    """Return how far the command in a sandbox has counted, without waking anything."""
    init = (cgroup_of(sandbox_id) / "cgroup.procs").read_text().split()[0]
    count = Path(f"/proc/{init}/root/tmp/count")
    return count.read_text() if count.exists() else ""


async def test_what_is_paused_does_not_run_for_a_moment_when_the_daemon_is_killed(
    both: Both,
) -> None:
    daemon, node = both
    sandbox_id = (await node.place()).sandbox_id
    counting = "i=0; while :; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; done"
    await node.exec(sandbox_id, "sh", "-c", f"({counting}) > /dev/null 2>&1 &")
    await node.until(lambda: bool(count_in(sandbox_id)))
    await node.ask(sandbox_id, "pause", PauseSandbox(), SandboxInfo)
    before = count_in(sandbox_id)
    for _ in range(2):
        await daemon.kill()
        await daemon.start()
        assert await state_of(node, sandbox_id) is SandboxState.PAUSED
        assert count_in(sandbox_id) == before
    await node.exec(sandbox_id, "true")
    await node.until(lambda: count_in(sandbox_id) != before)


async def test_what_a_dead_daemon_had_stopped_for_a_moment_runs_again(both: Both) -> None:
    daemon, node = both
    sandbox_id = (await node.place()).sandbox_id
    await daemon.kill()
    (cgroup_of(sandbox_id) / "cgroup.freeze").write_text("1")
    await daemon.start()
    assert (await node.exec(sandbox_id, "echo", "alive")).stdout == b"alive\n"


async def test_a_sandbox_for_one_command_does_not_outlive_the_daemon_that_was_to_answer(
    both: Both,
) -> None:
    daemon, node = both
    command = ExecCommand(argv=("sleep", "1000"), timeout_s=2000)
    request = CreateSandbox(base=BASE, command=command, delete_after=True)
    placing = asyncio.create_task(node.place(request))
    await node.until(lambda: any(isinstance(event, SandboxRunning) for event in node.events))
    (running,) = [event for event in node.events if isinstance(event, SandboxRunning)]
    await daemon.kill()
    await daemon.start()
    ended = await node.event_of(running.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.DELETED
    placing.cancel()
    await asyncio.wait({placing})
