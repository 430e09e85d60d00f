"""Whatever step of a snapshot or fork the kernel refuses, nothing is left and all is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from dsec_common.errors import MAY_HAVE_HAPPENED, DsecError, ErrorCode
from dsec_sandboxd.kernel.recording import RecordingKernel
from dsec_sandboxd.snapshot_store import SnapshotStore
from refusals import refused
from sandboxd_node import NodeForTests, node_for_tests
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

TOLD = DsecError(ErrorCode.INTERNAL, "told to")


@pytest.fixture
def kernel() -> RecordingKernel:
    return RecordingKernel()


@pytest.fixture
async def node(
    tmp_path: Path, layers: Path, kernel: RecordingKernel
) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path, layers, kernel=kernel) as running:
        yield running


def store_of(node: NodeForTests) -> SnapshotStore:
    return node.service._snapshots.store


async def settled(node: NodeForTests) -> None:
    store = store_of(node)
    while store._work:
        await asyncio.wait(set(store._work))
    store.tree.validate()


async def test_a_copy_that_the_kernel_refuses_leaves_no_snapshot(
    node: NodeForTests, kernel: RecordingKernel
) -> None:
    ask = Asker(node)
    sandbox = (await node.place()).sandbox_id
    kernel.fail("snapshot", TOLD)
    assert (await refused(ask.take(sandbox))).message == "told to"
    assert await ask.list() == []
    assert store_of(node).room.memory_bytes == 0
    await ask.take(sandbox)
    assert len(await ask.list()) == 1


@pytest.mark.parametrize("method", ["hold_mount", "create"])
async def test_children_that_cannot_be_made_are_told_and_the_snapshot_goes(
    node: NodeForTests, kernel: RecordingKernel, method: str
) -> None:
    ask = Asker(node)
    sandbox = (await node.place()).sandbox_id
    for nth in range(1, 9):
        kernel.fail(method, TOLD, nth=nth)
    if method == "hold_mount":
        # Not even the first user of the snapshot can mount it.
        assert (await refused(ask.fork(sandbox, 3))).message == "told to"
    else:
        forked = await ask.fork(sandbox, 3)
        assert [child.error.message for child in forked.children if child.error] == ["told to"] * 3
    await settled(node)
    assert await ask.list() == []
    assert kernel.alive == [sandbox.partition(".")[2]]
    assert not [name for name in kernel.layers if name.startswith("snapshot:")]


async def test_one_child_that_cannot_be_made_costs_the_others_nothing(
    node: NodeForTests, kernel: RecordingKernel
) -> None:
    ask = Asker(node)
    sandbox = (await node.place()).sandbox_id
    kernel.fail("create", TOLD, nth=2)
    forked = await ask.fork(sandbox, 4)
    made = [child.created.sandbox_id for child in forked.children if child.created]
    assert len(made) == 3
    assert len(kernel.alive) == 4
    for child in made:
        await ask.delete(child)
    await settled(node)
    assert await ask.list() == []


async def test_a_rollback_whose_layers_cannot_be_mounted_changes_nothing(
    node: NodeForTests, kernel: RecordingKernel
) -> None:
    ask = Asker(node)
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    kernel.fail("hold_mount", TOLD)
    assert (await refused(ask.roll_back(sandbox, taken.snapshot_id))).message == "told to"
    assert await ask.shell(sandbox, "true") == ""
    await ask.roll_back(sandbox, taken.snapshot_id)
    assert kernel.names()[-2:] != ["create", "destroy"]
    await settled(node)


async def test_a_rollback_that_was_asked_for_again_is_told_what_became_of_the_first(
    node: NodeForTests, kernel: RecordingKernel
) -> None:
    ask = Asker(node)
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    kernel.fail("create", TOLD)
    kernel.fail("create", TOLD, nth=2)  # for an answer that goes out before it is asked for again
    going = kernel.hold("create")
    again = partial(ask.roll_back, sandbox, taken.snapshot_id, message_id="one")
    assert (await refused(again(timeout_s=0.2))).code is ErrorCode.TIMEOUT
    waiting = asyncio.ensure_future(again())
    going.set()
    error = await refused(waiting)
    assert (error.message, error.details[MAY_HAVE_HAPPENED]) == ("told to", False)
    # It was not done, so now it is, and once.
    kernel.fail_none()
    going.clear()
    assert (await refused(again(timeout_s=0.2))).code is ErrorCode.TIMEOUT
    waiting = asyncio.ensure_future(again())
    going.set()
    await waiting
    assert (await again()).duration_ms == 0
    assert kernel.names().count("replace") == 1
    await settled(node)


async def test_a_fold_that_the_kernel_refuses_leaves_no_layer(
    node: NodeForTests, kernel: RecordingKernel
) -> None:
    ask = Asker(node)
    sandbox = (await node.place()).sandbox_id
    taken = await ask.take(sandbox)
    kernel.fail("fold", TOLD)
    assert (await refused(ask.pack(taken.snapshot_id, "1"))).message == "told to"
    assert store_of(node).tree.references(store_of(node).find("default", taken.snapshot_id)) == 0
