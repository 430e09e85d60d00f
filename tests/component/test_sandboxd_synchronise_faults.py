"""Whatever step of a synchronisation the kernel refuses, the node knows how far it has come."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from consistency_world import now_ms, until
from dsec_common import subjects
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.consistency import InstanceState, InstanceSynchronised, SynchroniseInstance
from dsec_common.wire.sandbox import CreateSandbox, InspectSandbox, SandboxInfo, SandboxState
from dsec_sandboxd.kernel.interface import CommandResult
from dsec_sandboxd.kernel.recording import RecordingKernel
from refusals import refused
from sandboxd_node import BASE, NODE, NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

COMMAND = "/opt/synchronise"
TRADER = CreateSandbox(base=BASE, agent="trader", agent_version="1")


@pytest.fixture
def kernel() -> RecordingKernel:
    return RecordingKernel()


@pytest.fixture
async def node(
    tmp_path: Path, layers: Path, kernel: RecordingKernel
) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path, layers, kernel=kernel) as running:
        yield running


class Scheduler:
    """Asks a node to synchronise an instance, as a scheduler does."""

    def __init__(self, node: NodeForTests, sandbox_id: str, kernel: RecordingKernel) -> None:
        self._node = node
        self._sandbox_id = sandbox_id
        self._kernel = kernel
        self.changed_ms = now_ms()

    @property
    def required_ms(self) -> int:
        """The version that the instance is to have."""
        return self.changed_ms + CLOCK_TOLERANCE_MS

    async def ask(self, **changes: Any) -> InstanceState:
        """Ask once."""
        fields: dict[str, Any] = {
            "project": "default",
            "local": self._sandbox_id.partition(".")[2],
            "agent": "trader",
            "versions": {"prices": self.changed_ms},
            "command": (COMMAND,),
        }
        answer = await self._node.scheduler.request(
            subjects.node_request(NODE, "synchronise"),
            SynchroniseInstance(**fields | changes),
            InstanceSynchronised,
            timeout_s=20.0,
        )
        return answer.state

    async def info(self) -> SandboxInfo:
        """Return what the node says of the instance."""
        return await self._node.ask(self._sandbox_id, "inspect", InspectSandbox(), SandboxInfo)

    def runs(self) -> list[dict[str, Any]]:
        """Return what the command read each time it ran."""
        commands = [call.arguments["command"] for call in self._kernel.calls if call.name == "exec"]
        return [json.loads(one.stdin) for one in commands if one.argv[0] == COMMAND]

    async def is_awake(self) -> bool:
        """Return whether the instance takes requests."""
        try:
            await self._node.exec(self._sandbox_id, "true")
        except DsecError as error:
            if error.code not in {ErrorCode.UNAVAILABLE, ErrorCode.DENIED}:
                raise
            return False
        return True


@pytest.fixture
async def scheduler(node: NodeForTests, kernel: RecordingKernel) -> Scheduler:
    return Scheduler(node, (await node.place(TRADER)).sandbox_id, kernel)


async def test_one_that_cannot_be_stopped_runs_on_and_takes_requests(
    scheduler: Scheduler, kernel: RecordingKernel
) -> None:
    kernel.fail("pause", DsecError(ErrorCode.TIMEOUT, "it hangs in the kernel"))
    assert (await refused(scheduler.ask())).code is ErrorCode.TIMEOUT
    info = await scheduler.info()
    assert (info.state, info.behind) == (SandboxState.RUNNING, "")
    assert await scheduler.is_awake()
    assert (await scheduler.ask()).version_ms == scheduler.required_ms
    assert len(scheduler.runs()) == 1


async def test_one_that_cannot_be_synchronised_now_waits_for_that_and_fails_at_nothing(
    scheduler: Scheduler, kernel: RecordingKernel
) -> None:
    kernel.fail("exec", unavailable("a copy of it is being made"))
    assert (await refused(scheduler.ask())).code is ErrorCode.UNAVAILABLE
    info = await scheduler.info()
    assert (info.state, bool(info.behind), info.synchronise_error) == (
        SandboxState.PAUSED,
        True,
        "",
    )
    assert not await scheduler.is_awake()
    state = await scheduler.ask()
    assert (state.version_ms, state.behind) == (scheduler.required_ms, "")
    assert await scheduler.is_awake()


async def test_one_that_cannot_go_on_is_not_synchronised_twice(
    scheduler: Scheduler, kernel: RecordingKernel
) -> None:
    kernel.fail("resume", DsecError(ErrorCode.INTERNAL, "told to"))
    assert (await refused(scheduler.ask())).message == "told to"
    assert not await scheduler.is_awake()
    state = await scheduler.ask()
    assert (state.version_ms, state.behind) == (scheduler.required_ms, "")
    assert await scheduler.is_awake()
    assert len(scheduler.runs()) == 1


async def test_a_command_that_is_not_there_is_the_agents_own_failure(
    scheduler: Scheduler, kernel: RecordingKernel
) -> None:
    kernel.script(COMMAND, DsecError(ErrorCode.NOT_FOUND, "no such program"))
    state = await scheduler.ask()
    assert state.error == f"the command {COMMAND} cannot be run: no such program"
    assert state.version_ms < scheduler.required_ms
    assert await scheduler.ask() == state
    assert len(scheduler.runs()) == 1
    done = CommandResult(exit_code=0, signal=None, stdout=b"", stderr=b"")
    kernel.script(COMMAND, done)
    assert (await scheduler.ask(again=True)).error == ""
    assert await scheduler.is_awake()


async def test_what_was_asked_for_before_is_not_forgotten_by_who_knows_less(
    scheduler: Scheduler, kernel: RecordingKernel
) -> None:
    failed = CommandResult(exit_code=1, signal=None, stdout=b"", stderr=b"no")
    kernel.script(COMMAND, failed)
    assert (await scheduler.ask()).error
    kernel.script(COMMAND, CommandResult(exit_code=0, signal=None, stdout=b"", stderr=b""))
    # Of a scheduler that is behind itself: nothing is newer than what it failed at.
    assert (await scheduler.ask(versions={"prices": scheduler.changed_ms - 1})).error
    state = await scheduler.ask(versions={"prices": scheduler.changed_ms - 1}, again=True)
    assert state.version_ms == scheduler.required_ms
    assert scheduler.runs()[-1]["dependencies"] == {"prices": scheduler.changed_ms}


async def test_who_asks_at_the_same_time_is_answered_with_one_run(
    scheduler: Scheduler, kernel: RecordingKernel
) -> None:
    gate = kernel.hold("exec")
    asking = [asyncio.create_task(scheduler.ask()) for _ in range(8)]
    await until(lambda: len(scheduler.runs()) == 1)
    gate.set()
    states = await asyncio.gather(*asking)
    assert {state.version_ms for state in states} == {scheduler.required_ms}
    assert len(scheduler.runs()) == 1


async def test_only_an_instance_of_the_agent_is_synchronised(
    node: NodeForTests, scheduler: Scheduler
) -> None:
    plain = (await node.place()).sandbox_id.partition(".")[2]
    for changes, code in (
        ({"local": plain}, ErrorCode.INVALID),
        ({"agent": "other"}, ErrorCode.INVALID),
        ({"project": "other"}, ErrorCode.NOT_FOUND),
        ({"local": "nowhere"}, ErrorCode.NOT_FOUND),
        ({"local": "a.b"}, ErrorCode.INVALID),
    ):
        assert (await refused(scheduler.ask(**changes))).code is code
    assert scheduler.runs() == []
