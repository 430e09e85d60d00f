"""What is in a store: each project's references, the images behind them, and how both change.

On disk, below one directory that nodes may share::

    store_id                            who this store is, for ever
    store.lock                          held while references or images change
    references_version                  changes with every change of a reference
    images/sha256/<hex>.erofs, .json    an image and what it must be
    references/<project>/<name>@<version>
    staging/                            running imports

An image is published before the reference to it, each by a rename after its bytes are on the disk,
so that a crash leaves the old state or the new one. All of it is blocking code.
"""

from __future__ import annotations

import difflib
import os
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.subjects import validate_project
from dsec_sandboxd.layers.images import ImageFiles, make_durable
from dsec_sandboxd.layers.names import DigestReference, NamedReference, is_digest, parse_reference
from dsec_sandboxd.layers.records import ImageRecord, Layer, ReferenceRecord, read_record
from dsec_sandboxd.layers.staging import (
    exclusive,
    remove_dead,
    staging_directory,
    sync_directory,
    write_durably,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_common.wire.layer import LayerKind
    from dsec_sandboxd.layers.importer import BuiltImage
    from dsec_sandboxd.layers.limits import ImportWatch

#: In an import's staging directory: the digest that it is about to publish.
_INTENT: Final = "intent"
_LOCK_TIMEOUT_S: Final = 30.0
_DIRECTORY_MODE: Final = 0o700
_NAMES_SHOWN_MAX: Final = 20
_LOST_IMAGE: Final = ImageRecord(size_bytes=0, entries=0, created_at=0.0)


class Catalogue:
    """The references and images of one store directory."""

    def __init__(self, directory: Path) -> None:
        self.staging = directory / "staging"
        self.images = ImageFiles(directory / "images" / "sha256")
        self._directory = directory
        self._images_directory = directory / "images" / "sha256"
        self._references = directory / "references"
        self._lock_path = directory / "store.lock"
        self._version_path = directory / "references_version"

    def open(self) -> tuple[str, int]:
        """Make the store if there is none, and remove what crashed imports left.

        Returns:
            The store's id, and how many crashed imports were cleaned up.
        """
        for directory in (self._images_directory, self._references, self.staging):
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
            return self._version_path.read_text()
        except FileNotFoundError:
            return ""

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
        if wanted.version:
            record = read_record(self._path(project, wanted), ReferenceRecord)
            if record is not None:
                return self._layer(project, wanted, record)
        raise self._unknown(project, wanted)

    def list(self, project: str) -> tuple[Layer, ...]:
        """Return the project's layers, sorted by reference.

        One whose image is gone is among them, with ``size_bytes`` and ``entries`` 0.

        Raises:
            DsecError: ``layer_error`` when a reference is damaged.
        """
        validate_project(project)
        layers = []
        for reference in self._known(project):
            record = read_record(self._path(project, reference), ReferenceRecord)
            if record is not None:
                image = self.images.record(record.digest) or _LOST_IMAGE
                layers.append(self._layer(project, reference, record, image))
        return tuple(layers)

    def publish(
        self,
        image: BuiltImage,
        project: str,
        reference: NamedReference,
        kind: LayerKind,
        *,
        created_at: float,
        staging: Path,
        watch: ImportWatch,
        replace: bool,
    ) -> Layer:
        """Make ``reference`` mean ``image``, and return the layer.

        Nothing changes when it means that already. ``staging`` is the import's own directory.

        Raises:
            DsecError: ``conflict`` when it means something else and ``replace`` is false.
        """
        reuse = self.images.holds(image.digest, watch)
        if not reuse:
            make_durable(image.path)  # before the lock: this may take seconds
        write_durably(staging / _INTENT, image.digest.encode(), staging)
        watch.advance("publish", 0, image.size_bytes)
        record = ReferenceRecord(
            digest=image.digest,
            kind=kind,
            created_at=created_at,
            source_digest=image.source_digest,
        )
        path = self._path(project, reference)
        with exclusive(self._lock_path, _LOCK_TIMEOUT_S):
            standing = None if replace else read_record(path, ReferenceRecord)
            if standing is not None and (standing.digest, standing.kind) != (record.digest, kind):
                raise _conflict(project, reference, standing, record)
            self.images.publish(image, created_at, staging, reuse=reuse)
            if standing is None:
                path.parent.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
                sync_directory(self._references)
                write_durably(path, msgspec.json.encode(record), staging)
                self._change_version(staging)
            return self._layer(project, reference, standing or record)

    def remove(self, project: str, reference: str) -> None:
        """Remove a reference; its image stays until :meth:`collect_garbage`.

        Raises:
            DsecError: ``invalid`` for a malformed reference or a digest, ``not_found`` for an
                unknown one.
        """
        validate_project(project)
        named = parse_reference(reference)
        if isinstance(named, DigestReference):
            raise DsecError(
                ErrorCode.INVALID,
                f"{named} may have several names; remove a layer by its name@version",
            )
        path = self._path(project, named)
        with (
            staging_directory(self.staging) as staging,
            exclusive(self._lock_path, _LOCK_TIMEOUT_S),
        ):
            if not named.version or not path.exists():
                raise self._unknown(project, named)
            path.unlink()
            sync_directory(path.parent)
            self._change_version(staging)

    def collect_garbage(self, in_use: frozenset[str]) -> tuple[str, ...]:
        """Delete the images that no project refers to and that are not ``in_use``.

        Raises:
            DsecError: ``layer_error`` when a reference is damaged: then nothing is deleted.
        """
        with exclusive(self._lock_path, _LOCK_TIMEOUT_S):
            return self.images.delete_all_but(self._referenced() | in_use)

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
                return self._layer(project, named, record)
        raise not_found(
            f"the project {project} has no layer with the digest {wanted}; import it, or name one "
            "that `dsec layer list` shows",
            reference=str(wanted),
        )

    def _unknown(self, project: str, wanted: NamedReference) -> DsecError:
        known = self._known(project)
        versions = [reference.version for reference in known if reference.name == wanted.name]
        offered = ", ".join(versions[-_NAMES_SHOWN_MAX:])
        if versions and not wanted.version:
            return DsecError(
                ErrorCode.INVALID,
                f"the layer reference {wanted} has no version; the project {project} has it in: "
                f"{offered}",
                details={"reference": str(wanted)},
            )
        if versions:
            hint = f"it has {wanted.name} in: {offered}"
        else:
            names = {reference.name for reference in known}
            close = difflib.get_close_matches(wanted.name, names, n=3)
            similar = [str(reference) for reference in known if reference.name in close]
            hint = (
                f"did you mean {' or '.join(similar[:_NAMES_SHOWN_MAX])}?"
                if similar
                else "import it first with `dsec layer import`"
            )
        return not_found(
            f"the project {project} has no layer {wanted}; {hint}", reference=str(wanted)
        )

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
            raise DsecError(
                ErrorCode.LAYER_ERROR,
                f"the image of the layer {reference} is gone from the store; import it again",
                details={"reference": str(reference), "digest": record.digest},
            )
        return image

    def _layer(
        self,
        project: str,
        reference: NamedReference,
        record: ReferenceRecord,
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
        )

    def _path(self, project: str, reference: NamedReference) -> Path:
        return self._references / project / str(reference)


def _conflict(
    project: str, reference: NamedReference, standing: ReferenceRecord, wanted: ReferenceRecord
) -> DsecError:
    differs = (
        f"other content ({standing.digest})"
        if standing.digest != wanted.digest
        else f"the kind {standing.kind}"
    )
    return DsecError(
        ErrorCode.CONFLICT,
        f"{reference} exists in the project {project} with {differs}; choose another version, or "
        "replace it",
        details={"reference": str(reference), "digest": standing.digest, "kind": standing.kind},
    )
