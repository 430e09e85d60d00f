"""CPU classes, core scheduling and ends for want of memory, as a node's users ask and are told."""

from __future__ import annotations

import os
import time

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.exec import ExecEvents, ExecInfo, ExecState, ReadExec, StartExec
from dsec_common.wire.sandbox import (
    CpuClass,
    CreateSandbox,
    EndCause,
    ExecCommand,
    ExecResult,
    InspectSandbox,
    Limits,
    SandboxEnded,
    SandboxInfo,
)
from sandboxd_node import BASE, NodeForTests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

# One process alone: of two, the kernel may choose either when both want more.
BOMB = "tail /dev/zero"


async def test_a_sandbox_is_of_the_class_asked_for_and_says_so(node: NodeForTests) -> None:
    for asked, policy in ((CpuClass.BEST_EFFORT, "5"), (CpuClass.LATENCY_SENSITIVE, "0")):
        created = await node.place(CreateSandbox(base=BASE, limits=Limits(cpu_class=asked)))
        said = await node.exec(created.sandbox_id, "cat", "/proc/self/stat")
        assert said.stdout.rsplit(b")", 1)[1].split()[38].decode() == policy
        info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
        assert info.limits.cpu_class is asked


async def test_core_scheduling_that_the_host_lacks_is_unsupported_and_in_the_heartbeat(
    node: NodeForTests,
) -> None:
    assert node.service is not None
    missing = node.service.heartbeat().missing
    asking = node.place(CreateSandbox(base=BASE, limits=Limits(core_scheduling=True)))
    if "core_scheduling" not in missing:
        assert (await asking).limits.core_scheduling
        return
    with pytest.raises(DsecError) as caught:
        await asking
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert node.service.heartbeat().allocated.sandboxes == 0


async def test_with_cpu_quota_a_sandbox_never_has_more_than_its_cpus(node: NodeForTests) -> None:
    began = time.monotonic()
    created = await node.place(CreateSandbox(base=BASE, limits=Limits(cpus=0.1, cpu_quota=True)))
    assert created.limits.cpu_quota
    command = ExecCommand(argv=("sh", "-c", "while :; do :; done"), timeout_s=1.5)
    assert (await node.ask(created.sandbox_id, "exec", command, ExecResult)).timed_out
    info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
    elapsed_s = time.monotonic() - began
    # Nothing else wants the processors for most of that time; a period of 0.1 s of it gives 0.01 s.
    assert info.cpu_seconds_used is not None
    assert info.cpu_seconds_used < 0.1 * elapsed_s + 0.05


async def test_a_command_that_ran_out_of_memory_names_the_process(node: NodeForTests) -> None:
    limits = Limits(memory_bytes=64 << 20)
    created = await node.place(CreateSandbox(base=BASE, limits=limits))
    command = ExecCommand(argv=("sh", "-c", BOMB))
    result = await node.ask(created.sandbox_id, "exec", command, ExecResult)
    assert (result.oom, result.oom_process) == (True, "tail")
    assert result.oom_pid >= 0


async def test_with_oom_group_the_sandbox_ends_and_names_the_process(node: NodeForTests) -> None:
    limits = Limits(memory_bytes=64 << 20, oom_group=True)
    created = await node.place(CreateSandbox(base=BASE, limits=limits))
    with pytest.raises(DsecError) as caught:
        await node.exec(created.sandbox_id, "sh", "-c", BOMB)
    assert caught.value.code is ErrorCode.OOM
    assert caught.value.details["end_cause"] == "oom"
    assert "tail" in caught.value.message
    info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
    assert info.end_cause is EndCause.OOM
    ended = await node.event_of(created.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.OOM


async def test_with_oom_group_a_started_exec_that_ends_the_sandbox_is_told_the_cause(
    node: NodeForTests,
) -> None:
    limits = Limits(memory_bytes=64 << 20, oom_group=True)
    created = await node.place(CreateSandbox(base=BASE, limits=limits))
    start = StartExec(argv=("sh", "-c", BOMB))
    one = await node.ask(created.sandbox_id, "start_exec", start, ExecInfo)
    asked = ReadExec(exec_id=one.exec_id, after=0, wait_s=20.0)
    events = await node.ask(created.sandbox_id, "read_exec", asked, ExecEvents, timeout_s=30.0)
    assert events.ended is not None
    assert (events.ended.state, events.ended.error_code) == (ExecState.FAILED, "oom")
    assert "tail" in events.ended.error_message


async def test_with_oom_group_a_first_command_that_ends_its_sandbox_is_told_the_cause(
    node: NodeForTests,
) -> None:
    limits = Limits(memory_bytes=64 << 20, oom_group=True)
    command = ExecCommand(argv=("sh", "-c", BOMB))
    created = await node.place(
        CreateSandbox(base=BASE, limits=limits, command=command, idempotency_key="bomb")
    )
    assert created.error is not None
    assert created.error.code is ErrorCode.OOM
