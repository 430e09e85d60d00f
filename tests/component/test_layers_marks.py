"""Garbage collection in a bucket without locks: at each step of it an import may come between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dsec_common.clock import SystemClock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers import Layer, LayerStore
from dsec_sandboxd.layers.limits import ImportWatch
from dsec_sandboxd.layers.object_backend import ObjectBackend
from dsec_sandboxd.layers.object_marks import ImageMarks
from dsec_sandboxd.layers.object_storage import ObjectStorage
from layer_backends import CACHE_BYTES, s3_server, storage_of
from layer_builders import file_member, tar_bytes

PROJECT = "default"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["nats", "s3"])
async def new_storage(
    request: pytest.FixtureRequest, endpoint: str
) -> AsyncIterator[Callable[[], ObjectStorage]]:
    async with storage_of(request.param, endpoint) as made:
        yield made


@pytest.fixture
async def storage(new_storage: Callable[[], ObjectStorage]) -> AsyncIterator[ObjectStorage]:
    opened = new_storage()
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def store(
    new_storage: Callable[[], ObjectStorage], tmp_path: Path
) -> AsyncIterator[LayerStore]:
    backend = ObjectBackend(new_storage(), tmp_path / "node", cache_bytes=CACHE_BYTES)
    async with LayerStore(backend) as opened:
        yield opened


async def put(store: LayerStore, tmp_path: Path, version: str = "1") -> Layer:
    archive = tmp_path / "a.tar"
    archive.write_bytes(tar_bytes([file_member("a")]))
    imported = await store.import_layer(PROJECT, "layer", version, archive, kind=LayerKind.BASE)
    return imported.layer


def name_of(layer: Layer) -> str:
    return layer.digest.removeprefix("sha256:")


async def test_an_image_that_an_import_named_meanwhile_is_not_deleted(
    storage: ObjectStorage, store: LayerStore, tmp_path: Path
) -> None:
    layer = await put(store, tmp_path)
    await store.remove(PROJECT, "layer@1")
    collector = ImageMarks(storage, SystemClock())
    revision = await collector.condemn(name_of(layer))
    assert revision is not None
    await put(store, tmp_path, "2")
    assert not await collector.take(name_of(layer), revision)
    assert await storage.image_bytes(name_of(layer)) == layer.size_bytes
    assert await store.collect_garbage() == ()


async def test_an_import_that_comes_while_its_image_is_being_deleted_puts_it_there_again(
    storage: ObjectStorage, store: LayerStore, tmp_path: Path
) -> None:
    layer = await put(store, tmp_path)
    await store.remove(PROJECT, "layer@1")
    collector = ImageMarks(storage, SystemClock())
    revision = await collector.condemn(name_of(layer))
    assert revision is not None
    assert await collector.take(name_of(layer), revision)
    importing = asyncio.create_task(put(store, tmp_path, "2"))
    async with asyncio.timeout(10):
        while not [layer for layer in await store.list(PROJECT) if layer.version == "2"]:
            await asyncio.sleep(0.01)
    assert not importing.done()
    await storage.delete_image(name_of(layer))
    await collector.clear(name_of(layer))
    again = await importing
    assert again.digest == layer.digest
    assert await storage.image_bytes(name_of(layer)) == layer.size_bytes


async def test_two_collectors_do_not_delete_one_image_twice(storage: ObjectStorage) -> None:
    first, second = (ImageMarks(storage, SystemClock()) for _ in range(2))
    name = "ab" * 32
    one = await first.condemn(name)
    two = await second.condemn(name)
    assert one is not None
    assert two is not None
    assert not await first.take(name, one)
    assert await second.take(name, two)
    assert await first.condemn(name) is None


async def test_a_collector_that_died_is_replaced_after_an_hour(storage: ObjectStorage) -> None:
    clock = FakeClock()
    dead, later = ImageMarks(storage, clock), ImageMarks(storage, clock)
    name = "cd" * 32
    revision = await dead.condemn(name)
    assert revision is not None
    assert await dead.take(name, revision)
    await clock.advance(3599)
    assert await later.condemn(name) is None
    await clock.advance(2)
    assert await later.condemn(name) is not None


async def test_an_image_whose_import_died_before_it_had_a_name_is_collected(
    storage: ObjectStorage, store: LayerStore, tmp_path: Path
) -> None:
    kept = await put(store, tmp_path)
    orphan = "ef" * 32
    draft = tmp_path / "draft"
    draft.write_bytes(b"half an import")
    await storage.write_image(orphan, draft, ImportWatch())
    assert await store.collect_garbage() == (f"sha256:{orphan}",)
    assert await storage.image_names() == [name_of(kept)]


async def test_a_damaged_image_in_the_bucket_is_never_mounted_and_an_import_repairs_it(
    storage: ObjectStorage, store: LayerStore, tmp_path: Path
) -> None:
    layer = await put(store, tmp_path)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(layer.size_bytes))
    await storage.write_image(name_of(layer), damaged, ImportWatch())
    backend = store.backend
    assert isinstance(backend, ObjectBackend)
    backend.cache.drop(layer.digest)
    with pytest.raises(DsecError) as caught:
        await store.resolve(PROJECT, "layer@1")
    assert caught.value.code is ErrorCode.LAYER_ERROR
    await put(store, tmp_path)
    backend.cache.drop(layer.digest)
    await store.resolve(PROJECT, "layer@1")


async def test_a_damaged_name_stops_the_collection(
    storage: ObjectStorage, store: LayerStore, tmp_path: Path
) -> None:
    layer = await put(store, tmp_path)
    document = await storage.read_document(f"names/{PROJECT}/layer")
    assert document is not None
    await storage.write_document(f"names/{PROJECT}/layer", b"{", revision=document.revision)
    with pytest.raises(DsecError) as caught:
        await store.collect_garbage()
    assert caught.value.code is ErrorCode.LAYER_ERROR
    assert await storage.image_bytes(name_of(layer)) == layer.size_bytes
