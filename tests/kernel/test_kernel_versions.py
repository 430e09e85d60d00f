"""Programs of another version: refused in words, never misread."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import SandboxIdentity
from dsec_sandboxd.kernel.linux import LinuxKernel
from dsec_sandboxd.kernel.protocol import CONTROL_PROTOCOL, SPAWNER_PROTOCOL, SPAWNER_REPLY_BYTES
from dsec_sandboxd.kernel.spawner import Spawner
from kernel_world import NODE, Layers, World, cgroups_left

#: Says its first packet as ``spawner.c`` does, and waits for the end of its socket.
OTHER_SPAWNER = """#!{python}
import socket, struct, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.send(struct.pack("=2IiIiI", 0, 0, 0, 0, 1, {number}).ljust({size}, b"\\0"))
channel.recv(1)
"""


@pytest.mark.parametrize(
    ("number", "size"),
    [(SPAWNER_PROTOCOL + 1, SPAWNER_REPLY_BYTES), (0, SPAWNER_REPLY_BYTES), (9, 64)],
)
async def test_a_spawner_of_another_version_is_refused_at_its_first_packet(
    tmp_path: Path, number: int, size: int
) -> None:
    program = tmp_path / "spawner"
    program.write_text(OTHER_SPAWNER.format(python=sys.executable, number=number, size=size))
    program.chmod(0o755)
    with pytest.raises(DsecError) as caught:
        await Spawner.start(program, tmp_path / "pid1")
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert "another version" in caught.value.message
    assert not caught.value.retryable


async def test_a_sandbox_whose_first_process_is_another_versions_ends_with_that_as_the_reason(
    layers: Layers, tmp_path: Path
) -> None:
    first = LinuxKernel(NODE)
    await first.start()
    known: dict[str, SandboxIdentity] = {}
    try:
        await first.hold_layer("base", layers.base)
        world = World(first, layers, tmp_path)
        for local in ("old", "new"):
            await world.create(local, layers=("base",))
            known[local] = first.identity(local)
    finally:
        await first.close(keep_sandboxes=True)
    assert known["old"].protocol == CONTROL_PROTOCOL
    known["old"] = dataclasses.replace(known["old"], protocol=CONTROL_PROTOCOL + 1)
    later = LinuxKernel(NODE)
    await later.start()
    try:
        lost = await later.adopt(known)
        assert lost.keys() == {"old"}
        assert f"speaks protocol {CONTROL_PROTOCOL + 1}" in lost["old"]
        assert await later.recover() == ["old"]
        assert await World(later, layers, tmp_path).say("echo fine", local="new") == "fine"
    finally:
        await later.close()
    assert cgroups_left() == []
