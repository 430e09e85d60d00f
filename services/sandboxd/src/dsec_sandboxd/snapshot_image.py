"""Packing a snapshot layer into an EROFS image that keeps every attribute, whiteouts included."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.erofs import read_superblock
from dsec_sandboxd.programs import run_program

#: Fixed, so that equal trees give equal images; nothing finds a layer by its file system's UUID.
_UUID: Final = "6473656c-6179-4572-8000-000000000000"
#: After every file's time, so that those stay and equal trees give equal images.
_BUILD_TIME: Final = 1 << 33
#: Gives a program a mount under a path that only it sees.
_WITH_MOUNT: Final = Path(__file__).parent / "native" / "bin" / "with_mount"
_LEAST_RATE_BYTES_PER_S: Final = 20 * 1024 * 1024
_LEAST_S: Final = 60.0
_METADATA_BYTES_PER_INODE: Final = 4096
_SECTOR_BYTES: Final = 512  # of st_blocks, whatever the file system's
_SLACK_BYTES: Final = 16 * 1024 * 1024
#: Fewer bytes of holes are written out, by the faster of the two programs.
_HOLES_MIN_BYTES: Final = 1024 * 1024
#: Tables of chunks, and chunks of which only a part is data.
_SPARSE_SLACK_BYTES: Final = 1024 * 1024 * 1024
_SPARSE_PROGRAM: Final = Path(__file__).parent / "sparse_image.py"


async def pack_image(
    mount_fd: int, image: Path, *, size_bytes: int, inodes: int, hole_bytes: int
) -> int:
    """Write the tree behind ``mount_fd`` as an image, in a process of its own; return its size.

    That takes as long as what is in the tree, however large its files are said to be. The process
    ends with a cancelled caller.

    Args:
        mount_fd: a mount or directory that does not change meanwhile.
        image: the file to make; on failure nothing of it stays. It is on the disk on return.
        size_bytes: how much the tree takes.
        inodes: how many files it has.
        hole_bytes: by how much its files are larger than that; mkfs.erofs would write it out.

    Raises:
        DsecError: ``unsupported`` without mkfs.erofs, ``exhausted`` when the disk is full or the
            image becomes absurdly large, ``timeout``, ``layer_error`` when the program fails.
    """
    sparse = hole_bytes > _HOLES_MIN_BYTES + size_bytes // 4
    draft, tree = image.with_suffix(".part"), image.with_suffix(".tree")
    program = _sparse_program(draft, tree) if sparse else _program(draft, tree)
    slack_bytes = _SPARSE_SLACK_BYTES if sparse else _SLACK_BYTES
    limit_bytes = 2 * size_bytes + inodes * _METADATA_BYTES_PER_INODE + slack_bytes
    deadline_s = _LEAST_S + limit_bytes / _LEAST_RATE_BYTES_PER_S
    try:
        tree.mkdir(exist_ok=True)
        draft.unlink(missing_ok=True)
        confined = [str(_WITH_MOUNT), str(mount_fd), str(tree), str(limit_bytes)]
        status, output = await run_program(
            [*confined, *program],
            descriptors=(mount_fd,),
            environment={"PATH": os.defpath, "LC_ALL": "C", "SOURCE_DATE_EPOCH": str(_BUILD_TIME)},
            deadline_s=deadline_s,
        )
        if status:
            raise _error(output, status)
        await asyncio.to_thread(_publish, draft, image)
    except TimeoutError as error:
        raise DsecError(
            ErrorCode.TIMEOUT, f"the snapshot was not packed within {deadline_s:.0f} s"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            tree.rmdir()
    return _size_of(image)


def disk_bytes(image: Path) -> int:
    """Return how much of the disk an image takes; one of a tree with holes has some itself."""
    return image.stat().st_blocks * _SECTOR_BYTES


def _program(draft: Path, tree: Path) -> list[str]:
    program = shutil.which("mkfs.erofs")
    if program is None:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            "this host has no mkfs.erofs, which packs snapshots; install the package erofs-utils",
        )
    return [program, "-d0", f"-U{_UUID}", "--preserve-mtime", str(draft), str(tree)]


def _sparse_program(draft: Path, tree: Path) -> list[str]:
    arguments = [str(tree), str(draft), str(_BUILD_TIME), _UUID]
    return [sys.executable, "-I", "-S", str(_SPARSE_PROGRAM), *arguments]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _publish(draft: Path, image: Path) -> None:
    read_superblock(draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.chmod(0o400)
    draft.replace(image)
    directory = os.open(image.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _error(output: bytes, status: int) -> DsecError:
    text = output.decode(errors="replace").strip()
    if status == -signal.SIGXFSZ or "[Errno 27]" in text:
        return DsecError(
            ErrorCode.EXHAUSTED, "the image of the snapshot is far larger than what is in it"
        )
    if "No space left" in text:
        return DsecError(
            ErrorCode.EXHAUSTED, "the disk of the node's snapshots is full: delete some"
        )
    last = text.splitlines()[-1][:200] if text else "no output"
    return DsecError(
        ErrorCode.LAYER_ERROR, f"the snapshot's image was not made (status {status}): {last!r}"
    )
