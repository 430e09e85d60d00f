"""A directory from a sandbox that means harm."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsec.archive import TreeCounter, tar_pieces
from dsec.received_tree import received_tree
from dsec_common.errors import DsecError, ErrorCode


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


async def receive(local: Path, data: bytes, piece_bytes: int = 1000) -> int:
    async with received_tree(local) as tree:
        for at in range(0, len(data), piece_bytes):
            await tree.put(data[at : at + piece_bytes])
        return await tree.take_place()


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


async def test_what_was_sent_is_there(tmp_path: Path) -> None:
    data = archive(
        (member("d", tarfile.DIRTYPE, mode=0o500), b""),
        (member("d/file", mode=0o6755, mtime=1_000_000), b"x" * 5000),
        (member("late/parent/file"), b""),
        (member("link", tarfile.SYMTYPE, linkname="/etc/passwd"), b""),
    )
    assert await receive(tmp_path / "out", data) == 2
    out = tmp_path / "out"
    assert names(out) == ["d", "d/file", "late", "late/parent", "late/parent/file", "link"]
    assert (out / "d").stat().st_mode & 0o7777 == 0o500
    assert (out / "d/file").stat().st_mode & 0o7777 == 0o755
    assert (out / "d/file").stat().st_mtime == 1_000_000
    assert names(tmp_path)[0] == "out"


@pytest.mark.parametrize(
    "data",
    [
        archive((member("../escape"), b"x")),
        archive((member("/etc/escape"), b"x")),
        archive((member("a/../../escape"), b"x")),
        archive((member("a", tarfile.SYMTYPE, linkname=".."), b""), (member("a/escape"), b"x")),
        archive((member("a"), b"x"), (member("a/escape"), b"x")),
        archive((member("a", tarfile.SYMTYPE, linkname="../escape"), b""), (member("a"), b"x")),
        archive((member("a", tarfile.LNKTYPE, linkname="/etc/passwd"), b"")),
        archive((member("a", tarfile.CHRTYPE), b"")),
        archive((member("a", tarfile.FIFOTYPE), b"")),
        archive((member("a"), b"x" * 5000))[:2000],
        archive((member("a"), b"x" * 5000))[:300],
        b"\xff" * 5000,
    ],
)
async def test_an_archive_that_cannot_be_meant_changes_nothing(tmp_path: Path, data: bytes) -> None:
    target = tmp_path / "out"
    with pytest.raises(DsecError) as caught:
        await receive(target, data)
    assert caught.value.code is ErrorCode.INVALID
    assert names(tmp_path) == []


async def test_a_stream_that_stops_midway_leaves_nothing(tmp_path: Path) -> None:
    async def stop() -> None:
        async with received_tree(tmp_path / "out") as tree:
            await tree.put(archive((member("a"), b"x" * 5000))[:2000])
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        await stop()
    assert names(tmp_path) == []


async def test_a_directory_is_sent_without_what_means_nothing_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "file").write_text("x")
    os.mkfifo(source / "pipe")
    (source / "link").symlink_to("nowhere")
    count = TreeCounter(plain=True)
    data = b"".join([piece async for piece in tar_pieces(source, 1000, count)])
    assert count.files == 1
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["d", "d/file", "link"]
