"""The layer store with real images, mounted to see what a sandbox would see."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import ArchiveFormat, LayerKind
from dsec_sandboxd.layers import ImportedLayer, ImportLimits, ImportProgress, LayerStore
from layer_builders import (
    NANOSECONDS,
    docker_save_bytes,
    file_member,
    look,
    mounted,
    pack_directory,
    tar_bytes,
    write_oci_layout,
)

PROJECT = "default"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LayerStore]:
    async with LayerStore(tmp_path / "store") as opened:
        yield opened
        assert list((tmp_path / "store" / "staging").iterdir()) == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with one of each thing that a layer may hold."""
    root = tmp_path / "source"
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "tool").write_bytes(b"#!/bin/sh\n")
    (root / "usr" / "bin" / "tool").chmod(0o755)
    os.link(root / "usr" / "bin" / "tool", root / "usr" / "bin" / "other-name")
    (root / "bin").symlink_to("/usr/bin")
    (root / "large").write_bytes(os.urandom(300_000))
    (root / "empty").touch(0o600)
    os.chown(root / "empty", 1000, 65535)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    os.mkfifo(root / "pipe")
    for number, path in enumerate([root, *sorted(root.rglob("*"))]):
        moment = (1_600_000_000 + number) * NANOSECONDS + 123_456_789
        os.utime(path, ns=(moment, moment), follow_symlinks=False)
    return root


async def import_base(
    store: LayerStore, source: Path, reference: str = "base@1", *, replace: bool = False
) -> ImportedLayer:
    name, _, version = reference.partition("@")
    return await store.import_layer(
        PROJECT, name, version, source, kind=LayerKind.BASE, replace=replace
    )


async def refused(awaitable: object, code: ErrorCode) -> str:
    with pytest.raises(DsecError) as error:
        await awaitable  # type: ignore[misc]
    assert error.value.code is code
    return error.value.message


async def test_a_directory_becomes_an_image_that_holds_exactly_it(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    imported = await import_base(store, source)
    layer = await store.resolve(PROJECT, "base@1")
    assert layer == imported.layer
    assert imported.warnings == ()
    assert layer.reference == "base@1"
    assert layer.size_bytes == layer.image_path.stat().st_size
    assert layer.entries == len(look(source)) - 1  # one file has two names
    with mounted(layer.image_path, tmp_path / "mount") as mount:
        assert look(mount) == look(source)


async def test_a_tar_archive_and_the_directory_it_was_made_of_give_equal_trees(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "source.tar"
    archive.write_bytes(pack_directory(source))
    layer = (await import_base(store, archive)).layer
    with mounted(layer.image_path, tmp_path / "mount") as mount:
        kept, expected = look(mount), look(source)
    assert set(kept) == set(expected)
    for name, entry in expected.items():
        assert (kept[name].mode, kept[name].uid, kept[name].gid, kept[name].content) == (
            entry.mode,
            entry.uid,
            entry.gid,
            entry.content,
        )
        assert kept[name].names == entry.names


async def test_what_a_sandbox_cannot_have_is_changed_and_said(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    (source / "large").chmod(0o6755)
    os.chown(source / "bin", 100_000, 5, follow_symlinks=False)
    os.setxattr(source / "large", "trusted.overlay.opaque", b"y")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
    imported = await import_base(store, source)
    assert len(imported.warnings) == 3
    with mounted(imported.layer.image_path, tmp_path / "mount") as mount:
        seen = look(mount)
        assert os.listxattr(mount / "large") == []
    assert "socket" not in seen
    assert seen["large"].mode == "-rwxr-xr-x"
    assert (seen["bin"].uid, seen["bin"].gid) == (0, 5)


async def test_a_device_node_in_a_directory_is_refused(store: LayerStore, source: Path) -> None:
    os.mknod(source / "null", 0o20666, os.makedev(1, 3))
    message = await refused(import_base(store, source), ErrorCode.LAYER_ERROR)
    assert "'null' is a device node" in message
    assert await store.list(PROJECT) == ()


async def test_equal_content_gives_an_equal_image_in_whatever_order_it_was_made(
    store: LayerStore, tmp_path: Path
) -> None:
    digests = set()
    names = [f"file-{number}" for number in range(200)]
    for attempt, order in enumerate([names, names[::-1]]):
        source = tmp_path / f"source{attempt}"
        source.mkdir()
        for name in order:
            (source / name).write_text(name * 100)
            os.utime(source / name, (0, 1_000))
        os.utime(source, (0, 2_000))
        digests.add((await import_base(store, source)).layer.digest)
    assert len(digests) == 1


async def test_an_image_layout_and_a_docker_archive_are_found_out(
    store: LayerStore, tmp_path: Path
) -> None:
    layers = [
        tar_bytes([file_member("a", b"1"), file_member("b", b"1")]),
        tar_bytes([file_member(".wh.a", b""), file_member("c", b"2")]),
    ]
    layout = tmp_path / "layout"
    digest = write_oci_layout(layout, layers)
    (tmp_path / "layout.tar").write_bytes(pack_directory(layout))
    (tmp_path / "saved.tar").write_bytes(docker_save_bytes(layers))
    of_directory, of_archive, of_docker = [
        (await import_base(store, tmp_path / name)).layer
        for name in ("layout", "layout.tar", "saved.tar")
    ]
    assert of_directory.digest == of_archive.digest == of_docker.digest
    assert of_directory.source_digest == digest
    with mounted(of_archive.image_path, tmp_path / "mount") as mount:
        assert {path.name for path in mount.iterdir()} == {"b", "c"}


async def test_an_archive_said_to_be_plain_is_taken_as_it_is(
    store: LayerStore, tmp_path: Path
) -> None:
    archive = tmp_path / "saved.tar"
    archive.write_bytes(docker_save_bytes([tar_bytes([file_member("a")])]))
    imported = await store.import_layer(
        PROJECT, "x", "1", archive, kind=LayerKind.TOOLKIT, archive_format=ArchiveFormat.TAR
    )
    with mounted(imported.layer.image_path, tmp_path / "mount") as mount:
        assert (mount / "manifest.json").is_file()
    plain = tmp_path / "plain.tar"
    plain.write_bytes(tar_bytes([file_member("a")]))
    await refused(
        store.import_layer(
            PROJECT, "y", "1", plain, kind=LayerKind.BASE, archive_format=ArchiveFormat.OCI
        ),
        ErrorCode.LAYER_ERROR,
    )


async def test_a_reference_means_the_same_until_it_is_replaced(
    store: LayerStore, source: Path
) -> None:
    first = (await import_base(store, source)).layer
    version = store.references_version
    assert (await import_base(store, source)).layer == first
    assert store.references_version == version
    (source / "empty").write_text("not any more")
    message = await refused(import_base(store, source), ErrorCode.CONFLICT)
    assert first.digest in message
    assert (await store.resolve(PROJECT, "base@1")) == first
    second = (await import_base(store, source, replace=True)).layer
    assert second.digest != first.digest
    assert (await store.resolve(PROJECT, "base@1")) == second
    assert store.references_version != version
    assert first.image_path.exists()


async def test_another_kind_under_the_same_reference_is_a_conflict(
    store: LayerStore, source: Path
) -> None:
    await import_base(store, source)
    message = await refused(
        store.import_layer(PROJECT, "base", "1", source, kind=LayerKind.TOOLKIT),
        ErrorCode.CONFLICT,
    )
    assert "the kind base" in message


async def test_projects_share_images_but_not_references(store: LayerStore, source: Path) -> None:
    mine = (await import_base(store, source)).layer
    await refused(store.resolve("other", "base@1"), ErrorCode.NOT_FOUND)
    await refused(store.resolve("other", mine.digest), ErrorCode.NOT_FOUND)
    theirs = await store.import_layer("other", "mine", "2", source, kind=LayerKind.WORKSPACE)
    assert theirs.layer.image_path == mine.image_path
    assert await store.resolve("other", mine.digest) == theirs.layer
    assert [layer.reference for layer in await store.list("other")] == ["mine@2"]
    assert [layer.reference for layer in await store.list(PROJECT)] == ["base@1"]


async def test_an_unknown_reference_names_what_may_have_been_meant(
    store: LayerStore, source: Path
) -> None:
    message = await refused(store.resolve(PROJECT, "python@3.11"), ErrorCode.NOT_FOUND)
    assert "import it first" in message
    await import_base(store, source, "python@3.11")
    await import_base(store, source, "python@3.12")
    message = await refused(store.resolve(PROJECT, "pyhton@3.11"), ErrorCode.NOT_FOUND)
    assert "did you mean python@3.11 or python@3.12?" in message
    message = await refused(store.resolve(PROJECT, "python@3.10"), ErrorCode.NOT_FOUND)
    assert "python in: 3.11, 3.12" in message
    message = await refused(store.resolve(PROJECT, "python"), ErrorCode.INVALID)
    assert "3.11, 3.12" in message


@pytest.mark.parametrize("project", ["", "a.b", "*", ">", "..", "a b", "x" * 300])
async def test_a_project_that_could_mean_something_else_is_invalid(
    store: LayerStore, source: Path, project: str
) -> None:
    await refused(store.resolve(project, "base@1"), ErrorCode.INVALID)
    await refused(store.list(project), ErrorCode.INVALID)
    await refused(store.remove(project, "base@1"), ErrorCode.INVALID)
    await refused(
        store.import_layer(project, "base", "1", source, kind=LayerKind.BASE), ErrorCode.INVALID
    )


async def test_a_removed_reference_is_gone_and_its_image_stays_while_it_is_needed(
    store: LayerStore, source: Path
) -> None:
    layer = (await import_base(store, source)).layer
    await import_base(store, source, "base@2")
    await refused(store.remove(PROJECT, layer.digest), ErrorCode.INVALID)
    await store.remove(PROJECT, "base@1")
    await refused(store.resolve(PROJECT, "base@1"), ErrorCode.NOT_FOUND)
    await refused(store.remove(PROJECT, "base@1"), ErrorCode.NOT_FOUND)
    assert await store.collect_garbage() == ()
    await store.remove(PROJECT, "base@2")
    assert await store.collect_garbage(in_use=[layer.digest]) == ()
    assert await store.collect_garbage() == (layer.digest,)
    assert not layer.image_path.exists()
    assert (await import_base(store, source)).layer.digest == layer.digest


@pytest.mark.parametrize("damage", ["flipped", "cut off", "not EROFS", "gone", "no record"])
async def test_a_damaged_image_is_never_handed_out_and_a_new_import_repairs_it(
    store: LayerStore, source: Path, tmp_path: Path, damage: str
) -> None:
    layer = (await import_base(store, source)).layer
    path = layer.image_path
    content = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut off":
        os.truncate(path, len(content) // 2)
    elif damage == "not EROFS":
        path.write_bytes(bytes(len(content)))
    elif damage == "gone":
        path.unlink()
    else:
        path.with_suffix(".json").unlink()
    message = await refused(store.resolve(PROJECT, "base@1"), ErrorCode.LAYER_ERROR)
    assert "import" in message
    async with LayerStore(tmp_path / "store") as other:
        await refused(other.resolve(PROJECT, "base@1"), ErrorCode.LAYER_ERROR)
        assert [listed.reference for listed in await other.list(PROJECT)] == ["base@1"]
    # Without its record a layer cannot even be compared with.
    repaired = await import_base(store, source, replace=damage == "no record")
    assert repaired.layer.digest == layer.digest
    assert (await store.resolve(PROJECT, "base@1")).digest == layer.digest
    assert path.read_bytes() == content


async def test_a_damaged_reference_is_typed_and_can_be_replaced(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    layer = (await import_base(store, source)).layer
    (tmp_path / "store" / "references" / PROJECT / "base@1").write_text("{")
    await refused(store.resolve(PROJECT, "base@1"), ErrorCode.LAYER_ERROR)
    await refused(store.collect_garbage(), ErrorCode.LAYER_ERROR)
    (tmp_path / "store" / "staging" / "0123").mkdir()
    (tmp_path / "store" / "staging" / "0123" / "intent").write_text(layer.digest)
    (tmp_path / "store" / "staging" / "0123.lock").touch()
    assert await store.open() == 1
    assert layer.image_path.exists()
    await import_base(store, source, replace=True)
    await store.resolve(PROJECT, "base@1")


async def test_an_image_is_read_once_and_again_only_when_it_is_another_file(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    layer = (await import_base(store, source)).layer
    async with LayerStore(tmp_path / "store") as other:
        await other.resolve(PROJECT, "base@1")
        before = threading.active_count()
        for _ in range(100):
            await other.resolve(PROJECT, "base@1")
        assert threading.active_count() == before
        copy = layer.image_path.with_suffix(".copy")
        copy.write_bytes(layer.image_path.read_bytes())
        copy.replace(layer.image_path)
        await other.resolve(PROJECT, "base@1")


async def test_nodes_that_share_a_directory_see_one_store(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    async with LayerStore(tmp_path / "store") as other, LayerStore(tmp_path / "third") as third:
        assert other.store_id == store.store_id != third.store_id
        await import_base(store, source)
        assert (await other.resolve(PROJECT, "base@1")).reference == "base@1"
        assert other.references_version == store.references_version


async def test_many_nodes_that_make_a_store_together_agree_on_its_id(tmp_path: Path) -> None:
    stores = [LayerStore(tmp_path / "store") for _ in range(8)]
    await asyncio.gather(*(one.open() for one in stores))
    assert len({one.store_id for one in stores}) == 1
    await asyncio.gather(*(one.close() for one in stores))


async def test_the_same_content_may_be_imported_by_many_at_once(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    async with LayerStore(tmp_path / "store") as other:
        imports = [
            import_base(one, source, f"base@{version}")
            for version in (1, 2)
            for one in (store, other) * 2
        ]
        layers = [imported.layer for imported in await asyncio.gather(*imports)]
    assert len({layer.digest for layer in layers}) == 1
    assert [layer.reference for layer in await store.list(PROJECT)] == ["base@1", "base@2"]


async def test_of_two_imports_with_other_content_one_wins_and_one_conflicts(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.tar"
    other.write_bytes(tar_bytes([file_member("a")]))
    outcomes = await asyncio.gather(
        import_base(store, source), import_base(store, other), return_exceptions=True
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, DsecError)]
    assert [error.code for error in errors] == [ErrorCode.CONFLICT]


async def test_processes_that_import_at_once_do_not_disturb_each_other(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from dsec_common.wire.layer import LayerKind
from dsec_sandboxd.layers import LayerStore
async def main(directory, source, name):
    async with LayerStore(Path(directory)) as store:
        for version in ("1", "2", "3"):
            await store.import_layer(
                "default", name, version, Path(source), kind=LayerKind.BASE, replace=True)
            await store.remove("default", f"{name}@{version}")
            await store.collect_garbage()
            await store.import_layer("default", name, version, Path(source), kind=LayerKind.BASE)
            await store.resolve("default", f"{name}@{version}")
asyncio.run(main(*sys.argv[1:]))
"""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, tmp_path / "store", source, f"name{number}"
        )
        for number in range(3)
    ]
    assert [await process.wait() for process in processes] == [0, 0, 0]
    assert len(await store.list(PROJECT)) == 9


async def test_progress_is_reported_on_the_loop_stage_by_stage(
    store: LayerStore, source: Path
) -> None:
    steps: list[ImportProgress] = []
    (source / "huge").write_bytes(bytes(20 << 20))

    def note(step: ImportProgress) -> None:
        asyncio.get_running_loop()
        steps.append(step)

    await store.import_layer(PROJECT, "x", "1", source, kind=LayerKind.BASE, progress=note)
    stages = list(dict.fromkeys(step.stage for step in steps))
    assert [stage for stage in stages if stage != "build"] == ["read", "hash", "publish"]
    reading = [step for step in steps if step.stage == "read"]
    assert len(reading) >= 4
    assert all(step.done_bytes <= step.total_bytes for step in reading)


async def test_a_cancelled_import_leaves_nothing(
    store: LayerStore, source: Path, tmp_path: Path
) -> None:
    (source / "huge").write_bytes(bytes(64 << 20))
    started = asyncio.Event()

    def note(step: ImportProgress) -> None:
        if step.done_bytes:
            started.set()

    task = asyncio.create_task(
        store.import_layer(PROJECT, "x", "1", source, kind=LayerKind.BASE, progress=note)
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "store" / "staging").iterdir()) == []
    assert await store.list(PROJECT) == ()
    assert await store.collect_garbage() == ()


async def test_a_source_that_is_not_there_is_not_found(store: LayerStore, tmp_path: Path) -> None:
    await refused(import_base(store, tmp_path / "missing"), ErrorCode.NOT_FOUND)
    await refused(import_base(store, Path("/dev/null")), ErrorCode.INVALID)


async def test_a_full_store_is_said_to_be_full(source: Path, tmp_path: Path) -> None:
    limits = ImportLimits(bytes_max=100_000)
    async with LayerStore(tmp_path / "store", limits=limits) as store:
        message = await refused(import_base(store, source), ErrorCode.EXHAUSTED)
        assert "100000 bytes" in message
        assert list((tmp_path / "store" / "staging").iterdir()) == []


async def test_a_file_that_cannot_be_made_into_a_store_is_typed(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    store = LayerStore(tmp_path / "store")
    with pytest.raises(DsecError):
        await store.open()
    await store.close()
