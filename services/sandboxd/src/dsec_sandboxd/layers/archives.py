"""Reading a tar archive into a tree."""

from __future__ import annotations

import math
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Final, cast

from dsec_sandboxd.layers.names import shown
from dsec_sandboxd.layers.streams import CHUNK_BYTES, ArchiveStream, open_stream
from dsec_sandboxd.layers.tree import Attributes, Parts, TreeWriter, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch

_ZERO_BLOCK: Final = bytes(tarfile.BLOCKSIZE)
_MTIME_MAX_S: Final = float(1 << 33)


def write_tar(path: Path, tree: TreeWriter, watch: ImportWatch, limits: ImportLimits) -> None:
    """Write every member of the archive (plain, gzip or zstd) into ``tree``.

    Raises:
        DsecError: ``layer_error`` when the archive is damaged, cut off, or holds what a layer must
            not; ``exhausted`` when it goes over a limit.
    """

    def write(member: tarfile.TarInfo, content: Iterator[bytes]) -> None:
        write_member(tree, tree.parts(member.name), member, content)

    with open_stream(path, watch, limits) as stream:
        visit_members(stream, limits, write)


def visit_members(
    stream: ArchiveStream,
    limits: ImportLimits,
    visit: Callable[[tarfile.TarInfo, Iterator[bytes]], None],
) -> None:
    """Call ``visit`` with each member and its content, in order, in bounded memory.

    Raises:
        DsecError: ``layer_error`` when the archive is damaged or cut off.
    """
    try:
        archive = tarfile.TarFile(
            fileobj=cast("IO[bytes]", stream), mode="r", encoding="utf-8", errors="surrogateescape"
        )
        while (member := _next_member(archive)) is not None:
            stream.begin_content()
            visit(member, _content(archive, member))
            stream.begin_member(limits.header_bytes_max)
    except tarfile.TarError as error:
        raise refuse(f"the archive is not a sound tar file: {error}") from None
    # tarfile takes a damaged header for the end; the real end is a block of zeros.
    if stream.last_read != _ZERO_BLOCK:
        raise refuse(
            f"the archive is damaged or cut off at byte {stream.tell()}: its end mark is missing"
        )
    stream.begin_content()


def _next_member(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        member = archive.next()
    except (ValueError, OverflowError) as error:  # numbers and texts that make no sense
        raise refuse(f"the archive has a damaged header: {error}") from None
    # tarfile would hold every header for ever; the list is missing in typeshed.
    archive.members.clear()  # type: ignore[attr-defined]
    return member


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = archive.extractfile(member) if member.isreg() else None
    if file is None:
        return
    left = member.size
    while left > 0:
        chunk = file.read(min(CHUNK_BYTES, left))
        if not chunk:
            raise refuse(f"the archive is cut off inside {shown(member.name)}")
        left -= len(chunk)
        yield chunk


def _mtime_ns(seconds: float) -> int:
    if not math.isfinite(seconds):
        return 0
    fraction, whole = math.modf(min(max(seconds, 0.0), _MTIME_MAX_S))
    return int(whole) * 1_000_000_000 + int(fraction * 1_000_000_000)


def write_member(
    tree: TreeWriter, parts: Parts, member: tarfile.TarInfo, content: Iterator[bytes]
) -> None:
    """Write one member under ``parts``.

    Raises:
        DsecError: ``layer_error`` for a device node or an unknown type of member.
    """
    attributes = Attributes(
        mode=member.mode & 0o7777,
        uid=member.uid,
        gid=member.gid,
        mtime_ns=_mtime_ns(member.mtime),
    )
    if member.isdir():
        tree.add_directory(parts, attributes)
    elif member.isreg():
        tree.add_file(parts, attributes, content)
    elif member.issym():
        tree.add_symbolic_link(parts, attributes, member.linkname)
    elif member.islnk():
        tree.add_hard_link(parts, tree.parts(member.linkname))
    elif member.isfifo():
        tree.add_fifo(parts, attributes)
    elif member.isdev():
        raise refuse(
            f"{shown(member.name)} is a device node; leave /dev out of the archive, a sandbox "
            "gets its own"
        )
    else:
        raise refuse(f"{shown(member.name)} is a tar member of an unknown type {member.type!r}")
