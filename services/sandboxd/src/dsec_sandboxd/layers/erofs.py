"""Building EROFS images and telling a sound one from another file."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.names import DIGEST_PREFIX, shown

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.limits import ImportWatch

#: Fixed, so that equal trees give equal images; nothing finds a layer by its file system's UUID.
_UUID: Final = "6473656c-6179-4572-8000-000000000000"
_MAGIC: Final = 0xE0F5E1E2
_SUPERBLOCK_OFFSET: Final = 1024
#: magic, checksum, compatible features, block size bits, slots, root, inodes, time, ns, blocks
#: (fs/erofs/erofs_fs.h in the kernel).
_SUPERBLOCK: Final = struct.Struct("<IIIBBHQQII")
_HASH_CHUNK_BYTES: Final = 4 << 20
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Superblock:
    """What an image says of itself."""

    inodes: int
    size_bytes: int


def read_superblock(image: Path) -> Superblock:
    """Return the superblock's figures.

    Raises:
        DsecError: ``layer_error`` when the file is absent, too short or not EROFS.
    """
    try:
        with image.open("rb") as file:
            file.seek(_SUPERBLOCK_OFFSET)
            head = file.read(_SUPERBLOCK.size)
    except OSError as error:
        raise DsecError(
            ErrorCode.LAYER_ERROR, f"the file {image.name} cannot be read: {error.strerror}"
        ) from None
    if len(head) == _SUPERBLOCK.size:
        magic, _, _, block_bits, _, _, inodes, _, _, blocks = _SUPERBLOCK.unpack(head)
        if magic == _MAGIC:
            return Superblock(inodes=inodes, size_bytes=blocks << block_bits)
    raise DsecError(ErrorCode.LAYER_ERROR, f"the file {image.name} is not an EROFS image")


def image_digest(image: Path, watch: ImportWatch) -> str:
    """Return ``sha256:…`` of a file's content."""
    digest = hashlib.sha256()
    total = image.stat().st_size
    with image.open("rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            watch.advance("hash", file.tell(), total)
    return DIGEST_PREFIX + digest.hexdigest()


def build_image(tree: Path, image: Path, build_time_s: int, watch: ImportWatch) -> None:
    """Write ``tree`` as an uncompressed EROFS image.

    Equal trees give equal bytes, on any host with the same version of mkfs.erofs. Files keep their
    modification times. Nothing is compressed, so that pages are shared by all sandboxes of a node
    and mapped without a copy.

    Args:
        tree: the directory to pack.
        image: the file to make.
        build_time_s: the image's own time; it must not be before any file's, which would be
            brought forward to it.
        watch: is told the image's size so far.

    Raises:
        DsecError: ``unsupported`` without mkfs.erofs, ``exhausted`` when the disk is full,
            ``layer_error`` when mkfs.erofs fails otherwise.
    """
    program = shutil.which("mkfs.erofs")
    if program is None:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            "this host has no mkfs.erofs, which builds layers; install the package erofs-utils",
        )
    command = [program, "-d0", "-x-1", f"-U{_UUID}", "--preserve-mtime", str(image), str(tree)]
    # Clamping to an epoch after every file's time keeps those and fixes the image's own.
    environment = {"SOURCE_DATE_EPOCH": str(build_time_s), "LC_ALL": "C", "PATH": os.defpath}
    with tempfile.TemporaryFile(dir=image.parent) as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(process, image, watch)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            output.seek(0)
            raise _build_error(output.read(4096), process.returncode)


def _wait(process: subprocess.Popen[bytes], image: Path, watch: ImportWatch) -> None:
    while True:
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            watch.advance("build", image.stat().st_size if image.exists() else 0)
        else:
            return


def _build_error(output: bytes, status: int) -> DsecError:
    text = output.decode(errors="replace").strip()
    if "No space left" in text:
        return DsecError(
            ErrorCode.EXHAUSTED,
            "the disk of the layer store is full; remove layers, or give the store more room",
        )
    last = text.splitlines()[-1] if text else "no output"
    return DsecError(
        ErrorCode.LAYER_ERROR, f"mkfs.erofs failed with status {status}: {shown(last)}"
    )
