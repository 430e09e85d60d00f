"""A node whose layers are in a directory, in NATS or in an S3 bucket; its layer verbs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.files import FILE_CHUNK_BYTES
from dsec_common.wire.layer import (
    ArchiveFormat,
    CommandDefaults,
    ImportLayer,
    InspectLayer,
    LayerChunkStored,
    LayerInfo,
    LayerKind,
    LayerList,
    LayerRemoved,
    ListLayers,
    RemoveLayer,
    TagLayer,
    UploadLayerChunk,
)
from dsec_common.wire.sandbox import CreateSandbox, DeleteSandbox, SandboxCreated, SandboxDeleted
from dsec_common.wire.snapshot import ForkSandbox, SandboxForked, SnapshotInfo, TakeSnapshot
from dsec_sandboxd.layers.nats_storage import NatsStorage
from dsec_sandboxd.layers.object_backend import ObjectBackend
from exec_client import Box, output
from layer_backends import BACKENDS, make_bucket, s3_server
from layer_builders import (
    Member,
    docker_archive_bytes,
    docker_save_bytes,
    file_member,
    link_member,
    member,
    minimal_base_tree,
    pack_directory,
    tar_bytes,
)
from refusals import refused
from sandboxd_node import NODE, NodeForTests, node_for_tests

R = TypeVar("R", bound=Message)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes and layers need root")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return pack_directory(minimal_base_tree(tmp_path_factory.mktemp("base") / "root"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", "id")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with s3_server() as address:
            yield address


@pytest.fixture(params=BACKENDS)
async def node(
    request: pytest.FixtureRequest, tmp_path: Path, endpoint: str
) -> AsyncIterator[NodeForTests]:
    url = "nats:dsec-layers"
    if request.param == "directory":
        url = f"dir:{tmp_path / 'elsewhere'}"
    elif request.param == "s3":
        url = f"s3://{make_bucket(endpoint)}/a?endpoint={endpoint}&region=us-east-1"
    async with node_for_tests(tmp_path, tmp_path / "unused", layers_backend=url) as running:
        yield running


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path, tmp_path / "store") as running:
        yield running


async def ask(node: NodeForTests, verb: str, message: Message, reply: type[R]) -> R:
    subject = subjects.layer("default", NODE, verb)
    return await node.project.request(subject, message, reply, timeout_s=30.0)


async def put(node: NodeForTests, content: bytes, name: str, **changes: Any) -> LayerInfo:
    upload_id = f"u{hashlib.sha256(content).hexdigest()[:20]}-{name.replace('.', '-')}"
    for offset in range(0, len(content), FILE_CHUNK_BYTES):
        piece = content[offset : offset + FILE_CHUNK_BYTES]
        message = UploadLayerChunk(upload_id=upload_id, offset=offset, data=piece)
        await ask(node, "upload", message, LayerChunkStored)
    facts: dict[str, Any] = {"kind": LayerKind.BASE, "version": "1"} | changes
    wanted = ImportLayer(
        upload_id=upload_id,
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        name=name,
        **facts,
    )
    return await ask(node, "import", wanted, LayerInfo)


async def said(node: NodeForTests, sandbox_id: str) -> bytes:
    result = await node.exec(sandbox_id, "cat", "/said")
    return bytes(result.stdout)


def saying(text: bytes) -> bytes:
    return tar_bytes([file_member("said", text)])


async def test_sandboxes_run_on_layers_wherever_they_are_and_keep_what_a_tag_meant(
    node: NodeForTests, base: bytes
) -> None:
    await put(node, base, "base", tags=("latest",))
    await put(node, saying(b"one"), "work", kind=LayerKind.WORKSPACE, tags=("latest",))
    wanted = CreateSandbox(base="base:latest", workspace="work:latest")
    first = (await node.place(wanted)).sandbox_id
    assert await said(node, first) == b"one"
    two = await put(node, saying(b"two"), "work", kind=LayerKind.WORKSPACE, version="2")
    tagged = await ask(node, "tag", TagLayer(name="work", tag="latest", version="2"), LayerInfo)
    assert (tagged.digest, tagged.tags) == (two.digest, ("latest",))
    second = (await node.place(wanted)).sandbox_id
    assert await said(node, second) == b"two"
    assert await said(node, first) == b"one"
    # What a sandbox stands on may lose its name, and its image, without the sandbox noticing.
    for reference in ("work@1", "work:latest", "work@2", "base:latest", "base@1"):
        await ask(node, "remove", RemoveLayer(reference=reference), LayerRemoved)
    assert await said(node, first) == b"one"
    assert await said(node, second) == b"two"
    gone = await refused(node.place(wanted))
    assert gone.code is ErrorCode.NOT_FOUND
    for sandbox in (first, second):
        await node.ask(sandbox, "delete", DeleteSandbox(), SandboxDeleted)


async def test_what_is_not_used_any_more_is_collected(node: NodeForTests, base: bytes) -> None:
    await put(node, base, "base")
    kept = await put(node, saying(b"kept"), "work", kind=LayerKind.WORKSPACE)
    store = node.service._layers.store
    await store.remove("default", "base@1")
    removed = await node.service._layers.upkeep.collect()
    assert len(removed) == 1
    assert kept.digest not in removed
    error = await refused(node.place(CreateSandbox(base="base@1")))
    assert error.code is ErrorCode.NOT_FOUND


async def test_layers_are_listed_by_page_name_kind_and_tag(plain: NodeForTests) -> None:
    for number in range(5):
        await put(plain, saying(b"%d" % number), f"app-{number}", kind=LayerKind.WORKSPACE)
    await put(plain, saying(b"x"), "other", kind=LayerKind.DATA, tags=("v1", "latest"))

    async def listed(**asked: Any) -> tuple[list[str], str]:
        reply = await ask(plain, "list", ListLayers(**asked), LayerList)
        return [layer.reference for layer in reply.layers], reply.next_after

    everything, more = await listed()
    assert (len(everything), more) == (6, "")
    seen: list[str] = []
    after = ""
    while True:
        page, after = await listed(limit=2, after=after)
        seen += page
        assert len(page) <= 2
        if not after:
            break
    assert seen == everything == sorted(everything)
    assert (await listed(name="app-*"))[0] == everything[:5]
    assert (await listed(name="app-3"))[0] == ["app-3@1"]
    assert (await listed(name="app"))[0] == []
    assert (await listed(kind=LayerKind.DATA))[0] == ["other@1"]
    assert (await listed(tag="latest"))[0] == ["other@1"]
    assert (await refused(ask(plain, "list", ListLayers(limit=0), LayerList))).code is (
        ErrorCode.INVALID
    )


async def test_an_inspected_layer_tells_where_it_came_from_and_what_it_meant(
    plain: NodeForTests,
) -> None:
    first = await put(plain, saying(b"one"), "work", kind=LayerKind.WORKSPACE)
    await put(plain, saying(b"two"), "work", kind=LayerKind.WORKSPACE, replace=True)
    found = await ask(plain, "inspect", InspectLayer(reference="work@1"), LayerInfo)
    assert found.source_digest == f"sha256:{hashlib.sha256(saying(b'two')).hexdigest()}"
    assert [before.digest for before in found.history] == [first.digest]


async def test_one_image_of_several_in_an_archive_is_chosen_by_its_tag(
    plain: NodeForTests,
) -> None:
    archive = docker_archive_bytes(
        {
            "registry.example/app:1": [saying(b"one")],
            "registry.example/app:2": [saying(b"one"), saying(b"two")],
        }
    )
    facts = {"kind": LayerKind.WORKSPACE, "format": ArchiveFormat.OCI}
    error = await refused(put(plain, archive, "app", **facts))
    assert error.code is ErrorCode.INVALID
    assert "registry.example/app:2" in error.message
    second = await put(plain, archive, "app", version="2", image="app:2", **facts)
    plain_two = await put(plain, saying(b"two"), "plain", kind=LayerKind.WORKSPACE)
    assert second.digest == plain_two.digest
    error = await refused(put(plain, archive, "app", image="app:3", **facts))
    assert error.code is ErrorCode.INVALID


async def test_what_an_image_says_of_commands_holds_where_nothing_else_is_said(
    node: NodeForTests, base: bytes
) -> None:
    config = {
        "Env": ["PATH=/opt/bin:/usr/bin:/bin", "WORD=image", "no name=x"],
        "WorkingDir": "/srv/app/",
        "User": "65534:users",
    }
    image = docker_save_bytes([base], config_of_commands=config)
    made = await put(node, image, "base", format=ArchiveFormat.AUTO)
    kept = CommandDefaults(
        env={"PATH": "/opt/bin:/usr/bin:/bin", "WORD": "image"}, cwd="/srv/app", user="65534"
    )
    assert made.defaults == kept
    found = await ask(node, "inspect", InspectLayer(reference="base@1"), LayerInfo)
    assert found.defaults == kept
    # The same content without them is something else.
    error = await refused(put(node, base, "base"))
    assert error.code is ErrorCode.CONFLICT

    async def told(created: SandboxCreated, **said: Any) -> list[str]:
        line = ("/bin/sh", "-c", "pwd; id -u; echo $PATH; echo $WORD $MORE")
        result = await node.exec(created.sandbox_id, *line, **said)
        box = Box(node, created.sandbox_id)
        started = await box.start(*line, **said)
        assert output(await box.events(started)) == result.stdout
        return bytes(result.stdout).decode().split("\n")[:-1]

    path = "/opt/bin:/usr/bin:/bin"
    plain = await node.place(CreateSandbox(base="base@1"))
    assert await told(plain) == ["/srv/app", "65534", path, "image"]
    said = await told(plain, cwd="/tmp", user="root", env={"WORD": "command"})
    assert said == ["/tmp", "0", path, "command"]
    other = CreateSandbox(base="base@1", cwd="/usr", user="root", env={"MORE": "more"})
    asked = await node.place(other)
    assert await told(asked) == ["/usr", "0", path, "image more"]
    # They are inherited.
    taken = await node.ask(asked.sandbox_id, "snapshot", TakeSnapshot(), SnapshotInfo)
    again = await node.place(CreateSandbox(base="", snapshot=taken.snapshot_id))
    assert await told(again) == ["/usr", "0", path, "image"]
    wanted = ForkSandbox(count=1, env={"MORE": "child"})
    forked = await node.ask(plain.sandbox_id, "fork", wanted, SandboxForked)
    child = forked.children[0].created
    assert child is not None
    assert await told(child) == ["/srv/app", "65534", path, "image child"]
    for wrong in (CreateSandbox(base="base@1", cwd="here"), CreateSandbox(base="base@1", user="?")):
        assert (await refused(node.place(wrong))).code is ErrorCode.INVALID


async def test_a_bad_tag_is_refused_before_anything_is_imported(plain: NodeForTests) -> None:
    error = await refused(put(plain, saying(b"x"), "work", tags=("ok", "not/ok")))
    assert error.code is ErrorCode.INVALID
    listed = await ask(plain, "list", ListLayers(), LayerList)
    assert listed.layers == ()


async def test_many_sandboxes_at_once_on_a_cold_node_fetch_each_layer_once(
    tmp_path: Path, base: bytes
) -> None:
    async with node_for_tests(
        tmp_path, tmp_path / "unused", layers_backend="nats:dsec-layers"
    ) as node:
        made = await put(node, base, "base")
        backend = node.service._layers.store.backend
        assert isinstance(backend, ObjectBackend)
        cache = backend.cache
        cache.drop(made.digest)
        placed = await asyncio.gather(
            *(node.place(CreateSandbox(base="base@1")) for _ in range(10))
        )
        assert cache.fetches == 1
        for sandbox in placed:
            await node.ask(sandbox.sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)


async def test_a_node_without_room_for_a_layer_says_so_and_makes_nothing(
    tmp_path: Path, base: bytes
) -> None:
    async with node_for_tests(
        tmp_path,
        tmp_path / "unused",
        layers_backend="nats:dsec-layers",
        layers_cache_bytes=1 << 20,
    ) as node:
        await put(node, base, "base")
        error = await refused(node.place(CreateSandbox(base="base@1")))
        assert error.code is ErrorCode.EXHAUSTED
        assert "layers_cache_bytes" in error.message


@pytest.mark.parametrize(
    "hostile",
    [
        [file_member("../escaped")],
        [link_member("d", "/"), file_member("d/etc/passwd")],
        [member("null", tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [file_member(".wh...", b"")],
    ],
)
async def test_a_hostile_layer_of_one_image_of_several_is_refused_and_the_others_are_not(
    plain: NodeForTests, hostile: list[Member]
) -> None:
    archive = docker_archive_bytes({"bad:1": [tar_bytes(hostile)], "good:1": [saying(b"good")]})
    facts = {"kind": LayerKind.WORKSPACE, "format": ArchiveFormat.OCI}
    error = await refused(put(plain, archive, "bad", image="bad:1", **facts))
    assert error.code is ErrorCode.LAYER_ERROR
    assert (await put(plain, archive, "good", image="good:1", **facts)).entries == 2


async def test_a_set_user_id_file_of_an_image_becomes_an_ordinary_one(
    plain: NodeForTests, base: bytes
) -> None:
    await put(plain, base, "base")
    layer = tar_bytes([file_member("opt/su", b"#!/bin/sh\n", mode=0o6755)])
    archive = docker_archive_bytes({"su:1": [layer], "other:1": [saying(b"x")]})
    facts = {"kind": LayerKind.WORKSPACE, "format": ArchiveFormat.OCI}
    await put(plain, archive, "su", image="su:1", **facts)
    sandbox = (await plain.place(CreateSandbox(base="base@1", workspace="su@1"))).sandbox_id
    result = await plain.exec(sandbox, "stat", "-c", "%a", "/opt/su")
    assert result.stdout == b"755\n"
    await plain.ask(sandbox, "delete", DeleteSandbox(), SandboxDeleted)


async def test_an_archive_that_names_one_tag_twice_does_not_choose_for_the_user(
    plain: NodeForTests,
) -> None:
    images = {"a/app:1": [saying(b"one")], "b/app:1": [saying(b"two")]}
    facts = {"kind": LayerKind.WORKSPACE, "format": ArchiveFormat.OCI}
    error = await refused(put(plain, docker_archive_bytes(images), "app", image="app:1", **facts))
    assert error.code is ErrorCode.INVALID
    assert "a/app:1" in error.message


async def test_a_layer_that_the_node_has_outlives_its_image_in_the_bucket(
    tmp_path: Path, base: bytes
) -> None:
    async with node_for_tests(
        tmp_path, tmp_path / "unused", layers_backend="nats:dsec-layers"
    ) as node:
        made = await put(node, base, "base")
        sandbox = (await node.place(CreateSandbox(base="base@1"))).sandbox_id
        backend = node.service._layers.store.backend
        assert isinstance(backend, ObjectBackend)
        storage = backend._storage
        assert isinstance(storage, NatsStorage)
        away = ObjectBackend(
            NatsStorage(node.other, "dsec-layers"), tmp_path / "away", cache_bytes=1 << 30
        )
        # No project's connection reaches the store.
        with pytest.raises(DsecError):
            await away.open()
        await storage.delete_image(made.digest.removeprefix("sha256:"))
        again = (await node.place(CreateSandbox(base="base@1"))).sandbox_id
        for each in (sandbox, again):
            assert (await node.exec(each, "/bin/true")).exit_code == 0
            await node.ask(each, "delete", DeleteSandbox(), SandboxDeleted)
