"""Files of real sandboxes through the SDK: trees, moves, removals, watches, verified downloads."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec import Sandbox
from dsec.channel import Channel
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.files import (
    FILE_CHUNK_BYTES,
    DirectoryListing,
    FileChange,
    FileChunk,
    FileEvents,
    FileKind,
    ListDirectory,
    ReadFile,
    ReadTree,
    TreeChunk,
    TreeWritten,
    WatchFiles,
    WriteTree,
)
from dsec_common.wire.sandbox import CreateSandbox, Limits
from refusals import refused
from sandboxd_node import BASE, NodeForTests, node_for_tests

MIB = 1 << 20


@pytest.fixture
async def node(tmp_path: Path, layers: Path) -> AsyncIterator[NodeForTests]:
    async with node_for_tests(tmp_path / "node", layers) as made:
        yield made


async def sandbox_on(node: NodeForTests, **limits: int) -> Sandbox:
    values: dict[str, Any] = {"disk_bytes": 128 * MIB, "memory_bytes": 512 * MIB, "inodes": 65_536}
    room = Limits(**values | limits)
    created = await node.place(CreateSandbox(base=BASE, limits=room))
    return Sandbox(Channel(node.project, "default"), created.sandbox_id, created)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough


def picture(directory: Path) -> dict[str, tuple[str, int, bytes | str]]:
    """Return what a tree holds: kinds, modes and contents."""
    found: dict[str, tuple[str, int, bytes | str]] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[name] = ("link", 0, str(path.readlink()))
        elif path.is_dir():
            found[name] = ("directory", mode, "")
        else:
            found[name] = ("file", mode, path.read_bytes())
    return found


async def test_a_file_that_is_written_over_keeps_its_mode_unless_one_is_given(
    node: NodeForTests, tmp_path: Path
) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.write_file("/work/new", "x")
    await sandbox.write_file("/work/run.sh", "exit 1", mode=0o755)
    await sandbox.exec("ln -s run.sh /work/link; chown 7:8 /work/run.sh", check=True)
    await sandbox.write_file("/work/link", "exit 2")
    (tmp_path / "local").write_text("exit 3\n")
    (tmp_path / "local").chmod(0o640)
    await sandbox.upload(tmp_path / "local", "/work/other")
    assert (await sandbox.exec("/work/run.sh")).exit_code == 2
    await sandbox.upload(tmp_path / "local", "/work/run.sh")
    assert (await sandbox.exec("/work/run.sh")).exit_code == 3
    found = {info.path: info for info in await sandbox.list_directory("/work")}
    assert {name: info.mode for name, info in found.items()} == {
        "link": 0o777,
        "new": 0o644,
        "other": 0o640,
        "run.sh": 0o755,
    }
    assert (found["run.sh"].user_id, found["run.sh"].group_id) == (7, 8)
    await sandbox.write_file("/work/run.sh", "exit 4", mode=0o600)
    assert (await sandbox.stat("/work/run.sh")).mode == 0o600


async def test_a_directory_goes_in_and_comes_back_the_same(
    node: NodeForTests, tmp_path: Path
) -> None:
    sandbox = await sandbox_on(node)
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "deep" / ("n" * 200)).mkdir(parents=True)
    (source / "deep" / ("n" * 200) / "file").write_bytes(os.urandom(1000))
    (source / "script").write_text("#!/bin/sh\n")
    (source / "script").chmod(0o750)
    (source / "big").write_bytes(os.urandom(3 * MIB + 17))
    (source / "nothing").touch()
    (source / "link").symlink_to("../../somewhere/else")
    os.link(source / "script", source / "zz-second-name")
    os.mkfifo(source / "pipe")
    (source / "closed").mkdir()
    (source / "closed" / "file").write_text("x")
    (source / "closed").chmod(0o555)
    assert await sandbox.upload(source, "/work/tree") == 6
    assert (await sandbox.exec("stat -c %h /work/tree/script")).stdout == b"2\n"
    target = tmp_path / "target"
    assert await sandbox.download("/work/tree", target) == 6
    (source / "pipe").unlink()
    assert picture(target) == picture(source)
    assert (source / "script").stat().st_mtime == pytest.approx(
        (target / "script").stat().st_mtime, abs=1.1
    )
    assert sorted(os.listdir(tmp_path)) == ["node", "source", "target"]  # noqa: PTH208


async def test_a_download_adds_to_a_directory_that_is_there(
    node: NodeForTests, tmp_path: Path
) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.exec("mkdir -p /t/sub /t/new; echo new > /t/file; echo b > /t/sub/b", check=True)
    target = tmp_path / "target"
    (target / "sub").mkdir(parents=True)
    (target / "sub" / "a").write_text("a")
    (target / "file").write_text("old")
    assert await sandbox.download("/t", target) == 2
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert names == ["file", "new", "sub", "sub/a", "sub/b"]
    assert (target / "file").read_text() == "new\n"


async def test_a_download_never_writes_through_a_link(node: NodeForTests, tmp_path: Path) -> None:
    sandbox = await sandbox_on(node)
    outside = tmp_path / "outside"
    outside.mkdir()
    await sandbox.exec(f"mkdir -p /t/sub; echo x > /t/sub/file; ln -s {outside} /t/out", check=True)
    target = tmp_path / "target"
    target.mkdir()
    (target / "sub").symlink_to(outside)
    error = await refused(sandbox.download("/t", target))
    assert error.code is ErrorCode.INVALID
    (target / "sub").unlink()
    await sandbox.download("/t", target)
    assert (target / "out").readlink() == outside
    assert os.listdir(outside) == []  # noqa: PTH208  as above


async def test_sparse_and_large_files_arrive_whole(node: NodeForTests, tmp_path: Path) -> None:
    sandbox = await sandbox_on(node)
    source = tmp_path / "sparse"
    with source.open("wb") as file:
        file.write(b"head")
        file.seek(200 * MIB)
        file.write(b"tail")
        file.truncate(201 * MIB)
    await sandbox.upload(source, "/tmp/sparse")
    said = (await sandbox.exec("stat -c '%s %b' /tmp/sparse", check=True)).stdout.split()
    assert int(said[0]) == 201 * MIB
    assert int(said[1]) * 512 < 2 * MIB
    back = tmp_path / "back"
    await sandbox.download("/tmp/sparse", back)
    assert (
        hashlib.sha256(back.read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()
    )


async def test_moving_removing_and_looking(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.exec("mkdir -p /t/a/b; echo 1 > /t/one; ln -s one /t/link", check=True)
    await sandbox.move("/t/one", "/t/a/b/one")
    assert (await refused(sandbox.move("/t/one", "/t/two"))).details["reason"] == "not_found"
    await sandbox.write_file("/t/two", "2")
    error = await refused(sandbox.move("/t/two", "/t/a/b/one", replace=False))
    assert error.code is ErrorCode.CONFLICT
    error = await refused(sandbox.move("/t/two", "/root/two", user="1000"))
    assert error.details["reason"] == "permission_denied"
    error = await refused(sandbox.move("/t/two", "relative"))
    assert error.details["reason"] == "invalid_path"
    await sandbox.move("/t/a", "/t/moved")
    assert await sandbox.read_file("/t/moved/b/one") == b"1\n"
    link = await sandbox.stat("/t/link")
    assert (link.kind, link.link_target, link.user_id) == (FileKind.SYMLINK, "one", 0)
    error = await refused(sandbox.remove("/t/moved"))
    assert error.code is ErrorCode.CONFLICT
    assert await sandbox.remove("/t/moved", recursive=True) == 3
    assert await sandbox.remove("/t/link") == 1
    assert (await refused(sandbox.remove("/t/link"))).code is ErrorCode.NOT_FOUND
    await sandbox.make_directory("/t/dir", parents=False)
    error = await refused(sandbox.make_directory("/t/dir", parents=False))
    assert error.code is ErrorCode.CONFLICT
    assert [entry.path for entry in await sandbox.list_directory("/t")] == ["dir", "two"]


async def test_more_names_than_fit_a_page_are_all_listed(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.exec(
        "mkdir /t; cd /t; i=0; while [ $i -lt 2500 ]; do : > f$i; i=$((i+1)); done;"
        " : > \"$(printf 'a\\377b')\"",
        check=True,
    )
    entries = await sandbox.list_directory("/t")
    assert len({entry.path for entry in entries}) == 2501
    assert entries[0].path == "a\ufffdb"
    for cursor in ("!", "AA==", "YQ="):
        error = await refused(
            node.ask(
                sandbox.id,
                "list_directory",
                ListDirectory(path="/t", cursor=cursor),
                DirectoryListing,
            )
        )
        assert error.code is ErrorCode.INVALID


async def test_a_file_that_changes_while_it_is_downloaded_is_a_conflict(
    node: NodeForTests,
) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.write_file("/t", os.urandom(4 * FILE_CHUNK_BYTES))

    def ask(offset: int, *, final: bool = False, download_id: str = "d1") -> Any:
        message = ReadFile(path="/t", offset=offset, download_id=download_id, final=final)
        return node.ask(sandbox.id, "read_file", message, FileChunk)

    await ask(0)
    await sandbox.exec("truncate -s -1 /t", check=True)
    assert (await refused(ask(FILE_CHUNK_BYTES))).code is ErrorCode.CONFLICT
    assert (await refused(ask(2 * FILE_CHUNK_BYTES))).code is ErrorCode.CONFLICT
    await sandbox.exec("echo xx >> /t", check=True)
    # A file that takes its place by a rename is another one: what was opened is read on.
    await ask(0, download_id="d2")
    await sandbox.write_file("/t", b"another")
    for index in (3, 1, 2):
        await ask(index * FILE_CHUNK_BYTES, download_id="d2")
    await ask(4 * FILE_CHUNK_BYTES, download_id="d2")
    verdict = await ask(0, final=True, download_id="d2")
    assert verdict.size_bytes == 4 * FILE_CHUNK_BYTES + 2
    # Without having read it all there is no hash.
    await sandbox.write_file("/t", b"x" * 2 * FILE_CHUNK_BYTES)
    await ask(0, download_id="d3")
    assert (await refused(ask(0, final=True, download_id="d3"))).code is ErrorCode.INVALID


async def test_a_file_that_grows_while_it_is_downloaded_is_as_long_as_it_was(
    node: NodeForTests, tmp_path: Path
) -> None:
    sandbox = await sandbox_on(node)
    data = os.urandom(3 * FILE_CHUNK_BYTES + 5)

    def ask(offset: int, download_id: str, *, final: bool = False) -> Any:
        message = ReadFile(path="/log", offset=offset, download_id=download_id, final=final)
        return node.ask(sandbox.id, "read_file", message, FileChunk)

    async def all_of(download_id: str, line: str) -> Any:
        await sandbox.write_file("/log", data)
        pieces = [await ask(0, download_id)]
        await sandbox.exec(line, check=True)
        offsets = range(FILE_CHUNK_BYTES, len(data), FILE_CHUNK_BYTES)
        pieces += [await ask(offset, download_id) for offset in offsets]
        assert len(b"".join(piece.data for piece in pieces)) == len(data)
        assert {(piece.size_bytes, piece.version) for piece in pieces} == {
            (len(data), pieces[0].version)
        }
        assert [piece.end_of_file for piece in pieces] == [False, False, False, True]
        return await ask(0, download_id, final=True)

    verdict = await all_of("d1", "echo more >> /log")
    assert (verdict.size_bytes, verdict.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (await all_of("d2", "touch /log")).sha256 == verdict.sha256
    # What was read has changed, too, and only the end of the download can tell.
    changed = "printf x | dd of=/log conv=notrunc status=none"
    for number, after in enumerate(("", "; echo more >> /log")):
        error = await refused(all_of(f"d3{number}", changed + after))
        assert error.code is ErrorCode.CONFLICT
    await sandbox.make_directory("/logs")
    line = "echo a line of a log"
    writer = await sandbox.start(f"while {line} >> /log && {line} >> /logs/log; do :; done")
    async with writer:
        found = await sandbox.read_file("/log")
        await sandbox.download("/log", tmp_path / "log")
        await sandbox.download("/logs", tmp_path / "logs")
    logged = (tmp_path / "logs" / "log").read_bytes()
    assert logged == (b"a line of a log\n" * (len(logged) // 16 + 1))[: len(logged)]
    assert found[1 : len(data)] == data[1:]
    assert (tmp_path / "log").stat().st_size >= len(found) > len(data)


async def test_pieces_of_a_tree_may_come_twice_and_in_any_order(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    stream = io.BytesIO()
    content = os.urandom(5 * FILE_CHUNK_BYTES)
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("file")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    data = stream.getvalue()

    def send(index: int, **fields: Any) -> Any:
        offset = index * FILE_CHUNK_BYTES
        values: dict[str, Any] = {"upload_id": "t1", "final": False} | fields
        data_of = data[offset : offset + FILE_CHUNK_BYTES]
        message = WriteTree(path="/in", data=data_of, offset=offset, **values)
        return node.ask(sandbox.id, "write_tree", message, TreeWritten)

    await asyncio.gather(*(send(index) for index in (4, 0, 2, 1, 3, 1, 0)))
    digest = hashlib.sha256(data).hexdigest()
    done = await send(5, final=True, size_bytes=len(data), sha256=digest)
    assert (done.complete, done.entries, done.content_bytes) == (True, 1, len(content))
    assert await sandbox.read_file("/in/file") == content
    await send(0, upload_id="t2")
    error = await refused(send(1, upload_id="t2", final=True, sha256="00"))
    assert error.code is ErrorCode.INVALID
    assert (await refused(send(2, upload_id="t2"))).code is ErrorCode.INVALID
    assert (await refused(send(0, upload_id="a.b"))).code is ErrorCode.INVALID


async def test_a_piece_of_a_tree_may_be_asked_for_twice(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.write_file("/t/file", os.urandom(3 * FILE_CHUNK_BYTES))

    def ask(index: int, **fields: Any) -> Any:
        message = ReadTree(path="/t", download_id="d1", offset=index * FILE_CHUNK_BYTES, **fields)
        return node.ask(sandbox.id, "read_tree", message, TreeChunk)

    pieces = [await ask(index) for index in (0, 1, 0, 3, 2, 3, 4)]
    assert pieces[0].data == pieces[2].data
    assert (pieces[3].end, pieces[5].end, pieces[6].end, pieces[6].data) == (True, True, True, b"")
    whole = b"".join(pieces[index].data for index in (0, 1, 4, 3))
    assert pieces[3].sha256 == hashlib.sha256(whole).hexdigest()
    assert (await refused(ask(50))).code is ErrorCode.INVALID


async def test_errors_of_trees_say_what_and_where(node: NodeForTests, tmp_path: Path) -> None:
    sandbox = await sandbox_on(node, disk_bytes=4 * MIB)
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "file").write_bytes(os.urandom(16 * MIB))
    error = await refused(sandbox.upload(tmp_path / "large", "/work/large"))
    assert (error.code, error.details["path"]) == (ErrorCode.EXHAUSTED, "/work/large/file")
    assert error.details["reason"] == "no_space"
    error = await refused(sandbox.upload(tmp_path / "large", "/root/x", user="1000"))
    assert error.details["reason"] == "permission_denied"
    error = await refused(sandbox.download("/absent", tmp_path / "x"))
    assert error.details["reason"] == "not_found"
    await sandbox.exec("mkdir /t; echo x > /t/secret; chmod 600 /t/secret", check=True)
    error = await refused(sandbox.download("/t", tmp_path / "x", user="1000"))
    assert (error.details["reason"], error.details["path"]) == ("permission_denied", "/t/secret")
    assert not (tmp_path / "x").exists()


async def test_a_watch_is_followed_through_the_sdk(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.make_directory("/w")
    seen: list[tuple[FileChange, str]] = []
    async with sandbox.watch("/w", recursive=True) as changes, asyncio.timeout(20):
        await sandbox.exec("mkdir -p /w/a; sleep 0.1; echo 1 > /w/a/file; rm -r /w", check=True)
        seen = [(event.change, event.path) async for event in changes]
    assert (FileChange.CREATED, "a") in seen
    assert (FileChange.CREATED, "a/file") in seen
    assert (FileChange.DELETED, "a/file") in seen
    with pytest.raises(DsecError) as caught:
        async with sandbox.watch("/absent"):
            pass
    assert caught.value.details["reason"] == "not_found"


async def test_events_are_numbered_replayed_and_bounded(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    await sandbox.make_directory("/w")

    def ask(after: int, **fields: Any) -> Any:
        values: dict[str, Any] = {"watch_id": "w1", "after": after, "wait_s": 5} | fields
        message = WatchFiles(path="/w", **values)
        return node.ask(sandbox.id, "watch_files", message, FileEvents)

    assert (await ask(0, wait_s=0.2)).events == ()
    assert (await ask(0, wait_s=0.05)).events == ()
    await sandbox.exec(": > /w/x", check=True)
    first = await ask(0)
    assert [event.seq for event in first.events] == list(range(1, len(first.events) + 1))
    assert (await ask(0)).events == first.events
    await sandbox.exec(
        "i=0; while [ $i -lt 3000 ]; do : > /w/f; rm /w/f; i=$((i+1)); done", check=True
    )
    late = await ask(0)
    assert late.lost
    assert late.events[0].seq > 1
    assert (await refused(ask(10**9))).code is ErrorCode.INVALID
    assert (await ask(0, close=True)).ended
    error = await refused(ask(late.events[-1].seq))
    assert (error.code, error.details["reason"]) == (ErrorCode.NOT_FOUND, "watch_over")
    for number in range(8):
        await ask(0, watch_id=f"w{number}")
    assert (await refused(ask(0, watch_id="w9"))).code is ErrorCode.EXHAUSTED


async def test_a_waiting_watch_is_told_that_its_sandbox_ends(node: NodeForTests) -> None:
    sandbox = await sandbox_on(node)
    async with sandbox.watch("/tmp") as changes:
        waiting = asyncio.ensure_future(anext(aiter(changes)))
        await sandbox.stat("/tmp")
        await sandbox.delete()
        assert (await refused(waiting)).code in {ErrorCode.EXPIRED, ErrorCode.NOT_FOUND}


async def test_sessions_that_are_given_up_hold_nothing(tmp_path: Path, layers: Path) -> None:
    async with node_for_tests(tmp_path, layers, upload_idle_s=0.2) as node:
        sandbox = await sandbox_on(node)
        await sandbox.write_file("/t/file", os.urandom(4 * MIB))
        before = descriptors()
        for verb, message, kind in (
            ("read_file", ReadFile(path="/t/file", download_id="d"), FileChunk),
            ("read_tree", ReadTree(path="/t", download_id="d"), TreeChunk),
            ("watch_files", WatchFiles(path="/t", watch_id="w"), FileEvents),
            (
                "write_tree",
                WriteTree(path="/in", upload_id="u", data=b"x" * 100, final=False),
                TreeWritten,
            ),
        ):
            await node.ask(sandbox.id, verb, message, kind)
        assert descriptors() > before
        async with asyncio.timeout(10):
            while descriptors() > before:
                await asyncio.sleep(0.05)


async def test_large_files_and_many_files_move_fast(node: NodeForTests, tmp_path: Path) -> None:
    sandbox = await sandbox_on(node, disk_bytes=600 * MIB, memory_bytes=1200 * MIB)
    large, many = tmp_path / "large", tmp_path / "many"
    large.write_bytes(os.urandom(256 * MIB))
    for index in range(10_000):
        path = many / f"d{index // 100}" / f"f{index}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%01024d" % index)
    took = {}
    jobs: tuple[tuple[str, Any], ...] = (
        ("256 MiB up", lambda: sandbox.upload(large, "/large")),
        ("256 MiB down", lambda: sandbox.download("/large", tmp_path / "back")),
        ("10,000 files up", lambda: sandbox.upload(many, "/many")),
        ("10,000 files down", lambda: sandbox.download("/many", tmp_path / "many-back")),
        ("10,000 files removed", lambda: sandbox.remove("/many", recursive=True)),
    )
    for name, work in jobs:
        started_at = time.perf_counter()
        await work()
        took[name] = time.perf_counter() - started_at
        print(f"{name}: {took[name]:.2f} s")  # noqa: T201  for -s
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    assert picture(many) == picture(tmp_path / "many-back")
    assert max(took.values()) < 30
