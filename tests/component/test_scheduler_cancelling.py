"""Giving up requests of the durable queue: whoever has them, and whoever takes them later."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Gpu, Resources
from dsec_common.wire.sandbox import MIB, CreateSandbox, SandboxRefused, SandboxRunning
from dsec_common.wire.waiting import (
    CancelWaiting,
    ExplainWaiting,
    WaitingCancelled,
    WaitingExplained,
)

ONE = Resources(cpus=1, memory_bytes=64 * MIB, sandboxes=1)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        yield plane


class User:
    """A project's user with requests in the queue."""

    def __init__(self, bus: Bus, project: str) -> None:
        self.bus = bus
        self.project = project
        self.outcomes: dict[str, str] = {}

    @classmethod
    async def of(cls, plane: ControlPlane, project: str = "default") -> User:
        user = cls(await plane.project(project), project)
        # The decoder takes a union where the signature says a type.
        kinds = SandboxRunning | SandboxRefused
        await user.bus.subscribe(subjects.project_events(project), kinds, user._hear)  # type: ignore[arg-type]
        await user.bus.flush()
        return user

    async def _hear(self, event: Request[SandboxRunning | SandboxRefused]) -> None:
        told = event.message
        what = told.code if isinstance(told, SandboxRefused) else "created"
        assert told.request_id not in self.outcomes, "told twice"
        self.outcomes[told.request_id] = what

    async def queue(self, asked: CreateSandbox) -> str:
        await self.bus.js_publish(subjects.queue_sandbox_create(self.project), asked)
        return asked.message_id

    async def cancel(self, request_id: str) -> None:
        await self.bus.request(
            subjects.sandbox_waiting(self.project, "cancel"),
            CancelWaiting(request_id=request_id),
            WaitingCancelled,
        )

    async def cannot_cancel(self, request_id: str) -> DsecError:
        with pytest.raises(DsecError) as caught:
            await self.cancel(request_id)
        return caught.value

    async def outcome(self, request_id: str) -> str:
        await until(lambda: request_id in self.outcomes)
        return self.outcomes[request_id]


async def test_a_request_that_nobody_has_taken_is_given_up_by_whoever_takes_it(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1")
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    node.before_answer = hang
    busy = await plane.scheduler(queue_in_flight=1, queue_waiting_max=1)
    user = await User.of(plane)
    at_work = [await user.queue(request()) for _ in range(2)]
    await until(lambda: len(node.placed) == 2)
    left = await user.queue(request())
    await user.cancel(left)
    await user.cancel(left)
    assert not user.outcomes
    # Its death leaves all three to the next one.
    await busy.bus.close()
    await busy.stop()
    node.before_answer = None
    never.set()
    await plane.scheduler()
    assert await user.outcome(left) == "conflict"
    assert [await user.outcome(it) for it in at_work] == ["created", "created"]
    assert len(node.sandboxes) == 2
    await user.cancel(left)


async def test_a_request_that_waits_for_room_is_given_up(plane: ControlPlane) -> None:
    node = await plane.node("node-1", ONE)
    await plane.scheduler()
    user = await User.of(plane)
    assert await user.outcome(await user.queue(request())) == "created"
    waits = await user.queue(request())
    await until(lambda: len(node.placed) > 1)
    while True:  # between two tries, that is; during one it is begun
        try:
            await user.cancel(waits)
            break
        except DsecError as error:
            assert error.code is ErrorCode.CONFLICT  # noqa: PT017  any other is a failure
    assert await user.outcome(waits) == "conflict"
    node.sandboxes.clear()
    assert await user.outcome(await user.queue(request())) == "created"
    assert len(node.sandboxes) == 1


async def test_the_command_line_gives_up_what_another_of_its_calls_has_queued(
    plane: ControlPlane,
) -> None:
    await plane.node("node-1", ONE)
    await plane.scheduler()
    user = await User.of(plane)
    assert await user.outcome(await user.queue(request())) == "created"
    options = ("--memory", "64m", "--request-id", "mine", "--timeout", "60")
    queued = await dsec(plane, "sandbox", "create", "--queue", "debian@12", *options)
    told = b""
    while not told and queued.returncode is None:
        # It may not have been queued yet, or a node is just being asked for it.
        cancel = await dsec(plane, "sandbox", "cancel", "mine")
        told, _ = await cancel.communicate()
    assert told == b"mine waits no more\n", await queued.communicate()
    _, why = await queued.communicate()
    assert queued.returncode == 1
    assert b"request mine was cancelled while it waited" in why


async def dsec(plane: ControlPlane, *arguments: str) -> asyncio.subprocess.Process:
    """Return a call of the command line."""
    environment = {
        **os.environ,
        "DSEC_NATS_SERVERS": plane.nats.server.url,
        "DSEC_NATS_CREDENTIALS": str(plane.nats.auth.project("default")),
    }
    command = (sys.executable, "-m", "dsec.cli.main", *arguments)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)


async def test_a_request_that_waits_for_units_is_given_up_for_good(plane: ControlPlane) -> None:
    await plane.broker()
    gpu = Gpu(uuid="GPU-0", model="NVIDIA A100", memory_bytes=80 << 30)
    node = await plane.node("gpu-1", gpus=(gpu,))
    await plane.scheduler()
    user = await User.of(plane)
    whole = GpuDemand(min_cu=100.0, max_cu=100.0)
    assert await user.outcome(await user.queue(request(gpu=whole))) == "created"
    asked = request(gpu=whole)
    waits = await user.queue(asked)
    async with asyncio.timeout(10):
        while True:
            try:
                await user.bus.request(
                    subjects.sandbox_waiting("default", "explain"),
                    ExplainWaiting(request_id=waits),
                    WaitingExplained,
                )
                break
            except DsecError:
                continue
    await user.cancel(waits)
    assert await user.outcome(waits) == "conflict"
    # As if it had been delivered again after a crash.
    del user.outcomes[waits]
    await user.queue(asked)
    assert await user.outcome(waits) == "conflict"
    assert len(node.placed) == 1


async def test_who_gives_up_what_has_been_begun_is_told_its_sandbox(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    answer = asyncio.Event()

    async def hold() -> None:
        await answer.wait()

    node.before_answer = hold
    await plane.scheduler()
    user = await User.of(plane)
    begun = await user.queue(request())
    await node.place_arrived.wait()
    sandbox_id = f"node-1.{node.placed[0].local}"
    for _ in range(2):  # while it is made, and when it has been
        error = await user.cannot_cancel(begun)
        assert error.code is ErrorCode.CONFLICT
        assert error.details["sandbox_id"] == sandbox_id
        answer.set()
        assert await user.outcome(begun) == "created"


async def test_a_request_whose_key_led_to_an_earlier_sandbox_cannot_be_given_up(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await User.of(plane)
    first, same = [await user.queue(request(idempotency_key="k")) for _ in range(2)]
    assert await user.outcome(first) == await user.outcome(same) == "created"
    for one in (first, same):
        error = await user.cannot_cancel(one)
        assert error.details["sandbox_id"] == f"node-1.{node.placed[0].local}"


async def test_what_a_project_never_queued_cannot_be_given_up(plane: ControlPlane) -> None:
    await plane.scheduler(warm_up_s=0.0)
    user, other = await User.of(plane), await User.of(plane, "other")
    waits = await user.queue(request())
    error = await other.cannot_cancel(waits)
    assert error.code is ErrorCode.NOT_FOUND
    await plane.node("node-1")
    assert await user.outcome(waits) == "created"
    # Nothing is kept of a cancellation of what was not there.
    assert await other.outcome(await other.queue(request(message_id=waits))) == "created"
