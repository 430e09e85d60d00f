"""Read-only data in layers: its pages are in memory once, and only those that are read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.memory import (
    charged_bytes,
    forget,
    processes_named,
    resident_bytes,
    shares_of_mapping,
)
from benchmarks.shared import PROGRAM, READS_PART, write_random
from dsec_common.errors import DsecError
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    ExecCommand,
    ExecResult,
    Limits,
    SandboxDeleted,
)
from dsec_sandboxd.layers import LayerStore
from layer_builders import python_base_tree
from sandboxd_node import NodeForTests, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes and layers need root")

SANDBOXES = 100
FILE_BYTES = 256 << 20
MIB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    python_base_tree(directory / "base")
    (directory / "data" / "weights").mkdir(parents=True)
    write_random(directory / "data" / "weights" / "model.bin", FILE_BYTES)

    async def build() -> None:
        async with LayerStore(directory / "store") as store:
            for name, kind in (("base", LayerKind.BASE), ("data", LayerKind.DATA)):
                await store.import_layer("default", name, "1", directory / name, kind=kind)

    asyncio.run(build())
    return directory / "store"


async def image_of(store: Path) -> Path:
    async with LayerStore(store) as opened:
        return (await opened.inspect("default", "data@1")).image_path


class Mapper:
    """A sandbox in which one process has read what it was told to, and waits."""

    def __init__(self, node: NodeForTests, sandbox_id: str, program: str, marker: str) -> None:
        self._node = node
        self._id = sandbox_id
        command = ExecCommand(argv=("python3", "-c", program, marker))
        self._running = asyncio.create_task(
            node.ask(sandbox_id, "exec", command, ExecResult, timeout_s=120.0)
        )

    async def said(self) -> int:
        while True:
            assert not self._running.done(), self._running.result()
            try:
                result = await self._node.exec(self._id, "cat", "/tmp/mapped")
            except DsecError:
                result = None
            if result is not None and result.stdout:
                return int(result.stdout)
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        await self._node.ask(self._id, "delete", DeleteSandbox(), SandboxDeleted)
        await asyncio.gather(self._running, return_exceptions=True)


async def mapper(node: NodeForTests, program: str, marker: str) -> Mapper:
    wanted = CreateSandbox(base="base@1", toolkits=("data@1",), limits=Limits(cpus=0.5))
    return Mapper(node, (await node.place(wanted)).sandbox_id, program, marker)


@pytest.mark.timeout(240)
async def test_a_hundred_sandboxes_that_map_one_file_have_its_pages_once(
    tmp_path: Path, store: Path
) -> None:
    marker = f"dsec-test-shared-{os.getpid()}"
    image = await image_of(store)
    async with node_for_tests(tmp_path, store) as node:
        forget(image)
        mappers = []
        for _ in range(SANDBOXES):
            mappers.append(await mapper(node, PROGRAM, marker))
            await mappers[-1].said()
        processes = processes_named(marker)
        resident, proportional = shares_of_mapping(processes, "/weights/model.bin")
        charges = sorted(charged_bytes(pid) for pid in processes)
        held_beside = resident_bytes(image)
        await asyncio.gather(*(one.end() for one in mappers))
    assert len(processes) == SANDBOXES
    assert resident >= 0.95 * SANDBOXES * FILE_BYTES
    assert proportional <= 1.05 * FILE_BYTES
    # The first to read the file is charged with it, up to its own limit; nobody else is.
    assert charges[SANDBOXES // 2] <= 32 * MIB
    assert charges[-2] <= FILE_BYTES // 2
    # The kernel may be too old to read past the image's own cache; here it is not.
    assert held_beside <= FILE_BYTES // 16


async def test_only_what_is_read_of_a_layer_is_fetched_from_its_image(
    tmp_path: Path, store: Path
) -> None:
    marker = f"dsec-test-part-{os.getpid()}"
    image = await image_of(store)
    async with node_for_tests(tmp_path, store) as node:
        forget(image)
        one = await mapper(node, READS_PART, marker)
        read = await one.said()
        (pid,) = processes_named(marker)
        held = resident_bytes(Path(f"/proc/{pid}/root/weights/model.bin"))
        beside = resident_bytes(image)
        await one.end()
    assert 0.04 * FILE_BYTES <= read <= 0.05 * FILE_BYTES
    assert read <= held + beside <= 1.25 * read
