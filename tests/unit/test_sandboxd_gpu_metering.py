"""What sandboxes use of their GPUs: exact where it is known, and told where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsec_common.compute.model import CardMode, Slice
from dsec_common.metering import MICRO, SandboxSegment
from dsec_sandboxd.discovery.gpus import GpuSample
from dsec_sandboxd.discovery.use import GpuProcess
from dsec_sandboxd.kernel.interface import SandboxIdentity
from metering_world import INTERVAL_S, MIB, World, checked

BASE_ID = 1 << 24
OTHERS_ID = BASE_ID + 65_536
QUARTER = Slice(card="GPU-a", kind=CardMode.MPS, percent=25, cu=25.0)


def process(
    memory_bytes: int | None, busy_ms: int | None, *, user: int = BASE_ID + 5, gpu: str = "GPU-a"
) -> GpuProcess:
    busy_us = None if busy_ms is None else busy_ms * 1000
    return GpuProcess(pid=1, gpu=gpu, memory_bytes=memory_bytes, user=user, busy_us=busy_us)


def sample(*processes: GpuProcess, gpu: str = "GPU-a") -> GpuSample:
    return GpuSample(processes={gpu: processes})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "records")
    world.kernel.uses["a"] = (1.0, MIB)
    yield world
    world.database.close()


def begin(world: World, *slices: Slice, local: str = "a", base_id: int = BASE_ID) -> None:
    world.meters.began(world.record(local, slices=slices, base_id=base_id))


async def second(world: World, *samples: GpuSample) -> None:
    """Let a second pass, at whose end the cards are read."""
    await world.clock.advance(1.0)
    for each in samples:
        world.gpus.seen(each)


async def end(world: World, local: str = "a") -> SandboxSegment:
    """End a sandbox and return its last segment."""
    await world.end(world.records[local])
    return world.topic.segments[-1]


def gpu_use(segment: SandboxSegment) -> tuple[int | None, int, int | None, int]:
    return (
        segment.gpu_memory_byte_ms,
        segment.gpu_memory_unknown_ms,
        segment.cu_used_micro_ms,
        segment.cu_used_unknown_ms,
    )


async def test_a_sandbox_without_slices_measures_nothing_and_claims_nothing(world: World) -> None:
    begin(world)
    assert not world.gpus.measures_use
    await second(world, sample(process(MIB, 1000)))
    assert gpu_use(await end(world)) == (None, 0, None, 0)


async def test_use_is_measured_from_the_first_sandbox_with_slices_to_the_last(world: World) -> None:
    begin(world, QUARTER)
    assert world.gpus.measures_use
    await end(world)
    assert not world.gpus.measures_use


async def test_units_used_are_busy_time_times_what_the_whole_card_is_worth(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(8 * MIB, 500), process(2 * MIB, 100)))
    await second(world, sample(process(4 * MIB, 250)))
    segment = await end(world)
    assert segment.lasted_ms == 2000
    assert gpu_use(segment) == (14 * MIB * 1000, 0, 850 * 100 * MICRO, 0)


async def test_what_another_s_processes_do_is_not_this_one_s(world: World) -> None:
    begin(world, QUARTER)
    begin(world, QUARTER, local="b", base_id=OTHERS_ID)
    await second(world, sample(process(MIB, 10), process(7 * MIB, 500, user=OTHERS_ID)))
    assert gpu_use(await end(world)) == (MIB * 1000, 0, 10 * 100 * MICRO, 0)
    assert gpu_use(await end(world, "b")) == (7 * MIB * 1000, 0, 500 * 100 * MICRO, 0)


async def test_what_actions_have_is_measured_for_as_long_as_they_have_it_and_once(
    world: World,
) -> None:
    begin(world)
    lent: list[Slice] = []
    world.gpus.lent = lambda local: tuple(lent) if local == "a" else ()

    def change(*slices: Slice) -> None:
        lent[:] = slices
        world.meters.slices_changed(world.records["a"], world.clock.now())

    busy = sample(process(MIB, 100))
    await second(world, busy)
    change(QUARTER)
    assert world.gpus.measures_use
    await second(world, busy)
    change(QUARTER, QUARTER)  # of another action, on the same card
    await second(world, busy)
    change()
    assert not world.gpus.measures_use
    await second(world, busy)
    change(QUARTER)
    await second(world)  # and it is over before the cards are read
    change()
    assert gpu_use(await end(world)) == (2 * MIB * 1000, 1000, 200 * 100 * MICRO, 1000)


async def test_an_action_s_use_goes_on_after_its_daemon_and_what_was_not_told_is_unknown(
    world: World,
) -> None:
    begin(world)
    taken_at = world.clock.now()
    await second(world)
    world.restart()
    await world.meters.sandbox_adopted(world.records["a"])
    world.gpus.lent = lambda _local: (QUARTER,)
    world.meters.slices_changed(world.records["a"], taken_at)
    await second(world, sample(process(MIB, 100)))
    assert gpu_use(await end(world)) == (MIB * 1000, 1000, 100 * 100 * MICRO, 1000)


async def test_a_process_on_a_card_that_the_sandbox_does_not_hold_is_none_of_its(
    world: World,
) -> None:
    begin(world, QUARTER)
    elsewhere = GpuSample(processes={"GPU-a": (), "GPU-b": (process(MIB, 10, gpu="GPU-b"),)})
    await second(world, elsewhere)
    assert gpu_use(await end(world)) == (0, 0, 0, 0)


async def test_a_mig_instance_is_a_place_of_its_own(world: World) -> None:
    instance = Slice(card="GPU-a", kind=CardMode.MIG, mig_uuid="MIG-1", cu=40.0)
    begin(world, instance)
    unknown = process(3 * MIB, None, gpu="MIG-1")
    await second(world, sample(unknown, gpu="MIG-1"))
    assert gpu_use(await end(world)) == (3 * MIB * 1000, 0, None, 1000)


async def test_several_cards_add_up_each_at_its_own_worth(world: World) -> None:
    begin(world, QUARTER, Slice(card="GPU-b", kind=CardMode.WHOLE, cu=65.0))
    both = {"GPU-a": (process(MIB, 100),), "GPU-b": (process(2 * MIB, 10, gpu="GPU-b"),)}
    await second(world, GpuSample(processes=both))
    used = (100 * 100 + 10 * 65) * MICRO
    assert gpu_use(await end(world)) == (3 * MIB * 1000, 0, used, 0)


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (sample(process(None, 500)), (None, 1000, 500 * 100 * MICRO, 0)),
        (sample(process(MIB, None)), (MIB * 1000, 0, None, 1000)),
        (sample(process(MIB, 1), process(None, None)), (None, 1000, None, 1000)),
        (GpuSample(), (None, 1000, None, 1000)),
    ],
)
async def test_what_the_driver_does_not_tell_is_unknown_and_never_nothing(
    world: World, read: GpuSample, told: tuple[int | None, int, int | None, int]
) -> None:
    begin(world, QUARTER)
    await second(world, read)
    assert gpu_use(await end(world)) == told


async def test_a_sandbox_that_ended_before_any_reading_used_nobody_knows_what(
    world: World,
) -> None:
    begin(world, QUARTER)
    await second(world)
    assert gpu_use(await end(world)) == (None, 1000, None, 1000)


async def test_a_driver_that_hangs_for_a_while_leaves_that_while_unknown(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(MIB, 500)))
    await second(world, GpuSample())
    await second(world, sample(process(MIB, 500)))
    assert gpu_use(await end(world)) == (2 * MIB * 1000, 1000, 2 * 500 * 100 * MICRO, 1000)


async def test_the_last_reading_of_memory_counts_for_what_remains(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(MIB, 500)))
    await second(world)
    assert gpu_use(await end(world)) == (2 * MIB * 1000, 0, 500 * 100 * MICRO, 0)


async def test_segments_share_out_what_was_used_without_a_remainder(world: World) -> None:
    begin(world, QUARTER)
    for _ in range(int(INTERVAL_S) + 10):
        await second(world, sample(process(3, 7)))
        await world.meters.tick()
    last = await end(world)
    checked(world.topic.segments, world.records["a"].created_at)
    first, _ = world.topic.segments
    seconds = int(INTERVAL_S) + 10
    assert first.cu_used_micro_ms == int(INTERVAL_S) * 7 * 100 * MICRO
    assert last.cu_used_micro_ms == 10 * 7 * 100 * MICRO
    assert sum(it.gpu_memory_byte_ms or 0 for it in world.topic.segments) == seconds * 3 * 1000


async def test_a_segment_that_could_not_be_kept_leaves_its_use_to_the_next(world: World) -> None:
    begin(world, QUARTER)
    await world.clock.advance(INTERVAL_S)
    world.gpus.seen(sample(process(MIB, 500)))
    world.database.close()
    await world.meters.tick()
    assert world.topic.segments == []
    segment = await end(world)
    assert (segment.number, segment.cu_used_micro_ms) == (1, 500 * 100 * MICRO)


async def test_the_part_of_a_card_may_change_and_its_use_goes_on(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(MIB, 500)))
    smaller = msgspec.structs.replace(QUARTER, percent=10, cu=10.0)
    world.records["a"] = msgspec.structs.replace(world.records["a"], slices=(smaller,))
    await second(world, sample(process(MIB, 500)))
    assert gpu_use(await end(world))[2] == 2 * 500 * 100 * MICRO


async def test_one_put_back_to_a_snapshot_is_known_by_its_new_identity(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(MIB, 500)))
    identity = SandboxIdentity(init_inode=2, slot=1, base_id=OTHERS_ID)
    world.records["a"] = msgspec.structs.replace(world.records["a"], identity=identity)
    await second(world, sample(process(MIB, 500), process(MIB, 100, user=OTHERS_ID)))
    assert gpu_use(await end(world))[2] == 600 * 100 * MICRO


async def test_what_an_earlier_daemon_read_and_did_not_tell_is_unknown(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(MIB, 500)))
    world.restart()
    await world.meters.sandbox_adopted(world.records["a"])
    await second(world, sample(process(MIB, 500)))
    assert gpu_use(await end(world)) == (MIB * 1000, 1000, 500 * 100 * MICRO, 1000)


async def test_one_whose_kernel_is_gone_is_still_billed_for_its_gpus(world: World) -> None:
    begin(world, QUARTER)
    await second(world, sample(process(MIB, 500)))
    del world.kernel.uses["a"]
    segment = await end(world)
    assert not segment.measured
    assert gpu_use(segment) == (MIB * 1000, 0, 500 * 100 * MICRO, 0)
