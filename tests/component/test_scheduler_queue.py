"""The durable door: a request in the stream becomes one sandbox or one refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    ExecCommand,
    Limits,
    SandboxRefused,
    SandboxRunning,
)

Outcome = SandboxRunning | SandboxRefused


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        yield plane


class Outcomes:
    """What a project hears of its queued requests."""

    def __init__(self) -> None:
        self.heard: list[Outcome] = []

    async def listen(self, bus: Bus, project: str = "default") -> None:
        # The decoder takes a union where the signature says a type.
        await bus.subscribe(subjects.project_events(project), Outcome, self._take)  # type: ignore[arg-type]
        await bus.flush()

    async def _take(self, event: Request[SandboxRunning | SandboxRefused]) -> None:
        self.heard.append(event.message)

    async def wait(self, count: int) -> list[Outcome]:
        await until(lambda: len(self.heard) >= count, timeout_s=15)
        return self.heard


async def put(bus: Bus, asked: CreateSandbox, project: str = "default") -> None:
    await bus.js_publish(subjects.queue_sandbox_create(project), asked)


async def user_of(plane: ControlPlane, project: str = "default") -> tuple[Bus, Outcomes]:
    bus = await plane.project(project)
    outcomes = Outcomes()
    await outcomes.listen(bus, project)
    return bus, outcomes


async def test_a_queued_request_becomes_a_sandbox_and_an_event(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    asked = request()
    await put(user, asked)
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRunning)
    assert event.request_id == asked.message_id
    assert event.sandbox_id == f"node-1.{node.placed[0].local}"
    assert event.created.layers == ("sha256:0",)


async def test_a_project_hears_only_of_its_own_requests(plane: ControlPlane) -> None:
    await plane.node("node-1")
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    other, others = await user_of(plane, "other")
    await put(user, request())
    await put(other, request(), "other")
    await outcomes.wait(1)
    await others.wait(1)
    assert len(outcomes.heard) == len(others.heard) == 1


async def test_a_request_queued_before_there_is_a_node_waits_for_one(plane: ControlPlane) -> None:
    await plane.scheduler(warm_up_s=0.0)
    user, outcomes = await user_of(plane)
    await put(user, request())
    await plane.node("node-1")
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRunning)


async def test_requests_wait_until_there_is_room(plane: ControlPlane) -> None:
    one = Resources(cpus=1, memory_bytes=64 * MIB, sandboxes=1)
    node = await plane.node("node-1", one)
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    for _ in range(3):
        await put(user, request())
    for count in range(1, 4):
        await outcomes.wait(count)
        assert len(node.sandboxes) == 1
        node.sandboxes.clear()
    assert all(isinstance(event, SandboxRunning) for event in outcomes.heard)


async def test_what_can_never_be_is_refused_at_once(plane: ControlPlane) -> None:
    node = await plane.node("node-1", Resources(cpus=1, memory_bytes=64 * MIB, sandboxes=1))
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    await put(user, request(limits=Limits(memory_bytes=0)))
    await put(user, request(limits=Limits(memory_bytes=MIB << 20)))
    await put(user, request(command=ExecCommand(argv=("true",))))
    codes = [event.code for event in await outcomes.wait(3) if isinstance(event, SandboxRefused)]
    assert sorted(codes) == ["exhausted", "invalid", "invalid"]
    assert not node.placed


async def test_a_node_s_final_refusal_is_an_event(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    node.refusal = DsecError(ErrorCode.LAYER_ERROR, "the image is damaged")
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    asked = request()
    await put(user, asked)
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRefused)
    assert (event.request_id, event.code) == (asked.message_id, "layer_error")
    assert event.reason == "the image is damaged"


async def test_patience_ends(plane: ControlPlane) -> None:
    await plane.scheduler(warm_up_s=0.0, queue_patience_s=0.3)
    user, outcomes = await user_of(plane)
    began = time.monotonic()
    await put(user, request(timeout_s=0.1))
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRefused)
    assert event.code == "unavailable"
    assert time.monotonic() - began < 15


async def test_a_message_that_cannot_be_read_does_not_stop_the_queue(plane: ControlPlane) -> None:
    await plane.node("node-1")
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    subject = subjects.queue_sandbox_create("default")
    await user._inbox.request(subject, b"\xc1 no message at all", None, 5.0)
    await user._inbox.request(
        subject, b'{"type": "CreateSandbox"}', {"content-type": "application/json"}, 5.0
    )
    await put(user, request())
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRunning)


async def test_json_without_an_id_of_its_own_makes_one_sandbox(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    await user._inbox.request(
        subjects.queue_sandbox_create("default"),
        b'{"type": "CreateSandbox", "base": "debian@12"}',
        {"content-type": "application/json"},
        5.0,
    )
    await outcomes.wait(1)
    assert len(node.placed) == 1


async def test_a_scheduler_that_dies_at_work_leaves_the_request_to_the_next(
    plane: ControlPlane,
) -> None:
    """The node had made the sandbox and nobody had noted it: it is found, not made again."""
    node = await plane.node("node-1")
    first = await plane.scheduler(attempt_timeout_s=0.5, drain_timeout_s=0.0)
    user, outcomes = await user_of(plane)
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    node.before_answer = hang
    await put(user, request())
    await node.place_arrived.wait()
    # A close cancels the handler where it stands; the message is delivered again.
    await first.bus.close()
    await first.stop()
    assert not outcomes.heard
    await plane.scheduler()
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRunning)
    assert event.sandbox_id == f"node-1.{node.placed[0].local}"
    assert len(node.sandboxes) == 1
    never.set()


async def test_two_schedulers_share_the_queue(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    for _ in range(2):
        await plane.scheduler()
    user, outcomes = await user_of(plane)
    await asyncio.gather(*(put(user, request()) for _ in range(100)))
    events = await outcomes.wait(100)
    assert len({event.request_id for event in events}) == 100
    assert len(node.sandboxes) == 100


async def test_the_same_caller_s_key_through_both_doors_is_one_sandbox(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user, outcomes = await user_of(plane)
    await put(user, request(idempotency_key="k"))
    (event,) = await outcomes.wait(1)
    assert isinstance(event, SandboxRunning)
    reply = await user.request(
        subjects.sandbox_create("default"),
        request(idempotency_key="k"),
        type(event.created),
        timeout_s=10,
    )
    assert reply.sandbox_id == event.sandbox_id
    assert len(node.sandboxes) == 1
