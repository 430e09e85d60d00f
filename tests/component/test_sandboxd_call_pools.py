"""What waits for function calls on a node: as many as their rate asks for, and none without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_common.clock import SystemClock
from dsec_common.wire.sandbox import CreateSandbox, ExecCommand, Limits, SandboxCreated
from dsec_common.wire.task import TaskFiles
from sandboxd_node import BASE, NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


class LeapingClock(SystemClock):
    """The machine's clock, which a test may have leap ahead."""

    def __init__(self) -> None:
        self.leapt_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.leapt_s


async def call(node: NodeForTests) -> SandboxCreated:
    """Ask for a sandbox as the scheduler does for a function call."""
    return await node.place(
        CreateSandbox(
            base=BASE,
            limits=Limits(memory_bytes=32 << 20),
            command=ExecCommand(argv=("echo", "called")),
            task=TaskFiles(),
            delete_after=True,
        )
    )


async def test_calls_fill_a_pool_that_is_given_up_when_they_stop(
    tmp_path: Path, layers: Path
) -> None:
    clock = LeapingClock()
    async with node_for_tests(tmp_path, layers, parts={"clock": clock}) as node:

        def waiting() -> int:
            return sum(node.heartbeats[-1].warm.values()) if node.heartbeats else 0

        assert not (await call(node)).warm
        await node.until(lambda: waiting() >= 1, timeout_s=20.0)
        called = await call(node)
        assert called.warm
        assert called.result is not None
        assert called.result.stdout == b"called\n"
        await node.until(lambda: waiting() >= 1, timeout_s=20.0)  # another in its place
        clock.leapt_s += 3600.0
        await node.until(lambda: not waiting(), timeout_s=20.0)
        assert not (await call(node)).warm
