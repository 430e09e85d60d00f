"""Waiting for Compute Units: real schedulers and brokers on real NATS, nodes that make nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from control_plane import ControlPlane, NodePeer, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.lease import HeldLease, LeaseList, ListLeases
from dsec_common.wire.node import Gpu
from dsec_common.wire.pool import CallFunction, FunctionResult
from dsec_common.wire.sandbox import (
    CreateSandbox,
    ExecCommand,
    Limits,
    SandboxCreated,
    SandboxRefused,
    SandboxRunning,
)
from dsec_common.wire.waiting import (
    CancelWaiting,
    CreateGang,
    ExplainWaiting,
    GangCreated,
    WaitingCancelled,
    WaitingExplained,
)
from scheduler_process import SchedulerProcess

Outcome = SandboxRunning | SandboxRefused


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests(projects=("other",)) as nats, control_plane(nats) as plane:
        await plane.broker()
        yield plane


def gpus(count: int, model: str = "NVIDIA A100") -> tuple[Gpu, ...]:
    return tuple(Gpu(uuid=f"GPU-{at}", model=model, memory_bytes=80 << 30) for at in range(count))


def wants(cu: float, **changes: Any) -> CreateSandbox:
    return request(gpu=GpuDemand(min_cu=cu, max_cu=cu), **changes)


async def create(bus: Bus, asked: CreateSandbox, project: str = "default") -> SandboxCreated:
    return await bus.request(
        subjects.sandbox_create(project), asked, SandboxCreated, timeout_s=asked.timeout_s + 5
    )


async def explain(bus: Bus, request_id: str) -> WaitingExplained:
    return await bus.request(
        subjects.sandbox_waiting("default", "explain"),
        ExplainWaiting(request_id=request_id),
        WaitingExplained,
    )


async def waiting(bus: Bus, request_id: str) -> WaitingExplained:
    """Return why something waits as soon as it does."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await explain(bus, request_id)
            except DsecError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise


async def end(node: NodePeer, created: SandboxCreated) -> None:
    """Have a node's sandbox end: its lease was named by a heartbeat, and is no more."""
    await node.beat()
    del node.sandboxes[created.sandbox_id.partition(".")[2]]
    node.lease_ids = tuple(it for it in node.lease_ids if it != created.lease_id)


async def test_units_that_are_free_are_granted_at_once(plane: ControlPlane) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    await plane.node("cpu-1")
    await plane.scheduler()
    user = await plane.project()
    created = await create(user, wants(40.0))
    assert created.node == "gpu-1"
    (placed,) = node.placed
    assert placed.lease_id
    assert sum(it.percent for it in placed.slices) == 40


async def test_what_finds_no_units_waits_for_them_and_says_why(plane: ControlPlane) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    first = await create(user, wants(70.0))
    asked = wants(40.0, timeout_s=20.0)
    second = asyncio.create_task(create(user, asked))
    why = await waiting(user, asked.message_id)
    assert (why.constraint, why.ahead, why.startable_cu) == ("capacity", 0, 30.0)
    assert why.reason == "waits for 40 CU: 30 free on gpu-1"
    assert why.would_change[0] == "would start now with --max-cu 30"
    await end(node, first)
    assert (await second).node == "gpu-1"
    with pytest.raises(DsecError) as gone:
        await explain(user, asked.message_id)
    assert gone.value.code is ErrorCode.NOT_FOUND


async def test_what_waits_is_told_when_units_are_expected_back(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    began = time.time()
    await create(user, wants(30.0, ttl_s=600.0))
    await create(user, wants(70.0))
    small, large = wants(20.0, timeout_s=20.0), wants(50.0, timeout_s=20.0)
    pending = [asyncio.create_task(create(user, it)) for it in (small, large)]
    why = await waiting(user, small.message_id)
    assert began + 600.0 <= why.expected_at <= time.time() + 600.0
    never = await waiting(user, large.message_id)
    assert never.expected_at == 0.0
    assert "1 of 2 leases do not say when they end" in never.would_change[-1]
    for it in (small, large):
        await user.request(
            subjects.sandbox_waiting("default", "cancel"),
            CancelWaiting(request_id=it.message_id),
            WaitingCancelled,
        )
    await asyncio.gather(*pending, return_exceptions=True)


async def test_what_waits_in_vain_is_told_why_when_its_time_is_over(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    await create(user, wants(100.0))
    with pytest.raises(DsecError) as caught:
        await create(user, wants(50.0, timeout_s=0.5))
    assert caught.value.code is ErrorCode.EXHAUSTED
    assert caught.value.retryable
    assert "waits for 50 CU: 0 free on gpu-1" in caught.value.message
    assert caught.value.details["constraint"] == "capacity"


async def test_a_pending_request_can_be_cancelled_by_its_project_only(plane: ControlPlane) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    for _ in range(2):  # whichever hears the question, whichever has the request
        await plane.scheduler()
    user, other = await plane.project(), await plane.project("other")
    first = await create(user, wants(100.0))
    asked = wants(50.0, timeout_s=20.0)
    pending = asyncio.create_task(create(user, asked))
    await waiting(user, asked.message_id)
    give_up = CancelWaiting(request_id=asked.message_id)
    with pytest.raises(DsecError) as denied:
        await other.request(subjects.sandbox_waiting("other", "cancel"), give_up, WaitingCancelled)
    assert denied.value.code is ErrorCode.NOT_FOUND
    await user.request(subjects.sandbox_waiting("default", "cancel"), give_up, WaitingCancelled)
    with pytest.raises(DsecError) as caught:
        await pending
    assert caught.value.code is ErrorCode.CONFLICT
    assert not caught.value.retryable
    await end(node, first)
    await create(user, wants(100.0))


async def test_sandboxes_without_gpus_pass_by_any_number_that_wait(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler(concurrency=4)
    user = await plane.project()
    await create(user, wants(100.0))
    asked = [wants(50.0, timeout_s=20.0) for _ in range(12)]
    pending = [asyncio.create_task(create(user, it)) for it in asked]
    for it in asked:
        await waiting(user, it.message_id)
    for _ in range(8):
        await create(user, request())
    assert not any(it.done() for it in pending)
    for each in pending:
        each.cancel()


def call(**changes: Any) -> CallFunction:
    return CallFunction(base="debian@12", command=ExecCommand(argv=("true",)), **changes)


async def test_calls_that_wait_for_units_hold_no_place_of_those_that_want_none(
    plane: ControlPlane,
) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler(concurrency=4)
    user = await plane.project()
    first = await create(user, wants(100.0))
    asked = [call(limits=Limits(cu=10.0), timeout_s=30.0) for _ in range(8)]
    subject = subjects.function_call("default")
    pending = [
        asyncio.create_task(user.request(subject, it, FunctionResult, timeout_s=40.0))
        for it in asked
    ]
    for it in asked:
        await waiting(user, it.message_id)
    await user.request(subject, call(), FunctionResult, timeout_s=10.0)
    assert not any(it.done() for it in pending)
    await end(node, first)
    answers = await asyncio.gather(*pending)
    assert len({it.sandbox_id for it in answers}) == len(asked)


async def test_a_scheduler_that_stops_sends_those_who_wait_to_another(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    scheduler = await plane.scheduler()
    user = await plane.project()
    await create(user, wants(100.0))
    asked = wants(50.0, timeout_s=20.0)
    pending = asyncio.create_task(create(user, asked))
    await waiting(user, asked.message_id)
    assert await scheduler.stop() == 0
    with pytest.raises(DsecError) as caught:
        await pending
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.retryable


async def test_demands_that_make_no_sense_are_refused_before_they_wait(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    absurd: list[dict[str, Any]] = [
        {"gpu": GpuDemand(min_cu=float("nan"), max_cu=1.0)},
        {"gpu": GpuDemand(min_cu=-1.0, max_cu=1.0)},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=float("inf"))},
        {"gpu": GpuDemand(min_cu=2.0, max_cu=1.0)},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=1.0, count=-1)},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=1.0), "priority": 10**9},
        {"gpu": GpuDemand(min_cu=1e308, max_cu=1e308)},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=1.0, memory_bytes=2**63)},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=1.0, models=("A100",) * 100)},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=1.0, models=("A" * 100,))},
        {"gpu": GpuDemand(min_cu=1.0, max_cu=1.0), "agent": "a" * 100_000},
    ]
    for fields in absurd:
        with pytest.raises(DsecError) as caught:
            await create(user, request(**fields))
        assert caught.value.code is ErrorCode.INVALID, fields


async def test_realtime_finds_its_own_units_free_while_batch_has_all_others(
    plane: ControlPlane,
) -> None:
    await plane.node("gpu-1", gpus=gpus(2))
    await plane.scheduler(realtime_share=0.5)
    user = await plane.project()
    batch = ServiceClass.BATCH
    await create(user, wants(100.0, service_class=batch))
    with pytest.raises(DsecError):
        await create(user, wants(100.0, service_class=batch, timeout_s=0.5))
    await create(user, wants(100.0, service_class=ServiceClass.REALTIME))


async def leases(bus: Bus) -> dict[str, HeldLease]:
    """Return the leases of all nodes, as the broker lists them."""
    listed = await bus.request(subjects.lease("list"), ListLeases(), LeaseList, timeout_s=5)
    return {lease.lease_id: lease for it in listed.nodes for lease in it.leases}


async def test_leases_yield_what_is_not_promised_to_realtime_work_that_finds_nothing_free(
    plane: ControlPlane,
) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    scheduler = await plane.scheduler(realtime_share=0.0)
    user = await plane.project()
    wide = GpuDemand(min_cu=40.0, max_cu=100.0)
    batch = await create(user, request(gpu=wide, service_class=ServiceClass.BATCH))
    await node.beat()
    urgent = await create(user, wants(55.0, service_class=ServiceClass.REALTIME))
    held = await leases(scheduler.bus)
    assert held[urgent.lease_id].cu == 55.0
    assert 40.0 <= held[batch.lease_id].cu <= 45.0
    with pytest.raises(DsecError) as promised:
        await create(user, wants(10.0, service_class=ServiceClass.REALTIME, timeout_s=0.5))
    assert promised.value.code is ErrorCode.EXHAUSTED
    assert (await leases(scheduler.bus))[batch.lease_id].cu >= 40.0


async def test_units_are_of_other_capacity_once_the_own_is_used_above_the_line(
    plane: ControlPlane,
) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    other = await plane.node("gpu-2", gpus=gpus(1, "NVIDIA L40"))
    other.labels = {"capacity": "burst"}
    await other.beat()
    await plane.scheduler(realtime_share=0.0)
    user = await plane.project()
    assert (await create(user, wants(81.0))).node == "gpu-1"
    assert (await create(user, wants(10.0))).node == "gpu-2"
    assert (await create(user, wants(10.0, service_class=ServiceClass.REALTIME))).node == "gpu-1"


async def test_standard_work_waits_rather_than_have_leases_yield(plane: ControlPlane) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    wide = GpuDemand(min_cu=40.0, max_cu=100.0)
    await create(user, request(gpu=wide, service_class=ServiceClass.BATCH))
    await node.beat()
    with pytest.raises(DsecError) as waited:
        await create(user, wants(55.0, timeout_s=0.5))
    assert waited.value.code is ErrorCode.EXHAUSTED


async def create_gang(bus: Bus, *requests: CreateSandbox, timeout_s: float = 10.0) -> GangCreated:
    return await bus.request(
        subjects.sandbox_create_gang("default"),
        CreateGang(requests=requests, timeout_s=timeout_s),
        GangCreated,
        timeout_s=timeout_s + 5,
    )


async def test_a_gang_runs_whole(plane: ControlPlane) -> None:
    nodes = [await plane.node(f"gpu-{at}", gpus=gpus(1)) for at in range(3)]
    await plane.scheduler()
    user = await plane.project()
    gang = await create_gang(user, wants(100.0), wants(60.0), wants(70.0))
    assert len({it.node for it in gang.sandboxes}) == 3
    assert [it.limits for it in gang.sandboxes] == [request().limits] * 3
    assert sum(len(node.placed) for node in nodes) == 3


async def test_a_gang_that_is_too_large_for_what_is_free_holds_nothing(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    await plane.node("gpu-2", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    await create(user, wants(10.0))
    with pytest.raises(DsecError) as caught:
        await create_gang(user, wants(100.0), wants(100.0), timeout_s=0.5)
    assert caught.value.code is ErrorCode.EXHAUSTED
    await create(user, wants(100.0))
    await create(user, wants(90.0))


async def test_a_gang_of_which_one_cannot_be_made_leaves_none(plane: ControlPlane) -> None:
    well = await plane.node("gpu-1", gpus=gpus(1))
    ill = await plane.node("gpu-2", gpus=gpus(1))
    ill.refusal = DsecError(ErrorCode.LAYER_ERROR, "the image is damaged")
    await plane.scheduler()
    user = await plane.project()
    with pytest.raises(DsecError) as caught:
        await create_gang(user, wants(100.0), wants(100.0))
    assert caught.value.code is ErrorCode.LAYER_ERROR
    assert len(well.placed) == len(ill.placed) == 1
    assert not well.sandboxes


async def test_a_gang_that_makes_no_sense_is_refused(plane: ControlPlane) -> None:
    await plane.node("gpu-1", gpus=gpus(1))
    await plane.scheduler()
    user = await plane.project()
    for requests in ((), (request(),), (wants(1.0, idempotency_key="k"),), (wants(1.0),) * 300):
        with pytest.raises(DsecError) as caught:
            await create_gang(user, *requests)
        assert caught.value.code is ErrorCode.INVALID


async def test_several_schedulers_and_brokers_never_give_a_slice_twice(plane: ControlPlane) -> None:
    await plane.broker()
    nodes = [await plane.node(f"gpu-{at}", gpus=gpus(2)) for at in range(2)]
    for _ in range(3):
        await plane.scheduler()
    user = await plane.project()
    alive: dict[str, SandboxCreated] = {}

    def most_held() -> int:
        held: Counter[tuple[str, str]] = Counter()
        for node in nodes:
            for placed in node.placed:
                if placed.local in node.sandboxes:
                    held.update({(node.name, it.card): it.percent for it in placed.slices})
        return max(held.values(), default=0)

    async def live_once(cu: float) -> None:
        created = await create(user, wants(cu, timeout_s=60.0))
        alive[created.sandbox_id] = created
        assert most_held() <= 100
        await end(next(it for it in nodes if it.name == created.node), created)

    await asyncio.gather(*(live_once(cu) for cu in (30.0, 50.0, 70.0, 150.0) * 8))
    assert len(alive) == sum(len(node.placed) for node in nodes) == 32


async def test_what_waited_at_a_killed_scheduler_waits_on_at_another(
    plane: ControlPlane, tmp_path: Path
) -> None:
    node = await plane.node("gpu-1", gpus=gpus(1))
    doomed = SchedulerProcess(plane, tmp_path, "doomed")
    await doomed.start()
    try:
        user = await plane.project()
        heard: list[Outcome] = []

        async def hear(event: Request[Any]) -> None:
            heard.append(event.message)

        # The decoder takes a union where the signature says a type.
        await user.subscribe(subjects.project_events("default"), Outcome, hear)  # type: ignore[arg-type]
        await user.flush()
        first = await create(user, wants(100.0))
        queued = [wants(50.0) for _ in range(2)]
        for it in queued:
            await user.js_publish(subjects.queue_sandbox_create("default"), it)
            await waiting(user, it.message_id)
        hasty = asyncio.create_task(create(user, wants(50.0, timeout_s=1.0)))
    finally:
        await doomed.kill()
    await plane.scheduler()
    await end(node, first)
    await until(lambda: len(heard) == 2, timeout_s=30)
    assert all(isinstance(it, SandboxRunning) for it in heard)
    assert {it.request_id for it in heard} == {it.message_id for it in queued}
    assert len(node.placed) == 3
    with pytest.raises(DsecError) as lost:
        await hasty
    assert lost.value.code in {ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE}
