"""From a source on disk to an image in a staging directory: the blocking part of an import."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.layer import ArchiveFormat, CommandDefaults
from dsec_sandboxd.layers.archives import write_tar
from dsec_sandboxd.layers.directories import write_directory
from dsec_sandboxd.layers.erofs import build_image, image_digest, read_superblock
from dsec_sandboxd.layers.image_configuration import make_working_directory
from dsec_sandboxd.layers.leaving_out import LeaveOut, leave_out
from dsec_sandboxd.layers.names import shown
from dsec_sandboxd.layers.oci import find_image, looks_like_image, write_image
from dsec_sandboxd.layers.tree import TreeWriter

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_sandboxd.layers.limits import ImportLimits, ImportWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image that is ready to be published; ``path`` is in the staging directory."""

    path: Path
    digest: str
    size_bytes: int
    entries: int
    source_digest: str
    warnings: tuple[str, ...]
    left_out: int = 0
    defaults: CommandDefaults | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuilder:
    """Builds one image in ``staging``, a private directory that its owner removes.

    Attributes:
        source: a directory or an archive file.
        archive_format: what the archive is; ``None`` looks into it.
        tag: which image of an archive that holds several.
        leaving_out: what does not become part of the layer.
    """

    source: Path
    archive_format: ArchiveFormat | None
    tag: str
    staging: Path
    limits: ImportLimits
    watch: ImportWatch
    leaving_out: LeaveOut = field(default_factory=LeaveOut)

    def build(self) -> BuiltImage:
        """Read the source, check it, and build the image.

        Raises:
            DsecError: ``not_found`` without a source, ``denied`` without root, ``layer_error`` for
                forbidden or damaged content, ``exhausted`` over a limit, ``expired`` on
                cancellation.
        """
        if os.geteuid() != 0:
            raise DsecError(
                ErrorCode.DENIED, "importing a layer sets the owners of files and needs root"
            )
        if not self.source.exists():
            raise not_found(f"there is nothing to import at {shown(str(self.source))}")
        if self.source.is_dir():
            return self._from_directory(self.source)
        if not self.source.is_file():
            raise invalid(f"{shown(str(self.source))} is neither a directory nor a file")
        return self._from_archive()

    def _from_directory(self, directory: Path) -> BuiltImage:
        if self.archive_format is ArchiveFormat.TAR:
            raise invalid(f"{shown(str(directory))} is a directory, not a tar archive")
        if self.archive_format is ArchiveFormat.OCI or looks_like_image(directory, self.limits):
            return self._from_image(directory)
        root = self._new_directory("tree")
        with TreeWriter(root, self.limits) as tree:
            warnings = write_directory(directory, tree, self.watch)
            return self._pack(root, tree, "", warnings)

    def _from_archive(self) -> BuiltImage:
        root = self._new_directory("tree")
        with TreeWriter(root, self.limits) as tree:
            write_tar(self.source, tree, self.watch, self.limits)
            if self.archive_format is ArchiveFormat.OCI or (
                self.archive_format is None and looks_like_image(root, self.limits)
            ):
                return self._from_image(root)
            return self._pack(root, tree, image_digest(self.source, self.watch))

    def _from_image(self, directory: Path) -> BuiltImage:
        image = find_image(directory, self.tag, self.limits, self.watch)
        root = self._new_directory("flat")
        with TreeWriter(root, self.limits) as tree:
            write_image(image, tree, self.watch, self.limits)
            if image.defaults is not None:
                make_working_directory(root, tree, image.defaults.cwd)
            built = self._pack(root, tree, image.digest, image.warnings)
            return replace(built, defaults=image.defaults)

    def _new_directory(self, name: str) -> Path:
        directory = self.staging / name
        directory.mkdir(mode=0o700)
        return directory

    def _pack(
        self, root: Path, tree: TreeWriter, source_digest: str, warnings: tuple[str, ...] = ()
    ) -> BuiltImage:
        left_out = 0
        if self.leaving_out:
            left_out = leave_out(root, tree, self.leaving_out, self.staging, self.watch)
            tree.measure_again()
        tree.finish()
        path = self.staging / "image.erofs"
        # One second after the newest file, so that none is brought forward to it.
        build_image(root, path, tree.latest_mtime_s + 1, self.watch)
        superblock = read_superblock(path)
        return BuiltImage(
            path=path,
            digest=image_digest(path, self.watch),
            size_bytes=path.stat().st_size,
            entries=superblock.inodes,
            source_digest=source_digest,
            warnings=warnings + tree.warnings,
            left_out=left_out,
        )
