"""What the store writes down, and what it hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import CommandDefaults, LayerKind

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Beside an image: what it must be.

    Attributes:
        size_bytes: of the file.
        entries: inodes in it.
        created_at: Unix time in seconds.
        modified_ns: the file's modification time when it was published whole, as the store's file
            system keeps it; 0 when that is not known.
    """

    size_bytes: int
    entries: int
    created_at: float
    modified_ns: int = 0


#: Former meanings that a reference or a tag remembers.
HISTORY_MAX: Final = 32


class Meaning(msgspec.Struct, frozen=True, kw_only=True):
    """What a reference meant, from ``at`` (Unix time in seconds) on.

    For a version that is a digest; for a tag, the version.
    """

    at: float
    meaning: str


class TagRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which version a tag means, since when, and what it meant before, the oldest first."""

    version: str
    moved_at: float
    history: tuple[Meaning, ...] = ()

    def moved(self, version: str, at: float) -> TagRecord:
        """Return the record after a move."""
        if version == self.version:
            return self
        before = Meaning(at=self.moved_at, meaning=self.version)
        return TagRecord(
            version=version, moved_at=at, history=(*self.history, before)[-HISTORY_MAX:]
        )


class ReferenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A project's reference: which image, in which role, and where it came from.

    The role belongs to the reference, since one content may be a workspace here and a toolkit
    there.
    """

    digest: str
    kind: LayerKind
    created_at: float
    source_digest: str = ""
    history: tuple[Meaning, ...] = ()
    defaults: CommandDefaults | None = None

    def means(self, other: ReferenceRecord) -> bool:
        """Tell whether both mean the same image in the same role, with the same defaults."""
        return (self.digest, self.kind, self.defaults) == (
            other.digest,
            other.kind,
            other.defaults,
        )

    def replacing(self, standing: ReferenceRecord | None) -> ReferenceRecord:
        """Return this record with what the reference meant before in its history."""
        if standing is None:
            return self
        history = standing.history
        if standing.digest != self.digest:
            history = (*history, Meaning(at=standing.created_at, meaning=standing.digest))
        return msgspec.structs.replace(self, history=history[-HISTORY_MAX:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as a project sees it.

    Attributes:
        project: whose reference it is.
        name: the reference's name.
        version: its version.
        digest: ``sha256:…`` of the image file.
        kind: the role that it was imported for.
        size_bytes: size of the image file.
        entries: files, directories and links in it; hard links count once.
        created_at: when the reference was made or last replaced, Unix time in seconds.
        source_digest: digest of the archive file or of the image's manifest; empty for a directory.
        image_path: the image file on this node, or where it will be; never written to again.
        tags: the tags that mean this version, sorted.
        history: what the reference meant before, the oldest first.
        defaults: what the container image that it was made of says of commands.
    """

    project: str
    name: str
    version: str
    digest: str
    kind: LayerKind
    size_bytes: int
    entries: int
    created_at: float
    source_digest: str
    image_path: Path
    tags: tuple[str, ...] = ()
    history: tuple[Meaning, ...] = ()
    defaults: CommandDefaults | None = None

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLayer:
    """The outcome of an import.

    Attributes:
        layer: what it is now.
        warnings: what was changed on its way in, in sentences.
        left_out: entries of the source that are no part of it.
    """

    layer: Layer
    warnings: tuple[str, ...] = ()
    left_out: int = 0


def read_record(path: Path, record_type: type[_T]) -> _T | None:
    """Return the record at ``path``, or ``None`` when there is none.

    Raises:
        DsecError: ``layer_error`` when it is not readable as one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=record_type)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DsecError(
            ErrorCode.LAYER_ERROR,
            f"the layer store's record {path.name} is damaged ({error}); import that layer again "
            "with replace",
        ) from None
