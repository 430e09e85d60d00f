"""Schedulers on a real NATS server, with peers that speak a node's side of the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from control_plane import ROOMY, ControlPlane, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import (
    MIB,
    CreateSandbox,
    Limits,
    ListSandboxes,
    SandboxCreated,
    SandboxList,
)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        yield plane


async def create(bus: Bus, asked: CreateSandbox, project: str = "default") -> SandboxCreated:
    return await bus.request(
        subjects.sandbox_create(project), asked, SandboxCreated, timeout_s=asked.timeout_s + 5
    )


async def refused(bus: Bus, asked: CreateSandbox) -> DsecError:
    with pytest.raises(DsecError) as error:
        await create(bus, asked)
    return error.value


def full(message: str = "full") -> DsecError:
    return DsecError(ErrorCode.EXHAUSTED, message)


async def test_the_node_answers_the_caller(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    created = await create(user, request())
    assert created.node == "node-1"
    assert [message.project for message in node.placed] == ["default"]


async def test_a_refusal_leads_to_another_node(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(3)]
    await plane.scheduler()
    for node in nodes[:2]:
        node.refusal = full()
    user = await plane.project()
    for _ in range(5):
        assert (await create(user, request())).node == "node-2"


async def test_no_more_nodes_are_asked_than_configured(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(4)]
    await plane.scheduler(attempts_max=2)
    for node in nodes:
        node.refusal = full("no room left on this one")
    error = await refused(await plane.project(), request())
    assert error.code is ErrorCode.EXHAUSTED
    assert "2 nodes refused the sandbox; the last said: no room left" in error.message
    assert sum(len(node.placed) for node in nodes) == 2


async def test_a_request_that_is_wrong_anywhere_is_not_tried_elsewhere(
    plane: ControlPlane,
) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(3)]
    await plane.scheduler()
    for node in nodes:
        node.refusal = DsecError(ErrorCode.LAYER_ERROR, "the image is damaged")
    error = await refused(await plane.project(), request())
    assert (error.code, error.message) == (ErrorCode.LAYER_ERROR, "the image is damaged")
    assert sum(len(node.placed) for node in nodes) == 1


async def test_a_layer_missing_in_one_store_is_looked_for_in_another(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(4)]
    for node in nodes[:3]:
        node.store_id = "shared"
        node.refusal = DsecError(
            ErrorCode.NOT_FOUND, "no layer debian@12", details={"store_id": "shared"}
        )
    await plane.scheduler()
    user = await plane.project()
    assert (await create(user, request())).node == "node-3"
    # The three share a store: at most one of them was asked.
    assert sum(len(node.placed) for node in nodes[:3]) <= 1


async def test_a_layer_that_no_store_has_is_not_found(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    node.refusal = DsecError(ErrorCode.NOT_FOUND, "no layer debian@12 in this project")
    await plane.scheduler()
    error = await refused(await plane.project(), request())
    assert (error.code, error.message) == (
        ErrorCode.NOT_FOUND,
        "no layer debian@12 in this project",
    )


async def test_a_layer_whose_store_has_no_room_is_missed_in_words_that_say_what_to_do(
    plane: ControlPlane,
) -> None:
    lacking = await plane.node("node-1")
    lacking.refusal = DsecError(ErrorCode.NOT_FOUND, "no layer built@1 in this project")
    builder = await plane.node("node-2")
    builder.refusal = DsecError(ErrorCode.EXHAUSTED, "full", retry_after_s=0.1)
    await plane.scheduler()
    error = await refused(await plane.project(), request())
    while error.code is ErrorCode.EXHAUSTED:  # the one without the layer is not known yet
        error = await refused(await plane.project(), request())
    assert (error.code, error.retryable) == (ErrorCode.NOT_FOUND, True)
    assert "node-2 could not take it" in error.message
    assert "layers_backend" in error.message


async def test_without_a_node_the_error_says_what_to_start(plane: ControlPlane) -> None:
    await plane.scheduler(warm_up_s=0.0)
    error = await refused(await plane.project(), request())
    assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert "start dsec-sandboxd" in error.message


async def test_more_than_any_node_has_is_refused_for_good(plane: ControlPlane) -> None:
    small = Resources(cpus=4, memory_bytes=1024 * MIB, sandboxes=10)
    node = await plane.node("node-1", small)
    await plane.scheduler()
    error = await refused(await plane.project(), request(limits=Limits(memory_bytes=2048 * MIB)))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, False)
    assert "the largest, node-1" in error.message
    assert not node.placed


async def test_a_full_cluster_is_refused_with_a_time_to_wait(plane: ControlPlane) -> None:
    node = await plane.node("node-1", Resources(cpus=4, memory_bytes=100 * MIB, sandboxes=10))
    await plane.scheduler()
    user = await plane.project()
    await create(user, request())
    node.refusal = full()
    error = await refused(user, request())
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    assert error.retry_after_s > 0


async def test_room_freed_since_the_last_heartbeat_is_found_at_once(plane: ControlPlane) -> None:
    one = Resources(cpus=1, memory_bytes=64 * MIB, sandboxes=1)
    node = await plane.node("node-1", one)
    views = (await plane.scheduler())._core.views
    user = await plane.project()
    await node.stop_beating()
    (view,) = views
    for _ in range(20):
        await create(user, request())
        await until(lambda: not view.pending.sandboxes)  # its caller is answered before it is
        node.sandboxes.clear()


async def test_two_at_once_are_not_both_sent_to_the_last_place(plane: ControlPlane) -> None:
    one = Resources(cpus=1, memory_bytes=64 * MIB, sandboxes=1)
    nodes = [await plane.node(f"node-{number}", one) for number in range(4)]
    await plane.scheduler()
    user = await plane.project()
    created = await asyncio.gather(*(create(user, request()) for _ in range(4)))
    assert sorted(reply.node for reply in created) == [node.name for node in nodes]


async def test_a_draining_node_gets_nothing_new(plane: ControlPlane) -> None:
    draining = await plane.node("node-1", beating=False)
    draining.draining = True
    await plane.scheduler()
    await draining.beat()
    user = await plane.project()
    error = await refused(user, request())
    assert error.code is ErrorCode.UNAVAILABLE
    assert "draining" in error.message


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("limits.memory_bytes", {"limits": Limits(memory_bytes=0)}),
        ("limits.memory_bytes", {"limits": Limits(memory_bytes=-1)}),
        ("limits.cpus", {"limits": Limits(cpus=0.0)}),
        ("limits.cpus", {"limits": Limits(cpus=float("nan"))}),
        ("limits.cpus", {"limits": Limits(cpus=float("inf"))}),
        ("limits.pids", {"limits": Limits(pids=0)}),
        ("limits.disk_bytes", {"limits": Limits(disk_bytes=-5)}),
        ("limits.inodes", {"limits": Limits(inodes=0)}),
        ("limits.cu", {"limits": Limits(cu=-1.0)}),
        ("base", {"base": ""}),
        ("ttl_s", {"ttl_s": -1.0}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("timeout_s", {"timeout_s": float("nan")}),
        ("idempotency_key", {"idempotency_key": "x" * 300}),
    ],
)
async def test_a_request_that_makes_no_sense_never_reaches_a_node(
    plane: ControlPlane, field: str, changes: dict[str, object]
) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    asked = request(**changes)
    with pytest.raises(DsecError) as error:
        await (await plane.project()).request(
            subjects.sandbox_create("default"), asked, SandboxCreated
        )
    assert error.value.code is ErrorCode.INVALID
    assert field in error.value.message
    assert not node.placed


async def test_a_node_that_dies_between_grant_and_create_is_replaced(plane: ControlPlane) -> None:
    doomed = await plane.node("node-1")
    await plane.scheduler(attempt_timeout_s=30.0)
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    doomed.before_answer = hang
    user = await plane.project()
    answer = asyncio.create_task(create(user, request(timeout_s=20)))
    await doomed.place_arrived.wait()
    await plane.node("node-2")
    await doomed.die()
    assert (await answer).node == "node-2"


async def test_a_node_that_hangs_is_replaced_when_its_heartbeats_stop(plane: ControlPlane) -> None:
    hanging = await plane.node("node-1")
    await plane.scheduler(attempt_timeout_s=30.0)
    await hanging.freeze()
    user = await plane.project()
    began = time.monotonic()
    answer = asyncio.create_task(create(user, request(timeout_s=60)))
    await hanging.place_arrived.wait()
    await plane.node("node-2")
    assert (await answer).node == "node-2"
    # Well before the attempt's own timeout.
    assert time.monotonic() - began < 20


async def test_a_node_whose_answer_is_lost_keeps_its_sandbox(plane: ControlPlane) -> None:
    """The caller heard of it; making a second one would leave the first to nobody."""
    node = await plane.node("node-1")
    other = await plane.node("node-2", beating=False)
    await plane.scheduler(attempt_timeout_s=0.2, reply_grace_s=0.1)
    node.answers_scheduler = False
    user = await plane.project()
    await other.beat()
    created = [await create(user, request()) for _ in range(4)]
    await until(lambda: len(node.placed) + len(other.placed) == 4)
    made = {f"node-1.{local}" for local in node.sandboxes}
    made |= {f"node-2.{local}" for local in other.sandboxes}
    assert {reply.sandbox_id for reply in created} == made


async def test_time_runs_out_with_the_request(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(2)]
    await plane.scheduler(reply_grace_s=0.05, node_timeout_s=60.0)
    for node in nodes:
        await node.freeze()
    began = time.monotonic()
    error = await refused(await plane.project(), request(timeout_s=2.0))
    assert error.code in {ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE}
    assert time.monotonic() - began < 9  # well before an attempt's own timeout
    placed = [message for node in nodes for message in node.placed]
    assert placed
    assert all(message.valid_until <= time.time() for message in placed)


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_node_whose_clock_is_an_hour_off_makes_sandboxes_and_in_time(
    plane: ControlPlane, ahead_s: float
) -> None:
    node = await plane.node("node-1")
    node.ahead_s = ahead_s  # before any scheduler has heard of it
    await plane.scheduler()
    await create(await plane.project(), request(timeout_s=5.0))
    (placed,) = node.placed
    assert placed.valid_until <= node.now() + 5.0


async def test_a_clock_that_is_set_anew_is_followed(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    views = (await plane.scheduler())._core.views
    user = await plane.project()
    for node.ahead_s in (0.0, 3600.0, -3600.0):
        await until(lambda: abs(views.lag_s("node-1") + node.ahead_s) < 5.0)
        await create(user, request(timeout_s=5.0))
        assert node.placed[-1].valid_until <= node.now() + 5.0


async def test_two_schedulers_share_the_requests(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(2)]
    for _ in range(2):
        await plane.scheduler()
    user = await plane.project()
    created = await asyncio.gather(*(create(user, request()) for _ in range(100)))
    assert len({reply.sandbox_id for reply in created}) == 100
    assert sum(len(node.placed) for node in nodes) == 100


async def test_a_scheduler_that_stops_loses_no_request(plane: ControlPlane) -> None:
    await plane.node("node-1")
    first, _ = await plane.scheduler(), await plane.scheduler()
    user = await plane.project()
    answers = [asyncio.create_task(create(user, request())) for _ in range(50)]
    await asyncio.sleep(0)
    assert await first.stop() == 0
    answers += [asyncio.create_task(create(user, request())) for _ in range(50)]
    assert len({reply.sandbox_id for reply in await asyncio.gather(*answers)}) == 100


async def test_json_is_answered_as_json_by_the_node(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    reply = await user._inbox.request(
        subjects.sandbox_create("default"),
        b'{"type": "CreateSandbox", "base": "debian@12"}',
        {"content-type": "application/json"},
        5.0,
    )
    assert reply.headers is not None
    assert reply.headers["content-type"] == "application/json"
    assert reply.data.startswith(b"{")
    assert node.placed[0].caller_content_type == "application/json"


async def test_a_listing_merges_nodes_and_names_silent_ones(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(3)]
    await plane.scheduler(list_timeout_s=2.0)
    user, other = await plane.project(), await plane.project("other")
    await create(other, request(), "other")
    created = [await create(user, request()) for _ in range(6)]
    found = await user.request(
        subjects.sandbox_list("default"), ListSandboxes(), SandboxList, timeout_s=5
    )
    assert {info.sandbox_id for info in found.sandboxes} == {reply.sandbox_id for reply in created}
    assert found.silent_nodes == ()
    await nodes[1].die()
    found = await user.request(
        subjects.sandbox_list("default"), ListSandboxes(), SandboxList, timeout_s=5
    )
    assert found.silent_nodes == ("node-1",)
    assert len(found.sandboxes) == sum(reply.node != "node-1" for reply in created)


async def test_a_node_that_is_heard_of_later_is_used(plane: ControlPlane) -> None:
    await plane.scheduler(warm_up_s=0.0)
    user = await plane.project()
    assert (await refused(user, request())).code is ErrorCode.UNAVAILABLE
    node = await plane.node("node-1", ROOMY, beating=False)
    await node.beat()
    await node.bus.flush()
    await user.flush()
    assert (await create(user, request())).node == "node-1"
