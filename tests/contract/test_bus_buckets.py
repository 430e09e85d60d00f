"""What the bus promises of key-value buckets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsec_common.accounts_permissions import OWNED_STREAMS
from dsec_common.bus import Entry, KeyValue
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import NatsForTests, nats_for_tests
from dsec_common.wire.base import Message

BUCKET = OWNED_STREAMS["broker"][0].removeprefix("KV_")


class Node(Message, frozen=True, kw_only=True):
    number: int = 0


@pytest.fixture
async def running() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


@pytest.fixture
async def bucket(running: NatsForTests) -> AsyncIterator[KeyValue[Node]]:
    async with running.service("broker") as broker:
        yield await broker.kv(BUCKET, Node)


def code_of(caught: pytest.ExceptionInfo[DsecError]) -> ErrorCode:
    return caught.value.code


async def test_a_value_is_read_back_with_its_revision(bucket: KeyValue[Node]) -> None:
    revision = await bucket.put("node-1", Node(number=1))
    entry = await bucket.get("node-1")
    assert entry.value is not None
    assert (entry.key, entry.value.number, entry.revision) == ("node-1", 1, revision)


async def test_a_missing_or_deleted_key_is_not_found(bucket: KeyValue[Node]) -> None:
    with pytest.raises(DsecError) as caught:
        await bucket.get("none")
    assert code_of(caught) is ErrorCode.NOT_FOUND
    await bucket.put("gone", Node())
    await bucket.delete("gone")
    await bucket.delete("never")
    with pytest.raises(DsecError) as caught:
        await bucket.get("gone")
    assert code_of(caught) is ErrorCode.NOT_FOUND


async def test_of_two_creators_one_wins_and_a_deleted_key_can_be_created_again(
    bucket: KeyValue[Node],
) -> None:
    async def create(number: int) -> bool:
        try:
            await bucket.create("k", Node(number=number))
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            return False
        return True

    assert sum(await asyncio.gather(*(create(number) for number in range(8)))) == 1
    await bucket.delete("k")
    assert await create(9)


async def test_compare_and_swap_loses_no_increment(bucket: KeyValue[Node]) -> None:
    await bucket.put("counter", Node(number=0))

    async def increment(times: int) -> None:
        for _ in range(times):
            while True:
                entry = await bucket.get("counter")
                assert entry.value is not None
                try:
                    await bucket.update(
                        "counter", Node(number=entry.value.number + 1), entry.revision
                    )
                    break
                except DsecError as error:
                    if error.code is not ErrorCode.CONFLICT:
                        raise

    await asyncio.gather(*(increment(25) for _ in range(4)))
    entry = await bucket.get("counter")
    assert entry.value is not None
    assert entry.value.number == 100


async def test_deleting_at_another_revision_is_a_conflict(bucket: KeyValue[Node]) -> None:
    revision = await bucket.put("k", Node())
    await bucket.put("k", Node())
    with pytest.raises(DsecError) as caught:
        await bucket.delete("k", revision=revision)
    assert code_of(caught) is ErrorCode.CONFLICT
    await bucket.delete("k", revision=revision + 1)


@pytest.mark.parametrize("key", ["", "a b", "a.>", "*", ".a", "a.", "a..b", "ä"])
async def test_an_impossible_key_is_invalid(bucket: KeyValue[Node], key: str) -> None:
    with pytest.raises(DsecError) as caught:
        await bucket.put(key, Node())
    assert code_of(caught) is ErrorCode.INVALID


async def test_keys_and_entries_are_those_that_hold_a_value(bucket: KeyValue[Node]) -> None:
    for key in ("a.1", "a.2", "b.1"):
        await bucket.put(key, Node())
    await bucket.delete("a.2")
    assert sorted(await bucket.keys()) == ["a.1", "b.1"]
    assert await bucket.keys("a.*") == ["a.1"]
    assert [entry.key for entry in await bucket.entries("b.>")] == ["b.1"]


async def test_an_entry_with_a_time_to_live_vanishes_and_its_watchers_see_it(
    bucket: KeyValue[Node],
) -> None:
    watching = bucket.watch()
    assert await anext(watching) is None
    await bucket.create("k", Node(number=1), ttl_s=1)
    first = await anext(watching)
    assert first is not None
    assert first.value is not None
    async with asyncio.timeout(10):
        second = await anext(watching)
    assert second is not None
    assert (second.key, second.value) == ("k", None)
    with pytest.raises(DsecError) as caught:
        await bucket.get("k")
    assert code_of(caught) is ErrorCode.NOT_FOUND
    await watching.aclose()
    assert await bucket.create("k", Node(number=2)) > first.revision


async def test_a_watch_gives_what_is_there_then_none_then_changes(
    bucket: KeyValue[Node],
) -> None:
    await bucket.put("a", Node(number=1))
    watching = bucket.watch()
    async with asyncio.timeout(20):
        there = await anext(watching)
        assert isinstance(there, Entry)
        assert there.key == "a"
        assert await anext(watching) is None
        await bucket.put("b", Node(number=2))
        change = await anext(watching)
    assert change is not None
    assert change.key == "b"
    await watching.aclose()


async def test_a_watch_survives_the_loss_of_the_server(running: NatsForTests) -> None:
    async with running.service("broker") as broker:
        bucket = await broker.kv(BUCKET, Node)
        await bucket.put("a", Node(number=1))
        watching = bucket.watch()
        async with asyncio.timeout(20):
            await anext(watching)
            assert await anext(watching) is None
            back = asyncio.Event()
            broker.on_reconnect(back.set)
            await running.server.kill()
            await running.server.start()
            await back.wait()
            while True:
                try:
                    await bucket.put("b", Node(number=2))
                    break
                except DsecError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.02)
            seen = set()
            while "b" not in seen:
                entry = await anext(watching)
                seen.add(entry.key if entry else "")
        await watching.aclose()


async def test_a_bucket_of_another_service_is_denied(running: NatsForTests) -> None:
    async with running.service("scheduler") as scheduler:
        with pytest.raises(DsecError) as caught:
            await scheduler.kv(BUCKET, Node)
    assert code_of(caught) is ErrorCode.DENIED
