"""A gang with a key is made once and whole, whichever scheduler dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from control_plane import ControlPlane, NodePeer, control_plane, request, until
from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.compute.model import GpuDemand
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import nats_for_tests
from dsec_common.wire.node import Gpu
from dsec_common.wire.waiting import CreateGang, GangCreated
from scheduler_process import SchedulerProcess

WHOLE_CARD = GpuDemand(min_cu=100, max_cu=100)


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with nats_for_tests() as nats, control_plane(nats) as plane:
        await plane.broker()
        yield plane


async def card(plane: ControlPlane, name: str) -> NodePeer:
    return await plane.node(name, gpus=(Gpu(uuid=f"GPU of {name}", model="NVIDIA A100"),))


async def gang(bus: Bus, key: str, count: int = 2) -> GangCreated:
    wanted = CreateGang(
        requests=tuple(request(gpu=WHOLE_CARD) for _ in range(count)),
        timeout_s=20.0,
        idempotency_key=key,
    )
    return await bus.request(
        subjects.sandbox_create_gang("default"), wanted, GangCreated, timeout_s=30.0
    )


async def dies_over_it(
    plane: ControlPlane, directory: Path, bus: Bus, nodes: Sequence[NodePeer]
) -> None:
    """Have a scheduler die when these nodes have made a gang and before it knows."""
    hanging = asyncio.Event()

    async def hang() -> None:
        await hanging.wait()

    for node in nodes:
        node.before_answer = hang
    doomed = SchedulerProcess(plane, directory, "doomed", DSEC_ATTEMPT_TIMEOUT_S="2")
    try:
        await doomed.start()
        asking = asyncio.create_task(gang(bus, "k", len(nodes)))
        await until(lambda: all(node.sandboxes for node in nodes))
    finally:
        await doomed.kill()
    asking.cancel()
    await asyncio.wait({asking})
    hanging.set()
    for node in nodes:
        node.before_answer = None


async def test_the_same_key_is_the_same_gang(plane: ControlPlane) -> None:
    nodes = [await card(plane, f"gpu-{at}") for at in range(2)]
    await plane.scheduler()
    user = await plane.project()
    first = await gang(user, "k")
    assert (await gang(user, "k")).sandboxes == first.sandboxes
    assert [len(node.placed) for node in nodes] == [1, 1]
    with pytest.raises(DsecError) as caught:
        await gang(user, "k", count=1)
    assert caught.value.code is ErrorCode.CONFLICT
    with pytest.raises(DsecError) as caught:
        await gang(user, "k" * 257)
    assert caught.value.code is ErrorCode.INVALID


async def test_a_gang_whose_scheduler_died_is_answered_by_the_next(
    plane: ControlPlane, tmp_path: Path
) -> None:
    nodes = [await card(plane, f"gpu-{at}") for at in range(2)]
    user = await plane.project()
    await dies_over_it(plane, tmp_path, user, nodes)
    await plane.scheduler()
    made = await gang(user, "k")
    assert {it.node for it in made.sandboxes} == {"gpu-0", "gpu-1"}
    assert [len(node.placed) for node in nodes] == [1, 1]


async def test_what_is_left_of_a_gang_is_removed_before_it_is_made_anew(
    plane: ControlPlane, tmp_path: Path
) -> None:
    well, ill = [await card(plane, f"gpu-{at}") for at in range(2)]
    user = await plane.project()
    await dies_over_it(plane, tmp_path, user, (well, ill))
    (left,) = well.sandboxes
    await ill.die()
    await card(plane, "gpu-2")
    await plane.scheduler()
    made = await gang(user, "k")
    assert {it.node for it in made.sandboxes} == {"gpu-0", "gpu-2"}
    assert len(well.sandboxes) == 1
    assert left not in well.sandboxes
