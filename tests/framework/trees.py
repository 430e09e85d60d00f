"""Tar archives in and out of a sandbox of the kernel's tests."""

from __future__ import annotations

import io
import tarfile
from typing import Any

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.file_ports import TreeCount
from kernel_world import World


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


async def unpack(world: World, path: str, data: bytes, **options: Any) -> TreeCount:
    with await world.kernel.unpack_tree("a", path, **options) as sink:
        for at in range(0, len(data), 128 << 10):
            await sink.send(data[at : at + (128 << 10)])
        return await sink.finish()


async def pack(world: World, path: str, **options: Any) -> bytes:
    pieces = []
    with await world.kernel.pack_tree("a", path, **options) as source:
        while piece := await source.receive():
            pieces.append(piece)
    return b"".join(pieces)


def members_of(data: bytes) -> dict[str, tuple[bytes, int, bytes | str]]:
    found: dict[str, tuple[bytes, int, bytes | str]] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            content = tar.extractfile(info) if info.isreg() else None
            found[info.name] = (
                info.type,
                info.mode,
                content.read() if content else info.linkname,
            )
    return found


async def tolerant(work: Any) -> None:
    """Let an attack have its victim's request fail, but only in a way that says why."""
    try:
        await work
    except DsecError as error:
        if error.code in {ErrorCode.INTERNAL, ErrorCode.TIMEOUT}:
            raise
