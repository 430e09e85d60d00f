"""A lease that shrinks or grows under a living sandbox: the shell on a recording kernel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec_common.compute.model import GpuDemand, Slice
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.elastic import LeaseResized, ResizeLease, SandboxResized
from dsec_common.wire.sandbox import CreateSandbox
from dsec_sandboxd.lease_door import LeaseDoor
from node_world import NODE, NOTHING, World

LEASE = f"{NODE}.lease-1"
TEN = (Slice(card="GPU-0", percent=10, cu=10.0),)
SEVEN = (Slice(card="GPU-0", percent=7, cu=7.0),)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, FakeClock())
    await made.start()
    request = CreateSandbox(base="base@1", gpu=GpuDemand(min_cu=7, max_cu=10))
    await made.place("s1", request=request, lease_id=LEASE, slices=TEN)
    yield made
    await made.stop()
    assert made.left() == NOTHING
    made.directories.close()
    made.memory.cleanup()


async def resize(world: World, slices: tuple[Slice, ...], resizes: int) -> LeaseResized:
    message = ResizeLease(lease_id=LEASE, resizes=resizes, slices=slices, reason="full")
    return await LeaseDoor(world.sandboxes).resize(world.ask("s1", message))


def percent(world: World) -> str:
    return world.state.find("p", "s1").env_for({})["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]


def resized_steps(world: World) -> list[Any]:
    return [step for step in world.steps if step.action == "resize"]


async def test_the_next_command_has_the_new_share_and_the_node_says_so(world: World) -> None:
    assert (percent(world), world.state.lease_resizes) == ("10", {})
    assert (await resize(world, SEVEN, 1)).lease_id == LEASE
    assert (percent(world), world.state.lease_resizes) == ("7", {LEASE: 1})
    assert world.store.load()[0].slices == SEVEN


async def test_the_project_hears_of_it_and_the_log_has_the_reason(world: World) -> None:
    await resize(world, SEVEN, 1)
    await world.events.flushed(5.0)
    (event,) = [it for _, it in world.stream.events if isinstance(it, SandboxResized)]
    assert event.sandbox_id == f"{NODE}.s1"
    assert (event.cu_before, event.cu, event.reason) == (10, 7, "full")
    (step,) = resized_steps(world)
    assert dict(step.attributes) == {"cu": "7", "cu_before": "10", "reason": "full"}


async def test_what_comes_again_or_late_changes_nothing(world: World) -> None:
    await resize(world, SEVEN, 2)
    for resizes in (2, 1):
        await resize(world, TEN, resizes)
    assert percent(world) == "7"
    assert len(resized_steps(world)) == 1


async def test_a_lease_that_nobody_lives_on_is_the_same_answer(world: World) -> None:
    await world.delete()
    assert (await resize(world, SEVEN, 1)).lease_id == LEASE
    assert resized_steps(world) == []
