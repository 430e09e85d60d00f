from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from dsec.archive import PlainFile, file_pieces, tar_pieces, tree_size_bytes
from dsec_common.errors import DsecError

PIECE = 4096


async def _archive(directory: Path) -> bytes:
    return b"".join([piece async for piece in tar_pieces(directory, PIECE)])


def _tree(root: Path) -> None:
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_bytes(b"#!/bin/sh\n" + os.urandom(20_000))
    (root / "bin/tool").chmod(0o755)
    os.link(root / "bin/tool", root / "bin/same")
    (root / "etc").mkdir(mode=0o700)
    (root / "etc/absolute").symlink_to("/bin/tool")
    (root / "empty").write_bytes(b"")
    (root / ("long-" + "n" * 150)).write_text("ü")


async def test_a_tree_arrives_as_it_was(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    _tree(root)
    with tarfile.open(fileobj=io.BytesIO(await _archive(root))) as archive:
        archive.extractall(copy, filter="fully_trusted")  # noqa: S202  made by the line above
    assert (copy / "bin/tool").read_bytes() == (root / "bin/tool").read_bytes()
    assert (copy / "bin/tool").stat().st_mode == (root / "bin/tool").stat().st_mode
    assert (copy / "bin/same").stat().st_ino == (copy / "bin/tool").stat().st_ino
    assert (copy / "etc/absolute").readlink() == Path("/bin/tool")
    assert (copy / "etc").stat().st_mode == (root / "etc").stat().st_mode
    assert (copy / "bin/tool").stat().st_mtime == (root / "bin/tool").stat().st_mtime
    assert (copy / ("long-" + "n" * 150)).read_text() == "ü"


async def test_the_same_tree_is_the_same_stream(tmp_path: Path) -> None:
    _tree(tmp_path / "root")
    assert await _archive(tmp_path / "root") == await _archive(tmp_path / "root")


async def test_an_owner_that_no_sandbox_has_becomes_root_and_names_are_forgotten(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").write_text("x")
    (tmp_path / "far").write_text("x")
    if os.geteuid() == 0:
        os.chown(tmp_path / "mine", 1000, 1000)
        os.chown(tmp_path / "far", 70_000, 70_000)
    with tarfile.open(fileobj=io.BytesIO(await _archive(tmp_path))) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert members["far"].uid == (0 if os.geteuid() == 0 else os.geteuid())
    assert members["mine"].uid == (1000 if os.geteuid() == 0 else os.geteuid())
    assert {member.uname for member in members.values()} == {""}


async def test_sockets_are_left_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert await _archive(tmp_path) == await _archive_of_nothing(tmp_path)


async def _archive_of_nothing(tmp_path: Path) -> bytes:
    (tmp_path.parent / "nothing").mkdir(exist_ok=True)
    return await _archive(tmp_path.parent / "nothing")


async def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DsecError, match="is not a directory"):
        await _archive(tmp_path / "missing")


async def test_leaving_early_ends_the_reading_thread(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(PIECE * 200))
    before = threading.active_count()
    async with aclosing(tar_pieces(tmp_path, PIECE)) as pieces:
        async for _ in pieces:
            break
    await asyncio.get_running_loop().shutdown_default_executor()
    assert threading.active_count() <= before


def test_the_size_of_a_tree_is_that_of_its_regular_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(bytes(1000))
    (tmp_path / "c").write_bytes(bytes(24))
    (tmp_path / "d").symlink_to("a/b")
    assert tree_size_bytes(tmp_path) == 1024


async def test_named_files_are_a_stream_that_depends_on_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w" * 10_000)
    files = [
        PlainFile("opt/a/run", b"#!/bin/sh\n", executable=True),
        PlainFile("opt/a/weights", tmp_path / "weights"),
    ]
    first = b"".join([piece async for piece in file_pieces(files, PIECE)])
    os.utime(tmp_path / "weights", (5, 5))
    (tmp_path / "weights").chmod(0o600)
    assert b"".join([piece async for piece in file_pieces(files, PIECE)]) == first
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        told = [(it.name, oct(it.mode), it.size, it.uid, it.mtime) for it in archive]
    assert told == [
        ("opt", "0o755", 0, 0, 0),
        ("opt/a", "0o755", 0, 0, 0),
        ("opt/a/run", "0o755", 10, 0, 0),
        ("opt/a/weights", "0o644", 10_000, 0, 0),
    ]
    with pytest.raises(DsecError, match=r"cannot read .*nowhere"):
        async for _ in file_pieces([PlainFile("x", tmp_path / "nowhere")], PIECE):
            pass
