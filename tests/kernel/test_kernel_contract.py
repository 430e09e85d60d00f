"""What both kernels promise: the real one, and the recording one that the service's tests use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.file_ports import FileKind
from dsec_sandboxd.kernel.interface import (
    CommandResult,
    CommandSpec,
    EndCause,
    Kernel,
    OpenMode,
    SandboxSpec,
    Stream,
)
from dsec_sandboxd.kernel.linux import LinuxKernel
from dsec_sandboxd.kernel.recording import RecordingKernel
from kernel_world import MIB, NODE, Layers

SPEC = SandboxSpec(
    local="a",
    layers=("base",),
    memory_bytes=64 * MIB,
    cpus=1.0,
    pids=32,
    disk_bytes=8 * MIB,
    inodes=1000,
)
ECHO = CommandSpec(argv=("/bin/echo", "hello"))


@pytest.fixture(params=["linux", "recording"])
async def kernel(request: pytest.FixtureRequest, layers: Layers) -> AsyncIterator[Kernel]:
    """A started kernel that holds the base layer."""
    made: Kernel
    if request.param == "linux":
        made = LinuxKernel(NODE)
    else:
        made = RecordingKernel()
        made.script(
            "/bin/echo", CommandResult(exit_code=0, signal=None, stdout=b"hello\n", stderr=b"")
        )
    await made.start()
    try:
        await made.hold_layer("base", layers.base)
        yield made
    finally:
        await made.close()


async def code_of(work: object) -> ErrorCode:
    with pytest.raises(DsecError) as caught:
        await work  # type: ignore[misc]  # any awaitable of a failing call
    return caught.value.code


async def test_the_life_of_a_sandbox(kernel: Kernel) -> None:
    assert await kernel.recover() == []
    await kernel.create(SPEC)
    pieces: list[tuple[Stream, bytes]] = []
    result = await kernel.exec("a", ECHO, lambda stream, data: pieces.append((stream, data)))
    assert (result.exit_code, result.stdout) == (0, b"hello\n")
    assert pieces == [(Stream.STDOUT, b"hello\n")]
    assert (await kernel.usage("a")).memory_bytes > 0
    await kernel.destroy("a")
    await kernel.destroy("a")
    assert await code_of(kernel.exec("a", ECHO)) is ErrorCode.NOT_FOUND
    await kernel.create(SPEC)


async def test_refusals(kernel: Kernel) -> None:
    await kernel.create(SPEC)
    assert await code_of(kernel.create(SPEC)) is ErrorCode.CONFLICT
    await kernel.destroy("a")
    await kernel.release_layer("base")
    await kernel.release_layer("base")
    assert await code_of(kernel.create(SPEC)) is ErrorCode.LAYER_ERROR
    for work in (
        kernel.exec("b", ECHO),
        kernel.stat("b", "/"),
        kernel.open_file("b", "/x", OpenMode.READ),
        kernel.usage("b"),
    ):
        assert await code_of(work) is ErrorCode.NOT_FOUND


async def test_files(kernel: Kernel) -> None:
    await kernel.create(SPEC)
    descriptor = await kernel.open_file("a", "/tmp/file", OpenMode.CREATE, permissions=0o600)
    os.write(descriptor, b"text")
    os.close(descriptor)
    stat = await kernel.stat("a", "/tmp/file")
    assert (stat.kind, stat.size_bytes, stat.mode) == (FileKind.FILE, 4, 0o600)
    create = kernel.open_file("a", "/tmp/file", OpenMode.CREATE)
    assert await code_of(create) is ErrorCode.CONFLICT
    assert await code_of(kernel.open_file("a", "/tmp", OpenMode.READ)) is ErrorCode.INVALID
    assert await code_of(kernel.open_file("a", "/no", OpenMode.READ)) is ErrorCode.NOT_FOUND
    await kernel.make_directory("a", "/tmp/one/two", parents=True)
    await kernel.rename("a", "/tmp/file", "/tmp/one/moved")
    names = {entry.name: entry.kind for entry in await kernel.list_directory("a", "/tmp/one")}
    assert names == {"two": FileKind.DIRECTORY, "moved": FileKind.FILE}
    descriptor = await kernel.open_file("a", "/tmp/one/moved", OpenMode.READ)
    assert os.read(descriptor, 100) == b"text"
    os.close(descriptor)
    await kernel.unlink("a", "/tmp/one/moved")
    assert await code_of(kernel.unlink("a", "/tmp/one/moved")) is ErrorCode.NOT_FOUND


async def test_a_command_runs_alone_in_a_paused_sandbox_and_in_no_other(kernel: Kernel) -> None:
    await kernel.create(SPEC)
    assert await code_of(kernel.run_alone("a", ECHO)) is ErrorCode.UNAVAILABLE
    await kernel.pause("a")
    assert (await kernel.run_alone("a", ECHO)).stdout == b"hello\n"
    await kernel.resume("a")
    assert (await kernel.exec("a", ECHO)).stdout == b"hello\n"
    assert await code_of(kernel.run_alone("b", ECHO)) is ErrorCode.NOT_FOUND


async def test_closing_ends_the_stream_of_ends(kernel: Kernel) -> None:
    await kernel.create(SPEC)
    await kernel.close()
    await kernel.close()
    assert [event async for event in kernel.ended()] == []


async def test_the_recording_kernel_does_as_told(layers: Layers) -> None:
    kernel = RecordingKernel(leftovers=("old",))
    await kernel.start()
    assert await kernel.recover() == ["old"]
    await kernel.hold_layer("base", layers.base)
    kernel.fail("create", DsecError(ErrorCode.INTERNAL, "told to"), nth=2)
    await kernel.create(SPEC)
    await kernel.destroy("a")
    assert await code_of(kernel.create(SPEC)) is ErrorCode.INTERNAL
    await kernel.create(SPEC)
    kernel.script("/bin/echo", DsecError(ErrorCode.NOT_FOUND, "no such command"))
    assert await code_of(kernel.exec("a", ECHO)) is ErrorCode.NOT_FOUND
    gate = kernel.hold("exec")
    waiting = asyncio.ensure_future(kernel.exec("a", ECHO))
    await asyncio.sleep(0)
    kernel.end("a", EndCause.OOM)
    gate.set()
    assert await code_of(waiting) is ErrorCode.UNAVAILABLE
    event = await anext(kernel.ended())
    assert (event.local, event.cause) == ("a", EndCause.OOM)
    assert kernel.alive == []
    assert kernel.names()[-3:] == ["create", "exec", "exec"]
    await kernel.close()


async def test_copies_of_writable_layers(kernel: Kernel) -> None:
    await kernel.create(SPEC)
    copy = await kernel.snapshot("a", size_bytes=MIB, inodes=100)
    assert copy.inodes > 0
    await kernel.hold_mount("copy", copy.mount_fd)
    await kernel.hold_mount("copy", copy.mount_fd)
    os.close(copy.mount_fd)
    child = replace(SPEC, local="b", layers=("base", "copy"), on_snapshot=True)
    await kernel.create(child)
    assert (await kernel.exec("b", ECHO)).exit_code == 0
    folded = await kernel.fold(("copy",), size_bytes=MIB, inodes=100)
    os.close(folded.mount_fd)
    await kernel.release_layer("copy")
    assert await code_of(kernel.create(replace(child, local="c"))) is ErrorCode.LAYER_ERROR
    missing = kernel.snapshot("nobody", size_bytes=MIB, inodes=100)
    assert await code_of(missing) is ErrorCode.NOT_FOUND
