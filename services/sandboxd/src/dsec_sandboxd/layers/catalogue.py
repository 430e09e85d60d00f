"""What is in a store: each project's references, the images behind them, and how both change.

On disk, below one directory that nodes may share::

    store_id                            who this store is, for ever
    store.lock                          held while references or images change
    references_version                  changes with every change of a reference
    images/sha256/<hex>.erofs, .json    an image and what it must be
    references/<project>/<name>@<version>
    tags/<project>/<name>:<tag>         which version a tag means
    holds/<node>.json                   which images a node uses
    staging/                            running imports

An image is published before the reference to it, each by a rename after its bytes are on the disk,
so that a crash leaves the old state or the new one. All of it is blocking code.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.errors import DsecError
from dsec_common.subjects import validate_project
from dsec_sandboxd.layers import refusals
from dsec_sandboxd.layers.backend import Publication
from dsec_sandboxd.layers.hold_files import HoldFiles
from dsec_sandboxd.layers.images import ImageFiles, make_durable
from dsec_sandboxd.layers.names import (
    DigestReference,
    NamedReference,
    TagReference,
    is_digest,
    parse_reference,
)
from dsec_sandboxd.layers.records import ImageRecord, Layer, ReferenceRecord, read_record
from dsec_sandboxd.layers.staging import (
    exclusive,
    remove_dead,
    staging_directory,
    sync_directory,
    write_durably,
)
from dsec_sandboxd.layers.tag_files import TagFiles

if TYPE_CHECKING:
    from pathlib import Path

#: In an import's staging directory: the digest that it is about to publish.
_INTENT: Final = "intent"
_LOCK_TIMEOUT_S: Final = 30.0
_DIRECTORY_MODE: Final = 0o700
_LOST_IMAGE: Final = ImageRecord(size_bytes=0, entries=0, created_at=0.0)


class Catalogue:
    """The references and images of one store directory."""

    def __init__(self, directory: Path) -> None:
        self.staging = directory / "staging"
        self.images = ImageFiles(directory / "images" / "sha256")
        self._directory = directory
        self._images_directory = directory / "images" / "sha256"
        self._references = directory / "references"
        self._tags_directory = directory / "tags"
        self._tags = TagFiles(self._tags_directory)
        self._holds_directory = directory / "holds"
        self._holds = HoldFiles(self._holds_directory)
        self._lock_path = directory / "store.lock"
        self._version_path = directory / "references_version"

    def open(self) -> tuple[str, int]:
        """Make the store if there is none, and remove what crashed imports left.

        Returns:
            The store's id, and how many crashed imports were cleaned up.
        """
        for directory in (
            self._images_directory,
            self._references,
            self._tags_directory,
            self._holds_directory,
            self.staging,
        ):
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        identity = self._directory / "store_id"
        if not identity.exists():
            with staging_directory(self.staging) as staging:
                draft = staging / "store_id"
                write_durably(draft, str(uuid.uuid4()).encode(), staging)
                # Of several nodes that come first, one wins, and all read what it wrote.
                with suppress(FileExistsError):
                    os.link(draft, identity)
            sync_directory(self._directory)
        return identity.read_text(), remove_dead(self.staging, self._undo_publication)

    @property
    def references_version(self) -> str:
        """A token that is another one after every change of any reference; empty at first."""
        try:
            descriptor = os.open(self._version_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        try:
            return os.read(descriptor, 64).decode()
        finally:
            os.close(descriptor)

    def find(self, project: str, reference: str) -> Layer:
        """Return the layer that ``reference`` means in ``project``.

        Raises:
            DsecError: ``invalid`` for a malformed reference or one without a version, ``not_found``
                for an unknown one, ``layer_error`` when the image is gone.
        """
        validate_project(project)
        wanted = parse_reference(reference)
        if isinstance(wanted, DigestReference):
            return self._find_digest(project, wanted)
        named = self._version_meant(project, wanted)
        if named is not None and named.version:
            record = read_record(self._path(project, named), ReferenceRecord)
            if record is not None:
                tags = self._tags.by_version(project, named.name)
                return self._layer(project, named, record, tags)
        raise self._unknown(project, wanted)

    def _version_meant(
        self, project: str, wanted: NamedReference | TagReference
    ) -> NamedReference | None:
        if isinstance(wanted, NamedReference):
            return wanted
        record = self._tags.read(project, wanted)
        return NamedReference(wanted.name, record.version) if record else None

    def list(self, project: str) -> tuple[Layer, ...]:
        """Return the project's layers, sorted by reference.

        One whose image is gone is among them, with ``size_bytes`` and ``entries`` 0.

        Raises:
            DsecError: ``layer_error`` when a reference is damaged.
        """
        validate_project(project)
        layers = []
        tags = self._tags.by_version(project)
        for reference in self._known(project):
            record = read_record(self._path(project, reference), ReferenceRecord)
            if record is not None:
                image = self.images.record(record.digest) or _LOST_IMAGE
                layers.append(self._layer(project, reference, record, tags, image))
        return tuple(layers)

    def publish(self, publication: Publication) -> Layer:
        """Make a reference mean an image, and return the layer.

        Nothing changes when it means that already.

        Raises:
            DsecError: ``conflict`` when it means something else and ``replace`` is false.
        """
        image, staging = publication.image, publication.staging
        project, reference = publication.project, publication.reference
        reuse = self.images.holds(image.digest, publication.watch)
        if not reuse:
            make_durable(image.path)  # before the lock: this may take seconds
        write_durably(staging / _INTENT, image.digest.encode(), staging)
        publication.watch.advance("publish", 0, image.size_bytes)
        record = ReferenceRecord(
            digest=image.digest,
            kind=publication.kind,
            created_at=publication.created_at,
            source_digest=image.source_digest,
            defaults=image.defaults,
        )
        path = self._path(project, reference)
        with exclusive(self._lock_path, _LOCK_TIMEOUT_S):
            standing = _standing(path, replace=publication.replace)
            same = standing is not None and standing.means(record)
            if standing is not None and not same and not publication.replace:
                raise refusals.conflict(project, reference, standing, record)
            self.images.publish(image, publication.created_at, staging, reuse=reuse)
            if standing is None or not same:
                record = record.replacing(standing)
                path.parent.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
                sync_directory(self._references)
                write_durably(path, msgspec.json.encode(record), staging)
                self._change_version(staging)
                standing = record
            return self._layer(
                project, reference, standing, self._tags.by_version(project, reference.name)
            )

    def tag(self, tag: TagReference, project: str, version: str, at: float) -> Layer:
        """Let a tag mean a version from now on, and return that layer.

        Raises:
            DsecError: ``not_found`` for an unknown version.
        """
        validate_project(project)
        named = NamedReference(tag.name, version)
        with (
            staging_directory(self.staging) as staging,
            exclusive(self._lock_path, _LOCK_TIMEOUT_S),
        ):
            if not version or not self._path(project, named).exists():
                raise self._unknown(project, named)
            self._tags.move(project, tag, version, at, staging)
            self._change_version(staging)
        return self.find(project, str(named))

    def remove(self, project: str, reference: str) -> None:
        """Remove a reference; its image stays until :meth:`collect_garbage`.

        Raises:
            DsecError: ``invalid`` for a malformed reference or a digest, ``not_found`` for an
                unknown one.
        """
        validate_project(project)
        named = parse_reference(reference)
        if isinstance(named, DigestReference):
            raise refusals.several_names(named)
        with (
            staging_directory(self.staging) as staging,
            exclusive(self._lock_path, _LOCK_TIMEOUT_S),
        ):
            if isinstance(named, TagReference):
                if not self._tags.remove(project, named):
                    raise self._unknown(project, named)
            else:
                path = self._path(project, named)
                if not named.version or not path.exists():
                    raise self._unknown(project, named)
                tags = self._tags.by_version(project, named.name).get((named.name, named.version))
                if tags:
                    raise refusals.tagged(named, tags)
                path.unlink()
                sync_directory(path.parent)
            self._change_version(staging)

    def declare(self, holder: str, digests: Collection[str], now: float) -> None:
        """Tell all nodes which images ``holder`` uses, instead of what it used before."""
        with (
            staging_directory(self.staging) as staging,
            exclusive(self._lock_path, _LOCK_TIMEOUT_S),
        ):
            self._holds.write(holder, digests, now, staging)

    def collect_garbage(self, in_use: frozenset[str], now: float) -> tuple[str, ...]:
        """Delete the images that no project refers to, no node holds, and that are not ``in_use``.

        Raises:
            DsecError: ``layer_error`` when a reference or a hold is damaged: then nothing is
                deleted.
        """
        with exclusive(self._lock_path, _LOCK_TIMEOUT_S):
            return self.images.delete_all_but(self._referenced() | in_use | self._holds.held(now))

    def _undo_publication(self, staging: Path) -> None:
        """Delete the image that a crashed import may have published without its reference."""
        try:
            digest = (staging / _INTENT).read_text()
        except FileNotFoundError:
            return
        # With a damaged reference nobody knows what is needed: the image stays, the store opens.
        with exclusive(self._lock_path, _LOCK_TIMEOUT_S), suppress(DsecError):
            if is_digest(digest) and digest not in self._referenced():
                self.images.delete(digest)

    def _change_version(self, staging: Path) -> None:
        write_durably(self._version_path, uuid.uuid4().hex.encode(), staging)

    def _referenced(self) -> set[str]:
        records = (read_record(path, ReferenceRecord) for path in self._references.glob("*/*"))
        return {record.digest for record in records if record is not None}

    def _find_digest(self, project: str, wanted: DigestReference) -> Layer:
        for named in self._known(project):
            record = read_record(self._path(project, named), ReferenceRecord)
            if record is not None and record.digest == wanted.digest:
                return self._layer(
                    project, named, record, self._tags.by_version(project, named.name)
                )
        raise refusals.unknown(project, wanted, ())

    def _unknown(self, project: str, wanted: NamedReference | TagReference) -> DsecError:
        by_version = self._tags.by_version(project, wanted.name)
        tags = [tag for tags in by_version.values() for tag in tags]
        return refusals.unknown(project, wanted, self._known(project), tags)

    def _known(self, project: str) -> tuple[NamedReference, ...]:
        try:
            files = sorted(path.name for path in (self._references / project).iterdir())
        except FileNotFoundError:
            return ()
        split = (file.partition("@") for file in files)
        return tuple(NamedReference(name, version) for name, _, version in split if version)

    def _image(self, reference: NamedReference, record: ReferenceRecord) -> ImageRecord:
        image = self.images.record(record.digest)
        if image is None:
            raise refusals.lost_image(reference, record.digest)
        return image

    def _layer(
        self,
        project: str,
        reference: NamedReference,
        record: ReferenceRecord,
        tags: dict[tuple[str, str], tuple[str, ...]],
        image: ImageRecord | None = None,
    ) -> Layer:
        image = image or self._image(reference, record)
        return Layer(
            project=project,
            name=reference.name,
            version=reference.version,
            digest=record.digest,
            kind=record.kind,
            size_bytes=image.size_bytes,
            entries=image.entries,
            created_at=record.created_at,
            source_digest=record.source_digest,
            image_path=self.images.path(record.digest),
            tags=tags.get((reference.name, reference.version), ()),
            history=record.history,
            defaults=record.defaults,
        )

    def _path(self, project: str, reference: NamedReference) -> Path:
        return self._references / project / str(reference)


def _standing(path: Path, *, replace: bool) -> ReferenceRecord | None:
    """Return what a reference means; a damaged one means nothing where it is to be replaced."""
    try:
        return read_record(path, ReferenceRecord)
    except DsecError:
        if not replace:
            raise
        return None
