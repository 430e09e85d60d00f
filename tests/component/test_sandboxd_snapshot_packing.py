"""Packing of snapshots on one node: whose takes long holds up nobody else's."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from dsec_common.wire.sandbox import MIB
from snapshot_node import Asker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

#: In the place of mkfs.erofs: packs like it, but waits for ever where it finds /srv/slow.
HANGING = """#!/bin/sh
for last; do :; done
if [ -e "$last/srv/slow" ]; then
    mkfifo "$0.never"
    read line < "$0.never"
fi
exec {program} "$@"
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a program on the path that hangs; return where it is."""
    program = tmp_path / "bin" / "mkfs.erofs"
    program.parent.mkdir()
    program.write_text(HANGING.format(program=shutil.which("mkfs.erofs")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def running(program: Path) -> int:
    """Return how many processes run a program."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += os.fsencode(program) in entry.read_bytes().split(b"\0")[:2]
        except OSError:
            continue
    return found


async def count(program: Path, wanted: int) -> None:
    """Return once so many processes run a program."""
    async with asyncio.timeout(10):
        while await asyncio.to_thread(running, program) != wanted:
            await asyncio.sleep(0.05)


async def test_files_of_terabytes_of_holes_hold_up_nobodys_snapshots(ask: Asker) -> None:
    hoarder = (await ask.node.place()).sandbox_id
    neighbour = (await ask.node.place()).sandbox_id
    line = "mkdir /srv; for i in 1 2 3 4 5 6 7 8; do truncate -s 500G /srv/$i; done"
    await ask.shell(hoarder, line)
    await ask.shell(neighbour, "mkdir /srv; echo hi > /srv/x")
    taken = [await ask.take(hoarder) for _ in range(3)]
    assert (await ask.take(neighbour, wait_durable_s=20.0)).durable
    for snapshot in taken:
        info = await ask.inspect(snapshot.snapshot_id, wait_s=20.0)
        assert info.durable
        assert info.size_bytes < MIB
    layer = await ask.pack(taken[0].snapshot_id, "1")
    assert layer.size_bytes < MIB
    restored = await ask.restore(taken[0].snapshot_id)
    assert await ask.shell(restored, "stat -c %s /srv/8") == f"{500 << 30}\n"


async def test_a_snapshot_that_is_packed_for_ever_holds_up_no_other_sandboxes(
    ask: Asker, hanging: Path
) -> None:
    slow = (await ask.node.place()).sandbox_id
    await ask.shell(slow, "mkdir /srv; echo x > /srv/slow")
    waiting = [await ask.take(slow) for _ in range(3)]
    await count(hanging, 1)
    neighbour = (await ask.node.place()).sandbox_id
    assert (await ask.take(neighbour, wait_durable_s=10.0)).durable
    # Nothing goes on for a snapshot that is gone.
    for snapshot in reversed(waiting):
        await count(hanging, 1)
        await ask.drop(snapshot.snapshot_id)
    await count(hanging, 0)
