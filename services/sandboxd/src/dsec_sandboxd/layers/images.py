"""The image files of a store, by content: published whole, checked before use."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.layers.erofs import image_digest, read_superblock
from dsec_sandboxd.layers.limits import ImportWatch
from dsec_sandboxd.layers.names import DIGEST_PREFIX
from dsec_sandboxd.layers.records import ImageRecord, read_record
from dsec_sandboxd.layers.staging import sync_directory, write_durably

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.importer import BuiltImage

#: Device, inode, size, modification and change time: another file, or another content, differs.
Identity = tuple[int, int, int, int, int]


class ImageFiles:
    """The images in one directory; changes are made under the store's lock.

    Remembers which files' digests this process has checked.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._verified: dict[str, Identity] = {}

    def path(self, digest: str) -> Path:
        """Return where the image with this digest is, or would be."""
        return self._directory / f"{digest.removeprefix(DIGEST_PREFIX)}.erofs"

    def record(self, digest: str) -> ImageRecord | None:
        """Return what the image must be, or ``None`` when it was never completely published.

        Raises:
            DsecError: ``layer_error`` when the record is damaged.
        """
        return read_record(self._record_path(digest), ImageRecord)

    def holds(self, digest: str, watch: ImportWatch) -> bool:
        """Tell whether the image is here and undamaged; reads it when this is not known."""
        path = self.path(digest)
        found = identity_of(path)
        return found is not None and (
            self._verified.get(digest) == found or image_digest(path, watch) == digest
        )

    def is_verified(self, digest: str) -> bool:
        """Tell whether the file is the one that was checked before; costs one ``stat``."""
        found = self._verified.get(digest)
        return found is not None and found == identity_of(self.path(digest))

    def verify(self, digest: str, name: str = "") -> None:
        """Check an image: EROFS, of the recorded size, and either untouched or with its digest.

        Untouched means that the file has the modification time with which it was published: then
        it is not read, so that of a large image only the blocks are fetched that sandboxes read.
        ``name`` is what an error calls it.

        Raises:
            DsecError: ``layer_error`` when it is missing, damaged or replaced.
        """
        path = self.path(digest)
        identity, record = identity_of(path), self.record(digest)
        if identity is None or record is None:
            problem = "it is missing"
        else:
            problem = _problem(path, record, digest)
        if identity is None or problem:
            raise DsecError(
                ErrorCode.LAYER_ERROR,
                f"the image of the layer {name or digest} cannot be used: {problem}; import the "
                "layer again",
                details={"reference": name or digest, "digest": digest},
            )
        self._verified[digest] = identity

    def publish(self, image: BuiltImage, created_at: float, staging: Path, *, reuse: bool) -> None:
        """Put a built image and its record in place; with ``reuse`` only if there is none.

        A standing image is replaced when it is not known to be sound: users of the old file keep
        it, and the new one has the right content.
        """
        path = self.path(image.digest)
        if not (reuse and path.exists()):
            make_durable(image.path)
            image.path.replace(path)
        record = ImageRecord(
            size_bytes=image.size_bytes,
            entries=image.entries,
            created_at=created_at,
            modified_ns=path.stat().st_mtime_ns,
        )
        standing = None
        with suppress(DsecError):  # a damaged record is written anew
            standing = self.record(image.digest) if reuse else None
        if standing is None or standing.modified_ns != record.modified_ns:
            write_durably(self._record_path(image.digest), msgspec.json.encode(record), staging)
        sync_directory(self._directory)
        if (identity := identity_of(path)) is not None:
            self._verified[image.digest] = identity

    def delete(self, digest: str) -> None:
        """Delete an image. Mounts of it live on; on a network file system only on this host."""
        # The record first: an image without one is never used.
        self._record_path(digest).unlink(missing_ok=True)
        self.path(digest).unlink(missing_ok=True)
        self._verified.pop(digest, None)

    def delete_all_but(self, kept: Collection[str]) -> tuple[str, ...]:
        """Delete the images whose digest is not in ``kept``; return their digests, sorted."""
        found = sorted(DIGEST_PREFIX + path.stem for path in self._directory.glob("*.erofs"))
        removed = tuple(digest for digest in found if digest not in kept)
        for digest in removed:
            self.delete(digest)
        return removed

    def _record_path(self, digest: str) -> Path:
        return self.path(digest).with_suffix(".json")


def make_durable(path: Path) -> None:
    """Make a finished file read-only and wait until it is on the disk."""
    path.chmod(0o444)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _problem(path: Path, record: ImageRecord, digest: str) -> str:
    """Return what is wrong with an image, or nothing."""
    try:
        claimed_bytes = read_superblock(path).size_bytes
    except DsecError as error:
        return error.message
    status = path.stat()
    if status.st_size != record.size_bytes or claimed_bytes > status.st_size:
        return f"it has {status.st_size} bytes instead of {record.size_bytes}"
    if status.st_mtime_ns == record.modified_ns:
        return ""
    if image_digest(path, ImportWatch()) != digest:
        return "its content is not what was imported"
    return ""


def identity_of(path: Path) -> Identity | None:
    """Return what tells a file from any other, or ``None`` when there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
