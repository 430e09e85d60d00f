"""What a node tells of the use of its sandboxes: segments without a gap, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.metering import decode_segment
from metering_world import INTERVAL_S, MIB, World, checked, over


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "records")
    yield world
    world.database.close()


async def test_a_short_sandbox_is_one_segment_and_nothing_is_kept_of_it(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    await world.clock.advance(1.2345)
    world.kernel.uses["a"] = (0.5, 8 * MIB)
    await world.end(record)
    (segment,) = world.topic.segments
    checked([segment], record.created_at)
    assert segment.lasted_ms in {1234, 1235}
    assert (segment.cpu_us, segment.measured) == (500_000, True)
    assert segment.memory_byte_ms == 8 * MIB * segment.lasted_ms // 2
    assert (segment.project, segment.agent, segment.lease_id) == ("team", "coder", "n1.lease")
    assert list(world.database.items(b"meter|")) == []


async def test_a_long_one_is_told_of_now_and_then_and_its_sums_are_exact(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    for turn in range(1, 6):
        world.kernel.uses["a"] = (10.0 * turn, turn * MIB)
        await world.clock.advance(INTERVAL_S / 2)
        await world.meters.tick()
    world.kernel.uses["a"] = (50.25, MIB)
    await world.end(record)
    segments = world.topic.segments
    checked(segments, record.created_at)
    assert len(segments) == 3
    assert sum(it.cpu_us for it in segments) == 50_250_000
    assert sum(it.lasted_ms for it in segments) == round(2.5 * INTERVAL_S * 1000)
    assert list(world.database.items(b"meter|")) == []


async def test_one_put_back_to_a_snapshot_keeps_what_it_has_used(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    world.kernel.uses["a"] = (3.0, MIB)
    await world.meters.sandbox_put_back("a")
    world.kernel.uses["a"] = (2.0, MIB)  # its counters begin anew
    await world.clock.advance(INTERVAL_S)
    await world.meters.tick()
    world.kernel.uses["a"] = (4.0, MIB)
    await world.meters.sandbox_put_back("a")
    world.kernel.uses["a"] = (1.0, MIB)
    await world.end(record)
    checked(world.topic.segments, record.created_at)
    assert [it.cpu_us for it in world.topic.segments] == [5_000_000, 3_000_000]


async def test_a_daemon_that_dies_between_keeping_and_telling_loses_nothing(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    world.kernel.uses["a"] = (7.0, MIB)
    await world.clock.advance(INTERVAL_S)
    world.topic.dies = True
    with pytest.raises(KeyboardInterrupt):
        await world.meters.tick()
    world.topic.dies = False
    world.restart()
    await world.meters.sandbox_adopted(record)
    await world.clock.advance(1.0)
    world.kernel.uses["a"] = (9.0, MIB)
    await world.end(record)
    checked(world.topic.segments, record.created_at)
    assert [it.cpu_us for it in world.topic.segments] == [7_000_000, 2_000_000]


async def test_what_is_told_twice_has_the_same_number_and_says_the_same(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    world.kernel.uses["a"] = (7.0, MIB)
    await world.clock.advance(INTERVAL_S)
    await world.meters.tick()
    world.restart()
    await world.meters.sandbox_adopted(record)
    first, again = world.topic.segments
    assert first == again


async def test_one_that_ended_with_its_daemon_is_told_of_by_the_next(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    await world.clock.advance(10.0)
    world.restart()  # nobody was told of the end
    world.meters.recovered([over(record, world.clock)])
    (segment,) = world.topic.segments
    checked([segment], record.created_at)
    assert segment.lasted_ms == 10_000
    assert (segment.measured, segment.cpu_us) == (False, 0)


async def test_one_that_ended_long_ago_or_never_ran_is_not(world: World) -> None:
    long_ago = over(world.record("a"), world.clock)
    await world.clock.advance(3600.0)
    never = msgspec.structs.replace(world.record("b", ended=True), identity=None)
    world.meters.recovered([long_ago, never])
    world.meters.ended(never)
    assert world.topic.segments == []


async def test_a_clock_that_is_put_back_makes_no_time_negative(world: World) -> None:
    record = world.record()
    world.meters.began(record)
    world.kernel.uses["a"] = (1.0, MIB)
    await world.meters.sandbox_ending("a")
    put_back = msgspec.structs.replace(record, ended_at=record.created_at - 60.0)
    world.meters.ended(put_back)
    (segment,) = world.topic.segments
    assert segment.lasted_ms == 0
    assert segment.last


async def test_of_many_that_are_due_some_wait_for_the_next_round(world: World) -> None:
    for number in range(50):
        world.kernel.uses[f"s{number}"] = (1.0, MIB)
        world.meters.began(world.record(f"s{number}"))
    await world.clock.advance(INTERVAL_S)
    await world.meters.tick()
    assert len(world.topic.segments) == 32
    await world.meters.tick()
    assert len({it.sandbox_id for it in world.topic.segments}) == 50
    await world.meters.tick()
    assert len(world.topic.segments) == 50


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b'{"type":"sandbox"}',
        (
            b'{"type":"lease","project":"p","node":"n","number":0,"from_ms":1,"to_ms":2,'
            b'"lease_id":"n.l","cu_micro":1}'
        ),
        (
            b'{"type":"lease","project":"p","node":"n","number":1,"from_ms":3,"to_ms":2,'
            b'"lease_id":"n.l","cu_micro":1}'
        ),
        (
            b'{"type":"lease","project":"p","node":"n","number":1,"from_ms":1,"to_ms":2,'
            b'"lease_id":"","cu_micro":1}'
        ),
    ],
)
def test_what_is_no_segment_is_invalid(value: bytes) -> None:
    with pytest.raises(DsecError) as refused:
        decode_segment(value)
    assert refused.value.code is ErrorCode.INVALID
