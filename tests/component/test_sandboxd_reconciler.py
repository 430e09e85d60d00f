"""A running node removes what belongs to none of its sandboxes, and nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.sandbox import CreateSandbox
from sandboxd_node import BASE, NODE, node_for_tests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")

UNIFIED = next(
    root
    for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    if (root / "cgroup.procs").exists()
)
PIDS = Path("/sys/fs/cgroup/pids")
if not PIDS.is_dir():
    PIDS = UNIFIED


def mount_tmpfs(path: Path, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", *options, "test", path], check=True)


def unmount(path: Path) -> None:
    subprocess.run(["umount", path], check=True)


def removed(kind: str) -> float:
    name = "dsec_sandboxd_orphans_removed_total"
    return REGISTRY.get_sample_value(name, {"kind": kind}) or 0.0


async def until_gone(*paths: Path) -> None:
    async with asyncio.timeout(10):
        while any(os.path.lexists(path) for path in paths):  # noqa: ASYNC240  in memory
            await asyncio.sleep(0.02)


async def test_orphans_of_each_kind_go_and_what_others_have_stays(
    tmp_path: Path, layers: Path
) -> None:
    async with node_for_tests(tmp_path, layers, reconcile_interval_s=0.1) as node:
        created = await node.place()
        local = created.sandbox_id.partition(".")[2]
        run = Path(node.config.run_directory) / "s"
        before = {
            kind: removed(kind)
            for kind in ("run_directory", "mount", "upload", "cgroup", "process")
        }
        neighbours = [
            tmp_path / "run-of-another" / "s" / "theirs",
            UNIFIED / f"dsec-{NODE}-other" / "theirs",
        ]
        for directory in neighbours:
            directory.mkdir(parents=True)
        planted = [run / "ghost", run / "mounted", run / "file"]
        upload = node.config.state_path / "uploads" / "left"
        group = UNIFIED / f"dsec-{NODE}" / "ghost"
        try:
            (run / "ghost" / "deep").mkdir(parents=True)
            (run / "ghost" / "agent.sock").touch()
            (run / "mounted").mkdir()
            mount_tmpfs(run / "mounted")
            (run / "file").touch()
            upload.touch()
            # Whoever looks may find the directory empty, and take it away before somebody is in it.
            enter = f"until mkdir -p {group} && echo $$ > {group}/cgroup.procs; do :; done"
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", f"{enter} 2>/dev/null; exec sleep 1000"
            )
            assert await asyncio.wait_for(process.wait(), 30) == -9
            await until_gone(*planted, upload, group)
            assert sorted(path.name for path in run.iterdir()) == [local]
            assert all(directory.is_dir() for directory in neighbours)
            result = await node.exec(created.sandbox_id, "ls", "/run/dsec")
            assert result.stdout == b"agent.sock\n"
            for kind, count in before.items():
                assert removed(kind) > count, kind
        finally:
            for directory in reversed(neighbours):
                directory.rmdir()
            (UNIFIED / f"dsec-{NODE}-other").rmdir()


async def test_a_run_directory_without_room_refuses_and_recovers(
    tmp_path: Path, layers: Path
) -> None:
    (tmp_path / "run").mkdir()
    mount_tmpfs(tmp_path / "run", "-o", "size=64k,nr_inodes=64")
    try:
        async with node_for_tests(tmp_path, layers) as node:
            full = tmp_path / "run" / "s"
            fillers = []
            for number in range(1000):
                try:
                    (full.parent / f"f{number}").touch()
                except OSError:
                    break
                fillers.append(full.parent / f"f{number}")
            with pytest.raises(DsecError) as caught:
                await node.place()
            assert caught.value.code is ErrorCode.EXHAUSTED
            assert node.service.heartbeat().allocated.sandboxes == 0
            assert list(full.iterdir()) == []
            for filler in fillers:
                filler.unlink()
            created = await node.place()
            assert (await node.exec(created.sandbox_id, "echo", "fine")).stdout == b"fine\n"
    finally:
        unmount(tmp_path / "run")


async def test_a_state_directory_without_room_refuses_and_recovers(
    tmp_path: Path, layers: Path
) -> None:
    (tmp_path / "state").mkdir()
    mount_tmpfs(tmp_path / "state", "-o", "size=24m")
    try:
        async with node_for_tests(tmp_path, layers, disk_reserve_bytes=0) as node:
            kept = await node.place()
            filler = tmp_path / "state" / "filler"
            with filler.open("wb", buffering=0) as out:
                while True:
                    try:
                        out.write(b"\0" * 65536)
                    except OSError:
                        break
            outcomes: list[object] = []
            for _ in range(40):
                try:
                    outcomes.append(
                        await node.place(CreateSandbox(base=BASE, env={"A": "b" * 9000}))
                    )
                except DsecError as error:
                    outcomes.append(error)
            refused = [it for it in outcomes if isinstance(it, DsecError)]
            assert all(error.code is ErrorCode.UNAVAILABLE for error in refused), refused
            # Commands go on: nothing of them has to be kept on that disk.
            assert (await node.exec(kept.sandbox_id, "echo", "fine")).stdout == b"fine\n"
            filler.unlink()
            node.service._sandboxes.state.validate_state()
            await asyncio.sleep(1.1)  # the StateDB opens itself again at most once a second
            again = await node.place()
            assert (await node.exec(again.sandbox_id, "echo", "fine")).stdout == b"fine\n"
    finally:
        unmount(tmp_path / "state")


async def test_a_node_without_a_process_number_left_refuses_and_recovers(
    tmp_path: Path, layers: Path
) -> None:
    group = PIDS / f"dsec-{NODE}"
    async with node_for_tests(tmp_path, layers) as node:
        first = await node.place()
        limit = group / "pids.max"
        usual = limit.read_text()
        limit.write_text((group / "pids.current").read_text())
        try:
            with pytest.raises(DsecError) as caught:
                await node.exec(first.sandbox_id, "true")
            assert caught.value.code is ErrorCode.EXHAUSTED
        finally:
            limit.write_text(usual)
        again = await node.place()
        assert (await node.exec(again.sandbox_id, "echo", "fine")).stdout == b"fine\n"
        assert (await node.exec(first.sandbox_id, "echo", "fine")).stdout == b"fine\n"
