"""Copies and moves inside real sandboxes through the SDK, those of layers among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.channel import Channel
from dsec.sandbox import Sandbox
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.files import FileKind
from dsec_common.wire.sandbox import CreateSandbox
from dsec_sandboxd.file_copies import COPIES_PER_SANDBOX
from refusals import refused
from sandboxd_node import BASE, TOOLKIT, NodeForTests, node_for_tests


@pytest.fixture
async def sandbox(tmp_path: Path, layers: Path) -> AsyncIterator[Sandbox]:
    async with node_for_tests(tmp_path / "node", layers) as node:
        yield await sandbox_on(node)


async def sandbox_on(node: NodeForTests) -> Sandbox:
    created = await node.place(CreateSandbox(base=BASE, toolkits=(TOOLKIT,)))
    return Sandbox(Channel(node.project, "default"), created.sandbox_id, created)


async def leftovers(sandbox: Sandbox) -> str:
    result = await sandbox.exec("ls -d /.dsec-copy-* /*/.dsec-copy-* 2>/dev/null; true")
    return result.stdout_text


async def test_a_directory_of_a_layer_is_moved(sandbox: Sandbox) -> None:
    await sandbox.move("/opt/tools", "/opt/moved")
    assert await sandbox.read_text("/opt/moved/hello") == "hello from the toolkit\n"
    assert [entry.path for entry in await sandbox.list_directory("/opt")] == ["moved"]
    # It is in the writable layer now, so the next move is one step.
    await sandbox.move("/opt/moved", "/opt/again", replace=False)
    await sandbox.move("/opt/again", "/dev/shm/there")
    assert await sandbox.read_text("/dev/shm/there/hello") == "hello from the toolkit\n"
    assert await leftovers(sandbox) == ""


async def test_a_move_of_a_layers_directory_replaces_what_a_move_replaces(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir /opt/empty /opt/full; : > /opt/full/x; : > /opt/file", check=True)
    error = await refused(sandbox.move("/opt/tools", "/opt/full"))
    assert error.code is ErrorCode.CONFLICT
    error = await refused(sandbox.move("/opt/tools", "/opt/empty", replace=False))
    assert error.code is ErrorCode.CONFLICT
    assert (await refused(sandbox.move("/opt/tools", "/opt/file"))).code is ErrorCode.NOT_FOUND
    assert (await refused(sandbox.move("/opt", "/opt/tools/in"))).code is ErrorCode.INVALID
    assert (await refused(sandbox.move("/opt", "/nowhere/x"))).code is ErrorCode.NOT_FOUND
    error = await refused(sandbox.move("/opt/tools", "/opt/mine", user="1000"))
    assert error.details["reason"] == "permission_denied"
    assert await sandbox.read_text("/opt/tools/hello") == "hello from the toolkit\n"
    assert await leftovers(sandbox) == ""
    await sandbox.move("/opt/tools", "/opt/empty")
    assert await sandbox.read_text("/opt/empty/hello") == "hello from the toolkit\n"


async def test_files_and_directories_are_copied(sandbox: Sandbox) -> None:
    assert await sandbox.copy("/opt/tools", "/opt/copy") == 2
    assert await sandbox.copy("/opt/tools/hello", "/opt/copy/second") == 1
    await sandbox.write_file("/opt/tools/hello", "changed")
    for name in ("hello", "second"):
        assert await sandbox.read_text(f"/opt/copy/{name}") == "hello from the toolkit\n"
    await sandbox.copy("/opt/tools/hello", "/opt/copy/second")
    assert await sandbox.read_text("/opt/copy/second") == "changed"
    error = await refused(sandbox.copy("/opt/tools/hello", "/opt/copy/second", replace=False))
    assert error.code is ErrorCode.CONFLICT
    assert (await refused(sandbox.copy("/opt/none", "/opt/x"))).details["reason"] == "not_found"
    assert (await refused(sandbox.copy("/opt", "/opt/in"))).code is ErrorCode.INVALID
    for target in ("/", "/opt/..", "relative"):
        assert (await refused(sandbox.copy("/opt/tools", target))).code is ErrorCode.INVALID
    assert await leftovers(sandbox) == ""


async def test_what_is_in_the_way_is_named_and_a_slash_means_into(sandbox: Sandbox) -> None:
    await sandbox.exec(
        "mkdir -p /data/keep /data/full; : > /data/full/x; : > /data/one", check=True
    )
    for moved in (sandbox.move, sandbox.copy):
        for source, target in (("/data/one", "/data/keep"), ("/data/keep", "/data/full")):
            error = await refused(moved(source, target))
            assert error.message.startswith(f"'{target}'"), error
            assert error.details["path"] == target
    await sandbox.copy("/data/one", "/data/keep/")
    await sandbox.move("/data/keep", "/data/full/")
    assert (await sandbox.stat("/data/full/keep/one")).kind is FileKind.FILE
    assert (await refused(sandbox.move("/data/one", "/data/none/"))).code is ErrorCode.NOT_FOUND
    assert await leftovers(sandbox) == ""


async def test_a_full_disk_leaves_nothing_of_a_copy(sandbox: Sandbox) -> None:
    await sandbox.exec("head -c 100000000 /dev/zero | tr '\\0' x > /opt/large", check=True)
    error = await refused(sandbox.copy("/opt/large", "/opt/again"))
    assert (error.code, error.details["reason"]) == (ErrorCode.EXHAUSTED, "no_space")
    assert await leftovers(sandbox) == ""
    await sandbox.write_file("/opt/room", b"x" * 1_000_000)


async def test_many_copies_at_once_are_done_or_told(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir /opt/t; cd /opt/t; for i in 1 2 3 4 5 6 7 8; do : > $i; done")
    outcomes = await asyncio.gather(
        *(sandbox.copy("/opt/t", f"/opt/copy-{n}") for n in range(3 * COPIES_PER_SANDBOX)),
        return_exceptions=True,
    )
    done = [outcome for outcome in outcomes if outcome == 9]
    told = [outcome for outcome in outcomes if isinstance(outcome, DsecError)]
    assert len(done) >= COPIES_PER_SANDBOX
    assert len(done) + len(told) == len(outcomes)
    assert {error.code for error in told} <= {ErrorCode.EXHAUSTED}
    assert len([e for e in await sandbox.list_directory("/opt") if "copy" in e.path]) == len(done)
