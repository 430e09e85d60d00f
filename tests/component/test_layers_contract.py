"""One contract, every back end of the layer store: a directory, NATS, an S3-compatible service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layer_upkeep import LayerUpkeep
from dsec_sandboxd.layers import Layer, LayerStore
from dsec_sandboxd.layers.directory_backend import DirectoryBackend
from dsec_sandboxd.layers.hold_files import HOLD_EXPIRES_S
from dsec_sandboxd.layers.object_backend import ObjectBackend
from layer_backends import BACKENDS, NewBackend, backends_of, s3_server
from layer_builders import file_member, look, mounted, tar_bytes

PROJECT = "default"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=BACKENDS)
async def new_backend(
    request: pytest.FixtureRequest, tmp_path: Path, endpoint: str
) -> AsyncIterator[NewBackend]:
    async with backends_of(request.param, tmp_path, endpoint) as made:
        yield made


@pytest.fixture
async def store(new_backend: NewBackend) -> AsyncIterator[LayerStore]:
    async with LayerStore(new_backend()) as opened:
        yield opened
        assert list(opened.backend.staging.iterdir()) == []


@pytest.fixture
async def other(new_backend: NewBackend, store: LayerStore) -> AsyncIterator[LayerStore]:
    """Another node on the same store."""
    async with LayerStore(new_backend()) as opened:
        yield opened


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "a.tar", b"content")


def write_archive(path: Path, content: bytes) -> Path:
    path.write_bytes(tar_bytes([file_member("d/file", content)]))
    return path


async def put(
    store: LayerStore,
    archive: Path,
    version: str = "1",
    *,
    project: str = PROJECT,
    name: str = "python",
    kind: LayerKind = LayerKind.BASE,
    replace: bool = False,
) -> Layer:
    imported = await store.import_layer(project, name, version, archive, kind=kind, replace=replace)
    return imported.layer


async def refused(
    store: LayerStore, reference: str, code: ErrorCode, project: str = PROJECT
) -> DsecError:
    with pytest.raises(DsecError) as error:
        await store.resolve(project, reference)
    assert error.value.code is code
    return error.value


async def seen(store: LayerStore, before: str) -> None:
    """Return when this node has seen a change by another."""
    async with asyncio.timeout(10):
        while store.references_version == before:
            await asyncio.sleep(0.02)


async def test_what_one_node_imports_the_other_mounts(
    store: LayerStore, other: LayerStore, archive: Path, tmp_path: Path
) -> None:
    before = other.references_version
    layer = await put(store, archive)
    await seen(other, before)
    found = await other.resolve(PROJECT, "python@1")
    assert found.digest == layer.digest
    assert (found.size_bytes, found.entries, found.kind) == (layer.size_bytes, 3, LayerKind.BASE)
    assert other.backend.is_ready(layer.digest)
    path = await other.backend.ensure(layer.digest)
    with mounted(path, tmp_path / "mount") as mount:
        assert look(mount)["d/file"].content == b"content"
    assert store.store_id == other.store_id != ""


async def test_the_same_content_again_is_the_same_layer_and_other_content_a_conflict(
    store: LayerStore, other: LayerStore, archive: Path, tmp_path: Path
) -> None:
    first = await put(store, archive)
    assert (await put(other, archive)).digest == first.digest
    changed = write_archive(tmp_path / "b.tar", b"changed")
    with pytest.raises(DsecError) as error:
        await put(other, changed)
    assert error.value.code is ErrorCode.CONFLICT
    assert (await store.resolve(PROJECT, "python@1")).digest == first.digest
    with pytest.raises(DsecError) as error:
        await put(store, archive, kind=LayerKind.TOOLKIT)
    assert error.value.code is ErrorCode.CONFLICT


async def test_a_replaced_version_remembers_what_it_meant(
    store: LayerStore, archive: Path, tmp_path: Path
) -> None:
    first = await put(store, archive)
    changed = write_archive(tmp_path / "b.tar", b"changed")
    second = await put(store, changed, replace=True)
    assert second.digest != first.digest
    assert [before.meaning for before in second.history] == [first.digest]
    assert (await store.inspect(PROJECT, "python@1")).history == second.history


async def test_a_tag_moves_and_a_version_does_not(
    store: LayerStore, other: LayerStore, archive: Path, tmp_path: Path
) -> None:
    one = await put(store, archive)
    two = await put(store, write_archive(tmp_path / "b.tar", b"two"), "2")
    await refused(store, "python:latest", ErrorCode.NOT_FOUND)
    assert (await store.tag(PROJECT, "python", "latest", "1")).tags == ("latest",)
    assert (await other.resolve(PROJECT, "python:latest")).digest == one.digest
    await other.tag(PROJECT, "python", "latest", "2")
    moved = await store.resolve(PROJECT, "python:latest")
    assert (moved.reference, moved.digest, moved.tags) == ("python@2", two.digest, ("latest",))
    assert (await store.resolve(PROJECT, "python@1")).tags == ()
    with pytest.raises(DsecError) as error:
        await store.tag(PROJECT, "python", "latest", "3")
    assert error.value.code is ErrorCode.NOT_FOUND
    assert (await store.resolve(PROJECT, "python:latest")).digest == two.digest


async def test_a_tagged_version_is_kept_until_the_tag_is_gone(
    store: LayerStore, archive: Path
) -> None:
    await put(store, archive)
    await store.tag(PROJECT, "python", "latest", "1")
    with pytest.raises(DsecError) as error:
        await store.remove(PROJECT, "python@1")
    assert error.value.code is ErrorCode.CONFLICT
    assert "python:latest" in error.value.message
    await store.remove(PROJECT, "python:latest")
    error_now = await refused(store, "python:latest", ErrorCode.NOT_FOUND)
    assert "it has python in: 1" in error_now.message
    await store.remove(PROJECT, "python@1")
    await refused(store, "python@1", ErrorCode.NOT_FOUND)


async def test_a_project_sees_only_its_own_names(
    store: LayerStore, archive: Path, tmp_path: Path
) -> None:
    layer = await put(store, archive)
    await refused(store, "python@1", ErrorCode.NOT_FOUND, "other")
    await refused(store, layer.digest, ErrorCode.NOT_FOUND, "other")
    assert await store.list("other") == ()
    assert (await store.resolve(PROJECT, layer.digest)).reference == "python@1"
    await put(store, archive, project="other", name="mine")
    assert [found.reference for found in await store.list("other")] == ["mine@1"]


async def test_a_listing_is_sorted_and_complete(store: LayerStore, archive: Path) -> None:
    wanted = [("b", "2"), ("a", "1"), ("b", "1"), ("a.b", "1+x"), ("a-b", "1")]
    for name, version in wanted:
        await put(store, archive, version, name=name)
    await store.tag(PROJECT, "b", "stable", "1")
    listed = await store.list(PROJECT)
    assert [layer.reference for layer in listed] == sorted(f"{n}@{v}" for n, v in wanted)
    assert {layer.reference: layer.tags for layer in listed if layer.tags} == {"b@1": ("stable",)}


async def test_garbage_is_what_no_name_means(
    store: LayerStore, other: LayerStore, archive: Path, tmp_path: Path
) -> None:
    layer = await put(store, archive)
    kept = await put(store, write_archive(tmp_path / "b.tar", b"kept"), name="kept")
    await put(store, archive, project="other")
    await store.remove(PROJECT, "python@1")
    assert await other.collect_garbage() == ()
    await store.remove("other", "python@1")
    assert await other.collect_garbage(in_use=[layer.digest]) == ()
    assert await other.collect_garbage() == (layer.digest,)
    assert await other.collect_garbage() == ()
    assert (await other.resolve(PROJECT, "kept@1")).digest == kept.digest
    assert (await put(store, archive)).digest == layer.digest
    assert (await other.resolve(PROJECT, "python@1")).digest == layer.digest


async def test_an_import_and_a_garbage_collection_at_once_never_lose_an_image(
    store: LayerStore, other: LayerStore, archive: Path
) -> None:
    collecting = True

    async def collect() -> None:
        while collecting:
            await other.collect_garbage()

    collector = asyncio.create_task(collect())
    try:
        for number in range(8):
            layer = await put(store, archive, str(number))
            size = await _stored_bytes(other, layer)
            assert size == layer.size_bytes
            await store.remove(PROJECT, f"python@{number}")
    finally:
        collecting = False
        await collector


async def _stored_bytes(store: LayerStore, layer: Layer) -> int:
    found = await store.inspect(PROJECT, layer.reference)
    path = await store.backend.ensure(found.digest)
    return path.stat().st_size


async def test_of_many_imports_at_once_one_meaning_wins(
    store: LayerStore, other: LayerStore, tmp_path: Path
) -> None:
    archives = [write_archive(tmp_path / f"{number}.tar", b"%d" % number) for number in range(4)]
    outcomes = await asyncio.gather(
        *(put([store, other][number % 2], archive) for number, archive in enumerate(archives)),
        return_exceptions=True,
    )
    won = [outcome for outcome in outcomes if isinstance(outcome, Layer)]
    lost = [outcome for outcome in outcomes if isinstance(outcome, DsecError)]
    assert len(won) == 1
    assert {error.code for error in lost} == {ErrorCode.CONFLICT}
    assert (await other.resolve(PROJECT, "python@1")).digest == won[0].digest
    await store.collect_garbage()
    assert (await other.resolve(PROJECT, "python@1")).digest == won[0].digest


async def test_many_changes_of_one_name_at_once_all_happen(
    store: LayerStore, other: LayerStore, archive: Path
) -> None:
    await asyncio.gather(
        *(put([store, other][number % 2], archive, str(number)) for number in range(12))
    )
    await asyncio.gather(
        *(
            [store, other][number % 2].tag(PROJECT, "python", f"tag-{number}", str(number))
            for number in range(12)
        )
    )
    listed = await store.list(PROJECT)
    assert sorted(int(layer.version) for layer in listed) == list(range(12))
    assert {layer.tags for layer in listed} == {(f"tag-{layer.version}",) for layer in listed}


async def test_a_cancelled_import_changes_nothing(store: LayerStore, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "large.tar", bytes(24 << 20))
    storing = asyncio.Event()
    task = asyncio.create_task(
        store.import_layer(
            PROJECT, "large", "1", archive, kind=LayerKind.BASE,
            progress=lambda step: storing.set() if step.stage in {"store", "hash"} else None,
        )
    )  # fmt: skip
    await storing.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await refused(store, "large@1", ErrorCode.NOT_FOUND)
    await store.collect_garbage()
    assert list(store.backend.staging.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tag", "version"), [("python", "a/b", "1"), ("../x", "a", "1"), ("python", "a", "*")]
)
async def test_a_malformed_tag_is_invalid(
    store: LayerStore, archive: Path, name: str, tag: str, version: str
) -> None:
    await put(store, archive)
    with pytest.raises(DsecError) as error:
        await store.tag(PROJECT, name, tag, version)
    assert error.value.code is ErrorCode.INVALID


async def test_no_node_collects_what_another_uses_from_a_shared_directory(
    archive: Path, tmp_path: Path
) -> None:
    clock = FakeClock()
    nodes = [DirectoryBackend(tmp_path / "shared", holder=name, clock=clock) for name in "ab"]
    mounts = Mounts()
    async with LayerStore(nodes[0]) as a, LayerStore(nodes[1]) as b:
        layer = await put(a, archive)
        holds = LayerHolds(mounts, 0, a)
        await holds.hold([(layer.digest, layer.image_path)])
        assert mounts.held == {layer.digest: layer.image_path}
        await b.remove(PROJECT, "python@1")
        assert await b.collect_garbage() == ()
        assert layer.image_path.exists()
        holds.release([layer.digest])
        await holds.close()
        assert await b.collect_garbage() == (layer.digest,)


async def test_what_a_dead_node_used_is_collected_after_an_hour(
    archive: Path, tmp_path: Path
) -> None:
    clock = FakeClock()
    nodes = [DirectoryBackend(tmp_path / "shared", holder=name, clock=clock) for name in "ab"]
    async with LayerStore(nodes[0]) as a, LayerStore(nodes[1]) as b:
        layer = await put(a, archive)
        holds = LayerHolds(Mounts(), 0, a)
        await holds.hold([(layer.digest, layer.image_path)])
        await b.remove(PROJECT, "python@1")
        await clock.advance(HOLD_EXPIRES_S - 60)
        assert await b.collect_garbage() == ()
        await holds.declare()
        await clock.advance(HOLD_EXPIRES_S - 60)
        assert await b.collect_garbage() == ()
        await clock.advance(120)
        assert await b.collect_garbage() == (layer.digest,)


async def test_a_layer_that_was_collected_before_it_could_be_held_is_refused_not_mounted(
    archive: Path, tmp_path: Path
) -> None:
    mounts = Mounts()
    async with LayerStore(tmp_path / "shared") as store:
        layer = await put(store, archive)
        await store.remove(PROJECT, "python@1")
        await store.collect_garbage()
        holds = LayerHolds(mounts, 0, store)
        with pytest.raises(DsecError) as error:
            await holds.hold([(layer.digest, layer.image_path)])
    assert error.value.code is ErrorCode.LAYER_ERROR
    assert mounts.held == {}
    assert holds.in_use == frozenset()


async def test_a_damaged_hold_stops_the_collection_until_its_node_writes_it_again(
    archive: Path, tmp_path: Path
) -> None:
    async with LayerStore(DirectoryBackend(tmp_path / "shared", holder="a")) as store:
        layer = await put(store, archive)
        await store.declare([layer.digest])
        await store.remove(PROJECT, "python@1")
        (tmp_path / "shared" / "holds" / "a.json").write_bytes(b"{")
        with pytest.raises(DsecError) as error:
            await store.collect_garbage()
        assert error.value.code is ErrorCode.LAYER_ERROR
        await store.declare([])
        assert await store.collect_garbage() == (layer.digest,)


async def test_a_remote_layer_in_use_is_not_evicted_and_comes_back_when_it_was(
    new_backend: NewBackend, tmp_path: Path
) -> None:
    """A directory has no cache: there it says only that holding works."""
    mounts = Mounts()
    archives = [write_archive(tmp_path / f"{n}.tar", bytes([n + 1]) * (3 << 20)) for n in range(3)]
    async with LayerStore(new_backend()) as maker:
        layers = [await put(maker, a, str(n)) for n, a in enumerate(archives)]
    held: list[LayerHolds] = []
    backend = new_backend(lambda: held[0].in_use, 7 << 20)
    async with LayerStore(backend) as store:
        held.append(LayerHolds(mounts, 0, store))
        (holds,) = held

        async def hold(layer: Layer) -> None:
            await holds.hold([(layer.digest, store.backend.path(layer.digest))])

        await hold(layers[0])
        await hold(layers[1])
        if isinstance(backend, ObjectBackend):
            with pytest.raises(DsecError) as error:
                await hold(layers[2])
            assert error.value.code is ErrorCode.EXHAUSTED
            assert layers[2].digest not in holds.in_use
        holds.release([layers[0].digest])
        await hold(layers[2])
        assert store.backend.is_ready(layers[1].digest)
        holds.release([layers[1].digest, layers[2].digest])
        await hold(layers[0])
        assert set(mounts.held) >= {layers[0].digest}
        holds.release([layers[0].digest])
        await holds.close()


class Mounts:
    """A kernel that opens what it is given, as the real one does."""

    def __init__(self) -> None:
        self.held: dict[str, Path] = {}

    async def hold_layer(self, digest: str, image_path: Path) -> None:
        assert image_path.stat().st_size  # noqa: ASYNC240  one stat
        self.held[digest] = image_path

    async def release_layer(self, digest: str) -> None:
        self.held.pop(digest, None)


async def test_garbage_is_collected_and_holds_are_renewed_by_the_clock(
    archive: Path, tmp_path: Path
) -> None:
    clock = FakeClock()
    backends = [DirectoryBackend(tmp_path / "shared", holder=name, clock=clock) for name in "ab"]
    async with LayerStore(backends[0]) as a, LayerStore(backends[1]) as b:
        used = await put(a, archive)
        unused = await put(a, write_archive(tmp_path / "b.tar", b"unused"), "2")
        holds = LayerHolds(Mounts(), 0, a)
        await holds.hold([(used.digest, used.image_path)])
        for version in ("1", "2"):
            await a.remove(PROJECT, f"python@{version}")
        upkeep = asyncio.create_task(LayerUpkeep(a, holds, clock, 3600.0).run())
        for _ in range(12):
            while not clock.sleeping:
                await asyncio.sleep(0.001)
            await clock.advance(900.0)
        async with asyncio.timeout(10):
            while unused.image_path.exists():
                await asyncio.sleep(0.01)
        # Three hours later the hold is still good: it was renewed.
        assert await b.collect_garbage() == ()
        assert used.image_path.exists()
        upkeep.cancel()
        await asyncio.wait({upkeep})
