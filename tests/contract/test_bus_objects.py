"""Object buckets against a real server."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator

import pytest

from dsec_common.bus import Bus
from dsec_common.bus_objects import OBJECT_CHUNK_BYTES, ObjectBucket
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.nats import NatsForTests, nats_for_tests

NODE = "objects"


@pytest.fixture
async def nats() -> AsyncIterator[NatsForTests]:
    async with nats_for_tests() as running:
        yield running


@pytest.fixture
async def bus(nats: NatsForTests) -> AsyncIterator[Bus]:
    async with nats.service("sandboxd", NODE) as connected:
        yield connected


@pytest.fixture
async def bucket(bus: Bus) -> ObjectBucket:
    return await bus.objects("dsec-layers")


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for offset in range(0, len(data), OBJECT_CHUNK_BYTES):
        yield data[offset : offset + OBJECT_CHUNK_BYTES]


async def content(bucket: ObjectBucket, name: str) -> bytes:
    return b"".join([piece async for piece in bucket.get(name)])


@pytest.mark.parametrize("size", [0, 1, OBJECT_CHUNK_BYTES, 20 * OBJECT_CHUNK_BYTES + 7])
async def test_a_value_of_any_size_comes_back_as_it_was_put(
    bucket: ObjectBucket, size: int
) -> None:
    data = os.urandom(size)
    info = await bucket.put("images/sha256:ab@1", pieces(data))
    assert (info.size_bytes, info.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert await bucket.info("images/sha256:ab@1") == info
    assert await content(bucket, "images/sha256:ab@1") == data
    assert await bucket.names() == ["images/sha256:ab@1"]


async def test_two_values_that_are_written_at_once_do_not_mix(bucket: ObjectBucket) -> None:
    values = {str(number): os.urandom(5 * OBJECT_CHUNK_BYTES) for number in range(4)}
    await asyncio.gather(*(bucket.put(name, pieces(data)) for name, data in values.items()))
    for name, data in values.items():
        assert await content(bucket, name) == data


async def test_a_value_that_is_put_again_or_deleted_takes_no_room(bucket: ObjectBucket) -> None:
    for data in (b"first", b"second"):
        await bucket.put("a", pieces(data))
    assert await content(bucket, "a") == b"second"
    assert await bucket.remove_orphans(0.0) == 0
    await bucket.delete("a")
    await bucket.delete("a")
    assert await bucket.names() == []
    with pytest.raises(DsecError) as error:
        await bucket.info("a")
    assert error.value.code is ErrorCode.NOT_FOUND


async def test_a_writer_that_fails_leaves_nothing_and_one_that_dies_leaves_only_orphans(
    bucket: ObjectBucket,
) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        await bucket.put("a", failing())
    assert await bucket.remove_orphans(0.0) == 0
    await bucket._append(bucket._chunks("dead"), b"half of a value whose writer died")
    await bucket.put("b", pieces(b"sound"))
    assert await bucket.remove_orphans(3600.0) == 0
    assert await bucket.remove_orphans(0.0) == 1
    assert await content(bucket, "b") == b"sound"


async def test_a_damaged_value_is_not_handed_out_whole(bucket: ObjectBucket) -> None:
    await bucket.put("a", pieces(b"sound"))
    description = await bucket._found("a")
    await bucket._purge(bucket._chunks(description.nuid))
    await bucket._append(bucket._chunks(description.nuid), b"other")
    with pytest.raises(DsecError) as error:
        await content(bucket, "a")
    assert error.value.code is ErrorCode.INTERNAL


async def test_no_project_reaches_the_bucket(nats: NatsForTests, bucket: ObjectBucket) -> None:
    await bucket.put("a", pieces(b"secret"))
    async with nats.project() as project:
        with pytest.raises(DsecError):
            await project.objects("dsec-layers")
