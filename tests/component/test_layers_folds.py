"""A node whose sandboxes name many layers: what they see, and what is mounted for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    InspectSandbox,
    SandboxDeleted,
    SandboxInfo,
)
from dsec_sandboxd.layers.store import LayerStore
from sandboxd_node import BASE, NODE, NodeForTests, build_layers, node_for_tests
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes and layers need root")

NAMED = 64


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with many small toolkits: each has a file of its own and one that all bring."""
    directory = tmp_path_factory.mktemp("layers")
    build_layers(directory)
    layers, trees = directory / "store", directory / "toolkits"

    async def build() -> None:
        async with LayerStore(layers) as store:
            for number in range(NAMED):
                tree = trees / str(number)
                (tree / "opt" / "many").mkdir(parents=True)
                (tree / "opt" / "many" / f"{number}").write_text(f"{number}\n")
                (tree / "opt" / "last").write_text(f"{number}\n")
                await store.import_layer(
                    "default", f"small{number}", "1", tree, kind=LayerKind.TOOLKIT
                )

    asyncio.run(build())
    return layers


@pytest.fixture
async def node(tmp_path: Path, store: Path) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path, store) as running:
        yield running


def naming(count: int) -> CreateSandbox:
    """Return a request for a sandbox of ``count`` layers."""
    return CreateSandbox(base=BASE, toolkits=tuple(f"small{n}@1" for n in range(count - 1)))


def folds(node: NodeForTests) -> list[Path]:
    """Return the folds that the node has."""
    return list((node.config.state_path / "folds" / "images").iterdir())


async def seen(node: NodeForTests, sandbox_id: str) -> tuple[int, str]:
    """Return how many of the layers' files a sandbox sees, and whose common file."""
    result = await node.exec(sandbox_id, "sh", "-c", "set -- /opt/many/*; echo $#; cat /opt/last")
    assert result.exit_code == 0, result
    count, last = result.stdout.decode().split()
    return int(count), last


async def delete(node: NodeForTests, *sandbox_ids: str) -> None:
    for sandbox_id in sandbox_ids:
        await node.ask(sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)


async def test_a_sandbox_of_sixty_four_layers_has_all_their_files(node: NodeForTests) -> None:
    created = await node.place(naming(NAMED))
    assert await seen(node, created.sandbox_id) == (NAMED - 1, str(NAMED - 2))
    info = await node.ask(created.sandbox_id, "inspect", InspectSandbox(), SandboxInfo)
    assert info.layers == (BASE, *naming(NAMED).toolkits)
    assert len(folds(node)) == 4
    await delete(node, created.sandbox_id)


async def test_more_layers_than_may_be_named_are_refused(node: NodeForTests) -> None:
    with pytest.raises(DsecError) as caught:
        await node.place(naming(NAMED + 1))
    assert caught.value.code is ErrorCode.INVALID
    assert folds(node) == []


async def test_later_sandboxes_of_many_small_layers_share_a_fold(node: NodeForTests) -> None:
    first = await node.place(naming(12))
    async with asyncio.timeout(20.0):
        while not folds(node):
            await node.exec(first.sandbox_id, "true")
    second = await node.place(naming(12))
    assert await seen(node, first.sandbox_id) == await seen(node, second.sandbox_id) == (11, "10")
    # In another order it is another fold, and another one's file is on top.
    turned = naming(12).toolkits[::-1]
    third = await node.place(CreateSandbox(base=BASE, toolkits=turned))
    assert await seen(node, third.sandbox_id) == (11, "0")
    await delete(node, first.sandbox_id, second.sandbox_id, third.sandbox_id)


async def test_snapshots_and_forks_of_a_sandbox_of_many_layers_work(node: NodeForTests) -> None:
    asker = Asker(node)
    created = await node.place(naming(40))
    sandbox_id = created.sandbox_id
    await asker.shell(sandbox_id, "rm /opt/many/3; echo mine > /opt/last")
    snapshot = await asker.take(sandbox_id)
    for _ in range(7):  # beyond the longest chain
        sandbox_id = (
            await node.place(CreateSandbox(base="", snapshot=snapshot.snapshot_id))
        ).sandbox_id
        assert await seen(node, sandbox_id) == (38, "mine")
        snapshot = await asker.take(sandbox_id)
    await asker.roll_back(sandbox_id, snapshot.snapshot_id)
    assert await seen(node, sandbox_id) == (38, "mine")
    forked = await asker.fork(sandbox_id, 2)
    for child in forked.children:
        assert child.created is not None, child
        assert await seen(node, child.created.sandbox_id) == (38, "mine")


async def test_sandboxes_on_folds_are_taken_over_and_can_be_put_back(
    tmp_path: Path, store: Path
) -> None:
    async with node_for_tests(tmp_path, store, stop_keeps_sandboxes=True) as node:
        asker = Asker(node)
        created = await node.place(naming(20))
        snapshot = await asker.take(created.sandbox_id)
        await asker.node.exec(created.sandbox_id, "sh", "-c", "echo mine > /opt/last")
        images = sorted(path.name for path in folds(node))
        assert await node.stop_service() == 0
        node.config = msgspec.structs.replace(node.config, stop_keeps_sandboxes=False)
        await node.start_service()
        assert sorted(path.name for path in folds(node)) == images
        assert await seen(node, created.sandbox_id) == (19, "mine")
        await asker.roll_back(created.sandbox_id, snapshot.snapshot_id)
        assert await seen(node, created.sandbox_id) == (19, "18")
        again = await node.place(naming(20))
        assert await seen(node, again.sandbox_id) == (19, "18")
        assert sorted(path.name for path in folds(node)) == images
        await delete(node, created.sandbox_id, again.sandbox_id)


async def test_a_fold_that_vanished_is_made_again(node: NodeForTests) -> None:
    first = await node.place(naming(20))
    await delete(node, first.sandbox_id)
    for path in folds(node):
        path.unlink()
    again = await node.place(naming(20))
    assert await seen(node, again.sandbox_id) == (19, "18")
    assert NODE in again.sandbox_id
    await delete(node, again.sandbox_id)
