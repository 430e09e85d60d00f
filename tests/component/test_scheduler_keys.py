"""One key, one sandbox: whatever is repeated, interrupted or crashes in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from control_plane import ControlPlane, NodePeer, control_plane, request
from dsec_common import subjects
from dsec_common.bus import Bus, KeyValue
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Gpu
from dsec_common.wire.sandbox import MIB, CreateSandbox, Limits, SandboxCreated
from dsec_common.wire.waiting import ExplainWaiting, WaitingExplained
from dsec_scheduler.idempotency import RequestRecord, RequestState, arguments_digest, bucket_key
from dsec_scheduler.ledger import BUCKET


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        yield plane


async def create(bus: Bus, asked: CreateSandbox, project: str = "default") -> SandboxCreated:
    return await bus.request(
        subjects.sandbox_create(project), asked, SandboxCreated, timeout_s=asked.timeout_s + 5
    )


async def bucket(plane: ControlPlane) -> tuple[Bus, KeyValue[RequestRecord]]:
    bus = await plane._stack.enter_async_context(plane.nats.service("scheduler"))
    return bus, await bus.kv(BUCKET, RequestRecord, ttl_s=86_400.0)


def made_by(*nodes: NodePeer) -> int:
    return sum(len(node.sandboxes) for node in nodes)


async def test_the_same_key_returns_the_same_sandbox(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    first = await create(user, request(idempotency_key="k"))
    second = await create(user, request(idempotency_key="k", timeout_s=9.0))
    assert second == first
    assert made_by(node) == 1


async def test_the_same_key_works_while_the_cluster_is_full_or_gone(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    first = await create(user, request(idempotency_key="k"))
    await node.die()
    assert await create(user, request(idempotency_key="k")) == first


async def test_the_same_key_with_other_arguments_is_a_conflict(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    await create(user, request(idempotency_key="k"))
    with pytest.raises(DsecError) as error:
        await create(user, request(idempotency_key="k", limits=Limits(memory_bytes=MIB)))
    assert error.value.code is ErrorCode.CONFLICT
    assert made_by(node) == 1


async def test_a_key_belongs_to_its_project(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    first = await create(await plane.project(), request(idempotency_key="k"))
    second = await create(await plane.project("other"), request(idempotency_key="k"), "other")
    assert first.sandbox_id != second.sandbox_id
    assert made_by(node) == 2


async def test_many_at_once_on_two_schedulers_make_one_sandbox(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(2)]
    for _ in range(2):
        await plane.scheduler()
    user = await plane.project()
    replies = await asyncio.gather(*(create(user, request(idempotency_key="k")) for _ in range(30)))
    assert len({reply.sandbox_id for reply in replies}) == 1
    assert made_by(*nodes) == 1


async def test_a_second_request_waits_for_the_first(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    for _ in range(2):
        await plane.scheduler()
    go_on = asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    node.before_answer = wait
    user = await plane.project()
    first = asyncio.create_task(create(user, request(idempotency_key="k")))
    await node.place_arrived.wait()
    second = asyncio.create_task(create(user, request(idempotency_key="k")))
    await user.flush()
    assert not second.done()
    go_on.set()
    assert (await first).sandbox_id == (await second).sandbox_id
    assert made_by(node) == 1


async def test_a_waiter_gives_up_when_its_own_time_is_over(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    go_on = asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    node.before_answer = wait
    user = await plane.project()
    first = asyncio.create_task(create(user, request(idempotency_key="k")))
    await node.place_arrived.wait()
    with pytest.raises(DsecError) as error:
        await create(user, request(idempotency_key="k", timeout_s=0.1))
    assert error.value.code is ErrorCode.TIMEOUT
    go_on.set()
    await first


async def test_a_request_that_failed_may_be_tried_again(plane: ControlPlane) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    node.refusal = DsecError(ErrorCode.LAYER_ERROR, "the image is damaged")
    with pytest.raises(DsecError, match="damaged"):
        await create(user, request(idempotency_key="k"))
    node.refusal = None
    assert (await create(user, request(idempotency_key="k"))).node == "node-1"
    assert made_by(node) == 1


async def _leave_a_dead_claim(
    plane: ControlPlane, asked: CreateSandbox, node: str, local: str, deadline: float
) -> None:
    """Write what a scheduler has written when it dies after choosing a node."""
    _, records = await bucket(plane)
    await records.create(
        bucket_key("default", "caller", asked.idempotency_key),
        RequestRecord(
            digest=arguments_digest(asked),
            state=RequestState.PENDING,
            owner="a dead scheduler",
            node=node,
            local=local,
            deadline=deadline,
        ),
    )


async def test_a_scheduler_that_died_before_asking_the_node_is_taken_over(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    asked = request(idempotency_key="k")
    await _leave_a_dead_claim(plane, asked, "node-1", "neverasked", time.time() + 0.2)
    user = await plane.project()
    reply = await create(user, asked)
    assert reply.sandbox_id != "node-1.neverasked"
    assert made_by(node) == 1


async def test_a_scheduler_that_died_after_the_node_made_it_leads_to_that_sandbox(
    plane: ControlPlane,
) -> None:
    node = await plane.node("node-1")
    await plane.scheduler()
    user = await plane.project()
    made = await create(user, request())
    asked = request(idempotency_key="k")
    local = made.sandbox_id.partition(".")[2]
    await _leave_a_dead_claim(plane, asked, "node-1", local, time.time() - 1)
    for _ in range(2):
        reply = await create(user, asked)
        assert (reply.sandbox_id, reply.layers) == (made.sandbox_id, made.layers)
    assert made_by(node) == 1


async def test_a_dead_scheduler_on_a_dead_node_is_taken_over(plane: ControlPlane) -> None:
    node = await plane.node("node-2")
    await plane.scheduler()
    asked = request(idempotency_key="k")
    await _leave_a_dead_claim(plane, asked, "node-1", "gone", time.time() - 1)
    assert (await create(await plane.project(), asked)).node == "node-2"
    assert made_by(node) == 1


async def test_two_that_take_over_at_once_make_one_sandbox(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"node-{number}") for number in range(2)]
    for _ in range(2):
        await plane.scheduler()
    asked = request(idempotency_key="k")
    await _leave_a_dead_claim(plane, asked, "node-9", "gone", time.time() - 1)
    user = await plane.project()
    replies = await asyncio.gather(*(create(user, asked) for _ in range(10)))
    assert len({reply.sandbox_id for reply in replies}) == 1
    assert made_by(*nodes) == 1


async def test_reselection_moves_the_claim_to_the_next_node(plane: ControlPlane) -> None:
    refusing = await plane.node("node-1")
    refusing.refusal = DsecError(ErrorCode.EXHAUSTED, "full")
    node = await plane.node("node-2")
    await plane.scheduler()
    user = await plane.project()
    for number in range(4):
        assert (await create(user, request(idempotency_key=f"k{number}"))).node == "node-2"
    assert made_by(node) == 4


async def test_a_request_without_a_key_leaves_no_record(plane: ControlPlane) -> None:
    await plane.node("node-1")
    await plane.scheduler()
    await create(await plane.project(), request())
    _, records = await bucket(plane)
    assert await records.keys() == []


async def test_the_record_tells_the_outcome(plane: ControlPlane) -> None:
    await plane.node("node-1")
    await plane.scheduler()
    created = await create(await plane.project(), request(idempotency_key="k"))
    _, records = await bucket(plane)
    key = bucket_key("default", "caller", "k")
    # The caller has its answer a moment before the record does.
    async for entry in records.watch(key):
        if entry is not None and entry.value is not None and entry.value.created is not None:
            assert entry.value.state is RequestState.CREATED
            assert entry.value.created == created
            return


async def test_a_key_for_which_one_of_two_waited_in_vain_is_still_one_sandbox(
    plane: ControlPlane,
) -> None:
    await plane.broker()
    node = await plane.node("node-1", gpus=(Gpu(uuid="GPU-0", model="NVIDIA A100"),))
    await plane.scheduler()
    user = await plane.project()
    units = GpuDemand(min_cu=60, max_cu=60)
    before = await create(user, request(gpu=units))
    asked = [request(gpu=units, idempotency_key="k", timeout_s=3.0) for _ in range(2)]
    asking = [asyncio.create_task(create(user, it)) for it in asked]
    for it in asked:
        await _until_it_waits(user, it.message_id)
    await node.beat()
    del node.sandboxes[before.sandbox_id.partition(".")[2]]
    node.lease_ids = ()
    first, second = await asyncio.gather(*asking)
    assert second == first
    assert made_by(node) == 1


async def _until_it_waits(user: Bus, request_id: str) -> None:
    explain = subjects.sandbox_waiting("default", "explain")
    async with asyncio.timeout(10):
        while True:
            try:
                await user.request(explain, ExplainWaiting(request_id=request_id), WaitingExplained)
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
            else:
                return
