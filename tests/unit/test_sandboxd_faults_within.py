"""Every call of the kernel fails in turn, in pauses, directories, watches, copies and snapshots."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsec_common.wire.files import (
    CopyFile,
    DeleteFile,
    ListDirectory,
    MakeDirectory,
    MoveFile,
    ReadFile,
    ReadTree,
    WatchFiles,
    WriteTree,
)
from dsec_common.wire.life import PauseSandbox, ResumeSandbox
from dsec_common.wire.sandbox import CreateSandbox
from dsec_common.wire.snapshot import (
    DeleteSnapshot,
    ForkSandbox,
    ListSnapshots,
    RollBack,
    SandboxForked,
    SnapshotInfo,
    SnapshotList,
    TakeSnapshot,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.life_doors import LifeDoors
from dsec_sandboxd.snapshot_service import SnapshotService
from fault_world import FAILURES, attempt, delete_until_gone, fail_each_call
from node_world import NODE, World


def archive() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo("d/x")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    return data.getvalue()


ARCHIVE = archive()


async def live_with_files(world: World) -> None:
    """Be a user who brings a directory, works with it, and pauses in between."""
    await attempt(world.place("s1"))
    life, files, guard = LifeDoors(world.sandboxes), world.files, world.gate.guard
    work: list[tuple[Any, Any]] = [
        (life.pause, PauseSandbox()),
        (life.resume, ResumeSandbox()),
        (life.pause, PauseSandbox()),
        # What comes next has it run again.
        (guard(files.write_tree), WriteTree(path="/tmp/t", upload_id="u", data=ARCHIVE)),
        (guard(files.make_directory), MakeDirectory(path="/tmp/new")),
        (guard(files.watch_files), WatchFiles(path="/tmp/t", watch_id="w")),
        (guard(files.copy_file), CopyFile(path="/tmp/t/d/x", target="/tmp/y")),
        (guard(files.move_file), MoveFile(path="/tmp/y", target="/tmp/z")),
        (guard(files.list_directory), ListDirectory(path="/tmp/t/d")),
        (guard(files.read_file), ReadFile(path="/tmp/z")),
        (guard(files.read_tree), ReadTree(path="/tmp/t", download_id="d")),
        (guard(files.delete_file), DeleteFile(path="/tmp/t", recursive=True)),
        (life.pause, PauseSandbox()),
    ]
    for door, message in work:
        await attempt(door(world.ask("s1", message)))
        world.state.validate_state()
    await delete_until_gone(world, "s1")


class WorldWithSnapshots(World):
    """A node that takes snapshots, and keeps them in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        super().__init__(directory)

    def build(self) -> None:
        super().build()
        layers: Any = self.layers
        self.snapshots = SnapshotService(
            SandboxdConfig(node=NODE, snapshots_directory=str(self._directory / "snapshots")),
            self.sandboxes,
            self.maker,
            kernel=self.kernel,
            records=self.store,
            holds=self.holds,
            layers=layers,
        )
        self.snapshots.open()

    async def stop(self) -> None:
        await self.sandboxes.evacuate("the test is over")
        await self.snapshots.close()
        assert self.snapshots.store.room.memory_bytes == 0
        await super().stop()


async def live_with_snapshots(world: WorldWithSnapshots) -> None:
    """Be a user who takes snapshots, goes back to one, and makes sandboxes of them."""
    doors, forks = world.snapshots.doors, world.snapshots.forks
    await attempt(world.place("s1"))
    taken = await attempt(doors.take(world.ask("s1", TakeSnapshot(name="first"))))
    if isinstance(taken, SnapshotInfo):
        back = RollBack(snapshot_id=taken.snapshot_id)
        await attempt(doors.roll_back(world.ask("s1", back)))
        restored = CreateSandbox(base="", snapshot=taken.snapshot_id)
        await attempt(world.place("s2", request=restored))
    await attempt(doors.take(world.ask("s1", TakeSnapshot(name="second"))))
    world.state.validate_state()
    forked = await attempt(forks.fork(world.ask("s1", ForkSandbox(count=2))))
    made = ["s1", "s2"]
    if isinstance(forked, SandboxForked):
        children = [child.created for child in forked.children if child.created is not None]
        made += [child.sandbox_id.partition(".")[2] for child in children]
    listed = await doors.list(world.ask("s1", ListSnapshots()))
    assert isinstance(listed, SnapshotList)
    for snapshot in listed.snapshots:
        await doors.delete(world.ask("s1", DeleteSnapshot(snapshot_id=snapshot.snapshot_id)))
    for local in made:
        await delete_until_gone(world, local)
    world.state.validate_state()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_whichever_call_fails_in_pauses_and_directories_nothing_is_left(
    tmp_path: Path, failure: BaseException
) -> None:
    reached = await fail_each_call(tmp_path, failure, live_with_files)
    assert {"pause", "resume", "unpack_tree", "send", "finish", "make_directory"} <= reached
    assert {"watch", "next_change", "copy_path", "rename", "list_directory"} <= reached
    assert {"open_file", "pack_tree", "receive", "remove_tree"} <= reached


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_whichever_call_fails_in_snapshots_and_forks_nothing_is_left(
    tmp_path: Path, failure: BaseException
) -> None:
    reached = await fail_each_call(tmp_path, failure, live_with_snapshots, WorldWithSnapshots)
    assert {"snapshot", "replace", "hold_mount", "create", "destroy", "release_layer"} <= reached
