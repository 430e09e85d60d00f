"""A lease for each process, and what it owns by it: a real bucket, time turned by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from chronus_parties import chronus_service
from dsec_chronus.leases import BUCKET, Held, Lease, Leases
from dsec_common.bus import Bus, Entry, KeyValue
from dsec_common.testing.clock import FakeClock
from dsec_common.testing.nats import NatsForTests, nats_for_tests

TTL_S = 60.0


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as nats:
        yield nats


@pytest.fixture
async def bus(nats: NatsForTests) -> AsyncIterator[Bus]:
    async with nats.service("chronus") as bus:
        yield bus


@pytest.fixture
async def bucket(bus: Bus) -> KeyValue[Lease]:
    return await bus.kv(BUCKET, Lease)


async def told(bucket: KeyValue[Lease], leases: Leases) -> None:
    """Have a process see all that the bucket holds."""
    for entry in await bucket.entries():
        leases.saw(entry)


async def taken(leases: Leases, shard: str = "s0") -> Held:
    held = await leases.take(shard)
    assert held is not None
    return held


async def test_a_process_without_a_running_lease_takes_nothing(bucket: KeyValue[Lease]) -> None:
    clock = FakeClock()
    leases = Leases(bucket, "a", TTL_S, clock)
    assert await leases.take("s0") is None
    assert not await leases.renew()
    assert leases.in_force
    await taken(leases)
    await clock.advance(0.91 * TTL_S)
    assert not leases.in_force
    assert await leases.take("s1") is None


async def test_a_renewal_says_whether_the_lease_ran_all_the_time(
    bucket: KeyValue[Lease],
) -> None:
    clock = FakeClock()
    leases = Leases(bucket, "a", TTL_S, clock)
    await leases.renew()
    await clock.advance(0.5 * TTL_S)
    assert await leases.renew()
    await clock.advance(0.91 * TTL_S)
    assert not await leases.renew()
    assert leases.in_force


async def test_a_shard_of_a_process_that_lives_is_not_taken_though_nothing_was_heard_of_it(
    bucket: KeyValue[Lease],
) -> None:
    clock = FakeClock()
    owner, other = Leases(bucket, "a", TTL_S, clock), Leases(bucket, "b", TTL_S, clock)
    await owner.renew()
    held = await taken(owner)
    await other.renew()
    other.saw(await bucket.get("shard.s0"))
    assert other.plan(["s0"], []).take == ("s0",)
    assert await other.take("s0") is None
    assert other.plan(["s0"], []) == ((), ())
    assert await owner.holds(held)


async def test_the_end_of_a_processs_lease_frees_what_it_owned_and_it_hears_of_the_loss(
    bucket: KeyValue[Lease],
) -> None:
    clock = FakeClock()
    owner, other = Leases(bucket, "a", TTL_S, clock), Leases(bucket, "b", TTL_S, clock)
    await owner.renew()
    held = await taken(owner)
    await other.renew()
    await told(bucket, other)
    assert other.plan(["s0"], []).take == ()
    await bucket.delete("process.a")  # as NATS does when its time is over
    await told(bucket, owner)
    assert not owner.is_lost(held)
    await taken(other)
    await told(bucket, owner)
    assert owner.is_lost(held)
    assert not await owner.holds(held)
    await owner.give(held)
    kept = (await bucket.get("shard.s0")).value
    assert kept is not None
    assert kept.process == "b"


async def test_what_was_missed_of_a_shard_is_learnt_by_the_attempt_to_take_it(
    bucket: KeyValue[Lease],
) -> None:
    clock = FakeClock()
    owner, other = Leases(bucket, "a", TTL_S, clock), Leases(bucket, "b", TTL_S, clock)
    await owner.renew()
    held = await taken(owner)
    other.saw(await bucket.get("shard.s0"))
    await owner.give(held)
    await owner.end()
    await other.renew()
    assert await other.take("s0") is None  # it names a revision that is not the last any more
    await taken(other)


async def test_who_leaves_wants_no_share_and_keeps_what_it_has_until_it_gives_it(
    bucket: KeyValue[Lease],
) -> None:
    clock = FakeClock()
    owner, other = Leases(bucket, "a", TTL_S, clock), Leases(bucket, "b", TTL_S, clock)
    await owner.renew()
    held = await taken(owner)
    await other.renew()
    await told(bucket, other)
    assert other.plan(["s0", "s1"], []).take == ("s1",)
    await owner.renew(leaving=True)
    assert other.saw(await bucket.get("process.a"))
    assert other.plan(["s0", "s1"], ["s1"]) == ((), ())
    await owner.give(held)
    assert other.saw(await last_change(bucket, "shard.s0"))
    assert other.plan(["s0", "s1"], ["s1"]).take == ("s0",)


async def last_change(bucket: KeyValue[Lease], key: str) -> Entry[Lease]:
    async with contextlib.aclosing(bucket.watch(key)) as entries:
        return next(entry for entry in [await anext(entries), await anext(entries)] if entry)


async def test_an_idle_chronus_writes_its_own_lease_alone_however_many_shards_it_owns(
    nats: NatsForTests, bucket: KeyValue[Lease]
) -> None:
    async with chronus_service(nats, shards=32) as service:
        assert len(service._shards) == 32
        key = f"process.{service.process}"
        taken_at = (await bucket.get("shard.s31")).revision
        renewals: set[int] = set()
        async with asyncio.timeout(20):
            while len(renewals) < 4:
                revision = (await bucket.get(key)).revision
                renewals |= {revision} if revision > taken_at else set()
        assert max(renewals) - min(renewals) == len(renewals) - 1
